"""A PARD drafter's mask token: from config.json into the files, the manifest and the facts of every runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ModelFileError
from edgespec.export.gguf.files import export_trimmed, export_whole
from edgespec.export.huggingface.config import read_config
from edgespec.export.huggingface.description import describe_folder
from edgespec.export.huggingface.gguf import export_from_folder
from edgespec.export.onnx.export import export_onnx
from edgespec.export.provenance import Provenance
from edgespec.files.gguf.header import read_header
from edgespec.files.onnx.folder import read_onnx_folder
from edgespec.files.trimmed_drafter import read_artefact
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.llama.facts import describe_model
from edgespec.runtimes.native.model import NativeSettings, describe_native
from edgespec.runtimes.onnx.model import OnnxSettings, describe_onnx
from tests.export.test_hf_gguf import same_tensors
from tests.support.hf_folder import write_hf_folder
from tests.support.loading import located
from tests.support.rewritten_gguf import rewrite_gguf
from tests.support.tiny_gguf import write_tiny_gguf

KEY = "edgespec.mask_token_id"
MASK = 300


def set_mask(folder: Path, value: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": value}))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("pard") / "source.gguf", quant="F32", architecture="llama")


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return set_mask(write_hf_folder(source, tmp_path / "pard-tiny"), MASK)


@pytest.fixture(scope="module")
def drafter(source: Path) -> Path:
    return rewrite_gguf(source, source.with_name("drafter.gguf"), keys={KEY: MASK})


def test_pard_token_becomes_the_mask_token_of_the_gguf_and_its_manifest(
    source: Path, folder: Path, tmp_path: Path
) -> None:
    manifest = export_from_folder(folder, tmp_path / "out", Provenance(name="tiny"))
    header = read_header(tmp_path / "out" / "model.gguf")
    assert header.mask_token_id == header.metadata[KEY] == manifest["mask_token_id"] == MASK
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["mask_token_id"] == MASK
    same_tensors(source, tmp_path / "out" / "model.gguf")


def test_a_folder_without_pard_token_states_no_mask(source: Path, tmp_path: Path) -> None:
    plain = write_hf_folder(source, tmp_path / "plain")
    assert read_config(plain).mask_token_id is None
    assert describe_folder(plain).mask_token_id is None
    manifest = export_from_folder(set_mask(plain, None), tmp_path / "out", Provenance(name="tiny"))
    assert "mask_token_id" not in manifest
    header = read_header(tmp_path / "out" / "model.gguf")
    assert header.mask_token_id is None
    assert KEY not in header.metadata


@pytest.mark.parametrize("value", [-1, 1.5, "151665", True, [3], {}, 2**40])
def test_a_pard_token_that_is_not_a_token_is_refused_in_one_sentence(
    folder: Path, tmp_path: Path, value: Any
) -> None:
    set_mask(folder, value)
    for read in (read_config, describe_folder):
        with pytest.raises(ModelFileError, match=r"pard_token must be a whole number from 0 to"):
            read(folder)
    with pytest.raises(ModelFileError, match="pard_token"):
        export_from_folder(folder, tmp_path / "out", Provenance(name="tiny"))
    assert not (tmp_path / "out").exists()


def test_a_pard_token_without_a_row_of_the_embedding_is_refused(source: Path, folder: Path, tmp_path: Path) -> None:
    rows = read_header(source).vocabulary_size
    set_mask(folder, rows)
    with pytest.raises(ModelFileError, match=f"pard_token is {rows}, and the embedding has {rows} rows"):
        export_from_folder(folder, tmp_path / "out", Provenance(name="tiny"))
    with pytest.raises(ModelFileError, match="pard_token"):
        describe_folder(folder)
    assert not (tmp_path / "out").exists()
    set_mask(folder, rows - 1)
    assert export_from_folder(folder, tmp_path / "out", Provenance(name="tiny"))["mask_token_id"] == rows - 1


@pytest.mark.parametrize("quant", ["keep", "q8_0"])
def test_copies_and_quantised_copies_keep_the_mask(drafter: Path, tmp_path: Path, quant: str) -> None:
    manifest = export_whole(drafter, tmp_path / "out", Provenance(name="tiny", quant=quant))
    assert manifest["mask_token_id"] == MASK
    assert read_header(tmp_path / "out" / "model.gguf").mask_token_id == MASK


@pytest.mark.parametrize("kept", [range(0, 600, 3), [each for each in range(600) if each != MASK]])
def test_a_trimmed_drafter_keeps_the_mask_whether_its_head_scores_it(
    drafter: Path, tmp_path: Path, kept: Any
) -> None:
    manifest = export_trimmed(drafter, tmp_path / "out", Provenance(name="tiny"), kept=np.array(kept, dtype=np.int32))
    assert manifest["mask_token_id"] == MASK
    artefact = read_artefact(tmp_path / "out")
    assert artefact.model_header.mask_token_id == MASK
    assert describe_native(located(artefact), NativeSettings(threads=1)).mask_id == MASK


def test_a_trimmed_drafter_with_a_mask_outside_its_vocabulary_is_refused(source: Path, tmp_path: Path) -> None:
    rows = read_header(source).vocabulary_size
    kept = np.arange(200, dtype=np.int32)
    folder = tmp_path / "out"
    marked = rewrite_gguf(source, tmp_path / "marked.gguf", keys={KEY: MASK})
    export_trimmed(marked, folder, Provenance(name="tiny"), kept=kept)
    path = folder / "drafter.gguf"
    content = path.read_bytes()
    place = content.index(KEY.encode()) + len(KEY) + 4  # after the value's type
    path.write_bytes(content[:place] + rows.to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(ModelFileError, match=f"mask token {rows} is not in the vocabulary"):
        read_artefact(folder)


def test_an_onnx_export_keeps_the_mask(drafter: Path, tmp_path: Path) -> None:
    manifest = export_onnx(drafter, tmp_path / "out", Provenance(name="tiny"))
    assert manifest["mask_token_id"] == MASK
    artefact = read_onnx_folder(tmp_path / "out")
    assert describe_onnx(located(artefact), OnnxSettings(threads=1)).mask_id == MASK


def test_every_runtimes_facts_name_the_mask(source: Path, drafter: Path) -> None:
    for path, mask in ((drafter, MASK), (source, None)):
        assert describe_native(located(path), NativeSettings(threads=1)).mask_id == mask
        assert describe_model(located(path), LlamaSettings(threads=1)).mask_id == mask
