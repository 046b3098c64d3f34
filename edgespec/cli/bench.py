"""``edgespec bench``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.bench import LEAST_OF_ALL, LEAST_OF_ONE, LEAST_PASSES, enough
from edgespec.bench.suite import (
    BUILTIN_SUITES,
    Prompt,
    builtin_suite,
    first_of_each,
    load_suite,
    missing_prompts,
    read_suite,
    suite_sha256,
)
from edgespec.cli import suggestions
from edgespec.cli.options import JsonOption, ModelFlags, SamplingFlags, expanded, open_engine, state_of
from edgespec.cli.parser import rare
from edgespec.cli.terminal.output import (
    State,
    about,
    cells,
    note,
    padded,
    print_error,
    print_json,
    show,
    stderr_columns,
    stderr_is_rich,
    time_left,
)
from edgespec.errors import EdgespecError, InvalidRequestError
from edgespec.files.disk import counted, is_folder, is_there, megabytes
from edgespec.files.home import home

# Tokens of an answer. So the suite "quick", with the calibration of a first run, takes less than three minutes where
# a token takes 30 ms (1.5B, two cores of an AMD EPYC). Fewer tokens give a wider interval.
_TOKENS, _QUICK = 20, "quick"

# Disturbed prompts of the suite "quick" are run again as long as the run is expected to end within this time.
_WITHIN_S = 170.0

# For the time that reading takes: characters a token (English and code), and tokens read in the time of one decoded,
# as on two cores of an AMD EPYC (150 and 33 a second).
_CHARACTERS, _READ_AT_ONCE = 4, 4.5

# What a report says of the sampling.
_DRAWN = ("temperature", "top_p", "top_k", "min_p", "seed", "rule")

if TYPE_CHECKING:
    from edgespec.bench.run import Answer, RunSettings
    from edgespec.bench.runtimes import NamedModel, RuntimeTimes
    from edgespec.decoding.sampling import Sampling
    from edgespec.engine.engine import Engine
    from edgespec.files.model_file import LocatedModel
    from edgespec.profiles.profile import Profile


@expanded
def bench(
    ctx: typer.Context,
    *,
    flags: ModelFlags,
    suite: Annotated[
        str,
        typer.Option(
            "--suite",
            metavar="NAME|FILE|-",
            help=f"{', '.join(BUILTIN_SUITES)}, or your own prompts: a line each, or JSON Lines.",
            autocompletion=suggestions.for_suite,
        ),
    ] = _QUICK,
    arms: Annotated[
        str | None,
        rare("--arms", metavar="NAME,…", help="Ways to decode, such as model-depth-2; plain is always included."),
    ] = None,
    passes: Annotated[
        int,
        rare("--passes", metavar="N", min=1, help="ABBA passes; in each pass, every arm runs twice."),
    ] = LEAST_PASSES,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=2, help="Longest answer, in tokens.")
    ] = _TOKENS,
    drawn: SamplingFlags,
    seed: Annotated[
        int, rare("--seed", metavar="N", help="Seed of every arm: the same seed gives the same text.")
    ] = 0,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Most prompts of each category.")
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(
            "--category",
            metavar="NAME",
            help="Only this category (repeatable).",
            autocompletion=suggestions.for_category,
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            metavar="[RUNTIME:]MODEL",
            help="Time the same model in another runtime (llama:MODEL) or file (its ONNX export), without guesses.",
        ),
    ] = None,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold", help="Read the prompt again for every answer, to measure first tokens and whole requests."
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the report (.png, .svg, .pdf).")
    ] = None,
    log: Annotated[
        Path | None,
        rare("--log", metavar="FILE", help="Write what target and drafter predict at each token (.jsonl)."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure decoding with and without guesses. Arms run paired and interleaved, and their tokens are compared."""
    from edgespec.bench.arms import FASTEST, open_arms, parse_arms, with_fastest
    from edgespec.bench.repeats import run_until_quiet
    from edgespec.bench.report import bench_report
    from edgespec.bench.run import RunSettings
    from edgespec.bench.runtimes import REST_S
    from edgespec.calibration.measurement_store import load_bandwidth
    from edgespec.decoding.sampling import Sampling
    from edgespec.engine.pair.calibration_report import calibration_report

    state, began = state_of(ctx), time.monotonic()
    names = parse_arms(arms)
    name, prompts = _prompts(suite, limit, category or [], state)
    if plot is not None:
        _check_plot(plot)
    if log is not None and (is_folder(log) or not is_folder(log.parent)):
        where = f"the folder {log.parent} for the log {log.name} does not exist"
        raise InvalidRequestError(f"the log {log} is a folder" if is_folder(log) else where)
    # A history would guess from the answer to the same prompt a moment ago.
    chosen = replace(flags.resolve(), history=False)
    sampling = drawn.over(Sampling(rule=chosen.rule), seed=seed)
    same_text = not sampling.uses_rejection
    others = _find_comparable(chosen, compare, state) if compare else ()
    with open_engine(chosen, state, calibrate=True) as engine, state.interrupts.during(engine.close):
        engine.pair.keeps_learned = False  # these answers are as long as the options say, not as the user's
        cap = engine.pair.depth_cap_allowed
        names = with_fastest(engine, names)
        models = _load_comparable(engine, others, for_prompts=cold)
        own = {each.name: each.model for each in models if each.name == each.arm}
        opened = open_arms(engine, names, cap, own)
        times = _time_side_by_side(engine, models, state)
        settings = RunSettings(
            passes=passes, max_tokens=max_tokens, cold=cold, sampling=sampling, rest_s=REST_S if own else 0.0
        )
        words = f"{counted(len(prompts), 'prompt')}, each answered {2 * passes} times in each way"
        note(f"{words} ({', '.join((*names, *own))}){_duration(engine, prompts, settings, len(opened))}")
        may_differ = (FASTEST, *own) if same_text else tuple(arm.name for arm in opened)
        with closing(_Progress(may_differ, live=stderr_is_rich() and not state.quiet)) as progress:
            answers = run_until_quiet(
                engine,
                opened,
                prompts,
                settings,
                on_answer=progress,
                on_repeat=progress.again,
                within_s=_WITHIN_S - (time.monotonic() - began) if suite == _QUICK else None,
            )
        bandwidth = load_bandwidth(home().measurements, engine.pair.machine)
        report = bench_report(
            engine,
            {"name": name, "sha256": suite_sha256(prompts), "prompts": len(prompts)},
            answers,
            read_bytes_per_s=None if bandwidth is None else bandwidth.read_bytes_per_s,
            compared={name: model.facts for name, model in own.items()},
        )
        report |= {
            "runtimes": [each.as_json() for each in times],
            "max_tokens": max_tokens,
            "passes": passes,
            "cold": cold,
            "date": time.strftime("%Y-%m-%d"),
        }
        report |= {"sampling": {name: getattr(sampling, name) for name in _DRAWN}}
        calibration = calibration_report(engine.pair, bandwidth).as_json()
        failures = list[EdgespecError]()
        if log is not None:
            try:
                _log(engine, prompts, log, max_tokens, sampling, state)
            except EdgespecError as error:  # the report is worth more
                failures.append(error)
    if json:
        print_json(report)
        state.answered = True
    else:
        _print(report, verbose=state.verbose)
    # The report is printed: later failures go to stderr only, so that stdout has one JSON object.
    if report["identical_fraction"] not in (None, 1.0) and chosen.exactness == "stable" and same_text:
        failures.append(
            EdgespecError(
                "an answer differs from plain decoding's",
                hint=f"`{chosen.command('verify')}` shows where; please report it",
            )
        )
    if plot is not None:
        from edgespec.bench.plots import plot_report

        try:
            plot_report(report, calibration, plot)
            note(f"plot written to {plot}")
        except EdgespecError as error:
            failures.append(error)
    for failure in failures:
        print_error(failure, as_json=False)
    if failures:
        raise typer.Exit(1)


