"""Atomic file writes: a temporary name in the same folder, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from edgespec.files.disk import disk_errors
from edgespec.files.progress import QUIET, Job

# Large enough that hashing dominates the loop's overhead; small enough for prompt cancellation at 50 MB/s.
CHUNK_BYTES = 1 << 20

# Windows' error codes while a virus scanner or an indexer reads what was just written, most often for 0.1 s.
_HELD = {5, 32, 33}
_HELD_S, _AGAIN_S = 2.0, 0.05

# Linux's id of the initial pid namespace. A container has another pid namespace, even with the same hostname.
_MACHINES_OWN = "pid:[4026531836]"


def _process_numbers() -> str:
    """The pid namespace of this process, or "" for the machine's initial namespace."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux, or a /proc that is hidden
        return ""
    return "" if space == _MACHINES_OWN else space


def _host() -> bytes:
    """What tells this machine from others: its name; on macOS, where that follows DHCP, its hardware's number."""
    if sys.platform == "darwin":
        number = (ctypes.c_ubyte * 16)()
        with contextlib.suppress(AttributeError, OSError):
            if ctypes.CDLL(None).gethostuuid(number, (ctypes.c_long * 2)()) == 0:  # the second: wait no time for it
                return bytes(number)
    return socket.gethostname().encode("utf-8", "replace")


# The name contains the host because a network disk or a container may share the home: a pid that does not exist on
# this host may be alive on another. Only processes of this host and pid namespace are looked up.
_HOST = hashlib.sha256(_host() + _process_numbers().encode("utf-8", "replace")).hexdigest()[:6]
_TEMPORARY = re.compile(r"^\..*\.(?P<host>[0-9a-f]{6})-(?P<pid>\d+)-(?:(?P<birth>[0-9a-f]{8})-)?[0-9a-f]{8}\.tmp$")

# Other hosts' temporaries are left over once nothing was written to them for this long: a container that was killed
# never comes back under its name, and no write pauses for a day.
_OTHERS_UNTOUCHED_S = 24 * 3600.0

_LONGEST_STEM = 180  # bytes; with the suffix a name stays under the 255 bytes that common file systems allow


def temporary_name(name: str) -> str:
    """A unique file name that contains the host, the pid and the birth of this process."""
    stem = name.encode("utf-8", "surrogateescape")[:_LONGEST_STEM].decode("utf-8", "ignore")
    parts = (_HOST, str(os.getpid()), _birth(os.getpid()), secrets.token_hex(4))
    return f".{stem}.{'-'.join(filter(None, parts))}.tmp"


def _birth(pid: int) -> str:
    """Tells a process from others that had its pid, also after the clock was set; "" if the system has no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        # Fields follow the name, which may contain anything: the 20th is the start in ticks since the boot.
        ticks = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return hashlib.sha256(boot + ticks).hexdigest()[:8]


def remove_stale_temporaries(folder: Path) -> list[Path]:
    """Delete this user's temporaries (files and folders) in ``folder`` that no process will finish; returns them.

    Those are temporaries of processes that are gone, and of other hosts once nothing was written to them for a day.
    """
    removed = []
    now: float | None = None  # by the clock of the file system; only other hosts' temporaries need it
    with contextlib.suppress(OSError):
        for entry in sorted(folder.iterdir()):
            match = _TEMPORARY.match(entry.name)
            if match is None:
                continue
            with contextlib.suppress(OSError):
                if not _is_own(entry):
                    continue
                if match["host"] == _HOST:
                    left = _is_gone(int(match["pid"]), match["birth"], entry)
                else:
                    now = _clock(folder) if now is None else now
                    left = now - _last_write(entry) > _OTHERS_UNTOUCHED_S
                if not left:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
                removed.append(entry)
    return removed


def _clock(folder: Path) -> float:
    """Now, by the clock of the folder's file system: a server of files has its own. Raises OSError."""
    clock = folder / temporary_name("clock")
    clock.touch(exist_ok=False)
    try:
        return clock.lstat().st_mtime
    finally:
        clock.unlink(missing_ok=True)


