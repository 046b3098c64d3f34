"""Connections and bodies that no honest client sends: an error or a closed connection, and the next request works."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.client import BadStatusLine, HTTPResponse

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from edgespec.server import app
from edgespec.server.bodies import MOST_BODIES_BYTES, BodyReader
from edgespec.server.connections import CLOSING_S, MOST_CONNECTIONS, RECEIVE_S, WRITING_S, LimitedProtocol
from edgespec.server.security import Access
from edgespec.text.request_budget import RequestBudget
from tests.support.http_server import HeldLoad, Running, running
from tests.support.tiny_models import TinyModels

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(autouse=True)
def _serves_afterwards(server: Running) -> Iterator[None]:
    """The next request is answered, and no connection or answer is left."""
    yield
    assert server.chat("hello", max_tokens=1).status_code == 200
    server.wait_until(lambda: server.service.connections() == 0)
    assert (server.service.queue.running, server.service.queue.waiting) == (0, 0)


def read_all(own: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := own.recv(65536):
            found += part
    return found


def error_on(own: socket.socket) -> tuple[int, str] | None:
    """Status and code of the next response, an error in OpenAI's shape; None if the connection was closed."""
    try:
        response = HTTPResponse(own)
        response.begin()
        error = json.loads(response.read())["error"]
    except (BadStatusLine, ConnectionError):
        return None
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status, error["code"]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        POST + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        # h11 before 0.16 reads any two bytes as the end of a chunk's line.
        POST + b'Transfer-Encoding: chunked\r\n\r\n2f\r\n{"messages": [{"role": "user", "content": ""}]}XX0\r\n\r\n',
        b"A" * 200_000,
    ],
)
def test_what_is_not_http_gets_an_error_and_a_closed_connection(server: Running, sent: bytes) -> None:
    with server.connect() as own:
        with contextlib.suppress(ConnectionError):
            own.sendall(sent)
        error = error_on(own)
    assert error is None or error[0] == 400


def test_a_body_larger_than_the_context_allows_is_refused_before_it_is_read(server: Running) -> None:
    context = server.service.keeper.context_length
    most = RequestBudget(context).body_bytes
    with server.connect() as own:
        own.sendall(POST + b"Content-Length: %d\r\n\r\n{" % (most + 1))
        assert error_on(own) == (413, "body_too_large")
    with server.connect() as own:
        own.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(int(most) // 2**16 + 1):
                own.sendall(b"10000\r\n" + b" " * 2**16 + b"\r\n")
        assert error_on(own) == (413, "body_too_large")
    empty = len(json.dumps({"messages": [{"role": "user", "content": ""}]}, separators=(",", ":")))
    longest = "x" * (int(most) - empty)
    assert server.chat(longest).json()["error"]["code"] == "context_length_exceeded"
    message = server.chat(longest + "x").json()["error"]["message"]
    assert f"larger than {most} bytes, the most for a context of {context} tokens: images and all else" in message


@pytest.mark.parametrize(
    ("encodings", "named"),
    [
        (["gzip"], "gzip"),
        (["X-GZIP"], "x-gzip"),
        (["identity,br"], "br"),
        (["identity", "zstd"], "zstd"),
        (["Identity"], None),
        (["utf-8"], None),
        (["aws-chunked"], None),
        ([""], None),
    ],
)
def test_a_compressed_body_is_refused_by_the_name_of_its_encoding(
    server: Running, encodings: list[str], named: str | None
) -> None:
    content = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}).encode()
    with server.client(headers=[("content-encoding", each) for each in encodings]) as client:
        response = client.post("/v1/chat/completions", content=gzip.compress(content) if named else content)
    assert response.status_code == (415 if named else 200), response.text
    if named:
        error = response.json()["error"]
        assert (error["code"], f"compressed ({named})" in error["message"]) == ("unsupported_encoding", True)


