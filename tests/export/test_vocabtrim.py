from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.export.trim.vocabtrim import (
    ACCEPTANCE_LOSS_ALLOWED,
    CANDIDATE_SIZES,
    LEAST_RIGHT_OF_LOST,
    HeadCost,
    SizeDecision,
    choose_size,
    coverage,
    lost_allowed,
)
from edgespec.files.gguf.token_rows import always_kept, kept_ids, rank_tokens
from tests.support import raw_gguf

VOCABULARY = 60
COUNTS = st.dictionaries(st.integers(0, VOCABULARY - 1), st.integers(0, 1000), max_size=VOCABULARY)
SPOKEN = COUNTS.filter(lambda counts: sum(counts.values()) > 0)
ALWAYS = st.lists(st.integers(0, VOCABULARY - 1), max_size=10)


# -------------------------------------------------------------------------------------------- ranking


@given(COUNTS)
def test_tokens_are_ranked_by_count_and_then_by_id(counts: dict[int, int]) -> None:
    ranked = rank_tokens(counts, VOCABULARY)
    assert ranked.dtype == np.int32
    assert ranked.tolist() == sorted(range(VOCABULARY), key=lambda token: (-counts.get(token, 0), token))


@given(COUNTS, ALWAYS, st.integers(10, VOCABULARY + 10))
def test_kept_ids_are_ascending_special_and_most_frequent_tokens(
    counts: dict[int, int], always: list[int], size: int
) -> None:
    kept = kept_ids(counts, size, always, vocabulary_size=VOCABULARY)
    assert kept.dtype == np.int32
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert len(kept) == min(size, VOCABULARY)
    inside = set(kept.tolist())
    assert set(always) <= inside
    least = min(((counts.get(t, 0), -t) for t in inside - set(always)), default=None)
    for token in set(range(VOCABULARY)) - inside:
        assert least is None or (counts.get(token, 0), -token) < least


@given(COUNTS, ALWAYS, st.integers(10, VOCABULARY - 1))
def test_a_larger_head_contains_all_rows_of_a_smaller_head(
    counts: dict[int, int], always: list[int], size: int
) -> None:
    smaller = kept_ids(counts, size, always, vocabulary_size=VOCABULARY)
    larger = kept_ids(counts, size + 1, always, vocabulary_size=VOCABULARY)
    assert set(smaller.tolist()) < set(larger.tolist())


def test_a_head_too_small_for_special_tokens_is_refused_with_the_minimum() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        kept_ids({}, 2, [5, 6, 7, 7], vocabulary_size=VOCABULARY)
    assert "3" in (caught.value.hint or "")
    assert kept_ids({}, 3, [5, 6, 7, 7], vocabulary_size=VOCABULARY).tolist() == [5, 6, 7]
    with pytest.raises(InvalidRequestError, match="0 rows"):
        kept_ids({}, 0, [], vocabulary_size=VOCABULARY)


@pytest.mark.parametrize("counts", [{VOCABULARY: 1}, {-1: 1}, {3: -1}])
def test_negative_counts_and_ids_outside_the_vocabulary_are_refused(counts: dict[int, int]) -> None:
    with pytest.raises(InvalidRequestError):
        kept_ids(counts, 10, [], vocabulary_size=VOCABULARY)


@pytest.mark.parametrize("always", [[VOCABULARY], [-1]])
def test_special_token_ids_outside_the_vocabulary_are_refused(always: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="outside"):
        kept_ids({}, 10, always, vocabulary_size=VOCABULARY)


# ------------------------------------------------------------------------------------------- coverage


@given(SPOKEN, st.sets(st.integers(0, VOCABULARY - 1)))
def test_coverage_is_the_share_of_counted_tokens_in_the_kept_rows(counts: dict[int, int], kept: set[int]) -> None:
    inside = coverage(counts, sorted(kept))
    outside = coverage(counts, sorted(set(range(VOCABULARY)) - kept))
    assert 0 <= inside <= 1
    assert inside + outside == pytest.approx(1)
    assert coverage(counts, range(VOCABULARY)) == 1


