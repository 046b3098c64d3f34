"""The verdict of the acceptance step for exported folders; transformers itself is not run here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edgespec.export.huggingface.gguf import export_from_folder
from tests.export.hf_models import write_random_folder
from tests.export.models import logits

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("acceptance_export_under_test", SCRIPTS / "acceptance_export.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ({}, False),
        ({"llama": {"largest_difference": 9e-4, "spread": 1.0}}, True),
        ({"llama": {"largest_difference": 1e-3, "spread": 1.0}}, False),
        ({"llama": {"largest_difference": 0.0, "spread": 0.1}}, False),  # nothing that could differ
        ({"llama": {"largest_difference": float("nan"), "spread": 1.0}}, False),
        ({"llama": {"error": "RuntimeError: no"}}, False),
        ({"gemma3": {"largest_difference": 9e-4, "llama_difference": 4e-3, "spread": 1.0}}, True),
        ({"gemma3": {"largest_difference": 9e-4, "llama_difference": 5e-3, "spread": 1.0}}, False),
        ({"llama": {"largest_difference": 1e-5, "spread": 1.0}, "qwen2": {"error": "no"}}, False),
    ],
)
def test_the_verdict(module: ModuleType, found: dict[str, Any], verdict: bool) -> None:
    assert module.holds(found) is verdict


def test_a_missing_interpreter_is_an_error_and_not_a_pass(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    found = module.compare("no-such-python", ["llama"], lines.append)
    assert list(found) == ["llama"]
    assert "error" in found["llama"]
    assert lines
    assert not module.holds(found)
    monkeypatch.delenv(module.INTERPRETER, raising=False)
    with pytest.raises(RuntimeError, match="EDGESPEC_TRANSFORMERS_PYTHON"):
        module.transformers_logits(None, "export-transformers")


def test_the_logits_are_those_of_the_model(module: ModuleType, tmp_path: Path) -> None:
    export_from_folder(write_random_folder(tmp_path / "in"), tmp_path / "out", name="tiny")
    tokens = np.arange(3, 50)
    ours = module.llama_logits(tmp_path / "out" / "model.gguf", tokens)
    theirs = logits(tmp_path / "out" / "model.gguf", tokens.tolist())
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, atol=0.02)  # theirs with a float16 cache


def test_the_script_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "acceptance_export.py"), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "EDGESPEC_TRANSFORMERS_PYTHON" in done.stdout
