"""Attention: numpy's numbers within a bound, and bits that depend only on the query and the positions it sees."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.runtimes.native.library import NativeLibrary
from tests.support.kernel_calls import Floats, attend, same_bits

LENGTHS = [16, 32, 64, 80, 128, 272, 528]  # keys are opened 256 or 512 elements at a time
SEEN = [1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 700]


def cache(head_length: int, positions: int = 700) -> tuple[Floats, Floats]:
    """Keys and values that half precision holds exactly."""
    random = np.random.default_rng(head_length)
    keys, values = random.standard_normal((2, positions, head_length), dtype=np.float32)
    return keys.astype(np.float16).astype(np.float32), values.astype(np.float16).astype(np.float32)


def some_queries(count: int, head_length: int) -> Floats:
    return np.random.default_rng(count).standard_normal((count, head_length), dtype=np.float32) * 3


@pytest.mark.parametrize("head_length", LENGTHS)
def test_attention_equals_numpys_softmax_attention_within_rounding(
    library: NativeLibrary, level: str, head_length: int
) -> None:
    keys, values = cache(head_length)
    queries = some_queries(len(SEEN), head_length)
    found = attend(library, level, keys, values, queries, SEEN)
    for query, seen, out in zip(queries.astype(np.float64), SEEN, found, strict=True):
        scores = keys[:seen].astype(np.float64) @ query / np.sqrt(head_length)
        weights = np.exp(scores - scores.max())
        expected = weights / weights.sum() @ values[:seen]
        # A score is off by at most (head_length + 2) roundings of a sum below 32, and changes its weight by as much;
        # the sum of up to 700 weighted values adds as many roundings of values below 5.
        bound = 2 * (head_length + 2) * 32 * 2.0**-24 + 700 * 5 * 2.0**-24
        assert np.abs(out - expected).max() < bound


@pytest.mark.parametrize("head_length", [16, 80])
def test_capped_attention_equals_numpys_with_equal_bits_on_every_level(
    library: NativeLibrary, level: str, head_length: int
) -> None:
    keys, values = cache(head_length)
    queries = some_queries(len(SEEN), head_length)
    found = attend(library, level, keys, values, queries, SEEN, cap=3.0)
    for query, seen, out in zip(queries.astype(np.float64), SEEN, found, strict=True):
        scores = 3 * np.tanh(keys[:seen].astype(np.float64) @ query / np.sqrt(head_length) / 3)
        weights = np.exp(scores)
        assert np.abs(out - weights / weights.sum() @ values[:seen]).max() < 1e-3
    assert same_bits(found, attend(library, "portable", keys, values, queries, SEEN, cap=3.0))
    assert not same_bits(found, attend(library, level, keys, values, queries, SEEN))


@pytest.mark.parametrize("head_length", [16, 80])
def test_a_sink_takes_its_share_of_the_weights_with_equal_bits_on_every_level(
    library: NativeLibrary, level: str, head_length: int
) -> None:
    keys, values = cache(head_length)
    queries = some_queries(len(SEEN), head_length)
    sinks = np.linspace(-40, 90, len(SEEN), dtype=np.float32)  # the last are far above every score
    found = attend(library, level, keys, values, queries, SEEN, sinks=sinks)
    for query, seen, sink, out in zip(queries.astype(np.float64), SEEN, sinks, found, strict=True):
        scores = keys[:seen].astype(np.float64) @ query / np.sqrt(head_length)
        weights = np.exp(scores - sink)
        assert np.abs(out - weights / (1 + weights.sum()) @ values[:seen]).max() < 1e-3
    assert same_bits(found, attend(library, "portable", keys, values, queries, SEEN, sinks=sinks))
    for index, sink in enumerate(sinks):
        one = queries[index : index + 1]
        assert same_bits(
            attend(library, level, keys, values, one, SEEN[index : index + 1], sinks=sink[None])[0], found[index]
        )
    none = np.full_like(sinks, -1000.0)
    without = attend(library, level, keys, values, queries, SEEN)
    assert same_bits(attend(library, level, keys, values, queries, SEEN, sinks=none), without)


@pytest.mark.parametrize("head_length", LENGTHS)
def test_every_level_computes_the_portable_levels_attention_bits(
    library: NativeLibrary, fast: str, head_length: int
) -> None:
    keys, values = cache(head_length)
    queries = some_queries(len(SEEN), head_length)
    expected = attend(library, "portable", keys, values, queries, SEEN)
    assert same_bits(attend(library, fast, keys, values, queries, SEEN), expected)


@pytest.mark.parametrize("head_length", [16, 64])
def test_a_querys_attention_does_not_depend_on_the_other_queries(
    library: NativeLibrary, level: str, head_length: int
) -> None:
    keys, values = cache(head_length)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 64):
        queries = some_queries(count, head_length)
        seen = [1 + (97 * index) % 700 for index in range(count)]
        together = attend(library, level, keys, values, queries, seen)
        for index in range(count):
            alone = attend(library, level, keys, values, queries[index : index + 1], [seen[index]])
            assert same_bits(alone[0], together[index]), (count, index)


@pytest.mark.parametrize("seen", [1, 16, 100, 256, 300])
def test_positions_that_a_query_does_not_see_do_not_affect_it(library: NativeLibrary, level: str, seen: int) -> None:
    keys, values = cache(32)
    queries = some_queries(2, 32)
    expected = attend(library, level, keys, values, queries, [seen, seen])
    keys[seen:], values[seen:] = np.nan, np.inf
    assert same_bits(attend(library, level, keys, values, queries, [seen, seen]), expected)
    beside = attend(library, level, keys, values, queries, [seen, 700])  # a second query that sees all positions
    assert same_bits(beside[0], expected[0])
    assert np.isnan(beside[1]).all()


@pytest.mark.parametrize("head_length", [16, 64, 256])
def test_a_window_hides_the_positions_before_it(library: NativeLibrary, level: str, head_length: int) -> None:
    keys, values = cache(head_length)
    first = [max(0, seen - 1 - 40 * index) for index, seen in enumerate(SEEN)]
    queries = some_queries(len(SEEN), head_length)
    found = attend(library, level, keys, values, queries, SEEN, first=first)
    assert same_bits(found, attend(library, "portable", keys, values, queries, SEEN, first=first))
    for index, (start, seen) in enumerate(zip(first, SEEN, strict=True)):
        alone = attend(library, level, keys, values, queries[index : index + 1], [seen], first=[start])
        assert same_bits(alone[0], found[index]), (start, seen)
        scores = keys[start:seen].astype(np.float64) @ queries[index].astype(np.float64) / np.sqrt(head_length)
        weights = np.exp(scores - scores.max())
        expected = weights / weights.sum() @ values[start:seen]
        assert np.abs(found[index] - expected).max() < 1e-3
        hidden, spoiled = keys.copy(), values.copy()
        hidden[:start], spoiled[:start] = np.nan, np.inf
        one = queries[index : index + 1]
        assert same_bits(attend(library, level, hidden, spoiled, one, [seen], first=[start])[0], found[index])


@pytest.mark.parametrize("own_from", [0, 16, 240, 256, 512, 688])
def test_separate_keys_and_values_of_a_query_give_the_caches_bits(
    library: NativeLibrary, level: str, own_from: int
) -> None:
    for head_length in (16, 48, 64):
        keys, values = cache(head_length)
        queries = some_queries(len(SEEN), head_length)
        first = [seen // 2 for seen in SEEN]
        for starts in (None, first):
            expected = attend(library, level, keys, values, queries, SEEN, first=starts)
            found = attend(library, level, keys, values, queries, SEEN, first=starts, own_from=own_from)
            assert same_bits(found, expected)


def test_attention_is_right_with_one_score_far_above_the_rest(library: NativeLibrary, level: str) -> None:
    """The largest score is in the second block, so the first block's sums are scaled to zero."""
    keys, values = cache(32, 600)
    queries = np.ones((1, 32), np.float32)
    keys[400] = 1000
    assert np.array_equal(attend(library, level, keys, values, queries, [600])[0], values[400])
    assert not np.array_equal(attend(library, level, keys, values, queries, [400])[0], values[400])


