"""Parts of a native model: rows of the head, and hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ClosedError, InvalidRequestError, StaleRowsError
from edgespec.files.gguf.header import read_header
from edgespec.interfaces.model import FrequentHeadSequence
from edgespec.interfaces.rows import IdArray, LogitsArray
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from tests.runtimes.contract import equal, ids, logits
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.tiny_gguf import write_tiny_gguf

require_native()

SHAPE: dict[str, Any] = {"width": 128, "layers": 4, "quant": "Q4_0"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("parts") / "tiny.gguf", **SHAPE)


@pytest.fixture(scope="module")
def model(file: Path) -> Iterator[NativeModel]:
    with load_native(file, NativeSettings(threads=2)) as model:
        yield model


def rows_of(model: NativeModel, tokens: list[int]) -> list[LogitsArray]:
    with model.open(len(tokens)) as sequence:
        sequence.forward(tokens[:-5], 0)
        return logits(sequence.forward(tokens[-5:], 5))


# -------------------------------------------------------------------------------------------- rows of the head


@pytest.mark.parametrize("settings", [{}, {"architecture": "qwen2", "tied": True, "quant": "Q8_0"}])
def test_a_short_heads_scores_equal_the_whole_heads(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **SHAPE | settings)
    with load_native(path, NativeSettings(threads=2)) as model:
        size = model.facts.vocabulary_size
        kept = np.sort(np.random.default_rng(1).permutation(size)[:100])
        tokens = ids(30, model)  # of the whole vocabulary
        whole = rows_of(model, tokens)
        with model.with_head_rows(kept) as part, part.open(40) as sequence:
            assert part.facts.vocabulary_size == size
            assert part.facts.settings["head_rows"] == 100
            table = next(t for t in read_header(path).tensors if t.name in ("output.weight", "token_embd.weight"))
            saved = model.facts.bytes_per_forward - part.facts.bytes_per_forward
            assert saved == table.byte_count // size * (size - 100)
            sequence.forward(tokens[:-5], 0)
            rows = sequence.forward(tokens[-5:], 5)
            for index, expected in enumerate(whole):
                row = rows.logits(index)
                assert np.array_equal(row[kept], expected[kept])
                assert np.isneginf(np.delete(row, kept)).all()
                assert rows.argmax_row(index) == kept[np.argmax(expected[kept])]
            best, scores = rows.top_k(3)
            order = kept[np.argsort(-whole[0][kept], kind="stable")[:3]]
            assert np.array_equal(best[0], order)
            assert np.array_equal(scores[0], whole[0][order])
            tree = sequence.forward_tree([1, 2], [-1, 0])
            assert tree.argmax_row(1) in kept
            sequence.keep([0])
            with pytest.raises(StaleRowsError):
                tree.argmax()


def test_a_model_with_a_short_head_outlives_the_whole_model(file: Path) -> None:
    model = load_native(file, NativeSettings())
    part = model.with_head_rows(np.arange(50))
    tokens = ids(12, model)
    expected = rows_of(part, tokens)
    model.close()
    assert equal(rows_of(part, tokens), expected)
    with part.with_settings(threads=3) as beside:
        assert beside.facts == part.facts_with(threads=3)
        assert beside.facts.settings == part.facts.settings
        assert equal(rows_of(beside, tokens), expected)
    part.close()
    for use in (lambda: model.with_head_rows(np.arange(3)), part.facts_with):
        with pytest.raises(ClosedError):
            use()


@pytest.mark.parametrize("rows", [[], [2, 1], [1, 1], [-1, 2], [5, 10**6], [[1, 2]], [0.5, 2.0]])
def test_invalid_head_rows_are_refused(model: NativeModel, rows: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match="rows of a head"):
        model.with_head_rows(np.array(rows))


@pytest.mark.parametrize(
    "kept",
    [np.arange(5, 105), np.arange(100), np.array([*range(40), 60, 61, 300]), np.array([0, 9])],
    ids=["laid out", "in place", "both", "few"],
)
def test_a_sequence_can_switch_between_its_short_and_whole_head(model: NativeModel, kept: IdArray) -> None:
    """On the same cache, which stays unchanged; scores are bit-equal to the whole head's."""
    tokens, more = ids(30, model), [200, 3, 170, int(kept[1])]
    whole = rows_of(model, tokens)[-1]
    few, some = np.full_like(whole, -np.inf), np.full_like(whole, -np.inf)
    few[kept] = some[kept] = whole[kept]
    one = few.copy()
    one[200] = whole[200]
    some[more] = whole[more]
    with model.with_head_rows(kept) as part, part.open(40) as sequence:
        assert isinstance(sequence, FrequentHeadSequence)
        assert sequence.frequent_ids == set(kept.tolist())
        sequence.forward(tokens[:-1], 0)
        course: list[tuple[Callable[[], None], LogitsArray]] = [
            (lambda: None, few),
            (sequence.score_all, whole),
            (sequence.score_all, whole),
            (lambda: sequence.score_frequent(more), some),
            (lambda: sequence.score_frequent(set(more)), some),
            (sequence.score_frequent, few),
            (lambda: sequence.score_frequent(more[:1]), one),
            (lambda: sequence.score_frequent(kept[:2].tolist()), few),
            (sequence.score_all, whole),
        ]
        for choose, expected in course:
            choose()
            assert sequence.length == 29
            rows = sequence.forward(tokens[-1:], 1)
            assert np.array_equal(rows.logits(0), expected)
            assert rows.argmax() == [np.argmax(expected)]
            assert rows.top_k(2)[0][0, 0] == np.argmax(expected)
            tree = sequence.forward_tree(tokens[:3], [-1, -1, 1])
            for index in range(3):
                assert np.array_equal(tree.logits(index) > -np.inf, expected > -np.inf)
            sequence.rewind(29)
            with sequence.fork() as fork:
                assert np.array_equal(fork.forward(tokens[-1:], 1).logits(0), expected)


