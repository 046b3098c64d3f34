"""Branches of a session: the same conversation, continued separately."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.engine.events import Reading
from edgespec.engine.pair.load import Limits
from edgespec.errors import MemoryLimitError
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels, answer, read_all


def test_a_branch_continues_the_conversation_separately_with_a_copy_of_the_cache(tiny: TinyModels) -> None:
    require_native()
    with (
        tiny.load_speculating(runtime="native", draft_runtime="native") as engine,
        engine.session(system="be kind") as session,
        engine.session(system="be kind") as other,
    ):
        for each in (session, other):
            answer(each.generate("hello world", max_tokens=20))
        with session.branch() as branch:
            assert branch.messages == session.messages
            in_branch = answer(branch.generate("one", max_tokens=10))
            in_session = answer(session.generate("two", max_tokens=10))
            assert in_branch.stats.cached_tokens == in_session.stats.cached_tokens > 20
            assert in_branch.token_ids == answer(other.generate("one", max_tokens=10)).token_ids
            assert branch.messages[:3] == session.messages[:3]
            assert branch.messages[3:] != session.messages[3:]
            session.close()
            assert answer(branch.generate("three", max_tokens=3)).text


def test_a_branch_in_a_runtime_without_forks_reads_the_conversation_again(tiny: TinyModels) -> None:
    pytest.importorskip("llama_cpp")
    with tiny.load(runtime="llama", draft="none") as other, other.session() as session:
        assert not other.pair.target.facts.can_fork
        answer(session.generate("hello", max_tokens=10))
        with session.branch() as branch:
            in_branch = answer(branch.generate("one", max_tokens=10))
        assert in_branch.stats.cached_tokens == 0
        assert in_branch.token_ids == answer(session.generate("one", max_tokens=10)).token_ids


LONG = "one two people " * 40
ASKED = [{"role": "user", "content": LONG}]


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("how", [{"messages": ASKED}, {"prompt": LONG}, {"prompt": LONG, "raw": True}])
def test_branches_answer_beside_one_another_a_prompt_that_was_read_once(
    tiny: TinyModels, how: dict[str, Any], depth: int
) -> None:
    require_native()
    drawn: dict[str, Any] = {"max_tokens": 12, "depth": depth, "temperature": 1.0}
    with tiny.load(runtime="native", draft_runtime="native", context=1024, depth=4) as engine:
        expected = []
        for seed in range(3):
            with engine.session() as alone:
                expected.append(answer(alone.generate(**how, seed=seed, **drawn)))
        with engine.session() as session:
            events, read = read_all(session.generate(**how, max_tokens=0))
            assert events[0] == Reading(0, read.stats.prompt_tokens)
            with session.branch() as one, session.branch() as two:
                asked = [each.generate(**how, seed=seed, **drawn) for seed, each in enumerate((session, one, two))]
                for generation in asked:
                    next(generation)  # all have begun
                found = [generation.result() for generation in asked]
        assert [done.token_ids for done in found] == [done.token_ids for done in expected]
        assert {done.stats.cached_tokens for done in found} == {read.stats.prompt_tokens - 1}


def test_a_prompt_that_is_read_says_nothing_and_changes_no_conversation(tiny: TinyModels) -> None:
    with tiny.load() as engine, engine.session() as session:
        first = answer(session.generate("hello", max_tokens=8))
        before = session.messages
        read = answer(session.generate("and now?", max_tokens=0))
        assert (read.token_ids, read.text, read.finish_reason) == ((), "", "length")
        assert (read.stats.emitted_tokens, read.stats.ttft_s, read.stats.rounds) == (0, None, 0)
        assert session.messages == before
        found = answer(session.generate("and now?", max_tokens=8))
        assert found.stats.cached_tokens == found.stats.prompt_tokens - 1
    with tiny.load() as engine, engine.session() as other:
        assert answer(other.generate("hello", max_tokens=8)).token_ids == first.token_ids
        assert answer(other.generate("and now?", max_tokens=8)).token_ids == found.token_ids


def test_a_branch_in_spare_memory_leaves_room_for_a_whole_conversation(tiny: TinyModels) -> None:
    require_native()
    settings: dict[str, Any] = {"draft": "none", "lookup": False, "runtime": "native"}
    with tiny.load(**settings) as engine:
        one = engine.pair.pool.target_memory
    enough = one.weights_bytes + 2 * one.session_bytes(0) + one.session_bytes(one.positions)
    for missing in (0, 1):
        limits = Limits(max_memory_bytes=enough - missing)
        with tiny.load(limits=limits, **settings) as engine, engine.session() as session:
            given_up = list[None]()
            engine.pair.make_room = lambda given_up=given_up: bool(given_up.append(None))  # type: ignore[misc]
            session.branch().close()
            if missing:
                with pytest.raises(MemoryLimitError, match="another session needs"):
                    session.branch(spare_tokens=100)
                assert not given_up, "no conversation is closed for it"
            else:
                session.branch(spare_tokens=100).close()
