"""Folders with a trimmed drafter: facts of a valid folder, and quick refusal of damaged folders."""

from __future__ import annotations

import io
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.vocabulary import compare_vocabularies
from edgespec.files.trimmed_drafter import is_trimmed_drafter, read_artefact
from tests.support.damaged_folders import refusal
from tests.support.raw_gguf import ARCH, U32, build
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.trimmed_folder import edit_manifest, record_file, write_trimmed_folder

KEPT = range(3, 523)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("source") / "source.gguf", quant="Q8_0")


@pytest.fixture(scope="module")
def sound(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trimmed_folder(source, tmp_path_factory.mktemp("sound") / "small", KEPT, scale=8)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "small"))


# ------------------------------------------------------------------------------------------------- a sound one


def test_a_valid_trimmed_drafter_gives_the_facts_of_its_source(sound: Path, source: Path) -> None:
    artefact, header = read_artefact(sound), read_header(source)
    assert (artefact.folder, artefact.path) == (sound, sound / "drafter.gguf")
    assert artefact.ids.dtype == np.int32
    assert artefact.ids.tolist() == list(KEPT)
    with pytest.raises(ValueError, match="read-only"):
        artefact.ids[0] = 1
    table = artefact.embedding
    assert (table.type_name, table.rows, table.columns) == ("Q8_0", header.vocabulary_size, 64)
    assert (table.row_bytes, table.scale) == (68, 8.0)
    assert table.path.stat().st_size == table.rows * table.row_bytes
    assert artefact.manifest["kept"] == len(KEPT)
    assert artefact.header.metadata["llama.vocab_size"] == len(KEPT)
    assert artefact.tokenizer_header.tensors == ()
    assert artefact.identity.startswith("trimmed:")


def test_a_trimmed_drafters_model_header_has_the_sources_vocabulary(sound: Path, source: Path) -> None:
    artefact, header = read_artefact(sound), read_header(source)
    model = artefact.model_header
    assert model.vocabulary_size == header.vocabulary_size
    assert compare_vocabularies(header, model) is None
    assert model.chat_template == header.chat_template
    assert (model.context_length, model.block_count) == (header.context_length, header.block_count)
    rows_left_out = header.vocabulary_size - len(KEPT)
    assert header.bytes_per_forward - model.bytes_per_forward == rows_left_out * artefact.embedding.row_bytes


def test_a_trimmed_drafter_is_recognised_by_its_manifest(sound: Path, tmp_path: Path) -> None:
    assert is_trimmed_drafter(sound)
    assert not is_trimmed_drafter(tmp_path)
    assert not is_trimmed_drafter(tmp_path / "absent")
    (tmp_path / "manifest.json").write_text('{"schema_version": 1, "kind": "gguf"}')
    assert not is_trimmed_drafter(tmp_path)


@pytest.mark.parametrize("manifest", [None, b"", b"{", b"[]", b"\xff\xfe"])
def test_a_trimmed_drafter_is_recognised_without_a_readable_manifest(folder: Path, manifest: bytes | None) -> None:
    (folder / "manifest.json").unlink()
    if manifest is not None:
        (folder / "manifest.json").write_bytes(manifest)
    assert is_trimmed_drafter(folder)
    assert "manifest.json" in refusal(read_artefact, folder).message
    (folder / "ids.npy").unlink()
    assert not is_trimmed_drafter(folder)


@pytest.mark.parametrize("change", [-68, 68, -1])
def test_an_embedding_file_that_does_not_fit_the_vocabulary_is_refused(folder: Path, change: int) -> None:
    path = folder / "embedding.bin"
    content = path.read_bytes()
    path.write_bytes((content + bytes(68))[: len(content) + change])
    record_file(folder, path.name)
    assert "instead of" in refusal(read_artefact, folder).message


# ------------------------------------------------------------------------------------------------ the manifest


def setting(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (setting("kept", value=519), "kept is 519"),
        (setting("vocabulary_size", value=520), "vocabulary_size"),
        (setting("embedding", value=None), "embedding"),
        (setting("embedding", "type", value="Q9_9"), "Q9_9"),
        (setting("embedding", "type", value=["Q8_0"]), "not known"),
        (setting("embedding", "type", value="Q6_K"), "do not fill"),
        (setting("embedding", "type", value="F16"), "bytes"),
        (setting("embedding", "rows", value=520), "rows"),
        (setting("embedding", "columns", value=2**40), "columns"),
        (setting("embedding", "bytes", value=-1), "bytes"),
        (setting("embedding", "scale", value=0), "scale"),
        (setting("embedding", "scale", value=float("nan")), "is not a number"),
        (setting("embedding", "scale", value=float("inf")), "is not a number"),
        (setting("embedding", "scale", value=10**400), "scale"),
        (setting("embedding", "scale", value="1"), "scale"),
        (setting("embedding", "scale", value=True), "scale"),
    ],
)
def test_a_trimmed_drafters_manifest_that_contradicts_its_files_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    edit_manifest(folder, change)
    error = refusal(read_artefact, folder)
    assert says in error.message
    assert len(error.message) < 1000
    assert error.path.name == "manifest.json"


# ----------------------------------------------------------------------------------------------------- the ids


def npy(array: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **settings)
    return file.getvalue()