@pytest.mark.parametrize("counts", [{}, {1: 0}, {1: 5, 2: -1}])
def test_coverage_of_empty_counts_is_refused(counts: dict[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match="held-out"):
        coverage(counts, [1])


# --------------------------------------------------------------------------------------- special tokens


def test_special_tokens_byte_tokens_and_named_ids_are_always_kept(tmp_path: Path) -> None:
    types = [1, 2, 3, 4, 5, 6, 1, 1, 1]
    keys = raw_gguf.tokens(*"abcdefghi", types=types, bos=6, eos=1, padding=99)
    header = raw_gguf.read(tmp_path / "a.gguf", raw_gguf.build(keys))
    assert always_kept(header).tolist() == [1, 2, 3, 5, 6]
    assert always_kept(header).dtype == np.int32


def test_a_missing_token_type_table_keeps_only_named_ids(tmp_path: Path) -> None:
    types = [1] * 300
    types[3] = types[299] = 3
    keys = raw_gguf.tokens(*map(str, range(300)), types=types)
    assert always_kept(raw_gguf.read(tmp_path / "a.gguf", raw_gguf.build(keys))).tolist() == [3, 299]
    keys = raw_gguf.tokens("a", "b", eot=1)
    assert always_kept(raw_gguf.read(tmp_path / "b.gguf", raw_gguf.build(keys))).tolist() == [1]


def test_always_kept_of_a_file_without_vocabulary_raises(tmp_path: Path) -> None:
    header = raw_gguf.read(tmp_path / "a.gguf", raw_gguf.build([raw_gguf.ARCH, *raw_gguf.tokens("a", eos=0)[3:]]))
    with pytest.raises(ModelFileError, match="no vocabulary"):
        always_kept(header)


# ---------------------------------------------------------------------------------- the cost of a row


def test_the_head_cost_line_goes_through_both_measurements() -> None:
    cost = HeadCost.through((1000, 0.010), (3000, 0.016))
    assert cost.row_s == pytest.approx(3e-6)
    assert cost.rest_s == pytest.approx(0.007)
    assert cost.forward_s(1000) == pytest.approx(0.010)
    assert cost.forward_s(3000) == pytest.approx(0.016)


@given(st.integers(1, 1000), st.integers(1, 1000), st.floats(1e-6, 1), st.floats(1e-6, 1))
def test_head_costs_from_any_measurement_are_not_negative(
    rows: int, more: int, trimmed_s: float, whole_s: float
) -> None:
    cost = HeadCost.through((rows, trimmed_s), (rows + more, whole_s))
    assert cost.rest_s >= 0
    assert cost.row_s >= 0
    assert cost.forward_s(rows + more) == pytest.approx(whole_s)


def test_a_head_that_is_not_faster_when_trimmed_stays_whole() -> None:
    cost = HeadCost.through((10, 0.011), (100, 0.010))
    assert (cost.rest_s, cost.row_s) == (0.010, 0)
    assert not choose(cost=cost).trims


def test_the_head_never_costs_more_than_the_whole_forward() -> None:
    cost = HeadCost.through((10, 0.0001), (100, 0.010))
    assert cost.rest_s == pytest.approx(0, abs=1e-12)
    assert cost.row_s == pytest.approx(0.0001)


@pytest.mark.parametrize(
    "points",
    [
        ((100, 0.1), (100, 0.2)),
        ((200, 0.1), (100, 0.2)),
        ((0, 0.1), (100, 0.2)),
        ((10, 0.0), (100, 0.2)),
        ((10, math.nan), (100, 0.2)),
        ((10, 0.1), (100, math.inf)),
    ],
)
def test_invalid_measurements_of_head_costs_are_refused(points: tuple[tuple[int, float], tuple[int, float]]) -> None:
    with pytest.raises(InvalidRequestError):
        HeadCost.through(*points)


# ------------------------------------------------------------------------------------- choosing a size


@given(
    SPOKEN,
    SPOKEN,
    ALWAYS,
    st.lists(st.integers(1, VOCABULARY + 5), max_size=5),
    st.floats(0, 5),
    st.floats(1e-6, 0.1),
    st.floats(0, 1),
)
def test_no_allowed_size_is_faster_than_the_chosen_size(
    counts: dict[int, int],
    held_out: dict[int, int],
    always: list[int],
    sizes: list[int],
    rest_s: float,
    row_s: float,
    allowed: float,
) -> None:
    decision = choose_size(
        counts,
        held_out,
        always,
        sizes,
        vocabulary_size=VOCABULARY,
        cost=HeadCost(rest_s=rest_s, row_s=row_s),
        lost_allowed=allowed,
    )
    assert decision.candidates[-1].size == VOCABULARY
    assert decision.candidates[-1].relative_speed == 1
    assert decision.chosen in decision.candidates
    assert decision.chosen is decision.candidates[-1] or decision.chosen.coverage >= 1 - allowed
    assert decision.size in {*sizes, VOCABULARY}
    assert decision.trims == (decision.size < VOCABULARY)
    for each in decision.candidates:
        assert each.forward_s == rest_s + each.size * row_s
        kept = kept_ids(counts, each.size, always, vocabulary_size=VOCABULARY)
        assert each.coverage == coverage(held_out, kept)
        if each.coverage >= 1 - allowed:
            assert each.relative_speed <= decision.chosen.relative_speed
    assert decision.reasons


# 100 tokens; the first ten tokens are nearly all of the text.
FREQUENT = {token: 1000 - token if token < 10 else 1 for token in range(100)}


def choose(**changed: object) -> SizeDecision:
    settings: dict[str, object] = {
        "vocabulary_size": 100,
        "cost": HeadCost(rest_s=0.010, row_s=0.0002),
        **changed,
    }
    held_out = settings.pop("held_out", FREQUENT)
    sizes = settings.pop("sizes", (5, 10, 50))
    return choose_size(FREQUENT, held_out, [0, 1], sizes, **settings)  # type: ignore[arg-type]


def test_the_chosen_size_has_reasons() -> None:
    decision = choose(sizes=(1, 5, 10, 50))
    assert decision.size == 10
    chosen, five, fifty, one = decision.reasons
    assert chosen.startswith("10 of 100 rows hold 99.")
    assert "takes 40% of the time" in chosen
    assert five.startswith("5 rows lose ")
    assert "5.0% is allowed" in five
    assert fifty.startswith("50 rows are predicted at 1.4")
    assert one == "1 rows cannot hold the 2 tokens that are always kept"


def test_a_loss_of_five_percent_is_allowed_by_default() -> None:
    assert ACCEPTANCE_LOSS_ALLOWED == 0.05
    just = {0: 95, 99: 5}
    more = {0: 949, 99: 51}
    assert choose(held_out=just).size == 5
    assert choose(held_out=more).size == 100
    assert choose(held_out=more, lost_allowed=0.06).size == 5


def test_a_head_may_lack_more_tokens_if_the_whole_head_rarely_proposes_them() -> None:
    assert lost_allowed(None) == lost_allowed(1.0) == ACCEPTANCE_LOSS_ALLOWED
    assert lost_allowed(0.8) == pytest.approx(0.0625)
    assert lost_allowed(0.0) == lost_allowed(LEAST_RIGHT_OF_LOST) == pytest.approx(0.1)


def test_lost_tokens_count_by_the_share_the_whole_head_would_propose() -> None:
    counts = dict.fromkeys(range(20), 1)
    options: dict[str, Any] = {"vocabulary_size": 100, "cost": HeadCost(rest_s=1.0, row_s=0.01), "lost_allowed": 1.0}
    held_out = {0: 90, 15: 10}

    def chosen(**more: float) -> int:
        return choose_size(counts, held_out, [], (10, 20), **options, **more).size

    assert chosen() == chosen(right_of_lost=1.0) == 20
    assert chosen(right_of_lost=0.1) == 10
    speeds = [each.relative_speed for each in choose_size(counts, held_out, [], (10,), **options).candidates]
    assert speeds == pytest.approx([0.9 * 2.0 / 1.1, 1.0])


def test_all_rows_are_kept_if_every_size_loses_too_much() -> None:
    decision = choose(held_out={99: 1})
    assert not decision.trims
    assert decision.reasons[0] == "all 100 rows are kept"


def test_the_default_candidate_sizes_of_a_head() -> None:
    counts = dict.fromkeys(range(20000), 1)
    decision = choose_size(counts, counts, [], vocabulary_size=150_000, cost=HeadCost(rest_s=0.0125, row_s=48e-9))
    assert tuple(each.size for each in decision.candidates) == (*CANDIDATE_SIZES, 150_000)
    assert decision.size == 24576
    assert all(size % 64 == 0 for size in CANDIDATE_SIZES)


@pytest.mark.parametrize(
    "changed",
    [
        {"cost": HeadCost(rest_s=0, row_s=0)},
        {"cost": HeadCost(rest_s=0.01, row_s=-1e-9)},
        {"cost": HeadCost(rest_s=math.nan, row_s=1e-6)},
        {"cost": HeadCost(rest_s=0.01, row_s=math.inf)},
        {"cost": HeadCost(rest_s=-0.01, row_s=1e-3)},
        {"lost_allowed": 1.5},
        {"sizes": (0,)},
        {"held_out": {}},
    ],
)
def test_invalid_arguments_of_choose_size_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        choose(**changed)
