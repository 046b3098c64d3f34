"""Running the program."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import InProcess
from tests.support.exporting import ANSWER_TOKENS, PROMPTS, TEXT
from tests.support.tiny_models import TinyModels


@pytest.fixture(scope="module")
def pair(tiny: TinyModels) -> tuple[str, ...]:
    """Options that name the tiny pair."""
    return ("--target", str(tiny.target), "--draft", str(tiny.drafter))


@pytest.fixture(scope="module")
def root(tiny: TinyModels) -> Path:
    """A home whose probe is made once for all these tests."""
    return tiny.home.root


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    """The program with an empty home, in this process."""
    return InProcess(tmp_path / "home", monkeypatch, capsys)


@pytest.fixture
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is asked a few prompts: enough to see what is done with its answers."""
    from edgespec.bench import suite
    from edgespec.export.trim import choose_rows

    monkeypatch.setattr(suite, "calibration_prompts", lambda: PROMPTS)
    monkeypatch.setattr(choose_rows, "TOKENS_PER_PROMPT", ANSWER_TOKENS)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text whose tokens choose the rows."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Sizes that a tiny vocabulary can be trimmed to."""
    from edgespec.export.trim import vocabtrim

    found = (300, 400, 500)
    monkeypatch.setattr(vocabtrim, "CANDIDATE_SIZES", found)
    return found
