from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from edgespec.errors import DiskSpaceError, EdgespecError, InvalidRequestError
from edgespec.export import staging
from edgespec.export.gguf import files as gguf_files
from edgespec.export.gguf.files import export_whole
from edgespec.export.provenance import Provenance
from edgespec.export.staging import check_replaceable, staged_folder
from edgespec.files import atomic, disk
from tests.support.exporting import stop_half_done


def put(folder: Path, text: str = "new") -> None:
    """Write an export of one file through ``staged_folder``."""
    with staged_folder(folder, needed_bytes=10) as stage:
        (stage / "model.gguf").write_text(text)
        (stage / "manifest.json").write_text(json.dumps({"kind": "gguf", "files": {"model.gguf": {}}}))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_staged_folder_replaces_a_missing_or_empty_folder(tmp_path: Path) -> None:
    put(tmp_path / "deep" / "out")
    (tmp_path / "empty").mkdir()
    put(tmp_path / "empty")
    for folder in (tmp_path / "deep" / "out", tmp_path / "empty"):
        assert names(folder) == ["manifest.json", "model.gguf"]
    assert names(tmp_path) == ["deep", "empty"]
    assert names(tmp_path / "deep") == ["out"]


def test_an_earlier_export_is_replaced_completely(tmp_path: Path) -> None:
    put(tmp_path / "out", "old")
    put(tmp_path / "out", "new")
    assert (tmp_path / "out" / "model.gguf").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_the_old_export_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    put(tmp_path / "out", "old")

    def interrupted() -> None:
        with staged_folder(tmp_path / "out", needed_bytes=10) as stage:
            (stage / "model.gguf").write_text("new")
            assert (tmp_path / "out" / "model.gguf").read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "out" / "model.gguf").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_a_failing_last_rename_restores_the_old_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "out", "old")
    replace, renames = os.replace, list[Path]()

    def second_fails(path: Path, target: Path) -> None:
        renames.append(target)
        if len(renames) == 2:
            raise PermissionError(errno.EACCES, "denied")
        replace(path, target)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(EdgespecError, match="cannot be written"):
        put(tmp_path / "out", "new")
    assert (tmp_path / "out" / "model.gguf").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_an_export_to_a_linked_folder_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    put(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "real") == ["manifest.json", "model.gguf"]


# ------------------------------------------------------------------------------- folders of other programs


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"kind": "gguf"}',
        '{"kind": "model", "files": {"a": {}}}',
        " " * 2_000_000,
    ],
)
def test_a_folder_that_is_not_an_export_is_never_replaced(tmp_path: Path, manifest: str | None) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("precious")
    if manifest is not None:
        (tmp_path / "out" / "manifest.json").write_text(manifest)
    with pytest.raises(InvalidRequestError, match="not an exported model") as caught:
        put(tmp_path / "out")
    assert caught.value.hint
    assert (tmp_path / "out" / "a").read_text() == "precious"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_an_export_with_foreign_files_is_never_replaced(tmp_path: Path, kind: str) -> None:
    put(tmp_path / "out", "old")
    other = tmp_path / "out" / "notes"
    if kind == "file":
        other.write_text("mine")
    elif kind == "folder":
        other.mkdir()
    else:
        (tmp_path / "out" / "model.gguf").unlink()
        (tmp_path / "out" / "model.gguf").symlink_to(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"model\.gguf" if kind == "link" else "notes"):
        put(tmp_path / "out")
    assert len(names(tmp_path / "out")) == (2 if kind == "link" else 3)


def test_files_added_during_the_export_are_never_replaced(tmp_path: Path) -> None:
    def raced() -> None:
        with staged_folder(tmp_path / "out", needed_bytes=10) as stage:
            (stage / "model.gguf").write_text("new")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "a").write_text("precious")

    with pytest.raises(InvalidRequestError):
        raced()
    assert names(tmp_path / "out") == ["a"]
    assert names(tmp_path) == ["out"]


