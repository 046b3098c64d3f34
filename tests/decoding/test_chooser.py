"""How a session chooses tokens: the noise of each choice, and what a gate sees before it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgespec.decoding.sampling import Chooser, Purpose, Rule, Sampling, distribution, draw
from edgespec.errors import NonFiniteLogitsError
from edgespec.interfaces.drawing import DrawRequest, Measure, draw_from, noise_key, uniforms
from edgespec.interfaces.rows import Distribution, Rows
from edgespec.runtimes.sequence import TrimmedRows
from tests.support.gates import Gate, at_least

INFINITY = float("inf")


def logits(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def as_dict(own: Distribution) -> dict[int, float]:
    return dict(zip(own.ids.tolist(), own.probs.tolist(), strict=True))


SCORES = logits(1.0, 3.0, -2.0, 3.0, 0.5, 2.0)


def test_each_purpose_of_a_draw_has_a_separate_noise_stream() -> None:
    rows = Rows(1, lambda _: SCORES)
    own = distribution(SCORES, Sampling(temperature=1.5))
    keyed = Chooser(Sampling(temperature=1.5, seed=4))
    rejecting = Chooser(Sampling(temperature=1.5, seed=4, rule="rejection"))
    differs = 0
    for length in range(60):
        context = [0] * length
        shared = draw(own, 4, length, Purpose.TOKEN)
        assert keyed.target_token(rows, 0, context) == shared
        draft = keyed.draft(rows, 0, context, None)
        assert draft is not None
        assert draft.token == shared, "a drafter with the target's scores proposes what the target will emit"
        assert draft.distribution is None
        plain = draw(own, 4, length, Purpose.CORRECTION)
        assert rejecting.target_token(rows, 0, context) == plain
        assert rejecting.draw_dense(own.dense(len(SCORES)), length) == plain
        drawn = rejecting.draft(rows, 0, context, None)
        assert drawn is not None
        assert drawn.distribution is not None
        assert as_dict(drawn.distribution) == as_dict(own)
        assert drawn.token == draw(own, 4, length, Purpose.DRAFT)
        differs += drawn.token != plain
        assert (
            rejecting.accept_uniform(length)
            == uniforms(noise_key(4, length, Purpose.ACCEPT), np.zeros(1, np.int64))[0]
        )
    assert differs > 10, "independent streams disagree often"


@pytest.mark.parametrize(
    ("options", "peak"),
    [
        (Sampling(), 0.5),
        (Sampling(temperature=1.0, rule="rejection"), 0.5),
        (Sampling(temperature=1.0, top_k=2, rule="rejection"), 2 / 3),
        (Sampling(temperature=0.5, rule="rejection"), 128 / 171),
    ],
)
def test_a_gate_decides_by_the_peak_of_the_distribution(options: Sampling, peak: float) -> None:
    rows = Rows(1, lambda _: logits(*np.log([8, 4, 2, 1, 0.5, 0.5])))
    chooser = Chooser(options)
    for length in range(40):
        assert chooser.draft(rows, 0, [0] * length, at_least(peak - 1e-3)) is not None
        assert chooser.draft(rows, 0, [0] * length, at_least(peak + 1e-3)) is None


@pytest.mark.parametrize(
    ("options", "peak", "entropy"),
    [
        # A greedy drafter's gate sees the softmax of the scores, not the certain choice.
        (Sampling(), 0.5, 1.75 * math.log(2)),
        (Sampling(temperature=1.0, rule="rejection"), 0.5, 1.75 * math.log(2)),
        (Sampling(temperature=1.0, top_k=2, rule="rejection"), 2 / 3, math.log(3) - 2 / 3 * math.log(2)),
        (Sampling(repeat_penalty=2.0), 0.5, 1.75 * math.log(2)),
    ],
)
def test_a_gate_receives_the_peak_and_on_request_the_entropy(options: Sampling, peak: float, entropy: float) -> None:
    rows = Rows(1, lambda _: logits(*np.log([4, 2, 1, 1])))
    for wants in (False, True):
        gate = Gate(needs_entropy=wants)
        draft = Chooser(options).draft(rows, 0, [], gate)
        assert draft is not None
        assert draft.confidence == pytest.approx(peak)
        assert gate.asked == [(pytest.approx(peak), pytest.approx(entropy, abs=1e-6) if wants else None)]


def test_under_the_rejection_rule_a_gates_input_does_not_depend_on_the_token() -> None:
    """Otherwise the decision to propose a token could depend on the token, which is biased."""
    rows, told, tokens = Rows(1, lambda _: SCORES), set[tuple[float, float | None]](), set[int]()
    for seed in range(100):
        chooser = Chooser(Sampling(temperature=2.0, top_p=0.97, seed=seed, rule="rejection"))
        gate = Gate(needs_entropy=True)
        draft = chooser.draft(rows, 0, [0] * seed, gate, alternatives=2)
        assert draft is not None
        assert len(gate.asked) == 1
        told.add(gate.asked[0])
        tokens.add(draft.token)
    assert len(told) == 1
    assert len(tokens) > 3


@pytest.mark.parametrize(
    "options", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, rule="rejection")]
)
def test_a_gate_that_refuses_ends_the_chain(options: Sampling) -> None:
    rows = Rows(1, lambda _: SCORES)
    for alternatives in (0, 3):
        gate = Gate(lambda confidence, entropy: False)
        assert Chooser(options).draft(rows, 0, [0], gate, alternatives=alternatives) is None
        assert len(gate.asked) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_with_shared_noise_confidence_is_how_often_the_target_agrees(temperature: float) -> None:
    """The target's scores are the drafter's plus Gumbel noise, as softmax models the errors of scores.

    The peak of the softmax ignores the noise and predicts less well.
    """
    generator = np.random.default_rng(17)
    told, peaks, hits = list[float](), list[float](), list[bool]()
    for position in range(4000):
        scores = (generator.standard_normal(30) * generator.uniform(0.5, 4)).astype(np.float32)
        other = scores + generator.gumbel(size=30).astype(np.float32)
        sampling = Sampling(temperature=temperature, seed=5)
        draft = Chooser(sampling).draft(Rows(1, lambda _, own=scores: own), 0, [0] * position, Gate())  # type: ignore[misc]
        assert draft is not None
        assert draft.confidence is not None
        told.append(draft.confidence)
        peaks.append(distribution(scores, sampling).peak)
        target = Chooser(sampling).target_token(Rows(1, lambda _, own=other: own), 0, [0] * position)  # type: ignore[misc]
        hits.append(draft.token == target)
    for low in np.arange(0.1, 1.0, 0.1):
        near = [hit for hit, own in zip(hits, told, strict=True) if low <= own < low + 0.1]
        if len(near) > 100:
            assert np.mean(near) == pytest.approx(low + 0.05, abs=0.1)
    assert surprise(told, hits) < surprise(peaks, hits) - 0.03


def surprise(sure: list[float], hits: list[bool]) -> float:
    """Nats of surprise at ``hits`` if the share of hits in each tenth of confidence is known."""
    rows = np.array(hits, dtype=np.float64)
    bins = np.minimum(9, (np.array(sure) * 10).astype(int))
    rates = np.array([rows[bins == own].mean() for own in bins])
    return float(-np.mean(np.log(np.where(rows > 0, rates, 1 - rates))))


def test_with_shared_noise_low_confidence_ends_a_chain() -> None:
    rows = Rows(1, lambda _: SCORES)
    for position in range(40):
        chooser = Chooser(Sampling(temperature=1.5, seed=4))
        gate = Gate()
        draft = chooser.draft(rows, 0, [0] * position, gate, alternatives=7)
        assert draft is not None
        assert draft.confidence == pytest.approx(1 - sum(own for _, own in draft.alternatives))
        assert gate.asked == [(draft.confidence, None)]
        assert chooser.draft(rows, 0, [0] * position, at_least(draft.confidence + 1e-9)) is None


def test_without_a_gate_a_greedy_draft_reads_only_the_argmax() -> None:
    rows = Rows(1, lambda _: SCORES)
    draft = Chooser(Sampling()).draft(rows, 0, [0], None)
    assert draft is not None
    assert (draft.token, draft.distribution, draft.confidence) == (1, None, None)


def sure_and_entropy(scores: np.ndarray, *, entropy: bool = True) -> tuple[float | None, float | None]:
    """The confidence and entropy that a greedy drafter's gate receives."""
    drawn = draw_from(scores, DrawRequest(measure=Measure.ENTROPY if entropy else Measure.MASS))
    return drawn.odds[0], drawn.entropy


