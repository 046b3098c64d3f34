"""An application made with PyInstaller contains edgespec: the package's hook includes everything needed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from edgespec import Engine

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
# Development packages that an application does not need.
LEFT_OUT = ("gguf", "llama_cpp", "matplotlib", "onnx", "onnxruntime", "pytest")


def test_the_embedding_example_runs_as_a_frozen_application(tmp_path: Path) -> None:
    (hooks,) = entry_points(group="pyinstaller40", name="hook-dirs").select(module="edgespec.__pyinstaller")
    (directory,) = hooks.load()()
    assert (Path(directory) / "hook-edgespec.py").is_file()
    with Engine.load("smollm2-135m", draft="none", download=True):
        pass  # the application finds the model in the store
    without = [part for name in LEFT_OUT for part in ("--exclude-module", name)]
    folders = ["--distpath", tmp_path / "dist", "--workpath", tmp_path / "work", "--specpath", tmp_path]
    built = subprocess.run(
        [sys.executable, "-m", "PyInstaller", "--log-level", "WARN", *without, *folders, ROOT / "examples/embed.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    # Without this environment: the application must not depend on it.
    alone = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [tmp_path / "dist" / "embed" / "embed"], capture_output=True, text=True, cwd=tmp_path, env=alone, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "stopped: cancelled" in done.stdout
    library, digest = sorted((tmp_path / "dist").rglob("*edgespec_kernels*"))
    assert library.stat().st_size > 0
    assert digest.name == f"{library.name}.sha256"
