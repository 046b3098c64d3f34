"""The acceptance estimated from observed tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.calibration.kinds import ACCEPTANCE
from edgespec.files.checked import WrongValueError, kind_of, read, to_json
from edgespec.planning.cost.acceptance import BINS, NO_PRIOR, POSITIONS, UNKNOWN, Acceptance, AcceptancePrior


def taught(
    rate: float, tokens: int = 400, depth: int = 1, *, confidence: float | None = None, seed: int = 0
) -> Acceptance:
    acceptance, chance = Acceptance(), random.Random(seed)
    for _ in range(tokens):
        hits: list[bool] = []
        while len(hits) < depth and all(hits):
            hits.append(chance.random() < rate)
        acceptance.learn(() if confidence is None else [confidence] * len(hits), hits)
    return acceptance


def test_acceptance_starts_at_a_default_rate() -> None:
    acceptance = Acceptance()
    assert acceptance.overall == UNKNOWN
    assert acceptance.seen == 0
    assert acceptance.by_position(10) == pytest.approx((UNKNOWN,) * 10)
    assert acceptance.by_position(0) == ()
    for sure in (0.0, 0.3, 1.0):
        assert acceptance.given(sure) == pytest.approx(sure), "a confidence is used as a probability at first"
    assert acceptance.as_prior() == NO_PRIOR == AcceptancePrior()


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_acceptance_rates_follow_the_observed_tokens(rate: float) -> None:
    found = [taught(rate, depth=3, confidence=0.55, seed=seed) for seed in range(20)]
    assert sum(own.overall for own in found) / 20 == pytest.approx(rate, abs=0.08)
    assert sum(own.by_position(1)[0] for own in found) / 20 == pytest.approx(rate, abs=0.08)
    assert sum(own.given(0.55) for own in found) / 20 == pytest.approx(rate, abs=0.08)


def test_positions_have_separate_rates_and_the_last_one_is_repeated() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.learn((), [True, True, False])
    first, second, third, fourth = acceptance.by_position(4)
    assert first > 0.95
    assert second > 0.95
    assert third < 0.1
    assert 0.4 < fourth < 0.8, "an unseen position has the overall rate"
    deep = Acceptance()
    for _ in range(100):
        deep.learn((), [True] * (POSITIONS + 3))
    assert len(set(deep.by_position(20)[POSITIONS - 1 :])) == 1


def test_a_dozen_tokens_outweigh_the_prior_rate() -> None:
    acceptance = Acceptance(AcceptancePrior(by_position=(0.9,) * POSITIONS))
    assert acceptance.overall == pytest.approx(0.9)
    for _ in range(12):
        acceptance.learn((), [False])
    assert acceptance.by_position(1)[0] < 0.4
    guessed = Acceptance()
    for _ in range(12):
        guessed.learn((), [False])
    assert guessed.by_position(1)[0] < 0.2, "a guess without experience gives way sooner"


def test_acceptance_of_old_text_decays() -> None:
    acceptance = taught(1.0, tokens=1000)
    for _ in range(60):
        acceptance.learn((), [False])
    assert acceptance.by_position(1)[0] < 0.25
    assert acceptance.seen == 1060, "the prior records all tokens, though their weight is capped"


def test_confidence_levels_have_separate_rates() -> None:
    acceptance = Acceptance()
    for _ in range(60):
        acceptance.learn((0.95,), [True])
        acceptance.learn((0.35,), [False])
    assert acceptance.given(0.92) > 0.9
    assert acceptance.given(0.31) < 0.1


def test_overconfidence_lowers_the_rates_of_unseen_confidence_levels() -> None:
    liar, modest = Acceptance(), Acceptance()
    for _ in range(15):
        liar.learn((0.75,), [False])
        modest.learn((0.25,), [True])
    assert liar.given(0.95) < 0.4
    assert modest.given(0.45) > 0.6
    assert modest.given(1.0) == 1.0


def test_a_change_of_text_lowers_acceptance_within_a_few_tokens() -> None:
    acceptance = taught(1.0, confidence=0.85)
    assert acceptance.given(0.85) > 0.9
    for _ in range(5):
        acceptance.learn((0.85,), [False])
    assert acceptance.given(0.85) < 0.65
    for _ in range(20):
        acceptance.learn((0.85,), [True])
    assert acceptance.given(0.85) > 0.9


def test_random_variation_does_not_count_as_a_change_of_text() -> None:
    acceptance = taught(0.9, confidence=0.85)
    before = Acceptance(acceptance.as_prior()).given(0.85)
    for hit in (True, False, True, True):
        acceptance.learn((0.85,), [hit])
    assert acceptance.given(0.85) == pytest.approx(before, abs=0.05)


@given(st.lists(st.tuples(st.lists(st.floats(0, 1), max_size=9), st.lists(st.booleans(), max_size=9)), max_size=30))
@settings(max_examples=150, deadline=None)
def test_acceptance_rates_are_always_probabilities(lessons: list[tuple[list[float], list[bool]]]) -> None:
    acceptance = Acceptance()
    for confidences, hits in lessons:
        acceptance.learn(confidences, hits)
        rates = (*acceptance.by_position(9), *(acceptance.given(step / 20) for step in range(21)), acceptance.overall)
        assert all(0 <= rate <= 1 for rate in rates)
    prior = acceptance.as_prior()
    assert read(AcceptancePrior, to_json(prior)) == prior


def test_a_prior_is_learned_from_all_tokens_not_only_the_last() -> None:
    acceptance = taught(0.9, depth=1, confidence=0.85)
    for _ in range(50):
        acceptance.learn((0.85,), [False])
    assert acceptance.by_position(1)[0] < 0.25
    assert acceptance.given(0.85) < 0.25
    prior = acceptance.as_prior()
    seen = prior.by_position[0], prior.by_confidence[8]
    assert seen == pytest.approx((0.8, 0.8), abs=0.03), "360 of 450"


def test_one_answer_does_not_outweigh_the_prior_of_many() -> None:
    """A rate weighs as much as the tokens behind it, not as all tokens behind all rates."""
    known = AcceptancePrior(
        by_position=(0.8,) * POSITIONS,
        by_confidence=(0.8,) * BINS,
        position_tokens=(256.0, *(0.0,) * 7),
        confidence_tokens=(*(0.0,) * 8, 256.0, 8.0),
    )
    acceptance = Acceptance(known)
    for _ in range(64):
        acceptance.learn((0.85, 0.95), [True, False])
    left = acceptance.as_prior()
    many = (64 + 0.8 * 256) / 320
    assert left.by_position == pytest.approx((many, 0.8 * 4 / 68, *(0.8,) * 6)), "4 at least"
    assert left.by_confidence == pytest.approx((*(0.8,) * 8, many, 0.8 * 8 / 72))
    assert left.position_tokens == (256, 64, *(0,) * 6), "capped at HANDED_ON_STRENGTH"
    assert left.confidence_tokens == (*(0,) * 8, 256, 72)


def test_a_prior_of_few_tokens_gives_way_to_more() -> None:
    acceptance = Acceptance()
    acceptance.learn((), [False] * 6)
    prior = acceptance.as_prior()
    assert prior.position_tokens == (1,) * 6 + (0, 0)
    for _ in range(3):
        again = Acceptance(prior)
        for _ in range(8):
            again.learn((), [True])
        prior = again.as_prior()
    first = prior.by_position[0]
    assert first is not None
    assert first > 0.6, "24 of 25 were right at this position"


def test_a_stored_prior_without_token_counts_has_little_weight() -> None:
    prior = AcceptancePrior(
        by_position=(0.5,) * POSITIONS, position_tokens=(200.0,) * POSITIONS, confidence_tokens=(100.0,) * BINS
    )
    stored = to_json(prior)
    assert kind_of(ACCEPTANCE.hint).read(stored) == prior
    del stored["position_tokens"], stored["confidence_tokens"]
    assert kind_of(ACCEPTANCE.hint).read({**stored, "tokens": 256.0}) == prior.of_at_most(30)


def test_faded_counts_give_way_to_the_next_tokens() -> None:
    acceptance, other = taught(0.1, depth=2, confidence=0.5), taught(0.1, depth=2, confidence=0.5)
    before = acceptance.given(0.5)
    acceptance.fade(8)
    assert acceptance.by_position(1)[0] == pytest.approx(other.by_position(1)[0], abs=0.2)
    for one in (acceptance, other):
        for _ in range(8):
            one.learn((), [True, True])
    assert acceptance.by_position(2)[1] > other.by_position(2)[1] + 0.15
    assert acceptance.by_position(2)[1] > 0.55
    assert acceptance.given(0.5) == pytest.approx(before, abs=0.05), "confidences are the drafter's own"
    acceptance.fade(10**6)
    assert acceptance.by_position(2)[1] > 0.55, "fading never raises a weight"


def test_too_few_tokens_make_no_prior() -> None:
    """The next conversation would take chance for knowledge."""
    acceptance = Acceptance()
    acceptance.learn((0.5,) * 3, (True, True, False))
    assert acceptance.seen == 3
    assert acceptance.as_prior() == NO_PRIOR
    acceptance.learn((0.5,) * 3, (True, True, False))
    assert acceptance.seen == 6
    assert acceptance.as_prior() != NO_PRIOR


def test_a_prior_is_used_by_the_next_conversation() -> None:
    acceptance = taught(0.9, depth=2, confidence=0.35)
    prior = read(AcceptancePrior, to_json(acceptance.as_prior()))
    again = Acceptance(prior)
    assert again.by_position(2) == pytest.approx(acceptance.by_position(2), abs=0.05)
    assert again.given(0.35) == pytest.approx(acceptance.given(0.35), abs=0.05)
    assert again.by_position(2) == pytest.approx(prior.by_position[:2])
    assert again.given(0.35) == pytest.approx(prior.by_confidence[3])
    assert again.seen == 0
    assert again.as_prior() == prior, "nothing new was learned"
    assert prior.by_position[5] is None
    assert prior.by_confidence[9] is None


@pytest.mark.parametrize(
    "stored",
    [
        {"by_position": [0.5], "by_confidence": [None] * BINS},
        {"by_position": [None] * POSITIONS, "by_confidence": [None]},
        {"by_position": [1.5] * POSITIONS, "by_confidence": [None] * BINS},
        {"by_position": [float("nan")] * POSITIONS, "by_confidence": [None] * BINS},
        {"by_position": ["x"] * POSITIONS, "by_confidence": [None] * BINS},
        {"by_position": 3, "by_confidence": [None] * BINS},
    ],
)
def test_a_malformed_stored_prior_is_refused(stored: dict[str, object]) -> None:
    with pytest.raises(WrongValueError):
        kind_of(ACCEPTANCE.hint).read(stored)
