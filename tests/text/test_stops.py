"""Stop strings: chunking does not matter, no part of a stop is shown, and only a possible stop is held back."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.answer_parts import AnswerText, StopStrings
from edgespec.text.conversation.ends import Ends
from tests.support.listed_tokens import ListedTokens


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
    """A reference, character by character: the longest stop string at the first end of one."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


letters = st.text(alphabet="ab<é", max_size=12)
TEXTS = ["a", "<", "<2>", "<3>"]
NAMES = {2: "<2>", 3: "<3>"}  # of the hidden tokens
SHOWN = {0: "a", 1: "<", 2: "\u2461", 3: "\u2462"}
spelled = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3).map("".join)


class Spelled(ListedTokens):
    """Tokens of one text each, two of which are hidden."""

    def __init__(self) -> None:
        super().__init__([b"a", b"<", b"", b""])

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        return [TEXTS.index(each) for each in re.findall("<[23]>|a|<", text)]


@given(st.lists(st.text(alphabet="ab<é", min_size=1, max_size=5), max_size=4), letters, st.lists(st.integers(0, 12)))
@settings(max_examples=500, deadline=None)
def test_stop_strings_give_the_same_result_for_every_chunking(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert streamed(stops, chunks) == streamed(stops, list(text)) == reference(stops, text)


@given(st.lists(spelled, max_size=4), st.lists(st.integers(0, 3), max_size=12))
@settings(max_examples=300, deadline=None)
def test_a_stop_text_names_hidden_tokens_which_are_not_shown(stops: list[str], tokens: list[int]) -> None:
    text = AnswerText(Spelled(), Ends(texts=tuple(stops), names=NAMES))
    shown, stopped = "", False
    for token in tokens:
        more, stopped = text.feed(token)
        shown += more
        if stopped:
            break
    written = {stop.replace("<2>", SHOWN[2]).replace("<3>", SHOWN[3]): stop for stop in stops}
    expected, found = reference([*stops, *written], "".join(SHOWN[token] for token in tokens))
    assert (shown + text.flush(), stopped) == (expected.replace(SHOWN[2], "").replace(SHOWN[3], ""), found)
    assert (text.stop_text in stops) == stopped


@given(st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), max_size=4), letters)
@settings(max_examples=300, deadline=None)
def test_only_the_longest_suffix_that_may_begin_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
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


def test_a_stop_string_that_is_complete_too_early_is_text() -> None:
    watcher = StopStrings(["ab", "abcd"])
    assert watcher.feed("xab", may_end=False) == ("x", False), "the longer one may still come"
    assert watcher.feed("x", may_end=True) == ("abx", False)
    assert watcher.feed("yab", may_end=False) == ("y", False)
    assert watcher.feed("cd") == ("", True)
    begun = StopStrings(["ab"])
    assert begun.feed("xa", may_end=False) == ("x", False)
    assert begun.feed("b") == ("", True), "it may begin early"
    assert begun.feed("ab", may_end=False) == ("", True)


def test_a_stop_string_that_spans_two_chunks_is_found() -> None:
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
        (["bc", "abcd"], "xabcdy", "xa"),  # complete first, although it starts later
        (["bc", "abc"], "xabcd", "x"),  # complete at the same character: the longest counts
        (["ab", "abc"], "xabc", "x"),  # does not wait for a longer stop
        (["b", "a"], "xab", "x"),
        (["aa"], "aaa", ""),
        (["aab"], "aaab", "a"),  # the held-back text overlaps itself
    ],
)
def test_the_stop_string_that_is_complete_first_ends_the_text(stops: list[str], text: str, expected: str) -> None:
    watcher = StopStrings(stops)
    assert watcher.feed(text) == (expected, True)


def test_flush_returns_the_held_back_text() -> None:
    watcher = StopStrings(["END"])
    assert watcher.feed("the EN") == ("the ", False)
    assert watcher.flush() == "EN"
    assert watcher.flush() == ""


def test_without_stop_strings_all_text_is_passed_through() -> None:
    watcher = StopStrings([])
    assert watcher.feed("anything") == ("anything", False)
    assert watcher.flush() == ""


def test_invalid_stop_strings_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        StopStrings(["a", ""])
    with pytest.raises(InvalidRequestError, match="list"):
        StopStrings("stop")
