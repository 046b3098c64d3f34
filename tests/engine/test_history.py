"""A session's history: cached tokens, messages, dropped turns, and refused prompts."""

from __future__ import annotations

import re

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.events import Notice
from edgespec.engine.session import Session
from edgespec.errors import (
    InvalidRequestError,
    PromptTooLongError,
)
from edgespec.text.conversation.answer_parts import Said
from edgespec.text.conversation.conversation import Conversation, PromptFormat
from tests.engine.answers import Forward
from tests.support.tiny_models import TinyModels, answer, read_all, require_speculation


def test_a_second_turn_reads_only_its_new_tokens(engine: Engine, session: Session, forwards: list[Forward]) -> None:
    require_speculation(engine, 4)
    first = answer(session.generate("hello world " * 20, max_tokens=60, depth=4))
    assert first.stats.cached_tokens == 0
    before = first.stats.prompt_tokens + len(first.token_ids)
    target = forwards[0].sequence
    forwards.clear()
    second = answer(session.generate("and now", max_tokens=60, depth=4))
    # The answer's last token was never read: it counts as new.
    assert second.stats.cached_tokens in (before - 1, before)
    new = second.stats.prompt_tokens - second.stats.cached_tokens
    assert 0 < new < 30
    targets = [forward for forward in forwards if forward.sequence is target]
    assert [(each.tokens, each.rows) for each in targets[:2]] == [(new - 1, 0), (1, 1)]
    assert max(each.tokens for each in targets[2:]) <= 5
    drafters = [forward for forward in forwards if forward.sequence is not target]
    assert drafters, "the drafter never ran"
    assert max(each.tokens for each in drafters) <= new + 6


def test_after_clear_the_same_prompt_gives_the_same_tokens(session: Session) -> None:
    for prompt in ("hello world", "x", "hello there " * 30):
        first = answer(session.generate(prompt, max_tokens=40, depth=3))
        session.clear()
        second = answer(session.generate(prompt, max_tokens=40, depth=3))
        session.clear()
        assert first.token_ids == second.token_ids
        assert second.stats.cached_tokens == second.stats.prompt_tokens - 1


def test_session_messages_hold_system_prompts_and_answers(engine: Engine) -> None:
    with engine.session(system="be kind") as session:
        system = {"role": "system", "content": "be kind"}
        assert session.messages == (system,)
        done = answer(session.generate("hello", max_tokens=5))
        turn = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": done.text})
        assert session.messages == (system, *turn)
        answer(session.generate("raw text", max_tokens=5, raw=True))
        assert session.messages == (system, *turn)
        session.messages[1]["content"] = "changed"
        assert session.messages == (system, *turn)
        session.clear()
        assert session.messages == (system,)


def test_raw_text_between_turns_does_not_change_the_conversation(engine: Engine) -> None:
    with engine.session() as session, engine.session() as undisturbed:
        for each in (session, undisturbed):
            answer(each.generate("hello", max_tokens=20))
        answer(session.generate("something else entirely", max_tokens=20, raw=True))
        expected = answer(undisturbed.generate("continue", max_tokens=30))
        assert answer(session.generate("continue", max_tokens=30)).token_ids == expected.token_ids


def test_an_answer_created_early_and_started_later_is_correct(engine: Engine) -> None:
    """The cache is compared when the answer starts, not when ``generate`` is called."""
    with engine.session() as session:
        answer(session.generate("hello there my people", max_tokens=30))
        late = session.generate("late", max_tokens=30)
        answer(session.generate("first water then words " * 20, max_tokens=30, raw=True))
        tokens = answer(late).token_ids
    with engine.session() as undisturbed:
        answer(undisturbed.generate("hello there my people", max_tokens=30))
        assert answer(undisturbed.generate("late", max_tokens=30)).token_ids == tokens


