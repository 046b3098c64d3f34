"""Graphs with the whole cache as input and output, held to the contract; and their specifics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import CancelledError, ClosedError, ForwardError, MemoryLimitError
from edgespec.files.onnx.folder import read_onnx_folder
from edgespec.files.onnx.interface import WHOLE
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.onnx import whole as onnx_whole
from edgespec.runtimes.onnx.model import OnnxModel, OnnxSequence, load_onnx
from edgespec.runtimes.onnx.session import OnnxSettings
from edgespec.runtimes.onnx.whole import WholeContext
from tests.runtimes.contract import Runtime, SequenceContract, equal, ids, logits, near
from tests.runtimes.thread_contract import ThreadContract
from tests.support.tiny_onnx import llama_logits
from tests.support.whole_onnx import LONGEST, write_folder, write_whole_onnx

SHORT = 64


@dataclass(frozen=True)
class Folders:
    """Artefacts of one tiny model, written on first use."""

    place: Path

    def __call__(self, head: str = "plain", context_length: int = LONGEST) -> Path:
        folder = self.place / f"{head}-{context_length}"
        if not folder.exists():
            write_whole_onnx(self.source(context_length), folder, self.place, head=head)
        return folder

    def source(self, context_length: int = LONGEST) -> Path:
        source = self.place / f"source-{context_length}"
        return source if source.exists() else write_folder(source, context_length=context_length)


def load_folder(folder: Path, settings: OnnxSettings | None = None) -> OnnxModel:
    return load_onnx(read_onnx_folder(folder), settings or OnnxSettings())


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("whole-onnx"))


@pytest.fixture(scope="module")
def model(folders: Folders) -> Iterator[OnnxModel]:
    with load_folder(folders()) as model:
        yield model


@pytest.fixture
def sequence(model: OnnxModel) -> Iterator[OnnxSequence]:
    with model.open(600) as sequence:
        assert isinstance(sequence._native, WholeContext)
        yield sequence


class TestContract(SequenceContract, ThreadContract):
    @pytest.fixture(
        scope="class",
        params=[OnnxSettings(), OnnxSettings(threads=2, pad_to=2)],
        ids=["plain", "padded, on two threads"],
    )
    @classmethod
    def runtime(cls, request: pytest.FixtureRequest, folders: Folders) -> Runtime:
        return Runtime(
            open_model=lambda: load_folder(folders(), request.param),
            prefill_tokens=12_000,
            context_overhead_bytes=12 * 2**20,
        )


# ------------------------------------------------------------------------------------------------------ the scores


@pytest.mark.parametrize("head", ["plain", "scaled", "hidden"])
def test_whole_cache_graphs_score_like_llama_cpp(folders: Folders, head: str) -> None:
    with load_folder(folders(head)) as model, model.open(SHORT) as sequence:
        tokens = ids(40, model)
        expected = llama_logits(folders.source().with_suffix(".gguf"), tokens)
        found: list[LogitsArray] = []
        for count in (1, 9, 2, 28):
            found += logits(sequence.forward(tokens[len(found) : len(found) + count], count))
        assert np.abs(np.stack(found) - expected).max() < 1e-3 < expected.std()


@pytest.mark.parametrize("head", ["plain", "hidden"])
@pytest.mark.parametrize("pad_to", [1, 2])
def test_a_whole_cache_graph_scores_only_the_requested_rows(folders: Folders, head: str, pad_to: int) -> None:
    with load_folder(folders(head), OnnxSettings(pad_to=pad_to)) as model, model.open(SHORT) as sequence:
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
    with load_folder(folders(), OnnxSettings(pad_to=2)) as model, model.open(400) as sequence:
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


@pytest.mark.parametrize("pad_to", [1, 2])
def test_the_last_position_of_a_whole_cache_context_can_be_used(folders: Folders, pad_to: int) -> None:
    with load_folder(folders(context_length=SHORT), OnnxSettings(pad_to=pad_to)) as model:
        assert model.facts.trained_context_length == SHORT
        tokens = ids(SHORT, model)
        with model.open(SHORT) as sequence:
            sequence.forward(tokens[:-1], 0)
            last = sequence.forward(tokens[-1:], 1).logits(0)
            sequence.rewind(0)
            assert near(sequence.forward(tokens, 1).logits(0), last)


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


def count_cuts(sequence: OnnxSequence) -> list[int]:
    native, found = sequence._native, list[int]()
    real = native._cut

    def cut(weights: Any, length: int) -> None:
        found.append(length)
        real(weights, length)

    native._cut = cut
    return found


class WatchedSession:
    """A session that lets a test act before each run; otherwise the real session."""

    def __init__(self, session: Any, before: Callable[[], None]) -> None:
        self._session = session
        self._before = before

    def io_binding(self) -> Any:
        return self._session.io_binding()

    def run_with_iobinding(self, *arguments: Any) -> None:
        self._before()
        self._session.run_with_iobinding(*arguments)


def watch(sequence: OnnxSequence, before: Callable[[], None]) -> None:
    weights = sequence._native._weights
    sequence._native._weights = replace(weights, session=WatchedSession(weights.session, before))


def fail_with(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize("rewound", [37, 20])
def test_a_failed_or_cancelled_run_leaves_the_whole_cache_unchanged(
    model: OnnxModel, sequence: OnnxSequence, rewound: int
) -> None:
    tokens = ids(80, model)
    sequence.forward(tokens[:37], 0)
    sequence.rewind(rewound)
    for before, error in (
        (fail_with(RuntimeError("Error in execution:\n the device was lost")), ForwardError),
        (fail_with(RuntimeError("std::bad_alloc")), MemoryLimitError),
        (sequence.cancel, CancelledError),
    ):
        watch(sequence, before)
        with pytest.raises(error):
            sequence.forward(tokens[rewound:], 1)
        assert sequence.length == rewound
        sequence._native._weights = model._weights
        sequence.reset_cancel()
    after = sequence.forward(tokens[rewound:], 1).logits(0)
    with model.open(600) as fresh:
        fresh.forward(tokens[:rewound], 0)
        assert np.array_equal(fresh.forward(tokens[rewound:], 1).logits(0), after)


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


def test_too_little_memory_for_scores_raises_a_readable_error(
    model: OnnxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = np.empty

    def refuse(shape: object, **keywords: object) -> object:
        if isinstance(shape, tuple):  # scores; the other buffers are vectors of a few kilobytes
            raise MemoryError
        return empty(shape, **keywords)  # type: ignore[call-overload]

    monkeypatch.setattr(onnx_whole.np, "empty", refuse)
    with pytest.raises(MemoryLimitError) as raised:
        model.open(1000)
    assert raised.value.needed_bytes == 2 * 1000 * model.facts.kv_bytes_per_token


def test_a_closed_whole_cache_sequence_refuses_to_decode(model: OnnxModel) -> None:
    with model.open(SHORT) as sequence:
        sequence.forward([1, 2], 0)
    with pytest.raises(ClosedError):
        sequence._native.decode(np.array([1]), 0, 0)


def test_the_facts_of_a_whole_cache_graph_come_from_its_artefact(folders: Folders, model: OnnxModel) -> None:
    artefact = read_onnx_folder(folders())
    assert (artefact.cache, artefact.static_cache, artefact.kept) == (WHOLE, None, None)
    assert model.facts.trained_context_length == LONGEST
    assert (model.facts.kv_type, model.facts.kv_bytes_per_token) == ("f32", 4 * 2 * 2 * 2 * artefact.key_length)
    assert 0 < model.facts.bytes_per_forward < model.facts.weight_bytes
