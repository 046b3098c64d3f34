"""``valid_length`` cuts off everything malformed and keeps everything well-formed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from edgespec.decoding.round_base import valid_length
from edgespec.interfaces.drafting import Proposal
from edgespec.interfaces.rows import Distribution
from tests.support.scripted_drafters import INVALID_PROBS, INVALID_TOKENS, certain, over

VOCABULARY_SIZE = 12


def proposal(*parts: tuple[object, Distribution | None], drop: int = 0) -> Proposal:
    tokens = tuple(token for token, _ in parts)
    probs = tuple(own for _, own in parts)
    return Proposal(tokens=tokens, sources=("x",) * len(tokens), draft_probs=probs[drop:])  # type: ignore[arg-type]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("name", INVALID_TOKENS)
def test_a_proposal_is_cut_at_its_first_invalid_token(name: str, place: int) -> None:
    parts: list[tuple[object, Distribution | None]] = [(3, certain(3))] * 4
    parts[place] = INVALID_TOKENS[name](3, 4)
    assert valid_length(proposal(*parts), VOCABULARY_SIZE, needs_probs=True) == place
    assert valid_length(proposal(*parts), VOCABULARY_SIZE, needs_probs=False) == place


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("name", INVALID_PROBS)
def test_a_proposal_is_cut_at_its_first_invalid_distribution_if_those_are_needed(name: str, place: int) -> None:
    parts: list[tuple[object, Distribution | None]] = [(3, certain(3))] * 4
    parts[place] = INVALID_PROBS[name](3, 4)
    assert valid_length(proposal(*parts), VOCABULARY_SIZE, needs_probs=True) == place
    assert valid_length(proposal(*parts), VOCABULARY_SIZE, needs_probs=False) == 4


@pytest.mark.parametrize("drop", [1, 2])
def test_a_proposal_needs_one_distribution_for_each_token(drop: int) -> None:
    short = proposal((3, certain(3)), (4, certain(4)), drop=drop)
    assert valid_length(short, VOCABULARY_SIZE, needs_probs=True) == 0
    assert valid_length(short, VOCABULARY_SIZE, needs_probs=False) == 2


def test_proposed_tokens_without_distributions_are_valid() -> None:
    assert valid_length(Proposal(tokens=(0, 11)), VOCABULARY_SIZE, needs_probs=True) == 2
    assert valid_length(proposal((3, None), (4, certain(4))), VOCABULARY_SIZE, needs_probs=True) == 2
    assert valid_length(Proposal(), VOCABULARY_SIZE, needs_probs=True) == 0


def test_numpy_integers_are_valid_token_ids() -> None:
    tokens = (np.int32(3), np.int64(11))
    assert valid_length(Proposal(tokens=tokens), VOCABULARY_SIZE, needs_probs=False) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(("total", "length"), [(1.0, 1), (0.99995, 1), (0.9998, 0), (1.00005, 1), (1.0002, 0)])
def test_probabilities_may_miss_a_sum_of_one_by_float32_rounding(total: float, length: int) -> None:
    own = over([2, 3, 4], [0.5, 0.25, total - 0.75])
    assert valid_length(proposal((3, own)), VOCABULARY_SIZE, needs_probs=True) == length


@given(st.lists(st.integers(0, 5), min_size=VOCABULARY_SIZE, max_size=VOCABULARY_SIZE), st.booleans(), st.data())
@settings(max_examples=100, deadline=None)
def test_every_normalised_distribution_that_contains_its_token_is_valid(
    weights: list[int], single: bool, data: st.DataObject
) -> None:
    weights[data.draw(st.integers(0, VOCABULARY_SIZE - 1))] += 1
    ids = np.flatnonzero(weights)
    mass = np.array(weights, dtype=np.float32 if single else np.float64)[ids]
    token = data.draw(st.sampled_from(ids.tolist()))
    own = Distribution(ids, mass / mass.sum())
    assert valid_length(proposal((token, own)), VOCABULARY_SIZE, needs_probs=True) == 1


def test_a_proposed_tree_is_invalid_unless_trees_are_allowed() -> None:
    proposal = Proposal(tokens=(1, 2), sources=("x", "x"), parents=(-1, -1), drafted_by="x")
    assert valid_length(proposal, 12, needs_probs=False) == 0
