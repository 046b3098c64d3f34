"""What is here: the processor, the memory a process may use, and an identity for measurements to be filed under."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine, as far as it matters to running models. Bytes and counts; ``isa`` is in order of width."""

    system: str
    processor: str
    isa: tuple[str, ...]
    physical_cores: int
    logical_cores: int
    total_memory_bytes: int
    available_memory_bytes: int

    @property
    def fingerprint(self) -> str:
        """Changes when a measurement made here would no longer hold."""
        facts = (self.system, self.processor, self.isa, self.physical_cores, self.logical_cores)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def describe_machine() -> Machine:
    """Look at the machine now."""
    logical = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    logical = max(1, min(logical, _cpu_quota() or logical))
    physical = psutil.cpu_count(logical=False) or logical
    name, flags = _cpu_name_and_flags()
    total, available = memory_bytes()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=name,
        isa=tuple(flag for flag in _ISA_OF_INTEREST if flag in flags),
        physical_cores=max(1, min(physical, logical)),
        logical_cores=logical,
        total_memory_bytes=total,
        available_memory_bytes=available,
    )


# Linux's names for the instruction sets that CPU inference kernels are chosen by.
_ISA_OF_INTEREST = (
    "sse4_2",
    "avx",
    "fma",
    "f16c",
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
)


def _cpu_name_and_flags() -> tuple[str, frozenset[str]]:
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    if sys.platform == "linux":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return name, flags
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = frozenset(value.split())
                break
    return name, flags


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes for this process: the machine's, or its control group's where that is less."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is not None and limit < total:
        total = limit
        # Page cache counts as used in a control group and is given back on demand.
        available = min(available, limit, limit - (used or 0) + (_cgroup_file_cache() or 0))
    return total, max(0, available)


def _cpu_quota() -> int | None:
    """Whole processors that the control group may use, or None without a limit. More threads would be throttled."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text(encoding="ascii").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _cgroup_number(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None


def _cgroup_file_cache() -> int | None:
    try:
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        key, _, value = line.partition(" ")
        if key == "inactive_file" and value.isdigit():
            return int(value)
    return None
