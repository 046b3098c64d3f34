"""Every command of the pages under docs/ that needs no other device than the processor, run as it stands."""

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

# my-machine.toml is whatever the reader calls his own description.
SKIPPED = ("my-machine.toml",)


def commands(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [
        line.removeprefix("$ ")
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if not any(word in line for word in SKIPPED)
    ]


COMMANDS = [*commands("two-devices.md"), *commands("simulation.md")]


def test_the_pages_show_what_they_tell_of() -> None:
    assert [command.split("edgespec ")[1].split()[0] for command in COMMANDS] == ["plan", "verify", "bench", "plan"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_page_runs(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    settings = dict(word.split("=", 1) for word in words[: words.index("edgespec")])
    surroundings = os.environ | settings
    surroundings["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *words[words.index("edgespec") :]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=surroundings,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
