"""The platform of a library, read from its first bytes: those of every system, and of other files."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from edgespec.kernels import binary as binaries
from edgespec.kernels.binary import Binary, platform_tag, read_binary, this_process
from tests.support.binaries import elf, fat, mach_o, pe

X86_64, ARM64 = 0x01000007, 0x0100000C

CASES = [
    (elf(62), Binary("linux", ("x86_64",)), "linux_x86_64"),
    (elf(183), Binary("linux", ("arm64",)), "linux_aarch64"),
    (elf(22, little=False), Binary("linux", ("s390x",)), "linux_s390x"),
    (pe(0x8664), Binary("win32", ("x86_64",)), "win_amd64"),
    (pe(0xAA64), Binary("win32", ("arm64",)), "win_arm64"),
    (pe(0x014C), Binary("win32", ("i686",)), "win32"),
    (mach_o(ARM64, (11, 3)), Binary("darwin", ("arm64",), (11, 3)), "macosx_11_0_arm64"),
    (mach_o(X86_64, (10, 15)), Binary("darwin", ("x86_64",), (10, 15)), "macosx_10_15_x86_64"),
    (mach_o(X86_64, (10, 13), old=True), Binary("darwin", ("x86_64",), (10, 13)), "macosx_10_13_x86_64"),
    (
        fat(mach_o(X86_64, (10, 13)), mach_o(ARM64, (11, 0))),
        Binary("darwin", ("arm64", "x86_64"), (11, 0)),
        "macosx_11_0_universal2",
    ),
]


@pytest.mark.parametrize(("content", "found", "tag"), CASES, ids=[tag for _, _, tag in CASES])
def test_a_librarys_header_gives_its_platform_and_wheel_tag(
    tmp_path: Path, content: bytes, found: Binary, tag: str
) -> None:
    path = tmp_path / "library"
    path.write_bytes(content)
    assert read_binary(path) == found
    assert platform_tag(found) == tag


@pytest.mark.parametrize(("content", "found", "tag"), CASES, ids=[tag for _, _, tag in CASES])
def test_a_truncated_or_changed_library_is_not_recognised_and_does_not_raise(
    tmp_path: Path, content: bytes, found: Binary, tag: str
) -> None:
    path = tmp_path / "library"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert read_binary(path) in (None, found, Binary("darwin", found.machines))
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        read_binary(path)


def test_a_java_class_file_is_not_taken_for_a_library(tmp_path: Path) -> None:
    """A class file begins like a universal library for several processors."""
    path = tmp_path / "Main.class"
    path.write_bytes(struct.pack(">IHH", 0xCAFEBABE, 0, 65) + bytes(100))
    assert read_binary(path) is None


def test_a_library_runs_only_on_its_system_and_processor() -> None:
    here = Binary("darwin", ("arm64",))
    assert Binary("darwin", ("arm64", "x86_64"), (11, 0)).runs(here)
    assert not Binary("darwin", ("x86_64",)).runs(here)
    assert not Binary("linux", ("arm64",)).runs(here)


@pytest.mark.parametrize(
    ("system", "machine", "platform_name", "said"),
    [
        ("linux", "aarch64", "linux-aarch64", "64-bit ARM on Linux"),
        ("darwin", "x86_64", "macosx-11.0-universal2", "x86-64 on macOS"),
        ("win32", "ARM64", "win-amd64", "x86-64 on Windows"),  # an x86-64 Python in emulation
        ("win32", "AMD64", "win32", "32-bit x86 on Windows"),
        ("linux", "riscv64", "linux-riscv64", "riscv64 on Linux"),
    ],
)
def test_this_process_has_the_platform_of_its_interpreter(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, platform_name: str, said: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(binaries.platform, "machine", lambda: machine)
    monkeypatch.setattr(binaries.sysconfig, "get_platform", lambda: platform_name)
    assert str(this_process()) == said
