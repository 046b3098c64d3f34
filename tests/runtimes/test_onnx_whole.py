"""Graphs with the whole cache as input and output. The contract: test_onnx_caches.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as api
import pytest

from edgespec.errors import ForwardError, MemoryLimitError
from edgespec.files.model_file import read_model_file
from edgespec.files.onnx.folder import read_onnx_folder
from edgespec.files.onnx.interface import WHOLE
from edgespec.interfaces.rows import LogitsArray
from edgespec.placement.memory import estimate_memory, memory_needed
from edgespec.runtimes.onnx.model import OnnxModel, OnnxSequence
from edgespec.runtimes.onnx.session import OnnxSettings
from edgespec.runtimes.onnx.whole import WholeContext
from tests.runtimes.contract import equal, ids, logits, near
from tests.support.onnx_folders import SHORT, Folders, load_folder, unwatch, watch
from tests.support.tiny_onnx import llama_logits
from tests.support.whole_onnx import LONGEST


@pytest.fixture(scope="module")
def model(folders: Folders) -> Iterator[OnnxModel]:
    with load_folder(folders.whole()) as model:
        yield model


@pytest.fixture
def sequence(model: OnnxModel) -> Iterator[OnnxSequence]:
    with model.open(600) as sequence:
        assert isinstance(sequence._native, WholeContext)
        yield sequence


# ------------------------------------------------------------------------------------------------------ the scores


@pytest.mark.parametrize("head", ["plain", "scaled", "hidden"])
def test_whole_cache_graphs_score_like_llama_cpp(folders: Folders, head: str) -> None:
    with load_folder(folders.whole(head)) as model, model.open(SHORT) as sequence:
        tokens = ids(40, model)
        expected = llama_logits(folders.whole_source().with_suffix(".gguf"), tokens)
        found: list[LogitsArray] = []
        for count in (1, 9, 2, 28):
            found += logits(sequence.forward(tokens[len(found) : len(found) + count], count))
        assert np.abs(np.stack(found) - expected).max() < 1e-3 < expected.std()


@pytest.mark.parametrize("head", ["plain", "hidden"])
@pytest.mark.parametrize("pad_to", [1, 2])
def test_a_whole_cache_graph_scores_only_the_requested_rows(folders: Folders, head: str, pad_to: int) -> None:
    with load_folder(folders.whole(head), OnnxSettings(pad_to=pad_to)) as model, model.open(SHORT) as sequence:
        tokens = ids(12, model)
        whole = logits(sequence.forward(tokens, 12))
        for rows in (1, 5):
            sequence.rewind(0)
            found = logits(sequence.forward(tokens, rows))
            assert len(found) == rows
            assert all(near(left, right) for left, right in zip(found, whole[-rows:], strict=True))


@pytest.mark.parametrize("prompt_tokens", [1, 255, 300])
def test_whole_cache_forwards_padded_to_two_are_bit_equal_at_every_width(
    folders: Folders, prompt_tokens: int
) -> None:
    with load_folder(folders.whole(), OnnxSettings(pad_to=2)) as model, model.open(400) as sequence:
        prompt, text = ids(prompt_tokens, model), ids(8, model, 1)
        found = {}
        for width in (8, 1, 2, 3, 5):
            sequence.rewind(0)
            sequence.forward(prompt, 0)
            found[width] = [
                row
                for start in range(0, 8, width)
                for row in logits(sequence.forward(text[start : start + width], len(text[start : start + width])))
            ]
        assert all(equal(rows, found[8]) for rows in found.values())


# ------------------------------------------------------------------------------------------------------ the cache


def arrays(sequence: OnnxSequence) -> list[int]:
    """The addresses of the cache's arrays."""
    return [value.data_ptr() for value in sequence._native._past.values()]


def test_after_a_rewind_the_next_forward_copies_the_whole_cache_once(
    model: OnnxModel, sequence: OnnxSequence
) -> None:
    tokens = ids(40, model)
    sequence.forward(tokens[:30], 0)
    before = arrays(sequence)
    for length in (25, 20, 12):
        sequence.rewind(length)
    assert arrays(sequence) == before
    cut = count_cuts(sequence)
    after = sequence.forward(tokens[12:40], 1).logits(0)
    sequence.forward([5], 0)
    assert cut == [12]
    with model.open(600) as fresh:
        fresh.forward(tokens[:12], 0)
        assert near(fresh.forward(tokens[12:40], 1).logits(0), after)


def test_a_cut_cache_of_one_head_is_copied() -> None:
    """Its first positions have no gaps, and the graph's array ends with the cut."""
    values = api.OrtValue.ortvalue_from_numpy(np.arange(40, dtype=np.float32).reshape(1, 1, 5, 8))
    own = WholeContext.__new__(WholeContext)
    own._heads, own._width, own._held, own._past = 1, 8, 5, {"0.key": values}
    own._cut(SimpleNamespace(api=api), 3)  # type: ignore[arg-type]
    kept = own._past["0.key"]
    assert kept.data_ptr() not in range(values.data_ptr(), values.data_ptr() + 160)
    assert np.array_equal(kept.numpy(), np.arange(24, dtype=np.float32).reshape(1, 1, 3, 8))


def test_both_caches_of_a_forward_are_counted(folders: Folders) -> None:
    whole, shared = (read_model_file(folder) for folder in (folders.whole(), folders.shared()))
    for file, copies in ((whole, 2), (shared, 1)):
        needed = memory_needed(file, OnnxSettings(), 512)
        assert needed.cache_bytes == copies * estimate_memory(file.header, 512, 32).cache_bytes


def count_cuts(sequence: OnnxSequence) -> list[int]:
    native, found = sequence._native, list[int]()
    real = native._cut

    def cut(weights: Any, length: int) -> None:
        found.append(length)
        real(weights, length)

    native._cut = cut
    return found


def test_a_run_without_memory_for_the_next_cache_leaves_the_sequence_unchanged(sequence: OnnxSequence) -> None:
    def fail() -> None:
        raise RuntimeError("std::bad_alloc")

    sequence.forward([3, 4, 5], 0)
    sequence.rewind(2)
    watch(sequence, fail)
    with pytest.raises(MemoryLimitError):
        sequence.forward([5], 1)
    unwatch(sequence)
    assert (sequence.length, sequence.forward([5], 1).count) == (2, 1)


def test_a_graph_that_returns_a_wrong_cache_shape_raises_a_readable_error(
    sequence: OnnxSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence.forward([3, 4], 0)
    monkeypatch.setattr(sequence._native, "_shape", lambda length: [1, 2, length + 1, 16])
    with pytest.raises(ForwardError, match=r"present\.0\.key"):
        sequence.forward([5], 1)
    monkeypatch.undo()
    assert sequence.length == 2
    assert sequence.forward([5], 1).count == 1


def test_the_facts_of_a_whole_cache_graph_come_from_its_artefact(folders: Folders, model: OnnxModel) -> None:
    artefact = read_onnx_folder(folders.whole())
    assert (artefact.cache, artefact.static_cache, artefact.kept) == (WHOLE, None, None)
    assert model.facts.trained_context_length == LONGEST
    assert (model.facts.kv_type, model.facts.kv_bytes_per_token) == ("f32", 4 * 2 * 2 * 2 * artefact.key_length)
    assert 0 < model.facts.bytes_per_forward < model.facts.weight_bytes
