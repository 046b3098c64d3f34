"""``edgespec generate``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from edgespec.cli import suggestions
from edgespec.cli.answer_form import naming_options
from edgespec.cli.options import (
    DecodingFlags,
    FormFlags,
    JsonOption,
    NoThinkOption,
    SeededFlags,
    check_thinking,
    expanded,
    open_engine,
    state_of,
    with_learned_text,
)
from edgespec.cli.terminal.output import State, note, read_input, stderr_columns
from edgespec.cli.terminal.status import StatusLine, follow_answer, print_done
from edgespec.decoding.sampling import Sampling
from edgespec.engine.request_checks import check_request
from edgespec.errors import InvalidRequestError


@expanded
def generate(
    ctx: typer.Context,
    *,
    prompt: Annotated[
        str,
        typer.Argument(metavar="PROMPT|-", help="The prompt; piped text is put before it; -: only the piped text."),
    ],
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")] = None,
    drawn: SeededFlags,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt's text, without a chat template.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without guesses; the text is the same.")] = False,
    rule: Annotated[
        str | None,
        typer.Option(
            "--rule",
            metavar="keyed|rejection",
            help="keyed: same text as without guesses; rejection: same probabilities only.",
            autocompletion=suggestions.one_of("keyed", "rejection"),
        ),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End the answer before this text.")] = None,
    asked: FormFlags,
    flags: DecodingFlags,
    no_think: NoThinkOption = False,
    json: JsonOption = False,
) -> None:
    """Write one answer to stdout.

    Text from a pipe is read to its end and put before the prompt. In a shell loop that reads a file, add
    `</dev/null`, or the first call reads the rest of the file.
    """
    state = state_of(ctx)
    chosen = flags.resolve(rule=rule)
    sampling = drawn.over(Sampling(rule=chosen.rule))
    # Wrong requests fail before stdin is read and a model is loaded.
    if prompt != "-":
        check_request(prompt, stop=stop or (), raw=raw)
    if prompt == "-" and asked.reads_stdin:
        raise InvalidRequestError(
            "stdin cannot be both the prompt and --json-schema", hint="put the schema into a file, and name the file"
        )
    form = asked.form(lambda: read_input(state.interrupts))
    text = prompt if asked.reads_stdin else _with_input(prompt, state)
    check_request(text, stop=stop or (), raw=raw)
    with open_engine(with_learned_text(chosen), state) as engine, engine.session(think=not no_think) as session:
        check_thinking(engine, think=not no_think)
        with state.interrupts.during(session.cancel):
            with naming_options():
                generation = session.generate(
                    text,
                    max_tokens=max_tokens,
                    sampling=sampling,
                    stop=stop or (),
                    raw=raw,
                    depth=0 if plain else None,
                    **({} if form is None else form.arguments),
                )
            done = follow_answer(generation, as_json=json, markdown=not raw)
    print_done(done, StatusLine(reasons=not plain, verbose=state.verbose, quiet=state.quiet), as_json=json)
    state.answered = json
    if done.finish_reason == "cancelled":
        raise typer.Exit(130)


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
