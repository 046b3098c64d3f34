"""Draws by the kernels: numpy's tokens, odds and measures to the bit, at every level."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgespec.errors import ForwardError, NonFiniteLogitsError, RuntimeUnavailableError
from edgespec.interfaces.drawing import MOST_DRAWN, DrawRequest, Measure, draw_from, noise_key
from edgespec.runtimes.native import draws as module
from edgespec.runtimes.native.draws import DrawnRows, NativeDraws
from edgespec.runtimes.native.library import BAD_REQUEST, LEVELS, DrawnStruct, DrawRequestStruct, NativeLibrary
from tests.support.score_rows import (
    ScoreRow,
    by_kernels,
    by_numpy,
    by_specification,
    natively,
    or_nothing,
    score_rows,
    shaped,
)

VOCABULARY = 151_936
COMMON = {
    "top_p 0.95": DrawRequest(temperature=0.7, top_p=0.95),
    "top_k 40": DrawRequest(top_k=40),
    "min_p 0.05": DrawRequest(min_p=0.05),
    "temperature": DrawRequest(),
    "penalties": DrawRequest(temperature=0.7, top_p=0.95, seen={5: 3, 77: 1}, repeat_penalty=1.1),
}


@pytest.mark.slow
def test_draws_from_short_rows_equal_numpys_to_the_bit(library: NativeLibrary, level: str) -> None:
    draws = NativeDraws(library.api, level)
    for row in score_rows(LEVELS[level], 6_000):
        assert by_kernels(draws, row) == by_numpy(row), row


@given(
    scores=st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, -math.inf]), min_size=1, max_size=40),
    request=st.builds(
        DrawRequest,
        key=st.none() | st.tuples(*[st.integers(0, 2**32 - 1)] * 4),
        temperature=st.floats(1e-9, 100),
        top_k=st.integers(0, 50),
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        repeat_penalty=st.floats(0, 10, exclude_min=True),
        presence_penalty=st.floats(-10, 10),
        frequency_penalty=st.floats(-10, 10),
        seen=st.dictionaries(st.integers(0, 50), st.integers(0, 9), max_size=4),
        wanted=st.integers(1, MOST_DRAWN),
        measure=st.sampled_from(Measure),
    ),
)
def test_draws_of_kernels_numpy_and_specification_agree(
    library: NativeLibrary, scores: list[float], request: DrawRequest
) -> None:
    """For any scores and any valid request."""
    row = ScoreRow(scores=np.float32(scores), request=request, ids=None)
    expected = by_specification(row)
    assert by_numpy(row) == expected
    for level in library.levels:
        assert by_kernels(NativeDraws(library.api, level), row) == expected, level


def test_top_k_above_the_vocabulary_size_keeps_every_token(library: NativeLibrary) -> None:
    """``top_k`` has no upper bound, but a 64-bit integer has."""
    scores = shaped(np.random.default_rng(3), "text", 50)
    all_of_them = DrawRequest(key=noise_key(1, 2, 3), top_k=50, wanted=4)
    expected = draw_from(scores, all_of_them)
    for top_k in (2**31, 2**63, 2**64 + 1):
        row = ScoreRow(scores=scores, request=replace(all_of_them, top_k=top_k), ids=None)
        assert natively(NativeDraws(library.api, library.levels[-1]), row) == expected == by_specification(row)


def test_a_draw_writes_only_within_its_scratch_memory(library: NativeLibrary, level: str) -> None:
    for row in score_rows(13, 2000, longest=600):
        draws = NativeDraws(library.api, level)
        size = library.api.es_draw_scratch(len(row.scores))
        memory = np.full(size + 4096, 0xA5, dtype=np.uint8)
        draws._scratch = memory  # used if it is large enough
        by_kernels(draws, row)
        assert (memory[size:] == 0xA5).all(), row


@pytest.mark.slow
@pytest.mark.parametrize("count", [255, 256, 257, 1000, 5000])
def test_draws_from_long_rows_equal_numpys_to_the_bit(library: NativeLibrary, level: str, count: int) -> None:
    """Around the size of the blocks that draws process, and several blocks."""
    draws = NativeDraws(library.api, level)
    for row in score_rows(count, 200, count=count):
        assert by_kernels(draws, row) == by_numpy(row), row


@pytest.mark.slow
def test_draws_from_a_whole_vocabulary_equal_numpys_to_the_bit(library: NativeLibrary, level: str) -> None:
    draws = NativeDraws(library.api, level)
    for row in score_rows(7, 40, count=VOCABULARY):
        assert by_kernels(draws, row) == by_numpy(row), row


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("shape", ["text", "flat", "peaky", "infinities"])
def test_common_draw_requests_equal_numpys_to_the_bit(
    library: NativeLibrary, level: str, name: str, shape: str
) -> None:
    draws, scores = NativeDraws(library.api, level), shaped(np.random.default_rng(8), shape, 20_000)
    for position in range(3):
        request = replace(COMMON[name], key=noise_key(1, position, 0), measure=Measure(position), wanted=1 + position)
        row = ScoreRow(scores=scores, request=request, ids=None)
        assert natively(draws, row) == draw_from(scores, request)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 700])
def test_a_draw_from_scores_that_are_not_finite_raises(
    library: NativeLibrary, level: str, spoilt: float, count: int
) -> None:
    draws = NativeDraws(library.api, level)
    for at in {0, count // 2, count - 1}:
        scores = np.zeros(count, dtype=np.float32)
        scores[at] = spoilt
        ids = np.arange(count) * 3
        for key in (None, noise_key(1, 2, 3)):
            row = ScoreRow(scores=scores, request=DrawRequest(key=key), ids=None)
            with pytest.raises(NonFiniteLogitsError, match=f"{spoilt} at token id {at}$"):
                natively(draws, row)
            with pytest.raises(NonFiniteLogitsError, match=f"{spoilt} at token id {3 * at}$"):
                natively(draws, replace(row, ids=ids))
    with pytest.raises(NonFiniteLogitsError, match="-inf at token id 0"):
        natively(draws, ScoreRow(scores=np.full(count, -np.inf, np.float32), request=DrawRequest(), ids=None))


def test_invalid_draw_requests_are_refused(library: NativeLibrary) -> None:
    draws, scores = NativeDraws(library.api, "portable"), np.zeros(9, dtype=np.float32)
    drawn_of_nothing = [replace(DrawRequest(key=(1, 2, 3, 4)), **own) for own in ({"top_p": 0.0}, {"min_p": 1.1})]
    few_or_many = [DrawRequest(wanted=0), DrawRequest(wanted=MOST_DRAWN + 1), DrawRequest(top_k=-1)]
    for request in (*few_or_many, *drawn_of_nothing):
        with pytest.raises(ForwardError, match="a draw from 9 scores was refused"):
            draws.draw(scores.ctypes.data, 9, request, None)
    api, drawn = library.api, DrawnStruct()
    for count in (0, -1, 2**21 + 1):
        assert api.es_draw_scratch(count) == 0
        assert api.es_draw(scores.ctypes.data, count, DrawRequestStruct(wanted=1), None, drawn, 0) == BAD_REQUEST
    assert api.es_draw_scratch(2**21) > 0
    scratch = np.empty(api.es_draw_scratch(9), dtype=np.uint8)
    seen = np.array([9], dtype=np.int64)
    struct = DrawRequestStruct(wanted=1, scale=1.0, seen=seen.ctypes.data, occurrences=seen.ctypes.data, seen_count=1)
    for column in (9, -1):
        seen[0] = column
        code = api.es_draw(scores.ctypes.data, 9, ctypes.byref(struct), scratch.ctypes.data, drawn, 0)
        assert code == BAD_REQUEST
    assert api.es_draw(scores.ctypes.data, 9, struct, scratch.ctypes.data, drawn, 99) == BAD_REQUEST


def test_a_scale_that_is_not_finite_is_refused_before_the_call(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels take it, and draw nothing."""
    draws, scores = NativeDraws(library.api, "portable"), np.zeros(9, dtype=np.float32)
    for scale in (math.inf, -math.inf, math.nan):
        monkeypatch.setattr(DrawRequest, "scale", scale)
        with pytest.raises(ForwardError, match="a draw from 9 scores was refused"):
            draws.draw(scores.ctypes.data, 9, DrawRequest(), None)


@pytest.mark.parametrize("kernels", [True, False])
def test_rows_of_other_runtimes_draw_with_the_kernels_if_available(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways give the same token, and read-only memory stays unchanged."""
    monkeypatch.setattr(module, "_fastest", module._fastest if kernels else lambda: None)
    for row in score_rows(12, 200):
        row.scores.flags.writeable = False
        rows = DrawnRows(1, lambda _, row=row: row.scores)  # type: ignore[misc]
        assert or_nothing(lambda: rows.draw(0, row.request, row.ids)) == by_numpy(row)  # noqa: B023


def test_without_the_library_draws_use_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> NativeLibrary:
        raise RuntimeUnavailableError("not built")

    monkeypatch.setattr(module, "load", missing)
    assert module._fastest.__wrapped__() is None


def test_a_draw_does_not_depend_on_earlier_draws(library: NativeLibrary) -> None:
    """The same scratch memory serves rows of other lengths, with and without ids, penalties and noise."""
    draws = NativeDraws(library.api, library.levels[-1])
    rows = list(score_rows(11, 200, longest=600))
    drawn = [by_kernels(draws, row) for row in rows]
    assert drawn == [by_kernels(NativeDraws(library.api, library.levels[-1]), row) for row in rows]
