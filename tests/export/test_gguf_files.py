from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from edgespec.errors import CancelledError, InvalidRequestError, ModelFileError
from edgespec.export import staging
from edgespec.export.gguf import files as gguf_files, parts as gguf_parts
from edgespec.export.gguf.files import check_destination, export_trimmed, export_whole
from edgespec.export.gguf.quantize import requantize
from edgespec.export.provenance import Provenance
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufArray, GgufHeader
from edgespec.files.progress import Job, ProgressEvent
from edgespec.runtimes.llama.library import load
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer
from tests.export.models import VOCABULARY_SIZE, WIDTH, loads, logits, write_model
from tests.support.provenance import described
from tests.support.split_gguf import split_gguf
from tests.support.tiny_gguf import write_tiny_gguf

EVERY_THIRD = np.arange(0, VOCABULARY_SIZE, 3, dtype=np.int32)
ALL = np.arange(VOCABULARY_SIZE, dtype=np.int32)
HEAD = struct.pack("<Q", len("output.weight")) + b"output.weight"  # the start of a tensor record
TOKENS = [1, 260, 270, 259, 40, 299, 2, 261]


def trim(source: Path, folder: Path, kept: npt.NDArray[Any] = EVERY_THIRD, **more: Any) -> Mapping[str, Any]:
    provenance, options = described(more, name="tiny")
    return export_trimmed(source, folder, provenance, kept=kept, **options)


def whole(source: Path, folder: Path, **more: Any) -> Mapping[str, Any]:
    provenance, options = described(more, name="x")
    return export_whole(source, folder, provenance, **options)


def tensors(path: Path) -> dict[str, bytes]:
    data, header = path.read_bytes(), read_header(path)
    return {each.name: data[each.offset : each.offset + each.byte_count] for each in header.tensors}


def values(header: GgufHeader) -> dict[str, object]:
    """Metadata without references to a file, for comparisons."""
    return {
        key: list(value.values()) if isinstance(value, GgufArray) else value for key, value in header.metadata.items()
    }


