"""Predictions for invented answers, and the times they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.bench.predictions import calibrated, current
from edgespec.bench.report import bench_report
from edgespec.bench.run import Answer
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost
from tests.support.bench_answers import answered
from tests.support.planning import a_round

# A plain forward takes 10 ms, a further row 1 ms; at 200 tokens of context twice as long.
FLAT = Curve(widths=(1, 2, 4), forward_s=(0.010, 0.011, 0.013))
CURVES = ContextCurves(contexts=(100, 200), curves=(FLAT, FLAT.scaled(2.0)))
TOKEN_S = 0.002
COSTS = Costs(curves=CURVES, drafts={"lookup": FREE, "model": DraftCost(token_s=TOKEN_S, lag_token_s=0.5)})

# Before any answer both predictions use the calibrated curve.
BOTH = pytest.mark.parametrize("predict", [current, calibrated])


def timed(arm: str, rounds: Sequence[RoundRecord], *, turn: int = 0) -> Answer:
    """An answer that took exactly the time of its rounds."""
    return answered(arm, turn=turn, decode_s=sum(record.round_s for record in rounds), rounds=rounds)


@BOTH
def test_predictions_use_the_cost_curve_of_the_rounds_context(predict: Any) -> None:
    answers = [answered(decode_s=0.045, rounds=[a_round(), a_round(context=150), a_round(context=200)])]
    assert predict(COSTS, answers) == {"plain": pytest.approx(1.0)}


@BOTH
def test_a_free_drafter_is_predicted_to_cost_only_the_width(predict: Any) -> None:
    rounds = [a_round(proposed=3, accepted=3, source="oracle"), a_round(proposed=1, accepted=1, source="oracle")]
    answers = [answered("oracle", decode_s=0.048, rounds=rounds)]  # 0.013 + 0.011
    assert predict(COSTS, answers) == {"oracle": pytest.approx(2.0)}


@BOTH
def test_a_drafting_models_forwards_are_part_of_the_prediction(predict: Any) -> None:
    rounds = [a_round(proposed=3, accepted=1, source="model", forwards=3), a_round(source="model", forwards=1)]
    predicted = 0.013 + 3 * TOKEN_S + 0.010 + TOKEN_S
    answers = [answered("planned", decode_s=3 * predicted, rounds=rounds)]
    assert predict(COSTS, answers) == {"planned": pytest.approx(3.0)}


@BOTH
def test_a_drafting_models_forwards_take_longer_in_a_longer_context(predict: Any) -> None:
    costs = Costs(curves=CURVES, drafts={"model": DraftCost(token_s=TOKEN_S, position_s=1e-5)})
    rounds = [a_round(proposed=3, accepted=1, source="model", forwards=3, context=200)]
    answers = [answered("planned", decode_s=2 * 0.013 + 3 * (TOKEN_S + 200e-5), rounds=rounds)]
    assert predict(costs, answers) == {"planned": pytest.approx(1.0)}


@BOTH
def test_catching_up_is_excluded_from_predicted_and_measured_time(predict: Any) -> None:
    """Catching up includes the round's first drafter forward."""
    lagging = a_round(proposed=3, accepted=1, source="model", forwards=3, draft_s=0.504, sync_s=0.5)
    ordinary = a_round(proposed=3, accepted=1, source="model", forwards=3, draft_s=0.006)
    predicted = 2 * 0.013 + (2 + 3) * TOKEN_S
    answers = [answered("planned", decode_s=0.5 + predicted, rounds=[lagging, ordinary])]
    assert predict(COSTS, answers) == {"planned": pytest.approx(1.0)}
    only = [answered("planned", decode_s=0.5 + 0.011, rounds=[
        a_round(proposed=1, source="model", forwards=1, draft_s=0.5, sync_s=0.5)])]  # fmt: skip
    assert predict(COSTS, only) == {"planned": pytest.approx(1.0)}


@BOTH
def test_a_one_pass_drafters_forward_is_predicted_by_its_width(predict: Any) -> None:
    forward = Curve(widths=(1, 12), forward_s=(0.002, 0.013))  # 1 ms a row
    costs = Costs(curves=CURVES, drafts={"model": DraftCost(one_pass=forward, lag_token_s=0.5)})
    rounds = [
        a_round(proposed=3, accepted=1, source="model", forwards=1, draft_s=0.5, sync_s=0.5),
        a_round(proposed=3, accepted=1, source="model", forwards=1),  # three tokens, after reading one
        a_round(source="model", forwards=1),
    ]
    predicted = 0.013 + (0.013 + 0.005) + (0.010 + 0.002)
    answers = [answered("planned", decode_s=0.5 + 2 * predicted, rounds=rounds)]
    assert predict(costs, answers) == {"planned": pytest.approx(2.0)}


