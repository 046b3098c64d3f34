"""The text of an answer equals decoding all its tokens' bytes together, for any bytes."""

from __future__ import annotations

import itertools
from typing import cast

import pytest
from hypothesis import example, given, settings, strategies as st

from edgespec.text.conversation.answer_parts import AnswerText
from edgespec.text.conversation.ends import Ends
from edgespec.text.tokenizers.tokenizer import Tokenizer

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


class Pieces:
    """A tokenizer with the given bytes as tokens."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token]


def answer(pieces: list[bytes]) -> AnswerText:
    return AnswerText(cast(Tokenizer, Pieces(pieces)), Ends())


def decoded(pieces: list[bytes]) -> str:
    text = answer(pieces)
    return "".join([text.feed(token)[0] for token in range(len(pieces))]) + text.flush()


@pytest.mark.parametrize("data", HARD, ids=repr)
def test_every_split_of_utf8_bytes_into_tokens_gives_the_same_text(data: bytes) -> None:
    """All 2**(n-1) splits of up to twelve bytes; for longer data all pairs of cuts."""
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
def test_random_splits_of_random_bytes_into_tokens_give_the_same_text(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert decoded([data[a:b] for a, b in itertools.pairwise(edges)]) == data.decode("utf-8", "replace")


@given(st.lists(st.one_of(fragments, st.binary(max_size=4)), max_size=8).map(b"".join))
@settings(max_examples=200, deadline=None)
def test_only_an_incomplete_character_is_held_back(data: bytes) -> None:
    text, shown = answer([data[index : index + 1] for index in range(len(data))]), ""
    for index in range(len(data)):
        shown += text.feed(index)[0]
        # Shown text is never taken back, and at most the last three bytes are held back.
        assert data.decode("utf-8", "replace").startswith(shown)
        ends = (data[: index + 1 - kept].decode("utf-8", "replace") for kept in range(4) if kept <= index + 1)
        assert shown in ends


def test_an_incomplete_character_at_the_end_is_shown_as_a_replacement_character() -> None:
    text = answer(["🙂".encode()[:3]])
    assert text.feed(0) == ("", False)
    assert text.flush() == "\ufffd"
    assert text.flush() == ""


def test_half_of_a_character_is_left_out_of_a_cut_answer_but_not_bytes_that_are_none() -> None:
    text = answer([b"a\xff" + "🙂".encode()[:3]])
    assert text.feed(0)[0] + text.flush(cut=True) == "a\ufffd"
