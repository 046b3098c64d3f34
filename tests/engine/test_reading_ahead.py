"""Between answers the drafter reads the rest of the conversation, with the tiny pair."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from edgespec.drafters.model import ModelDraftState
from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.reasons import Reason
from tests.engine.answers import plain_text
from tests.support.tiny_models import answer

WAIT_S = 60.0
PROMPT = "one two three four five six seven eight nine ten eleven twelve"


def drafter(session: Session) -> ModelDraftState:
    (state,) = [state for _, state in session._drafts._parts if isinstance(state, ModelDraftState)]
    return state


def lag(session: Session) -> int:
    context = Context(list(session._conversation.history))
    return drafter(session).lag(context) + drafter(session).unread(context)


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_S
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


@pytest.fixture
def undrafted(engine: Engine, session: Session) -> Session:
    """A session after an answer that the drafter has not read."""
    engine.load_drafter()
    answer(session.generate(PROMPT, max_tokens=8, depth=0))
    assert lag(session) > 8
    return session


def test_after_an_answer_the_idle_drafter_reads_the_conversation(engine: Engine, undrafted: Session) -> None:
    assert undrafted.read_ahead() == [], "depth 0 was requested: reading would be useless"
    answer(undrafted.generate(PROMPT, max_tokens=8, depth=2))
    undrafted._drafts.depth = _Allowing(undrafted._drafts.depth)  # type: ignore[assignment]
    undrafted._conversation.history += [5] * 40
    engine.pair.read_ahead.when_idle(undrafted)
    assert eventually(lambda: lag(undrafted) == 0)


def test_reading_ahead_keeps_the_text_of_plain_decoding(engine: Engine, session: Session) -> None:
    first = answer(session.generate(PROMPT, max_tokens=8, depth=2))
    for reading in session.read_ahead():
        reading.result(WAIT_S)
    session.clear()
    again = answer(session.generate(PROMPT, max_tokens=8, depth=2))
    assert again.token_ids == first.token_ids == plain_text(engine, PROMPT, max_tokens=8).token_ids


def test_a_session_reads_nothing_ahead_during_an_answer_or_after_close(engine: Engine) -> None:
    with engine.session() as session:
        with session.generate(PROMPT, max_tokens=8, depth=2) as generation:
            next(iter(generation))
            assert session.read_ahead() == []
        session.stop_reading()
    assert session.read_ahead() == []


def test_an_answer_stops_reading_ahead(undrafted: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    monkeypatch.setattr(ModelDraftState, "stop_reading", lambda own: stopped.set())
    answer(undrafted.generate(PROMPT, max_tokens=2, depth=0))
    assert stopped.is_set()


class _Allowing:
    """A policy of an answer that was too short."""

    def __init__(self, own: object) -> None:
        self._own = own

    def why_off(self, source: str) -> Reason:
        return Reason("answer_too_short", "too short")

    def __getattr__(self, name: str) -> object:
        return getattr(self._own, name)
