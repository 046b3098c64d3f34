"""Background calibration: parts are stored when complete, measured in slices, resumed and given up cleanly."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Iterator

import pytest

import edgespec.engine.pair.calibration_run as module
from edgespec.calibration.kinds import CONTENTION, PLAIN, THREADS, TIMES
from edgespec.calibration.measurement_store import Measurements
from edgespec.calibration.timing import AGREEMENT_TOKENS, FULL, QUICK
from edgespec.engine.engine import Engine
from edgespec.engine.pair.calibration_run import CALIBRATION_BUDGET_S, REQUESTS, BackgroundCalibration
from edgespec.engine.pair.measurements import MEASURED_BUSY, PairMeasurements
from edgespec.errors import ForwardError
from edgespec.files.home import Home
from edgespec.files.progress import Loading
from edgespec.hardware import neighbours
from edgespec.hardware.neighbours import Used
from edgespec.interfaces.model import Model, ModelFacts
from edgespec.runtimes.llama.library import load
from tests.support.calibrating import fix_plain_ratio, measured, on_cores, shorten_calibration, stored
from tests.support.tiny_models import TinyModels, answer
from tests.support.watched_sequences import ProcessorSequence, is_closed, watch_forwards

NEVER = threading.Event()
RIVALS = ("on cpu (llama)", "on cpu (native)")


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_calibration(monkeypatch)
    # Agreement is measured only if drafting may gain, which these tiny models' times leave to chance.
    monkeypatch.setattr(PairMeasurements, "may_pay", lambda _self, _source: False)


@pytest.fixture
def engine(tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The pair on a machine of two cores (so that other settings exist), not measured."""
    on_cores(monkeypatch, 2)
    with tiny.load(store_home=home, context=300, threads="auto") as engine:
        assert engine.unmeasured
        yield engine