def test_a_greedy_drafts_confidence_is_the_softmax_peak() -> None:
    assert sure_and_entropy(logits(*np.log([6, 3, 1])), entropy=False) == (pytest.approx(0.6, rel=1e-6), None)
    assert sure_and_entropy(logits(1000.0, -INFINITY)) == (1.0, 0.0)
    assert sure_and_entropy(logits(0, 0, 0, 0)) == (pytest.approx(0.25), pytest.approx(math.log(4), rel=1e-6))


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=50))
@settings(max_examples=200, deadline=None)
def test_confidence_and_entropy_equal_those_of_the_softmax_distribution(scores: list[float]) -> None:
    own = distribution(logits(*scores), Sampling(temperature=1.0))
    sure, entropy = sure_and_entropy(logits(*scores))
    assert sure == pytest.approx(own.peak, rel=1e-6)
    assert entropy == pytest.approx(own.entropy, abs=1e-6)
    assert own.entropy == pytest.approx(-math.fsum(p * math.log(p) for p in own.probs), abs=1e-9)


@pytest.mark.parametrize("spoilt", [logits(9, float("nan")), logits(1, INFINITY), logits(-INFINITY, -INFINITY)])
@pytest.mark.parametrize("entropy", [False, True])
def test_scores_that_are_not_finite_give_no_confidence_or_entropy(spoilt: np.ndarray, entropy: bool) -> None:
    with pytest.raises(NonFiniteLogitsError):
        sure_and_entropy(spoilt, entropy=entropy)


