"""Calibrating an engine: the first answer never waits, calibration comes later, one process at a time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import edgespec.engine.pair.load as load_module
from edgespec.calibration.timing import Scope, measure_target, sample_text
from edgespec.engine.engine import Engine
from edgespec.engine.pair.load import WAITING
from edgespec.engine.pair.measurements import PairMeasurements
from edgespec.errors import CancelledError
from edgespec.files.home import Home
from edgespec.interfaces.model import Model
from edgespec.planning.cost.acceptance import NO_PRIOR
from edgespec.planning.depth.base import FixedDepth
from edgespec.planning.depth.control import DepthControl
from tests.support.calibrating import damage, fix_plain_ratio, measured, shorten_calibration, stored
from tests.support.command_line import environment
from tests.support.http_server import wait_until
from tests.support.started_threads import started_threads
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels, answer, invent_measurements, load_drafter, require_speculation

REPEATING = "the people use water and the people use words and the people"


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_calibration(monkeypatch)
    # The next engine must not find the other runtime faster, whatever else the machine does: there, nothing is
    # measured.
    fix_plain_ratio(monkeypatch, 100.0)
    # Agreement is measured only if drafting may gain, which these tiny models' times leave to chance.
    monkeypatch.setattr(PairMeasurements, "may_pay", lambda _self, _source: False)


@pytest.fixture
def load(tiny: TinyModels, home: Home) -> Callable[..., Engine]:
    """The pair with a separate home, in llama.cpp: nothing is drafted before calibration."""

    def load(**overrides: object) -> Engine:
        settings = {"store_home": home, "context": 400, "runtime": "llama", "draft_runtime": "llama", **overrides}
        return tiny.load(**settings)  # type: ignore[arg-type]

    return load


def learn_all(engine: Engine) -> tuple[str, ...]:
    for _ in range(2000):
        reasons = engine.calibrate_for(0.02)
        if reasons:
            return reasons
    raise AssertionError("it never came to an end")


# -------------------------------------------------------------------------------------------------- the first answer


def test_the_first_answer_waits_for_no_measurement(
    load: Callable[..., Engine], tiny: TinyModels, widths: list[int]
) -> None:
    with load() as engine, engine.session() as session:
        command = f"edgespec calibrate {tiny.target} --draft {tiny.drafter} --quick"
        assert widths == []
        done = answer(session.generate("hello", max_tokens=10))
        assert (done.plan.mode, done.stats.proposed) == ("plain", 0)
        # Widths: the prompt without its last token, that token, and each answer token but the last.
        assert len(widths) == 2 + 9
        assert done.speculation_off == f"this machine is not calibrated yet (`{command}` takes a minute)"
        assert engine.unmeasured


def test_load_with_calibrate_measures_once_and_later_loads_measure_nothing(
    load: Callable[..., Engine], home: Home, widths: list[int]
) -> None:
    with load(calibrate=True) as engine:
        assert not engine.unmeasured
        assert engine.plan.predicted_tokens_per_s is not None
        assert measured(home) == {"contention": 1, "times": 2, "widths": 1}
        assert engine.pair.request.not_calibrated not in engine.plan.why
    widths.clear()
    for calibrate in (True, False):
        with load(calibrate=calibrate) as again:
            assert not again.unmeasured
            assert again.plan.reasons == engine.plan.reasons
    assert widths == []


def test_a_mixture_of_experts_is_timed_on_a_text_while_it_loads(
    load: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of random tokens, neighbours share fewer experts, and these times stay."""
    texts = list[list[int]]()

    def measure(model: Model, context_length: int, scope: Scope, *, text: list[int]) -> object:
        texts.append(text)
        return measure_target(model, context_length, replace(scope, repetitions=1), text=text)

    monkeypatch.setattr(load_module, "measure_target", measure)
    path = write_tiny_gguf(tmp_path / "mixture.gguf", architecture="qwen3moe", experts=(6, 2), quant="Q8_0")
    with load(target=path, draft=None, context=140, calibrate=True) as engine:
        assert texts == [engine.pair.prompts.encode_raw(sample_text())]
        assert engine.pair.measurements.target_times() is not None


def test_calibrate_measures_what_is_missing_and_afresh_measures_everything(
    load: Callable[..., Engine], home: Home
) -> None:
    with load() as engine, engine.session() as session:
        answer(session.generate("hello", max_tokens=3))
        engine.calibrate()
        assert not engine.unmeasured
        first, first_facts = engine.pair.measurements.target_times(), engine.pair.target.facts
        engine.calibrate()
        assert engine.pair.measurements.target_times() == first
        engine.calibrate(afresh=True)
        assert engine.pair.measurements.target_times() != first
        rivals = [each for each in engine.pair.pool.places.targets if each.facts.runtime != first_facts.runtime]
        assert stored(home).get("plain", 0) == len(rivals), "no other setting of this runtime was timed"
        assert answer(session.generate("more", max_tokens=3)).text


# ---------------------------------------------------------------------------------------------- in slices