def test_a_full_context_drops_its_oldest_turns_as_a_whole(tiny: TinyModels) -> None:
    with tiny.load_speculating(context=256) as engine, engine.session(system="be brief") as session:
        notices: list[str] = []
        for turn in range(8):
            events, done = read_all(session.generate(f"question {turn} of many words", max_tokens=30))
            told = [event.text for event in events if isinstance(event, Notice)]
            assert told == [] or isinstance(events[0], Notice)
            notices += told
            assert done.stats.prompt_tokens + len(done.token_ids) <= 256
            roles = [message["role"] for message in session.messages]
            assert roles == ["system", *["user", "assistant"] * ((len(roles) - 1) // 2)]
            assert session.messages[-2]["content"] == f"question {turn} of many words"
            assert session.messages[-1]["content"] == done.text
        assert notices
        outgrew = r"the conversation outgrew the context: the oldest (turn was|\d turns were) dropped \(%s\)"
        assert all(re.fullmatch(outgrew % "--context 512 keeps more", notice) for notice in notices)
        assert "question 0 of many words" not in [message["content"] for message in session.messages]
        # The remaining conversation answers like a fresh session without the dropped turns.
        prompt = engine.pair.prompts.read([*session.messages, {"role": "user", "content": "end"}])
        short = engine.pair.prompts.encode(prompt)
        if len(short) + 20 <= 256:
            expected = answer(session.generate("end", max_tokens=20)).token_ids
            with engine.session() as fresh:
                assert answer(fresh.generate(prompt, max_tokens=20, raw=True)).token_ids == expected


@pytest.mark.parametrize(
    ("longest", "more"),
    [
        (300, "--context 300 keeps more"),
        (256, "this model's context is not larger"),
        (None, "--context 512 keeps more"),
    ],
)
def test_the_notice_of_dropped_turns_names_a_larger_context_if_possible(
    engine: Engine, longest: int | None, more: str
) -> None:
    own = engine.pair.prompts
    template = engine.pair.target.header.chat_template
    conversation = Conversation(PromptFormat("tiny", own.tokenizer, template, longest), None)
    notice = None
    for turn in range(9):
        begun = conversation.turn(f"question {turn} of many words", 30, 256, raw=False)
        conversation.begin(begun, list(begun.tokens))
        conversation.end(begun, Said("word " * 5, "word " * 5), [])
        notice = notice or begun.notice
    assert notice is not None
    assert notice.endswith(f" dropped ({more})")


def test_an_answer_ends_when_the_context_is_full(tiny: TinyModels) -> None:
    with tiny.load_speculating(context=128) as engine:
        lengths = set()
        for depth in (0, 3, None):
            with engine.session() as session:
                done = answer(session.generate("hello", depth=depth))
                assert done.finish_reason == "length"
                lengths.add((done.stats.prompt_tokens + len(done.token_ids), done.token_ids))
        assert len(lengths) == 1
        assert 127 <= next(iter(lengths))[0] <= 129


@pytest.mark.parametrize("raw", [False, True])
def test_a_prompt_that_is_too_long_is_refused_and_the_session_stays_usable(tiny: TinyModels, raw: bool) -> None:
    with tiny.load_speculating(context=256) as engine, engine.session() as session:
        answer(session.generate("hello", max_tokens=20))
        answer(session.generate("again", max_tokens=20))
        before = session.messages
        with pytest.raises(PromptTooLongError, match=r"exceeds the available context size of 256 tokens") as caught:
            session.generate("water " * 400, raw=raw)
        assert caught.value.hint is not None
        assert session.messages == before
        assert answer(session.generate("continue", max_tokens=20)).stats.cached_tokens > 0


@pytest.mark.parametrize("prompt", ["", "   ", "\n"])
def test_an_empty_prompt_is_refused(session: Session, prompt: str) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        session.generate(prompt)
    assert answer(session.generate("hello", max_tokens=2)).text


@pytest.mark.parametrize("settings", [{"max_tokens": -1}, {"depth": -1}, {"stop": [""]}, {"stop": "text"}])
def test_invalid_settings_are_refused_by_generate_itself(session: Session, settings: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        session.generate("hello", **settings)  # type: ignore[arg-type]
    assert answer(session.generate("hello", max_tokens=2)).text


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("depth", [0, 5])
def test_an_answer_has_exactly_max_tokens(session: Session, count: int, depth: int) -> None:
    done = answer(session.generate("hello", max_tokens=count, depth=depth))
    assert len(done.token_ids) == count
    assert done.finish_reason == "length"