def test_greedy_decoding_never_uses_the_rejection_rule() -> None:
    assert not Chooser(Sampling(rule="rejection")).uses_rejection
    assert Chooser(Sampling(rule="rejection", temperature=0.1)).uses_rejection
    assert not Chooser(Sampling(temperature=0.1)).uses_rejection


@pytest.mark.parametrize("gate", [None, Gate()])
def test_alternatives_are_returned_only_on_request_and_change_nothing_else(gate: Gate | None) -> None:
    rows = Rows(1, lambda _: SCORES)
    for sampling in (Sampling(), Sampling(temperature=1.5)):
        chooser = Chooser(sampling)
        without, asked = (chooser.draft(rows, 0, [0], gate, alternatives=wanted) for wanted in (0, 2))
        assert without is not None
        assert asked is not None
        assert without.alternatives == ()
        assert len({asked.token, *(token for token, _ in asked.alternatives)}) == 3
        assert (asked.token, asked.confidence) == (without.token, without.confidence)
    assert SCORES[1] == 3.0, "the rows are unchanged"


def test_with_equal_scores_the_greedy_alternative_is_the_next_id() -> None:
    chooser = Chooser(Sampling())
    drafted = chooser.draft(Rows(1, lambda _: SCORES), 0, [], None, alternatives=1)
    assert drafted is not None
    assert (drafted.token, drafted.alternatives[0][0]) == (1, 3)
    alone = chooser.draft(Rows(1, lambda _: logits(2.0)), 0, [], None, alternatives=1)
    assert alone is not None
    assert (alone.token, alone.alternatives) == (0, ())
    nothing_else = chooser.draft(Rows(1, lambda _: logits(2.0, -INFINITY)), 0, [], None, alternatives=1)
    assert nothing_else is not None
    assert nothing_else.alternatives == ()


