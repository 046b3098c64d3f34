"""``edgespec generate``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from edgespec.cli.interrupts import Interrupts
from edgespec.cli.options import (
    ContextOption,
    DepthOption,
    DraftOption,
    ExactnessOption,
    JsonOption,
    MinPOption,
    ProfileOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    open_engine,
    resolve_profile,
    sampling_of,
    state_of,
)
from edgespec.cli.output import decode_input
from edgespec.cli.status import StatusLine, follow_answer, print_done
from edgespec.decoding.sampling import Sampling
from edgespec.engine.session import check_request


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT|-", help="The prompt; - reads it from stdin.")],
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without guesses: the same text.")] = False,
    depth: DepthOption = None,
    rule: Annotated[
        str | None,
        typer.Option("--rule", metavar="keyed|rejection", help="rejection: same distribution, not the same text."),
    ] = None,
    exactness: ExactnessOption = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End the answer before this text.")] = None,
    profile: ProfileOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    context_length: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Write one answer to stdout."""
    state = state_of(context)
    chosen = resolve_profile(
        profile, target=target, draft=draft, context=context_length, depth=depth, rule=rule, exactness=exactness
    )
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    sampling = sampling_of(Sampling(rule=chosen.rule), **drawn)
    text = decode_input(sys.stdin.buffer.read()) if prompt == "-" else prompt
    check_request(text, stop=stop or (), raw=raw)  # before a model is loaded for it
    with open_engine(chosen, state) as engine, engine.session() as session:
        interrupts = Interrupts(session, state.ending)
        with interrupts.installed(), interrupts.answering():
            generation = session.generate(
                text, max_tokens=max_tokens, sampling=sampling, stop=stop or (), raw=raw, depth=0 if plain else None
            )
            done = follow_answer(generation, as_json=json)
    print_done(done, StatusLine(reasons=not plain), as_json=json)
    state.answered = json
    if done.finish_reason == "cancelled":
        raise typer.Exit(130)
