"""The runtimes that score trees, each held to the contract."""

from __future__ import annotations

import pytest

from edgespec.errors import RuntimeUnavailableError
from tests.runtimes.contract import Runtime
from tests.runtimes.tree_contract import TreeContract
from tests.support.fake_runtime import FakeModel


class TestFake(TreeContract):
    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls) -> Runtime:
        return Runtime(open_model=lambda: FakeModel(50, seed=3, can_branch=True))


def test_the_facts_of_a_runtime_without_trees_say_so() -> None:
    model = FakeModel(50)
    assert not model.facts.can_branch
    with pytest.raises(RuntimeUnavailableError):
        model.open(10).forward_tree([1], [-1])
