"""A drafter with a trimmed head: bit-equal to the untrimmed model, in the source's ids."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.sampling import Sampling, distribution
from edgespec.errors import (
    CancelledError,
    ClosedError,
    ContextFullError,
    InvalidRequestError,
    ModelFileError,
    NonFiniteLogitsError,
    RuntimeUnavailableError,
    StaleRowsError,
)
from edgespec.files.trimmed_drafter import EmbeddingTable, read_artefact
from edgespec.interfaces.drawing import DrawRequest, Measure, draw_from
from edgespec.interfaces.rows import LogitsArray, Rows
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.llama.facts import describe_model
from edgespec.runtimes.llama.library import load
from edgespec.runtimes.llama.model import LlamaModel
from edgespec.runtimes.llama.trimmed import EmbeddingRows
from edgespec.runtimes.sequence import TrimmedRows
from tests.runtimes.contract import Runtime, SequenceContract
from tests.support.loading import load_model, located
from tests.support.tiny_gguf import Quant, write_tiny_gguf
from tests.support.trimmed_folder import record_file, write_tied, write_trimmed_folder

# With the padding 704 tokens. For some types llama.cpp's kernels take eight rows at a time, and other kernels take
# the remaining rows: rows are compared bit for bit where both heads have a multiple of eight.
PADDING_TOKENS, TOKENS, KEPT_ROWS = 31, 704, 400
QUANTS: tuple[Quant, ...] = ("F32", "Q8_0", "Q4_0")


def load_trimmed(folder: Path, settings: LlamaSettings | None = None) -> LlamaModel:
    return load_model(read_artefact(folder), settings or LlamaSettings())


def some_ids(count: int) -> list[int]:
    return sorted(np.random.default_rng(5).choice(TOKENS, count, replace=False).tolist())


KEPT = some_ids(KEPT_ROWS)
TRIMMED_AWAY = sorted(set(range(TOKENS)) - set(KEPT))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrimmed models of each type, with a separate head and with a tied one; heads of 32 for a quantised cache."""
    folder = tmp_path_factory.mktemp("sources")
    found: dict[str, Path] = {}
    for quant in QUANTS:
        path = write_tiny_gguf(folder / f"{quant}.gguf", quant=quant, width=128, extra_tokens=PADDING_TOKENS)
        found[quant], found[f"{quant} tied"] = path, write_tied(path, folder / f"{quant}-tied.gguf")
    return found