def test_large_bodies_that_arrive_together_have_a_limit(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BodyReader()._most == MOST_BODIES_BYTES == 64_000_000
    monkeypatch.setattr(server.service, "bodies", bodies := BodyReader(800_000))
    with contextlib.ExitStack() as opened:
        for number in range(1, 5):
            own = opened.enter_context(server.connect())
            own.sendall(POST + b"Content-Length: 200000\r\n\r\n" + b" " * 190_000)
            server.wait_until(lambda number=number: bodies.held == number * 190_000)  # type: ignore[misc]
        refused = server.chat("x" * 100_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert server.chat("hello", max_tokens=1).status_code == 200, "small ones have no such limit"
    server.wait_until(lambda: bodies.held == 0)
    assert server.chat("x" * 100_000).status_code == 400


def test_large_bodies_of_one_key_leave_room_for_another(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "bodies", bodies := BodyReader(600_000))

    def send(own: socket.socket, key: bytes) -> None:
        own.sendall(POST + b"X-Api-Key: " + key + b"\r\nContent-Length: 200000\r\n\r\n" + b" " * 190_000)

    with (
        monkeypatch.context() as keys,
        server.connect() as first,
        server.connect() as second,
        server.connect() as other,
    ):
        keys.setattr(server.service, "access", Access(keys=("one-long-key", "another-key")))
        send(first, b"one-long-key")
        server.wait_until(lambda: bodies.held == 190_000)
        send(second, b"one-long-key")
        assert error_on(second) == (429, "queue_full")
        send(other, b"another-key")
        server.wait_until(lambda: bodies.held == 380_000)


def test_a_request_that_does_not_arrive_is_ended(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RECEIVE_S == LimitedProtocol.receive_s == 30.0
    monkeypatch.setattr(LimitedProtocol, "receive_s", 2.0)
    with server.connect() as silent, server.connect() as head, server.connect() as body:
        head.sendall(b"GET /health HTTP/1.1\r\nX: ")
        stop = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not stop.wait(0.02):
                    head.sendall(b"a")

        thread = threading.Thread(target=drip)
        thread.start()
        body.sendall(POST + b'Content-Length: 500\r\n\r\n{"messages"')
        assert read_all(silent) == b""
        assert read_all(body) == b""
        assert error_on(head) == (408, "timeout")
        stop.set()
        thread.join()


def test_a_connection_may_send_its_next_request_later(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "receive_s", 1.0)
    with server.client() as client:
        assert client.get("/health").status_code == 200
        time.sleep(1.3)
        assert client.get("/health").status_code == 200
    assert len({line.client for line in server.lines[-2:]}) == 1


def test_a_client_that_closed_its_side_gets_no_answer_and_holds_nothing(server: Running) -> None:
    with server.connect() as own:
        content = b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400}'
        own.sendall(POST + b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
        own.shutdown(socket.SHUT_WR)
        read_all(own)


def test_many_connections_do_not_stop_the_next_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_CONNECTIONS == LimitedProtocol.most_connections == 512
    # Both ends of a connection are descriptors of this process, which may have 1024.
    monkeypatch.setattr(LimitedProtocol, "most_connections", 100)
    with contextlib.ExitStack() as opened:
        for number in range(700):
            own = opened.enter_context(server.connect())
            if number % 3 == 0:
                with contextlib.suppress(ConnectionError):
                    own.sendall(b"GET /health HTTP/1.1\r\nX: ")
        server.wait_until(lambda: server.service.connections() <= 100)
        assert server.chat("hello", max_tokens=1).status_code == 200


def test_bodies_that_do_not_arrive_do_not_take_all_connections(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LimitedProtocol, "most_connections", 5)
    with contextlib.ExitStack() as opened:
        for _ in range(5):
            opened.enter_context(server.connect()).sendall(POST + b"Content-Length: 500\r\n\r\n{")
        server.wait_until(lambda: server.service.connections() == 5)
        time.sleep(0.1)  # their heads are read
        assert server.chat("hello", max_tokens=1).status_code == 200


def test_connections_that_answer_are_not_replaced(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "most_connections", 1)
    load = HeldLoad(lambda: tiny.load(draft="none"))
    content = b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}'

    with running(load) as other, other.connect() as busy:
        busy.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
        other.wait_until(lambda: other.service.queue.running == 1)
        with other.connect() as further:
            assert read_all(further) == b""
        load.release.set()
        assert read_all(busy).startswith(b"HTTP/1.1 200")


def test_a_client_that_asks_much_and_takes_nothing_is_ended(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WRITING_S == LimitedProtocol.writing_s == app.LONGEST_WRITE_S + CLOSING_S
    monkeypatch.setattr(app, "LONGEST_WRITE_S", 0.05)
    monkeypatch.setattr(LimitedProtocol, "closing_s", 0.05)
    monkeypatch.setattr(LimitedProtocol, "writing_s", 0.2)
    before = len(server.lines)
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.connect(("127.0.0.1", server.port))
        own.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500)
        server.wait_until(lambda: "the client left" in [line.error for line in server.lines[before:]])
        server.wait_until(lambda: server.service.connections() == 0)  # the client still holds its end


def test_requests_in_one_packet_are_answered_in_order(server: Running) -> None:
    with server.connect() as own:
        own.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        own.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        response = read_all(own)
    assert response.count(b"HTTP/1.1 200") == 4
    assert response.rfind(b'"object":"list"') > response.rfind(b'"status":"ok"')


EMPTY_LINES = (b"\r\n", b"\n", b"\r\n\r\n")


@pytest.mark.parametrize("lines", EMPTY_LINES)
@pytest.mark.parametrize("apart", [False, True])
def test_empty_lines_behind_a_body_get_no_response(server: Running, lines: bytes, apart: bool) -> None:
    content = b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}'
    first = POST + b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
    with server.connect() as own:
        for sent in (first, lines) if apart else (first + lines,):
            own.sendall(sent)
        first_response = HTTPResponse(own)
        first_response.begin()
        first_response.read()
        assert first_response.status == 200
        own.sendall(lines + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        response = read_all(own)  # an error for the lines would be in front
    assert response.startswith(b"HTTP/1.1 200")
    assert response.count(b"HTTP/1.1") == 1


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda own: st.lists(own, max_size=3) | st.dictionaries(st.text(max_size=5), own, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/models/", "/health", "/x"]),
    st.sampled_from(["POST", "GET", "PUT", "DELETE", "OPTIONS"]),
    st.binary(max_size=60)
    | st.dictionaries(st.sampled_from(["messages", "prompt", "n", "stop", "stream", "seed"]), _values).map(
        lambda body: json.dumps({"max_tokens": 1, **body}).encode()
    ),
)
def test_any_request_gets_an_answer_or_an_error_in_openais_shape(
    server: Running, path: str, method: str, content: bytes
) -> None:
    with server.client() as client:
        response = client.request(method, path, content=content)
    assert response.status_code < 500
    if response.status_code >= 400:
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
