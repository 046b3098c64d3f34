"""Limits that Linux's control groups set for this process, in both versions of their file system."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What one group allows and what it has left, in bytes."""

    limit_bytes: int
    left_bytes: int


def memory_limits() -> list[MemoryLimit]:
    """Every limit on this process's memory, from its own group up to the root; all of them hold at once."""
    # Page cache counts as used in a group and is given back on demand. Version 1 prefixes what includes subgroups.
    found = _limits(_folders("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return found + _limits(_folders(""), "memory.max", "memory.current", "inactive_file")


def processor_limit() -> int | None:
    """Whole processors that this process may keep busy, or None without a limit. More threads would be throttled."""
    quotas = []
    for folder in _folders("cpu"):  # version 1: a quota of -1 is none
        quotas.append((_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")))
    for folder in _folders(""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        quotas.append((quota, period))
    limits = [
        max(1, int(quota) // int(period))
        for quota, period in quotas
        if _is_count(quota) and _is_count(period) and int(period) > 0
    ]
    return min(limits, default=None)


def _limits(folders: Iterator[Path], limit_name: str, used_name: str, cache_name: str) -> list[MemoryLimit]:
    found = []
    for folder in folders:
        limit, used = _text(folder / limit_name), _text(folder / used_name)
        if not _is_count(limit):
            continue
        left = int(limit) - (int(used) if _is_count(used) else 0) + _statistic(folder, cache_name)
        found.append(MemoryLimit(int(limit), max(0, min(int(limit), left))))
    return found


def _folders(controller: str) -> Iterator[Path]:
    """This process's group and the groups around it. ``controller`` is version 1's; the empty one is version 2.

    A container may see the names of its host's groups without their folders; then only the root is there, and that
    is the container's own group.
    """
    root = _MOUNT / controller
    own = Path()
    for line in _text(_MEMBERSHIP).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # A group outside of this process's view is written with "..".
        if controller in controllers.split(",") and ".." not in Path(path).parts:
            own = Path(path.lstrip("/"))
    for folder in (own, *own.parents):
        yield root / folder


def _statistic(folder: Path, name: str) -> int:
    for line in _text(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and _is_count(value):
            return int(value)
    return 0


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _text(path: Path) -> str:
    """The file's text, empty if there is none to read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
