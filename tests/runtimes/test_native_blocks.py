"""Attention over long contexts: threads divide the blocks of positions, with the same bits as one thread."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from tests.runtimes.contract import equal, ids, logits
from tests.runtimes.tree_contract import random_tree
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.tiny_gguf import write_tiny_gguf

# Heads of 32 elements; of 16, two of which are quantised together; one group of 64 that looks back over a window.
SHAPES: dict[str, tuple[str, int, int, int, int]] = {
    "llama": ("llama", 128, 4, 2, 0),
    "qwen2": ("qwen2", 64, 4, 2, 0),
    "gemma3": ("gemma3", 256, 4, 1, 1100),
}
LONGEST = 1600
# Where a block of 256 positions begins and ends, within the rows and before them; the least that is divided are 4.
STARTS = (760, 1023, 1024, 1270, 1500)
WIDTHS = (1, 2, 9, 33, 64)


@pytest.fixture(scope="module", params=SHAPES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, width, heads, kv_heads, window = SHAPES[request.param]
    return write_tiny_gguf(
        tmp_path_factory.mktemp("blocks") / "tiny.gguf",
        architecture=architecture,
        quant="Q4_0",
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        window=window,
    )


@pytest.fixture(scope="module")
def alone(file: Path) -> Iterator[NativeModel]:
    with load_native(file, NativeSettings()) as model:
        yield model


def rows_at(model: NativeModel, start: int, width: int) -> list[LogitsArray]:
    with closing(model.open(LONGEST)) as sequence:
        sequence.forward(ids(start, model, 1), 0)
        return logits(sequence.forward(ids(width, model, 2), width))


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_long_attention_is_bit_equal_on_any_number_of_threads(alone: NativeModel, start: int) -> None:
    expected = {width: rows_at(alone, start, width) for width in WIDTHS}
    for threads in range(2, 8):
        with alone.with_settings(threads=threads) as model:
            for width in WIDTHS:
                assert equal(rows_at(model, start, width), expected[width]), (threads, width)


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_trees_over_long_contexts_are_bit_equal_on_any_number_of_threads(alone: NativeModel, start: int) -> None:
    parents = random_tree(random.Random(start), 40)

    def rows(model: NativeModel) -> list[LogitsArray]:
        with closing(model.open(LONGEST)) as sequence:
            sequence.forward(ids(start, model, 1), 0)
            return logits(sequence.forward_tree(ids(len(parents), model, 2), parents))

    expected = rows(alone)
    for threads in (2, 3, 7):
        with alone.with_settings(threads=threads) as model:
            assert equal(rows(model), expected), threads


def test_all_levels_are_bit_equal_on_attention_blocks_divided_among_threads(alone: NativeModel, file: Path) -> None:
    expected = rows_at(alone, 1270, 9)
    for level in require_native().levels:
        with load_native(file, NativeSettings(threads=3, level=level)) as model:
            assert equal(rows_at(model, 1270, 9), expected), level
