"""Logits of exported folders by llama.cpp; transformers itself is not run here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import benchmarks.transformers_logits as module
from edgespec.export.huggingface.gguf import export_from_folder
from tests.export.hf_models import write_random_folder
from tests.export.models import logits


def test_a_missing_interpreter_is_reported_as_the_error_of_the_kind() -> None:
    found = module.compare("no-such-python", ["llama"])
    assert list(found) == ["llama"]
    assert "error" in found["llama"]


def test_without_an_interpreter_the_option_and_variable_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(module.INTERPRETER, raising=False)
    monkeypatch.setattr("sys.argv", ["transformers_logits"])
    with pytest.raises(SystemExit):
        module.main()
    assert "EDGESPEC_TRANSFORMERS_PYTHON" in capsys.readouterr().err


def test_llama_logits_equal_those_of_a_session_of_the_same_model(tmp_path: Path) -> None:
    export_from_folder(write_random_folder(tmp_path / "in"), tmp_path / "out", name="tiny")
    tokens = np.arange(3, 50)
    ours = module.llama_logits(tmp_path / "out" / "model.gguf", tokens)
    theirs = logits(tmp_path / "out" / "model.gguf", tokens.tolist())
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, atol=0.02)  # theirs with a float16 cache
