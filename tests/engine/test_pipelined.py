"""Pipelined sessions give the text of plain decoding, also after leaving an answer early."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Reading, Round, Text
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.engine.session import Session
from edgespec.planning.depth.base import FixedDepth
from tests.engine.answers import SAMPLED, WAIT_S, plain_text
from tests.support.budgets import FixedBudget
from tests.support.started_threads import started_threads
from tests.support.tiny_models import answer

PROMPTS = ("hello", "the water of the river", "one two three four", "你好")


def speculation(engine: Engine) -> Speculation:
    cap = engine.plan.depth_cap
    assert cap > 0
    return Speculation(
        drafters=engine.drafters,
        policy=FixedDepth(cap + 1),
        depth_cap=cap,
        budget=lambda: FixedBudget(most=cap, ahead=cap + 1, patience=10.0),
    )


@pytest.fixture
def pipelined(engine: Engine) -> Iterator[Session]:
    with engine.session(_speculation=speculation(engine)) as session:
        yield session


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_pipelined_session_gives_the_text_of_plain_decoding(
    engine: Engine, pipelined: Session, sampling: Sampling
) -> None:
    accepted = 0
    for prompt in PROMPTS:
        pipelined.clear()
        done = answer(pipelined.generate(prompt, max_tokens=48, sampling=sampling))
        assert done.token_ids == plain_text(engine, prompt, max_tokens=48, sampling=sampling).token_ids
        accepted += done.stats.accepted
    assert accepted > 0


def test_a_pipelined_answer_tells_what_is_read_of_its_prompt(pipelined: Session) -> None:
    told = [event for event in pipelined.generate("the " * 700, max_tokens=4) if isinstance(event, Reading)]
    assert [event.tokens for event in told] == [0, 256, 512]


def test_a_pipelined_conversation_reuses_its_caches(engine: Engine, pipelined: Session) -> None:
    first = answer(pipelined.generate("hello", max_tokens=12))
    second = answer(pipelined.generate("and now?", max_tokens=12))
    assert second.stats.cached_tokens > 0
    with engine.session() as plain:
        assert answer(plain.generate("hello", max_tokens=12, depth=0)).token_ids == first.token_ids
        assert answer(plain.generate("and now?", max_tokens=12, depth=0)).token_ids == second.token_ids


@pytest.mark.parametrize("rounds", range(5))
def test_after_leaving_or_cancelling_a_pipelined_answer_the_text_is_plain_decodings(
    engine: Engine, pipelined: Session, rounds: int
) -> None:
    for leave in ("cancel", "close"):
        pipelined.clear()
        generation, seen = pipelined.generate("hello", max_tokens=64), 0
        for event in generation:
            seen += isinstance(event, Round)
            if seen > rounds:
                if leave == "close":
                    generation.close()
                    break
                pipelined.cancel()
        pipelined.clear()
        again = answer(pipelined.generate("hello", max_tokens=24))
        assert again.token_ids == plain_text(engine, "hello", max_tokens=24).token_ids


def test_closing_a_pipelined_session_ends_its_drafting_thread(engine: Engine) -> None:
    before = started_threads()
    session = engine.session(_speculation=speculation(engine))
    for event in session.generate("hello", max_tokens=64):
        if isinstance(event, Text):
            session.close()
    assert started_threads() <= before


def test_depth_zero_in_a_pipelined_session_decodes_plainly(engine: Engine, pipelined: Session) -> None:
    done = answer(pipelined.generate("hello", max_tokens=12, depth=0))
    assert isinstance(done, Done)
    assert done.token_ids == plain_text(engine, "hello", max_tokens=12).token_ids
    assert done.stats.proposed == 0


def test_pipelined_sessions_that_are_dropped_without_close_leave_no_thread(engine: Engine) -> None:
    gc.collect()
    before = started_threads()
    for left_early in (False, True) * 3:
        generation = engine.session(_speculation=speculation(engine)).generate("hello", max_tokens=40)
        next(generation)
        if not left_early:
            answer(generation)
        del generation
        gc.collect()
    deadline = time.monotonic() + WAIT_S
    while (left := started_threads() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert left == set()
