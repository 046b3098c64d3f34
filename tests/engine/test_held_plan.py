"""Plans that are held to what answers got: across processes of one answer, and within one process.

The true times are those of tests/support/steady_rounds.py, by which every plan is held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration.kinds import CONTENTION
from edgespec.engine.engine import Engine
from edgespec.engine.pair import loaded_pair
from edgespec.files.home import Home
from edgespec.hardware import neighbours
from edgespec.hardware.neighbours import Used
from edgespec.planning.choice.planner import ESTIMATED
from edgespec.planning.choice.settled import Answered, Settled
from edgespec.planning.cost.contention import Contention
from edgespec.planning.depth.answer import AnswerDepth
from edgespec.planning.depth.base import FixedDepth
from edgespec.planning.depth.outcome import Outcome, Spread
from edgespec.runtimes.native.library import PORTABLE
from tests.support.calibrating import fix_plain_ratio, shorten_calibration, stored
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import DRAFT_S, FORWARD_S, SHAPE, TinyModels, answer, invent_measurements, load_drafter

# A pipelined answer that was slower than a serial one.
LOST = Outcome(
    rounds=50, tokens_per_round=Spread(1.2, 1.1, 1.3), token_s=Spread(0.009, 0.0085, 0.0095), mode="serial"
)
REPEATING = "the people use water and the people use words and the people"


@pytest.fixture(autouse=True)
def _has_estimates() -> None:
    if require_native().levels[-1] == PORTABLE:
        pytest.skip("in portable C there are no estimates to go back to")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of ten layers, so that the drafter with two gains."""
    folder = tmp_path_factory.mktemp("held")
    return write_tiny_gguf(folder / "large.gguf", seed=5, layers=10, **SHAPE)  # type: ignore[arg-type]


@pytest.fixture
def load(tiny: TinyModels, home: Home, target: Path) -> Callable[..., Engine]:
    def load(**overrides: Any) -> Engine:
        settings = {"store_home": home, "draft": str(tiny.target), "lookup": False, "context": 400, **overrides}
        engine = tiny.load(target, **settings)
        load_drafter(engine)
        return engine

    return load


def measure(engine: Engine, target_s: float, drafter_s: float) -> None:
    """A store in which calibration found these times."""
    invent_measurements(engine, target_s, drafter_s)
    assert engine.pair.measurements.drafter is not None
    engine.pair.measurements.store.save(
        CONTENTION, Contention(), engine.pair.measurements.target, engine.pair.measurements.drafter
    )


def contradicted(engine: Engine) -> bool:
    return "times_contradicted" in engine.plan.as_json()["reason_codes"]


def generate(engine: Engine) -> None:
    with engine.session() as session:
        answer(session.generate(REPEATING, max_tokens=120))


def end_answer(engine: Engine) -> None:
    engine.pair.answered(engine.pair.policy.answer(prompt_tokens=9), beside_others=False)


@pytest.mark.parametrize("wrong", [0.5, 2.0])
@pytest.mark.parametrize("model", ["target", "drafter"])
def test_a_wrong_store_is_left_after_two_processes_of_one_answer(
    load: Callable[..., Engine], home: Home, model: str, wrong: float
) -> None:
    target_s, drafter_s = (FORWARD_S * wrong, DRAFT_S) if model == "target" else (FORWARD_S, DRAFT_S * wrong)
    with load() as engine:
        measure(engine, target_s, drafter_s)
        assert engine.pair.measurements.costs().measured
        generate(engine)
        assert engine.pair.measurements.costs().measured, "one answer decides nothing"
    with load() as engine:
        assert not contradicted(engine)
        (latest, announced) = engine.pair.measurements.answered.lines
        assert "promised" in latest
        assert "contradicts the measured times" in announced
        generate(engine)
        assert contradicted(engine), "the plan follows in the same process"
    with load() as engine:
        assert contradicted(engine)
        assert ESTIMATED in engine.plan.why
        assert engine.plan.mode == "serial"
        assert not engine.pair.measurements.costs().measured
        before = stored(home)["times"]
        generate(engine)
        assert stored(home)["times"] == before, "the measured times stay until the next calibration"


def test_right_times_are_confirmed_and_kept(load: Callable[..., Engine]) -> None:
    with load() as engine:
        measure(engine, FORWARD_S, DRAFT_S)
        assert not engine.pair.measurements.costs().checked
        generate(engine)
        generate(engine)
        assert engine.pair.measurements.costs().measured
        assert engine.pair.measurements.costs().checked
        assert not contradicted(engine)


