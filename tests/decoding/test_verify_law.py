"""Verification emits exactly the target's distribution: probabilities are fractions, all outcomes are enumerated."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgespec.decoding import verify
from edgespec.decoding.sampling import Purpose, Sampling, distribution, draw
from tests.decoding import law
from tests.decoding.chi_square import chi_square, threshold

EXAMPLES = settings(max_examples=60, deadline=None)


@st.composite
def weights(draw_from: st.DrawFn, size: int) -> list[int]:
    drawn = draw_from(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    drawn[draw_from(st.integers(0, size - 1))] += 1
    return drawn


@st.composite
def truncated(draw_from: st.DrawFn, size: int) -> list[Fraction]:
    """Any small rational distribution, possibly cut to its top k or top p."""
    probs = law.normalised(draw_from(weights(size)))
    how = draw_from(st.sampled_from(["whole", "top_k", "top_p"]))
    if how == "top_k":
        return law.top_k(probs, draw_from(st.integers(1, size)))
    if how == "top_p":
        return law.top_p(probs, Fraction(draw_from(st.integers(1, 8)), 8))
    return probs


@st.composite
def pairs(draw_from: st.DrawFn) -> tuple[list[Fraction], list[Fraction]]:
    size = draw_from(st.integers(1, 4))
    target = draw_from(truncated(size))
    kind = draw_from(st.sampled_from(["independent", "equal", "disjoint"]))
    if kind == "equal":
        return target, list(target)
    if kind == "disjoint" and any(prob == 0 for prob in target):
        return target, law.normalised([int(prob == 0) for prob in target])
    return target, draw_from(truncated(size))


@given(pairs())
@EXAMPLES
def test_verifying_one_token_keeps_the_targets_distribution(pair: tuple[list[Fraction], list[Fraction]]) -> None:
    law.check_one_step(verify, *pair)


@pytest.mark.parametrize(("target", "draft"), law.PAIRS)
def test_verifying_one_token_keeps_the_distribution_in_edge_cases(target: list[int], draft: list[int]) -> None:
    law.check_one_step(verify, law.normalised(target), law.normalised(draft))


@given(st.integers(0, 2**32), st.sampled_from([(1, 3), (1, 4), (2, 2), (2, 3), (3, 2)]))
@settings(max_examples=30, deadline=None)
def test_verifying_a_drawn_chain_keeps_the_joint_distribution(seed: int, shape: tuple[int, int]) -> None:
    depth, vocabulary_size = shape
    target = law.random_conditional(seed, vocabulary_size)
    draft = law.random_conditional(seed + 1, vocabulary_size)
    law.check_chain(verify, target, draft, depth)


@given(st.integers(0, 2**32), st.integers(1, 2))
@settings(max_examples=15, deadline=None)
def test_a_chain_from_a_trimmed_vocabulary_keeps_the_joint_distribution(seed: int, depth: int) -> None:
    target = law.random_conditional(seed, 3)
    whole = law.random_conditional(seed + 1, 3)
    law.check_chain(verify, target, lambda prefix: law.top_k(whole(prefix), 2), depth)


@given(st.integers(0, 2**32), st.lists(st.integers(0, 2), max_size=3))
@EXAMPLES
def test_verifying_a_copied_chain_keeps_the_joint_distribution(seed: int, chain: list[int]) -> None:
    law.check_copied(verify, law.random_conditional(seed, 3), chain)


def test_a_chain_of_copied_and_drawn_tokens_keeps_the_joint_distribution() -> None:
    target = law.random_conditional(5, 2, zeros=False)
    draft = law.random_conditional(6, 2, zeros=False)
    copied = 1
    emitted: dict[tuple[int, ...], Fraction] = {}
    for first in range(2):
        chain = (first, copied)
        own = draft(())
        for middle_0, length_0 in law.cells(own[first], target(())[first], grid=False):
            for middle_1, length_1 in law.cells(Fraction(1), target((first,))[copied], grid=False):
                _, some = law.round_law(verify, chain, [own, None], target, [middle_0, middle_1])
                for tokens, mass in some.items():
                    for full, rest in law.plain_law(target, 3, tokens).items():
                        share = own[first] * length_0 * length_1
                        emitted[full] = emitted.get(full, Fraction(0)) + share * mass * rest
    assert emitted == law.plain_law(target, 3)


@pytest.mark.parametrize(("vocabulary_size", "depth"), [(2, 0), (2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (3, 3)])
def test_verifying_by_matching_emits_only_the_targets_tokens(vocabulary_size: int, depth: int) -> None:
    law.check_matching(verify, vocabulary_size, depth)


def test_acceptance_rejects_impossible_probabilities() -> None:
    law.check_acceptance_edges(verify)


@given(st.floats(), st.floats(), st.floats())
@settings(max_examples=300, deadline=None)
def test_acceptance_equals_its_definition_for_any_floats(
    uniform: float, draft_prob: float, target_prob: float
) -> None:
    sound = draft_prob == draft_prob and 0 < draft_prob <= 1
    expected = sound and uniform * draft_prob < target_prob
    assert verify.accepts(uniform, draft_prob, target_prob) == expected


def test_the_residual_keeps_its_dtype_and_falls_back_to_the_target() -> None:
    target = np.array([0.25, 0.75])
    left = verify.residual(target, np.array([0.5, 0.5]))
    assert left.dtype == np.float64
    assert left.tolist() == [0.0, 1.0]
    assert verify.residual(target, target).tolist() == target.tolist()
    assert verify.residual(target, np.array([np.nan, 0.5])).tolist() == target.tolist()


def test_the_checks_detect_dropping_a_drawn_token_by_its_probability() -> None:
    """Dropping a drawn token by its probability is biased, and these checks detect it."""
    target, draft = law.normalised([1, 1, 2]), law.normalised([1, 2, 1])
    kept, _ = law.speculative_law(verify, lambda _: target, lambda _: draft, None, 1)
    assert kept == law.plain_law(lambda _: target, 2)
    # A token of probability 1/4 is dropped unverified: the target then chooses the token.
    biased = [Fraction(0)] * 3
    for token, prob in enumerate(draft):
        if prob <= Fraction(1, 4):
            biased = [mass + prob * own for mass, own in zip(biased, target, strict=True)]
            continue
        for middle, length in law.cells(prob, target[token], grid=False):
            _, emitted = law.round_law(verify, (token,), [draft], lambda _: target, [middle])
            for tokens, mass in emitted.items():
                biased[tokens[0]] += prob * length * mass
    assert sum(biased) == 1
    assert biased != target


@given(st.integers(0, 2**32), st.sampled_from([(2, 2), (3, 2), (2, 3)]), st.integers(2, 8))
@settings(max_examples=25, deadline=None)
def test_a_chain_ended_by_a_gate_keeps_the_joint_distribution(
    seed: int, shape: tuple[int, int], eighths: int
) -> None:
    """A gate sees the distributions up to the next token but never its value, so it adds no bias."""
    depth, vocabulary_size = shape
    target, draft = law.random_conditional(seed, vocabulary_size), law.random_conditional(seed + 1, vocabulary_size)
    limit = Fraction(eighths, 8)
    emitted: dict[tuple[int, ...], Fraction] = {}

    def follow(chain: tuple[int, ...], weight: Fraction) -> None:
        """Every chain of this length that the gate admits, with its weight."""
        if len(chain) < depth and max(draft(chain)) >= limit:
            for token, prob in enumerate(draft(chain)):
                if prob > 0:
                    follow((*chain, token), weight * prob)
            return
        own = [draft(chain[:i]) for i in range(len(chain))]
        places = [law.cells(own[i][chain[i]], target(chain[:i])[chain[i]], grid=False) for i in range(len(chain))]
        for choice in itertools.product(*places):
            share = math.prod((length for _, length in choice), start=weight)
            _, some = law.round_law(verify, chain, own, target, [middle for middle, _ in choice])
            for tokens, mass in some.items():
                for full, rest in law.plain_law(target, depth + 1, tokens).items():
                    emitted[full] = emitted.get(full, Fraction(0)) + share * mass * rest

    follow((), Fraction(1))
    assert {tokens: mass for tokens, mass in emitted.items() if mass} == law.plain_law(target, depth + 1)


@pytest.mark.slow
def test_keyed_draws_have_the_requested_frequencies() -> None:
    """40 000 draws over positions and seeds against the law, at a false-alarm rate of one in a million."""
    logits = np.log(np.array([8, 1, 4, 2, 0.5, 4], dtype=np.float32))
    own = distribution(logits, Sampling(temperature=1.0))
    counts = np.zeros(len(logits), dtype=np.int64)
    for seed in range(40):
        for position in range(1000):
            counts[draw(own, seed, position, Purpose.TOKEN)] += 1
    assert chi_square(counts, own.probs) < threshold(len(own.probs) - 1)
    warmer = distribution(logits, Sampling(temperature=1.1))
    assert chi_square(counts, warmer.probs) > threshold(len(own.probs) - 1), (
        "a slightly wrong distribution is detected"
    )


@given(st.integers(0, 2**32), st.sampled_from(law.TREES), st.data())
@EXAMPLES
def test_verifying_a_tree_keeps_the_joint_distribution(
    seed: int, parents: tuple[int, ...], data: st.DataObject
) -> None:
    tokens = [data.draw(st.integers(0, 2)) for _ in parents]
    law.check_tree(verify, law.random_conditional(seed, 3), tokens, parents)


def test_a_tree_without_alternatives_is_verified_like_a_chain() -> None:
    for chain in itertools.product(range(2), repeat=3):
        for own in itertools.product(range(2), repeat=4):
            as_chain = verify.verify_matching(chain, own.__getitem__)
            as_tree = verify.verify_tree(chain, (-1, 0, 1), lambda node, own=own: own[node + 1])  # type: ignore[misc]
            assert as_tree.path == tuple(range(as_chain.accepted))
            assert (as_tree.next_token, as_tree.kind) == (as_chain.next_token, as_chain.kind)
