"""Measurements of a pair: read from the store, reported as missing, and acceptance stored for later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration import measurement_store
from edgespec.calibration.kinds import ACCEPTANCE, CONTENTION, TIMES, WIDTHS
from edgespec.calibration.measurement_store import Measurements
from edgespec.engine.pair.drafter_gain import Judgement, judge_drafter
from edgespec.engine.pair.measurements import PairMeasurements
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.planner import DraftingModel
from edgespec.planning.cost.acceptance import NO_PRIOR, POSITIONS, UNKNOWN, Acceptance, AcceptancePrior
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve
from edgespec.planning.cost.widths import BORDERS, ContextProbe, WidthProbe
from edgespec.planning.depth.base import FixedDepth
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.experience import SAMPLED
from tests.support.fake_runtime import FakeModel
from tests.support.planning import GIB, request
from tests.support.tiny_models import invented_times

TARGET = replace(FakeModel().facts, name="big", sha256="sha256:ab", threads=4)
DRAFTER = replace(TARGET, name="small", sha256="sha256:cd")
END = BORDERS[-1] + 12
PROBE = WidthProbe(widths=(1, 2, 3), contexts=(ContextProbe(start=END - 12, positions=12, max_abs_diff={}),))
BOTH = ("lookup", "model")


@pytest.fixture
def store(tmp_path: Path) -> Measurements:
    return Measurements(tmp_path / "measurements", "machine-1", "mains")


def knowledge(
    store: Measurements,
    *sources: str,
    drafter: ModelFacts = DRAFTER,
    context_length: int = 2048,
) -> PairMeasurements:
    drafters = (DraftingModel(facts=drafter),) if "model" in sources else ()
    wanted = request(*sources, drafters=drafters, context_length=context_length)
    return PairMeasurements(store, TARGET, wanted)


def test_an_empty_store_gives_no_times_and_no_acceptance(store: Measurements) -> None:
    known = knowledge(store, *BOTH)
    assert (known.widths(), known.target_times(), known.drafter_times()) == (None, None, None)
    assert known.priors == {}
    costs = known.costs()
    assert (costs.curves, dict(costs.drafts), dict(costs.acceptance)) == (None, {"lookup": FREE}, {})
    assert known.missing
    assert known.notes == (Reason("target_place", "big on cpu, 4 threads"),)


def test_measurements_are_missing_until_times_widths_and_contention_are_stored(store: Measurements) -> None:
    known = knowledge(store, *BOTH)
    store.save(TIMES, invented_times(0.1), TARGET)
    assert known.missing
    store.save(WIDTHS, PROBE, TARGET)
    assert known.missing
    assert not knowledge(store, "lookup").missing
    assert not knowledge(store).missing
    store.save(TIMES, invented_times(0.01), DRAFTER)
    assert known.missing, "contention is not known"
    store.save(CONTENTION, Contention(), TARGET, DRAFTER)
    assert not known.missing
    assert knowledge(Measurements(store.folder, "machine-1", "battery"), *BOTH).missing


def test_without_drafters_no_measurement_is_missing(store: Measurements) -> None:
    assert not knowledge(store).missing


def test_costs_come_from_the_stored_times(store: Measurements) -> None:
    store.save(TIMES, invented_times(0.1), TARGET)
    store.save(TIMES, invented_times(0.01), DRAFTER)
    costs = knowledge(store, *BOTH).costs()
    assert costs.curves is not None
    assert costs.curves.at(96).plain_s == 0.1
    assert costs.drafts["model"].token_s == 0.01
    assert costs.drafts["model"].lag_token_s == pytest.approx(0.001)
    assert "lookup" not in knowledge(store, "model").costs().drafts
    assert set(knowledge(store, "lookup").costs().drafts) == {"lookup"}


@pytest.mark.parametrize(
    ("ours", "target_busy", "drafter_busy", "measured"),
    [
        (True, 0.0, 0.0, (True, True)),
        (True, 0.4, 0.0, (False, False)),  # the plan rests on the ratio of both
        (True, None, 0.0, (False, False)),
        (True, 0.0, 0.4, (True, False)),
        (False, 0.4, 0.4, (True, True)),  # no estimates are known in another runtime
    ],
)
def test_estimates_come_before_times_that_other_programs_disturbed(
    store: Measurements, ours: bool, target_busy: float | None, drafter_busy: float, measured: tuple[bool, bool]
) -> None:
    facts: dict[str, Any] = {"settings": {"level": "avx2"}, "bit_equal_by_construction": True} if ours else {}
    target = replace(TARGET, bytes_per_forward=100, **facts)
    drafter = replace(DRAFTER, bytes_per_forward=10, **facts)
    if target_busy is not None:
        store.save(TIMES, replace(invented_times(0.1), busy=target_busy), target)
    store.save(TIMES, replace(invented_times(0.07), busy=drafter_busy), drafter)
    costs = PairMeasurements(store, target, request("model", drafters=(DraftingModel(facts=drafter),))).costs()
    assert costs.curves is not None
    assert (costs.curves.at(0).ratio(8) == 1.0, costs.drafts["model"].token_s == 0.07) == measured
    assert costs.measured == all(measured)
    assert costs.quiet == (ours or not target_busy)


@pytest.mark.parametrize(
    ("seen_s", "busy_s", "expected"),
    [
        (None, 0.554, 0.1),  # by the bytes
        (None, 0.07, 0.07),  # other programs make no forward faster
        (0.05, 0.554, 0.05),  # of the self-check
        (0.05, None, 0.05),
        (None, None, 0.1),
    ],
)
def test_a_busy_machines_time_is_only_the_most_that_a_plain_step_takes(
    store: Measurements, seen_s: float | None, busy_s: float | None, expected: float
) -> None:
    facts: dict[str, Any] = {"settings": {"level": "avx2"}, "bit_equal_by_construction": True}
    target = replace(TARGET, bytes_per_forward=2_500_000_000, **facts)
    store.save(WIDTHS, replace(PROBE, plain_forward_s=seen_s), target)
    if busy_s is not None:
        store.save(TIMES, replace(invented_times(busy_s), busy=0.6), target)
    costs = PairMeasurements(store, target, request("model")).costs()
    assert costs.curves is not None
    assert (costs.curves.at(0).plain_s, costs.plain_s, costs.measured) == (pytest.approx(expected), None, False)


def test_contention_measured_beside_other_programs_is_not_used_and_not_missing(store: Measurements) -> None:
    for facts, seconds in ((TARGET, 0.1), (DRAFTER, 0.01)):
        store.save(TIMES, invented_times(seconds), facts)
    store.save(WIDTHS, PROBE, TARGET)
    store.save(CONTENTION, Contention(busy=0.4), TARGET, DRAFTER)
    known = knowledge(store, *BOTH)
    assert not known.missing
    assert known.disturbed
    assert known.costs().contention is None
    store.save(CONTENTION, Contention(target_factor=1.5), TARGET, DRAFTER)
    store.save(CONTENTION, Contention(busy=0.4), TARGET, DRAFTER)
    assert not known.disturbed
    assert known.costs().contention == Contention(target_factor=1.5)


def test_a_drafter_is_not_judged_by_times_that_other_programs_disturbed(store: Measurements) -> None:
    """It would be too slow by them; by its size it may draft."""
    target, drafter = replace(TARGET, bytes_per_forward=100), replace(DRAFTER, bytes_per_forward=10)
    store.save(TIMES, invented_times(0.1), target)
    store.save(WIDTHS, PROBE, target)
    for busy, accepted in ((0.4, True), (0.0, False)):
        store.save(TIMES, replace(invented_times(0.2), busy=busy), drafter)
        judged = judge_drafter(store, target, DraftingModel(facts=drafter), request("lookup"), GIB)
        assert (judged.why_not is None) is accepted


@pytest.mark.parametrize(("rates", "tokens", "beats"), [((0.75, 0.7), 72, False), ((0.9, 0.6), 72, True)])
def test_a_drafter_beats_another_where_its_counted_guesses_cannot_be_chance(
    store: Measurements, rates: tuple[float, float], tokens: int, beats: bool
) -> None:
    target = replace(TARGET, bytes_per_forward=100)
    store.save(TIMES, invented_times(0.1), target)
    store.save(WIDTHS, PROBE, target)

    def judged(name: str, rate: float) -> Judgement:
        facts = replace(DRAFTER, name=name, sha256=f"sha256:{name}", bytes_per_forward=10)
        store.save(TIMES, invented_times(0.01), facts)
        prior = AcceptancePrior(by_position=(rate,) * POSITIONS, position_tokens=(tokens,) * POSITIONS)
        store.save(ACCEPTANCE, prior, target, f"model:{facts.sha256}")
        return judge_drafter(store, target, DraftingModel(facts=facts), request("lookup"), GIB)

    better, worse = judged("better", rates[0]), judged("worse", rates[1])
    assert (better.speedup or 0.0) > 1.03 * (worse.speedup or 0.0)
    assert better.beats(worse) is beats
    assert not worse.beats(better)


def test_stored_widths_are_used_only_up_to_their_context_length(store: Measurements) -> None:
    short = replace(PROBE, contexts=(ContextProbe(start=96, positions=12, max_abs_diff={}),))
    store.save(WIDTHS, short, TARGET)
    store.save(TIMES, invented_times(0.1), TARGET)
    assert knowledge(store, "lookup", context_length=128).widths() == short
    longer = knowledge(store, "lookup", context_length=2048)
    assert longer.widths() is None
    assert longer.missing
    store.save(WIDTHS, PROBE, TARGET)
    assert longer.widths() == PROBE


def test_a_lost_drafter_is_reported_and_not_counted_as_missing(store: Measurements) -> None:
    store.save(TIMES, invented_times(0.1), TARGET)
    store.save(WIDTHS, PROBE, TARGET)
    known = knowledge(store, *BOTH)
    assert known.missing
    known.drafter_failure = "it does not fit"
    assert not known.missing
    assert known.notes[1] == Reason("drafter_lost", "the model drafter is lost: it does not fit")


def test_an_ignored_measurement_is_reported_once(store: Measurements) -> None:
    store.save(TIMES, invented_times(0.1), TARGET)
    (path,) = store.folder.iterdir()
    path.write_text("{", encoding="utf-8")
    known = knowledge(store, *BOTH)
    for _ in range(3):
        assert known.missing
    assert len(known.notes) == 2
    assert f"the measurement {path.name} is ignored and made again" in known.notes[1].text


# ------------------------------------------------------------------------------------------------ acceptance


def learned(
    *sources: str, hits: int = 30, sampled: bool = False, priors: Mapping[str, AcceptancePrior] | None = None
) -> DepthControl:
    """A policy that learned one answer's acceptance of ``sources``."""
    costs = Costs(
        curves=ContextCurves(contexts=(128,), curves=(Curve(widths=(1, 8), forward_s=(0.1, 0.12)),)),
        drafts=dict.fromkeys(BOTH, FREE),
    )
    policy = DepthControl(costs, 3, priors)
    own = policy.answer(prompt_tokens=9, sampled=sampled)
    for source in sources:
        own.learn(source, (0.9,) * hits, (True,) * hits)
    return policy


