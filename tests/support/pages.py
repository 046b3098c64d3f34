"""The commands and snippets of a page, and a way to run the commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


def read_page(page: str) -> str:
    """The text of a page, given by its path below the repository's root."""
    return (ROOT / page).read_text(encoding="utf-8")


def fenced(page: str, language: str) -> list[str]:
    """The code blocks of a language in a page, in order; a block of four backticks hides blocks inside it."""
    blocks = re.findall(r"^(`{3,})(\w*)\n(.*?)^\1$", read_page(page), re.DOTALL | re.MULTILINE)
    return [text for _, name, text in blocks if name == language]


def prose(page: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^(`{3,})\w*\n.*?^\1$", "", read_page(page), flags=re.DOTALL | re.MULTILINE)


def console_commands(page: str) -> list[str]:
    """The commands in the page's console blocks; ``page`` is a path below the repository's root."""
    return [
        line.removeprefix("$ ")
        for block in fenced(page, "console")
        for line in block.splitlines()
        if line.startswith("$ ")
    ]


def run_command(command: str, folder: Path, *, given: str = "") -> None:
    """Run ``[NAME=VALUE ...] edgespec ...`` in a folder and check that it succeeds and prints something.

    ``given``: its stdin.
    """
    words = shlex.split(command)
    place = words.index("edgespec")
    # Chats of the pages must not leave answers in the home of the user who runs the tests.
    surroundings = {"EDGESPEC_HISTORY": "false", **os.environ, **dict(word.split("=", 1) for word in words[:place])}
    surroundings["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *words[place:]],
        capture_output=True,
        text=True,
        cwd=folder,
        env=surroundings,
        input=given,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # ``pull`` reports on stderr, since it has no text to print.
    assert (done.stderr if words[place + 1] == "pull" else done.stdout).strip()
