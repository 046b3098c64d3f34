"""What a shared library is for, by its header: system, processors, oldest macOS. Standard library only."""

from __future__ import annotations

import platform
import struct
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_HEAD_BYTES = 64 << 10  # Mach-O load commands; the other formats need one kilobyte
# Processor numbers in the formats' headers.
# Numbers of processors in the formats' own headers.
_ELF = {3: "i686", 21: "ppc64le", 22: "s390x", 40: "armv7l", 62: "x86_64", 183: "arm64", 243: "riscv64"}
_MACH_O = {0x01000007: "x86_64", 0x0100000C: "arm64"}
_PE = {0x014C: "i686", 0x8664: "x86_64", 0xAA64: "arm64"}
_BUILD_VERSION, _VERSION_MIN_MACOS = 0x32, 0x24  # load commands

_ALIASES = {"amd64": "x86_64", "x64": "x86_64", "aarch64": "arm64", "i386": "i686", "x86": "i686"}
_SYSTEMS = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}
_PROCESSORS = {"x86_64": "x86-64", "arm64": "64-bit ARM", "i686": "32-bit x86", "armv7l": "32-bit ARM"}


@dataclass(frozen=True, slots=True)
class Binary:
    """A library's platform. ``system`` as in ``sys.platform``, "linux" for ELF; ``least_macos``: (0, 0) elsewhere."""

    system: str
    machines: tuple[str, ...]
    least_macos: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        processors = " and ".join(_PROCESSORS.get(machine, machine) for machine in self.machines)
        return f"{processors} on {_SYSTEMS.get(self.system, self.system)}"

    def runs(self, here: Binary) -> bool:
        return self.system == here.system and set(here.machines) <= set(self.machines)


def machine_name(name: str) -> str:
    """The canonical name of a processor, for which systems have several."""
    return _ALIASES.get(name.lower(), name.lower())


def this_process() -> Binary:
    """This interpreter's platform. On Windows for ARM, and with Rosetta, the processor may differ."""
    system = "linux" if sys.platform not in _SYSTEMS else sys.platform
    machine = platform.machine() if system != "win32" else sysconfig.get_platform().rpartition("-")[2]
    return Binary(system, (machine_name({"win32": "i686"}.get(machine, machine)),))


def read_binary(path: Path) -> Binary | None:
    """Read a library's header; None if the format is unknown or the file is truncated. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        try:
            if head.startswith(b"\xca\xfe\xba\xbe"):
                return _fat([_read_slice(file, offset) for offset in _slices(head)])
            return _read(head)
        except (struct.error, KeyError, ValueError):
            return None


def _read(head: bytes) -> Binary:
    if head.startswith(b"\x7fELF"):
        little = head[5:6] == b"\x01"
        return Binary("linux", (_ELF[struct.unpack_from("<H" if little else ">H", head, 18)[0]],))
    if head.startswith(b"MZ"):
        at = struct.unpack_from("<I", head, 0x3C)[0]
        if head[at : at + 4] == b"PE\0\0":
            return Binary("win32", (_PE[struct.unpack_from("<H", head, at + 4)[0]],))
    if head.startswith(b"\xcf\xfa\xed\xfe"):
        return Binary("darwin", (_MACH_O[struct.unpack_from("<I", head, 4)[0]],), _least_macos(head))
    raise ValueError("no library")


def _least_macos(head: bytes) -> tuple[int, int]:
    at = 32
    for _ in range(struct.unpack_from("<I", head, 16)[0]):
        command, size = struct.unpack_from("<II", head, at)
        if command in (_BUILD_VERSION, _VERSION_MIN_MACOS):
            version = struct.unpack_from("<I", head, at + (12 if command == _BUILD_VERSION else 8))[0]
            return version >> 16, version >> 8 & 255
        if size < 8:
            raise ValueError("a load command without a size")
        at += size
    return 0, 0


def _slices(head: bytes) -> list[int]:
    count = struct.unpack_from(">I", head, 4)[0]
    if not 0 < count <= 16:  # the same magic number begins Java's class files
        raise ValueError("no library")
    return [struct.unpack_from(">I", head, 8 + 20 * number + 8)[0] for number in range(count)]


def _read_slice(file: BinaryIO, offset: int) -> Binary:
    file.seek(offset)
    return _read(file.read(_HEAD_BYTES))


def _fat(slices: list[Binary]) -> Binary:
    machines = tuple(sorted({machine for each in slices for machine in each.machines}))
    return Binary("darwin", machines, max(each.least_macos for each in slices))


def platform_tag(binary: Binary) -> str:
    """The platform tag of a wheel that contains this library, for machines like the one that built it."""
    if binary.system == "darwin":
        major, minor = max(binary.least_macos, (10, 9))
        machine = "universal2" if len(binary.machines) > 1 else binary.machines[0]
        return f"macosx_{major}_{0 if major > 10 else minor}_{machine}"  # as pip counts: no minor version from 11 on
    if binary.system == "win32":
        return {"x86_64": "win_amd64", "arm64": "win_arm64"}.get(binary.machines[0], "win32")
    if sys.platform in ("darwin", "win32") or sys.platform.startswith("linux"):
        machine = {"arm64": "aarch64"}.get(binary.machines[0], binary.machines[0])
        return f"linux_{machine}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")  # ELF of another system