def test_learned_acceptance_is_stored_and_read_again(store: Measurements) -> None:
    knowledge(store, *BOTH).keep(learned("model"))
    again = knowledge(store, *BOTH)
    assert set(again.priors) == {"model"}
    rates = again.costs().acceptance["model"]
    assert len(rates) == POSITIONS
    assert rates[-1] > UNKNOWN
    # A policy begins with the stored acceptance and writes nothing if it learned nothing.
    before = {path: path.stat().st_mtime_ns for path in store.folder.iterdir()}
    assert len(before) == 1
    again.keep(learned(priors=again.priors))
    assert {path: path.stat().st_mtime_ns for path in store.folder.iterdir()} == before


def test_acceptance_is_stored_separately_for_each_source_and_drafter(store: Measurements) -> None:
    knowledge(store, *BOTH).keep(learned("model", "lookup"))
    assert set(knowledge(store, *BOTH).priors) == {"model", "lookup"}
    other = replace(DRAFTER, sha256="sha256:00")
    assert set(knowledge(store, *BOTH, drafter=other).priors) == {"lookup"}
    nameless = replace(DRAFTER, sha256=None)
    assert set(knowledge(store, *BOTH, drafter=nameless).priors) == {"lookup"}


def test_a_policy_that_learned_nothing_writes_nothing(store: Measurements) -> None:
    known = knowledge(store, *BOTH)
    known.keep(learned())
    known.keep(FixedDepth(3))
    assert not store.folder.exists()
    assert NO_PRIOR.by_position == (None,) * POSITIONS


