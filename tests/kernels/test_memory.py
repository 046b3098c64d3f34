"""Memory from the system: weights ask for huge pages, caches refuse them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from edgespec.runtimes.native.library import NativeLibrary

_BYTES = 8 * 2**20


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
@pytest.mark.parametrize(("huge", "flag"), [(1, "hg"), (0, "nh")])
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
