"""A lock between processes: what a wait says, and what ends it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import filelock
import pytest

import edgespec
from edgespec.errors import CancelledError, StoreLockedError
from edgespec.files.locks import locked
from edgespec.files.progress import Job, ProgressEvent


def test_a_free_lock_is_taken_without_a_word_and_given_back(tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    for _ in range(2):
        with locked(tmp_path / "a.lock", "testing", Job(events.append, lambda: True)):
            pass
    assert events == []


def test_an_error_under_a_lock_gives_it_back(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "a.lock", "testing"):
        raise ZeroDivisionError
    with locked(tmp_path / "a.lock", "testing", timeout_s=0):
        pass


def test_the_job_hears_of_a_wait_once_and_it_ends_when_the_lock_is_free(tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    other = filelock.FileLock(tmp_path / "a.lock", thread_local=False)
    other.acquire()

    def heard(event: ProgressEvent) -> None:
        events.append(event)
        threading.Timer(0.5, other.release).start()

    with locked(tmp_path / "a.lock", "fetching tiny", Job(heard)):
        pass
    assert [event.stage for event in events] == ["waiting for another process"]
    assert events[0].note == "another process is fetching tiny"


@pytest.mark.parametrize("timeout_s", [0.0, 0.3])
def test_a_wait_ends_at_its_limit_with_the_name_of_the_lock(tmp_path: Path, timeout_s: float) -> None:
    path, began = tmp_path / "a.lock", time.monotonic()
    with (
        filelock.FileLock(path),
        pytest.raises(StoreLockedError, match=f"has been fetching tiny for {timeout_s:.0f} s") as raised,
        locked(path, "fetching tiny", timeout_s=timeout_s),
    ):
        pass
    assert str(path) in (raised.value.hint or "")
    assert timeout_s <= time.monotonic() - began


def test_a_wait_can_be_cancelled(tmp_path: Path) -> None:
    with (
        filelock.FileLock(tmp_path / "a.lock"),
        pytest.raises(CancelledError, match="fetching tiny"),
        locked(tmp_path / "a.lock", "fetching tiny", Job(cancelled=lambda: True)),
    ):
        pass


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="this system's open follows every link")
def test_a_link_at_the_locks_path_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("all of it")
    (tmp_path / "a.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError), locked(tmp_path / "a.lock", "testing"):  # noqa: PT011
        pass
    assert (tmp_path / "precious").read_text() == "all of it"


def test_one_module_takes_every_file_lock() -> None:
    package = Path(edgespec.__file__).parent
    users = [path for path in package.rglob("*.py") if "filelock" in path.read_text(encoding="utf-8")]
    assert users == [package / "files" / "locks.py"]