def test_calibrating_in_slices_ends_with_a_new_plan(load: Callable[..., Engine], home: Home) -> None:
    with load() as engine:
        assert engine.calibrate_for(0.0) == ()
        assert measured(home) == {}
        reasons = learn_all(engine)
        assert reasons == engine.plan.reasons
        assert engine.pair.request.not_calibrated.text not in reasons
        assert not engine.unmeasured
        assert measured(home) == {"contention": 1, "times": 2, "widths": 1}
        assert engine.calibrate_for() == ()  # no measurement is missing


def test_a_session_opened_before_calibration_follows_the_new_plan(load: Callable[..., Engine]) -> None:
    with load() as engine, engine.session() as session:
        before = answer(session.generate(REPEATING, max_tokens=150))
        assert (before.plan.mode, before.stats.proposed) == ("plain", 0)
        invent_measurements(engine)
        require_speculation(engine)
        load_drafter(engine)
        session.clear()
        after = answer(session.generate(REPEATING, max_tokens=150))
        assert after.plan.mode == "serial"
        assert after.stats.rounds_by_source, "gain of tiny models is not tested here"
        assert after.token_ids == before.token_ids


def test_an_answer_reports_the_plan_it_began_with(load: Callable[..., Engine]) -> None:
    with load() as engine, engine.session() as session:
        generation = session.generate(REPEATING, max_tokens=150)
        next(generation)
        invent_measurements(engine)
        require_speculation(engine)
        done = answer(generation)
        assert (done.plan.mode, done.plan.predicted_tokens_per_s) == ("plain", None)
        assert done.speculation_off == engine.pair.request.not_calibrated.text.removeprefix("plain: ")
        assert answer(session.generate("continue", max_tokens=5)).plan.mode == "serial"


def test_calibrate_for_stops_at_its_stop_event(load: Callable[..., Engine], widths: list[int]) -> None:
    stop = threading.Event()
    stop.set()
    with load() as engine:
        assert engine.calibrate_for(1e9, stop) == ()
        assert widths == []


@pytest.mark.parametrize("depth", [0, 3])
def test_a_fixed_depth_needs_no_calibration(load: Callable[..., Engine], widths: list[int], depth: int) -> None:
    with load(depth=depth) as engine:
        widths.clear()
        assert engine.calibrate_for() == ()
        assert widths == []


def test_calibration_reports_a_drafter_that_fails_to_load_once(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load() as engine:
        monkeypatch.setattr(engine.pair.pool, "left_bytes", 1)
        assert any("the model drafter is lost" in reason for reason in learn_all(engine))
        assert engine.calibrate_for() == ()
        with engine.session() as session:
            assert answer(session.generate("hello", max_tokens=5)).text


def test_a_loop_of_calibrations_ends_with_the_engine(load: Callable[..., Engine]) -> None:
    engine = load()
    engine.calibrate_for(0.0)  # begins the calibration
    assert engine.can_calibrate
    engine.close()
    assert not engine.can_calibrate


def test_calibrate_for_does_nothing_after_close(load: Callable[..., Engine]) -> None:
    engine = load()
    assert engine.calibrate_for(0.01) == ()
    engine.close()
    assert engine.unmeasured


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.1])
def test_closing_an_engine_while_another_thread_calibrates(load: Callable[..., Engine], delay_s: float) -> None:
    engine = load()
    engine.calibrate_for(0.0)  # begins the calibration
    outcome: list[object] = []

    def learn() -> None:
        try:
            outcome.append(engine.calibrate_for(1e9))
        except BaseException as error:
            outcome.append(error)

    learner = threading.Thread(target=learn)
    threads = started_threads()
    learner.start()
    threading.Event().wait(delay_s)
    engine.close()
    learner.join(60)
    assert outcome in ([()], [engine.plan.reasons])  # models this small may be measured by then
    wait_until(lambda: started_threads() <= threads)


# ------------------------------------------------------------------------------------------ other processes

HOLD = """
import sys
from pathlib import Path
from edgespec.calibration.measurement_store import Measurements
with Measurements(Path("unused"), "machine").exclusive(Path(sys.argv[1]), wait=False) as alone:
    print(alone, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def other_process(home: Home) -> Iterator[Callable[[], None]]:
    """Starts another process that calibrates, until the yielded function is called."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home.locks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(home.root),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "True\n"

    def end() -> None:
        child.communicate("\n", timeout=60)

    try:
        yield end
    finally:
        child.kill()
        child.wait()


def test_calibrate_for_does_nothing_while_another_process_calibrates(
    load: Callable[..., Engine], widths: list[int], other_process: Callable[[], None]
) -> None:
    with load() as engine:
        assert engine.calibrate_for(1e9) == ()
        assert widths == []
        with engine.session() as session:  # answering needs no lock
            answer(session.generate("hello", max_tokens=3))
        other_process()
        assert learn_all(engine)


def test_calibrate_waits_while_another_process_calibrates(
    load: Callable[..., Engine], widths: list[int], other_process: Callable[[], None]
) -> None:
    with load() as engine:
        calibrating = threading.Thread(target=engine.calibrate)
        calibrating.start()
        threading.Event().wait(0.3)
        assert widths == []
        other_process()
        calibrating.join(60)
        assert not engine.unmeasured