def test_an_arms_prediction_is_the_median_over_its_answers() -> None:
    answers = [
        answered(turn=turn, decode_s=0.010 * ratio, rounds=[a_round()]) for turn, ratio in enumerate((1, 9, 2))
    ]
    assert current(COSTS, answers) == {"plain": pytest.approx(2.0)}
    assert calibrated(COSTS, answers) == {"plain": pytest.approx(2.0)}


@BOTH
@pytest.mark.parametrize(
    ("costs", "rounds"),
    [
        (Costs(), [a_round()]),  # no curve
        (Costs(curves=CURVES), [a_round(proposed=1, source="model", forwards=1)]),  # a drafter without measured cost
        (COSTS, []),  # one token: no round
        (COSTS, [a_round(sync_s=9.0, source="model", forwards=1)]),  # inconsistent clocks
    ],
)
def test_rounds_with_unmeasured_costs_have_no_prediction(
    predict: Any, costs: Costs, rounds: list[RoundRecord]
) -> None:
    assert predict(costs, [answered("planned", rounds=rounds)]) == {}


def test_calibrated_predictions_account_once_for_a_slower_machine() -> None:
    """The machine is three times as slow as at calibration, which shows in the plain arm only."""
    answers = []
    for turn in range(3):
        answers.append(answered(turn=turn, decode_s=0.06, rounds=[a_round()] * 2))
        answers.append(answered("planned", turn=turn, decode_s=0.033, rounds=[a_round(proposed=1, accepted=1)]))
    assert calibrated(COSTS, answers) == {"plain": pytest.approx(3.0), "planned": pytest.approx(1.0)}


def test_current_predictions_learn_from_earlier_answers() -> None:
    """The machine is three times as slow as at calibration, and wide forwards are twice as slow again."""
    plain, wide = a_round(verify_s=0.030), a_round(proposed=1, accepted=1, verify_s=0.066)
    answers = [answer for turn in range(40) for answer in (
        timed("plain", [plain] * 4, turn=turn), timed("oracle", [wide] * 4, turn=turn))]  # fmt: skip
    assert calibrated(COSTS, answers)["oracle"] == pytest.approx(2.0)
    assert current(COSTS, answers) == {"plain": pytest.approx(1.0, abs=0.05), "oracle": pytest.approx(1.0, abs=0.05)}
    # Only the latest forwards count, and an answer's own forwards do not enter its prediction.
    faster = [timed("oracle", [a_round(proposed=1, accepted=1, verify_s=0.011)] * 32) for _ in range(100)]
    assert current(COSTS, [*answers, *faster])["oracle"] == pytest.approx(1.0)
    assert current(COSTS, answers[:1]) == {"plain": pytest.approx(3.0)}
    assert current(COSTS, answers[1::2][:1]) == {"oracle": pytest.approx(6.0)}


def test_current_predictions_learn_a_slower_drafter() -> None:
    own = a_round(proposed=1, source="model", forwards=1, draft_s=5 * TOKEN_S, verify_s=0.011)
    first, second = timed("planned", [own] * 3), timed("planned", [own], turn=1)
    assert current(COSTS, [first]) == {"planned": pytest.approx((0.011 + 5 * TOKEN_S) / (0.011 + TOKEN_S))}
    both = current(COSTS, [first, second, second, second])
    assert both == {"planned": pytest.approx(1.0)}


def test_an_untimed_drafter_is_predicted_at_the_targets_current_speed() -> None:
    plain = timed("plain", [a_round(verify_s=0.030)] * 3)
    own = a_round(proposed=1, source="model", forwards=1, draft_s=3 * TOKEN_S, verify_s=0.033)
    assert current(COSTS, [plain, timed("planned", [own])])["planned"] == pytest.approx(1.0)


def test_the_report_contains_current_and_calibrated_predictions() -> None:
    measured = SimpleNamespace(
        costs=lambda: COSTS,
        target=SimpleNamespace(bytes_per_forward=1000, cache_bytes=lambda tokens: 2 * tokens),
        drafter=None,
    )
    engine: Any = SimpleNamespace(
        pair=SimpleNamespace(measurements=measured, machine=SimpleNamespace(as_json=dict)),
        plan=SimpleNamespace(as_json=dict),
    )
    plain = a_round(verify_s=0.020)
    answers = [timed("plain", [plain] * 4, turn=turn) for turn in range(9)]
    answers += [timed("planned", [plain] * 4, turn=turn) for turn in range(9)]
    report = bench_report(engine, {}, answers, read_bytes_per_s=None)
    assert report["arms"]["plain"]["predicted_vs_measured"] == pytest.approx(1.0)
    assert report["arms"]["plain"]["calibrated_vs_measured"] == pytest.approx(2.0)
    assert report["arms"]["planned"]["calibrated_vs_measured"] == pytest.approx(1.0)
    assert report["predicted_vs_measured"] == report["arms"]["planned"]["predicted_vs_measured"] is not None
    report = bench_report(engine, {}, answers[:0], read_bytes_per_s=None)
    assert report["predicted_vs_measured"] is None