def test_how_often_forced_tokens_are_right_is_not_stored(store: Measurements) -> None:
    costs = Costs(
        curves=ContextCurves(contexts=(128,), curves=(Curve(widths=(1, 8), forward_s=(0.1, 0.12)),)),
        drafts={"forced": FREE},
    )
    policy = DepthControl(costs, 3)
    policy.answer(prompt_tokens=9).learn("forced", (0.9,) * 30, (True,) * 30)
    assert set(policy.priors()) == {"forced"}
    knowledge(store, *BOTH).keep(policy)
    assert not store.folder.exists()


def test_acceptance_of_sampled_answers_is_stored_separately(store: Measurements) -> None:
    knowledge(store, *BOTH).keep(learned("model", sampled=True))
    again = knowledge(store, *BOTH)
    assert set(again.priors) == {"model" + SAMPLED}
    knowledge(store, *BOTH).keep(learned("model", hits=60))
    assert set(knowledge(store, *BOTH).priors) == {"model", "model" + SAMPLED}
    other = replace(DRAFTER, sha256="sha256:00")
    assert knowledge(store, *BOTH, drafter=other).priors == {}


def test_history_is_stored_for_each_drafter_and_a_damaged_file_is_replaced(store: Measurements) -> None:
    policy = learned("model")
    own = policy.answer(prompt_tokens=9)
    own.began(1.0, 0.1)
    own.end()
    assert knowledge(store, *BOTH).history is None
    knowledge(store, *BOTH).keep(policy)
    assert knowledge(store, *BOTH).history == policy.history()
    assert policy.history().lengths == (1,)
    assert knowledge(store, *BOTH, drafter=replace(DRAFTER, sha256="sha256:00")).history is None
    (path,) = store.folder.glob("history-*.json")
    path.write_text(path.read_text().replace('"lengths"', '"length"'))
    broken = knowledge(store, *BOTH)
    assert broken.history is None
    assert any(path.name in note.text for note in broken.notes)
    broken.keep(policy)
    assert knowledge(store, *BOTH).history == policy.history()


def test_acceptance_is_stored_separately_for_each_weight_format(store: Measurements) -> None:
    kinds = (DRAFTER, replace(DRAFTER, settings={"weights": "Q4_0"}))
    for drafter, right in zip(kinds, (True, False), strict=True):
        taught = Acceptance()
        for _ in range(20):
            taught.learn((), [right])
        knowledge(store, *BOTH, drafter=drafter).learn_prior("model", taught)
    first = [knowledge(store, *BOTH, drafter=drafter).priors["model"].by_position[0] for drafter in kinds]
    right, wrong = (rate or 0.0 for rate in first)
    assert right > 0.8
    assert wrong < 0.2


def test_acceptance_that_cannot_be_read_for_a_moment_is_not_replaced(
    store: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    knowledge(store, *BOTH).keep(learned("model", "lookup"))

    def refused(path: Path, most_bytes: int) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(measurement_store, "read_bounded", refused)
        known = knowledge(Measurements(store.folder, "machine-1", "mains"), *BOTH)
    assert known.priors == {}
    assert any("it cannot be read" in note.text for note in known.notes)
    assert set(knowledge(store, *BOTH).priors) == {"model", "lookup"}
