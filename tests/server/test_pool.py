"""Which kept conversation a request continues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from edgespec.engine.engine import Engine
from edgespec.engine.pair.load import Limits
from edgespec.engine.session import Session
from edgespec.errors import ClosedError, MemoryLimitError
from edgespec.interfaces.counted_text import common_prefix
from edgespec.server.pool import LEAST_COPIED, Kept, SessionPool, is_worth, text_of
from edgespec.server.schema import Request
from tests.support.tiny_models import TinyModels, answer


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load(draft="none") as engine:
        yield engine


@pytest.fixture
def pool(engine: Engine) -> Iterator[SessionPool]:
    pool = SessionPool(engine, most_kept=2)
    yield pool
    pool.close()


def kept(pool: SessionPool, owner: str, text: str) -> Kept:
    found = pool.take(owner, text)
    give(pool, found, text)
    return found


def give(pool: SessionPool, taken: Kept, text: str) -> None:
    taken.text = text
    pool.give(taken)


@given(st.text(), st.text(), st.text())
def test_the_common_length_is_that_of_the_longest_shared_beginning(start: str, one: str, other: str) -> None:
    found = common_prefix(start + one, start + other)
    assert found >= len(start)
    assert (start + one)[:found] == (start + other)[:found]
    assert (start + one)[: found + 1] != (start + other)[: found + 1] or found == min(len(one), len(other)) + len(
        start
    )


def test_a_conversation_is_continued_if_most_of_it_is_shared() -> None:
    assert is_worth(10, 10, 20)
    assert is_worth(5, 10, 20)
    assert is_worth(0, 0, 20)
    assert not is_worth(4, 10, 20)
    assert is_worth(4, 10, 4), "the same request again"


def test_a_longer_version_of_a_conversation_gets_its_session(pool: SessionPool) -> None:
    first = kept(pool, "a", "hello, this is long")
    other = kept(pool, "a", "something else entirely")
    assert first is not other
    assert pool.take("a", "hello, this is long and longer") is first
    assert len(pool) == 1
    first.session.close()


SYSTEM = "You are a careful librarian who answers in one short sentence. " * 4


def test_a_request_that_shares_only_a_beginning_gets_a_copy(pool: SessionPool) -> None:
    first = pool.take("a", SYSTEM)
    answer(first.session.generate(SYSTEM, max_tokens=2))
    give(pool, first, SYSTEM + "x" * 2 * len(SYSTEM))
    second = pool.take("a", SYSTEM + "another question")
    assert second.session is not first.session
    assert len(pool) == 1, "the first one stays kept"
    done = answer(second.session.generate(messages=first.session.messages[:1], max_tokens=2))
    assert done.stats.cached_tokens > 0
    other = pool.take("b", SYSTEM + "a third one")
    assert answer(other.session.generate(SYSTEM, max_tokens=2)).stats.cached_tokens == 0
    other.session.close()
    give(pool, second, SYSTEM)


def test_short_beginnings_are_not_copied_nor_caches_that_cannot_be(
    pool: SessionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[object] = []
    monkeypatch.setattr(Session, "branch", lambda own: copies.append(own))
    short = SYSTEM[: LEAST_COPIED - 1]
    kept(pool, "a", short + "x" * 500)
    pool.take("a", short + "y" * 500).session.close()
    kept(pool, "a", SYSTEM + "x" * 500)
    target = pool._engine.pair.target
    cannot = SimpleNamespace(facts=replace(target.facts, can_fork=False), open=target.open)
    monkeypatch.setattr(pool._engine.pair, "target", cannot)
    pool.take("a", SYSTEM + "y" * 500).session.close()
    assert not copies


def test_a_new_session_serves_where_there_is_no_memory_for_a_copy(
    pool: SessionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def branch(_own: Session) -> Session:
        raise MemoryLimitError("full", needed_bytes=1, available_bytes=0)

    first = kept(pool, "a", SYSTEM + "x" * 2 * len(SYSTEM))
    monkeypatch.setattr(Session, "branch", branch)
    second = pool.take("a", SYSTEM + "y")
    assert second.session is not first.session
    assert len(pool) == 1
    second.session.close()


def test_no_session_goes_to_another_owner(pool: SessionPool) -> None:
    first = kept(pool, "a", "hello")
    found = pool.take("b", "hello")
    assert found is not first
    assert found.session is not first.session
    found.session.close()


def test_the_session_that_was_not_used_for_the_longest_time_is_closed(pool: SessionPool) -> None:
    first, second = kept(pool, "a", "first text"), kept(pool, "b", "second text")
    assert kept(pool, "a", "first text") is first
    kept(pool, "c", "third text")
    assert second.session.closed
    assert not first.session.closed
    assert len(pool) == 2


def test_many_conversations_of_one_owner_leave_the_only_one_of_another(engine: Engine) -> None:
    pool = SessionPool(engine, most_kept=3)
    only = kept(pool, "quiet", "q" * 300)
    for number in range(5):
        kept(pool, "busy", str(number) * 300)
    assert pool.take("quiet", "q" * 301).session is only.session
    assert len(pool) == 2
    only.session.close()
    pool.close()


@pytest.fixture
def full(tiny: TinyModels) -> Iterator[Engine]:
    """An engine in whose memory two sessions fit that fill one step each, or one that fills two."""
    settings = {"draft": "none", "lookup": False, "runtime": "native"}
    with tiny.load(**settings) as engine:  # type: ignore[arg-type]
        one = engine.pair.pool.target_memory
    limits = Limits(max_memory_bytes=one.weights_bytes + 2 * one.session_bytes(0))
    with tiny.load(limits=limits, **settings) as engine:  # type: ignore[arg-type]
        yield engine


def test_kept_sessions_are_closed_if_memory_is_short(full: Engine) -> None:
    pool = SessionPool(full, most_kept=8)
    first, second = (kept(pool, owner, f"text {owner}") for owner in "ab")
    third = pool.take("c", "other")
    assert first.session.closed
    assert not second.session.closed, "it was used later"
    answer(third.session.generate("a" * 1200, raw=True, max_tokens=2))  # the only other session makes room
    assert second.session.closed
    assert len(pool) == 0
    with pytest.raises(MemoryLimitError, match="another session needs"):
        pool.take("d", "no session is kept")
    third.session.close()
    fourth, fifth = (pool.take(owner, "text") for owner in "de")
    with pytest.raises(MemoryLimitError, match=r"a conversation of 120\d tokens needs"):
        fourth.session.generate("a" * 1200, raw=True, max_tokens=2)
    assert answer(fourth.session.generate("a", raw=True, max_tokens=2)).text
    for each in (fourth, fifth):
        each.session.close()


def test_a_request_counts_as_a_user_until_it_ends_however_it_ends(pool: SessionPool) -> None:
    def fail() -> None:
        with pool.user():
            assert pool.in_use == 2
            raise KeyError

    with pool.user():
        with pytest.raises(KeyError):
            fail()
        assert pool.in_use == 1
    assert pool.in_use == 0


def test_a_copy_that_fails_keeps_its_source(pool: SessionPool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(pool, "a", SYSTEM + "x" * 2 * len(SYSTEM))

    def branch(_session: Session) -> Session:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(Session, "branch", branch)
    monkeypatch.setattr("edgespec.server.pool.is_worth", lambda *_numbers: False)
    with pytest.raises(RuntimeError):
        pool.take("a", SYSTEM + "another question")
    assert len(pool) == 1


def test_a_closed_pool_closes_what_is_given_back(engine: Engine) -> None:
    pool = SessionPool(engine)
    first, second = kept(pool, "a", "x"), pool.take("b", "y")
    pool.close()
    assert first.session.closed
    give(pool, second, "y")
    assert second.session.closed
    assert len(pool) == 0
    with pytest.raises(ClosedError):
        second.session.generate("x")


def test_texts_of_chats_and_completions_are_never_beginnings_of_one_another() -> None:
    chat = Request(messages=({"role": "user", "content": "x"},))
    assert text_of(chat, "yes").startswith(text_of(chat))
    assert text_of(Request(prompt="x"), "yes").startswith(text_of(Request(model=None, prompt="x")))
    assert common_prefix(text_of(chat), text_of(Request(prompt="user\0x"))) == 0
    thoughtless = Request(messages=chat.messages, template_variables={"enable_thinking": False})
    assert common_prefix(text_of(chat), text_of(thoughtless)) == 0, "other variables give another prompt"


def test_an_answer_that_continues_a_message_is_one_message_with_it() -> None:
    asked = {"role": "user", "content": "x"}
    begun = Request(messages=(asked, {"role": "assistant", "content": "one"}))
    later = Request(messages=(asked, {"role": "assistant", "content": "one two"}, asked))
    assert text_of(begun, " two").startswith(text_of(begun))
    assert text_of(later).startswith(text_of(begun, " two"))
