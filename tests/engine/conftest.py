"""Fixtures: engines and sessions of the tiny pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from tests.engine.answers import Forward
from tests.support.other_programs import User
from tests.support.tiny_models import TinyModels
from tests.support.watched_sequences import watch_forwards


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    """The tiny pair with the model drafter only."""
    with tiny.load_speculating(lookup=False) as engine:
        yield engine


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with engine.session() as session:
        yield session


@pytest.fixture(scope="module")
def slow_engine(tiny: TinyModels) -> Iterator[Engine]:
    """An engine whose target takes seconds for a prompt of a few thousand tokens."""
    with tiny.load(tiny.slow, draft="none", lookup=False, context=8192) as engine:
        yield engine


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    """A user of this machine without any files."""
    user = User(tmp_path / "user")
    for name, value in user.environment.items():
        monkeypatch.setenv(name, value)
    return user


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The width of every forward."""
    seen: list[int] = []
    watch_forwards(monkeypatch, lambda _sequence, tokens, _rows: seen.append(len(tokens)))
    return seen


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[Forward]:
    """Records every forward of every sequence."""
    seen: list[Forward] = []
    watch_forwards(monkeypatch, lambda sequence, tokens, rows: seen.append(Forward(sequence, len(tokens), rows)))
    return seen
