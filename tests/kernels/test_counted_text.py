"""Occurrences of each token, counted while a text grows and shrinks, equal a count from scratch."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from edgespec.decoding.sampling import Sampling, request_of
from edgespec.interfaces.counted_text import CountedText
from edgespec.interfaces.drawing import Seen, draw_from
from edgespec.runtimes.native.draws import NativeDraws
from edgespec.runtimes.native.library import NativeLibrary
from tests.interfaces.draw_specification import specified
from tests.support.score_rows import ScoreRow, by_kernels

VOCABULARY_SIZE = 9

# Changes of a text: tokens that follow (some past the vocabulary), or the length to cut it to, as a share.
TOKENS = st.lists(st.integers(0, VOCABULARY_SIZE + 1), max_size=5)
CHANGES = st.lists(TOKENS | st.floats(0, 1), max_size=30)
SAMPLED = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8]),
    repeat_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    repeat_last_n=st.sampled_from([-1, 0, 3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.3, -0.2]),
    seed=st.integers(0, 99),
)


def changed(text: CountedText, tokens: list[int], change: list[int] | float) -> None:
    if isinstance(change, list):
        text.extend(change)
        tokens.extend(change)
    else:
        length = round(change * len(tokens))
        text.cut(length)
        del tokens[length:]


@given(first=st.lists(st.integers(0, 5)), changes=CHANGES, asked_from=st.integers(0, 5))
def test_a_counted_text_is_a_list_with_the_occurrences_of_each_token(
    first: list[int], changes: list[list[int] | float], asked_from: int
) -> None:
    text, tokens, place = CountedText(first), list(first), random.Random(len(changes))
    for number, change in enumerate(changes):
        changed(text, tokens, change)
        assert (list(text), len(text)) == (tokens, len(tokens))
        assert text[-2:] == tokens[-2:]
        if number >= asked_from:  # also a text that was never counted before
            start, begins = place.choice((0, 3, 8, len(tokens))), place.choice((0, 0, 0, 5))
            answer = Counter(tokens[max(start, begins) :])
            assert text.seen(start, begins) == {token: answer[token] for token in tokens[start:]}
            assert len(text.seen(start, begins)) == len(set(tokens[start:]))


@given(changes=CHANGES, sampling=SAMPLED, begins=st.integers(0, 9), seed=st.integers(0, 99), trimmed=st.booleans())
def test_draws_with_counted_penalties_equal_the_specification(
    library: NativeLibrary,
    changes: list[list[int] | float],
    sampling: Sampling,
    begins: int,
    seed: int,
    trimmed: bool,
) -> None:
    scores = np.random.default_rng(seed).normal(0, 2, VOCABULARY_SIZE).astype(np.float32)
    ids = np.flatnonzero(np.arange(2 * VOCABULARY_SIZE) % 2) if trimmed else None
    text, tokens = CountedText(), list[int]()
    for change in changes:
        changed(text, tokens, change)
        request, last = request_of(sampling, text, begins=begins), sampling.repeat_last_n
        first = max(0, len(tokens) - last) if last >= 0 else 0
        answer = Counter(tokens[max(first, begins) :])
        fresh = {token: answer[token] for token in tokens[first:]}
        expected = specified(scores.tolist(), replace(request, seen=fresh), None if ids is None else ids.tolist())
        assert draw_from(scores, request, ids) == expected
        for level in library.levels:
            assert (
                by_kernels(NativeDraws(library.api, level), ScoreRow(scores=scores, request=request, ids=ids))
                == expected
            ), level


@given(texts=st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=10))
def test_a_counted_text_can_become_another_text(texts: list[list[int]]) -> None:
    text = CountedText([1, 2])
    for other in texts:
        text.follow(other)
        assert (list(text), text.seen(0, 0)) == (other, Counter(other))


def test_a_new_counted_text_is_empty() -> None:
    assert list(CountedText()) == []
    assert not CountedText().seen(0, 0)
    assert not CountedText([1, 2]).seen(3, 3)


def test_seen_tokens_are_an_equal_mapping_from_either_way_of_counting() -> None:
    seen = Seen.of({7: 2, 3: 1})
    assert seen == {3: 1, 7: 2}
    assert Seen.of(seen) is seen
    assert (seen[7], seen.get(4, 0), list(seen), len(seen)) == (2, 0, [7, 3], 2)
    with pytest.raises(KeyError):
        seen[4]