def _prompts(suite: str, limit: int | None, categories: list[str], state: State) -> tuple[str, list[Prompt]]:
    if suite in BUILTIN_SUITES or (suite.isidentifier() and not is_there(suite)):
        name, prompts = suite, list(builtin_suite(suite))
        missing = missing_prompts(suite)
        if missing:
            note(f"without {', '.join(missing)}: this Python has no source files of its standard library")
    elif suite == "-":
        name, prompts = "stdin", list(state.interrupts.read(lambda: read_suite(sys.stdin.buffer, "stdin")))
    else:
        name, prompts = Path(suite).name, list(load_suite(Path(suite)))
    for category in categories:
        if not any(prompt.category == category for prompt in prompts):
            known = ", ".join(sorted({prompt.category for prompt in prompts}))
            raise InvalidRequestError(f'the suite {name} has no category "{category}"', hint=f"it has {known}")
    if categories:
        prompts = [prompt for prompt in prompts if prompt.category in categories]
    return name, prompts if limit is None else first_of_each(prompts, limit)


def _duration(engine: Engine, prompts: list[Prompt], settings: RunSettings, arms: int) -> str:
    """How long it takes at most without what guesses gain, in words; empty if plain decoding was not measured."""
    from edgespec.bench.run import MOST_KEPT

    curves = engine.pair.measurements.costs().curves
    if curves is None:
        return ""
    # Each prompt is answered once more before the answers that count, and read by each arm.
    tokens = (1 + 2 * arms * settings.passes) * sum(prompt.longest(settings.max_tokens) for prompt in prompts)
    step_s = curves.at(0).seconds(1)
    read = sum(len(prompt.prompt) for prompt in prompts) / _CHARACTERS
    read *= arms * (2 * settings.passes if settings.cold else 1 if len(prompts) <= MOST_KEPT else settings.passes)
    return f": {about(step_s * (tokens + read / _READ_AT_ONCE))}"


