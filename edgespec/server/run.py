"""Opens the port and runs the server until ``stop``. Installs no signal handler and prints nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

import psutil
import uvicorn

from edgespec.errors import EdgespecError, InvalidRequestError, reason_of
from edgespec.server.app import make_app
from edgespec.server.connections import ACCEPTED_IN_A_ROW, LimitedProtocol, raise_descriptor_limit
from edgespec.server.service import Service

# Time for running answers to end after the first signal; systemd kills after 90 s.
DRAIN_S = 60
# An error is sent in milliseconds; a client that takes nothing delays the end by this.
LAST_WORDS_S = 1.0
# Browsers and clients keep connections for about a minute.
KEEP_CONNECTION_S = 75
_BACKLOG = 1024
_LAST_OF_ROOT = 1023  # the last port that only root may listen on
# How often a second ``stop`` is looked for: as often as uvicorn does.
_LOOK_S = 0.1


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets on every address of ``host``. Raises EdgespecError if the port is in use, InvalidRequestError."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(
            f"{host} is not a host of this machine: {error}", hint="127.0.0.1 serves this machine only"
        ) from error
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            own = socket.socket(family, kind, protocol)
            try:
                if sys.platform != "win32":
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    # The unspecified address stands for those of IPv4 too, which have no socket here.
                    own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
                own.bind(address)
                own.listen(_BACKLOG)  # a port in use may be reported only now
            except OSError as error:
                own.close()
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                    continue  # ``localhost`` has an IPv6 address on machines without IPv6
                raise _cannot_listen(host, port, error) from error
            sockets.append(own)
            if port == 0:
                break
        if not sockets:
            raise InvalidRequestError(f"{host} is not an address of this machine", hint="leave out --host")
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets


def _cannot_listen(host: str, port: int, error: OSError) -> EdgespecError:
    if error.errno == errno.EADDRINUSE:
        return EdgespecError(
            f"port {port} is in use by {_holder(port)}", hint="end that program, or choose another --port"
        )
    if error.errno == errno.EACCES and port > _LAST_OF_ROOT:  # Windows reserves ranges of ports
        return EdgespecError(f"port {port} is reserved or held by another program", hint="choose another --port")
    if error.errno == errno.EACCES:
        return EdgespecError(
            f"this user may not listen on port {port}", hint=f"choose a --port above {_LAST_OF_ROOT}"
        )
    return InvalidRequestError(f"cannot listen on {host}: {reason_of(error)}", hint="leave out --host")


def _holder(port: int) -> str:
    """The program that listens on a port, as far as this user may know."""
    with contextlib.suppress(psutil.Error, OSError, RuntimeError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return f"{psutil.Process(each.pid).name()} (process {each.pid})"
    return "another program"


def urls(sockets: Sequence[socket.socket]) -> list[str]:
    """The addresses of a server's sockets."""
    found = []
    for each in sockets:
        host, port = each.getsockname()[:2]
        found.append(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    return found


class Server(uvicorn.Server):
    """uvicorn's server, stopped by ``stop`` instead of signals."""

    def __init__(self, service: Service, sockets: Sequence[socket.socket]) -> None:
        self._service = service
        self._own_sockets = list(sockets)
        self.load_error: EdgespecError | None = None  # if the first load failed, which ends the server
        service.connections = lambda: len(self.server_state.connections)
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=LimitedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_CONNECTION_S,
                timeout_graceful_shutdown=DRAIN_S,
                backlog=ACCEPTED_IN_A_ROW,  # asyncio accepts as many in a row
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> bool:
        """Answer what has begun, and end; at the second call end now. Returns whether it is the first call.

        May be called from a signal handler and from any thread.
        """
        first = not self.should_exit
        self.force_exit = not first
        self.should_exit = self._service.queue.draining = True
        return first

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections; more may wait for it than are accepted in a row."""
        raise_descriptor_limit()
        await super().startup(sockets)
        for each in self._own_sockets:
            each.listen(_BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse the requests that wait, and finish the running ones."""
        for queue in (self._service.queue, self._service.counts):
            queue.refuse_waiting()
        for each in self._service.models:
            each.keeper.stop_loading()
        ending = asyncio.ensure_future(super().shutdown(sockets))
        while not ending.done():
            await asyncio.wait([ending], timeout=_LOOK_S)
            if self.force_exit:  # from Python 3.12 on asyncio waits for the connections even then
                ending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            ending.result()

    def run_to_end(self, on_listening: Callable[[], None] = lambda: None) -> None:
        """Serve until ``stop``. The only model is loaded in the background; several are by their first requests.

        Raises what the first load of the only model raises.
        """
        asyncio.run(self._run(on_listening))
        if self.load_error is not None:
            raise self.load_error

    async def _run(self, on_listening: Callable[[], None]) -> None:
        if not self._service.others:
            # Not kept: its result is the model, which may be freed.
            self._service.keeper.start().add_done_callback(lambda _: self._check_first_load())
        on_listening()
        try:
            await self.serve(sockets=self._own_sockets)
        finally:
            for each in self._service.models:
                await each.keeper.close()
            for _ in range(2):  # the answers that this has ended tell their clients why; then all are ended
                if self.server_state.tasks:
                    await asyncio.wait(self.server_state.tasks, timeout=LAST_WORDS_S)
                for task in self.server_state.tasks:
                    task.cancel()

    def _check_first_load(self) -> None:
        error = self._service.keeper.error
        if error is not None and not self.should_exit:
            self.load_error = error
            self.stop()
