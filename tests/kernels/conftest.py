"""The library under test, and the instruction sets that run here."""

from __future__ import annotations

import platform

import pytest

from edgespec.runtimes.native.library import LEVELS, NativeLibrary
from tests.support.kernel_calls import require_native

# Levels of this processor's family: which of them run is not the same everywhere, which exist is.
ARM = platform.machine() in {"aarch64", "arm64"}
FAST = [name for name in LEVELS if name != "portable" and name.startswith("neon") == ARM]


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    return require_native()


@pytest.fixture(params=["portable", *FAST])
def level(request: pytest.FixtureRequest, library: NativeLibrary) -> str:
    """Each instruction set there is."""
    return require(library, request.param)


@pytest.fixture(params=FAST)
def fast(request: pytest.FixtureRequest, library: NativeLibrary) -> str:
    """Each that is held against the portable one."""
    return require(library, request.param)


def require(library: NativeLibrary, level: str) -> str:
    if level not in library.levels:
        pytest.skip(f"{level} does not run on this processor")
    return level
