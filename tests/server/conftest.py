"""Servers of tiny models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.engine.engine import Engine
from edgespec.text.conversation.answer_parts import AnswerText
from tests.support.http_server import Running, running
from tests.support.tiny_models import TinyModels


@pytest.fixture
def anyio_backend() -> str:
    """Tests that are coroutines run as the server does."""
    return "asyncio"


@pytest.fixture(scope="package")
def server(tiny: TinyModels) -> Iterator[Running]:
    """A server of the tiny pair, which guesses in every round: nothing is measured between requests."""
    with running(lambda: tiny.load(depth=3)) as found:
        found.wait_until(lambda: found.service.keeper.state == "ready")
        yield found


@pytest.fixture
def engine(server: Running) -> Engine:
    """The engine of ``server``."""
    found = server.service.keeper.engine
    assert found is not None
    return found


@pytest.fixture(scope="package")
def slow(tiny: TinyModels) -> Iterator[Running]:
    """A server whose model takes a second for a thousand tokens of prompt."""
    with running(lambda: tiny.load(tiny.slow, draft="none", lookup=False, context=8192)) as found:
        found.wait_until(lambda: found.service.keeper.state == "ready")
        yield found


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Chunks of text that come in place of an answer, which ends with the last one."""
    chunks = list[str]()
    feed = AnswerText.feed

    def scripted(self: AnswerText, token: int, held: int = 0) -> tuple[str, bool]:
        return (chunks.pop(0), not chunks) if chunks else feed(self, token, held)

    monkeypatch.setattr(AnswerText, "feed", scripted)
    return chunks
