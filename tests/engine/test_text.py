"""Stop strings and characters that span several tokens."""

from __future__ import annotations

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Text
from edgespec.engine.session import Session
from tests.engine.answers import plain_text, whole_characters
from tests.support.tiny_models import answer, read_all, shown


@pytest.mark.parametrize("depth", [0, 5])
def test_stop_strings_that_span_tokens_end_the_answer(engine: Engine, depth: int) -> None:
    full = plain_text(engine, "hello world", max_tokens=60)
    with engine.session() as session:
        for start in range(8, 48, 3):
            for length in (1, 2, 5, 9):
                stop = full.text[start : start + length]
                if not stop.strip() or "\ufffd" in stop:
                    continue
                session.clear()
                events, done = read_all(session.generate("hello world", max_tokens=60, depth=depth, stop=[stop]))
                assert done.text == full.text[: full.text.index(stop)]
                assert shown(events) == done.text
                assert (done.finish_reason, done.stop_text) == ("stop", stop)
                assert full.token_ids[: len(done.token_ids)] == done.token_ids
                # The answer ended with the token that completed the stop string.
                tokenizer = engine.tokenizer
                assert stop in tokenizer.detokenize(done.token_ids)
                assert stop not in tokenizer.detokenize(done.token_ids[:-1])


def test_text_held_back_for_a_stop_string_is_shown_at_the_end(engine: Engine, session: Session) -> None:
    full = plain_text(engine, "hello world", max_tokens=40)
    almost = full.text[-4:] + "\0never"
    _, done = read_all(session.generate("hello world", max_tokens=40, stop=[almost, "\0"]))
    assert done.text == full.text
    assert done.token_ids == full.token_ids
    assert (done.finish_reason, done.stop_text) == ("length", None)


@pytest.mark.parametrize("depth", [0, 5])
def test_the_turn_after_a_stop_string_equals_that_of_a_fresh_session(engine: Engine, depth: int) -> None:
    full = plain_text(engine, "hello world", max_tokens=60)
    for start in (15, 22, 29):
        with engine.session() as session:
            answer(session.generate("hello world", max_tokens=60, depth=depth, stop=[full.text[start : start + 4]]))
            prompt = engine.pair.prompts.read([*session.messages, {"role": "user", "content": "continue"}])
            following = answer(session.generate("continue", max_tokens=40, depth=depth))
        with engine.session() as fresh:
            expected = answer(fresh.generate(prompt, max_tokens=40, depth=0, raw=True))
        assert following.stats.prompt_tokens == expected.stats.prompt_tokens
        assert following.token_ids == expected.token_ids


def test_characters_that_span_tokens_are_shown_complete(engine: Engine, session: Session) -> None:
    """At this temperature byte tokens are as likely as words, so characters arrive in parts or broken."""
    split = 0
    for seed in range(6):
        session.clear()
        sampling = Sampling(temperature=100.0, seed=seed)
        events, done = read_all(session.generate("hello", max_tokens=250, sampling=sampling))
        pieces = b"".join(engine.tokenizer.token_bytes(token) for token in done.token_ids)
        assert done.text == (
            pieces.decode("utf-8", "replace") if done.finish_reason == "stop" else whole_characters(pieces)
        )
        assert shown(events) == done.text
        split += sum(isinstance(event, Text) and len(event.tokens) > 1 for event in events)
    assert split > 20
