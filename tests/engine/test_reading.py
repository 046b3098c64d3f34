"""Reading events: how much of a prompt is read, before each part of it, and that they change nothing."""

from __future__ import annotations

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Event, Reading, Text
from edgespec.engine.session import Session
from edgespec.interfaces.model import PREFILL_CHUNK_TOKENS
from tests.engine.answers import plain_text
from tests.support.tiny_models import answer
from tests.support.watched_sequences import watch_forwards

LONG = "the " * 700


def events_of(session: Session, prompt: str, **settings: object) -> list[Event]:
    return list(session.generate(prompt, max_tokens=4, **settings))  # type: ignore[arg-type]


def read_in(events: list[Event]) -> list[Reading]:
    """The events of reading, which come before the answer."""
    found = [event for event in events if isinstance(event, Reading)]
    first_text = next(index for index, event in enumerate(events) if isinstance(event, Text))
    assert all(events.index(event) < first_text for event in found)
    return found


def test_an_event_comes_before_each_part_of_a_prompt(session: Session) -> None:
    events = events_of(session, LONG)
    done = events[-1]
    assert isinstance(done, Done)
    of = done.stats.prompt_tokens
    assert of > 2 * PREFILL_CHUNK_TOKENS
    assert read_in(events) == [Reading(tokens, of) for tokens in range(0, of - 1, PREFILL_CHUNK_TOKENS)]


def test_only_tokens_that_are_not_cached_count(session: Session) -> None:
    events_of(session, LONG)
    events = events_of(session, "and more")
    done = events[-1]
    assert isinstance(done, Done)
    assert done.stats.cached_tokens > 700
    assert read_in(events) == [Reading(0, done.stats.prompt_tokens - done.stats.cached_tokens)]


def test_a_cached_prompt_is_not_read_again(session: Session) -> None:
    events_of(session, "hello", raw=True)
    assert read_in(events_of(session, "hello", raw=True)) == []


def test_parts_are_the_forwards_of_the_whole_prompt(
    engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part is smaller than a native call: the rows keep their bits, and the prompt its speed."""
    sizes = list[int]()
    with monkeypatch.context() as patch:
        watch_forwards(patch, lambda _sequence, tokens, rows: sizes.append(0 if rows else len(tokens)))
        events_of(session, LONG, depth=0)
    read = [size for size in sizes if size]
    assert read[:-1] == [PREFILL_CHUNK_TOKENS] * (len(read) - 1)
    assert 0 < read[-1] <= PREFILL_CHUNK_TOKENS


def test_a_reader_that_leaves_while_the_prompt_is_read_ends_the_answer(slow_engine: Engine) -> None:
    expected = plain_text(slow_engine, "hello", max_tokens=4).token_ids
    with slow_engine.session() as session:
        with session.generate("the " * 3000) as generation:
            seen = [next(generation) for _ in range(3)]
        assert [type(event) for event in seen] == [Reading] * 3
        assert session.messages == ()
        assert answer(session.generate("hello", max_tokens=4)).token_ids == expected
