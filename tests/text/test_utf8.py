"""Incremental UTF-8: any split of any bytes gives what decoding them at once gives."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings, strategies as st

from edgespec.text.tokenizer import IncrementalText

HARD = [
    b"plain",
    "é".encode(),
    "日本語".encode(),
    "🙂".encode(),
    "👩‍👩‍👧‍👦".encode(),  # a family: four people and three joiners
    "e\u0301".encode(),
    "\ufeffx".encode(),
    b"\xff",
    b"\x80",
    b"a\xc3",
    b"\xe6\x97",
    b"\xf0\x9f\x99",
    b"\xf0\x9f\x99x",
    b"\xf0\x9f\xf0\x9f\x99\x82",
    b"\xc0\x80",  # an overlong NUL
    b"\xed\xa0\x80",  # a surrogate
    b"\xf4\x90\x80\x80",  # beyond U+10FFFF
    b"\xe2\x82\xe2\x82\xac",
    b"\xf8\x88\x80\x80\x80",
]


def decoded(pieces: list[bytes]) -> str:
    text = IncrementalText()
    return "".join([text.feed(piece) for piece in pieces]) + text.flush()


@pytest.mark.parametrize("data", HARD, ids=repr)
def test_every_split(data: bytes) -> None:
    """All 2**(n-1) ways to cut up to twelve bytes, all pairs of cuts beyond."""
    places = range(1, len(data))
    most = len(data) if len(data) <= 12 else 2
    for count in range(most):
        for cuts in itertools.combinations(places, count):
            edges = [0, *cuts, len(data)]
            pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
            assert decoded(pieces) == data.decode("utf-8", "replace")


fragments = st.one_of(st.sampled_from(HARD), st.text(max_size=5).map(lambda t: t.encode("utf-8", "surrogatepass")))


@given(st.lists(st.one_of(fragments, st.binary(max_size=4)), max_size=8).map(b"".join), st.lists(st.integers(0, 60)))
@example(b"\xf0\x9f\x99\x82" * 3, [1, 2, 3, 5, 7])
@settings(max_examples=300, deadline=None)
def test_random_splits(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert decoded([data[a:b] for a, b in itertools.pairwise(edges)]) == data.decode("utf-8", "replace")


@given(st.lists(st.one_of(fragments, st.binary(max_size=4)), max_size=8).map(b"".join))
@settings(max_examples=200, deadline=None)
def test_only_an_unfinished_character_is_kept_back(data: bytes) -> None:
    text = IncrementalText()
    shown = ""
    for index in range(len(data)):
        shown += text.feed(data[index : index + 1])
        assert len(text.pending) <= 3
        whole = data[: index + 1]
        # Nothing shown is ever taken back, and what is kept back is the end of what came.
        assert data.decode("utf-8", "replace").startswith(shown)
        assert whole.endswith(text.pending)
        assert shown == whole[: len(whole) - len(text.pending)].decode("utf-8", "replace")


def test_flush_shows_an_unfinished_character_as_replaced() -> None:
    text = IncrementalText()
    assert text.feed("🙂".encode()[:3]) == ""
    assert text.flush() == "\ufffd"
    assert text.flush() == ""
    assert text.feed("é".encode()) == "é"  # as new