def _last_write(entry: Path) -> float:
    """When something was last written to a file or folder. Raises OSError."""
    return max(each.lstat().st_mtime for each in (entry, *entry.rglob("*")))


def _is_gone(pid: int, birth: str | None, entry: Path) -> bool:
    try:
        if not psutil.pid_exists(pid):
            return True
        if now := _birth(pid):  # a name without a birth is an older version's: it stays while the pid is in use
            return birth is not None and birth != now
        # A process younger than the file only reuses the pid; two seconds cover coarse file times (FAT).
        return pid != os.getpid() and psutil.Process(pid).create_time() > entry.lstat().st_mtime + 2
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, OSError, OverflowError):
        return False


def _is_own(entry: Path) -> bool:
    """Whether this user made it: another could replace a part by a link to this user's files while it is deleted."""
    return not hasattr(os, "geteuid") or entry.lstat().st_uid == os.geteuid()


@contextmanager
def replacing(
    path: Path, *, expected_bytes: int = 0, durable: bool = True, private: bool = False
) -> Iterator[BinaryIO]:
    """Open a temporary file for writing and rename it to ``path`` when the block ends without an exception.

    On any exception the temporary is removed and the file at ``path`` is unchanged. ``expected_bytes`` only
    improves the error. Without ``durable`` there is no fsync, and a power cut may tear the file: only for large
    files that every reader checks. A ``private`` file can be read by its owner alone. Raises DiskSpaceError on a full
    disk, OSError otherwise.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale_temporaries(path.parent)
    temporary = path.parent / temporary_name(path.name)
    try:
        with disk_errors(path, expected_bytes):
            mode = 0o600 if private else 0o666  # less what the process's umask takes away
            with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, as soon as Windows allows it (see ``when_free``). Raises OSError."""
    when_free(lambda: os.replace(source, target))  # noqa: PTH105


def when_free(change: Callable[[], None]) -> None:
    """Call ``change``; on Windows again, for two seconds, while another program holds its files. Raises OSError."""
    end = time.monotonic() + _HELD_S
    while True:
        try:
            return change()
        except OSError as error:
            if getattr(error, "winerror", None) not in _HELD or time.monotonic() > end:
                raise
        time.sleep(_AGAIN_S)


def sync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` survive a power cut, if the platform supports it."""
    if os.name == "nt":  # Windows cannot flush a folder
        return
    with contextlib.suppress(OSError):  # some network file systems refuse fsync; the rename itself has happened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``. Raises DiskSpaceError, OSError."""
    with replacing(path, expected_bytes=len(data)) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in UTF-8, newlines as given. Raises DiskSpaceError, OSError."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON. Raises ValueError on NaN or infinity."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a file's name that is not UTF-8: escapes are read back as the same name
        text = json.dumps(value, indent=2, allow_nan=False)
    write_text(path, text + "\n")


def sha256_file(path: Path, job: Job = QUIET, *, stage: str = "verifying", source: str | None = None) -> str:
    """The lower-case hex sha256 of a file. The job hears of ``stage`` of ``source`` (None: the path).

    Raises CancelledError, OSError.
    """
    source = str(path) if source is None else source
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        while chunk := file.read(CHUNK_BYTES):
            job.check("the check was cancelled; the file is unchanged")
            digest.update(chunk)
            done += len(chunk)
            job.tell(stage, source, done_bytes=done, total_bytes=total)
    return digest.hexdigest()


def sha256_of_parts(digests: Sequence[str]) -> str:
    """The digest of a model in several files: the sha256 of the files' sha256 in order, each on a line.

    A single digest is returned unchanged. `sha256sum PARTS | cut -c-64 | sha256sum` gives the same.
    """
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()