def test_keys_and_values_are_rounded_to_the_nearest_half_precision_number(library: NativeLibrary, level: str) -> None:
    """Ties go to even, and values beyond the range of a half become infinite."""
    ties = np.float32([1 + 2**-11, 1 + 3 * 2**-11, 2049, 2051, 2**-25, 3 * 2**-25, 2**-14 - 2**-25, 65519, 65520])
    exact = np.concatenate([ties, -ties, np.random.default_rng(1).lognormal(0, 9, 62).astype(np.float32)])[None]
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float16).astype(np.float32)
    assert np.isinf(rounded).any()
    assert (rounded == 0).any()
    anything = np.ones_like(exact)
    assert np.array_equal(attend(library, level, anything, exact, anything, [1]), rounded)
    assert np.isnan(attend(library, level, anything, np.full_like(exact, np.nan), anything, [1])).all()

    # Two keys have equal weights if one is the rounded other.
    finite = np.where(np.isfinite(rounded), exact, 0)
    values = np.eye(2, finite.shape[1], dtype=np.float32)
    for element in np.flatnonzero(finite):
        keys = np.zeros((2, finite.shape[1]), np.float32)
        keys[:, element] = finite[0, element], rounded[0, element]
        query = np.zeros_like(finite)
        query[0, element] = 2.0**24
        assert attend(library, level, keys, values, query, [2])[0, :2].tolist() == [0.5, 0.5]
