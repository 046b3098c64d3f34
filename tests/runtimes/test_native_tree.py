"""Trees of the native runtime: the contract, and rows equal to their paths' on any threads and levels."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from edgespec.errors import InvalidRequestError
from edgespec.interfaces.model import Model
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from tests.runtimes.contract import Runtime, equal, ids, logits
from tests.runtimes.tree_contract import TreeContract, path_to, random_tree
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.tiny_gguf import write_tiny_gguf

LEVELS = require_native().levels


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tree") / "tiny.gguf", quant="Q4_0", width=128)


@pytest.fixture(scope="module", params=[1, 2, 3, 7])
def model(request: pytest.FixtureRequest, file: Path) -> Iterator[NativeModel]:
    with load_native(file, NativeSettings(threads=request.param)) as model:
        yield model


class TestTrees(TreeContract):
    @pytest.fixture(scope="class", params=LEVELS)
    @classmethod
    def runtime(cls, request: pytest.FixtureRequest, file: Path) -> Runtime:
        return Runtime(open_model=lambda: load_native(file, NativeSettings(level=request.param)))


def chain_rows(model: Model, before: list[int], tokens: list[int]) -> list[LogitsArray]:
    with closing(model.open(len(before) + len(tokens))) as fresh:
        fresh.forward(before, 0)
        return logits(fresh.forward(tokens, len(tokens)))


# The borders of a tile of 16 positions and of a block of 256, within the tree and before it.
@pytest.mark.parametrize("length", [1, 15, 16, 17, 200, 239, 240, 255, 256, 300, 511])
def test_tree_rows_are_bit_equal_on_any_number_of_threads(model: NativeModel, length: int) -> None:
    source = random.Random(length)
    before, tokens = ids(length, model, length), ids(24, model, length + 1)
    parents = random_tree(source, len(tokens))
    with model.open(length + 24) as sequence:
        sequence.forward(before, 0)
        found = logits(sequence.forward_tree(tokens, parents))
        for index in {len(tokens) - 1, *source.sample(range(len(tokens)), 4)}:
            expected = chain_rows(model, before, [tokens[node] for node in path_to(parents, index)])
            assert (expected[-1] == found[index]).all(), (parents, index)


@pytest.mark.parametrize("shape", ["chain", "star"])
def test_the_largest_tree_scores_each_path_like_a_chain(model: NativeModel, shape: str) -> None:
    before, tokens = ids(250, model), ids(64, model, 1)
    parents = [index - 1 if shape == "chain" else -1 for index in range(64)]
    with model.open(400) as sequence:
        sequence.forward(before, 0)
        found = logits(sequence.forward_tree(tokens, parents))
        if shape == "chain":
            assert equal(found, chain_rows(model, before, tokens))
            sequence.keep(range(64))
            assert sequence.length == 314
            following = chain_rows(model, [*before, *tokens], [7])
            assert equal(logits(sequence.forward([7], 1)), following)
        else:
            for index in (0, 40, 63):
                assert equal(found[index : index + 1], chain_rows(model, before, tokens[index : index + 1]))


def test_a_tree_that_is_too_large_is_refused(model: NativeModel) -> None:
    with model.open(200) as sequence:
        sequence.forward_tree(ids(60, model), [-1] * 60)
        with pytest.raises(InvalidRequestError, match="tree of 65 tokens is too large"):
            sequence.forward_tree(ids(5, model), [0] * 5)
        assert sequence.forward_tree(ids(5, model), [-1] * 5).count == 5, "the former tree is gone"


def test_a_tree_without_tokens_has_no_rows(model: NativeModel) -> None:
    with model.open(20) as sequence:
        assert sequence.forward_tree([], []).count == 0
        sequence.keep([])
        assert sequence.length == 0
