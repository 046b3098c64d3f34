"""Locks that know their rank: one that is taken after an inner one raises. The order is docs/notes/locks.md."""

from __future__ import annotations

import gc
import linecache
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "notes" / "locks.md"
PACKAGE = ROOT / "edgespec"

_ROW = re.compile(r"^\| (\d+|-) \| `([\w/]+\.py)` `(\w+)` \|", re.MULTILINE)
_MADE = re.compile(r"\bthreading\.(Lock|RLock|Condition)[()]")


class WrongOrderError(AssertionError):
    """A lock was taken while the thread held an inner one."""


def ranks() -> dict[str, int | None]:
    """Each lock of the page, as file and name, and its rank; None for a signal, which another thread releases."""
    rows = _ROW.findall(PAGE.read_text(encoding="utf-8"))
    return {f"{file} {name}": None if rank == "-" else int(rank) for rank, file, name in rows}


def made_in_package() -> set[str]:
    """The locks that the package makes, as file and name."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if _MADE.search(line.partition("#")[0]):
                found.add(_name(path, line))
    return found


def _name(path: Path, line: str) -> str:
    """A lock's file and name, from the line that makes it. A line makes one lock."""
    assert len(_MADE.findall(line)) == 1, line
    name = re.match(r"\s*(?:with )?(?:self\.)?(\w+)", line)
    assert name is not None, line
    return f"{path.relative_to(PACKAGE).as_posix()} {name.group(1)}"


class _Thread(threading.local):
    """What this thread holds, and whether it collects garbage: a finalizer may run under any lock."""

    def __init__(self) -> None:
        self._held: list[RankedLock] = []
        self._process = os.getpid()
        self.collecting = False

    @property
    def held(self) -> list[RankedLock]:
        """A forked process holds what its parent held, and will never release it."""
        if self._process != os.getpid():
            self._held, self._process = [], os.getpid()
        return self._held


class RankedLock:
    """A lock that is checked against those that its thread holds. An attempt that does not wait is free."""

    def __init__(self, lock: Any, name: str, rank: int, mine: _Thread, wrong: list[str]) -> None:
        self._lock, self.name, self.rank = lock, name, rank
        self._mine, self._wrong = mine, wrong

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        held = self._mine.held
        if blocking and not self._mine.collecting and self not in held:
            inner = [each.name for each in held if each.rank >= self.rank]
            if inner:
                self._wrong.append(f"{self.name} was taken while {', '.join(inner)} was held")
                raise WrongOrderError(self._wrong[-1])
        taken: bool = self._lock.acquire(blocking, timeout)
        if taken:
            held.append(self)
        return taken

    def release(self) -> None:
        self._lock.release()
        if self in self._mine.held:
            self._mine.held.remove(self)

    __enter__ = acquire

    def __exit__(self, *_raised: object) -> None:
        self.release()

    def locked(self) -> bool:
        return bool(self._lock.locked())

    # What a Condition needs of its lock.

    def _release_save(self) -> tuple[Any, int]:
        count = self._mine.held.count(self)
        for _ in range(count):
            self._mine.held.remove(self)
        return self._lock._release_save(), count

    def _acquire_restore(self, saved: tuple[Any, int]) -> None:
        self._lock._acquire_restore(saved[0])
        self._mine.held.extend([self] * saved[1])

    def _is_owned(self) -> bool:
        owned: bool = self._lock._is_owned()
        return owned


@contextmanager
def ranked_locks() -> Iterator[list[str]]:
    """Locks that the package makes within the block know their rank. Yields the sentences of wrong orders."""
    known, mine, wrong = ranks(), _Thread(), list[str]()
    real = {kind: getattr(threading, kind) for kind in ("Lock", "RLock", "Condition")}

    def ranked(lock: Any) -> Any:
        frame = sys._getframe(2)
        path = Path(frame.f_code.co_filename)
        line = linecache.getline(str(path), frame.f_lineno)
        if PACKAGE not in path.parents or not _MADE.search(
            line
        ):  # native code that the package calls makes locks too
            return lock
        rank = known[name := _name(path, line)]
        return lock if rank is None else RankedLock(lock, name, rank, mine, wrong)

    def condition(lock: Any = None) -> Any:
        return real["Condition"](ranked(real["RLock"]()) if lock is None else lock)

    def collects(phase: str, _info: object) -> None:
        mine.collecting = phase == "start"

    made: dict[str, Callable[..., Any]] = {
        "Lock": lambda: ranked(real["Lock"]()),
        "RLock": lambda: ranked(real["RLock"]()),
        "Condition": condition,
    }
    gc.callbacks.append(collects)
    for kind, make in made.items():
        setattr(threading, kind, make)
    try:
        yield wrong
    finally:
        for kind, was in real.items():
            setattr(threading, kind, was)
        gc.callbacks.remove(collects)
