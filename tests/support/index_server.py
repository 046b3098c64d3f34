"""A package index on loopback: pages of links or JSON, wheels that break off, and a password."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote

from tests.support.serving import Silent, serving


@dataclass
class IndexServer:
    """``wheels`` by file name; the beginning of a name is its project."""

    wheels: dict[str, bytes] = field(default_factory=dict)
    as_json: bool = True
    hashes: bool = True
    absolute: bool = False  # whether links have scheme and host, without the password
    password: str | None = None  # "user:password"
    cut_after: list[int] = field(default_factory=list)  # bytes of each next wheel before the connection ends
    corrupt_next: int = 0
    status: int | None = None
    garbage: bytes | None = None  # the content of every page
    chunk_delay_s: float = 0.0
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # path and range
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://{f'{self.password}@' if self.password else ''}127.0.0.1:{self.port}/simple"

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}" if self.absolute else ""

    def bodies(self) -> list[tuple[str, str | None]]:
        return [request for request in self.requests if request[0].endswith(".whl")]


def running_index(index: IndexServer) -> AbstractContextManager[IndexServer]:
    return serving(_Handler, index)


class _Handler(Silent, BaseHTTPRequestHandler):
    state: IndexServer

    def do_GET(self) -> None:
        index, path = self.state, unquote(self.path)
        index.requests.append((path, self.headers.get("Range")))
        wanted = index.password and f"Basic {base64.b64encode(index.password.encode()).decode()}"
        if index.status is not None:
            self._answer(index.status, "text/plain", b"")
        elif wanted and self.headers.get("Authorization") != wanted:
            self._answer(401, "text/plain", b"")
        elif path.startswith("/simple/"):
            self._page(path.removeprefix("/simple/").strip("/"))
        elif path.startswith("/files/") and path.removeprefix("/files/") in index.wheels:
            self._wheel(index.wheels[path.removeprefix("/files/")])
        else:
            self._answer(404, "text/plain", b"")

    def _page(self, project: str) -> None:
        index = self.state
        found = {name: data for name, data in index.wheels.items() if name.split("-")[0].replace("_", "-") == project}
        if index.garbage is not None:
            self._answer(200, "application/vnd.pypi.simple.v1+json", index.garbage)
        elif not found:
            self._answer(404, "text/html", b"<html>not found</html>")
        elif index.as_json and "simple.v1+json" in (self.headers.get("Accept") or ""):
            files = [
                {
                    "filename": name,
                    "url": f"{index.origin}/files/{name}" if index.absolute else f"../../files/{name}",
                    "hashes": {"sha256": hashlib.sha256(data).hexdigest()} if index.hashes else {},
                }
                for name, data in found.items()
            ]
            document = {"meta": {"api-version": "1.0"}, "name": project, "files": files}
            self._answer(200, "application/vnd.pypi.simple.v1+json", json.dumps(document).encode())
        else:
            hashes = {
                name: f"#sha256={hashlib.sha256(data).hexdigest()}" if index.hashes else ""
                for name, data in found.items()
            }
            links = (f'<a href="{index.origin}/files/{name}{own}">{name}</a>' for name, own in hashes.items())
            self._answer(200, "text/html", f"<!DOCTYPE html><html><body>{'<br>'.join(links)}</body></html>".encode())

    def _wheel(self, data: bytes) -> None:
        index, start = self.state, 0
        wanted = self.headers.get("Range")
        if wanted:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                self._answer(416, "text/plain", b"")
                return
        if index.corrupt_next:
            index.corrupt_next -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = min(len(data), start + index.cut_after.pop(0)) if index.cut_after else len(data)
        for position in range(start, end, 8192):
            self.wfile.write(data[position : min(position + 8192, end)])
            time.sleep(index.chunk_delay_s)
        self.close_connection = True

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
