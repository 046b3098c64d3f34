"""``edgespec calibrate``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.options import JsonOption, ModelFlags, expanded, open_engine, state_of
from edgespec.cli.terminal.output import note, print_error, print_json, show
from edgespec.cli.terminal.plan_view import plan_lines
from edgespec.errors import EdgespecError, MemoryLimitError
from edgespec.files.disk import counted
from edgespec.files.home import home

if TYPE_CHECKING:
    from edgespec.calibration.timing import ModelTimes
    from edgespec.engine.engine import Engine
    from edgespec.engine.pair.calibration_report import CalibrationReport

_QUICK_WORDS = "at most 50 seconds"

# What became of a model's times, in the words of JSON and for people.
_OUTCOMES = {
    "stored": "stored",
    "rough": "stored as rough times, which choose nothing",
    "kept": "nothing stored, the earlier times stay",
    "missing": "nothing stored, no measurement was complete",
    "plain": "nothing to measure, it is always decoded plainly",
}


@expanded
def calibrate(
    ctx: typer.Context,
    *,
    flags: ModelFlags,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="At most 50 seconds: fewer contexts and repetitions, most important first."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure the speed of these models on this machine.

    Measures forwards by width, drafting, both models in parallel, and which widths keep the text identical. The
    results are stored.
    """
    from edgespec.calibration.measurement_store import load_bandwidth, save_bandwidth
    from edgespec.calibration.timing import FULL, QUICK
    from edgespec.engine.pair.calibration_report import calibration_report
    from edgespec.engine.pair.calibration_run import QUICK_BUDGET_S
    from edgespec.hardware.bandwidth import measure_read_bandwidth
    from edgespec.hardware.neighbours import BUSY_SHARE

    state = state_of(ctx)
    with open_engine(flags.resolve(), state) as engine, state.interrupts.during(engine.close):
        if not state.quiet:
            note(
                f"measuring takes {_QUICK_WORDS if quick else f'some minutes; --quick takes {_QUICK_WORDS}'}",
                dim=True,
            )
        started, before = time.perf_counter(), _times(engine)
        with state.progress() as progress:
            taken = engine.calibrate(
                _scope=QUICK if quick else FULL,
                afresh=True,
                alternatives=True,
                progress=progress,
                budget_s=QUICK_BUDGET_S if quick else None,
            )
        try:
            bandwidth = load_bandwidth(home().measurements, engine.pair.machine) if taken > BUSY_SHARE else None
            if bandwidth is None:
                bandwidth = measure_read_bandwidth(sorted({1, engine.pair.machine.physical_cores}))
                save_bandwidth(home().measurements, engine.pair.machine, bandwidth)
        except MemoryLimitError as error:  # the models fill the memory; their measurements are still reported
            bandwidth = None
            note(f"without the bandwidth of the memory: {error.message}")
        report = calibration_report(engine.pair, bandwidth)
        took_s = time.perf_counter() - started
        plan, ranking, outcome = engine.plan, engine.pair.ranking, _outcome(before, engine)
        unstored = engine.pair.measurements.store.unstored
    if json:
        found = {**report.as_json(), "plan": plan.as_json(), "took_s": took_s, "others_share": taken}
        stored = unstored is None and not {*outcome.values()}.isdisjoint({"stored", "rough"})
        times = [{"model": name, "outcome": word} for name, word in outcome.items()]
        print_json({**found, "stored": stored, "times": times, "left_out": list(engine.left_out)})
        state.answered = True
    else:
        _print(report)
        again = engine.profile.command("calibrate")
        for label, text in plan_lines(plan, ranking, f"`{engine.profile.command('plan')} --explain` says why", again):
            show(f"{label:13}{text}")
        if engine.left_out:
            note(
                f"not measured for lack of time: {', '.join(engine.left_out)}; chats measure the needed part between "
                f"answers, and `{again}` measures everything"
            )
        note(f"measured in {took_s:.0f} s" + (_stored_words(outcome) if unstored is None else ""), dim=True)
        if taken > BUSY_SHARE:
            note(f"other programs used {100 * taken:.0f} % of the processor: calibrate again when it is idle")
    if unstored is not None:
        print_error(
            EdgespecError(
                f"some measurements could not be stored: {unstored}",
                hint="free some space, or set EDGESPEC_HOME to a folder you may write to",
            ),
            as_json=False,
        )
        raise typer.Exit(1)


def _times(engine: Engine) -> dict[str, ModelTimes | None]:
    """The stored times of target and drafter by name; None without."""
    known = engine.pair.measurements
    found = {known.target.name: known.target_times()}
    return found if known.drafter is None else {**found, known.drafter.name: known.drafter_times()}


def _outcome(before: dict[str, ModelTimes | None], engine: Engine) -> dict[str, str]:
    """What became of each model's times: a key of ``_OUTCOMES``."""
    return {
        name: "plain"
        if not engine.pair.can_rewind
        else "missing"
        if times is None
        else "kept"
        if times == before.get(name)
        else "rough"
        if times.busy
        else "stored"
        for name, times in _times(engine).items()
    }


def _stored_words(outcome: dict[str, str]) -> str:
    if {*outcome.values()} == {"stored"}:
        return " and stored"
    return "".join(f"; {name}: {_OUTCOMES[word]}" for name, word in outcome.items())


def _print(report: CalibrationReport) -> None:
    for curve in report.curves:
        ratios = curve["forward_s"]
        threads = counted(curve["threads"], "thread")
        print(f"{curve['model']} on {curve['device']}, {threads}, after {curve['context']} tokens")
        for width, seconds in zip(curve["width"], ratios, strict=True):
            print(f"  width {width:>2}  {1000 * seconds:8.1f} ms  {seconds / ratios[0]:6.2f}x")
    for line in report.lines:
        show(line)