class Ticks:
    """A clock that advances by one at every call."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def __call__(self) -> float:
        return float(next(self._count))


def labels(steps: list[Loading]) -> list[str]:
    """The labels of the parts in order, without those of a second runtime."""
    return [stage for stage in dict.fromkeys(step.stage for step in steps) if not stage.endswith(RIVALS)]


@pytest.fixture
def sequences(monkeypatch: pytest.MonkeyPatch) -> list[ProcessorSequence]:
    """Every sequence that ran a forward."""
    seen: list[ProcessorSequence] = []

    def note(sequence: ProcessorSequence, _tokens: list[int], _rows: int) -> None:
        if sequence not in seen:
            seen.append(sequence)

    watch_forwards(monkeypatch, note)
    return seen


def all_closed(sequences: list[ProcessorSequence]) -> bool:
    return all(map(is_closed, sequences))


# ---------------------------------------------------------------------------------------------- in one run


def test_a_calibration_keeps_its_budget_and_names_the_parts_left_out(engine: Engine, home: Home) -> None:
    calibration = BackgroundCalibration(engine.pair, QUICK, afresh=True, alternatives=True)
    told: list[Loading] = []
    # The clock is read once at the start and once a step: the fourth step exceeds the budget.
    calibration.run(told.append, budget_s=4.0, clock=Ticks())
    assert len(told) == 4
    assert calibration.left_out[:3] == ("target", "target with fewer threads", "drafter")
    assert set(calibration.left_out[3:]) <= {"other runtimes", "other runtimes and devices"}
    assert stored(home)["widths"] == 1, "the self-check was made when the target was loaded"
    assert engine.unmeasured
    later = BackgroundCalibration(engine.pair, QUICK)
    later.run(budget_s=1e9)
    assert later.left_out == ()
    assert measured(home) == {"contention": 1, "times": 2, "widths": 1}
    assert not engine.unmeasured


def test_a_measurement_complete_when_the_budget_ends_is_stored(engine: Engine, home: Home) -> None:
    calibration = BackgroundCalibration(engine.pair, QUICK)
    seconds = [0.0]

    def spend(step: Loading) -> None:
        if step.stage == "measuring target" and step.fraction == 1.0:
            seconds[0] = 10.0

    calibration.run(spend, budget_s=5.0, clock=lambda: seconds[0])
    assert stored(home)["times"] == 1
    assert engine.pair.measurements.target_times() is not None
    assert calibration.left_out[0] in ("loading drafter", "drafter")


def test_a_calibration_measures_the_target_before_drafter_and_contention(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_plain_ratio(monkeypatch, 1.5)
    monkeypatch.setattr(PairMeasurements, "may_pay", lambda _self, source: source == "model")
    told: list[Loading] = []
    BackgroundCalibration(engine.pair, QUICK, alternatives=True).run(told.append)
    stages = [stage for stage in labels(told) if stage.startswith("measuring")]
    assert stages[:5] == [
        "measuring target with 1 thread, a f16 cache",
        "measuring target",
        "measuring drafter",
        "measuring how often drafter agrees with target",
        "measuring target and drafter in parallel",
    ]


def test_a_calibration_stores_times_widths_and_contention(
    engine: Engine, home: Home, sequences: list[ProcessorSequence]
) -> None:
    told: list[Loading] = []
    BackgroundCalibration(engine.pair, QUICK).run(told.append)
    assert measured(home) == {"contention": 1, "times": 2, "widths": 1}
    assert not engine.unmeasured
    assert labels(told) == ["measuring target", "measuring drafter", "measuring target and drafter in parallel"]
    for label in labels(told):
        fractions = [step.fraction for step in told if step.stage == label]
        assert fractions == sorted(fractions)  # type: ignore[type-var]
        assert fractions[-1] == 1
    assert all_closed(sequences)
    times = engine.pair.measurements.target_times()
    assert times is not None
    assert (times.contexts, times.repetitions) == ((96, 268), QUICK.repetitions)


def test_a_second_calibration_repeats_no_measurement(engine: Engine, sequences: list[ProcessorSequence]) -> None:
    BackgroundCalibration(engine.pair, QUICK).run()
    assert sequences
    sequences.clear()
    told: list[Loading] = []
    BackgroundCalibration(engine.pair, QUICK).run(told.append)
    assert (told, sequences) == ([], [])


@pytest.mark.slow
def test_a_calibration_with_afresh_repeats_every_measurement(engine: Engine) -> None:
    BackgroundCalibration(engine.pair, QUICK).run()
    first = engine.pair.measurements.target_times()
    told: list[Loading] = []
    BackgroundCalibration(engine.pair, FULL, afresh=True).run(told.append)
    assert len(labels(told)) == 3
    again = engine.pair.measurements.target_times()
    assert again is not None
    assert again != first
    assert again.repetitions == FULL.repetitions


def test_alternatives_time_plain_decoding_with_other_threads_and_caches(
    tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_plain_ratio(monkeypatch, 1.5)
    told: list[Loading] = []
    with tiny.load(store_home=home, context=300, threads=2, runtime="llama", draft_runtime="llama") as engine:
        BackgroundCalibration(engine.pair, QUICK, alternatives=True).run(told.append)
        assert engine.pair.target.settings.threads == 2
        assert stored(home)["plain"] == 3  # one thread, and two kinds of cache
        others = {label.removeprefix("measuring target with ") for label in labels(told) if " with " in label}
        as_filed = ", weights as in the file" if load().has_tiles else ""
        assert others == {
            f"1 thread, a q8_0+f16 cache{as_filed}",
            f"2 threads, a f16 cache{as_filed}",
            f"2 threads, a f16 cache, no flash attention{as_filed}",
        }
        times = engine.pair.measurements.target_times()
        assert times is not None
        with engine.pair.target.with_settings(threads=1) as other:
            seconds = engine.pair.measurements.store.load(PLAIN, other.facts)
        assert seconds == pytest.approx(1.5 * times.curves.curves[0].plain_s)


def test_calibration_switches_to_fewer_threads_if_they_are_faster(
    engine: Engine, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_plain_ratio(monkeypatch, 0.5)
    BackgroundCalibration(engine.pair, QUICK, alternatives=True).run()
    assert engine.pair.target.settings.threads == 1
    engine.pair.replan()
    assert engine.plan.target.threads == 1
    assert engine.pair.measurements.target_times() is not None
    assert not engine.unmeasured


@pytest.mark.parametrize(("budget_s", "tried"), [(None, [1, 3, 4]), (1e9, [4])])
def test_in_a_hurry_smaller_numbers_of_threads_are_tried_only_while_they_are_faster(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, budget_s: float | None, tried: list[int]
) -> None:
    found = list[int]()

    def measure(_own: object, other: Model, *_length: object) -> Generator[float, None, float]:
        found.append(other.facts.threads)
        yield 1.0
        return 1.5

    monkeypatch.setattr(module, "measure_plain_ratio", measure)
    monkeypatch.setattr(module, "fewer_threads", lambda _target: [1, 3, 4])
    told: list[Loading] = []
    BackgroundCalibration(engine.pair, QUICK, afresh=True, alternatives=True).run(told.append, budget_s=budget_s)
    assert [threads for threads in found if threads != 2] == tried
    assert (labels(told)[0] == "measuring target") is (budget_s is not None), "its own times come first"


def test_in_a_hurry_the_target_is_timed_again_with_the_threads_that_it_changes_to(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_plain_ratio(monkeypatch, 0.5)
    BackgroundCalibration(engine.pair, QUICK, alternatives=True).run(budget_s=1e9)
    assert engine.pair.target.settings.threads == 1
    assert not engine.unmeasured
    seconds = [0.0]

    def measure(*_models: object) -> Generator[float, None, float]:
        assert engine.pair.target.settings.threads == 2, "all are compared with the most"
        seconds[0] = 10.0
        yield 0.5
        return 1.5

    monkeypatch.setattr(module, "measure_plain_ratio", measure)
    hurried = BackgroundCalibration(engine.pair, QUICK, alternatives=True)
    hurried.run(budget_s=5.0, clock=lambda: seconds[0])
    assert hurried.left_out[0] == "target with 1 thread, a f16 cache"
    assert engine.pair.target.settings.threads == 1, "no time was left to change them"
    assert not engine.unmeasured


def test_threads_that_a_hurried_calibration_had_no_time_for_are_not_stored(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_plain_ratio(monkeypatch, 0.5)
    store, seconds = engine.pair.measurements.store, [0.0]
    settle = Measurements.settle_threads

    def late(own: Measurements, most: ModelFacts, fastest: int) -> int:
        seconds[0] = 10.0
        return settle(own, most, fastest)

    monkeypatch.setattr(Measurements, "settle_threads", late)
    BackgroundCalibration(engine.pair, QUICK, alternatives=True).run(budget_s=5.0, clock=lambda: seconds[0])
    facts = engine.pair.target.facts
    assert (seconds[0], facts.threads) == (10.0, 2)
    assert store.settled(THREADS, facts, facts.runtime).chosen is None
    assert store.load(TIMES, facts) is not None


def test_fewer_threads_are_chosen_only_if_repeatedly_faster(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = iter([0.5, 0.9, 1.2])

    def measure(*_models: object) -> Generator[float, None, float]:
        yield 1.0
        return next(ratios, 1.5)

    monkeypatch.setattr(module, "measure_plain_ratio", measure)
    BackgroundCalibration(engine.pair, QUICK, alternatives=True).run()
    assert engine.pair.target.settings.threads == 2
    assert next(ratios, None) is None


def test_fewer_threads_that_read_prompts_slower_are_not_chosen(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_plain_ratio(monkeypatch, 0.5)

    def measure(*_models: object) -> Generator[float, None, float]:
        yield 1.0
        return 1.2

    monkeypatch.setattr(module, "measure_prompt_ratio", measure)
    BackgroundCalibration(engine.pair, QUICK, alternatives=True).run()
    assert engine.pair.target.settings.threads == 2


@pytest.mark.slow
def test_the_number_of_threads_does_not_change_while_a_session_is_open(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_plain_ratio(monkeypatch, 0.5)
    with engine.session() as session:
        BackgroundCalibration(engine.pair, QUICK, alternatives=True).run()
        assert engine.pair.target.settings.threads == 2
        assert answer(session.generate("hello", max_tokens=3)).text


def test_calibration_without_a_drafter_measures_only_the_target(tiny: TinyModels, home: Home) -> None:
    with tiny.load(store_home=home, draft="none", context=200) as engine:
        BackgroundCalibration(engine.pair, QUICK).run()
        assert measured(home) == {"times": 1, "widths": 1}
        assert not engine.unmeasured


@pytest.mark.slow
def test_calibration_measures_only_the_missing_part(engine: Engine, home: Home) -> None:
    BackgroundCalibration(engine.pair, QUICK).run()
    for kind, label in (("widths", "measuring target"), ("contention", "measuring target and drafter in parallel")):
        for path in home.measurements.glob(f"{kind}-*"):
            path.unlink()
        told: list[Loading] = []
        BackgroundCalibration(engine.pair, QUICK).run(told.append)
        assert labels(told) == [label]
        assert measured(home) == {"contention": 1, "times": 2, "widths": 1}


def test_missing_agreement_is_measured_if_the_drafter_could_gain(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agreement is measured last, so a chat that ends early leaves it out."""
    BackgroundCalibration(engine.pair, QUICK).run()
    assert not engine.pair.measurements.unproven
    monkeypatch.setattr(PairMeasurements, "may_pay", lambda _self, _source: True)
    assert engine.pair.measurements.unproven
    told: list[Loading] = []
    BackgroundCalibration(engine.pair, QUICK).run(told.append)
    assert labels(told) == ["measuring how often drafter agrees with target"]
    most = len(REQUESTS) * AGREEMENT_TOKENS
    assert 0 < max(engine.pair.measurements.priors["model"].position_tokens) <= most, "each token counts once"
    assert not engine.pair.measurements.unproven


