"""The first bytes of shared libraries of every system, and such a library as a build leaves it."""

from __future__ import annotations

import struct
from pathlib import Path

from edgespec.kernels.compile import write_digest


def written(library: Path, content: bytes) -> None:
    """Write ``library`` with its digest next to it."""
    library.write_bytes(content)
    write_digest(library)


def elf(machine: int, *, little: bool = True) -> bytes:
    head = b"\x7fELF\x02" + (b"\x01" if little else b"\x02") + b"\x01" + bytes(9)
    return head + struct.pack("<HH" if little else ">HH", 3, machine)


def pe(machine: int) -> bytes:
    return b"MZ" + bytes(0x3A) + struct.pack("<I", 0x80) + bytes(0x40) + b"PE\0\0" + struct.pack("<H", machine)


def mach_o(machine: int, least: tuple[int, int], *, old: bool = False) -> bytes:
    """Preceded by one other command; before macOS 10.14 the minimum version had another command."""
    version = least[0] << 16 | least[1] << 8
    other = struct.pack("<III", 0x0D, 16, 0) + bytes(4)
    told = struct.pack("<IIII", 0x24, 16, version, 0) if old else struct.pack("<IIIIII", 0x32, 24, 1, version, 0, 0)
    return struct.pack("<IIIIIIII", 0xFEEDFACF, machine, 0, 6, 2, len(other + told), 0, 0) + other + told


def fat(*slices: bytes) -> bytes:
    entries, content, at = b"", b"", 4096
    for each in slices:
        entries += struct.pack(">IIIII", struct.unpack_from("<I", each, 4)[0], 0, at + len(content), len(each), 12)
        content += each
    return (struct.pack(">II", 0xCAFEBABE, len(slices)) + entries).ljust(at, b"\0") + content
