"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import signal
from pathlib import Path
from typing import Any

import pytest

from edgespec.files.home import Home
from edgespec.hardware import neighbours
from tests.support.tiny_models import TinyModels


def pytest_configure() -> None:
    """A shell starts background jobs with Ctrl-C ignored, and nohup ignores SIGHUP: the tests send both."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Thousands of collected tests stay to the end: no collection of garbage needs to go through them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs beside the tests: measurements are made again where other programs disturbed them."""
    monkeypatch.setattr(neighbours, "processor_seconds", lambda: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Tiny models, and a place to keep what is measured about them."""
    folder = tmp_path_factory.mktemp("tiny-models")
    return TinyModels(folder, Home(folder / "home"))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An empty home of this test's own."""
    return Home(tmp_path / "home")


@pytest.fixture
def loaded_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands have their drafter in memory before they answer: a tiny target is through with most answers sooner."""
    from edgespec import Engine

    load = Engine.load

    def load_both(*arguments: Any, **settings: Any) -> Engine:
        engine = load(*arguments, **settings)
        engine.load_drafter()
        return engine

    monkeypatch.setattr(Engine, "load", load_both)