# ------------------------------------------------------------------------------------------ files side by side


def _find_comparable(profile: Profile, others: list[str], state: State) -> tuple[LocatedModel, ...]:
    """Find the files to compare, before anything is loaded or calibrated."""
    from edgespec.bench.comparable import find_comparable
    from edgespec.store.locate import Locator
    from edgespec.store.store import Store

    with state.progress() as progress:
        locator = Locator(store=Store(home()), download=not state.offline, job=progress.job)
        return find_comparable(profile.target, others, locator)


def _load_comparable(
    engine: Engine, located: tuple[LocatedModel, ...], *, for_prompts: bool
) -> tuple[NamedModel, ...]:
    """The target and the models to compare, with their names; empty without models to compare.

    A trimmed drafter lacks tokens, so it is only timed and does not decode. ``for_prompts`` is passed to
    ``Engine.load_comparable``.
    """
    from edgespec.bench.arms import PLAIN
    from edgespec.bench.runtimes import NamedModel, arm_names

    if not located:
        return ()
    models = (engine.pair.target, *engine.pair.load_comparable(located, for_prompts=for_prompts))
    given = 1 + len(located)
    names = arm_names(
        (each.facts.runtime, each.facts.name + (" for prompts" if number >= given else ""))
        for number, each in enumerate(models)
    )
    decoding = (None if each.drafts_only else name for each, name in zip(located, names[1:given], strict=True))
    arms = (PLAIN, *decoding, *names[given:])
    return tuple(
        NamedModel(name=name, arm=arm, model=model) for name, arm, model in zip(names, arms, models, strict=True)
    )


