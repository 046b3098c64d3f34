"""A server on loopback for as long as a block runs; its handler records nothing by itself."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Silent(BaseHTTPRequestHandler):
    """A handler that logs nothing, with what its server answers as ``state``."""

    state: Any

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(kind: type[Silent], state: Any, tls: ssl.SSLContext | None = None) -> Iterator[Any]:
    """``state``, with the ``port`` at which a ``kind`` answers until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type(kind.__name__, (kind,), {"state": state}))
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
