from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec.errors import CancelledError, DiskSpaceError
from edgespec.files import atomic, disk
from edgespec.files.atomic import (
    remove_stale_temporaries,
    replacing,
    sha256_file,
    temporary_name,
    write_bytes,
    write_json,
    write_text,
)
from edgespec.files.progress import Job, ProgressEvent


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_written_file_is_complete_and_leaves_no_temporary(tmp_path: Path) -> None:
    write_json(tmp_path / "deep" / "a.json", {"name": "modèle", "n": 1})
    write_text(tmp_path / "deep" / "b.txt", "one\ntwo\n")
    assert json.loads((tmp_path / "deep" / "a.json").read_text(encoding="utf-8")) == {"name": "modèle", "n": 1}
    assert (tmp_path / "deep" / "b.txt").read_bytes() == b"one\ntwo\n"
    assert names(tmp_path / "deep") == ["a.json", "b.txt"]


def test_an_exception_while_writing_keeps_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    write_bytes(path, b"old")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["model.bin"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
def test_a_private_file_can_be_read_by_its_owner_alone_and_others_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        for settings, mode in (({}, 0o644), ({"private": False}, 0o644), ({"private": True}, 0o600)):
            path = tmp_path / "file"
            with replacing(path, **settings) as file:
                file.write(b"x")
            assert path.stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


@pytest.mark.parametrize("durable", [True, False])
def test_only_a_durable_write_calls_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(atomic.os, "fsync", flushed.append)
    with replacing(tmp_path / "model.bin", durable=durable) as file:
        file.write(b"new")
    assert (tmp_path / "model.bin").read_bytes() == b"new"
    assert bool(flushed) == durable


@pytest.mark.parametrize("where", ["write", "fsync"])
def test_a_full_disk_raises_disk_space_error_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = tmp_path / "model.bin"
    write_bytes(path, b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill() -> None:
        with replacing(path, expected_bytes=1000) as file:
            file.write(b"new")
            if where == "write":
                full()

    if where == "fsync":
        monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(DiskSpaceError) as caught:
        fill()
    assert caught.value.needed_bytes == 1000
    assert caught.value.hint
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["model.bin"]


@pytest.mark.parametrize(
    ("code", "held_s", "renamed"), [(32, 0.2, True), (5, 1.9, True), (5, 9.0, False), (2, 0.2, False)]
)
def test_a_rename_waits_while_another_program_holds_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, held_s: float, renamed: bool
) -> None:
    now, replace = 0.0, os.replace

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def refused(source: Path, target: Path) -> None:
        if now < held_s:
            error = PermissionError(errno.EACCES, "Permission denied")
            error.winerror = code  # type: ignore[attr-defined]  # as on Windows
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", refused)
    monkeypatch.setattr(atomic, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    with contextlib.suppress(PermissionError):
        write_bytes(tmp_path / "model.bin", b"new")
    assert names(tmp_path) == (["model.bin"] if renamed else [])
    assert now < 2.2


def test_a_file_name_that_is_not_utf_8_is_read_back(tmp_path: Path) -> None:
    name = os.fsdecode(b"mod\xe8le.gguf")
    write_json(tmp_path / "a.json", {"name": name})
    assert json.loads((tmp_path / "a.json").read_bytes()) == {"name": name}


def test_write_json_refuses_nan_and_infinity(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"speed": float("nan")})
    assert names(tmp_path) == []


def test_long_and_non_ascii_file_names_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 120)  # 240 bytes
    write_bytes(path, b"x")
    assert names(tmp_path) == [path.name]


def test_temporaries_of_dead_processes_are_removed_and_of_live_ones_kept(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = temporary_name("model.bin")
    dead = mine.replace(f"-{os.getpid()}-", f"-{ended.pid}-")
    (tmp_path / mine).write_bytes(b"x")
    (tmp_path / dead).write_bytes(b"x")
    (tmp_path / f"{dead[:-4]}").mkdir()  # not the pattern of temporaries
    folder = tmp_path / dead.replace("model", "other")
    folder.mkdir()
    (folder / "inside").write_bytes(b"x")
    (tmp_path / "unrelated.tmp").write_bytes(b"x")
    assert sorted(remove_stale_temporaries(tmp_path)) == sorted([tmp_path / dead, folder])
    assert names(tmp_path) == sorted([mine, dead[:-4], "unrelated.tmp"])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such owners")
def test_temporaries_of_another_user_are_kept_and_links_in_folders_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = tmp_path / temporary_name("model.bin").replace(f"-{os.getpid()}-", "-4194999-")
    stale.mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "file").write_bytes(b"x")
    (stale / "link").symlink_to(tmp_path / "own")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: stale.lstat().st_uid + 1)
        assert remove_stale_temporaries(tmp_path) == []
    assert remove_stale_temporaries(tmp_path) == [stale]
    assert names(tmp_path / "own") == ["file"]