@pytest.mark.usefixtures("other_process")
def test_a_wait_for_another_process_ends_with_the_engine_and_with_the_load(load: Callable[..., Engine]) -> None:
    engine = load()
    told = list[object]()

    def close(event: object) -> None:
        told.append(event)
        if len(told) == 2:
            engine.close()

    with pytest.raises(CancelledError, match="calibrating was cancelled"):
        engine.calibrate(progress=close)
    assert told == [WAITING, WAITING]
    heard = list[object]()
    with pytest.raises(CancelledError, match="loading was cancelled"):
        load(calibrate=True, progress=heard.append, cancelled=lambda: WAITING in heard)


# ------------------------------------------------------------------------------------- stored measurements


def test_measurements_of_another_process_are_used(load: Callable[..., Engine]) -> None:
    with load() as engine:
        with load() as other:
            invent_measurements(other)
        assert engine.pair.measurements.costs().measured
        assert engine.plan.mode == "plain"
        engine.pair.replan()
        assert engine.plan == other.plan


@pytest.mark.parametrize("kind", ["times", "widths"])
def test_a_damaged_measurement_is_reported_and_made_again(load: Callable[..., Engine], home: Home, kind: str) -> None:
    with load(calibrate=True):
        pass
    (path, *_) = damage(home, kind)
    with load() as engine:
        assert engine.unmeasured
        assert any(f"{path.name} is ignored and made again: it is damaged" in r for r in engine.plan.reasons)
        assert engine.plan.mode == "plain"
    with load(calibrate=True) as engine:
        assert not engine.unmeasured
        assert engine.pair.request.not_calibrated not in engine.plan.why
    with load() as engine:
        assert not engine.unmeasured
        assert not any("ignored" in reason for reason in engine.plan.reasons)


def test_acceptance_is_stored_at_close_and_read_at_load(load: Callable[..., Engine], home: Home) -> None:
    with load() as engine:
        invent_measurements(engine)
        require_speculation(engine)
        assert engine.pair.measurements.priors == {}
        assert isinstance(engine.pair.policy, DepthControl)
        load_drafter(engine)
        with engine.session() as session:
            # Tiny models gain nothing by drafting: a later answer may not draft at all.
            drafted = []
            for _ in range(3):
                drafted += answer(session.generate(REPEATING, max_tokens=200)).stats.rounds_by_source
                session.clear()
            assert drafted
            answer(session.generate("hello", max_tokens=60, depth=3))
        learned = engine.pair.policy.priors()
        assert "acceptance" not in stored(home)
    assert any(prior != NO_PRIOR for prior in learned.values())
    with load() as engine:
        assert engine.pair.measurements.priors == {
            source: prior for source, prior in learned.items() if prior != NO_PRIOR
        }
        assert isinstance(engine.pair.policy, DepthControl)
        assert engine.pair.policy.priors() == learned
    damaged = damage(home, "acceptance")
    with load() as engine:
        assert engine.pair.measurements.priors == {}
        assert any(damaged[0].name in reason for reason in engine.plan.reasons)


# -------------------------------------------------------------------------------------------------- policies

POLICIES = {
    "cost": DepthControl,
    "fixed": FixedDepth,
    "entropy": FixedDepth,
    "confidence": FixedDepth,
}


@pytest.mark.parametrize("name", POLICIES)
def test_each_depth_policy_follows_a_new_plan(load: Callable[..., Engine], name: str) -> None:
    with load(depth_policy=name) as engine, engine.session() as session:
        assert type(engine.pair.policy) is POLICIES[name]
        expected = answer(session.generate(REPEATING, max_tokens=100))
        assert expected.stats.proposed == 0
        invent_measurements(engine)
        require_speculation(engine)
        load_drafter(engine)
        assert type(engine.pair.policy) is POLICIES[name]
        session.clear()
        done = answer(session.generate(REPEATING, max_tokens=100))
        assert done.token_ids == expected.token_ids
        assert done.stats.rounds_by_source


def test_a_depth_given_as_a_number_uses_the_fixed_policy(load: Callable[..., Engine]) -> None:
    with load(depth=2, depth_policy="entropy") as engine:
        require_speculation(engine, 2)
        assert type(engine.pair.policy) is FixedDepth
        assert engine.pair.policy.depth == 2
        engine.calibrate()
        assert type(engine.pair.policy) is FixedDepth
        assert engine.plan.depth_cap == 2


def test_the_drafters_measurements_are_stored_under_the_loaded_drafters_settings(
    tiny: TinyModels, home: Home
) -> None:
    narrow = tiny._make("narrow", heads=4, kv_heads=2)  # its heads do not allow a quantised cache
    for drafter in (tiny.drafter, narrow):
        with tiny.load(store_home=home, draft=str(drafter)) as engine:
            described, loaded = engine.pair.measurements.drafter, engine.pair.pool.drafter_model().facts
            assert described is not None
            assert described == loaded
    assert isinstance(narrow, Path)
