"""A server whose process may have few descriptors, as on macOS."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.server import connections
from tests.cli.test_serve import Program
from tests.support.command_line import command, environment
from tests.support.http_server import WAIT_S
from tests.support.tiny_models import TinyModels

resource = pytest.importorskip("resource")


class Limited(Program):
    """A server with at most ``most`` descriptors, ``allowed`` of them at first."""

    def __init__(self, home: Path, log: Path, model: Path, *, allowed: int, most: int) -> None:
        self._log = log
        words = command("serve", "--port", "0", model, "--draft", "none")
        with log.open("wb") as err:
            self.process = subprocess.Popen(
                ["sh", "-c", f'ulimit -H -n {most}; ulimit -S -n {allowed}; exec "$@"', "sh", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env=environment(home, None),
            )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a socket is not a descriptor there")
@pytest.mark.parametrize(("allowed", "most"), [(256, 256), (256, 1024)])
def test_more_connections_than_descriptors_do_not_stop_the_next_request(
    tiny: TinyModels, tmp_path: Path, allowed: int, most: int
) -> None:
    program = Limited(tiny.home.root, tmp_path / "log", tiny.target, allowed=allowed, most=most)
    try:
        program.wait()
        assert program.chat().status_code == 200
        address = ("127.0.0.1", int(program.url.rpartition(":")[2]))
        with contextlib.ExitStack() as opened:
            for _ in range(400):
                opened.enter_context(socket.create_connection(address, WAIT_S))
            assert program.chat().status_code == 200
        assert "Traceback" not in program.err
    finally:
        program.process.kill()
        program.process.wait()


def test_fewer_descriptors_allow_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 256)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    connections.raise_descriptor_limit()
    assert limits[-1] == (256, 256)
    assert 64 <= connections.room_for_connections() < 128
    limits.append((256, resource.RLIM_INFINITY))
    connections.raise_descriptor_limit()
    assert connections.room_for_connections() == connections.MOST_CONNECTIONS
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    connections.raise_descriptor_limit()
    assert limits[-1] == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert connections.room_for_connections() == connections.MOST_CONNECTIONS