HOUR_S = 3600


@pytest.mark.parametrize("clock_set_s", [0, 10**6, -(10**6)])
def test_temporaries_of_another_host_are_removed_a_day_after_the_last_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock_set_s: int
) -> None:
    """By the clock of the file system, which may be another machine's."""
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + clock_set_s)
    monkeypatch.setattr(atomic, "_HOST", "aaaaaa")
    old, young, ahead, exported = (tmp_path / temporary_name(f"{name}.bin") for name in ("a", "b", "c", "d"))
    monkeypatch.setattr(atomic, "_HOST", "bbbbbb")
    exported.mkdir()
    inside = exported / "weights"
    for path, age_s in ((old, 48 * HOUR_S), (young, HOUR_S), (ahead, -HOUR_S), (inside, HOUR_S)):
        set_time(path, -clock_set_s - age_s)
    os.utime(exported, (0, 0))  # a folder's own time says nothing of the files that are written in it
    assert remove_stale_temporaries(tmp_path) == [old]
    os.utime(inside, (0, 0))
    assert remove_stale_temporaries(tmp_path) == [exported]
    assert names(tmp_path) == sorted([young.name, ahead.name])


def test_many_temporaries_of_another_host_need_one_look_at_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[Path]()
    touch = Path.touch
    monkeypatch.setattr(Path, "touch", lambda path, **options: (looks.append(path), touch(path, **options)))
    remove_stale_temporaries(tmp_path)
    assert not looks
    monkeypatch.setattr(atomic, "_HOST", "aaaaaa")
    others = [tmp_path / temporary_name(f"{number}.bin") for number in range(3)]
    monkeypatch.setattr(atomic, "_HOST", "bbbbbb")
    for path in others:
        path.write_bytes(b"x")
    assert remove_stale_temporaries(tmp_path) == []
    assert len(looks) == 1
    assert names(tmp_path) == sorted(path.name for path in others)


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as found:
        yield found


def set_time(path: Path, seconds: float) -> None:
    """Write the file ``seconds`` after now, as the clock was then."""
    path.write_bytes(b"x")
    os.utime(path, (time.time() + seconds, time.time() + seconds))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")
@pytest.mark.parametrize("clock_set_s", [10**6, 0, -(10**6)])
def test_a_clock_that_is_set_makes_no_live_temporary_stale(
    tmp_path: Path, clock_set_s: int, other_process: subprocess.Popen[bytes]
) -> None:
    birth = atomic._birth(other_process.pid)
    live, older = (
        tmp_path / f".model.bin.{atomic._HOST}-{other_process.pid}-{middle}01234567.tmp"
        for middle in (f"{birth}-", "")  # older versions had no birth in the name
    )
    reused = tmp_path / live.name.replace(birth, "0badcafe")
    mine = tmp_path / temporary_name("model.bin")
    my_pid_reused = tmp_path / mine.name.replace(atomic._birth(os.getpid()), "0badcafe")
    for path in (live, older, reused, mine, my_pid_reused):
        set_time(path, -clock_set_s)
    assert set(remove_stale_temporaries(tmp_path)) == {reused, my_pid_reused}
    other_process.communicate()
    assert set(remove_stale_temporaries(tmp_path)) == {live, older}
    assert names(tmp_path) == [mine.name]


def test_without_proc_a_process_younger_than_a_temporary_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_process: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(atomic, "_birth", lambda _pid: "")
    mine = tmp_path / temporary_name("model.bin")
    live, dead = (tmp_path / f".{name}.{atomic._HOST}-{other_process.pid}-01234567.tmp" for name in "ab")
    set_time(mine, -(10**6))
    set_time(live, 0)
    set_time(dead, -(10**6))
    assert remove_stale_temporaries(tmp_path) == [dead]
    other_process.communicate()
    assert remove_stale_temporaries(tmp_path) == [live]