def npy_header(text: str, payload: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + payload


IDS = np.array(KEPT, dtype=np.int32)
HEADER = "{'descr': '<i4', 'fortran_order': False, 'shape': (%s), }\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (npy(IDS[::-1]), "ascending"),
        (npy(np.concatenate([IDS[:1], IDS[:-1]])), "ascending"),
        (
            npy(np.concatenate([IDS[:1], np.int32([2**31 - 1, -(2**30)]), IDS[3:]])),
            "ascending",
        ),  # differences overflow
        (npy(IDS - 4), "outside 0.."),
        (npy(IDS + 200), "outside 0.."),
        (npy(np.concatenate([IDS[:-1], [2**31 - 1]]).astype(np.int32)), "outside 0.."),
        (npy(IDS[:-1]), "519 ids"),
        (npy(IDS[:0]), "0 ids"),
        (npy(IDS.astype(np.int64)), "not a vector of int32"),
        (npy(IDS.astype(np.float32)), "not a vector of int32"),
        (npy(IDS.astype(">i4")), "not a vector of int32"),
        (npy(IDS[None]), "not a vector of int32"),
        (npy(IDS.astype(object), allow_pickle=True), "not a vector of int32"),
        (pickle.dumps(IDS), "not a .npy file"),
        (b"", "not a .npy file"),
        (b"\x93NUMPY\x01\x00", "not a vector of int32"),
        (b"\x93NUMPY\x01\x00\xff\xff", "not a vector of int32"),
        (b"\x93NUMPY\x03\x00" + npy(IDS)[8:], "not a .npy file"),
        (npy_header(HEADER % "9999999999,", IDS.tobytes()), "9999999999 ids"),
        (npy_header(HEADER % "99999999999,", IDS.tobytes()), "not a vector of int32"),
        (npy_header(HEADER % "-1,", IDS.tobytes()), "not a vector of int32"),
        (npy_header(HEADER % "10**9,", IDS.tobytes()), "not a vector of int32"),
        (npy_header(HEADER % "520,", IDS.tobytes() + b"\0"), "520 ids in 2081 bytes"),
        (npy_header("(" * 1000), "not a vector of int32"),
        (npy_header(" " * 60_000 + HEADER % "520,", IDS.tobytes()), "not a vector of int32"),
    ],
)
def test_invalid_ids_of_a_trimmed_drafter_are_refused(folder: Path, content: bytes, says: str) -> None:
    (folder / "ids.npy").write_bytes(content)
    record_file(folder, "ids.npy")
    assert says in refusal(read_artefact, folder).message


# ------------------------------------------------------------------------------------------------- the headers


def exchange(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    record_file(folder, name)


@pytest.mark.parametrize("kept", [KEPT[:-1], range(3, 524)], ids=["fewer", "more"])
def test_a_trimmed_drafter_with_more_or_fewer_rows_than_ids_is_refused(
    folder: Path, source: Path, tmp_path: Path, kept: range
) -> None:
    other = write_trimmed_folder(source, tmp_path / "other", kept)
    exchange(folder, "drafter.gguf", (other / "drafter.gguf").read_bytes())
    assert "kept" in refusal(read_artefact, folder).message
    edit_manifest(folder, setting("kept", value=len(kept)))
    assert f"the drafter has {len(kept)} rows" in refusal(read_artefact, folder).message


def test_a_head_of_another_shape_than_the_stated_vocabulary_is_refused(folder: Path) -> None:
    content = (folder / "drafter.gguf").read_bytes()
    key = b"llama.vocab_size" + struct.pack("<I", U32)
    assert content.count(key + struct.pack("<I", 520)) == 1
    exchange(folder, "drafter.gguf", content.replace(key + struct.pack("<I", 520), key + struct.pack("<I", 519)))
    assert "instead of (64, 519)" in refusal(read_artefact, folder).message
    exchange(folder, "drafter.gguf", content.replace(b"llama.vocab_size", b"llama.vocab_sizf"))
    assert "does not state llama.vocab_size" in refusal(read_artefact, folder).message
    exchange(folder, "drafter.gguf", content.replace(key + struct.pack("<I", 520), key + struct.pack("<I", 2**30)))
    assert "of 673 tokens" in refusal(read_artefact, folder).message


def test_a_trimmed_drafter_with_another_token_table_is_refused(source: Path, tmp_path: Path) -> None:
    folder = write_trimmed_folder(source, tmp_path / "small", KEPT, extra_tensor="per_layer_token_embd.weight")
    assert "per_layer_token_embd.weight" in refusal(read_artefact, folder).message


@pytest.mark.parametrize("name", ["drafter.gguf", "tokenizer.gguf"])
def test_a_trimmed_drafter_with_an_invalid_gguf_header_is_refused(folder: Path, name: str) -> None:
    exchange(folder, name, b"GGUX" + (folder / name).read_bytes()[4:])
    assert refusal(read_artefact, folder).path.name == name


def test_a_trimmed_drafter_with_an_invalid_tokenizer_is_refused(folder: Path, source: Path, tmp_path: Path) -> None:
    sound = (folder / "tokenizer.gguf").read_bytes()
    exchange(folder, "tokenizer.gguf", source.read_bytes())
    assert "no tensors" in refusal(read_artefact, folder).message
    exchange(folder, "tokenizer.gguf", build([ARCH]))
    with pytest.raises(ModelFileError, match="no vocabulary"):
        read_artefact(folder)
    exchange(folder, "tokenizer.gguf", sound.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma", 1))
    assert "gemma" in refusal(read_artefact, folder).message