def test_rows_become_stale_when_the_head_changes(model: NativeModel) -> None:
    with model.with_head_rows(np.arange(9)) as part, part.open(40) as sequence:
        changes: list[Callable[[], None]] = [sequence.score_all, sequence.score_frequent]
        for change in (*changes, lambda: sequence.score_frequent([20])):
            rows = sequence.forward([1], 1)
            change()
            for use in (rows.argmax, lambda rows=rows: rows.logits(0), lambda rows=rows: rows.top_k(1)):
                with pytest.raises(StaleRowsError):
                    use()
            rows = sequence.forward([1], 1)
            change()
            assert rows.argmax(), "nothing changed"
        for strange in ([-1], [10**6]):
            with pytest.raises(InvalidRequestError, match="token ids"):
                sequence.score_frequent(strange)
        assert np.isfinite(sequence.forward([1], 1).logits(0)).sum() == 10, "as before"
    for change in changes:
        with pytest.raises(ClosedError):
            change()


def test_a_sequence_with_a_whole_head_always_scores_all_tokens(model: NativeModel) -> None:
    tokens = ids(8, model)
    with model.open(10) as sequence:
        assert sequence.frequent_ids is None
        sequence.score_frequent([3])
        sequence.forward(tokens[:-5], 0)
        assert equal(logits(sequence.forward(tokens[-5:], 5)), rows_of(model, tokens))


# ---------------------------------------------------------------------------------------------- hidden states


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_hidden_states_equal_the_input_of_the_next_layer(tmp_path: Path, architecture: Any) -> None:
    shape = SHAPE | {"architecture": architecture, "quant": "F32"}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **shape)
    with load_native(path, NativeSettings(threads=2)) as model, model.open(60, keep_hidden=(0, 2, 3, -1)) as sequence:
        tokens = ids(50, model)
        plain = rows_of(model, tokens)
        sequence.forward(tokens[:-5], 0)
        assert equal(logits(sequence.forward(tokens[-5:], 5)), plain), "looking changes nothing"
        for layer in (0, 2, 3):
            found = sequence.hidden(layer)
            assert (found.shape, found.dtype) == ((5, 128), np.float32)
            rest = tuple(range(layer + 1, 4))
            cut = write_tiny_gguf(tmp_path / "cut.gguf", leave_out=rest, **shape)
            with load_native(cut, NativeSettings()) as part, part.open(60, keep_hidden=[layer, -1]) as shorter:
                shorter.forward(tokens[:-5], 0)
                shorter.forward(tokens[-5:], 5)
                assert np.array_equal(shorter.hidden(layer), found)
                # The tiny models' last norm has weights of 1.
                exact = found.astype(np.float64)
                normed = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5)
                assert np.abs(shorter.hidden(-1) - normed).max() < 1e-5
        # The same rows one by one, and as a tree.
        found = sequence.hidden(2)
        sequence.rewind(45)
        sequence.forward_tree(tokens[-5:], [-1, 0, 1, 2, 3])
        assert np.array_equal(sequence.hidden(2), found)
        sequence.forward(tokens[-5:-4], 1)
        assert np.array_equal(sequence.hidden(2), found[:1])
        with sequence.fork() as fork:
            fork.forward(tokens[-4:], 1)
            assert np.array_equal(fork.hidden(2), found[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("threads", [1, 3])
def test_scoring_few_rows_of_a_forward_gives_the_same_scores(tmp_path: Path, architecture: Any, threads: int) -> None:
    """The last layer computes only the scored rows, if these are at most half of the rows."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **SHAPE | {"architecture": architecture, "quant": "Q4_0"})
    layers = (0, 2, 3, -1)
    settings = NativeSettings(threads=threads)
    with load_native(path, settings) as model, model.open(300, keep_hidden=layers) as sequence:
        tokens = ids(280, model)
        plain, kept = [], {layer: [] for layer in layers}
        for token in tokens:
            plain += logits(sequence.forward([token], 1))
            for layer in layers:
                kept[layer].append(sequence.hidden(layer)[0])
        for width in (2, 3, 40, 250):
            for scored in sorted({1, width // 2, width // 2 + 1, width} & set(range(1, 33))):
                sequence.rewind(280 - width)
                assert equal(logits(sequence.forward(tokens[-width:], scored)), plain[-scored:]), (width, scored)
                for layer in layers:
                    assert np.array_equal(sequence.hidden(layer), kept[layer][-scored:]), (width, scored, layer)


def test_hidden_states_that_are_not_kept_or_stale_raise(model: NativeModel) -> None:
    for strange in (4, -2):
        with pytest.raises(InvalidRequestError, match="no layer"):
            model.open(20, keep_hidden=[strange])
    with model.open(20, keep_hidden=[1]) as sequence:
        with pytest.raises(StaleRowsError):
            sequence.hidden(1)
        sequence.forward([1, 2, 3], 2)
        assert sequence.hidden(1).shape == (2, 128)
        for unasked in (0, -1):
            with pytest.raises(InvalidRequestError, match="not kept"):
                sequence.hidden(unasked)
        sequence.rewind(1)
        with pytest.raises(StaleRowsError):
            sequence.hidden(1)
        sequence.forward([1, 2], 0)
        with pytest.raises(StaleRowsError):
            sequence.hidden(1)
    with pytest.raises(ClosedError):
        sequence.hidden(1)
