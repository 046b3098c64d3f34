"""Running the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import InProcess


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    """The program with an empty home, in this process."""
    return InProcess(tmp_path / "home", monkeypatch, capsys)
