"""Text events name the drafter of each guessed token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from edgespec.decoding.pipelined.budget import Budget
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Round, Text
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.engine.session import Session
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftRequest
from edgespec.planning.depth.base import FixedDepth
from tests.engine.answers import plain_text
from tests.support.budgets import FixedBudget
from tests.support.scripted_drafters import KIND, Scripted
from tests.support.tiny_models import read_all, require_speculation

TOKENS = 41


class RightThenWrong:
    """A drafter that knows the answer: ``right`` tokens of each proposal are right, the next one is wrong."""

    kind = KIND

    def __init__(self, prompt_length: int, answer: Sequence[int], right: int) -> None:
        self._prompt_length, self._answer, self._right = prompt_length, answer, right

    def start(self, request: DraftRequest) -> Scripted:
        def script(tokens: list[int], depth: int) -> list[int]:
            known = list(self._answer[len(tokens) - self._prompt_length :][:depth])
            return [t if at < self._right else (t + 1) % request.vocabulary_size for at, t in enumerate(known)]

        return Scripted(script)

    def close(self) -> None:
        """Frees nothing."""


def session_of(engine: Engine, plain: Done, right: int, depth: int, budget: Callable[[], Budget | None]) -> Session:
    drafter = RightThenWrong(plain.stats.prompt_tokens, plain.token_ids, right)
    return engine.session(
        _speculation=Speculation(drafters=(drafter,), policy=FixedDepth(depth), depth_cap=depth, budget=budget)
    )


def guessed(events: Sequence[object]) -> list[str | None]:
    return [each.guessed_by for event in events if isinstance(event, Text) for each in event.tokens]


@pytest.mark.parametrize("right", range(5))
def test_accepted_tokens_are_marked_as_guessed_and_corrections_are_not(engine: Engine, right: int) -> None:
    require_speculation(engine, 4)
    plain = plain_text(engine, "hello world", max_tokens=TOKENS)
    with session_of(engine, plain, right, 4, lambda: None) as session:
        events, done = read_all(session.generate("hello world", max_tokens=TOKENS))
    assert done.token_ids == plain.token_ids
    rounds, rest = divmod(TOKENS - 1, right + 1)
    # The last round proposes the rest of the answer, without the target's own token.
    last = [*[KIND] * (rest - 1), None] if rest else []
    assert guessed(events) == [None, *[*[KIND] * right, None] * rounds, *last]
    assert done.stats.guessed_tokens == done.stats.accepted == rounds * right + max(0, rest - 1)


def test_plain_answers_mark_no_token_as_guessed(engine: Engine, session: Session) -> None:
    events, done = read_all(session.generate("hello world", max_tokens=12, depth=0))
    assert guessed(events) == [None] * 12
    assert done.stats.guessed_tokens == done.stats.as_json()["guessed_tokens"] == 0


def test_beyond_the_checked_context_nothing_is_guessed_and_the_reason_is_reported(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_speculation(engine, 4)
    plain = plain_text(engine, "hello world", max_tokens=TOKENS)
    checked = plain.stats.prompt_tokens + 21
    monkeypatch.setattr(engine.pair, "exact_length", checked)
    with session_of(engine, plain, 9, 4, lambda: None) as session:
        events, done = read_all(session.generate("hello world", max_tokens=TOKENS))
    # A forward ends at the last checked token: four of the 21 are the target's own, and so are all later ones.
    assert guessed(events) == [None, *[*[KIND] * 4, None] * 4, *[None] * (TOKENS - 21)]
    assert done.speculation_off == (
        f"guesses are checked to keep the text up to {checked} tokens of context, and this context is longer "
        f"(`{engine.profile.command('calibrate')}` checks the whole context)"
    )


@pytest.mark.parametrize("patience", [0.0, 10.0])
def test_pipelined_answers_mark_guessed_tokens_correctly(engine: Engine, patience: float) -> None:
    require_speculation(engine, 4)
    plain = plain_text(engine, "hello world", max_tokens=TOKENS)
    budget = FixedBudget(most=3, ahead=4, patience=patience)
    with session_of(engine, plain, 3, 4, lambda: budget) as session:
        events, done = read_all(session.generate("hello world", max_tokens=TOKENS))
    assert done.token_ids == plain.token_ids
    expected: list[str | None] = [None]
    for event in events:
        if isinstance(event, Round):
            own = event.record.emitted - event.record.accepted
            expected += [*[event.record.source] * event.record.accepted, *[None] * own]
    assert guessed(events) == expected
    assert done.stats.guessed_tokens == done.stats.accepted == sum(each is not None for each in expected)
    assert done.stats.guessed_tokens or not patience, "with patience the drafter's guesses arrive in time"


def test_guesses_after_a_stop_string_are_not_counted(engine: Engine) -> None:
    """Tokens accepted after the stop string are not part of the answer and not counted as guessed."""
    require_speculation(engine, 4)
    plain = plain_text(engine, "hello world", max_tokens=TOKENS)
    cut = 0
    for start in range(8, 40, 3):
        stop = plain.text[start : start + 3]
        if not stop.strip() or "\ufffd" in stop:
            continue
        with session_of(engine, plain, 9, 4, lambda: None) as session:
            events, done = read_all(session.generate("hello world", max_tokens=TOKENS, stop=[stop]))
        count = len(done.token_ids)
        assert done.token_ids == plain.token_ids[:count]
        assert guessed(events) == [None, *[*[KIND] * 4, None] * TOKENS][:count]
        assert done.stats.guessed_tokens == sum(each is not None for each in guessed(events))
        cut += done.stats.accepted > done.stats.guessed_tokens
    assert cut, "some round accepted tokens after the stop string"


def test_tokens_with_held_back_text_keep_their_drafters_name(engine: Engine) -> None:
    """A stop string that is nearly completed: the tokens arrive late, each with its drafter's name."""
    require_speculation(engine, 4)
    plain = plain_text(engine, "hello world", max_tokens=TOKENS)
    almost = plain.text[10:20] + "\0never"
    with session_of(engine, plain, 2, 4, lambda: None) as session:
        events, _ = read_all(session.generate("hello world", max_tokens=TOKENS, stop=[almost]))
    assert guessed(events) == [None, *[KIND, KIND, None] * 13, None]
    assert max(len(event.tokens) for event in events if isinstance(event, Text)) > 3, "some tokens were held back"


