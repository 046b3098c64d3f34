"""Timing plain decoding in the processor's other runtime: once, in steps, and given up cleanly."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.calibration.kinds import PLAIN, TIMES
from edgespec.calibration.timing import QUICK
from edgespec.engine.engine import Engine
from edgespec.engine.pair.calibration_run import BackgroundCalibration
from edgespec.engine.pair.measurements import PairMeasurements
from edgespec.errors import ClosedError, ModelFileError, WorkerLostError
from edgespec.files.home import Home
from edgespec.files.progress import QUIET, Job, Loading
from edgespec.placement.candidates import Placement
from edgespec.placement.model_pool import ModelPool
from edgespec.placement.prepared import PreparedModel
from edgespec.runtimes.background import BackgroundModel
from edgespec.runtimes.native import runtime as native_runtime
from edgespec.runtimes.runtime import LoadedModel
from tests.support.calibrating import fix_plain_ratio, shorten_calibration, stored
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels, answer

NEVER = threading.Event()
WAIT_S = 60.0
OTHER = {"native": "llama", "llama": "native"}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    require_native()
    shorten_calibration(monkeypatch)
    monkeypatch.setattr(PairMeasurements, "may_pay", lambda _self, _source: False)


@pytest.fixture(params=OTHER)
def first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The first runtime: ours if the kernels are more than portable C."""
    names = ("portable", "fast") if request.param == "native" else ("portable",)
    monkeypatch.setattr(native_runtime, "library", SimpleNamespace(load=lambda: SimpleNamespace(levels=names)))
    return str(request.param)


@pytest.fixture
def engine(tiny: TinyModels, home: Home, first: str) -> Iterator[Engine]:
    """A target with lookup drafting; nothing is measured."""
    with tiny.load(store_home=home, context=200, draft="none") as engine:
        assert engine.plan.target.runtime == first
        yield engine


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[BackgroundModel]:
    """The models loaded in other places."""
    found: list[BackgroundModel] = []
    open_target = ModelPool.open_target

    def watched(pool: ModelPool, place: Placement) -> BackgroundModel:
        found.append(open_target(pool, place))
        return found[-1]

    monkeypatch.setattr(ModelPool, "open_target", watched)
    return found


def rival(engine: Engine) -> Placement:
    """The target's place in the other runtime."""
    (place,) = [each for each in engine.pair.pool.places.targets if each.facts.runtime != engine.plan.target.runtime]
    return place


def stages(told: list[Loading]) -> list[str]:
    return list(dict.fromkeys(step.stage for step in told if step.stage.startswith("measuring")))


def is_closed(model: BackgroundModel) -> bool:
    try:
        model.open(16).close()
    except ClosedError:
        return True
    except WorkerLostError:
        return False  # the model is still loading
    return False


# ------------------------------------------------------------------------------------------------- what is timed


