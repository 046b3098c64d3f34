"""Every command and every example of the README, run as shown."""

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
# Without the transcript, which contains code from the model; tests/cli/test_status.py checks its lines.
README = re.sub(r"````.*?````", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ ")
]
# Not run: it takes 50 seconds on any machine; tests/cli calibrates, and the fixture ``pair`` these models.
CALIBRATE = "edgespec calibrate --quick"


def test_the_readme_shows_its_two_main_commands_and_more() -> None:
    assert COMMANDS[:2] == ["make chat", "make test"]
    assert len(COMMANDS) >= 8
    assert CALIBRATE in COMMANDS


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.startswith("edgespec ") and each != CALIBRATE])
def test_every_readme_command_runs(command: str) -> None:
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_make_chat_answers_prompts_from_a_pipe() -> None:
    # The last command of `make chat`; `make test` itself exercises the setup. --no-print-directory: a sub-make would
    # print the folder it leaves. ARGS: overrides the arguments of `make test`.
    make = ["make", "--no-print-directory", "-n", "chat", "ARGS="]
    recipe = subprocess.run(make, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    command = recipe.splitlines()[-1].strip()
    assert command.startswith("exec .venv/bin/edgespec chat"), recipe
    arguments = shlex.split(command)[2:]
    done = subprocess.run(
        [sys.executable, "-m", "edgespec", *arguments, "--max-tokens", "24"],
        input="What is a hash map? One sentence.\nAnd a set?\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tok/s" not in done.stderr, done.stderr
    assert len(done.stdout.strip().splitlines()) >= 2


def test_the_readmes_embedding_snippet_runs() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "def" in done.stdout


def test_the_embedding_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "examples/embed.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "stopped: cancelled" in done.stdout