def test_after_a_change_of_threads_the_plan_is_made_again_immediately(tiny: TinyModels, home: Home) -> None:
    """The old plan's depths belong to another numeric class, even if measuring the new setting fails."""
    with tiny.load(store_home=home, context=300, threads=2, runtime="llama", draft_runtime="llama") as engine:
        BackgroundCalibration(engine.pair, QUICK).run()
        engine.pair.replan()
        assert engine.pair.adopt(threads=1)
        assert engine.pair.probe is None
        assert engine.plan.depth_cap == 0
        assert engine.plan.numeric_class.threads == 1


def test_calibration_for_near_exactness_measures_the_bound_of_differences(tiny: TinyModels, home: Home) -> None:
    with tiny.load(store_home=home, context=200, exactness="near") as engine:
        BackgroundCalibration(engine.pair, QUICK, afresh=True).run()
        probe = engine.pair.measurements.widths()
        assert probe is not None
        assert probe.complete


def test_widths_probed_for_a_shorter_context_are_not_used(tiny: TinyModels, home: Home) -> None:
    """The probe did not check the rest of the longer context."""
    with tiny.load(store_home=home, context=128, draft="none", runtime="llama") as engine:
        BackgroundCalibration(engine.pair, QUICK).run()
        engine.pair.replan()
        assert engine.pair.probe is not None
    with tiny.load(store_home=home, context=2048, draft="none", runtime="llama") as engine:
        assert engine.unmeasured
        engine.pair.replan()
        assert (engine.pair.probe, engine.plan.depth_cap) == (None, 0)
        BackgroundCalibration(engine.pair, QUICK).run()
        engine.pair.replan()
        assert engine.pair.probe is not None
        assert engine.pair.probe.covers(2048)