def test_the_other_runtime_is_timed_once_by_a_calibration(
    engine: Engine, home: Home, first: str, opened: list[BackgroundModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_plain_ratio(monkeypatch, 1.5)
    told: list[Loading] = []
    BackgroundCalibration(engine.pair, QUICK).run(told.append)
    assert stages(told) == ["measuring target", f"measuring target on cpu ({OTHER[first]})"]
    assert stored(home) == {"plain": 1, "times": 1, "widths": 1}
    own_s = engine.pair.measurements.store.plain_s(engine.pair.target.facts)
    assert own_s is not None
    assert engine.pair.measurements.store.load(PLAIN, rival(engine).facts) == pytest.approx(1.5 * own_s)
    (model,) = opened
    assert model.facts == rival(engine).facts
    assert is_closed(model)
    told.clear()
    BackgroundCalibration(engine.pair, QUICK).run(told.append)
    assert (told, len(opened)) == ([], 1)


def test_measuring_afresh_times_the_other_runtime_again(
    engine: Engine, opened: list[BackgroundModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_plain_ratio(monkeypatch, 1.5)
    BackgroundCalibration(engine.pair, QUICK).run()
    fix_plain_ratio(monkeypatch, 1.25)
    BackgroundCalibration(engine.pair, QUICK, afresh=True).run()
    own_s = engine.pair.measurements.store.plain_s(engine.pair.target.facts)
    assert own_s is not None
    assert engine.pair.measurements.store.load(PLAIN, rival(engine).facts) == pytest.approx(1.25 * own_s)
    assert len(opened) == 2
    # Full times of the other runtime are kept until a full calibration repeats them.
    BackgroundCalibration(engine.pair, QUICK, alternatives=True).run()
    BackgroundCalibration(engine.pair, QUICK, afresh=True).run()
    assert len(opened) == 3


def test_the_stored_time_is_the_ratio_of_runtimes_times_the_targets_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, int]] = []

    def measure(own: Any, other: Any, context_length: int) -> Generator[float, None, float]:
        seen.append((own.facts.runtime, other.facts.runtime, context_length))
        yield 1.0
        return 0.25

    monkeypatch.setattr("edgespec.engine.pair.calibration_run.measure_plain_ratio", measure)
    BackgroundCalibration(engine.pair, QUICK).run()
    assert seen == [(engine.plan.target.runtime, OTHER[engine.plan.target.runtime], 200)]


def test_the_other_runtime_is_timed_in_slices_too(engine: Engine, home: Home) -> None:
    learning = BackgroundCalibration(engine.pair, QUICK)
    for _ in range(3000):
        if learning.run_for(0.001, NEVER):
            break
    assert learning.complete
    assert stored(home) == {"plain": 1, "times": 1, "widths": 1}


def test_with_alternatives_the_other_runtime_is_measured_completely(
    engine: Engine, home: Home, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_plain_ratio(monkeypatch, 1.5)
    told: list[Loading] = []
    BackgroundCalibration(engine.pair, QUICK, alternatives=True).run(told.append)
    assert f"measuring target on cpu ({OTHER[first]})" in stages(told)
    counts = stored(home)
    assert (counts["times"], counts["widths"]) == (2, 2)
    assert engine.pair.measurements.store.load(TIMES, rival(engine).facts) is not None
    told.clear()
    BackgroundCalibration(engine.pair, QUICK).run(told.append)
    assert told == [], "the full times include plain decoding"


def test_only_a_full_calibration_measures_the_drafter_in_both_runtimes(
    tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_plain_ratio(monkeypatch, 1.5)
    with tiny.load(store_home=home, context=200) as engine:
        BackgroundCalibration(engine.pair, QUICK).run()
        assert stored(home)["times"] == 2
        engine.calibrate(alternatives=True)
        assert stored(home)["times"] == 4
        drafters = {place.facts.runtime: place.facts for place in engine.pair.pool.places.drafters}
        assert set(drafters) == set(OTHER)
        assert all(engine.pair.measurements.store.load(TIMES, facts) is not None for facts in drafters.values())


# ------------------------------------------------------------------------------------------------- what is not


@pytest.mark.parametrize("runtime", OTHER)
def test_with_a_requested_runtime_the_other_one_is_not_timed(
    tiny: TinyModels, home: Home, opened: list[BackgroundModel], runtime: str
) -> None:
    with tiny.load(store_home=home, context=200, draft="none", runtime=runtime) as engine:
        BackgroundCalibration(engine.pair, QUICK).run()
        assert (stored(home), opened) == ({"times": 1, "widths": 1}, [])


def test_the_other_runtime_without_room_stays_unmeasured(
    engine: Engine, home: Home, opened: list[BackgroundModel]
) -> None:
    engine.pair.pool.left_bytes = 1000
    learning = BackgroundCalibration(engine.pair, QUICK)
    learning.run()
    assert (stored(home), opened) == ({"times": 1, "widths": 1}, [])
    assert not engine.unmeasured


def test_the_other_runtime_stays_unmeasured_if_it_does_not_load(
    engine: Engine, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: PreparedModel, _job: Job) -> LoadedModel:
        raise ModelFileError(model.file.path, "it could not be loaded")

    monkeypatch.setattr(PreparedModel, "load", refuse)
    BackgroundCalibration(engine.pair, QUICK).run()
    assert stored(home) == {"times": 1, "widths": 1}
    assert not engine.unmeasured


# ------------------------------------------------------------------------------------------------- given up


class Ticks:
    """A clock that advances by one at every call."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def __call__(self) -> float:
        return float(next(self._count))


def test_closing_while_the_other_runtime_is_timed_frees_its_model(
    engine: Engine, home: Home, opened: list[BackgroundModel]
) -> None:
    learning = BackgroundCalibration(engine.pair, QUICK)
    while not opened or opened[0].waits_because is not None:
        assert not learning.run_for(2, NEVER, Ticks())  # a step or two
    assert not learning.run_for(2, NEVER, Ticks())
    assert not is_closed(opened[0])
    learning.close()
    assert is_closed(opened[0])
    assert stored(home) == {"times": 1, "widths": 1}
    BackgroundCalibration(engine.pair, QUICK).run()
    assert stored(home) == {"plain": 1, "times": 1, "widths": 1}, "the next calibration measures the rest"


@pytest.fixture
def told() -> list[Job]:
    """What each load asks whether to end."""
    return []


@pytest.fixture
def slow_load(monkeypatch: pytest.MonkeyPatch, told: list[Job]) -> Iterator[threading.Event]:
    """Every load lasts until this event is set."""
    go, load = threading.Event(), PreparedModel.load

    def waiting(model: PreparedModel, job: Job = QUIET) -> LoadedModel:
        told.append(job)
        assert go.wait(WAIT_S)
        return load(model)  # cannot be interrupted

    monkeypatch.setattr(PreparedModel, "load", waiting)
    yield go
    go.set()


@pytest.mark.parametrize("loading", [True, False])
def test_an_answer_drops_the_second_copy_of_the_target(
    engine: Engine,
    opened: list[BackgroundModel],
    slow_load: threading.Event,
    told: list[Job],
    loading: bool,
) -> None:
    learning = engine._calibration = BackgroundCalibration(engine.pair, QUICK)
    while learning._rival is None:
        assert not learning.run_for(2, NEVER, Ticks())
    if not loading:
        slow_load.set()
        while opened[0].waits_because is not None:
            assert not learning.run_for(2, NEVER, Ticks())
    with engine.session() as session:
        started = time.perf_counter()
        assert answer(session.generate("hello", max_tokens=3)).text
        assert time.perf_counter() - started < WAIT_S / 2, "the answer does not wait for the load"
    assert learning._rival is None
    assert is_closed(opened[0])
    (job,) = told
    assert job.cancelled() == loading, "a running load is asked to end"
    slow_load.set()
    assert opened[0].wait_until_ended(WAIT_S)
    assert not learning.complete
    while not learning.run_for(100, NEVER, Ticks()):
        pass
    assert engine.pair.measurements.store.load(PLAIN, rival(engine).facts) is not None, (
        "a later slice measures the runtime"
    )


def test_after_three_dropped_copies_the_other_runtime_is_not_loaded_again(engine: Engine, home: Home) -> None:
    learning = engine._calibration = BackgroundCalibration(engine.pair, QUICK)
    for _ in range(3):
        while learning._rival is None:
            assert not learning.run_for(2, NEVER, Ticks())
        engine.pair.begin_answer()
    while not learning.run_for(100, NEVER, Ticks()):
        pass
    assert stored(home) == {"times": 1, "widths": 1}


def test_a_whole_calibration_begins_without_the_second_copy_of_the_target(
    engine: Engine, opened: list[BackgroundModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = engine._calibration = BackgroundCalibration(engine.pair, QUICK)
    while not opened or opened[0].waits_because is not None:
        assert not learning.run_for(2, NEVER, Ticks())
    closed: list[bool] = []
    monkeypatch.setattr(BackgroundCalibration, "run", lambda *_all, **_named: closed.append(is_closed(opened[0])))
    engine.calibrate()
    assert closed == [True]


def test_an_answer_keeps_measurements_that_need_no_second_copy_of_the_target(engine: Engine) -> None:
    learning = engine._calibration = BackgroundCalibration(engine.pair, QUICK)
    assert not learning.run_for(3, NEVER, Ticks())
    steps = learning._steps
    engine.pair.begin_answer()
    assert learning._steps is steps
    learning.drop_rival()
    assert learning._steps is steps


def test_a_change_of_power_source_does_not_wait_for_a_calibration_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = engine._calibration = BackgroundCalibration(engine.pair, QUICK)
    inside, release = threading.Event(), threading.Event()

    def steps() -> Generator[Loading, None, None]:
        try:
            inside.set()
            assert release.wait(WAIT_S)
            yield Loading("measuring")
            yield Loading("measuring")
        finally:
            ended.set()

    ended = threading.Event()
    monkeypatch.setattr(learning, "_all_steps", steps)
    running = threading.Thread(target=learning.run_for, args=(WAIT_S, NEVER))
    running.start()
    assert inside.wait(WAIT_S)
    give_up = engine.pair.on_new_power()
    assert give_up is not None
    give_up()
    assert not ended.is_set()
    release.set()
    running.join(WAIT_S)
    assert ended.is_set()
    assert learning._steps is None


def test_stopping_a_slice_does_not_wait_for_a_drafters_load(
    tiny: TinyModels, home: Home, slow_load: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_load.set()
    with tiny.load(store_home=home, context=200) as engine:
        slow_load.clear()
        drafting = threading.Event()
        open_drafter = ModelPool.drafter_model

        def noted(pool: ModelPool) -> Any:
            drafting.set()
            return open_drafter(pool)

        monkeypatch.setattr(ModelPool, "drafter_model", noted)
        stop = threading.Event()
        calibrating = threading.Thread(target=engine.calibrate_for, args=(WAIT_S, stop))
        calibrating.start()
        assert drafting.wait(WAIT_S)
        stop.set()
        calibrating.join(WAIT_S / 2)
        assert not calibrating.is_alive()
        slow_load.set()
