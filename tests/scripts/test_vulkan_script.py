"""`make test-vulkan`: what it asks for before it builds anything, and what it sets for the tests only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")

FEATURES = ("F16", "INTEGER_DOT_PRODUCT", "FUSION", "ASYNC", "GRAPH_OPTIMIZE", "MMVQ")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GGML_", "VULKAN_", "CMAKE_"))}
    return subprocess.run(
        ["sh", "scripts/test_vulkan.sh", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**kept, **environment},
        check=False,
    )


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """An environment that is up to date, whose Python says what it is given."""
    (requirement,) = re.findall(r'"(llama-cpp-python[^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "arguments $@"\nenv\n', encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / "venv" / "vulkan.stamp").write_text(f"{requirement} -DGGML_VULKAN=ON \n", encoding="utf-8")
    return tmp_path / "venv"


def test_without_a_shader_compiler_nothing_is_begun(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "cat", "dirname", "sed"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    done = run(PATH=str(tools), VULKAN_VENV=str(tmp_path / "venv"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "glslc" in done.stderr
    assert "docs/vulkan.md" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_device_in_software_gets_what_it_needs(built: Path) -> None:
    done = run("-k", "one model", VULKAN_VENV=str(built), XDG_RUNTIME_DIR="")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "arguments -m pytest tests/vulkan -k one model"
    assert {"EDGESPEC_TEST_VULKAN=1", "GGML_VK_VISIBLE_DEVICES=0"} <= set(lines)
    assert {f"GGML_VK_DISABLE_{feature}=1" for feature in FEATURES} <= set(lines)
    (folder,) = (line.removeprefix("XDG_RUNTIME_DIR=") for line in lines if line.startswith("XDG_RUNTIME_DIR="))
    assert folder
    assert not Path(folder).exists(), "it is gone afterwards"


def test_a_real_card_gets_no_settings_but_the_callers(built: Path) -> None:
    done = run(VULKAN_VENV=str(built), VULKAN_HARDWARE="1", XDG_RUNTIME_DIR="/nowhere")
    assert "GGML_" not in done.stdout
    assert "XDG_RUNTIME_DIR=/nowhere" in done.stdout.splitlines()
    done = run(VULKAN_VENV=str(built), VULKAN_HARDWARE="1", VULKAN_DEVICE="1")
    assert [line for line in done.stdout.splitlines() if line.startswith("GGML_")] == ["GGML_VK_VISIBLE_DEVICES=1"]


def test_a_failed_test_is_a_failure(built: Path) -> None:
    (built / "bin" / "python").write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    assert run(VULKAN_VENV=str(built), XDG_RUNTIME_DIR="").returncode == 3
