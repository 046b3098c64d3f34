"""A session: events, equality of every depth, caches, stops, cancelling, leaving early, threads, asyncio."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine import Engine
from edgespec.errors import (
    ClosedError,
    ForwardError,
    InvalidRequestError,
    PromptTooLongError,
    RewindError,
    TemplateError,
)
from edgespec.events import Done, Notice, Round, Text
from edgespec.runtimes.llama import LlamaSequence
from edgespec.session import Session
from tests.support.command_line import run_python
from tests.support.tiny_models import TinyModels, answer, read_all, require_speculation, shown

SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=11)
# Long enough that a test stuck behind an answer would notice, short of the suite's own limit.
WAIT_S = 20.0


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    """The pair, with the model drafter alone."""
    with tiny.load(lookup=False) as engine:
        yield engine


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with engine.session() as session:
        yield session


@pytest.fixture(scope="module")
def slow_engine(tiny: TinyModels) -> Iterator[Engine]:
    """A prompt of a few thousand tokens takes this target seconds."""
    with tiny.load(tiny.slow, draft="none", lookup=False, context=8192) as engine:
        yield engine


@dataclass(frozen=True)
class Forward:
    sequence: LlamaSequence
    tokens: int
    rows: int


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[Forward]:
    """Every forward of every sequence, as it is asked for."""
    seen: list[Forward] = []
    real = LlamaSequence.forward

    def forward(self: LlamaSequence, tokens: list[int], rows: int) -> object:
        seen.append(Forward(self, len(tokens), rows))
        return real(self, tokens, rows)

    monkeypatch.setattr(LlamaSequence, "forward", forward)
    return seen


def plain_text(engine: Engine, prompt: str, **settings: object) -> Done:
    """What a fresh session answers without speculation."""
    with engine.session() as fresh:
        return answer(fresh.generate(prompt, depth=0, **settings))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- events


@pytest.mark.parametrize("depth", [0, 4, None])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_events_tell_the_whole_answer(session: Session, depth: int | None, sampling: Sampling) -> None:
    events, done = read_all(session.generate("hello world", max_tokens=80, depth=depth, sampling=sampling))
    assert [event for event in events if isinstance(event, Done)] == [done]
    texts = [event for event in events if isinstance(event, Text)]
    rounds = [event.record for event in events if isinstance(event, Round)]
    assert len(texts) + len(rounds) + 1 == len(events)
    assert isinstance(events[0], Text)  # the token of the prefill, which belongs to no round
    assert shown(events) == done.text
    assert tuple(token for event in texts for token in event.token_ids) == done.token_ids
    assert done.finish_reason == "length"
    assert done.stats.emitted_tokens == len(done.token_ids) == 80
    assert 1 + sum(record.emitted for record in rounds) == 80
    assert done.stats.rounds == len(rounds)
    assert done.stats.accepted == sum(record.accepted for record in rounds)
    assert all(record.accepted <= record.evaluated <= record.proposed == record.width - 1 for record in rounds)
    assert done.stats.ttft_s is not None
    assert done.stats.ttft_s > 0
    # Each round is told before its text, and the context grows by what each round emitted.
    contexts = [record.context_length for record in rounds]
    prompt = done.stats.prompt_tokens
    grown = [prompt + 1 + sum(record.emitted for record in rounds[:count]) for count in range(len(rounds))]
    assert contexts == grown


def test_after_the_end_there_is_nothing(session: Session) -> None:
    generation = session.generate("hello", max_tokens=3)
    answer(generation)
    assert list(generation) == []
    generation.close()
    generation.close()
    assert list(generation) == []


def test_nothing_is_decoded_before_the_first_event_is_asked_for(session: Session, forwards: list[Forward]) -> None:
    generation = session.generate("hello", max_tokens=3)
    assert forwards == []
    assert session.messages == ()
    answer(generation)
    assert forwards


def test_an_end_of_sequence_counts_and_is_not_shown(tiny: TinyModels) -> None:
    with tiny.load(tiny.ending, draft="none") as engine, engine.session() as session:
        for prompt in ("hello", "what is it", "two words", "water"):
            done = answer(session.generate(prompt, sampling=Sampling(temperature=1.0, seed=2), max_tokens=1500))
            if done.finish_reason == "stop":
                break
            session.clear()
        assert done.finish_reason == "stop"
        assert done.token_ids[-1] in engine.tokenizer.stop_ids
        assert done.text == engine.tokenizer.detokenize(done.token_ids[:-1])
        assert "<|im_end|>" not in done.text
        # The template writes the end of the turn; the cache must not hold it twice.
        following = answer(session.generate("and then", max_tokens=10))
        assert following.stats.cached_tokens == done.stats.prompt_tokens + len(done.token_ids) - 1


# ----------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, Sampling(temperature=1.5, top_k=40, seed=5)])
def test_every_depth_writes_the_same_conversation(engine: Engine, sampling: Sampling) -> None:
    require_speculation(engine)

    def talk(depth: int | None) -> list[tuple[int, ...]]:
        with engine.session(system="be brief") as session:
            return [
                answer(session.generate(prompt, max_tokens=60, depth=depth, sampling=sampling)).token_ids
                for prompt in ("hello world", "what is water", "你好 🙂")
            ]

    expected = talk(0)
    for depth in (1, 2, 5, engine.plan.depth_cap, 99, None):
        assert talk(depth) == expected, depth


def test_the_comparison_above_is_not_empty(engine: Engine, session: Session) -> None:
    """Drafts are really proposed, some accepted and some rejected."""
    require_speculation(engine, 4)
    done = answer(session.generate("hello world", max_tokens=300, depth=4, sampling=SAMPLED))
    assert 0 < done.stats.accepted < done.stats.evaluated
    assert done.stats.rounds < 299
    assert done.stats.rounds_by_source.keys() == {"model"}


def test_lookup_and_model_together_write_the_same(tiny: TinyModels) -> None:
    prompt = "the people use water and the people use words and the people"
    with tiny.load() as engine:
        require_speculation(engine)
        expected = plain_text(engine, prompt, max_tokens=150).token_ids
        for depth in (3, None):
            with engine.session() as session:
                assert answer(session.generate(prompt, max_tokens=150, depth=depth)).token_ids == expected


def test_the_rejection_rule_gives_as_many_tokens_and_repeats_itself(engine: Engine) -> None:
    sampling = Sampling(temperature=0.8, seed=4, rule="rejection")
    answers = []
    for _ in range(2):
        with engine.session() as session:
            answers.append(answer(session.generate("hello", max_tokens=60, depth=4, sampling=sampling)))
    assert len(answers[0].token_ids) == 60
    assert answers[0].token_ids == answers[1].token_ids


def test_seeds_matter_and_are_kept(engine: Engine) -> None:
    texts = [
        plain_text(engine, "hi", max_tokens=30, sampling=Sampling(temperature=1, seed=s)).text for s in (1, 2, 1)
    ]
    assert texts[0] == texts[2] != texts[1]


def test_sampling_of_one_answer_does_not_leak_into_the_next(session: Session) -> None:
    greedy = answer(session.generate("hello", max_tokens=20)).token_ids
    session.clear()
    answer(session.generate("hello", max_tokens=20, sampling=Sampling(temperature=2.0, seed=3)))
    session.clear()
    assert answer(session.generate("hello", max_tokens=20)).token_ids == greedy


# ----------------------------------------------------------------------------------------- cache, history


def test_a_second_turn_feeds_only_what_is_new(engine: Engine, session: Session, forwards: list[Forward]) -> None:
    require_speculation(engine, 4)
    first = answer(session.generate("hello world " * 20, max_tokens=60, depth=4))
    assert first.stats.cached_tokens == 0
    before = first.stats.prompt_tokens + len(first.token_ids)
    target = forwards[0].sequence
    forwards.clear()
    second = answer(session.generate("and now", max_tokens=60, depth=4))
    # The answer's last token was never fed: it is new as well.
    assert second.stats.cached_tokens in (before - 1, before)
    new = second.stats.prompt_tokens - second.stats.cached_tokens
    assert 0 < new < 30
    targets = [forward for forward in forwards if forward.sequence is target]
    assert [(each.tokens, each.rows) for each in targets[:2]] == [(new - 1, 0), (1, 1)]
    assert max(each.tokens for each in targets[2:]) <= 5
    drafters = [forward for forward in forwards if forward.sequence is not target]
    assert drafters, "the drafter was never asked"
    assert max(each.tokens for each in drafters) <= new + 6


def test_the_same_prompt_after_clear_gives_the_same_tokens(session: Session) -> None:
    for prompt in ("hello world", "x", "hello there " * 30):
        first = answer(session.generate(prompt, max_tokens=40, depth=3))
        session.clear()
        second = answer(session.generate(prompt, max_tokens=40, depth=3))
        session.clear()
        assert first.token_ids == second.token_ids
        assert second.stats.cached_tokens == second.stats.prompt_tokens - 1


def test_messages_are_the_conversation(engine: Engine) -> None:
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


def test_raw_text_in_between_does_not_disturb_the_conversation(engine: Engine) -> None:
    with engine.session() as session, engine.session() as undisturbed:
        for each in (session, undisturbed):
            answer(each.generate("hello", max_tokens=20))
        answer(session.generate("something else entirely", max_tokens=20, raw=True))
        expected = answer(undisturbed.generate("go on", max_tokens=30))
        assert answer(session.generate("go on", max_tokens=30)).token_ids == expected.token_ids


def test_an_answer_prepared_early_and_started_late_is_still_right(engine: Engine) -> None:
    """What the cache holds is looked at when the answer starts, not when it was asked for."""
    with engine.session() as session:
        answer(session.generate("hello there my people", max_tokens=30))
        expected_prompt = engine.render([*session.messages, {"role": "user", "content": "late"}])
        late = session.generate("late", max_tokens=30)
        answer(session.generate("first water then words " * 20, max_tokens=30, raw=True))
        tokens = answer(late).token_ids
    with engine.session() as fresh:
        assert answer(fresh.generate(expected_prompt, max_tokens=30, raw=True)).token_ids == tokens


def test_a_context_that_overflows_loses_its_oldest_turns_whole(tiny: TinyModels) -> None:
    with tiny.load(context=256) as engine, engine.session(system="be brief") as session:
        notices: list[str] = []
        for turn in range(8):
            events, done = read_all(session.generate(f"question {turn} of many words", max_tokens=30))
            told = [event.message for event in events if isinstance(event, Notice)]
            assert told == [] or isinstance(events[0], Notice)
            notices += told
            assert done.stats.prompt_tokens + len(done.token_ids) <= 256
            roles = [message["role"] for message in session.messages]
            assert roles == ["system", *["user", "assistant"] * ((len(roles) - 1) // 2)]
            assert session.messages[-2]["content"] == f"question {turn} of many words"
            assert session.messages[-1]["content"] == done.text
        assert notices
        assert all("dropped" in notice and "oldest" in notice for notice in notices)
        assert "question 0 of many words" not in [message["content"] for message in session.messages]
        # What is left answers like a fresh session that was never told the rest.
        prompt = engine.render([*session.messages, {"role": "user", "content": "end"}])
        short = engine.encode_prompt(prompt)
        if len(short) + 20 <= 256:
            expected = answer(session.generate("end", max_tokens=20)).token_ids
            with engine.session() as fresh:
                assert answer(fresh.generate(prompt, max_tokens=20, raw=True)).token_ids == expected


def test_the_context_ends_the_answer_when_it_is_full(tiny: TinyModels) -> None:
    with tiny.load(context=128) as engine:
        lengths = set()
        for depth in (0, 3, None):
            with engine.session() as session:
                done = answer(session.generate("hello", depth=depth))
                assert done.finish_reason == "length"
                lengths.add((done.stats.prompt_tokens + len(done.token_ids), done.token_ids))
        assert len(lengths) == 1
        assert 127 <= next(iter(lengths))[0] <= 129


@pytest.mark.parametrize("raw", [False, True])
def test_a_prompt_that_is_too_long_costs_nothing(tiny: TinyModels, raw: bool) -> None:
    with tiny.load(context=256) as engine, engine.session() as session:
        answer(session.generate("hello", max_tokens=20))
        answer(session.generate("again", max_tokens=20))
        before = session.messages
        with pytest.raises(PromptTooLongError, match=r"tokens and the context holds 256") as caught:
            session.generate("water " * 400, raw=raw)
        assert caught.value.hint is not None
        assert session.messages == before
        assert answer(session.generate("go on", max_tokens=20)).stats.cached_tokens > 0


@pytest.mark.parametrize("prompt", ["", "   ", "\n"])
def test_an_empty_prompt_is_refused(session: Session, prompt: str) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        session.generate(prompt)
    assert answer(session.generate("hello", max_tokens=2)).text


@pytest.mark.parametrize(
    "settings", [{"max_tokens": 0}, {"max_tokens": -1}, {"depth": -1}, {"stop": [""]}, {"stop": "text"}]
)
def test_impossible_settings_are_refused_at_once(session: Session, settings: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        session.generate("hello", **settings)  # type: ignore[arg-type]
    assert answer(session.generate("hello", max_tokens=2)).text


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("depth", [0, 5])
def test_max_tokens_is_exact(session: Session, count: int, depth: int) -> None:
    done = answer(session.generate("hello", max_tokens=count, depth=depth))
    assert len(done.token_ids) == count
    assert done.finish_reason == "length"


# ------------------------------------------------------------------------------------------ stops and text


@pytest.mark.parametrize("depth", [0, 5])
def test_stop_strings_across_any_border(engine: Engine, depth: int) -> None:
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
                assert done.finish_reason == "stop"
                assert full.token_ids[: len(done.token_ids)] == done.token_ids
                # It ended with the token that completed the stop string, not later.
                tokenizer = engine.tokenizer
                assert stop in tokenizer.detokenize(done.token_ids)
                assert stop not in tokenizer.detokenize(done.token_ids[:-1])


def test_a_stop_string_that_never_comes_holds_nothing_back_at_the_end(engine: Engine, session: Session) -> None:
    full = plain_text(engine, "hello world", max_tokens=40)
    almost = full.text[-4:] + "\0never"
    _, done = read_all(session.generate("hello world", max_tokens=40, stop=[almost, "\0"]))
    assert done.text == full.text
    assert done.token_ids == full.token_ids
    assert done.finish_reason == "length"


@pytest.mark.parametrize("depth", [0, 5])
def test_the_turn_after_a_stop_string_is_that_of_a_fresh_session(engine: Engine, depth: int) -> None:
    full = plain_text(engine, "hello world", max_tokens=60)
    for start in (15, 22, 29):
        with engine.session() as session:
            answer(session.generate("hello world", max_tokens=60, depth=depth, stop=[full.text[start : start + 4]]))
            prompt = engine.render([*session.messages, {"role": "user", "content": "go on"}])
            following = answer(session.generate("go on", max_tokens=40, depth=depth))
        with engine.session() as fresh:
            expected = answer(fresh.generate(prompt, max_tokens=40, depth=0, raw=True))
        assert following.stats.prompt_tokens == expected.stats.prompt_tokens
        assert following.token_ids == expected.token_ids


def test_characters_split_over_tokens_are_shown_whole(engine: Engine, session: Session) -> None:
    """At this temperature every byte token is as likely as any word, so characters come in pieces and broken."""
    split = 0
    for seed in range(6):
        session.clear()
        sampling = Sampling(temperature=100.0, seed=seed)
        events, done = read_all(session.generate("hello", max_tokens=250, sampling=sampling))
        pieces = b"".join(engine.tokenizer.token_bytes(token) for token in done.token_ids)
        assert done.text == pieces.decode("utf-8", "replace")
        assert shown(events) == done.text
        split += sum(isinstance(event, Text) and len(event.token_ids) > 1 for event in events)
    assert split > 20


# ------------------------------------------------------------------------------------------------ cancel


def run_and_cancel(session: Session, prompt: str, when: threading.Event, delay_s: float = 0.0) -> tuple[Done, float]:
    """The end of an answer that another thread cancels after ``when``, and how long that end took to come."""
    cancelled_at = [0.0]

    def cancel() -> None:
        assert when.wait(WAIT_S)
        time.sleep(delay_s)
        cancelled_at[0] = time.perf_counter()
        session.cancel()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    done = None
    for event in session.generate(prompt):
        if isinstance(event, Text):
            when.set()
        if isinstance(event, Done):
            done = event
    ended_at = time.perf_counter()
    canceller.join()
    assert done is not None
    return done, ended_at - cancelled_at[0]


def test_cancel_during_the_prefill(slow_engine: Engine) -> None:
    expected = plain_text(slow_engine, "hello", max_tokens=8).token_ids
    with slow_engine.session() as session:
        now = threading.Event()
        now.set()
        done, took_s = run_and_cancel(session, "the " * 6000, now, delay_s=0.3)
        assert (done.finish_reason, done.text, done.token_ids) == ("cancelled", "", ())
        assert done.stats.ttft_s is None
        assert took_s < 2.0  # the prefill as a whole takes several times that
        assert session.messages == ()  # a turn without an answer is none
        assert answer(session.generate("hello", max_tokens=8)).token_ids == expected


def test_cancel_while_decoding(slow_engine: Engine) -> None:
    with slow_engine.session() as session:
        done, took_s = run_and_cancel(session, "hello", threading.Event())
        assert done.finish_reason == "cancelled"
        assert 0 < len(done.token_ids) < 4000
        assert took_s < 2.0
        assert session.messages[-1] == {"role": "assistant", "content": done.text}
        prompt = slow_engine.render([*session.messages, {"role": "user", "content": "go on"}])
        tokens = answer(session.generate("go on", max_tokens=8)).token_ids
    assert plain_text(slow_engine, prompt, max_tokens=8, raw=True).token_ids == tokens


def test_cancel_of_a_drafting_session(engine: Engine) -> None:
    with engine.session() as session:
        generation = session.generate("hello", depth=5)
        read = [next(generation) for _ in range(5)]
        session.cancel()  # the worker has paused: it is far ahead of this reader
        rest, done = read_all(generation)
        assert done.finish_reason == "cancelled"
        assert shown([*read, *rest]) == done.text
        assert plain_text(engine, "hello", max_tokens=len(done.token_ids)).token_ids == done.token_ids
        prompt = engine.render([*session.messages, {"role": "user", "content": "go on"}])
        tokens = answer(session.generate("go on", max_tokens=30, depth=5)).token_ids
    assert plain_text(engine, prompt, max_tokens=30, raw=True).token_ids == tokens


def test_cancel_with_nothing_to_cancel(engine: Engine, session: Session) -> None:
    expected = plain_text(engine, "hello", max_tokens=20).token_ids
    session.cancel()
    generation = session.generate("hello", max_tokens=20)
    session.cancel()  # not started yet
    assert answer(generation).token_ids == expected
    session.cancel()
    session.clear()
    done = answer(session.generate("hello", max_tokens=20))
    assert (done.token_ids, done.finish_reason) == (expected, "length")


def test_cancel_between_the_last_token_and_done(engine: Engine, session: Session) -> None:
    """Everything was decoded but not read: the answer is whole, and the next one is not touched."""
    generation = session.generate("hello", max_tokens=20)
    next(generation)
    time.sleep(0.2)
    session.cancel()
    done = answer(generation)
    assert len(done.token_ids) == 20
    session.clear()
    assert answer(session.generate("hello", max_tokens=20)).token_ids == done.token_ids


def test_cancel_from_many_threads_at_random_moments(engine: Engine) -> None:
    expected = plain_text(engine, "hello world", max_tokens=200).token_ids
    with engine.session() as session:
        stop = threading.Event()

        def pester(pause_s: float) -> None:
            while not stop.is_set():
                time.sleep(pause_s)
                session.cancel()

        threads = [threading.Thread(target=pester, args=(pause,)) for pause in (0.003, 0.007)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(60):
                done = answer(session.generate("hello world", max_tokens=200, depth=3))
                assert done.token_ids == expected[: len(done.token_ids)]
                assert done.finish_reason == ("length" if len(done.token_ids) == 200 else "cancelled")
                session.clear()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert answer(session.generate("hello world", max_tokens=200)).token_ids == expected


# ------------------------------------------------------------------------------------------- leaving early


class CallerError(Exception):
    pass


def leave_by_break(session: Session, count: int) -> str:
    text = ""
    for event in session.generate("hello world", depth=3):
        if isinstance(event, Text):
            text += event.text
            count -= 1
        if not count:
            break
    return text


def leave_by_close(session: Session, count: int) -> str:
    text = ""
    with session.generate("hello world", depth=3) as generation:
        while count:
            event = next(generation)
            if isinstance(event, Text):
                text += event.text
                count -= 1
    assert list(generation) == []
    return text


def leave_by_forgetting(session: Session, count: int) -> str:
    generation = session.generate("hello world", depth=3)
    cycle = [generation]
    cycle.append(cycle)  # type: ignore[arg-type]
    text = ""
    while count:
        event = next(generation)
        if isinstance(event, Text):
            text += event.text
            count -= 1
    del generation, cycle
    gc.collect()
    return text


def leave_by_exception(session: Session, count: int) -> str:
    text = ""
    try:
        with session.generate("hello world", depth=3) as generation:
            for event in generation:
                if isinstance(event, Text):
                    text += event.text
                    count -= 1
                if not count:
                    raise CallerError
    except CallerError:
        pass
    return text


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_close, leave_by_forgetting, leave_by_exception])
@pytest.mark.parametrize("count", [1, 4, 40])
@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_what_was_read_before_leaving_is_the_answer(
    engine: Engine, leave: object, count: int, pause_s: float
) -> None:
    with engine.session() as session:
        text = leave(session, count)  # type: ignore[operator]
        time.sleep(pause_s)
        prompt = engine.render(
            [
                {"role": "user", "content": "hello world"},
                {"role": "assistant", "content": text},
                {"role": "user", "content": "go on"},
            ]
        )
        done = answer(session.generate("go on", max_tokens=25, depth=3))
        assert session.messages[:2] == (
            {"role": "user", "content": "hello world"},
            {"role": "assistant", "content": text},
        )
    assert len(session.messages) == 4
    expected = plain_text(engine, prompt, max_tokens=25, raw=True)
    assert done.token_ids == expected.token_ids


def test_a_generation_that_was_never_started_leaves_nothing(session: Session) -> None:
    with session.generate("hello"):
        pass
    session.generate("hello").close()
    del_me = session.generate("hello")
    del del_me
    assert session.messages == ()
    assert answer(session.generate("hello", max_tokens=3)).text


def test_an_exception_in_the_loop_without_a_with_block(session: Session) -> None:
    """The traceback keeps the generation alive; closing it frees the session."""
    generation = session.generate("hello")

    def fail() -> None:
        for _ in generation:
            raise CallerError

    with pytest.raises(CallerError):
        fail()
    with pytest.raises(InvalidRequestError, match="already generating"):
        session.generate("more")
    generation.close()
    assert answer(session.generate("more", max_tokens=3)).text


def test_one_answer_at_a_time(session: Session) -> None:
    generation = session.generate("hello")
    next(generation)
    for use in (lambda: session.generate("more"), session.clear):
        with pytest.raises(InvalidRequestError, match="already generating") as caught:
            use()
        assert caught.value.hint
    early = session.generate  # a second one that was created in time is refused when it starts
    generation.close()
    first, second = early("one", max_tokens=300), early("two", max_tokens=300)
    next(first)
    with pytest.raises(InvalidRequestError, match="already generating"):
        next(second)
    assert answer(first).finish_reason == "length"
    assert answer(second).finish_reason == "length"


def test_a_failing_forward_reaches_the_reader_and_the_session_goes_on(
    engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain_text(engine, "hello", max_tokens=30).token_ids
    real, calls = LlamaSequence.forward, [0]

    def forward(self: LlamaSequence, tokens: list[int], rows: int) -> object:
        calls[0] += 1
        if calls[0] == 12:
            raise ForwardError("the device went away", code=-3)
        return real(self, tokens, rows)

    monkeypatch.setattr(LlamaSequence, "forward", forward)
    read: list[int] = []

    def follow() -> None:
        for event in session.generate("hello", max_tokens=30, depth=0):
            if isinstance(event, Text):
                read.extend(event.token_ids)

    with pytest.raises(ForwardError, match="went away"):
        follow()
    assert tuple(read) == expected[: len(read)]
    assert len(read) > 3
    session.clear()
    assert answer(session.generate("hello", max_tokens=30)).token_ids == expected


def test_a_cache_that_cannot_rewind_is_an_error_not_a_hang(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(session.generate("hello", max_tokens=5))
    session.clear()

    def rewind(self: LlamaSequence, length: int) -> None:
        raise RewindError("this cache keeps what it has")

    monkeypatch.setattr(LlamaSequence, "rewind", rewind)
    generation = session.generate("other", max_tokens=5)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            answer(generation)
        except BaseException as error:
            caught.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(WAIT_S)
    assert not reader.is_alive()
    assert isinstance(caught[0], RewindError)
    monkeypatch.undo()
    assert answer(session.generate("other", max_tokens=5)).text


# -------------------------------------------------------------------------------------- threads and asyncio


def test_sessions_in_two_threads_each_equal_running_alone(engine: Engine) -> None:
    prompts = {"a": ["hello world", "what is water"], "b": ["two words", "who said that"]}

    def talk(name: str) -> list[tuple[int, ...]]:
        with engine.session() as session:
            return [
                answer(session.generate(prompt, max_tokens=200, depth=4, sampling=SAMPLED)).token_ids
                for prompt in prompts[name]
            ]

    alone = {name: talk(name) for name in prompts}
    for _ in range(3):
        with ThreadPoolExecutor() as threads:
            assert dict(zip(prompts, threads.map(talk, prompts, timeout=WAIT_S), strict=True)) == alone


def test_sessions_interleaved_event_by_event(engine: Engine) -> None:
    expected = [plain_text(engine, prompt, max_tokens=50).token_ids for prompt in ("hello world", "two words")]
    with engine.session() as one, engine.session() as two:
        left = one.generate("hello world", max_tokens=50, depth=4)
        right = two.generate("two words", max_tokens=50, depth=4)
        events: list[list[object]] = [[], []]
        for pair in zip(left, right, strict=False):
            for kept, event in zip(events, pair, strict=True):
                kept.append(event)
        events[0] += left
        events[1] += right
    for kept, tokens in zip(events, expected, strict=True):
        done = [event for event in kept if isinstance(event, Done)]
        # The shorter stream ends the zip, which drops one event of the other: Done still has everything.
        assert [each.token_ids for each in done] == [tokens] or not done
    assert any(isinstance(event, Done) for event in events[0] + events[1])


def test_async_for(engine: Engine) -> None:
    expected = plain_text(engine, "hello", max_tokens=40)

    async def main() -> tuple[str, Done | None, int]:
        ticks = [0]

        async def tick() -> None:
            while True:
                ticks[0] += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        text, last = "", None
        with engine.session() as session:
            async for event in session.generate("hello", max_tokens=40):
                if isinstance(event, Text):
                    text += event.text
                if isinstance(event, Done):
                    last = event
        ticking.cancel()
        return text, last, ticks[0]

    text, last, ticks = asyncio.run(main())
    assert last is not None
    assert (text, last.token_ids) == (expected.text, expected.token_ids)
    assert ticks > 40  # the event loop went on meanwhile


def test_async_errors_and_aclose(engine: Engine) -> None:
    async def main() -> None:
        with engine.session() as session:
            generation = session.generate("hello")
            async for _ in generation:
                break
            await generation.aclose()
            await generation.aclose()
            again = session.generate("more", max_tokens=3)
            assert [event async for event in again][-1].text  # type: ignore[union-attr]
            late = session.generate("late")
            session.close()
            with pytest.raises(ClosedError):
                async for _ in late:
                    pass

    asyncio.run(main())


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_async_cancellation(slow_engine: Engine, delay_s: float) -> None:
    """A cancelled ``await`` ends the answer, also in the middle of a long prefill."""
    expected = plain_text(slow_engine, "hello", max_tokens=8).token_ids

    async def main() -> tuple[tuple[int, ...], float]:
        with slow_engine.session() as session:

            async def read() -> None:
                async for _ in session.generate("the " * 6000):
                    pass

            reading = asyncio.create_task(read())
            await asyncio.sleep(delay_s)
            started = time.perf_counter()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            done = answer(session.generate("hello", max_tokens=8))
            took_s = time.perf_counter() - started
            assert [message["content"] for message in session.messages] == ["hello", done.text]
            return done.token_ids, took_s

    tokens, took_s = asyncio.run(main())
    assert tokens == expected
    assert took_s < 3.0


def test_async_cancellation_while_decoding_keeps_the_conversation_consistent(engine: Engine) -> None:
    """Whoever settles the answer first, the turn is in the conversation once, and with what was read."""

    async def main() -> None:
        for pause_s in (0.0, 0.0005, 0.002, 0.01):
            for _ in range(5):
                with engine.session() as session:
                    read: list[str] = []

                    async def follow(session: Session = session, read: list[str] = read) -> None:
                        async for event in session.generate("hello", max_tokens=60):
                            if isinstance(event, Text):
                                read.append(event.text)

                    reading = asyncio.create_task(follow())
                    await asyncio.sleep(pause_s)
                    reading.cancel()
                    await asyncio.wait([reading])
                    done = answer(session.generate("more", max_tokens=3))
                    contents = [message["content"] for message in session.messages]
                    turn = ["hello", "".join(read)] if "".join(read) else []
                    assert contents == [*turn, "more", done.text]

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ closing


def test_close_during_generation_in_another_thread(slow_engine: Engine) -> None:
    for wait_for_text in (False, True):
        session = slow_engine.session()
        started, outcome = threading.Event(), list[object]()

        def read(
            session: Session = session, started: threading.Event = started, outcome: list[object] = outcome
        ) -> None:
            try:
                for event in session.generate("the " * 300):
                    if isinstance(event, Text):
                        started.set()
                    outcome.append(event)
            except ClosedError as error:
                outcome.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        if wait_for_text:
            assert started.wait(WAIT_S)
        else:
            time.sleep(0.1)
        session.close()
        reader.join(WAIT_S)
        assert not reader.is_alive()
        last = outcome[-1]
        assert isinstance(last, ClosedError) or (isinstance(last, Done) and last.finish_reason == "cancelled")


def test_close_inside_the_loop(engine: Engine) -> None:
    session = engine.session()
    events = []
    for event in session.generate("hello"):
        session.close()
        events.append(event)
    assert isinstance(events[-1], Done)
    assert events[-1].finish_reason == "cancelled"


def test_two_threads_close_at_once(slow_engine: Engine) -> None:
    """The second one returns when the caches are really gone: the engine may free the weights next."""
    session = slow_engine.session()
    reader = threading.Thread(target=lambda: list(session.generate("the " * 2000)))
    reader.start()
    time.sleep(0.2)
    states: list[bool] = []
    target = session._target
    assert isinstance(target, LlamaSequence)

    def close() -> None:
        session.close()
        states.append(target._worker._thread.is_alive())

    closers = [threading.Thread(target=close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in [*closers, reader]:
        closer.join(WAIT_S)
    assert states == [False] * 3


def test_use_after_close(engine: Engine) -> None:
    session = engine.session()
    late = session.generate("hello")
    session.close()
    session.close()
    for use in (lambda: session.generate("hello"), session.clear, lambda: next(late)):
        with pytest.raises(ClosedError, match="closed"):
            use()
    session.cancel()
    late.close()
    assert session.messages == ()


def test_a_closed_or_forgotten_session_is_freed(engine: Engine) -> None:
    references = []
    for close in (True, False):
        session = engine.session()
        answer(session.generate("hello", max_tokens=3, depth=3))
        if close:
            session.close()
        references.append(weakref.ref(session))
        del session
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_template_errors_cost_nothing(tiny: TinyModels) -> None:
    picky = (
        "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0]['content'] }}"
    )
    target = tiny.with_template("one-turn", picky)
    with tiny.load(target, draft="none") as engine, engine.session() as session:
        done = answer(session.generate("hello", max_tokens=5))
        with pytest.raises(TemplateError, match="one turn only"):
            session.generate("again")
        assert [message["content"] for message in session.messages] == ["hello", done.text]
        session.clear()
        assert answer(session.generate("hello", max_tokens=5)).token_ids == done.token_ids


# -------------------------------------------------------------------------------------- interpreter exit


STREAM_AND_EXIT = """
import sys, threading, time
from edgespec import Engine
engine = Engine.load(sys.argv[1], draft=sys.argv[2], threads=1, lookup=sys.argv[2] != "none")
session = engine.session()
generation = session.generate(sys.argv[4])
if sys.argv[3] == "thread":
    def read():
        for _ in generation:
            pass
    threading.Thread(target=read, daemon=True).start()
    time.sleep(0.2)
elif sys.argv[3] == "paused":
    next(generation)
    time.sleep(0.7)  # by now the worker waits for this reader
elif sys.argv[3] == "raise":
    next(generation)
    raise SystemExit(7)
else:
    next(generation)
"""


@pytest.mark.parametrize("how", ["return", "paused", "thread", "raise"])
def test_the_interpreter_exits_while_an_answer_streams(tiny: TinyModels, how: str) -> None:
    started = time.perf_counter()
    result = run_python(STREAM_AND_EXIT, tiny.target, tiny.drafter, how, "hello", home=tiny.home.root)
    assert (result.code, result.out, result.err) == (7 if how == "raise" else 0, "", "")
    assert time.perf_counter() - started < 15


def test_the_interpreter_exits_during_a_prefill(tiny: TinyModels) -> None:
    prompt = "the " * 1900
    result = run_python(STREAM_AND_EXIT, tiny.slow, "none", "thread", prompt, home=tiny.home.root)
    assert (result.code, result.out, result.err) == (0, "", "")
