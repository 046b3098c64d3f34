from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.models import write_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny GGUF models, named after their properties."""
    folder = tmp_path_factory.mktemp("export-models")
    write_model(folder / "untied.gguf")
    write_model(folder / "tied.gguf", tied=True)
    write_model(folder / "bias.gguf", bias=True)
    write_model(folder / "f32.gguf", quant="F32")
    return folder
