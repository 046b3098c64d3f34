"""``edgespec calibrate``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.options import JsonOption, ModelFlags, expanded, open_engine, state_of
from edgespec.cli.terminal.output import note, print_error, print_json, show
from edgespec.errors import EdgespecError, MemoryLimitError
from edgespec.files.home import home

if TYPE_CHECKING:
    from edgespec.engine.pair.calibration_report import CalibrationReport

_QUICK_WORDS = "at most 50 seconds"


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
        started = time.perf_counter()
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
        plan = engine.plan
        unstored = engine.pair.measurements.store.unstored
    if json:
        found = {**report.as_json(), "plan": plan.as_json(), "took_s": took_s}
        left_out = list(engine.left_out)
        print_json({**found, "others_share": taken, "stored": unstored is None, "left_out": left_out})
        state.answered = True
    else:
        _print(report)
        for reason in plan.reasons:
            show(f"plan         {reason}")
        if taken > BUSY_SHARE:
            note(
                f"other programs used {100 * taken:.0f} % of the processor: figures of a quieter time stay, if "
                "there are any; calibrate again when it is idle"
            )
        if engine.left_out:
            note(
                f"not measured for lack of time: {', '.join(engine.left_out)}; chats measure the needed part between "
                "answers, and `edgespec calibrate` measures everything"
            )
        note(f"measured in {took_s:.0f} s" + (" and stored" if unstored is None else ""), dim=True)
    if unstored is not None:
        print_error(
            EdgespecError(
                f"some measurements could not be stored: {unstored}",
                hint="free some space, or set EDGESPEC_HOME to a folder you may write to",
            ),
            as_json=False,
        )
        raise typer.Exit(1)


def _print(report: CalibrationReport) -> None:
    for curve in report.curves:
        ratios = curve["forward_s"]
        threads = f"{curve['threads']} thread{'s' if curve['threads'] != 1 else ''}"
        print(f"{curve['model']} on {curve['device']}, {threads}, after {curve['context']} tokens")
        for width, seconds in zip(curve["width"], ratios, strict=True):
            print(f"  width {width:>2}  {1000 * seconds:8.1f} ms  {seconds / ratios[0]:6.2f}x")
    for line in report.lines:
        show(line)
