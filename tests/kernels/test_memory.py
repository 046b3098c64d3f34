"""Memory from the system: weights ask for huge pages, caches refuse them."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path

import pytest

from edgespec.runtimes.native.library import NativeLibrary

_BYTES = 8 * 2**20
_SPARSE = 2  # the kernels' number of the kind


def flags_of(address: int) -> list[str]:
    """What the system says of the mapping that contains the address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no such mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how memory is mapped")
@pytest.mark.parametrize(("huge", "flag"), [(1, "hg"), (0, "nh"), (_SPARSE, "nh")])
def test_a_cache_has_small_pages_even_where_the_system_gives_huge_ones_to_all(
    library: NativeLibrary, huge: int, flag: str
) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no huge pages")
    address = library.api.es_memory_take(_BYTES, huge)
    try:
        assert flag in flags_of(address)
    finally:
        library.api.es_memory_give(address, _BYTES)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the pages may keep what they held")
def test_forgotten_pages_hold_zeros_and_can_be_written_again(library: NativeLibrary) -> None:
    page = mmap.PAGESIZE
    address = library.api.es_memory_take(_BYTES, _SPARSE)
    try:
        own = (ctypes.c_uint8 * _BYTES).from_address(address)
        ctypes.memset(address, 7, _BYTES)
        # The region begins in the middle of a page, whose first bytes belong to another.
        library.api.es_memory_forget(address + 100, 50, 3 * page + 10)
        assert bytes(own) == b"\7" * page + bytes(2 * page) + b"\7" * (_BYTES - 3 * page)
        library.api.es_memory_forget(address + 100, 3 * page + 10, 3 * page + 11)
        assert own[3 * page] == 7, "the page holds other bytes, too"
        ctypes.memset(address, 7, _BYTES)
        library.api.es_memory_forget(address, page + 1, 2 * page)
        assert bytes(own[: 3 * page]) == b"\7" * page + bytes(page) + b"\7" * page
    finally:
        library.api.es_memory_give(address, _BYTES)
