"""Removed models whose files are in use, as on Windows: gone immediately, deleted later."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from edgespec.errors import EdgespecError, ModelNotFoundError
from edgespec.files.home import Home
from edgespec.store import leftovers
from edgespec.store.manifest import Manifest, write_manifest
from edgespec.store.references import ModelSpec
from edgespec.store.store import Store

Use = Callable[[Path | None], None]

WEIGHTS = b"0123456789"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def store(home: Home) -> Store:
    folder = home.models / "tiny"
    folder.mkdir(parents=True)
    weights = folder / "tiny.gguf"
    weights.write_bytes(WEIGHTS)
    (folder / "native.tiles").write_bytes(b"tiles")
    manifest = Manifest(
        name="tiny",
        kind="target",
        source="here",
        revision=None,
        sha256="84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882",
        bytes=len(WEIGHTS),
        licence=None,
        mtime_ns=weights.stat().st_mtime_ns,
        how_made="by a test",
        path=weights.name,
    )
    write_manifest(folder, manifest)
    return Store(home)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Set the file that a program uses: deleting it then fails as on Windows."""
    return refuse(monkeypatch, 1224)  # as Windows says of a file that is mapped


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> Use:
    in_use: list[Path | None] = [None]
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path == in_use[0]:
            error = PermissionError(errno.EACCES, "used by another process", str(path))
            error.winerror = code  # type: ignore[attr-defined]
            raise error
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)

    def use(path: Path | None) -> None:
        in_use[0] = path

    return use


def test_removing_a_model_whose_file_is_in_use_takes_effect_immediately(store: Store, home: Home, used: Use) -> None:
    weights = home.models / "tiny" / "tiny.gguf"
    used(weights)
    removed = store.remove("tiny")
    assert removed.in_use == (weights,)
    assert removed.freed_bytes > len(b"tiles")
    assert weights.read_bytes() == WEIGHTS
    assert not (home.models / "tiny" / "native.tiles").exists()
    assert store.find("tiny") is None
    assert store.list() == []
    assert "was removed" in store.ignored()[home.models / "tiny"]
    with pytest.raises(ModelNotFoundError):
        store.remove("tiny")


def test_a_file_that_is_mapped_and_no_longer_open_is_in_use_and_a_read_only_one_is_not(
    store: Store, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = home.models / "tiny" / "tiny.gguf"
    refuse(monkeypatch, 5)(weights)
    with monkeypatch.context() as patch:
        patch.setattr(leftovers.os, "access", lambda path, _mode: path != weights)
        with pytest.raises(EdgespecError, match="tiny cannot be removed"):
            store.remove("tiny")
    assert store.find("tiny") is not None
    assert store.remove("tiny").in_use == (weights,)
    assert store.find("tiny") is None


def test_a_removal_that_was_killed_is_finished_at_the_next_listing(
    store: Store, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def killed(path: Path, missing_ok: bool = False) -> None:
        unlink(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            store.remove("tiny")
    assert store.list() == []
    assert not (home.models / "tiny").exists()


def test_a_model_is_removed_where_the_disk_takes_no_new_file(
    store: Store, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_path: Path, *_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    store.find("tiny")
    monkeypatch.setattr(Path, "touch", full)
    leftovers.delete(home.models / "tiny")
    assert not (home.models / "tiny").exists()


def test_files_left_by_a_removal_are_deleted_at_the_next_listing(store: Store, home: Home, used: Use) -> None:
    used(home.models / "tiny" / "tiny.gguf")
    store.remove("tiny")
    used(None)
    assert store.list() == []
    assert not (home.models / "tiny").exists()


def test_files_left_by_a_removal_are_deleted_by_a_second_remove(store: Store, home: Home, used: Use) -> None:
    used(home.models / "tiny" / "tiny.gguf")
    store.remove("tiny")
    used(None)
    with pytest.raises(ModelNotFoundError):
        store.remove("tiny")
    assert not (home.models / "tiny").exists()


def test_a_removed_model_is_not_listed_though_its_manifest_is_in_use(store: Store, home: Home, used: Use) -> None:
    used(home.models / "tiny" / "manifest.json")
    store.remove("tiny")
    assert store.find("tiny") is None
    assert store.list() == []


def test_a_removed_folder_that_another_process_locks_is_left_alone(store: Store, home: Home, used: Use) -> None:
    used(home.models / "tiny" / "tiny.gguf")
    store.remove("tiny")
    used(None)
    with filelock.FileLock(home.locks / "tiny.lock"):
        store.list()
        assert (home.models / "tiny").exists()
    store.list()
    assert not (home.models / "tiny").exists()


def test_a_failed_deletion_for_another_reason_is_an_error(
    store: Store, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(EdgespecError, match="tiny cannot be removed: Permission denied"):
        store.remove("tiny")


def test_even_a_failed_fetch_clears_a_models_removed_mark(store: Store, home: Home, used: Use) -> None:
    """The first attempt clears the mark, even if the fetch fails."""
    used(home.models / "tiny" / "tiny.gguf")
    store.remove("tiny")
    spec = ModelSpec(name="tiny", file_name="tiny.gguf", sources=())
    with pytest.raises(EdgespecError):
        store.fetch(spec)
    assert store.ignored()[home.models / "tiny"] == "it has no manifest"