def test_the_committed_length_changes_only_drafts_of_the_rejection_rule() -> None:
    rows, context = Rows(1, lambda _: SCORES), [0] * 7

    def drafts(rule: str) -> list[int]:
        chooser, found = Chooser(Sampling(temperature=2.0, seed=2**64 - 1, rule=rule)), []  # type: ignore[arg-type]
        for committed in range(40):
            draft = chooser.draft(rows, 0, context, None, committed=committed)
            assert draft is not None
            found.append(draft.token)
        return found

    assert len(set(drafts("rejection"))) > 2
    assert drafts("rejection")[0] == draw(
        distribution(SCORES, Sampling(temperature=2.0)), 2**64 - 1, 7, Purpose.DRAFT
    ), "by default the noise is the seed's"
    assert len(set(drafts("keyed"))) == 1


def choices(chooser: Chooser, rows: Rows, length: int, count: int) -> list[tuple[int, float]]:
    """A drafted token and its alternatives, at most ``count`` in all, with the odds of each."""
    draft = chooser.draft(rows, 0, [0] * length, at_least(0.0), alternatives=count - 1)
    assert draft is not None
    first = 1.0 - sum(own for _, own in draft.alternatives) if draft.confidence is None else draft.confidence
    return [(draft.token, first), *draft.alternatives]


def test_alternatives_are_the_next_choices_in_order() -> None:
    rows = Rows(1, lambda _: SCORES)
    greedy = Chooser(Sampling())
    assert [token for token, _ in choices(greedy, rows, 0, 4)] == [1, 3, 5, 0]
    odds = [own for _, own in choices(greedy, rows, 0, 9)]
    weights = np.exp(np.sort(SCORES.astype(np.float64))[::-1])
    assert odds == pytest.approx((weights / weights.sum()).tolist(), rel=1e-5)
    keyed = Chooser(Sampling(temperature=1.5, seed=4))
    for length in range(20):
        found = choices(keyed, rows, length, 3)
        assert len(found) == 3
        assert found[1][1] >= found[2][1]
        assert found[0][0] == keyed.target_token(rows, 0, [0] * length)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_raise_instead_of_giving_a_draft(bad: float) -> None:
    scores = SCORES.copy()
    scores[2] = bad
    rows = Rows(1, lambda _: scores)
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        with pytest.raises(NonFiniteLogitsError):
            Chooser(sampling).draft(rows, 0, [], None, alternatives=3)


def test_a_draft_has_the_requested_number_of_alternatives() -> None:
    rows = Rows(1, lambda _: SCORES)
    for sampling in (Sampling(), Sampling(temperature=1.5, seed=4)):
        chooser = Chooser(sampling)
        candidates = choices(chooser, rows, 7, 4)
        for count, gate in ((0, None), (1, None), (3, None), (3, at_least(0.0))):
            draft = chooser.draft(rows, 0, [0] * 7, gate, alternatives=count)
            assert draft is not None
            assert (draft.token, (draft.confidence is None)) == (candidates[0][0], sampling.greedy and gate is None)
            assert [token for token, _ in draft.alternatives] == [token for token, _ in candidates[1 : 1 + count]]
            wanted = [own for _, own in candidates[1 : 1 + count]]
            assert [own for _, own in draft.alternatives] == pytest.approx(wanted, rel=1e-5)
        assert chooser.draft(rows, 0, [], at_least(1.1), alternatives=3) is None
        bare = chooser.draft(rows, 0, [0] * 7, None)
        assert bare is not None
        assert bare.alternatives == ()


