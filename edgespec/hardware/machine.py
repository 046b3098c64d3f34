"""The processor and memory that this process may use, and a fingerprint under which measurements are filed.

The limits of Linux control groups count: a container has fewer processors than its machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from edgespec.errors import EdgespecError

PowerSource = Literal["mains", "battery"]

# Linux's names of the instruction sets by which CPU inference kernels are chosen.
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

# Driver names of processor sensors: Intel, AMD, and boards whose device tree has a zone "cpu...". ACPI zones are left
# out: many report a constant.
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "x86_pkg_temp", "cpu", "soc_thermal")

# Processors shut down around 100 to 115 degrees; a sensor above this, or not above zero, is broken.
_TOO_HOT_TO_BE_TRUE_C = 150.0

# What psutil raises on platforms without a figure, where a container or a sandbox hides /proc, and on odd entries of
# /proc and /sys.
PSUTIL_FAILURES = (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError, psutil.Error)

# A name is worth no longer wait; after it the generic name is used.
_SYSCTL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine, as far as it matters to running models. Bytes and counts; ``isa`` is in order of width.

    ``power_source`` is None if the system does not report it, as on desktops and virtual machines: no battery does
    not imply mains.
    """

    system: str
    processor: str
    isa: tuple[str, ...]
    physical_cores: int
    logical_cores: int
    total_memory_bytes: int
    available_memory_bytes: int
    power_source: PowerSource | None = None

    @property
    def fingerprint(self) -> str:
        """Identity of the machine; a change invalidates all measurements.

        The power source is not in it, because it changes often; measurements are filed under it separately.
        """
        facts = (self.system, self.processor, self.isa, self.physical_cores, self.logical_cores)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """The machine in reports: every field, and ``fingerprint``."""
        return {**asdict(self), "isa": list(self.isa), "fingerprint": self.fingerprint}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions that change by the minute and disturb measurements; None if the system does not report them.

    ``temperature_c`` is the processor's hottest sensor, in degrees Celsius; ``load_average`` the system's own, over
    the last minute.
    """

    temperature_c: float | None = None
    load_average: float | None = None


def allowed_processors() -> frozenset[int]:
    """The numbers of the logical processors that this process may run on; empty if the system does not say."""
    try:
        if hasattr(os, "sched_getaffinity"):
            return frozenset(os.sched_getaffinity(0))
        process: Any = psutil.Process()
        return frozenset(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else frozenset()
    except PSUTIL_FAILURES:
        return frozenset()


def online_processors() -> Sequence[int]:
    """The numbers of the logical processors that are switched on, ascending; empty if the system does not say."""
    found = list[int]()
    for part in _text(_PROCESSORS / "online").split(","):
        first, _, last = part.partition("-")
        if not _is_count(first) or not _is_count(last or first):
            return ()
        found += range(int(first), int(last or first) + 1)
    return found


def usable_processors() -> int:
    """Logical processors that this process may keep busy: its affinity, or a container's quota."""
    logical = len(allowed_processors()) or os.cpu_count() or 1
    return max(1, min(logical, processor_limit() or logical))