def _time_side_by_side(engine: Engine, models: tuple[NamedModel, ...], state: State) -> tuple[RuntimeTimes, ...]:
    from edgespec.bench.runtimes import measure_runtimes

    if not models:
        return ()
    with state.progress() as progress:
        steps = measure_runtimes(models, engine.plan.context_length)
        return progress.follow(steps, f"timing {', '.join(each.name for each in models)}")


def _log(
    engine: Engine, prompts: list[Prompt], path: Path, max_tokens: int, sampling: Sampling, state: State
) -> None:
    from edgespec.bench.draft_log import write_draft_log

    with state.progress() as progress:
        steps = write_draft_log(engine, prompts, path, max_tokens=max_tokens, sampling=sampling)
        progress.follow(steps, f"logging predictions to {path}")


def _check_plot(path: Path) -> None:
    """Check the plot's path and matplotlib before the long measurement. Raises InvalidRequestError and others."""
    from edgespec.bench.plots import require_matplotlib, require_suffix

    require_suffix(path)
    if not is_folder(path.parent):
        raise InvalidRequestError(f"the folder {path.parent} for the plot {path.name} does not exist")
    require_matplotlib()


class _Progress:
    """Says how many answers there are: a line that is renewed on a terminal, elsewhere one after each tenth.

    Each answer that wrongly differs has a line. Answers of arms in ``may_differ`` may differ from plain decoding's.
    """

    def __init__(self, may_differ: tuple[str, ...] = (), *, live: bool = False) -> None:
        self._next = 0.1
        self._may_differ = may_differ
        self._live = live
        self._first_at = 0.0

    def __call__(self, answer: Answer, done: int, total: int) -> None:
        if done == 1:
            self._next, self._first_at = 0.1, time.monotonic()
        if self._live:
            text = f"{done} of {total} answers"
            if done > 1:  # before the first answer, models load and prompts are read that the others share
                each_s = (time.monotonic() - self._first_at) / (done - 1)
                text += f" · {time_left(each_s * (total - done))} left"
            text = text[: (stderr_columns() or 80) - 1]  # a longer line would be wrapped, and only its end renewed
            self._write(f"\x1b[2m{text}\x1b[0m" if done < total else "")
        elif done / total >= self._next or done == total:
            self._next = done / total + 0.1
            note(f"{done} of {total} answers", dim=True)
        if not answer.identical and answer.arm not in self._may_differ:
            self.tell(f"{answer.prompt_id} differs from plain decoding in arm {answer.arm}")

    def tell(self, line: str) -> None:
        """Print a line in place of the renewed one."""
        self.close()
        note(line)

    def close(self) -> None:
        """Remove the renewed line."""
        if self._live:
            self._write("")

    def again(self, prompts: Sequence[Prompt], repeat: int) -> None:
        """These prompts are run again."""
        from edgespec.bench.repeats import DISTURBED, REPEATS

        what = f"times of plain decoding varied by more than {100 * DISTURBED:.0f} %"
        named = ", ".join(prompt.id for prompt in prompts)
        self.tell(f"{what} on {named}: run again ({repeat} of at most {REPEATS} times)")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()


# ------------------------------------------------------------------------------------------------ the report