def test_a_file_at_the_destination_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(InvalidRequestError, match="not a folder"):
        check_replaceable(tmp_path / "out")
    with pytest.raises(EdgespecError):
        put(tmp_path / "out" / "below")
    assert (tmp_path / "out").read_text() == "precious"


# --------------------------------------------------------------------------------------- a full disk


def test_too_little_disk_space_is_refused_before_any_write(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    with pytest.raises(DiskSpaceError) as caught:
        export_whole(models / "tied.gguf", tmp_path / "out", Provenance(name="tiny"))
    size = (models / "tied.gguf").stat().st_size
    assert caught.value.needed_bytes == size + disk.SLACK_BYTES
    assert names(tmp_path) == []


@pytest.mark.parametrize("where", ["write", "fsync", "manifest"])
def test_a_disk_that_fills_up_raises_disk_space_error_and_keeps_files(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    export_whole(models / "tied.gguf", tmp_path / "out", Provenance(name="old"))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "write":

        class FullDisk:
            def __init__(self, file: BinaryIO) -> None:
                self.file = file

            def __enter__(self) -> FullDisk:
                return self

            def __exit__(self, *_: object) -> None:
                self.file.close()

            write = staticmethod(full)

        opened = Path.open

        def opening(path: Path, mode: str = "r", **more: object) -> object:
            file = opened(path, mode, **more)  # type: ignore[call-overload]
            return FullDisk(file) if mode == "xb" else file

        monkeypatch.setattr(Path, "open", opening)
    elif where == "fsync":
        monkeypatch.setattr(gguf_files.os, "fsync", full)
    else:
        monkeypatch.setattr(gguf_files, "write_json", full)
    with pytest.raises(DiskSpaceError) as caught:
        export_whole(models / "untied.gguf", tmp_path / "out", Provenance(name="new"))
    monkeypatch.undo()
    assert caught.value.hint
    assert "full" in caught.value.message
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["source"]["name"] == "old"
    assert names(tmp_path) == ["out"]


def test_a_destination_without_write_permission_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(EdgespecError, match="cannot be written: Permission denied") as caught:
        put(tmp_path / "out")
    assert caught.value.hint


# ------------------------------------------------------------------------------------- a killed process

EXPORTER = """
import sys
from pathlib import Path
import numpy as np
from edgespec.export.gguf import parts as gguf_parts
from edgespec.export.gguf.files import export_trimmed
from edgespec.export.provenance import Provenance
gguf_parts.CHUNK_BYTES = 4096
number = 0
while True:
    number += 1
    kept = np.arange(number % 7, 300, dtype=np.int32)
    export_trimmed(Path(sys.argv[1]), Path(sys.argv[2]), Provenance(name=str(number)), kept=kept)
"""


def whole(folder: Path) -> bool:
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, record in manifest["files"].items():
        data = (folder / name).read_bytes()
        if len(data) != record["bytes"] or hashlib.sha256(data).hexdigest() != record["sha256"]:
            return False
    return {*manifest["files"], "manifest.json"} == set(names(folder))


@pytest.mark.slow
def test_a_killed_export_leaves_no_incomplete_folder(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"

    def check() -> None:
        assert not folder.exists() or whole(folder)

    for attempt in range(6):
        exporter = subprocess.Popen([sys.executable, "-c", EXPORTER, str(models / "untied.gguf"), str(folder)])
        stop_half_done(exporter, tmp_path, 0.0037 * attempt, check)
        exporter.kill()
        exporter.wait()
        check()
    put(tmp_path / "other")  # this export removes the temporary of the killed process
    assert [name for name in names(tmp_path) if name.startswith(".")] == []


def test_names_of_staged_folders_match_the_cleanup_pattern(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out", needed_bytes=0) as stage:
        assert atomic._TEMPORARY.match(stage.name)
        assert stage.parent == tmp_path
        assert staging.KINDS == ("trimmed-drafter", "gguf", "onnx-model")
