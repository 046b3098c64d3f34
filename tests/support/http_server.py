"""The real server on a real port, in a thread of the tests' process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from edgespec.engine.engine import Engine
from edgespec.server.keeper import ModelKeeper
from edgespec.server.run import Server, open_sockets
from edgespec.server.service import RequestLine, Service

WAIT_S = 60.0
NAME = "tiny"


@dataclass
class Running:
    """A server that runs: its address, its parts, and the lines of its log."""

    service: Service
    server: Server
    port: int
    lines: list[RequestLine] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False, **settings)

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)

    def chat(self, text: str, **body: Any) -> httpx.Response:
        return self.post(messages=[{"role": "user", "content": text}], **body)

    def asking(self, text: str, **body: Any) -> Future[httpx.Response]:
        """A chat on another thread."""
        return ThreadPoolExecutor(1).submit(self.chat, text, **body)

    @staticmethod
    def send_chat(own: socket.socket, text: str, **body: Any) -> None:
        """Send a chat's request on an open connection, and leave its answer to the caller."""
        content = json.dumps({"messages": [{"role": "user", "content": text}], **body}).encode()
        own.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        own.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT_S)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        wait_until(holds)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for another thread; fail after ``WAIT_S``."""
    until = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.005)


class HeldLoad:
    """Loads once ``release`` is set."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self.release = threading.Event()
        self._load = load

    def __call__(self) -> Engine:
        assert self.release.wait(WAIT_S)
        return self._load()


@contextmanager
def running(load: Callable[[], Engine], *, keep_alive_s: float | None = None, **settings: Any) -> Iterator[Running]:
    """Run a server until the end of the block, and check that it ends."""
    lines: list[RequestLine] = []
    keeper = ModelKeeper(load, keep_alive_s)
    service = Service(keeper=keeper, names=(NAME, "default"), log=lines.append, **settings)
    sockets = open_sockets("127.0.0.1", 0)
    server = Server(service, sockets)
    found = Running(service, server, sockets[0].getsockname()[1], lines)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            server.run_to_end()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
