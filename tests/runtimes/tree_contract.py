"""The contract of a runtime that scores trees, as tests: subclass with a ``runtime`` fixture."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from edgespec.errors import CancelledError, ClosedError, ContextFullError, InvalidRequestError, StaleRowsError
from edgespec.interfaces.model import Model, Sequence, TreeSequence
from edgespec.interfaces.rows import LogitsArray
from tests.runtimes.contract import OneModel, equal, ids, logits

CONTEXT = 200


def path_to(parents: list[int], index: int) -> list[int]:
    return [*([] if parents[index] < 0 else path_to(parents, parents[index])), index]


def random_tree(source: random.Random, count: int) -> list[int]:
    """Parents of long chains, wide stars and trees between them."""
    lean = source.random()
    return [index - 1 if source.random() < lean else source.randrange(-1, index) for index in range(count)]


class TreeContract(OneModel):
    """Equality is to the bit: the rows of a path equal those of its tokens as a chain, fed as wide as the tree."""

    @pytest.fixture
    def sequence(self, model: Model) -> Any:
        with closing(model.open(CONTEXT)) as sequence:
            assert isinstance(sequence, TreeSequence)
            yield sequence

    def chain_rows(self, model: Model, before: list[int], tokens: list[int]) -> list[LogitsArray]:
        with closing(model.open(CONTEXT)) as fresh:
            fresh.forward(before, 0)
            return logits(fresh.forward(tokens, len(tokens)))

    def test_the_facts_of_a_runtime_with_trees_say_so(self, model: Model) -> None:
        assert model.facts.can_branch

    @pytest.mark.parametrize("seed", range(4))
    def test_each_row_of_a_tree_equals_its_path_as_a_chain(
        self, model: Model, sequence: TreeSequence, seed: int
    ) -> None:
        source = random.Random(seed)
        before, tokens = ids(source.randrange(0, 40), model, seed), ids(source.randrange(1, 9), model, seed + 1)
        parents = random_tree(source, len(tokens))
        sequence.forward(before, 0)
        rows = sequence.forward_tree(tokens, parents)
        assert rows.count == len(tokens)
        assert sequence.length == len(before), "the tree does not belong to the cache"
        found = logits(rows)
        for index in range(len(tokens)):
            path = [tokens[node] for node in path_to(parents, index)]
            assert np.array_equal(self.chain_rows(model, before, path)[-1], found[index]), (parents, index)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_tree_may_grow_by_several_calls(self, model: Model, sequence: TreeSequence, seed: int) -> None:
        source = random.Random(seed)
        before, tokens = ids(9, model, seed), ids(8, model, seed + 1)
        parents = random_tree(source, len(tokens))
        sequence.forward(before, 0)
        found: list[LogitsArray] = []
        while len(found) < len(tokens):
            done = len(found)
            until = source.randrange(done + 1, len(tokens) + 1)
            found += logits(sequence.forward_tree(tokens[done:until], parents[done:until]))
        for index in range(len(tokens)):
            path = [tokens[node] for node in path_to(parents, index)]
            assert np.array_equal(self.chain_rows(model, before, path)[-1], found[index]), (parents, index)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_kept_path_scores_like_a_chain(self, model: Model, sequence: TreeSequence, seed: int) -> None:
        source = random.Random(seed)
        before, more = ids(9, model, seed), ids(5, model, seed + 2)
        sequence.forward(before, 0)
        with closing(model.open(CONTEXT)) as fresh:
            fresh.forward(before, 0)
            for step in range(4):
                tokens = ids(source.randrange(1, 8), model, 100 * seed + step)
                parents = random_tree(source, len(tokens))
                sequence.forward_tree(tokens, parents)
                path = path_to(parents, source.randrange(len(tokens)))[: source.randrange(len(tokens) + 1)]
                sequence.keep(path)
                kept = [tokens[index] for index in path]
                if kept:
                    fresh.forward(kept, 0)
                assert sequence.length == fresh.length
                assert equal(logits(sequence.forward(more, 5)), logits(fresh.forward(more, 5))), (parents, path)
                for own in (sequence, fresh):
                    own.rewind(own.length - 3)

    @pytest.mark.parametrize("what", ["forward", "rewind", "a rewind to where it is", "keep", "close"])
    def test_tree_rows_are_stale_after_the_sequence_changes(
        self, model: Model, sequence: TreeSequence, what: str
    ) -> None:
        sequence.forward(ids(5, model), 0)
        rows = sequence.forward_tree(ids(3, model), [-1, 0, -1])
        changes: dict[str, Callable[[], object]] = {
            "forward": lambda: sequence.forward(ids(1, model), 0),
            "rewind": lambda: sequence.rewind(4),
            "a rewind to where it is": lambda: sequence.rewind(5),
            "keep": lambda: sequence.keep([0]),
            "close": sequence.close,
        }
        changes[what]()
        with pytest.raises(StaleRowsError):
            rows.logits(0)

    @pytest.mark.parametrize("what", ["forward", "rewind", "keep"])
    def test_a_tree_is_dropped_after_the_sequence_changes(
        self, model: Model, sequence: TreeSequence, what: str
    ) -> None:
        before, tokens = ids(5, model), ids(2, model, 1)
        sequence.forward(before, 0)
        sequence.forward_tree(ids(3, model, 3), [-1, 0, -1])
        if what == "forward":
            assert equal(logits(sequence.forward(tokens, 2)), self.chain_rows(model, before, tokens))
        elif what == "rewind":
            sequence.rewind(5)
        else:
            sequence.keep([])
        with pytest.raises(InvalidRequestError):
            sequence.keep([0])
        assert sequence.length == 5 + 2 * (what == "forward")
        sequence.rewind(5)
        assert equal(logits(sequence.forward_tree(tokens, [-1, 0])), self.chain_rows(model, before, tokens))

    @pytest.mark.parametrize(
        ("parents", "count"), [([0], 1), ([-1, 1], 2), ([-2], 1), ([-1], 2), ([-1, -1, 2], 3), ([-1, 0, 0], 2)]
    )
    def test_a_tree_token_whose_parent_is_not_earlier_is_refused(
        self, model: Model, sequence: TreeSequence, parents: list[int], count: int
    ) -> None:
        sequence.forward(ids(5, model), 0)
        with pytest.raises(InvalidRequestError):
            sequence.forward_tree(ids(count, model), parents)
        assert sequence.length == 5

    @pytest.mark.parametrize("path", [[1], [0, 2], [0, 1, 1], [2, 1], [3], [-1], [0, 0]])
    def test_keeping_nodes_that_are_not_a_path_is_refused(
        self, model: Model, sequence: TreeSequence, path: list[int]
    ) -> None:
        sequence.forward(ids(5, model), 0)
        sequence.forward_tree(ids(3, model), [-1, 0, -1])
        with pytest.raises(InvalidRequestError):
            sequence.keep(path)
        assert sequence.length == 5

    def test_a_failed_tree_forward_keeps_the_cache_and_drops_the_tree(self, model: Model) -> None:
        before = ids(16, model)
        with closing(model.open(20)) as sequence:
            assert isinstance(sequence, TreeSequence)
            sequence.forward(before, 0)
            sequence.forward_tree(ids(2, model), [-1, -1])
            with pytest.raises(ContextFullError):
                sequence.forward_tree(ids(3, model), [0, 1, -1])
            with pytest.raises(InvalidRequestError):
                sequence.keep([0])
            with pytest.raises(InvalidRequestError):
                sequence.forward_tree([model.facts.vocabulary_size], [-1])
            sequence.cancel()
            with pytest.raises(CancelledError):
                sequence.forward_tree(ids(2, model), [-1, -1])
            sequence.reset_cancel()
            assert sequence.length == 16
            tokens = ids(4, model, 1)
            rows = logits(sequence.forward_tree(tokens, [-1, 0, 1, 2]))
        assert equal(rows, self.chain_rows(model, before, tokens))

    def test_a_closed_sequence_refuses_trees(self, model: Model) -> None:
        sequence: Sequence = model.open(CONTEXT)
        assert isinstance(sequence, TreeSequence)
        sequence.close()
        with pytest.raises(ClosedError):
            sequence.forward_tree([1], [-1])
        with pytest.raises(ClosedError):
            sequence.keep([])