@pytest.fixture(scope="module")
def folders(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The folder of a model with that many rows kept, written on first use."""
    place = tmp_path_factory.mktemp("folders")

    def folder(name: str, rows: int) -> Path:
        path = place / f"{name}-{rows}"
        return path if path.exists() else write_trimmed_folder(sources[name], path, some_ids(rows))

    return folder


@pytest.fixture(scope="module")
def model(folders: Callable[[str, int], Path]) -> Iterator[LlamaModel]:
    """Q8_0 with a part of its rows."""
    with load_trimmed(folders("Q8_0", KEPT_ROWS)) as model:
        yield model


def held(folder: Path) -> Runtime:
    return Runtime(open_model=lambda: load_trimmed(folder), prefill_tokens=4000, context_overhead_bytes=12 * 2**20)


class TestContract(SequenceContract):
    """With all rows kept the whole contract holds; with a part, some scores are -infinity."""

    @pytest.fixture(scope="class", params=["Q8_0 tied", "Q4_0"])
    @classmethod
    def runtime(cls, request: pytest.FixtureRequest, folders: Callable[[str, int], Path]) -> Runtime:
        return held(folders(request.param, TOKENS))


# ------------------------------------------------------------------------------------------------------ scores


@pytest.mark.slow
@pytest.mark.parametrize("rows", [TOKENS, KEPT_ROWS])
@pytest.mark.parametrize("name", [f"{quant}{tied}" for quant in QUANTS for tied in ("", " tied")])
def test_a_trimmed_heads_scores_equal_those_of_the_untrimmed_model(
    sources: dict[str, Path], folders: Callable[[str, int], Path], name: str, rows: int
) -> None:
    kept = some_ids(rows)
    prompt = np.random.default_rng(1).integers(0, TOKENS, 300).tolist()
    with (
        load_model(sources[name], LlamaSettings()) as whole,
        load_trimmed(folders(name, rows)) as trimmed,
        whole.open(512) as left,
        trimmed.open(512) as right,
    ):
        assert trimmed.head_rows == rows
        for width in (300, 1, 2, 3, 4, 7):
            # The prompt holds trimmed tokens: they can be fed, but not proposed.
            scored = min(width, 4)
            expected, found = left.forward(prompt[:width], scored), right.forward(prompt[:width], scored)
            for index in range(scored):
                row = found.logits(index)
                assert (row.dtype, row.shape) == (np.dtype(np.float32), (TOKENS,))
                assert np.array_equal(row[kept], expected.logits(index)[kept]), (width, index)
                assert np.isneginf(np.delete(row, kept)).all()


def test_an_uneven_number_of_head_rows_gives_nearly_the_same_scores(
    sources: dict[str, Path], folders: Callable[[str, int], Path]
) -> None:
    kept = some_ids(137)
    with load_model(sources["Q4_0"], LlamaSettings()) as whole, load_trimmed(folders("Q4_0", 137)) as trimmed:
        expected = whole.open(64).forward(TRIMMED_AWAY[:9], 1).logits(0)[kept]
        found = trimmed.open(64).forward(TRIMMED_AWAY[:9], 1).logits(0)[kept]
        assert np.abs(expected - found).max() < 0.1 < np.abs(expected).max()


def test_argmax_and_top_k_of_a_trimmed_head_agree_with_numpy(model: LlamaModel) -> None:
    with model.open(64) as sequence:
        rows = sequence.forward(TRIMMED_AWAY[:40], 20)
        ids, scores = rows.top_k(5)
        assert (ids.dtype, scores.dtype) == (np.dtype(np.int64), np.dtype(np.float32))
        assert set(ids.ravel().tolist()) <= set(KEPT)
        for index in range(20):
            row = rows.logits(index)
            best = np.lexsort((np.arange(TOKENS), -row))[:5]
            assert rows.argmax()[index] == rows.argmax_row(index) == best[0]
            assert np.array_equal(ids[index], best)
            assert np.array_equal(scores[index], row[best])


def test_top_k_beyond_the_kept_rows_includes_trimmed_tokens(model: LlamaModel) -> None:
    with model.open(64) as sequence:
        ids, scores = sequence.forward([5, 6], 1).top_k(KEPT_ROWS + 3)
        assert sorted(ids[0, :KEPT_ROWS].tolist()) == KEPT
        assert ids[0, KEPT_ROWS:].tolist() == TRIMMED_AWAY[:3]
        assert np.isneginf(scores[0, KEPT_ROWS:]).all()


def test_equal_scores_of_a_trimmed_head_choose_the_lowest_source_id() -> None:
    ids = np.array([2, 5, 7, 11])
    row: LogitsArray = np.array([1, 3, 0, 3], dtype=np.float32)
    rows = TrimmedRows(Rows(1, lambda _index: row), ids, 20)
    assert rows.argmax_row(0) == 5
    assert rows.top_k(3)[0].tolist() == [[5, 11, 2]]
    assert rows.copy().argmax_row(0) == 5


def test_a_nan_score_of_a_trimmed_head_is_an_error() -> None:
    row: LogitsArray = np.array([1, np.nan], dtype=np.float32)
    with pytest.raises(NonFiniteLogitsError):
        TrimmedRows(Rows(1, lambda _index: row), np.array([3, 4]), 9).argmax_row(0)


@pytest.mark.parametrize("how", [{}, {"top_k": 600}, {"top_p": 0.9}, {"min_p": 0.1}, {"repeat_penalty": 1.3}])
def test_tokens_trimmed_from_the_head_have_probability_zero(model: LlamaModel, how: dict[str, Any]) -> None:
    with model.open(64) as sequence, warnings.catch_warnings():
        warnings.simplefilter("error")
        context = [*TRIMMED_AWAY[:5], *KEPT[:5]]
        row = sequence.forward(context, 1).logits(0)
        found = distribution(row, Sampling(temperature=0.8, **how), context)
        assert set(found.ids.tolist()) <= set(KEPT)
        assert found.probs.sum() == pytest.approx(1)
        told = DrawRequest(measure=Measure.ENTROPY)
        own, expected = draw_from(row, told), draw_from(row[KEPT], told)
        assert (own.odds, own.entropy) == (expected.odds, expected.entropy)


# ------------------------------------------------------------------------------------------- rewind, cancel, ids


def test_a_rewound_draft_does_not_change_a_trimmed_models_scores(model: LlamaModel) -> None:
    with model.open(400) as sequence, model.open(400) as plain:
        prompt = np.random.default_rng(2).integers(0, TOKENS, 290).tolist()
        sequence.forward(prompt, 0)
        plain.forward(prompt, 0)
        for step, token in enumerate(TRIMMED_AWAY[:10]):
            expected = plain.forward([token], 1).logits(0)
            assert np.array_equal(sequence.forward([token], 1).logits(0), expected), step
            sequence.forward(KEPT[: 1 + step % 5], 1)
            sequence.rewind(plain.length)


def test_a_trimmed_model_keeps_a_cancel_until_reset_and_its_rows_become_stale(model: LlamaModel) -> None:
    with model.open(64) as sequence:
        rows = sequence.forward([5, 6], 2)
        kept = rows.copy()
        expected = rows.logits(1)
        sequence.cancel()
        with pytest.raises(CancelledError):
            sequence.forward([7], 1)
        sequence.reset_cancel()
        assert sequence.length == 2
        sequence.forward([7], 1)
        uses: list[Callable[[], object]] = [
            rows.argmax,
            lambda: rows.argmax_row(0),
            lambda: rows.top_k(1),
            lambda: rows.top_k(500),
            lambda: rows.logits(0),
            rows.copy,
        ]
        for use in uses:
            with pytest.raises(StaleRowsError):
                use()
        assert np.array_equal(kept.logits(1), expected)
        with pytest.raises(IndexError):
            sequence.forward([8], 1).logits(1)


def test_a_trimmed_model_accepts_ids_of_its_sources_vocabulary_only(model: LlamaModel) -> None:
    with model.open(8) as sequence:
        sequence.forward([TOKENS - 1], 1)
        for bad in (-1, TOKENS, 2**32):
            with pytest.raises(InvalidRequestError, match=str(TOKENS - 1)):
                sequence.forward([bad], 1)
        with pytest.raises(ContextFullError):
            sequence.forward([1] * 8, 1)
        assert sequence.length == 1
    with pytest.raises(ClosedError):
        sequence.forward([1], 1)


def test_a_trimmed_model_with_another_cache_type_shares_weights_and_ids(model: LlamaModel) -> None:
    with model.with_settings(kv_type="f16") as other, other.open(32) as sequence:
        assert (other.facts.kv_type, other.facts.vocabulary_size) == ("f16", TOKENS)
        assert sequence.forward([TRIMMED_AWAY[0]], 1).argmax_row(0) in KEPT


# ------------------------------------------------------------------------------------------------------- facts


@pytest.mark.parametrize("name", ["Q8_0", "Q8_0 tied"])
def test_the_facts_of_a_trimmed_model_are_known_before_loading(
    sources: dict[str, Path], folders: Callable[[str, int], Path], name: str
) -> None:
    artefact = read_artefact(folders(name, KEPT_ROWS))
    with load_model(sources[name], LlamaSettings()) as whole, load_trimmed(artefact.folder) as trimmed:
        own, full = trimmed.facts, whole.facts
    assert (own.name, own.sha256) == ("drafter", artefact.identity)
    assert own.vocabulary_size == full.vocabulary_size == TOKENS
    tables = 1 if "tied" in name else 2
    row_bytes = artefact.embedding.row_bytes
    assert full.bytes_per_forward - own.bytes_per_forward == (TOKENS - KEPT_ROWS) * row_bytes
    assert full.weight_bytes - own.weight_bytes == tables * (TOKENS - KEPT_ROWS) * row_bytes
    said = describe_model(located(artefact), LlamaSettings())
    assert own == said  # measurements of a drafter are found before it is loaded


# ----------------------------------------------------------------------------------------------- the embedding


@pytest.mark.parametrize("quant", QUANTS)
def test_only_the_requested_embedding_rows_are_dequantised(folders: Callable[[str, int], Path], quant: str) -> None:
    table = read_artefact(folders(quant, KEPT_ROWS)).embedding
    rows, doubled = EmbeddingRows(table), EmbeddingRows(replace(table, scale=2.5))
    ids = np.array([TOKENS - 40, 3, 3])
    found = rows.read(ids)
    assert (found.dtype, found.shape) == (np.dtype(np.float32), (3, 128))
    assert np.array_equal(found[1], found[2])
    assert not np.array_equal(found[0], found[1])
    assert np.array_equal(doubled.read(ids), found * np.float32(2.5))


def test_a_repeated_tokens_embedding_row_is_dequantised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    path = tmp_path / "embedding.bin"
    table = gguf.quantize(np.arange(4 * 64, dtype=np.float32).reshape(4, 64), gguf.GGMLQuantizationType.Q8_0)
    path.write_bytes(table.tobytes())
    asked: list[int] = []
    real = gguf.dequantize

    def dequantize(data: np.ndarray, qtype: object) -> np.ndarray:
        asked.append(len(data))
        return real(data, qtype)

    monkeypatch.setattr(gguf, "dequantize", dequantize)
    rows = EmbeddingRows(table_of(path, "Q8_0", 68))
    asked.clear()
    first, again, other = (rows.read(np.array([token])) for token in (1, 1, 3))
    assert asked == [1, 1]
    assert np.array_equal(first, rows.read(np.array([2, 1]))[1:]), "as if read among others"
    assert again is first
    assert not np.array_equal(first, other)
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0] = 1.0


def table_of(path: Path, type_name: str, row_bytes: int) -> EmbeddingTable:
    return EmbeddingTable(path=path, type_name=type_name, rows=4, columns=64, row_bytes=row_bytes, scale=1.0)


def test_an_embedding_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "embedding.bin"
    path.write_bytes(bytes(4 * 36))
    for type_name in ("I16", "Q9_9"):  # no floating-point numbers, and no type at all
        with pytest.raises(ModelFileError, match=type_name) as raised:
            EmbeddingRows(table_of(path, type_name, 36))
        assert raised.value.hint
    with pytest.raises(ModelFileError, match="cannot be read"):
        EmbeddingRows(table_of(tmp_path / "absent.bin", "Q8_0", 68))
    with pytest.raises(ModelFileError, match="cannot be read"):
        EmbeddingRows(table_of(path, "F32", 256))  # shorter than it should be


def test_the_sizes_llama_cpp_reads_are_compared_with_the_trimmed_files(
    folders: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load().api, "llama_model_n_embd_inp", lambda _model: 256)
    with pytest.raises(ModelFileError, match="embeddings of 256 weights instead of 400 and 128") as raised:
        load_trimmed(folders("Q8_0", KEPT_ROWS))
    assert raised.value.hint
    monkeypatch.delattr(load().api, "llama_model_n_embd_inp")
    with pytest.raises(RuntimeUnavailableError, match="too old"):
        load_trimmed(folders("Q8_0", KEPT_ROWS))


def test_a_broken_trimmed_drafter_raises_a_readable_error(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = write_trimmed_folder(sources["Q8_0"], tmp_path / "broken", KEPT)
    path = folder / "drafter.gguf"
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_no.weight"))
    record_file(folder, path.name)
    with pytest.raises(ModelFileError, match="could not load"):
        load_trimmed(folder)