def physical_cores(allowed: frozenset[int]) -> int | None:
    """The cores to which the processors ``allowed`` belong, of whatever kind; None if the system does not say.

    A core with several hardware threads counts once, also if only some of its threads are allowed.
    """
    threads = [_text(_PROCESSORS / f"cpu{number}" / "topology" / "thread_siblings_list") for number in allowed]
    if threads and all(threads):
        return len(set(threads))
    try:
        logical, physical = psutil.cpu_count(), psutil.cpu_count(logical=False)
    except PSUTIL_FAILURES:
        return None
    if not allowed or not logical or not physical:
        return physical
    # Without a description of the cores: Linux numbers the first threads of all cores, then the second ones; Windows
    # numbers the threads of one core in a row.
    in_a_row = sys.platform == "win32"
    return len({number * physical // logical if in_a_row else number % physical for number in allowed})


def describe_machine() -> Machine:
    """Describe the machine as it is now."""
    logical = usable_processors()
    physical = physical_cores(allowed_processors()) or logical
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
        power_source=power_source(),
    )


def describe_conditions() -> Conditions:
    """Read the current conditions."""
    return Conditions(temperature_c=_temperature_c(), load_average=_load_average())


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
    elif sys.platform == "darwin":
        name = _name_from_sysctl() or name
    elif sys.platform == "win32":
        name = _name_from_registry() or name
    return name, flags


def _name_from_sysctl() -> str | None:
    """The processor's name; other sources on macOS only report "arm" or "i386"."""
    command = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SYSCTL_TIMEOUT_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _name_from_registry() -> str | None:
    """The processor's name; other sources on Windows only report family and stepping."""
    winreg: Any = importlib.import_module("winreg")
    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip() or None
    except OSError:
        return None


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes for this process: the machine's, or its control groups' if less."""
    whole, available = _memory_of_machine()
    total = whole
    for group in memory_limits():
        if group.limit_bytes < whole:
            total, available = min(total, group.limit_bytes), min(available, group.left_bytes)
    return total, max(0, available)


def _memory_of_machine() -> tuple[int, int]:
    """(total, available) bytes, by psutil or else by the system: without its cache of files, which could be freed.

    Where neither tells what is available, all is. Raises EdgespecError if the total is not known.
    """
    try:
        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)
    except PSUTIL_FAILURES as error:
        total = _pages_bytes("SC_PHYS_PAGES")
        if not total:
            raise EdgespecError("neither psutil nor the system tells how much memory there is") from error
        return total, _pages_bytes("SC_AVPHYS_PAGES") or total


def _pages_bytes(name: str) -> int:
    """The bytes of a number of pages that the system has by that name; 0 if it does not tell."""
    try:
        return max(0, os.sysconf("SC_PAGE_SIZE")) * max(0, os.sysconf(name))
    except (AttributeError, OSError, ValueError):  # on Windows, and on macOS for those that are free
        return 0


def process_bytes() -> int:
    """What would be available if this process and those that work for it ended, and is not now.

    Linux counts pages of mapped files as available, also while they are in use. A browser that was opened is in
    another session and works for itself.
    """
    held, processes = 0, list[psutil.Process]()
    with contextlib.suppress(*PSUTIL_FAILURES):  # a sandbox may refuse to list processes
        processes.append(psutil.Process())
        processes += processes[0].children(recursive=True)
    for each in processes:
        with contextlib.suppress(*PSUTIL_FAILURES):  # it has ended
            memory: Any = each.memory_info()
            if sys.platform == "win32" or os.getsid(each.pid) == os.getsid(0):
                held += int(memory.rss - (memory.shared if sys.platform == "linux" else 0))
    return held


def power_source() -> PowerSource | None:
    """The current power source; None if the system does not report it."""
    try:
        battery = psutil.sensors_battery()
    except PSUTIL_FAILURES:
        return None
    if battery is None or battery.power_plugged is None:
        return None
    return "mains" if battery.power_plugged else "battery"


def _temperature_c() -> float | None:
    try:
        by_sensor = psutil.sensors_temperatures()
    except PSUTIL_FAILURES:
        return None
    readings = [
        float(reading.current)
        for name, sensor in by_sensor.items()
        if name.lower().startswith(_CPU_SENSORS)
        for reading in sensor
        if reading.current is not None
    ]
    return max((reading for reading in readings if 0 < reading < _TOO_HOT_TO_BE_TRUE_C), default=None)


def _load_average() -> float | None:
    # Only where the system keeps one: elsewhere psutil would start a thread to emulate it.
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


_PROCESSORS = Path("/sys/devices/system/cpu")
_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What one group allows and what it has left, in bytes."""

    limit_bytes: int
    left_bytes: int


def memory_limits() -> list[MemoryLimit]:
    """Every limit on this process's memory, from its own group up to the root; all apply together."""
    # Version 1's prefix "total_" includes subgroups.
    found = _limits(_folders("memory"), ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
    # Above "high" the system slows a process down and takes its memory back: systemd and Kubernetes set it.
    return found + _limits(_folders(""), ("memory.max", "memory.high"), "memory.current", "")


def processor_limit() -> int | None:
    """Whole processors that this process may keep busy, None without a limit. More threads would be throttled."""
    quotas = []
    for folder in _folders("cpu"):  # version 1: a quota of -1 means none
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


def _limits(folders: Iterator[Path], limit_names: Sequence[str], used_name: str, prefix: str) -> list[MemoryLimit]:
    # Page cache counts as used in a group but is freed on demand, as in the machine's own count of available memory:
    # all of it, because weights that were mapped twice are in the active list.
    cache = [f"{prefix}{each}" for each in ("inactive_file", "active_file")]
    found = []
    for folder in folders:
        stated = [_text(folder / name) for name in limit_names]
        limit = min(map(int, filter(_is_count, stated)), default=None)
        if limit is None:
            continue
        used = _text(folder / used_name)
        left = limit - (int(used) if _is_count(used) else 0) + _statistics(folder, cache)
        found.append(MemoryLimit(limit, max(0, min(limit, left))))
    return found


def _folders(controller: str) -> Iterator[Path]:
    """This process's group and its parents. ``controller`` is version 1's; the empty string is version 2.

    A container may see its host's group names without their folders. Then only the root exists, which is the
    container's own group.
    """
    root = _MOUNT / controller
    own = Path()
    for line in _text(_MEMBERSHIP).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # A group outside this process's view is written with "..".
        if controller in controllers.split(",") and ".." not in Path(path).parts:
            own = Path(path.lstrip("/"))
    for folder in (own, *own.parents):
        yield root / folder


def _statistics(folder: Path, names: Sequence[str]) -> int:
    """The sum of these counts of a group."""
    lines = (line.partition(" ") for line in _text(folder / "memory.stat").splitlines())
    return sum(int(value) for key, _, value in lines if key in names and _is_count(value))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _text(path: Path) -> str:
    """The file's text, empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
