"""Branches of a session: the same conversation, continued separately."""

from __future__ import annotations

import pytest

from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels, answer


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
