"""Every command of docs/npu.md, run as shown, except those that need an NPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import console_commands, run_command

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

COMMANDS = console_commands("docs/npu.md")


def test_the_npu_page_shows_export_doctor_and_generate() -> None:
    assert [command.split()[1] for command in COMMANDS] == ["export", "doctor", "generate"]


def test_the_npu_pages_commands_run_in_order(tmp_path: Path) -> None:
    for command in COMMANDS:
        run_command(command, tmp_path)
