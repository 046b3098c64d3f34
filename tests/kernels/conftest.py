"""The library under test, and the instruction sets that run here."""

from __future__ import annotations

import platform

import pytest

from edgespec.runtimes.native.library import LEVELS, NativeLibrary
from tests.support.kernel_calls import require_native

# Levels of this processor's family. All of them exist in the build; which of them run depends on the processor.
ARM = platform.machine() in {"aarch64", "arm64"}
FAST = [name for name in LEVELS if name != "portable" and name.startswith("neon") == ARM]


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    return require_native()


@pytest.fixture(params=["portable", *FAST])
def level(request: pytest.FixtureRequest, library: NativeLibrary) -> str:
    """Each level that exists here; skips those that do not run."""
    return require(library, request.param)


@pytest.fixture(params=FAST)
def fast(request: pytest.FixtureRequest, library: NativeLibrary) -> str:
    """Each level that is compared with the portable one."""
    return require(library, request.param)


def require(library: NativeLibrary, level: str) -> str:
    if level not in library.levels:
        pytest.skip(f"{level} does not run on this processor")
    return level
