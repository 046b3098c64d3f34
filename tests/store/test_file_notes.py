"""The model files on this machine and the notes about them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edgespec.files.home import Home
from edgespec.store.file_notes import FileNote, FileNotes
from edgespec.store.on_disk import MOST_FILES, FileOnDisk, files_on_disk
from edgespec.store.store import Store
from tests.support.other_programs import LIBRARY, User
from tests.support.tiny_models import TinyModels, put_into_store


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path / "user")


def test_files_on_disk_lists_each_file_once_and_the_smallest_first(user: User, home: Home, tiny: TinyModels) -> None:
    small = tiny.target.read_bytes()
    put_into_store(home, "own", small + b"22")
    user.to_ollama(f"{LIBRARY}/smol/1b", small + b"1")
    studio = user.to_lm_studio("x/x.gguf", small)
    # The hub's cache also holds a file of the store's model: edgespec's own name is listed.
    pointer = user.to_hub("org/repo", "y.gguf", small + b"333")
    folder = put_into_store(home, "hf:org/repo/y.gguf".replace(":", "-").replace("/", "-"), small).parent
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"path": str(pointer), "bytes": len(small) + 3, "mtime_ns": pointer.stat().st_mtime_ns}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    files = files_on_disk(Store(home), user.folders)
    assert [(file.name, file.program) for file in files] == [
        (str(studio), "LM Studio"),
        ("ollama:smol:1b", "Ollama"),
        ("own", None),
        (folder.name, None),
    ]
    assert [file.bytes - len(small) for file in files] == [0, 1, 2, 3]
    assert files[-1].path == pointer.resolve()
    assert files[0].mtime_ns == studio.stat().st_mtime_ns
    assert [file.name for file in files_on_disk(Store(home), user.folders, 1)] == [str(studio)]
    assert MOST_FILES > 100


def test_files_on_disk_skips_missing_files_and_link_cycles(
    user: User, home: Home, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put_into_store(home, "own", tiny.target.read_bytes())
    listed = Store(home).list()
    monkeypatch.setattr(Store, "list", lambda _self: listed)
    path.unlink()
    assert files_on_disk(Store(home), user.folders) == []
    path.symlink_to(path)
    assert files_on_disk(Store(home), user.folders) == []


def file_of(path: Path) -> FileOnDisk:
    status = path.stat()
    return FileOnDisk(name=path.stem, path=path, bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def fresh(path: Path) -> FileNote:
    """The note about a file of which nothing is known."""
    return FileNote((path.stat().st_size, path.stat().st_mtime_ns))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_a_file_note_is_valid_until_the_file_changes(home: Home, model: Path) -> None:
    notes = FileNotes(home)
    note = notes.of(file_of(model))
    assert note == fresh(model)
    note.vocabularies["target"] = "another"
    note.described["here"] = {"facts": {"name": "x"}}
    note.drafter = "small"
    notes.save([file_of(model)])
    assert home.read_format() is not None
    kept = FileNotes(home).of(file_of(model))
    assert kept == note
    assert FileNotes(home).drafters() == {model: "small"}
    os.utime(model, ns=(1, 1))
    assert FileNotes(home).of(file_of(model)) == fresh(model)
    assert FileNotes(home).drafters() == {}
    model.unlink()
    assert FileNotes(home).drafters() == {}


def two_noted(home: Home, model: Path, name: str, value: str) -> list[FileOnDisk]:
    """The model and another file, in whose notes one value is stored."""
    other = model.with_name("other.gguf")
    other.write_bytes(b"GGUF!")
    both = [file_of(model), file_of(other)]
    notes = FileNotes(home)
    for file in both:
        setattr(notes.of(file), name, value)
    notes.save(both)
    return both


def test_file_notes_are_written_only_if_changed_and_dropped_with_their_files(home: Home, model: Path) -> None:
    both = two_noted(home, model, "refused", "no")
    written = home.file_notes.stat().st_mtime_ns
    again = FileNotes(home)
    again.of(both[0])
    again.save(both)
    assert home.file_notes.stat().st_mtime_ns == written
    assert FileNotes(home).of(both[1]).refused == "no", "unused in this run but kept, since the file exists"
    again.save(both[:1])
    assert FileNotes(home).of(both[1]) == fresh(both[1].path)
    assert FileNotes(home).of(both[0]).refused == "no"


def test_a_file_note_keeps_only_the_last_16_vocabularies(home: Home, model: Path) -> None:
    notes = FileNotes(home)
    for number in range(100):
        notes.of(file_of(model)).vocabularies[f"target {number}"] = None
    notes.save([file_of(model)])
    assert list(FileNotes(home).of(file_of(model)).vocabularies) == [f"target {number}" for number in range(84, 100)]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"schema_version": 99, "files": {}}',
        '{"schema_version": 1, "files": []}',
        " " * (9 << 20),
    ],
)
def test_an_unreadable_notes_file_is_replaced(home: Home, model: Path, text: str) -> None:
    home.create(home.root)
    home.file_notes.write_text(text)
    notes = FileNotes(home)
    notes.of(file_of(model)).refused = "no"
    notes.save([file_of(model)])
    assert FileNotes(home).of(file_of(model)).refused == "no"


def test_a_damaged_file_note_is_dropped_and_the_others_are_kept(home: Home, model: Path) -> None:
    both = two_noted(home, model, "drafter", "small")
    text = home.file_notes.read_text()
    for wrong in ({"seen": []}, {"drafter": []}, {"vocabularies": {"a": 1}}, {"described": {"k": 1}}):
        stored = json.loads(text)
        stored["files"][str(model)] |= wrong
        stored["files"] |= {"x\0y": {"seen": [1, 1], "drafter": "d"}, "z": 5}
        home.file_notes.write_text(json.dumps(stored))
        assert FileNotes(home).of(both[0]) == fresh(model)
        assert FileNotes(home).drafters() == {both[1].path: "small"}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="this user may write everywhere")
def test_file_notes_in_a_read_only_home_are_not_saved(home: Home, model: Path) -> None:
    home.create(home.root).chmod(0o500)
    notes = FileNotes(home)
    notes.of(file_of(model)).refused = "no"
    notes.save([file_of(model)])
    assert not home.file_notes.exists()


def test_file_notes_are_not_saved_if_the_home_is_a_file(tmp_path: Path, model: Path) -> None:
    (tmp_path / "home").write_text("")
    notes = FileNotes(Home(tmp_path / "home"))
    notes.of(file_of(model)).refused = "no"
    notes.save([file_of(model)])
