"""``edgespec chat``: its options. The chat is imported when it begins."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.cli.options import (
    AnswerFlags,
    JsonOption,
    MaxTokensOption,
    NoThinkOption,
    SeededFlags,
    SystemOption,
    expanded,
    state_of,
)


@expanded
def chat(
    ctx: typer.Context,
    *,
    flags: AnswerFlags,
    system: SystemOption = None,
    continued: Annotated[bool, typer.Option("--continue", help="Continue the last conversation.")] = False,
    max_tokens: MaxTokensOption = None,
    drawn: SeededFlags,
    no_think: NoThinkOption = False,
    json: JsonOption = False,
) -> None:
    """Chat with a model. Reads one prompt a line if stdin is not a terminal.

    On a terminal, answers are sampled with the settings that the model's file or its makers recommend. From a pipe
    and with --json, decoding is greedy.
    """
    from edgespec.cli.chat.chat import run_chat

    run_chat(
        state_of(ctx),
        flags,
        drawn,
        system=system,
        continued=continued,
        max_tokens=max_tokens,
        think=not no_think,
        json=json,
    )
