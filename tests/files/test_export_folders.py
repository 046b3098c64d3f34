"""What every exported folder is refused for, whatever it holds: missing, linked, altered and oversized files."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edgespec.export.onnx.export import export_onnx
from edgespec.export.provenance import Provenance
from edgespec.files.export_folder import MANIFEST_NAME
from edgespec.files.onnx.folder import read_onnx_folder
from edgespec.files.trimmed_drafter import read_artefact
from tests.support.damaged_folders import refusal
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_onnx import VOCABULARY_SIZE, write_tiny_model
from tests.support.trimmed_folder import FILES as TRIMMED, edit_manifest, write_trimmed_folder

ONNX = ("model.onnx", "model.onnx.data", "tokenizer.gguf")


@dataclass(frozen=True)
class Kind:
    """A kind of exported folder. ``hashed``: the files that are hashed when read, all of which are small."""

    read: Callable[[Path], object]
    write: Callable[[Path], object]
    files: tuple[str, ...]
    hashed: tuple[str, ...]
    follows_links: bool


def _write_trimmed(folder: Path) -> None:
    write_trimmed_folder(write_tiny_gguf(folder.with_suffix(".gguf"), quant="Q8_0"), folder, range(3, 523), scale=8)


def _write_onnx(folder: Path) -> None:
    source = write_tiny_model(folder.with_suffix(".gguf"), quant="Q8_0", layers=2)
    export_onnx(source, folder, Provenance(name="tiny"), kept=np.arange(1, VOCABULARY_SIZE, 2, dtype=np.int32))


KINDS = {
    "trimmed drafter": Kind(read_artefact, _write_trimmed, TRIMMED, ("ids.npy", "tokenizer.gguf"), True),
    "onnx": Kind(read_onnx_folder, _write_onnx, ONNX, ("model.onnx", "tokenizer.gguf"), False),
}
EVERY_FILE = [
    pytest.param(kind, name, id=f"{kind}, {name}")
    for kind, own in KINDS.items()
    for name in (*own.files, MANIFEST_NAME)
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("sound")
    for kind, own in KINDS.items():
        own.write(parent / kind)
    return {kind: parent / kind for kind in KINDS}


@pytest.fixture
def folder(sound: dict[str, Path], kind: str, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound[kind], tmp_path / "small"))


def said(kind: str, folder: Path) -> str:
    return refusal(KINDS[kind].read, folder).message


@pytest.mark.parametrize("kind", KINDS)
def test_the_identity_of_a_folder_depends_on_its_content_not_on_its_path(
    sound: dict[str, Path], folder: Path, kind: str
) -> None:
    def identity(folder: Path) -> str:
        return str(KINDS[kind].read(folder).identity)  # type: ignore[attr-defined]

    assert identity(folder) == identity(sound[kind])
    edit_manifest(folder, lambda document: document.update(licence="MIT"))
    assert identity(folder) != identity(sound[kind])


@pytest.mark.parametrize(("kind", "name"), EVERY_FILE)
def test_a_missing_file_a_folder_and_a_pipe_are_refused(folder: Path, kind: str, name: str) -> None:
    (folder / name).unlink()
    error = refusal(KINDS[kind].read, folder)
    assert error.path.name == name
    assert "no such file" in error.message
    (folder / name).mkdir()
    assert "not a regular file" in said(kind, folder)
    (folder / name).rmdir()
    if sys.platform != "win32":
        os.mkfifo(folder / name)
        assert "not a regular file" in said(kind, folder)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")
@pytest.mark.parametrize(("kind", "name"), EVERY_FILE)
def test_a_link_out_of_a_folder_is_refused(folder: Path, kind: str, name: str) -> None:
    outside = folder.parent / name
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    follows = KINDS[kind].follows_links
    assert ("leads out of its folder" if follows else "it is a symbolic link;") in said(kind, folder)
    (folder / name).unlink()
    (folder / name).symlink_to(name)  # a link to itself
    assert refusal(KINDS[kind].read, folder).path.name == name
    (folder / name).unlink()
    outside.rename(folder / f"other-{name}")
    (folder / name).symlink_to(f"other-{name}")
    if follows:
        KINDS[kind].read(folder)
        return
    assert "it is a symbolic link;" in said(kind, folder)
    (folder / name).unlink()
    (folder / name).hardlink_to(folder / f"other-{name}")
    assert "hard link" in said(kind, folder)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize(("kind", "name"), [each for each in EVERY_FILE if each.values[1] != MANIFEST_NAME])
def test_a_file_whose_size_differs_from_the_manifest_is_refused(
    folder: Path, kind: str, name: str, change: int
) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] if change < 0 else content + b"\0")
    assert f"has {len(content) + change} bytes and the manifest says" in said(kind, folder)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, own in KINDS.items() for name in own.hashed])
def test_a_small_file_with_another_hash_or_an_implausible_size_is_refused(folder: Path, kind: str, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    assert "sha256" in said(kind, folder)
    with (folder / name).open("r+b") as file:
        file.truncate(2**40)  # takes no room on the disk
    edit_manifest(folder, lambda document: document["files"][name].update(bytes=2**40))
    assert "too large" in said(kind, folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content",
    [b"", b"null", b'{"schema_version": 1', b"[" * 100_000, b"9" * 10_000, b"\xff", b" " * (2**20 + 1)],
    ids=["empty", "null", "cut", "deep", "long number", "not UTF-8", "large"],
)
def test_a_malformed_manifest_is_refused(folder: Path, kind: str, content: bytes) -> None:
    (folder / MANIFEST_NAME).write_bytes(content)
    assert refusal(KINDS[kind].read, folder).path.name == MANIFEST_NAME


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 2}, "schema_version must be 1"),
        ({"schema_version": True}, "schema_version"),
        ({"schema_version": None}, "schema_version"),
        ({"kind": "gguf"}, "kind"),
        ({"architecture": "gemma"}, "architecture"),
        ({"architecture": [[[]]]}, "architecture is a list"),
        ({"architecture": "x" * 100_000}, 'architecture is "xxx'),
        ({"files": []}, "files"),
        ({"files": {}}, "is missing"),
        ({"files": {"../../etc/passwd": {}}}, "must be a plain name"),
        ({"files": {"..": {}}}, "must be a plain name"),
        ({"files": {"": {}}}, "must be a plain name"),
        ({"files": {"C:\\x": {}}}, "must be a plain name"),
        ({"files": {"tokenizer.gguf": 3}}, "files"),
        ({"files": {"tokenizer.gguf": {"bytes": 10.0, "sha256": "0" * 64}}}, "bytes must be"),
        ({"files": {"tokenizer.gguf": {"bytes": 10, "sha256": "../x"}}}, "sha256 must be"),
    ],
)
def test_a_manifest_of_another_form_is_refused(folder: Path, kind: str, change: dict[str, object], says: str) -> None:
    edit_manifest(folder, lambda document: document.update(change))
    error = refusal(KINDS[kind].read, folder)
    assert says in error.message
    assert error.path.name == MANIFEST_NAME