def test_greedy_alternatives_are_ordered_by_penalised_scores() -> None:
    """Alternatives are ordered by penalised scores: 3 / 1.5 equals token 5's score, and the lower id goes first."""
    draft = Chooser(Sampling(repeat_penalty=1.5)).draft(Rows(1, lambda _: SCORES), 0, [1], None, alternatives=3)
    assert draft is not None
    assert draft.token == 3
    assert [token for token, _ in draft.alternatives] == [1, 5, 0]


def test_a_truncated_distribution_has_no_more_alternatives_than_tokens() -> None:
    rows = Rows(1, lambda _: SCORES)
    assert len(choices(Chooser(Sampling(temperature=1.0, top_k=2)), rows, 0, 5)) == 2


@pytest.mark.parametrize("wants", [False, True])
def test_a_trimmed_heads_draft_equals_that_of_a_row_with_its_tokens_only(wants: bool) -> None:
    """Ids, odds and entropy equal those of a row with all other tokens at -infinity, in any columns."""
    draw_scores = np.random.default_rng(4)
    ids = np.array([3, 9, 10, 40, 77])
    few = draw_scores.standard_normal(len(ids)).astype(np.float32)
    every = np.full(100, -np.inf, dtype=np.float32)
    every[ids] = few
    found = []
    for rows in (TrimmedRows(Rows(1, lambda _: few), ids, 100), Rows(1, lambda _: every)):
        for alternatives in (0, 1, 3, 9):
            gate = Gate(needs_entropy=wants)
            draft = Chooser(Sampling()).draft(rows, 0, [], gate, alternatives=alternatives)
            assert draft is not None
            found.append((draft, gate.asked))
    half = len(found) // 2
    order = ids[np.argsort(-few)].tolist()
    for (own, asked), (other, expected) in zip(found[:half], found[half:], strict=True):
        assert own.token == other.token == order[0]
        assert [token for token, _ in own.alternatives] == order[1 : 1 + len(own.alternatives)]
        assert own.alternatives == tuple((token, pytest.approx(odds)) for token, odds in other.alternatives)
        assert asked == [(pytest.approx(asked[0][0]), expected[0][1] and pytest.approx(expected[0][1], rel=1e-5))]
    assert [len(draft.alternatives) for draft, _ in found[:half]] == [0, 1, 3, 4]
    assert few[0] == every[3], "the head's row is a copy"


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(presence_penalty=2.0),
        Sampling(frequency_penalty=0.5),
        Sampling(repeat_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", ["keyed", "rejection"])
def test_presence_and_frequency_are_those_of_the_answer_for_target_and_drafter(
    sampling: Sampling, rule: Rule
) -> None:
    own = replace(sampling, temperature=1.0, seed=5, rule=rule)
    scores, prompt = np.linspace(-2, 2, 8).astype(np.float32), [7, 7, 7, 6]
    chooser, rows = Chooser(own), Rows(1, lambda _: scores)
    chooser.begins = len(prompt)
    for answer in ([], [6], [6, 6, 5]):
        values, text = scores.astype(np.float64), np.array(prompt + answer)
        spoken = np.isin(np.arange(8), text)
        counts = np.bincount(np.array(answer, dtype=np.int64), minlength=8)
        values[spoken] *= np.where(values > 0, 1 / own.repeat_penalty, own.repeat_penalty)[spoken]
        values -= own.presence_penalty * (counts > 0) + own.frequency_penalty * counts
        expected = np.exp(values - values.max())
        found = chooser.distribution(rows, 0, prompt + answer).dense(8)
        assert found == pytest.approx(expected / expected.sum(), rel=1e-5)
        draft = chooser.draft(rows, 0, prompt + answer, None)
        assert draft is not None
        if rule == "keyed":
            assert draft.token == chooser.target_token(rows, 0, prompt + answer)
        else:
            assert draft.distribution is not None
            assert draft.distribution.dense(8) == pytest.approx(found)
