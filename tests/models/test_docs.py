"""The commands of the guide, run as shown on the default pair; exceptions are listed with the reason."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import PAGES, ROOT, console_commands, read_page, run_command

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

# test_pages.py and test_npu_page.py run the other pages.
GUIDE = [page for page in PAGES if page.startswith(("docs/guide/", "docs/results/")) or page == "docs/start.md"]
# Beginnings of commands that tests/docs/test_docs.py only parses, with the reason.
NOT_RUN = {
    "make ": "tests/models/test_readme.py runs what `make chat` ends in; the others are this test run, or take hours",
    "pip ": "it installs",
    "apt-get ": "it installs",
    "python ": "benchmarks and wheels take minutes or more",
    "edgespec calibrate": "it takes 50 seconds on any machine, and tests/engine calibrates",
    "edgespec export": "tests/models/test_npu_page.py exports the same model",
    "edgespec generate build/": "it needs what `edgespec export` writes",
    "edgespec bench --arms": "minutes; another benchmark of the page runs",
    "edgespec bench --suite short": "minutes; another benchmark of the page runs",
    "edgespec bench qwen2.5-coder-0.5b": "minutes; another benchmark of the page runs",
    "edgespec bench --suite quick --category code": "minutes; another benchmark of the guide runs",
    "edgespec bench --category qa": "a minute; tests/cli writes such a log, and test_readme.py runs this benchmark",
    "edgespec bench --suite ours --arms plain --passes 1": "minutes; tests/bench writes such a log and reads it",
    "edgespec chat hf:Qwen/Qwen3-8B-GGUF": "it needs a hub, and what `edgespec export` writes",
    "edgespec memory clear": "it would delete the history of the user who runs the tests; tests/cli clears one",
    "edgespec memory learn": "it needs texts; tests/cli learns",
    "edgespec models rm": "it would delete a model that other tests use",
}
# test_readme.py runs these, which some pages repeat.
README = console_commands("README.md")
COMMANDS = [
    command
    for command in dict.fromkeys(command for page in GUIDE for command in console_commands(page))
    if not command.startswith(tuple(NOT_RUN)) and command not in README
]
# The input of chats if the page shows no pipe.
PROMPT = "Name a prime number.\n"


def test_all_exceptions_from_running_docs_commands_match_a_command() -> None:
    assert len(COMMANDS) >= 20
    for beginning in NOT_RUN:
        assert any(command.startswith(beginning) for page in GUIDE for command in console_commands(page)), beginning


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_in_the_guide_runs(command: str, tmp_path: Path) -> None:
    given = ""
    if " | " in command:
        source, command = command.split(" | ")
        given = subprocess.run(["bash", "-c", source], capture_output=True, text=True, check=True).stdout
    if shlex.split(command)[1] == "chat":
        given = given or PROMPT
        command += "" if "--max-tokens" in command else " --max-tokens 8"
    run_command(command, tmp_path, given=given)


def test_the_chat_page_lists_all_chat_commands() -> None:
    words = [sys.executable, "-m", "edgespec", "chat", "smollm2-135m"]
    done = subprocess.run(words, input="/help\n", capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    commands = set(re.findall(r"^(/\w+)", done.stderr, re.MULTILINE))
    assert len(commands) >= 9
    assert commands <= set(re.findall(r"`(/\w+)", read_page("docs/guide/chat.md")))
