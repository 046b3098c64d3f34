"""An HTTP proxy on loopback: forwards plain requests, tunnels TLS, records its requests, and can refuse."""

from __future__ import annotations

import http.client
import select
import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from tests.support.serving import Silent, serving


@dataclass
class Proxy:
    """``refuse``: the status of every answer."""

    refuse: int | None = None
    asked: list[str] = field(default_factory=list)
    authorizations: set[str | None] = field(default_factory=set)
    port: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def running_proxy(proxy: Proxy) -> AbstractContextManager[Proxy]:
    return serving(_Handler, proxy)


class _Handler(Silent, BaseHTTPRequestHandler):
    state: Proxy

    def _refused(self) -> bool:
        self.state.asked.append(self.path)
        self.state.authorizations.add(self.headers.get("Proxy-Authorization"))
        if self.state.refuse is not None:
            self.send_response(self.state.refuse)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return True
        return False

    def do_CONNECT(self) -> None:
        if self._refused():
            return
        host, _, port = self.path.partition(":")
        with socket.create_connection((host, int(port))) as upstream:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: upstream, upstream: self.connection}
            while True:
                ready, _, _ = select.select(list(ends), [], [], 10)
                for end in ready:
                    data = end.recv(65536)
                    if not data:
                        return
                    ends[end].sendall(data)
                if not ready:
                    return

    def do_GET(self) -> None:
        if self._refused():
            return
        parts = urlsplit(self.path)
        upstream = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=60)
        headers = {key: value for key, value in self.headers.items() if not key.lower().startswith("proxy-")}
        upstream.request(self.command, parts.path + (f"?{parts.query}" if parts.query else ""), headers=headers)
        answer = upstream.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("transfer-encoding", "connection"):
                self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)
        upstream.close()

    do_HEAD = do_GET  # noqa: N815 - as the server calls it
