"""A saved session is restored while the engine is used by others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgespec.errors import ClosedError
from edgespec.files.session_file import SessionFile
from tests.engine.answers import WAIT_S
from tests.support.http_server import wait_until
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels, answer


def test_other_sessions_answer_while_a_saved_cache_is_read_and_the_engine_may_be_closed(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_native()
    begun, release, parts = threading.Event(), threading.Event(), SessionFile.parts

    def slow_disk(self: SessionFile) -> Iterator[bytes]:
        begun.set()
        assert release.wait(WAIT_S)
        yield from parts(self)

    monkeypatch.setattr(SessionFile, "parts", slow_disk)
    with tiny.load(runtime="native", draft="none") as engine, ThreadPoolExecutor(3) as threads:
        pair, file = engine.pair, tmp_path / "conversation"
        with engine.session() as session:
            answer(session.generate("hello", max_tokens=3))
            session.save(file)
        try:
            restored = threads.submit(engine.restore, file)
            assert begun.wait(WAIT_S)
            assert not pair.adopt(threads=1), "the target has an open cache"
            with engine.session() as session:
                answered = threads.submit(answer, session.generate("hello", max_tokens=3))
                assert answered.result(WAIT_S).finish_reason == "length"
            closed = threads.submit(engine.close)
            wait_until(lambda: pair.closed)
        finally:
            release.set()
        with pytest.raises(ClosedError):
            restored.result(WAIT_S)
        closed.result(WAIT_S)
        assert pair.pool.rooms.positions == ()