def _print(report: dict[str, Any], *, verbose: bool) -> None:
    """The table comes last, so that the last screen shows it."""
    from edgespec.bench.runtimes import runtime_lines
    from edgespec.decoding.sampling import Sampling

    arms: dict[str, Any] = report["arms"]
    if verbose:
        for reason in report["plan"]["reasons"]:
            show(f"- {reason}")
    asked = [_memory(name, arm) for name, arm in arms.items() if arm["bytes_per_token"]]
    if asked and verbose:
        show("memory: " + "; ".join(asked))
    for line in runtime_lines(report["runtimes"]):
        show(line)
    if "planned" in arms:
        against = "plain" if report["baseline"] == "plain" else "plain in its fastest setting"
        _print_comparison(against, arms["planned"], report["regret"] or {})
        for name, found in report["against"].items():
            _print_comparison(name, found, {})
    _print_noise(report)
    sampling = Sampling(**report["sampling"])
    if not sampling.greedy:
        show(f"every arm sampled with {sampling}")
    gains = [arm["speedup"] for arm in arms.values() if arm["speedup"] is not None]
    if min((gain["passes"] for gain in gains), default=report["passes"]) < LEAST_PASSES:
        show(f"fewer than {LEAST_PASSES} passes: no interval, and one disturbance can change the result")
    elif any(_interval(gain) is None for gain in gains):
        show(
            f"no 95 % interval: that takes {LEAST_OF_ONE} passes of one prompt, or {LEAST_OF_ALL} of several together"
        )
    width = max(map(cells, arms))
    print(f"\n{'':{width}}  tok/s  x plain  95 %         identical  tok/round  expected/measured")
    for name, arm in arms.items():
        speed, gain = arm["decode_tokens_per_s_geomean"], arm["speedup"]
        row = f"{padded(name, width)}  {_number(speed, '5.1f')}  "
        row += f"{1.0 if gain is None else gain['geomean']:7.3f}  {_interval(gain) or '':11}  "
        row += f"{_percent(arm['identical_fraction']):>9}  {_number(arm['tokens_per_round'], '9.2f')}  "
        row += _number(arm["calibrated_vs_measured"], "17.2f")
        print(row.rstrip())


def _print_comparison(against: str, found: dict[str, Any], regret: dict[str, Any]) -> None:
    """Print the plan against another arm, by category: decoding, and whole requests if prompts were read."""
    for key, what in (("speedup", ""), ("request_speedup", "whole requests, ")):
        if found[key] is None:
            continue
        show(f"{what}planned against {against}, by category")
        for category, gain in {"": found[key], **found[key]["by_category"]}.items():
            line = f"  {category or 'all':14} {_gain(gain)}"
            own = regret.get(category) if key == "speedup" else None
            if own is not None:
                line += f"   best fixed {own['best']} {own['best_speedup']:.3f}, regret {100 * own['loss']:.1f} %"
            show(line)
    if found["ttft_ratio"] is not None:
        show(f"time to the first token, over that of {against}: {_gain(found['ttft_ratio'])}")


def _gain(gain: dict[str, Any]) -> str:
    """A ratio with its interval if there is one, or "no difference found" if the interval contains 1."""
    interval = _interval(gain)
    if interval is None:
        return f"{gain['geomean']:.3f}"
    words = f"{gain['geomean']:.3f}" if gain["told_apart"] else "no difference found"
    return f"{words} ({interval}{'' if gain['narrow'] else ', wider than 2 %'})"


def _interval(gain: dict[str, Any] | None) -> str | None:
    if gain is None or not enough(gain["prompts"], gain["passes"]):
        return None
    low, high = gain["ci95"]
    return f"{low:.3f}-{high:.3f}"


def _print_noise(report: dict[str, Any]) -> None:
    noise = report["noise"]
    if noise["aa_ci95"] is None:
        return
    low, high = noise["aa_ci95"]
    verdict = "noisy: do not trust small differences" if noise["noisy"] else "quiet enough"
    of = ", whole requests" if report["cold"] else ""
    show(f"plain against itself{of}: {noise['aa_geomean']:.3f} ({low:.3f}-{high:.3f}), {verdict}")
    again = [each["id"] for each in noise["by_prompt"] if each["passes"] > report["passes"]]
    if again:
        show(f"run again: {', '.join(again)}; still disturbed: {', '.join(noise['disturbed']) or 'none'}")


def _memory(name: str, arm: dict[str, Any]) -> str:
    words = f"{name} {megabytes(arm['bytes_per_token'])} a token"
    if arm["bandwidth_used"] is not None:
        words += f" ({100 * arm['bandwidth_used']:.0f} % of the bandwidth)"
    return words


def _number(value: float | None, form: str) -> str:
    return format("-", f">{form.split('.')[0]}") if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
