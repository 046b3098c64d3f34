"""Every command under docs/ that needs only the processor, run as shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import console_commands, run_command

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

# my-machine.toml stands for the reader's own machine file. A benchmark takes minutes, and test_readme.py runs one.
COMMANDS = [
    command
    for page in ("docs/two-devices.md", "docs/simulation.md")
    for command in console_commands(page)
    if "my-machine.toml" not in command
]
README = console_commands("README.md")  # test_readme.py runs these


def test_the_device_pages_show_plan_verify_and_bench_commands() -> None:
    assert [command.split("edgespec ")[1].split()[0] for command in COMMANDS] == ["plan", "verify", "bench", "plan"]


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command not in README and "edgespec bench" not in command]
)
def test_every_command_of_the_device_pages_runs(command: str, tmp_path: Path) -> None:
    run_command(command, tmp_path)
