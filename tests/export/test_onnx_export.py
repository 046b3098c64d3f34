"""The folder that an ONNX export writes, and failures that write nothing."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import (
    CancelledError,
    DiskSpaceError,
    InvalidRequestError,
    ModelFileError,
    RuntimeUnavailableError,
)
from edgespec.export.onnx import export as onnx_export
from edgespec.export.onnx.export import export_onnx
from edgespec.export.provenance import Provenance
from edgespec.files import disk
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.vocabulary import compare_vocabularies
from edgespec.files.onnx.folder import read_onnx_folder
from edgespec.files.progress import Job, ProgressEvent
from tests.support.provenance import described
from tests.support.tiny_onnx import VOCABULARY_SIZE, write_tiny_model

FILES = ("model.onnx", "model.onnx.data", "tokenizer.gguf")
KEPT = np.arange(0, VOCABULARY_SIZE, 2, dtype=np.int32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source") / "source.gguf", quant="Q4_0", head_quant="Q8_0")


def export(source: Path, folder: Path, **more: Any) -> Mapping[str, Any]:
    provenance, options = described(more, name="tiny", sha256="5" * 64)
    return export_onnx(source, folder, provenance, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --------------------------------------------------------------------------------------------- what is written


def test_an_onnx_export_writes_four_files_and_a_manifest(source: Path, tmp_path: Path) -> None:
    manifest = export(source, tmp_path / "out", licence="MIT")
    assert names(tmp_path / "out") == sorted([*FILES, "manifest.json"])
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    for name in FILES:
        content = (tmp_path / "out" / name).read_bytes()
        assert manifest["files"][name] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    header = read_header(source)
    said = {key: value for key, value in manifest.items() if key not in ("files", "tools", "edgespec", "tensors")}
    assert said == {
        "schema_version": 1,
        "kind": "onnx-model",
        "source": {"name": "tiny", "sha256": "5" * 64, "bytes": source.stat().st_size},
        "architecture": "llama",
        "vocabulary_size": VOCABULARY_SIZE,
        "kept": None,
        "quant": "keep",
        "context_length": 128,
        "block_count": 3,
        "embedding_length": 64,
        "head_count": 4,
        "head_count_kv": 2,
        "key_length": 32,
        "kv_type": "f32",
        "cache": "shared",
        "static_cache": None,
        "window": None,
        "licence": "MIT",
    }
    assert manifest["tensors"]["attn_qkv"] == "Q4_0 as 4-bit"
    assert set(manifest["tools"]) == {"gguf", "onnx"}
    assert compare_vocabularies(header, read_header(tmp_path / "out" / "tokenizer.gguf")) is None


def test_an_onnx_export_keeps_precision_and_all_rows_by_default(source: Path, tmp_path: Path) -> None:
    manifest = export_onnx(source, tmp_path / "out", Provenance(name="tiny"))
    assert (manifest["quant"], manifest["kept"], manifest["licence"]) == ("keep", None, None)
    assert manifest["source"]["sha256"] is None


@pytest.mark.parametrize("kept", [None, KEPT])
def test_the_onnx_reader_accepts_an_onnx_export(source: Path, tmp_path: Path, kept: Any) -> None:
    export(source, tmp_path / "out", kept=kept)
    artefact = read_onnx_folder(tmp_path / "out")
    assert artefact.vocabulary_size == VOCABULARY_SIZE
    assert artefact.kept == (None if kept is None else len(KEPT))
    assert (artefact.ids is None) == (kept is None)
    if artefact.ids is not None:
        assert artefact.ids.tolist() == KEPT.tolist()


def test_exporting_the_same_source_to_onnx_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    first, second = export(source, tmp_path / "a", kept=KEPT), export(source, tmp_path / "b", kept=KEPT)
    assert first == second


def test_onnx_weights_do_not_depend_on_the_piece_size(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = export(source, tmp_path / "a", kept=KEPT)
    monkeypatch.setattr(onnx_export, "_CHUNK_WEIGHTS", 200)
    assert export(source, tmp_path / "b", kept=KEPT) == whole


def test_an_onnx_export_replaces_only_earlier_exports(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "out")
    assert export(source, tmp_path / "out", quant="q4")["quant"] == "q4"
    assert names(tmp_path) == ["out"]
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(InvalidRequestError, match=r"mine\.txt"):
        export(source, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "precious"


# ------------------------------------------------------------------------------------- progress, cancellation


def test_onnx_export_progress_ends_at_the_size_of_the_data(source: Path, tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    manifest = export(source, tmp_path / "out", job=Job(events.append))
    total = manifest["files"]["model.onnx.data"]["bytes"]
    done = [event.done_bytes for event in events]
    assert {(event.stage, event.source, event.total_bytes) for event in events} == {
        ("writing", "model.onnx.data", total)
    }
    assert done == sorted(done)
    assert done[-1] == total
    assert len(done) > 10


@pytest.mark.parametrize("after", [0, 5, 40])
def test_a_cancelled_onnx_export_leaves_no_files(source: Path, tmp_path: Path, after: int) -> None:
    asked = []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) > after

    with pytest.raises(CancelledError):
        export(source, tmp_path / "out", job=Job(cancelled=cancelled))
    assert names(tmp_path) == []


def test_an_exception_of_the_progress_callback_ends_the_export(source: Path, tmp_path: Path) -> None:
    def stop(_event: ProgressEvent) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(source, tmp_path / "out", job=Job(stop))
    assert names(tmp_path) == []


# ------------------------------------------------------------------------------------------------- refusals


def test_an_onnx_export_checks_disk_space_before_any_write(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _path: 1000)
    with pytest.raises(DiskSpaceError) as raised:
        export(source, tmp_path / "out")
    assert raised.value.needed_bytes > read_header(source).tensor_bytes
    assert names(tmp_path) == []


def test_nan_or_infinite_weights_are_refused_by_the_onnx_export(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source.gguf", poison=True)
    for quant in ("keep", "q4"):
        with pytest.raises(ModelFileError, match=r"ffn_up\.weight holds weights that are not finite numbers"):
            export(source, tmp_path / "out", quant=quant)
    assert names(tmp_path) == ["source.gguf"]


def test_a_rotary_base_that_gives_nan_is_refused(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source.gguf", rope_factors=0.0)
    with pytest.raises(ModelFileError, match="rotary"):
        export(source, tmp_path / "out")


def test_an_onnx_export_into_the_folder_of_its_source_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_export, "plan_tables", lambda *_: pytest.fail("the tables were planned first"))
    inside = tmp_path / "source.gguf"
    inside.write_bytes(source.read_bytes())
    with pytest.raises(InvalidRequestError, match="would be replaced"):
        export(inside, tmp_path)


@pytest.mark.parametrize("kept", [[], [3, 2], [1, 1], [-1], [VOCABULARY_SIZE]])
def test_invalid_kept_ids_are_refused_by_the_onnx_export(source: Path, tmp_path: Path, kept: list[int]) -> None:
    with pytest.raises(InvalidRequestError):
        export(source, tmp_path / "out", kept=np.array(kept, dtype=np.int32))
    assert names(tmp_path) == []


def test_an_onnx_export_of_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ModelFileError, match="bad magic"):
        export(tmp_path / "a.gguf", tmp_path / "out")


def test_an_onnx_export_without_the_onnx_package_gives_the_install_command(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "edgespec.export.onnx.graph", raising=False)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(RuntimeUnavailableError, match="package onnx") as raised:
        export(source, tmp_path / "out")
    assert "[export]" in (raised.value.hint or "")
    assert names(tmp_path) == []
