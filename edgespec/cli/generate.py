"""``edgespec generate``."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from edgespec.cli.answer_form import naming_options
from edgespec.cli.options import (
    AnswerFlags,
    FormFlags,
    JsonOption,
    MaxTokensOption,
    ModelOption,
    NoThinkOption,
    SeededFlags,
    SystemOption,
    check_thinking,
    expanded,
    open_engine,
    state_of,
    with_learned_text,
)
from edgespec.cli.parser import rare
from edgespec.cli.terminal.output import State, note, read_input, stderr_columns
from edgespec.errors import EdgespecError, InvalidRequestError
from edgespec.files.home import home


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flags(AnswerFlags):
    """What gives an answer; an option can name the model, as one argument alone is the prompt."""

    target: ModelOption = None


@expanded
def generate(
    ctx: typer.Context,
    *,
    flags: _Flags,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; piped text is put before it, or is the prompt."),
    ] = None,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = None,
    drawn: SeededFlags,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this text.")
    ] = None,
    raw: Annotated[
        bool,
        rare("--raw", help="Continue the prompt's text, without a chat template."),
    ] = False,
    asked: FormFlags,
    no_think: NoThinkOption = False,
    json: JsonOption = False,
) -> None:
    """Write one answer to stdout.

    One argument alone is the prompt. Text from a pipe is read to its end. In a shell loop that reads a file, add
    `</dev/null`, or the first call reads the rest of the file.
    """
    from edgespec.cli.terminal.status import StatusLine, follow_answer, print_done
    from edgespec.decoding.sampling import Sampling
    from edgespec.engine.request_checks import check_request

    state = state_of(ctx)
    if prompt is None:
        prompt, flags = flags.model, replace(flags, model=None)
    piped = prompt is None
    if prompt is None:
        prompt = "" if sys.stdin.isatty() else "-"
    if raw and system is not None:
        raise InvalidRequestError("--raw has no system message", hint="leave out --raw or --system")
    if raw and no_think:
        raise InvalidRequestError("--raw has no thinking to leave out", hint="leave out --raw or --no-think")
    chosen = flags.resolve()
    sampling = drawn.over(Sampling(rule=chosen.rule))
    # Wrong requests fail before stdin is read and a model is loaded.
    if prompt != "-" and not piped:
        check_request(prompt, stop=stop or (), raw=raw)
    if prompt == "-" and asked.reads_stdin:
        raise InvalidRequestError(
            "stdin cannot be both the prompt and --json-schema", hint="put the schema into a file, and name the file"
        )
    form = asked.form(lambda: read_input(state.interrupts))
    text = prompt if asked.reads_stdin else _with_input(prompt, state)
    if piped and not text.strip():
        raise InvalidRequestError("PROMPT is missing", hint='for example: edgespec generate "Name a bird."')
    if not piped and prompt not in ("-", text) and flags.named is None and _names_model(prompt):
        raise InvalidRequestError(
            f"{prompt} is a model, and one argument alone is the prompt",
            hint=f"`edgespec generate {shlex.quote(prompt)} -` asks it; with `-m MODEL` the argument is the prompt",
        )
    check_request(text, stop=stop or (), raw=raw)
    with (
        open_engine(with_learned_text(chosen), state) as engine,
        engine.session(system=system, think=not no_think) as session,
    ):
        check_thinking(engine, think=not no_think)
        with state.interrupts.during(session.cancel):
            with naming_options():
                generation = session.generate(
                    text,
                    max_tokens=max_tokens,
                    sampling=sampling,
                    stop=stop or (),
                    raw=raw,
                    heal=raw,
                    **({} if form is None else form.arguments),
                )
            done = follow_answer(generation, as_json=json, markdown=not raw)
    print_done(done, StatusLine(reasons=not flags.plain, verbose=state.verbose, quiet=state.quiet), as_json=json)
    state.answered = json
    if done.finish_reason == "cancelled":
        raise typer.Exit(130)


def _names_model(text: str) -> bool:
    """Whether a prompt of one word is the name of a model: of the catalogue, of another program, or of one here."""
    from edgespec.store.catalogue import catalogue
    from edgespec.store.locate import Locator
    from edgespec.store.store import Store

    if len(text.split()) != 1:
        return False
    if text in catalogue() or text.startswith(("hf:", "ollama:")):
        return True
    with contextlib.suppress(EdgespecError, OSError):
        Locator(store=Store(home())).locate(text)
        return True
    return False


def _with_input(prompt: str, state: State) -> str:
    """The piped text followed by the prompt; for ``-`` only the piped text."""
    if prompt == "-":
        return read_input(state.interrupts)
    piped = "" if sys.stdin.isatty() else read_input(state.interrupts).strip("\n")
    if not piped.strip():
        return prompt
    if stderr_columns() is not None and not state.json:  # a user who piped by mistake learns that stdin was read
        note(f"read {len(piped)} characters from stdin", dim=True)
    return f"{piped}\n\n{prompt}"
