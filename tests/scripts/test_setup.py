"""The part of setup that runs before anything is installed: what it refuses, and that it keeps to stderr."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_setup(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "scripts/setup.sh"],
        cwd=folder,
        env={**os.environ, **environment},
        input="this must never be read\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that setup needs, in a path with a space."""
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize("python", ["/nonexistent/python3", "/bin/false"])
def test_a_python_that_does_not_work_is_one_sentence(checkout: Path, python: str) -> None:
    done = run_setup(checkout, PYTHON=python)
    assert done.returncode != 0
    assert done.stdout == ""
    assert python in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (checkout / ".venv").exists()


def test_without_a_compiler_it_says_so_before_installing_anything(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dirname", "env", "uname"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    interpreter = Path(sys.base_prefix) / "bin" / "python3"
    done = run_setup(checkout, PATH=str(tools), PYTHON=str(interpreter), CC="", CXX="")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "compiler" in done.stderr
    assert "EDGESPEC_LLAMA_WHEELS" in done.stderr
    assert "Traceback" not in done.stderr