def test_a_calibration_forgets_what_answers_said_of_earlier_times(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_calibration(monkeypatch)
    fix_plain_ratio(monkeypatch, 100.0)
    with load() as engine:
        measure(engine, 0.5 * FORWARD_S, DRAFT_S)
        generate(engine)
        generate(engine)
        assert contradicted(engine)
        engine.calibrate(afresh=True)
        assert not contradicted(engine)
        assert engine.pair.measurements.costs().measured
        assert engine.pair.measurements.answered == Answered()
    with load() as engine:
        assert engine.pair.measurements.answered == Answered()


def test_an_answer_beside_other_programs_says_nothing(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(range(10**6))

    def half() -> Used:
        now = float(next(looks))
        return Used(own_s=0.0, busy_s=0.5 * now, total_s=now)

    with load() as engine:
        measure(engine, 0.5 * FORWARD_S, DRAFT_S)
        with monkeypatch.context() as patch:
            patch.setattr(neighbours, "processor_seconds", half)
            for _ in range(3):
                generate(engine)
        assert engine.pair.measurements.answered == Answered()
        generate(engine)
        assert engine.pair.measurements.answered.times.ahead == "estimated"


def test_a_drafter_in_a_separate_process_does_not_count_as_another_program(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it runs in one, what this process's workers used is taken off; then other programs count as ever."""
    looks, worked = iter(range(100)), iter(range(100))
    monkeypatch.setattr(neighbours, "processor_seconds", lambda: Used(0.0, 0.5 * (now := next(looks)), now))
    for isolation, share, busy in (("thread", 0.5, True), ("process", 0.5, False), ("process", 0.2, True)):
        monkeypatch.setattr(loaded_pair, "worker_seconds", lambda share=share: share * next(worked))
        with load(draft_isolation=isolation) as engine:
            drafter = engine.pair.measurements.drafter
            assert drafter is not None
            with (around := loaded_pair.neighbours_of(drafter)):
                pass
            assert around.busy is busy
            measure(engine, FORWARD_S, DRAFT_S)
            monkeypatch.setattr(AnswerDepth, "outcome", lambda _self: LOST)
            engine.pair.answered(engine.pair.policy.answer(prompt_tokens=9), beside_others=True)
            assert engine.pair.measurements.answered == Answered()


def test_an_answer_that_ends_while_the_pair_changes_does_not_wait(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnswerDepth, "outcome", lambda _self: LOST)
    with load() as engine:
        measure(engine, FORWARD_S, DRAFT_S)
        with engine.pair.lock:
            ending = threading.Thread(target=end_answer, args=(engine,))
            ending.start()
            ending.join(60)
            assert not ending.is_alive()
        assert engine.pair.measurements.answered == Answered()
        end_answer(engine)
        assert engine.pair.measurements.answered.latest is not None


def test_answers_that_do_not_follow_the_plan_do_not_count(load: Callable[..., Engine]) -> None:
    with load() as engine:
        measure(engine, 0.5 * FORWARD_S, DRAFT_S)
        own = replace(engine.pair.speculation(), policy=engine.pair.policy)
        with engine.session(_speculation=own) as session:
            answer(session.generate(REPEATING, max_tokens=60))
        with engine.session() as session:
            answer(session.generate(REPEATING, max_tokens=60, depth=2))
            answer(session.generate(REPEATING, max_tokens=60, depth=0))
        assert engine.pair.measurements.answered == Answered()


def test_a_pipelined_plan_that_loses_twice_becomes_serial_for_this_and_later_processes(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store claims a gain of running in parallel, which no answer confirms."""
    with load() as engine:
        known = engine.pair.measurements
        assert known.drafter is not None
        measure(engine, FORWARD_S, 0.4 * FORWARD_S)
        known.answered = Answered(mode=Settled(chosen="pipelined"))
    with load() as engine:
        assert engine.plan.mode == "pipelined"
        monkeypatch.setattr(AnswerDepth, "outcome", lambda _self: LOST)
        end_answer(engine)
        assert engine.plan.mode == "pipelined"
    with load() as engine:
        assert engine.plan.mode == "pipelined"
        end_answer(engine)
        assert engine.plan.mode == "serial"
        assert "the last answers in parallel were slower than serial ones" in " ".join(engine.plan.reasons)
        engine.pair.answered(FixedDepth(3), beside_others=False)
    with load() as engine:
        assert engine.plan.mode == "serial"
