"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from edgespec.files.home import Home
from edgespec.hardware import neighbours
from edgespec.runtimes.llama import library
from tests.support.lock_ranks import ranked_locks
from tests.support.steady_rounds import steady_rounds
from tests.support.tiny_models import TinyModels


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Undo ignored signals, which the tests send: shells let background jobs ignore Ctrl-C, nohup ignores SIGHUP."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Tests do not time: an example may take long while other programs run.
    hypothesis.settings.register_profile("edgespec", deadline=None)
    hypothesis.settings.load_profile("edgespec")
    # pytest-rerunfailures tells the main process about each test in two small messages, of which one is answered. The
    # system holds the next one back until the last is acknowledged, up to 40 ms: longer than most tests take.
    told = getattr(getattr(config, "failures_db", None), "sock", None)
    if told is not None:
        told.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_finish() -> None:
    """Freeze the thousands of collected tests, so that garbage collections skip them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore other load on the machine: measurements are otherwise repeated if other programs disturb them.

    Not for engines that many tests share: their times may be kept in the user's home.
    """
    monkeypatch.setattr(neighbours, "processor_seconds", lambda: None)


# Folders whose tests give the policies their times, or measure real models.
OWN_TIMES = {"planning", "models"}


@pytest.fixture(autouse=True)
def _steady_rounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What engines decide from the times of rounds does not depend on this machine."""
    if OWN_TIMES.isdisjoint(request.path.parts):
        steady_rounds(monkeypatch)


@pytest.fixture
def llama_repacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp may repack weights, also where its build has AMX: for tests whose weights no AMX code multiplies."""
    found = replace(library.load(), has_tiles=False)
    monkeypatch.setattr(library, "_load", lambda: found)


@pytest.fixture(scope="session", autouse=True)
def _ranked_locks() -> Iterator[list[str]]:
    with ranked_locks() as wrong:
        yield wrong


@pytest.fixture(autouse=True)
def _locks_in_order(_ranked_locks: list[str]) -> Iterator[None]:
    """No thread took a lock while it held an inner one; an error on another thread may go unnoticed otherwise."""
    yield
    wrong, _ranked_locks[:] = list(_ranked_locks), []
    assert not wrong


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Tiny models, and a home for measurements of them."""
    folder = tmp_path_factory.mktemp("tiny-models")
    return TinyModels(folder, Home(folder / "home"))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An empty home for this test only."""
    return Home(tmp_path / "home")


@pytest.fixture
def loaded_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands wait for their drafter before they answer: a tiny target finishes most answers before it is loaded."""
    from edgespec import Engine

    load = Engine.load

    def load_both(*arguments: Any, **settings: Any) -> Engine:
        engine = load(*arguments, **settings)
        engine.load_drafter()
        return engine

    monkeypatch.setattr(Engine, "load", load_both)
