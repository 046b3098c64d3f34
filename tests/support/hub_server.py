"""A real HTTP server on loopback with the model hub's endpoints and switchable faults.

The description of a file comes from the hub's address (127.0.0.1), its bytes from another host name (localhost), as
with the real hub and its CDN.
"""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import struct
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from tests.support.serving import Silent, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHUNK_BYTES = 16 * 1024


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class HubServer:
    """The server's files and faults; tests change the fields while it runs."""

    files: dict[str, bytes] = field(default_factory=dict)
    repo: str = "org/repo"
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    sizes: dict[str, int] = field(default_factory=dict)  # sizes in the listing that differ from the truth
    described: dict[str, Any] = field(default_factory=dict)  # other keys of the listing: cardData, gguf, tags
    small_files: set[str] = field(default_factory=set)  # kept in git, not LFS: the etag is git's sha1
    requests: list[Request] = field(default_factory=list)
    # Faults.
    refuse_next: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    refuse_always: tuple[int, dict[str, str]] | None = None
    cut_after: list[int] = field(default_factory=list)  # bytes of each next body before the connection is reset
    ignore_ranges: bool = False
    corrupt_next: int = 0  # bodies that arrive with one flipped byte
    chunk_delay_s: float = 0.0
    answer_delay_s: float = 0.0
    etag_override: str | None = None
    page: str | None = None  # which requests a sign-in page answers: "all" or only "bodies"
    redirect_to: str | None = None  # redirect target of every request
    tls: ssl.SSLContext | None = None
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    def bodies(self) -> list[Request]:
        """The requests for a file's bytes."""
        return [request for request in self.requests if request.path.startswith("/cdn/")]

    def etag(self, name: str) -> str:
        data = self.files[name]
        if self.etag_override is not None:
            return self.etag_override
        if name in self.small_files:
            return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return hashlib.sha256(data).hexdigest()


def running(hub: HubServer) -> AbstractContextManager[HubServer]:
    """Serve ``hub`` until the block ends."""
    return serving(_Handler, hub, hub.tls)


class _Handler(Silent, BaseHTTPRequestHandler):
    state: HubServer

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        hub, headers = self.state, self.headers
        path, _, query = unquote(self.path).partition("?")
        hub.requests.append(Request(self.command, path, headers.get("Range"), headers.get("Authorization")))
        time.sleep(hub.answer_delay_s)
        refusal = hub.refuse_next.pop(0) if hub.refuse_next else hub.refuse_always
        if refusal is not None:
            self._answer(refusal[0], refusal[1])
        elif hub.redirect_to is not None:
            self._answer(302, {"Location": hub.redirect_to})
        elif hub.page == "all" or (hub.page == "bodies" and path.startswith("/cdn/")):
            self._answer(200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>Welcome! Sign in</html>")
        elif path.startswith("/cdn/"):
            self._body(path.removeprefix("/cdn/"))
        elif path.startswith("/api/models/"):
            self._listing(path.removeprefix("/api/models/"), with_sizes="blobs=true" in query)
        elif "/resolve/" in path:
            self._resolve(path.lstrip("/"))
        else:
            self._answer(404, {})

    def _commit(self, repo: str, revision: str) -> str | None:
        """The commit, or None after sending the hub's own error."""
        hub = self.state
        if repo != hub.repo:
            self._answer(404, {"X-Error-Code": "RepoNotFound"})
        elif revision in hub.revisions.values():
            return revision
        elif revision not in hub.revisions:
            self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return hub.revisions[revision]
        return None

    def _listing(self, path: str, with_sizes: bool) -> None:
        repo, _, revision = path.partition("/revision/")
        commit = self._commit(repo, revision or "main")
        if commit is not None:
            siblings = [self._sibling(name, with_sizes) for name in self.state.files]
            document = {"id": repo, "sha": commit, "siblings": siblings, **self.state.described}
            self._answer(200, {"Content-Type": "application/json"}, json.dumps(document).encode())

    def _sibling(self, name: str, with_sizes: bool) -> dict[str, Any]:
        size = self.state.sizes.get(name, len(self.state.files[name]))
        if not with_sizes:
            return {"rfilename": name}
        if name in self.state.small_files:
            return {"rfilename": name, "size": size}
        return {"rfilename": name, "size": size, "lfs": {"sha256": self.state.etag(name), "size": size}}

    def _resolve(self, path: str) -> None:
        hub = self.state
        repo, _, rest = path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        commit = self._commit(repo, revision)
        if commit is None:
            return
        if name not in hub.files:
            self._answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if name in hub.small_files:
            headers["ETag"] = f'"{hub.etag(name)}"'
            self._answer(200, headers, hub.files[name])
            return
        headers |= {"X-Linked-Etag": f'"{hub.etag(name)}"', "X-Linked-Size": str(len(hub.files[name]))}
        headers["Location"] = f"{hub.scheme}://localhost:{hub.port}/cdn/{name}"
        self._answer(302, headers)

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self, name: str) -> None:
        hub = self.state
        data, start = hub.files[name], 0
        wanted = self.headers.get("Range")
        if wanted and not hub.ignore_ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                self._answer(416, {"Content-Range": f"bytes */{len(data)}"})
                return
        if hub.corrupt_next:
            hub.corrupt_next -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = min(len(data), start + hub.cut_after.pop(0)) if hub.cut_after else len(data)
        try:
            for position in range(start, end, CHUNK_BYTES):
                self.wfile.write(data[position : min(position + CHUNK_BYTES, end)])
                time.sleep(hub.chunk_delay_s)
            if end < len(data):
                self.wfile.flush()
                time.sleep(0.05)  # a reset discards bytes in flight: let them arrive first
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
        except OSError:  # the client closed the connection, which some tests cause
            self.close_connection = True