CONTAINED = """
import sys, time
from pathlib import Path
from edgespec.files.atomic import temporary_name
print(temporary_name("model.bin"), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="process numbers of one's own are Linux's")
def test_temporaries_of_a_container_with_the_same_hostname_are_kept(tmp_path: Path) -> None:
    """A container numbers processes from 1: its pid is another process on this host, or unused."""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
    inside = subprocess.Popen([*command, sys.executable, "-c", CONTAINED], stdout=subprocess.PIPE, text=True)
    try:
        assert inside.stdout is not None
        name = inside.stdout.readline().strip()
        if not name:
            pytest.skip("process numbers of one's own are not allowed here")
        (tmp_path / name).write_bytes(b"x")
        an_hour_ago = time.time() - HOUR_S
        os.utime(tmp_path / name, (an_hour_ago, an_hour_ago))
        assert remove_stale_temporaries(tmp_path) == []
    finally:
        inside.kill()
        inside.communicate()


def test_a_macs_temporaries_keep_their_host_when_its_name_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    class System:
        failed = 0

        def gethostuuid(self, number: ctypes.Array[ctypes.c_ubyte], _wait: object) -> int:
            number[0] = 7
            return self.failed

    before = atomic._host()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: System())
    assert atomic._host() == bytes([7] + [0] * 15)
    monkeypatch.setattr(System, "failed", -1)
    assert atomic._host() == before == socket.gethostname().encode()


def test_containers_with_the_same_hostname_get_different_temporary_names(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = {"machine": "pid:[4026531836]", "one": "pid:[4026532781]", "other": "pid:[4026533001]"}
    found = {}
    for whose, space in spaces.items():
        monkeypatch.setattr(Path, "readlink", lambda _path, space=space: Path(space))
        found[whose] = atomic._process_numbers()
    assert found["machine"] == ""  # temporary names on the machine itself stay the same as in older releases
    assert found["one"] != found["other"]

    def hidden(_path: Path) -> Path:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "readlink", hidden)
    assert atomic._process_numbers() == ""


WRITER = """
import sys
from pathlib import Path
from edgespec.files.atomic import replacing
number = 0
while True:
    number += 1
    with replacing(Path(sys.argv[1])) as file:
        for _ in range(64):
            file.write(bytes([number % 256]) * 4096)
"""


def test_a_killed_writer_never_leaves_an_incomplete_file(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    for attempt in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        end = time.monotonic() + 60
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.02 + 0.013 * attempt)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        data = path.read_bytes()
        assert len(data) == 64 * 4096
        assert len(set(data)) == 1
    write_bytes(path, b"next")  # this write removes the temporary of the killed process
    assert names(tmp_path) == ["model.bin"]


def test_hashing_a_file_reports_progress_and_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"abc" * 1000)
    monkeypatch.setattr(atomic, "CHUNK_BYTES", 1024)
    seen: list[ProgressEvent] = []
    digest = sha256_file(path, Job(seen.append))
    sha256_file(path, Job(seen.append), stage="hashing", source="tiny")
    assert digest == hashlib.sha256(b"abc" * 1000).hexdigest()
    assert [(each.done_bytes, each.total_bytes) for each in seen] == [(1024, 3000), (2048, 3000), (3000, 3000)] * 2
    assert [(each.stage, each.source) for each in seen[2:4]] == [("verifying", str(path)), ("hashing", "tiny")]
    with pytest.raises(CancelledError):
        sha256_file(path, Job(cancelled=lambda: True))


def test_free_space_is_checked_at_the_nearest_existing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert disk.free_bytes(tmp_path / "not" / "there") > 0
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    with pytest.raises(DiskSpaceError) as caught:
        disk.require_space(tmp_path, 5_000_000_000, "fetching it")
    assert caught.value.free_bytes == 1000
    assert caught.value.needed_bytes > 5_000_000_000
    assert "EDGESPEC_HOME" in (caught.value.hint or "")
    with pytest.raises(DiskSpaceError) as caught:
        disk.require_space(tmp_path, 5_000_000_000, "exporting it", hint="elsewhere")
    assert caught.value.hint == "elsewhere"
    disk.require_space(tmp_path, 0, "nothing")


@pytest.mark.parametrize(("count", "text"), [(999, "999 bytes"), (1_117_320_768, "1.1 GB"), (98_362_432, "98.4 MB")])
def test_byte_counts_are_shown_in_decimal_units(count: int, text: str) -> None:
    assert disk.readable_bytes(count) == text


def test_only_one_thing_is_named_in_the_singular() -> None:
    assert [disk.counted(number, "quantisation") for number in (0, 1, 2)] == [
        "0 quantisations", "1 quantisation", "2 quantisations",
    ]  # fmt: skip
    assert [disk.counted(number, "guess", "guesses") for number in (1, 3)] == ["1 guess", "3 guesses"]
