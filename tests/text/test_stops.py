"""Stop strings: the same result at every chunking, nothing of a stop shown, nothing held back without need."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.engine.answer import StopStrings
from edgespec.errors import InvalidRequestError


def streamed(stops: list[str], chunks: list[str]) -> tuple[str, bool]:
    watcher = StopStrings(stops)
    shown, stopped = "", False
    for chunk in chunks:
        text, stopped = watcher.feed(chunk)
        shown += text
        if stopped:
            break
    return shown + watcher.flush(), stopped


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    """Character by character: the first end at which a stop string is complete, the longest one there."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


letters = st.text(alphabet="ab<é", max_size=12)


@given(st.lists(st.text(alphabet="ab<é", min_size=1, max_size=5), max_size=4), letters, st.lists(st.integers(0, 12)))
@settings(max_examples=500, deadline=None)
def test_every_chunking_gives_what_the_whole_text_gives(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert streamed(stops, chunks) == streamed(stops, list(text)) == reference(stops, text)


@given(st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), max_size=4), letters)
@settings(max_examples=300, deadline=None)
def test_held_back_is_exactly_the_longest_end_that_begins_a_stop(stops: list[str], text: str) -> None:
    watcher = StopStrings(stops)
    shown = ""
    for index, character in enumerate(text):
        part, stopped = watcher.feed(character)
        shown += part
        if stopped:
            break
        seen = text[: index + 1]
        ends = [seen[-length:] for length in range(1, len(seen) + 1)]
        begins = [len(end) for end in ends if any(stop != end and stop.startswith(end) for stop in stops)]
        assert len(seen) - len(shown) == max(begins, default=0)


def test_a_stop_across_chunks() -> None:
    watcher = StopStrings(["</s>", "User:"])
    assert watcher.feed("Hello <") == ("Hello ", False)
    assert watcher.feed("/") == ("", False)
    assert watcher.feed("x </") == ("</x ", False)
    assert watcher.feed("s> more") == ("", True)
    assert watcher.feed("after") == ("", True)
    assert watcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["bc", "abcd"], "xabcdy", "xa"),  # complete first, though it starts later
        (["bc", "abc"], "xabcd", "x"),  # complete together: the longest
        (["ab", "abc"], "xabc", "x"),  # never waits for a longer one
        (["b", "a"], "xab", "x"),
        (["aa"], "aaa", ""),
        (["aab"], "aaab", "a"),  # the held-back text overlaps itself
    ],
)
def test_ties(stops: list[str], text: str, expected: str) -> None:
    watcher = StopStrings(stops)
    assert watcher.feed(text) == (expected, True)


def test_flush_gives_the_rest() -> None:
    watcher = StopStrings(["END"])
    assert watcher.feed("the EN") == ("the ", False)
    assert watcher.flush() == "EN"
    assert watcher.flush() == ""


def test_no_stops_pass_everything_through() -> None:
    watcher = StopStrings([])
    assert watcher.feed("anything") == ("anything", False)
    assert watcher.flush() == ""


def test_what_cannot_be_a_stop_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        StopStrings(["a", ""])
    with pytest.raises(InvalidRequestError, match="list"):
        StopStrings("stop")
