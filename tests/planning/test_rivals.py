"""Trust in the drafting model, and what it adds to free guesses: rules, and answers on a simulated clock."""

from __future__ import annotations

import statistics

import pytest

from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, DraftCost
from edgespec.planning.depth.base import FixedDepth
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.price import FIRST_REST, USUAL_GAIN, Rivals, Trust
from tests.support.simulated_decoding import NATIVE, READING, Machine, always
from tests.support.simulated_trees import Copying, decode_trees

CHEAP = DraftCost(token_s=0.0084, lag_token_s=0.0006)


def test_a_trial_that_earned_full_trust_has_not_failed() -> None:
    trust = Trust()
    for changes in range(5):
        trust.begin()
        for _ in range(20):
            trust.add(1.0)
        while trust.add(-0.7):
            pass
        assert (trust.end(100 * changes), trust.failed) == (100 * changes + FIRST_REST, 1)
    trust.begin()
    trust.add(-3.0)
    assert (trust.end(1000), trust.failed) == (1000 + 2 * FIRST_REST, 2)
    for _ in range(20):
        trust.add(1.0)  # looks while nothing is drafted
    assert trust.failed == 2


def test_a_round_without_free_guesses_always_prefers_the_model() -> None:
    rivals = Rivals()
    for _ in range(50):
        rivals.learn(-1.0)
    assert rivals.see(0.0)
    assert not rivals.see(0.1)


def test_free_guesses_go_alone_if_they_gain_more_than_the_models_rounds_do() -> None:
    rivals = Rivals()
    assert rivals.model_gain == USUAL_GAIN
    assert (rivals.see(USUAL_GAIN - 0.1), rivals.see(USUAL_GAIN + 0.1)) == (True, False)
    for _ in range(200):
        rivals.learn(1.5)
    assert rivals.model_gain == pytest.approx(1.5, rel=0.01)
    assert (rivals.see(1.4), rivals.see(1.6)) == (True, False)


def test_the_model_saves_what_free_guesses_would_not_have_saved() -> None:
    rivals = Rivals()
    rivals.see(0.0)
    assert rivals.steps_without(4) == 4.0, "plain decoding"
    rivals.see(2.0)
    assert rivals.steps_without(3) == 1.0, "the free guesses of this round"
    for _ in range(200):
        rivals.see(1.0)
    assert rivals.steps_without(2) == pytest.approx(1.0)
    assert rivals.steps_without(6) == pytest.approx(3.0, rel=0.01), "and later ones, two tokens a step"


def test_a_fixed_depth_prefers_free_guesses_that_gain() -> None:
    assert FixedDepth(3).prefers("model", 0.0)
    assert not FixedDepth(3).prefers("model", 0.01)


# --------------------------------------------------------------------------------------------------------- answers


def speedups(copying: Copying | None, model: float | None, cost: DraftCost) -> tuple[float, float]:
    """The speed of three answers for each of three seeds against plain decoding, and the share of the model's rounds.

    ``model``: how often the drafting model is right (None: there is none).
    """
    drafts = {**({} if copying is None else {"lookup": FREE}), **({} if model is None else {"model": cost})}
    costs = Costs(curves=ContextCurves(contexts=(128,), curves=(NATIVE,)), drafts=drafts)
    speeds, asked = [], []
    for seed in range(3):
        policy = DepthControl(costs, 7)
        drafter = None if model is None else (always(model), cost)
        runs = [
            decode_trees(policy, copying, drafter, Machine(curve=NATIVE), tokens=400, seed=10 * seed + answer)
            for answer in range(3)
        ]
        speeds.append(sum(run.plain_s for run in runs) / sum(run.seconds for run in runs))
        records = [record for run in runs for record in run.records]
        asked.append(sum(record.source == "model" for record in records) / len(records))
    return statistics.fmean(speeds), statistics.fmean(asked)


@pytest.mark.parametrize(
    ("model", "cost"), [(0.3, READING), (0.5, READING), (0.3, CHEAP)], ids=["0.3", "0.5", "0.3, cheap"]
)
def test_a_drafter_that_adds_little_to_good_copies_is_hardly_asked(model: float, cost: DraftCost) -> None:
    """The rounds with copies are fast, but not because of the drafter: it would lose 6 to 19 % here."""
    often = Copying(offered=0.8, rate=0.5)
    alone, _ = speedups(often, None, cost)
    both, asked = speedups(often, model, cost)
    assert both > 0.96 * alone
    assert asked < 0.25


@pytest.mark.parametrize(("offered", "rate", "gain"), [(0.3, 0.8, 1.1), (0.8, 0.5, 1.0), (0.8, 0.8, 1.0)])
def test_a_drafter_that_adds_tokens_is_asked_beside_copies(offered: float, rate: float, gain: float) -> None:
    copying = Copying(offered=offered, rate=rate)
    alone, _ = speedups(copying, None, READING)
    model, _ = speedups(None, 0.85, READING)
    both, asked = speedups(copying, 0.85, READING)
    assert both > gain * max(alone, model)
    assert asked > 0.2