def test_a_drafter_without_room_is_reported_and_calibration_continues(
    tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.load(store_home=home, context=300) as engine:
        monkeypatch.setattr(engine.pair.pool, "left_bytes", 1)
        BackgroundCalibration(engine.pair, QUICK).run()
        assert measured(home) == {"times": 1, "widths": 1}
        assert not engine.unmeasured
        engine.pair.replan()
        assert any("the model drafter is lost: drafter needs about" in reason for reason in engine.plan.reasons)
        assert engine.plan.drafter is None or engine.plan.drafter.kind == "lookup"


def test_an_error_in_the_progress_callback_ends_calibration_cleanly(
    engine: Engine, home: Home, sequences: list[ProcessorSequence]
) -> None:
    def fail(_step: Loading) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        BackgroundCalibration(engine.pair, QUICK).run(fail)
    assert sequences
    assert all_closed(sequences)
    assert set(measured(home)) <= {"widths"}, "the self-check is made at load"


# ------------------------------------------------------------------------------------------------- in slices


@pytest.mark.slow
def test_a_slice_of_calibration_ends_with_its_budget_and_the_next_one_resumes(engine: Engine, home: Home) -> None:
    steps: list[Loading] = []
    BackgroundCalibration(engine.pair, QUICK).run(steps.append)
    for path in home.measurements.iterdir():
        path.unlink()
    engine.pair.measurements.priors.clear()
    learning, slices, seen = BackgroundCalibration(engine.pair, QUICK), 0, [stored(home)]
    while not learning.run_for(10, NEVER, Ticks()):  # reads the clock once before, and once before each step
        slices += 1
        seen.append(stored(home))
        assert slices < 1000
    assert slices >= len(steps) // 10 - 1
    # Complete parts are stored during the slices, the target first.
    assert {"times": 1, "widths": 1} in seen
    assert measured(home) == {"contention": 1, "times": 2, "widths": 1}
    assert learning.complete
    assert learning.run_for(0, NEVER)


def test_a_slice_of_zero_seconds_measures_nothing(engine: Engine, sequences: list[ProcessorSequence]) -> None:
    assert not BackgroundCalibration(engine.pair, QUICK).run_for(0, NEVER, Ticks())
    assert sequences == []


def test_setting_the_stop_event_ends_a_slice_within_one_step(
    engine: Engine, sequences: list[ProcessorSequence]
) -> None:
    learning, stop = BackgroundCalibration(engine.pair, QUICK), threading.Event()
    stop.set()
    assert not learning.run_for(1e9, stop)
    assert sequences == []
    counts: list[int] = []
    for allowed in (1, 2, 3):
        steps = itertools.count()

        def clock(allowed: int = allowed, steps: Iterator[int] = steps) -> float:
            if next(steps) == allowed:
                stop.set()
            return 0.0

        stop.clear()
        assert not learning.run_for(1e9, stop, clock)
        counts.append(next(steps))
    assert counts == [2, 3, 4]  # the clock call that set the event was the last one
    learning.close()


def test_a_slice_takes_eight_seconds_by_default() -> None:
    assert CALIBRATION_BUDGET_S == 8.0


def test_an_error_is_raised_once_and_the_next_slice_measures_what_is_missing(
    engine: Engine, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = BackgroundCalibration(engine.pair, QUICK)

    def fail(_sequence: object, _tokens: list[int], _rows: int) -> None:
        raise ForwardError("the device went away", code=-3)

    assert not learning.run_for(3, NEVER, Ticks())
    with monkeypatch.context() as patch:
        watch_forwards(patch, fail)
        with pytest.raises(ForwardError):
            learning.run_for(1e9, NEVER)
    assert not learning.complete
    assert learning.run_for(1e9, NEVER)
    assert measured(home) == {"contention": 1, "times": 2, "widths": 1}


def test_closing_a_running_calibration_frees_its_sequence(engine: Engine, sequences: list[ProcessorSequence]) -> None:
    learning = BackgroundCalibration(engine.pair, QUICK)
    assert not learning.run_for(5, NEVER, Ticks())
    assert not all_closed(sequences)
    learning.close()
    learning.close()
    assert all_closed(sequences)
    assert not learning.run_for(1e9, NEVER)
    assert not learning.complete


def test_closing_a_calibration_from_another_thread_waits_for_its_step(
    engine: Engine, sequences: list[ProcessorSequence]
) -> None:
    for delay_s in (0.0, 0.005, 0.02):
        learning, begun, outcome = (
            BackgroundCalibration(engine.pair, QUICK, afresh=True),
            threading.Event(),
            list[object](),
        )

        def learn(
            learning: BackgroundCalibration = learning,
            begun: threading.Event = begun,
            outcome: list[object] = outcome,
        ) -> None:
            begun.set()
            try:
                outcome.append(learning.run_for(1e9, NEVER))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=learn)
        thread.start()
        assert begun.wait(60)
        threading.Event().wait(delay_s)
        learning.close()
        thread.join(60)
        assert outcome == [False]
        assert all_closed(sequences)


# ------------------------------------------------------------------------------------------------ a busy machine


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The share of the processors that other programs take."""
    looks, taken = itertools.count(), {"share": 0.0}
    used = {"busy": 0.0}

    def look() -> Used:
        used["busy"] += taken["share"]
        return Used(own_s=0.0, busy_s=used["busy"], total_s=float(next(looks)))

    monkeypatch.setattr(neighbours, "processor_seconds", look)
    return taken


def models(engine: Engine) -> tuple[ModelFacts, ModelFacts]:
    """The facts of target and drafter."""
    drafter = engine.pair.measurements.drafter
    assert drafter is not None
    return engine.pair.measurements.target, drafter


def test_times_measured_on_a_busy_machine_are_used_until_it_is_idle(
    engine: Engine, home: Home, others: dict[str, float]
) -> None:
    others["share"] = 0.4
    assert engine.calibrate() == pytest.approx(0.4)
    assert measured(home) == {"contention": 1, "times": 2, "widths": 1}
    assert not engine.unmeasured
    assert MEASURED_BUSY in engine.plan.why
    assert engine.can_calibrate
    before = engine.pair.measurements.target_times()
    assert engine.calibrate_for(1e9) == ()
    assert engine.pair.measurements.target_times() == before, "the machine is still busy"
    both = engine.pair.measurements.store.load(CONTENTION, *models(engine))
    assert both is not None
    assert both.busy == pytest.approx(0.4)
    others["share"] = 0.0
    assert engine.calibrate_for(1e9) == (), "the new plan is reported once"
    assert engine.pair.measurements.target_times() != before
    again = engine.pair.measurements.store.load(CONTENTION, *models(engine))
    assert again is not None
    assert again.busy == 0.0
    assert not engine.can_calibrate
    assert MEASURED_BUSY not in engine.plan.why
    assert engine.calibrate() == 0.0


def test_other_settings_timed_beside_other_programs_are_not_stored(
    engine: Engine, home: Home, others: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are only compared, and a comparison needs quiet times of both."""
    fix_plain_ratio(monkeypatch, 1.5)
    others["share"] = 0.4
    engine.calibrate(afresh=True, alternatives=True)
    assert "plain" not in stored(home)
    others["share"] = 0.0
    engine.calibrate(afresh=True, alternatives=True)
    assert stored(home)["plain"] >= 1


def test_fewer_threads_are_not_chosen_while_other_programs_run(
    engine: Engine, home: Home, others: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another program uses one of two processors, one thread is faster than two."""
    fix_plain_ratio(monkeypatch, 0.5)
    single = engine.pair.target.facts_with(threads=1)
    engine.pair.measurements.store.save(PLAIN, 1e-6, single)  # the result of an earlier, quiet calibration
    others["share"] = 0.4
    engine.calibrate(afresh=True, alternatives=True)
    assert engine.pair.target.settings.threads == 2
    assert engine.pair.measurements.store.plain_s(single) == 1e-6
    others["share"] = 0.0
    engine.calibrate(afresh=True, alternatives=True)
    assert engine.pair.measurements.store.plain_s(single) != 1e-6
    assert engine.pair.target.settings.threads == 1


def test_while_other_programs_run_fewer_threads_are_timed_once(
    engine: Engine, others: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times are discarded anyway: with repeats, a quick calibration had no time for the target."""
    timed: list[int] = []

    def measure(_target: Model, other: Model, _context: int) -> Generator[float, None, float]:
        yield 1.0
        timed.append(other.facts.threads)
        return 0.5

    monkeypatch.setattr(module, "measure_plain_ratio", measure)
    for share, times in ((0.4, 1), (0.0, 3)):
        timed.clear()
        others["share"] = share
        BackgroundCalibration(engine.pair, QUICK, alternatives=True).run()
        assert timed.count(1) == times


def test_during_an_answer_calibrate_for_does_nothing_and_calibrate_counts_as_disturbed(
    engine: Engine, home: Home
) -> None:
    with engine.session() as session:
        generation = session.generate("hello", max_tokens=5)
        next(generation)
        assert engine.pair.answering
        assert engine.calibrate_for(1e9) == ()
        assert set(measured(home)) <= {"widths"}, "nothing was measured"
        assert engine.calibrate() == 1.0
        assert engine.pair.measurements.disturbed
        generation.close()
        assert not engine.pair.answering
    while engine.can_calibrate:
        engine.calibrate_for(1e9)
    assert not engine.pair.measurements.disturbed
