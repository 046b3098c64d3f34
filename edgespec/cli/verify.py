"""``edgespec verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.options import JsonOption, ModelFlags, expanded, open_engine, state_of
from edgespec.cli.terminal.output import EXACTNESS_WORDS, about, note, print_json
from edgespec.errors import EdgespecError
from edgespec.files.disk import counted
from edgespec.files.home import home

if TYPE_CHECKING:
    from edgespec.bench.equality import EqualityReport
    from edgespec.bench.suite import Prompt
    from edgespec.engine.engine import Engine

# Of twenty built-in prompts: a few minutes on a laptop.
_DEFAULT_PROMPTS = 8

# What `edgespec pull` fetches, and how many of its problems are added to the built-in prompts.
_FETCHED, _PROBLEMS = "humaneval", 20


@expanded
def verify(
    ctx: typer.Context,
    *,
    flags: ModelFlags,
    prompts: Annotated[
        int,
        typer.Option(
            "--prompts",
            metavar="N",
            min=1,
            help=f"Number of prompts, of 20 built in, or of 40 after `edgespec pull {_FETCHED}`.",
        ),
    ] = _DEFAULT_PROMPTS,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="Tokens of each answer.")] = 96,
    suite: Annotated[
        Path | None,
        typer.Option(
            "--suite",
            metavar="FILE.jsonl",
            help="Your own prompts.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check that guessing leaves the text unchanged. Fails if a token differs from plain decoding's."""
    from edgespec.bench.equality import SAMPLED, PromptResult, check_equality, checks_trees, depths_to_check, spread

    state = state_of(ctx)
    selected = spread(_prompts(suite, prompts), prompts)
    with open_engine(flags.resolve(), state, calibrate=True) as engine, state.interrupts.during(engine.close):
        depths = depths_to_check(engine)
        if not depths:
            raise EdgespecError(
                "there is no speculation to verify: " + engine.plan.reasons[-1],
                hint="`edgespec plan --explain` lists what was considered",
            )
        ways = f"{depths[0]} to {depths[-1]}" if len(depths) > 1 else str(depths[0])
        note(
            f"{counted(len(selected), 'prompt')}, {max_tokens} tokens, "
            f"{'greedy' if engine.profile.exactness == 'near' else f'greedy and sampled ({SAMPLED})'}, depths "
            f"{ways}{' and trees' if checks_trees(engine, depths) else ''} against plain decoding"
            + _duration(engine, len(selected) * (1 + len(depths) + checks_trees(engine, depths)), max_tokens)
        )
        done = 0

        def show(result: PromptResult) -> None:
            nonlocal done
            done += 1
            verdict = "identical" if not result.divergences else f"{len(result.divergences)} differ"
            note(f"{done}/{len(selected)} {result.prompt_id} ({result.prompt_tokens} prompt tokens): {verdict}")

        report = check_equality(engine, selected, max_tokens=max_tokens, on_result=show)
    if json:
        print_json(report.as_json())
    else:
        print(f"exactness   {EXACTNESS_WORDS[report.level]} ({report.level})")
        print(f"widths      {', '.join(map(str, report.plan.numeric_class.widths))} are bit-equal")
        print(f"sampling    {'; '.join(map(str, report.samplings))}")
        ways += " and trees" if report.trees else ""
        print(f"identical   {report.identical} of {len(report.results)} prompts, depths {ways}")
        for divergence in report.divergences:
            kind = "sampled" if divergence.sampled else "greedy"
            shape = f"a tree of {divergence.depth}" if divergence.tree else f"depth {divergence.depth}"
            where = f"{divergence.prompt_id} at token {divergence.position}, {shape}, {kind}"
            print(f"divergence  {where}: gap {divergence.gap:.4f}, bound {report.bound:.4f}")
        print(_verdict(report))
    if not report.kept:
        note(f"hint: {_next_step(report)}")
        raise typer.Exit(1)


def _duration(engine: Engine, answers: int, max_tokens: int) -> str:
    """How long plain decoding would take for the answers, in words; empty if it was not measured."""
    curves = engine.pair.measurements.costs().curves
    drawn = 1 if engine.profile.exactness == "near" else 2
    return "" if curves is None else f": {about(answers * drawn * max_tokens * curves.at(0).seconds(1))}"


def _verdict(report: EqualityReport) -> str:
    if report.nothing_proposed:
        return "nothing was guessed, so nothing was verified" + (f": {report.why}" if report.why else "")
    return "the promise holds" if report.kept else "the promise does not hold: guessing changed the text"


def _next_step(report: EqualityReport) -> str:
    if report.nothing_proposed:
        return "longer answers (--max-tokens) give more to guess; `edgespec plan --explain` lists the drafters"
    safe = "--set exactness=stable" if report.level == "N" else "--plain, or depth = 0 in a profile,"
    return (
        f"{safe} keeps this model to plain decoding's text; please report it with the output of "
        "`edgespec verify --json` and `edgespec doctor --json`"
    )


def _prompts(suite: Path | None, asked: int) -> list[Prompt]:
    """The prompts of ``suite``, or the built-in ones with HumanEval's first twenty if they are on the disk."""
    from edgespec.bench.suite import builtin_suite, load_humaneval, load_suite
    from edgespec.store.store import Store

    if suite is not None:
        return list(load_suite(suite))
    own = list(builtin_suite("verify"))
    try:
        if (stored := Store(home()).find(_FETCHED)) is not None:
            return [*load_humaneval(stored.path, n=_PROBLEMS), *own]
    except EdgespecError as error:
        note(f"without {_FETCHED}: {error.message}")
        return own
    if asked > len(own):
        note(f"{len(own)} prompts are built in; `edgespec pull {_FETCHED}` fetches {_PROBLEMS} more")
    return own