def embeddings(folder: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    """The embeddings of ``tokens``, looked up as the manifest states."""
    table = json.loads((folder / "manifest.json").read_text())["embedding"]
    kind = gguf.GGMLQuantizationType[table["type"]]
    raw = np.frombuffer((folder / "embedding.bin").read_bytes(), dtype=np.uint8).reshape(table["rows"], -1)
    rows = gguf.dequantize(raw.view(np.float32) if table["type"] == "F32" else raw, kind)[tokens]
    assert rows.shape == (len(tokens), table["columns"])
    return rows.astype(np.float32) * np.float32(table["scale"])


# ---------------------------------------------------------------------------------------- trimmed drafters


@pytest.mark.parametrize("name", ["untied", "tied", "bias", "f32"])
def test_a_trimmed_export_copies_kept_rows_and_other_tensors_unchanged(
    models: Path, tmp_path: Path, name: str
) -> None:
    source = models / f"{name}.gguf"
    manifest = trim(source, tmp_path / "out")
    before, after = tensors(source), tensors(tmp_path / "out" / "drafter.gguf")
    assert list(before) == list(after)
    tables = {"token_embd.weight", "output.weight", "output.bias"} & set(before)
    for each in set(before) - tables:
        assert after[each] == before[each]
    for each in tables:
        rows = np.frombuffer(before[each], dtype=np.uint8).reshape(VOCABULARY_SIZE, -1)
        assert after[each] == rows[EVERY_THIRD].tobytes()
    assert (tmp_path / "out" / "embedding.bin").read_bytes() == before["token_embd.weight"]
    ids = np.load(tmp_path / "out" / "ids.npy", allow_pickle=False)
    assert ids.dtype == np.int32
    assert ids.tolist() == EVERY_THIRD.tolist()
    # No llama has a bias on its head: llama.cpp refuses the source, and the drafter too.
    assert loads(tmp_path / "out" / "drafter.gguf") == loads(source) == (name != "bias")
    assert manifest["kept"] == len(EVERY_THIRD)


def test_a_trimmed_drafter_keeps_the_metadata_but_not_the_tokenizer(models: Path, tmp_path: Path) -> None:
    trim(models / "tied.gguf", tmp_path / "out")
    before = values(read_header(models / "tied.gguf"))
    after = values(read_header(tmp_path / "out" / "drafter.gguf"))
    changed = {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": len(EVERY_THIRD)}
    assert after == {key: value for key, value in before.items() if not key.startswith("tokenizer.")} | changed


def test_a_trimmed_export_replaces_a_stated_vocabulary_size(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "a.gguf", vocabulary=("▁", "a"))
    assert read_header(source).metadata["llama.vocab_size"] == 263
    trim(source, tmp_path / "out", np.arange(100, dtype=np.int32))
    assert read_header(tmp_path / "out" / "drafter.gguf").metadata["llama.vocab_size"] == 100


def test_the_exported_tokenizer_is_complete_and_loads_without_weights(models: Path, tmp_path: Path) -> None:
    trim(models / "untied.gguf", tmp_path / "out")
    path = tmp_path / "out" / "tokenizer.gguf"
    assert read_header(path).tensors == ()
    assert values(read_header(path)) == values(read_header(models / "untied.gguf"))
    ours, whole = LlamaTokenizer(path), LlamaTokenizer(models / "untied.gguf")
    assert ours.vocabulary_size == whole.vocabulary_size == VOCABULARY_SIZE
    assert ours.encode("w1 w40 é") == whole.encode("w1 w40 é")
    assert ours.stop_ids == whole.stop_ids


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("llama", False), ("llama", True), ("gemma", True), ("gemma2", True), ("gemma3", False), ("gemma3", True)],
)
def test_a_trimmed_drafter_fed_with_embeddings_computes_the_sources_logits(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    """Bit-equal with all rows; with fewer rows, kernels may sum in another order."""
    source = write_model(tmp_path / "a.gguf", architecture, tied=tied)
    expected = logits(source, TOKENS)
    trim(source, tmp_path / "all", ALL)
    assert np.array_equal(
        logits(tmp_path / "all" / "drafter.gguf", None, embeddings(tmp_path / "all", TOKENS)), expected
    )
    trim(source, tmp_path / "some")
    found = logits(tmp_path / "some" / "drafter.gguf", None, embeddings(tmp_path / "some", TOKENS))
    np.testing.assert_allclose(found, expected[:, EVERY_THIRD], atol=1e-5)


def test_the_manifest_of_a_trimmed_export_states_source_and_files(models: Path, tmp_path: Path) -> None:
    source = models / "untied.gguf"
    manifest = trim(source, tmp_path / "out", name="a name", sha256="ab" * 32, licence="MIT")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    assert manifest["schema_version"] == 1
    assert manifest["kind"] == "trimmed-drafter"
    assert manifest["source"] == {"name": "a name", "sha256": "ab" * 32, "bytes": source.stat().st_size}
    assert (manifest["architecture"], manifest["vocabulary_size"]) == ("llama", VOCABULARY_SIZE)
    assert (manifest["licence"], manifest["quant"]) == ("MIT", "keep")
    row_bytes = WIDTH // 32 * 34
    assert manifest["embedding"] == {
        "type": "Q8_0",
        "rows": VOCABULARY_SIZE,
        "columns": WIDTH,
        "bytes": VOCABULARY_SIZE * row_bytes,
        "scale": 1.0,
    }
    assert manifest["tensors"] == {"F32": 5, "Q8_0": 16}
    assert set(manifest["tools"]) == {"gguf"}
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {*manifest["files"], "manifest.json"}
    for name, record in manifest["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert record == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_facts_not_given_to_an_export_are_null_in_the_manifest(models: Path, tmp_path: Path) -> None:
    manifest = export_trimmed(models / "tied.gguf", tmp_path / "out", Provenance(name="tiny"), kept=ALL)
    assert manifest["licence"] is None
    assert manifest["source"]["sha256"] is None
    assert "trim" not in manifest
    assert manifest["quant"] == "keep"


@pytest.mark.parametrize("whole", [True, False])
def test_notes_become_the_trim_part_of_the_manifest(models: Path, tmp_path: Path, whole: bool) -> None:
    notes = {"ranked_by": "a text", "coverage_held_out": 0.98, "size_reasons": ("one", "two"), "forward_s": None}
    if whole:
        manifest = export_whole(models / "tied.gguf", tmp_path / "out", Provenance(name="x", notes=notes))
    else:
        manifest = trim(models / "tied.gguf", tmp_path / "out", notes=notes)
    assert manifest["trim"] == notes | {"size_reasons": ["one", "two"]}
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest


@pytest.mark.parametrize("notes", [{"a": float("nan")}, {"a": object()}])
def test_notes_that_are_not_json_are_refused_before_any_write(
    models: Path, tmp_path: Path, notes: dict[str, Any]
) -> None:
    for export in (trim, whole):
        with pytest.raises(InvalidRequestError, match="plain JSON"):
            export(models / "tied.gguf", tmp_path / "new" / "out", notes=notes)
    assert list(tmp_path.iterdir()) == []


def test_check_destination_accepts_new_and_exported_folders_only(models: Path, tmp_path: Path) -> None:
    source = models / "tied.gguf"
    check_destination(source, tmp_path / "new")
    check_destination(source, tmp_path)
    export_whole(source, tmp_path / "out", Provenance(name="tiny"))
    check_destination(source, tmp_path / "out")
    with pytest.raises(InvalidRequestError, match="would be replaced"):
        check_destination(tmp_path / "out" / "model.gguf", tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(InvalidRequestError, match="would be replaced"):
        check_destination(tmp_path / "out" / "model.gguf", tmp_path / "link")
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(InvalidRequestError, match="the folder is unchanged"):
        check_destination(source, tmp_path / "out")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.integers(0, 99), min_size=1), st.integers(1, 9), st.integers(1, 64))
def test_any_kept_rows_are_copied_for_any_read_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: set[int], row_bytes: int, chunk_bytes: int
) -> None:
    table = np.random.default_rng(row_bytes).integers(0, 256, (100, row_bytes), dtype=np.uint8)
    path = tmp_path / "table"
    path.write_bytes(b"12345" + table.tobytes())
    ids = np.array(sorted(kept), dtype=np.int32)
    with monkeypatch.context() as patched, path.open("rb") as file:
        patched.setattr(gguf_parts, "CHUNK_BYTES", chunk_bytes)
        pieces = list(gguf_parts.read_part(gguf_parts.Rows(5, row_bytes, ids), file, path))
    assert b"".join(pieces) == table[ids].tobytes()
    assert max(map(len, pieces)) <= max(chunk_bytes, row_bytes)


