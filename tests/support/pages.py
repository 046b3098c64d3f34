"""The commands that a page shows, and running them as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def console_commands(page: str) -> list[str]:
    """What stands behind the prompts of the page's console blocks; ``page`` is a path below the repository's root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        line.removeprefix("$ ")
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if line.startswith("$ ")
    ]


def run_command(command: str, folder: Path) -> None:
    """Run ``[NAME=VALUE ...] edgespec ...`` in a folder; it has to succeed and to say something."""
    words = shlex.split(command)
    place = words.index("edgespec")
    surroundings = os.environ | dict(word.split("=", 1) for word in words[:place])
    surroundings["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *words[place:]],
        capture_output=True,
        text=True,
        cwd=folder,
        env=surroundings,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