def test_each_token_of_a_split_character_keeps_its_drafters_name(engine: Engine) -> None:
    """At this temperature every byte token is as likely as any word."""
    require_speculation(engine, 4)
    most = 0
    for seed in range(6):
        broken = Sampling(temperature=100.0, seed=seed)
        plain = plain_text(engine, "hello", max_tokens=181, sampling=broken)
        with session_of(engine, plain, 1, 4, lambda: None) as session:
            events, done = read_all(session.generate("hello", max_tokens=181, sampling=broken))
        assert done.token_ids == plain.token_ids
        assert guessed(events) == [None, *[KIND, None] * 90][: len(done.token_ids)]
        most = max(most, *(len(event.tokens) for event in events if isinstance(event, Text)))
    assert most > 2, "a round without a complete character waits for the next one"


def test_each_drafter_of_a_combination_is_named_for_its_guesses(engine: Engine) -> None:
    class Copies(RightThenWrong):
        """Proposes at every third position only."""

        kind = "copies"

        def start(self, request: DraftRequest) -> Scripted:
            whole = super().start(request)
            ask = whole.propose

            class Sometimes(Scripted):
                def propose(self, context: Context, depth: int, gate: object = None):  # type: ignore[no-untyped-def]
                    said = ask(context, depth if len(context) % 3 == 0 else 0)
                    by = "copies" if said.tokens else None
                    return replace(said, sources=("copies",) * len(said.tokens), drafted_by=by)

            return Sometimes(lambda tokens, depth: [])

    require_speculation(engine, 4)
    plain = plain_text(engine, "hello world", max_tokens=TOKENS)
    known = plain.stats.prompt_tokens, plain.token_ids
    drafters = Copies(*known, right=1), RightThenWrong(*known, right=3)
    speculation = Speculation(drafters=drafters, policy=FixedDepth(4), depth_cap=4)
    with engine.session(_speculation=speculation) as session:
        events, _ = read_all(session.generate("hello world", max_tokens=TOKENS))
    expected: list[str | None] = [None]
    while len(expected) < TOKENS:
        third = (plain.stats.prompt_tokens + len(expected)) % 3 == 0
        expected += ["copies", None] if third else [KIND, KIND, KIND, None]
    last = [*expected[: TOKENS - 1], None]
    assert guessed(events) == last
    assert {"copies", KIND} <= set(last)
