"""``edgespec plan``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli import suggestions
from edgespec.cli.options import JsonOption, ModelFlags, expanded, open_engine, state_of
from edgespec.cli.parser import rare
from edgespec.cli.terminal.output import EXACTNESS_WORDS, print_json, wrapped
from edgespec.cli.terminal.plan_view import plan_lines
from edgespec.errors import InvalidRequestError, RuntimeUnavailableError
from edgespec.files.disk import gib

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.planning.choice.options import Ranking
    from edgespec.planning.choice.plan import Plan

_LABEL_COLUMNS = 12
_WIDEST_TEXT = 100  # longer lines are hard to read however wide the terminal is


@expanded
def plan(
    ctx: typer.Context,
    *,
    flags: ModelFlags,
    explain: Annotated[bool, typer.Option("--explain", help="Say why, and list every option considered.")] = False,
    simulate: Annotated[
        str | None,
        rare(
            "--simulate",
            metavar="MACHINE.toml|NAME",
            help="Plan for a described machine, not for this one.",
            autocompletion=suggestions.for_machine,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what would run on which device, and why."""
    if simulate is not None:
        if given := [*flags.given()]:
            first = {"model": "MODEL", "target": "--model", "settings": "--set"}.get(given[0], f"--{given[0]}")
            raise InvalidRequestError(
                f"{first} cannot be combined with --simulate",
                hint="a described machine names its own models and context",
            )
        _simulated(simulate, explain=explain or state_of(ctx).verbose, json=json)
        return
    state = state_of(ctx)
    with open_engine(flags.resolve(), state) as engine:
        ranking = engine.pair.ranking
        if json:
            print_json(
                {
                    "plan": engine.plan.as_json(),
                    **({} if ranking is None else _ranking_json(ranking)),
                    **_drafters_json(engine),
                }
            )
            return
        _print_plan(engine.plan, ranking, explained=explain)
        if explain or state.verbose:
            _print_labelled("machine", f"{engine.pair.machine.processor}, {engine.pair.machine.physical_cores} cores")
            files = [f"not {refusal.sentence}" for refusal in engine.considered_drafters]
            _print_reasons(engine.plan, ranking, files)
            _print_list("answers", engine.pair.measurements.answered.lines)
            _print_list("missing", _missing())


def _missing() -> list[str]:
    """Extras that are not installed, and what each would add."""
    from edgespec.runtimes.llama import library

    try:
        library.load()
    except RuntimeUnavailableError as error:
        hint = library.install_hint()
        return [f"{error.message}: it adds GPUs and a second runtime, and the faster one is used; {hint}"]
    return []


def _drafters_json(engine: Engine) -> dict[str, Any]:
    """The drafters considered if the user named none, and the one that could be downloaded."""
    offer = engine.drafter_offer
    return {
        "considered_drafters": [refusal.as_json() for refusal in engine.considered_drafters],
        "drafter_offer": None if offer is None else offer.as_json(),
    }


def _simulated(name: str, *, explain: bool, json: bool) -> None:
    from edgespec.planning.simulated.machine_file import machine_from_table
    from edgespec.planning.simulated.simulate import plan_of, simulate as rank_described
    from edgespec.profiles.machines import read_machine

    origin, short_name, table = read_machine(name, cwd=Path.cwd())
    machine = machine_from_table(table, origin)
    ranking = rank_described(machine)
    decided = plan_of(machine, ranking)
    if json:
        print_json(
            {
                "plan": decided.as_json(),
                "simulated": {"name": short_name, "description": machine.description, "origin": origin},
                **_ranking_json(ranking),
            }
        )
        return
    _print_labelled("machine", f"{short_name} (described, not measured). {machine.description}")
    _print_plan(decided, ranking, explained=explain)
    if explain:
        taken = ranking.best.memory_bytes
        _print_labelled("memory", ", ".join(f"{gib(count)} of {place}" for place, count in taken.items()))
        _print_reasons(decided, ranking, ())


def _ranking_json(ranking: Ranking) -> dict[str, Any]:
    return {
        "candidates": [candidate.as_json() for candidate in ranking.candidates],
        "rejected": [refusal.as_json() for refusal in ranking.rejected],
    }


def _print_plan(decided: Plan, ranking: Ranking | None, *, explained: bool) -> None:
    for label, text in plan_lines(decided, ranking, "the reasons follow" if explained else "--explain says why"):
        _print_labelled(label, text)


def _print_reasons(decided: Plan, ranking: Ranking | None, files: Sequence[str]) -> None:
    """Print how the plan decodes, and each reason and each way considered once. ``files`` do not draft."""
    from edgespec.planning.choice.ranking import explain

    _print_labelled("mode", decided.mode)
    if decided.mode != "plain":
        _print_labelled("depth", f"up to {decided.depth_cap}")
        _print_labelled("exactness", f"{EXACTNESS_WORDS[decided.exactness]} ({decided.exactness})")
    ways = ("nothing yet: this machine is not measured",) if ranking is None else explain(ranking)
    _print_list("why", (reason for reason in decided.reasons if not {reason, f"not {reason}"} & {*ways}))
    _print_list("considered", (*ways, *files))


def _print_list(label: str, sentences: Iterable[str]) -> None:
    for number, sentence in enumerate(sentences):
        _print_labelled("" if number else label, sentence, hang=2)


def _print_labelled(label: str, text: str, *, hang: int = 0) -> None:
    """Print a line after its label, wrapped on a terminal and unwrapped elsewhere."""
    line = f"{label:{_LABEL_COLUMNS}}{text}"
    if not sys.stdout.isatty():
        print(line)
        return
    columns = max(40, min(shutil.get_terminal_size().columns, _WIDEST_TEXT))
    indent = " " * (_LABEL_COLUMNS + hang)
    for part in wrapped(line, columns, indent):
        print(part)
