"""A server that is asked at another port of this machine, as SSH carries one: programs and the page work there."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.server.test_page import BROWSER, PAGE
from tests.support.http_server import NAME, WAIT_S, Running


@contextmanager
def carried(port: int) -> Iterator[int]:
    """Another port of this machine, whose bytes are those of ``port``, as with ``ssh -L``."""

    def carry(own: socket.socket) -> None:
        with own, socket.create_connection(("127.0.0.1", port)) as other:
            ends = {own: other, other: own}
            while True:
                for end in select.select(list(ends), [], [], WAIT_S)[0] or [own]:
                    if not (data := end.recv(65536)):
                        return
                    ends[end].sendall(data)

    def accept() -> None:
        while True:
            try:
                own = listening.accept()[0]
            except OSError:
                return
            threading.Thread(target=carry, args=(own,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_programs_and_the_page_work_at_a_carried_port(server: Running) -> None:
    question = {"model": NAME, "messages": [{"role": "user", "content": "the people"}], "max_tokens": 8, "seed": 1}
    with carried(server.port) as port, server.client() as near:
        address = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=address, timeout=WAIT_S, trust_env=False) as far:
            assert far.get("/", headers=BROWSER).text == PAGE
            assert far.get("/v1/models").json()["data"][0]["id"] == NAME
            # What the page sends: its origin is the address in the browser.
            found = [
                client.post("/v1/chat/completions", json=question, headers=headers)
                for client, headers in ((near, {}), (far, {"origin": address}), (far, {}))
            ]
            assert [each.status_code for each in found] == [200] * 3
            assert len({each.json()["choices"][0]["message"]["content"] for each in found}) == 1
            stream = far.post("/v1/chat/completions", json={**question, "stream": True})
            assert stream.text.rstrip().endswith("[DONE]")
