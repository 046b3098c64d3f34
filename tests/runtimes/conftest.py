"""Fixtures shared by the runtimes' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.onnx_folders import Folders
from tests.support.tiny_gguf import Quant, write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_ggufs(tmp_path_factory: pytest.TempPathFactory) -> dict[Quant, Path]:
    """One tiny model for each weight type; heads of 32, so that a quantised cache is possible."""
    folder = tmp_path_factory.mktemp("tiny-ggufs")
    kinds: tuple[Quant, ...] = ("F32", "Q8_0", "Q4_0")
    return {kind: write_tiny_gguf(folder / f"tiny-{kind}.gguf", quant=kind, width=128) for kind in kinds}


@pytest.fixture(scope="session")
def tiny_gguf(tiny_ggufs: dict[Quant, Path]) -> Path:
    """The tiny Q8_0 model."""
    return tiny_ggufs["Q8_0"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Tiny ONNX models with each form of cache."""
    return Folders(tmp_path_factory.mktemp("onnx"))