def test_gguf_exports_copy_in_small_pieces(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trim(models / "untied.gguf", tmp_path / "a")
    monkeypatch.setattr(gguf_parts, "CHUNK_BYTES", 1000)
    trim(models / "untied.gguf", tmp_path / "b")
    for name in ("drafter.gguf", "embedding.bin", "tokenizer.gguf"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


# ------------------------------------------------------------------------------------------ whole models


def test_exporting_a_whole_gguf_copies_it_and_adds_a_manifest(models: Path, tmp_path: Path) -> None:
    source = models / "tied.gguf"
    manifest = export_whole(source, tmp_path / "out", Provenance(name="tiny"))
    assert (tmp_path / "out" / "model.gguf").read_bytes() == source.read_bytes()
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    assert (manifest["kind"], manifest["quant"], manifest["licence"]) == ("gguf", "keep", None)
    assert list(manifest["files"]) == ["model.gguf"]
    assert "embedding" not in manifest


def test_a_requantised_export_loads_and_states_its_tools(models: Path, tmp_path: Path) -> None:
    manifest = export_whole(models / "f32.gguf", tmp_path / "out", Provenance(name="tiny", quant="Q8_0"))
    header = read_header(tmp_path / "out" / "model.gguf")
    assert manifest["quant"] == "q8_0"
    assert manifest["tools"]["llama.cpp"] == load().build
    assert manifest["tensors"] == {"F32": 5, "Q8_0": 16}
    assert manifest["files"]["model.gguf"]["bytes"] == header.file_bytes
    assert manifest["source"]["bytes"] == (models / "f32.gguf").stat().st_size
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.gguf", "manifest.json"}
    assert loads(tmp_path / "out" / "model.gguf")


def test_a_trimmed_export_can_be_requantised(models: Path, tmp_path: Path) -> None:
    manifest = trim(models / "f32.gguf", tmp_path / "out", quant="q8_0", threads=2)
    assert manifest["embedding"]["type"] == "Q8_0"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*manifest["files"], "manifest.json"}
    found = logits(tmp_path / "out" / "drafter.gguf", None, embeddings(tmp_path / "out", TOKENS))
    expected = logits(models / "f32.gguf", TOKENS)[:, EVERY_THIRD]
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.999


def test_requantising_uses_the_given_threads_and_checks_disk_space(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is one thread; a trimmed drafter temporarily also needs space for the whole model."""
    source, threads, room = models / "f32.gguf", [], []

    def recording(*arguments: Any, **more: Any) -> GgufHeader:
        threads.append(arguments[3])
        return requantize(*arguments, **more)

    def asked(_path: Path, needed_bytes: int, _what: str, *, hint: str) -> None:
        assert "export to a folder" in hint
        room.append(needed_bytes)

    monkeypatch.setattr(gguf_files, "requantize", recording)
    monkeypatch.setattr(staging, "require_space", asked)
    whole = export_whole(source, tmp_path / "a", Provenance(name="x", quant="f16"))
    export_whole(source, tmp_path / "b", Provenance(name="x", quant="f16"), threads=2)
    cut = trim(source, tmp_path / "c", quant="f16")
    trim(source, tmp_path / "d", quant="f16", threads=2)
    kept = trim(source, tmp_path / "e")
    assert threads == [1, 2, 1, 2]

    def written(manifest: Mapping[str, Any]) -> int:
        return sum(record["bytes"] for record in manifest["files"].values())

    assert written(whole) <= room[0] == room[1] < 1.1 * written(whole)
    assert room[2] == room[3] > written(whole) + written(cut) - 20_000  # the tokenizer does not shrink
    assert room[4] == written(kept)


# ------------------------------------------------------------------------------- progress and cancelling


def test_gguf_export_progress_ends_at_the_total(models: Path, tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    manifest = trim(models / "untied.gguf", tmp_path / "out", job=Job(events.append))
    total = sum(record["bytes"] for record in manifest["files"].values())
    done = [event.done_bytes for event in events]
    assert done == sorted(done)
    assert done[-1] == total
    assert {event.total_bytes for event in events} == {total}


@pytest.mark.parametrize("after", [0, 3, 10])
def test_cancelling_a_gguf_export_leaves_no_files(models: Path, tmp_path: Path, after: int) -> None:
    asked = iter([False] * after)
    with pytest.raises(CancelledError):
        trim(models / "untied.gguf", tmp_path / "out", job=Job(cancelled=lambda: next(asked, True)))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "kept",
    [
        np.array([], dtype=np.int32),
        np.array([[1, 2]], dtype=np.int32),
        np.array([1.0, 2.0]),
        np.array([2, 1], dtype=np.int32),
        np.array([1, 1], dtype=np.int32),
        np.array([-1, 1], dtype=np.int32),
        np.array([1, VOCABULARY_SIZE], dtype=np.int32),
        np.array([1, 2**40]),
    ],
)
def test_invalid_kept_ids_are_refused(models: Path, tmp_path: Path, kept: npt.NDArray[Any]) -> None:
    with pytest.raises(InvalidRequestError, match="to keep"):
        trim(models / "untied.gguf", tmp_path / "out", kept)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_quantisation_is_refused_before_any_write(models: Path, tmp_path: Path) -> None:
    for export in (trim, whole):
        with pytest.raises(InvalidRequestError, match="q3_7"):
            export(models / "untied.gguf", tmp_path / "new" / "out", quant="q3_7")
    assert list(tmp_path.iterdir()) == []


def test_exports_of_broken_ggufs_are_refused_and_write_nothing(models: Path, tmp_path: Path) -> None:
    data = (models / "untied.gguf").read_bytes()
    source = tmp_path / "in" / "a.gguf"
    source.parent.mkdir()
    for content in (b"", b"GGUF", data[:-40_000], data[:500], b"PK\3\4" + data[4:]):
        source.write_bytes(content)
        for export in (trim, whole):
            with pytest.raises(ModelFileError):
                export(source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"token_embd.weight", b"token_embe.weight", "not a language model"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokans", "no vocabulary"),
    ],
)
def test_ggufs_that_cannot_be_trimmed_are_refused(
    models: Path, tmp_path: Path, old: bytes, new: bytes, reason: str
) -> None:
    data = (models / "untied.gguf").read_bytes()
    assert data.count(old) == 1
    source = tmp_path / "a.gguf"
    source.write_bytes(data.replace(old, new))
    with pytest.raises(ModelFileError, match=reason):
        trim(source, tmp_path / "out")


def test_trimming_a_model_with_another_token_table_is_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf")
    source.write_bytes(source.read_bytes().replace(HEAD, HEAD.replace(b"output", b"second")))
    with pytest.raises(ModelFileError, match="looks up by token") as caught:
        trim(source, tmp_path / "out")
    assert "without trimming" in (caught.value.hint or "")


def test_trimming_a_head_whose_rows_differ_from_the_tokens_is_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf")
    data = bytearray(source.read_bytes())
    at = data.index(HEAD) + len(HEAD) + 4 + 8  # after the dimension count and the first dimension
    struct.pack_into("<Q", data, at, VOCABULARY_SIZE - 1)
    source.write_bytes(data)
    with pytest.raises(ModelFileError, match="lacks rows for"):
        trim(source, tmp_path / "out")


def test_an_export_never_replaces_the_folder_of_its_source(models: Path, tmp_path: Path) -> None:
    export_whole(models / "tied.gguf", tmp_path / "out", Provenance(name="tiny"))
    with pytest.raises(InvalidRequestError, match="would be replaced"):
        trim(tmp_path / "out" / "model.gguf", tmp_path / "out")
    assert (tmp_path / "out" / "model.gguf").is_file()


def test_a_source_that_shrinks_during_the_export_raises(models: Path, tmp_path: Path) -> None:
    source = tmp_path / "in" / "a.gguf"
    source.parent.mkdir()
    source.write_bytes((models / "untied.gguf").read_bytes())

    def cut(_event: ProgressEvent) -> None:
        with source.open("rb+") as file:
            file.truncate(100)

    with pytest.raises(ModelFileError, match="shorter"):
        trim(source, tmp_path / "out", job=Job(cut))
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


# -------------------------------------------------------------------------------------------- split sources


@pytest.fixture
def split(models: Path, tmp_path: Path) -> Path:
    """Any part except the first of the split model ``tied``."""
    return split_gguf(models / "tied.gguf", tmp_path / "set", tensors=9, name="tied")[1]


def test_exporting_a_split_model_writes_one_file(models: Path, split: Path, tmp_path: Path) -> None:
    manifest = export_whole(split, tmp_path / "out", Provenance(name="tied"))
    out, source = read_header(tmp_path / "out" / "model.gguf"), read_header(models / "tied.gguf")
    assert out.split == ()
    assert "split.count" not in out.metadata
    assert values(out) == values(source)
    assert tensors(out.path) == tensors(source.path)
    assert manifest["source"]["bytes"] == sum(path.stat().st_size for path in split.parent.iterdir())
    assert logits(out.path, TOKENS).tobytes() == logits(source.path, TOKENS).tobytes()


def test_a_split_model_can_be_trimmed(models: Path, split: Path, tmp_path: Path) -> None:
    trim(models / "tied.gguf", tmp_path / "whole")
    trim(split, tmp_path / "split")
    for name in ("drafter.gguf", "embedding.bin", "ids.npy", "tokenizer.gguf"):
        if name.endswith("gguf"):
            one, other = (tmp_path / folder / name for folder in ("whole", "split"))
            assert values(read_header(one)) == values(read_header(other))
            assert tensors(one) == tensors(other)
        else:
            assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "split" / name).read_bytes()


def test_a_split_model_can_be_requantised(split: Path, tmp_path: Path) -> None:
    export_whole(split, tmp_path / "out", Provenance(name="tied", quant="q8_0"))
    assert read_header(tmp_path / "out" / "model.gguf").split == ()
    assert loads(tmp_path / "out" / "model.gguf")


def test_a_part_that_shrinks_during_the_export_raises(
    split: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(split)
    monkeypatch.setattr(gguf_files, "read_header", lambda _path: header)
    split.write_bytes(split.read_bytes()[:64])
    with pytest.raises(ModelFileError, match="became shorter after its header was read"):
        export_whole(split, tmp_path / "out", Provenance(name="tied"))
