"""Every command that docs/npu.md shows, run as it stands, but for those that need an NPU."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "npu.md").read_text(encoding="utf-8")
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]


def test_the_page_exports_looks_and_drafts() -> None:
    assert [command.split()[1] for command in COMMANDS] == ["export", "doctor", "generate"]


def test_the_commands_run_in_their_order(tmp_path: Path) -> None:
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for command in COMMANDS:
        words = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=surroundings,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
