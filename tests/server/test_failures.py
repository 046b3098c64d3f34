"""Failures below and behind the server: lost processes, limits of time, stalled readers; threads and files."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import sys
import threading
import time
from asyncio import base_events
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgespec.server import app, run, service
from edgespec.server.connections import CLOSING_S, LimitedProtocol
from tests.engine.answers import plain_text
from tests.engine.test_thinking import BEGINS
from tests.server.test_http import events, failed, text_of
from tests.support.http_server import WAIT_S, Running, running
from tests.support.started_threads import started_threads
from tests.support.tiny_models import TinyModels, load_drafter, require_speculation


def test_an_answer_that_takes_too_long_is_ended(slow: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert service.LONGEST_REQUEST_S == 3600.0
    monkeypatch.setattr(service, "LONGEST_REQUEST_S", 0.3)
    failed(slow.chat("hello", max_tokens=8000), 504, "timeout")
    monkeypatch.setattr(service, "LONGEST_REQUEST_S", 2.0)  # the answer has begun by then
    streamed = slow.chat("hello", max_tokens=8000, stream=True)
    assert streamed.status_code == 200
    last = streamed.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    slow.wait_until(lambda: slow.service.queue.running == 0)
    assert slow.chat("hello", max_tokens=1).status_code == 200


@pytest.mark.skipif(sys.platform == "win32", reason="the test kills a process as POSIX does")
def test_a_killed_drafter_changes_no_text(tiny: TinyModels) -> None:
    with running(lambda: tiny.load_speculating(lookup=False, draft_isolation="process")) as server:
        server.wait_until(lambda: server.service.keeper.state == "ready")
        engine = server.service.keeper.engine
        assert engine is not None
        require_speculation(engine)
        load_drafter(engine)
        expected = plain_text(engine, "hello", max_tokens=400).text
        body = {"max_tokens": 400, "temperature": 0}
        answer = server.asking("hello", **body)
        server.wait_until(lambda: engine.pair.answering)
        (worker,) = psutil.Process().children()
        worker.kill()
        assert text_of(answer.result(WAIT_S).json()) == expected
        assert text_of(server.chat("hello", **body).json()) == expected


def test_a_model_file_that_is_written_to_fails_the_next_answer_and_one_in_its_place_does_not(
    tiny: TinyModels, tmp_path: Path
) -> None:
    path, other = Path(shutil.copy(tiny.target, tmp_path / "m.gguf")), tmp_path / "other.gguf"
    with running(lambda: tiny.load(path, draft="none")) as server:
        expected = text_of(server.chat("hello", max_tokens=8, temperature=0).json())
        os.utime(path, ns=(2, 2))
        assert text_of(server.chat("hello", max_tokens=8, temperature=0).json()) == expected, "the bytes are the same"
        with path.open("r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(b"\x01" * 64)
        os.utime(path, ns=(1, 1))  # the clock of a file system may be coarse
        error = failed(server.chat("hello", max_tokens=8, temperature=0), 503, "unavailable")
        assert f"{path}: the file was written to while the model is loaded" in error["message"]
        assert server.chat("hello", max_tokens=1).status_code == 200, "the model is loaded again"
    shutil.copy(tiny.target, path)
    with running(lambda: tiny.load(path, draft="none")) as server:
        server.chat("hello", max_tokens=1)
        shutil.copy(tiny.stranger, other)
        other.replace(path)
        assert text_of(server.chat("hello", max_tokens=8, temperature=0).json()) == expected
        path.unlink()
        assert text_of(server.chat("hello", max_tokens=8, temperature=0).json()) == expected


def test_a_server_ends_although_a_client_takes_nothing(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CLOSING_S == LimitedProtocol.closing_s == 10.0
    monkeypatch.setattr(LimitedProtocol, "closing_s", 0.1)
    monkeypatch.setattr(app, "LONGEST_WRITE_S", 0.5)
    with running(lambda: tiny.load(tiny.slow, draft="none", lookup=False, context=8192)) as server:
        server.wait_until(lambda: server.service.keeper.state == "ready")
        for each in server.server._own_sockets:  # connections inherit it
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            own.connect(("127.0.0.1", server.port))
            server.send_chat(own, "hello", max_tokens=8000, stream=True)
            server.wait_until(lambda: server.service.queue.running == 1)
            assert server.server.stop()
            server.wait_until(lambda: server.service.queue.running == 0)
            server.wait_until(lambda: server.service.connections() == 0)  # the client still holds its end
    (line,) = server.lines
    assert (line.status, line.error) == (200, "the client left")


async def _wait_closed(server: Any) -> None:
    """``asyncio.Server.wait_closed`` of Python 3.12 and later: waits for the connections too."""
    if server._waiters is not None:
        waiter = server._loop.create_future()
        server._waiters.append(waiter)
        await waiter


def test_a_second_signal_ends_a_server_whose_client_takes_nothing(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.LAST_WORDS_S == 1.0
    monkeypatch.setattr(run, "LAST_WORDS_S", 0.1)
    if sys.version_info < (3, 12):
        monkeypatch.setattr(base_events.Server, "wait_closed", _wait_closed)
    monkeypatch.setattr(app, "LONGEST_WRITE_S", 100 * WAIT_S)
    with running(lambda: tiny.load(tiny.slow, draft="none", lookup=False, context=8192)) as server:
        server.wait_until(lambda: server.service.keeper.state == "ready")
        for each in server.server._own_sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            own.connect(("127.0.0.1", server.port))
            server.send_chat(own, "hello", max_tokens=8000, stream=True)
            state = server.server.server_state
            server.wait_until(lambda: any(each.flow.write_paused for each in state.connections))
            assert server.server.stop()
            assert not server.server.stop()
            stopped = time.monotonic()
            server.wait_until(lambda: not state.tasks)
            assert time.monotonic() - stopped < run.DRAIN_S / 4, "it waits for no connection"


def test_thinking_is_reasoning_content(tiny: TinyModels, says: list[str]) -> None:
    said = ["so ", "it is", "\n</think>\n\nThe ", "answer"]
    with running(lambda: tiny.load(tiny.with_template("opens-http", BEGINS), draft="none", depth=0)) as server:
        server.wait_until(lambda: server.service.keeper.state == "ready")
        says += said
        message = server.chat("hello", max_tokens=20).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so it is", "The answer")
        says += said
        deltas = [chunk["choices"][0]["delta"] for chunk in events(server.chat("hello", max_tokens=20, stream=True))]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so it is"
        assert "".join(delta.get("content", "") for delta in deltas) == "The answer"
        earlier = {"role": "assistant", "content": "The answer", "reasoning_content": "so it is"}
        asked = {"role": "user", "content": "hello"}
        assert server.post(messages=[asked, earlier, asked], max_tokens=2).status_code == 200


def test_requests_of_all_kinds_leave_no_thread_and_no_file(slow: Running) -> None:
    def ask_all() -> None:
        asked = [
            {"text": "hello", "max_tokens": 20},
            {"text": "hello", "max_tokens": 20, "stream": True, "temperature": 1.0},
            {"text": "hello " * 3000},  # too long
            {"text": "hello", "n": 3, "max_tokens": 2},
            {"text": "hello", "top_p": 9},
        ]
        threads = [threading.Thread(target=lambda body=body: slow.chat(**body)) for body in asked]  # type: ignore[misc]
        for thread in threads:
            thread.start()
        for _ in range(3):  # clients that leave
            with slow.connect() as own:
                slow.send_chat(own, "hello", max_tokens=4000)
        for thread in threads:
            thread.join()
        slow.wait_until(lambda: slow.service.queue.running == 0 and slow.service.connections() == 0)

    def threads_left() -> int:
        return len(started_threads()) - slow.service.keeper.kept_sessions  # each has one

    def files_left() -> int:
        own = psutil.Process()
        return own.num_handles() if sys.platform == "win32" else own.num_fds()

    ask_all()
    time.sleep(0.1)  # threads of the requests end
    threads, files = threads_left(), files_left()
    for _ in range(5):
        ask_all()
    slow.wait_until(lambda: threads_left() <= threads and files_left() <= files)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("from_then_on", [False, True])
def test_a_thread_that_cannot_be_started_gives_503_and_leaves_nothing(
    slow: Running, monkeypatch: pytest.MonkeyPatch, stream: bool, from_then_on: bool
) -> None:
    """``ulimit -u`` or a container's ``pids.max``, reached at each of the starts that one request needs."""
    pool, start = slow.service.keeper._loaded.pool, threading.Thread.start  # type: ignore[union-attr]
    begun, failing = [0], [0]

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("edgespec"):
            begun[0] += 1
            if begun[0] == failing[0] or (from_then_on and begun[0] > failing[0]):
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    statuses = list[int]()
    for number in itertools.count(1):
        while pool._drop_oldest():  # so that the request opens one
            pass
        begun[0], failing[0] = 0, number
        response = slow.chat("hello", max_tokens=2, stream=stream)
        slow.wait_until(lambda: slow.service.queue.running == 0)
        needed, failing[0] = begun[0], sys.maxsize
        statuses.append(response.status_code)
        if response.status_code != 200:
            failed(response, 503, "unavailable")
            assert int(response.headers["retry-after"]) >= 1
        assert pool.in_use == 0
        assert slow.chat("hello", max_tokens=1).status_code == 200
        if needed < number:
            break
    assert statuses == [503, 200], "only a session starts a thread"
