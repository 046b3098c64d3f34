"""SIGTERM, a terminal that is closed, and outputs that take no more: nothing is lost, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from edgespec.files.home import Home
from tests.support.command_line import InProcess, command, environment
from tests.support.tiny_models import TinyModels

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are a matter of POSIX")

WAIT_S = 60.0
BOTH = ("SIGTERM", "SIGHUP")


@pytest.fixture
def slow_options(tiny: TinyModels) -> tuple[str, ...]:
    """Its answers last for seconds."""
    return ("--target", str(tiny.slow), "--draft", "none", "--depth", "0", "--context", "8192")


def started(*arguments: str | Path, home: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(*arguments),
        # A question waits for the end of what is piped in.
        stdin=subprocess.DEVNULL if arguments[0] == "generate" else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(home),
    )


# ------------------------------------------------------------------------------------------------------ signals


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_a_signal_ends_an_answer_and_keeps_the_text_so_far(
    tiny: TinyModels, slow_options: tuple[str, ...], name: str
) -> None:
    number = getattr(signal, name)
    process = started("generate", "hello", *slow_options, home=tiny.home.root)
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + number
    assert (first + out).endswith(b"\n")
    assert err == b"interrupted\n"


def has_mapped(process: int, path: Path) -> bool:
    return str(path) in {mapped.path for mapped in psutil.Process(process).memory_maps()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has mapped")
def test_a_signal_during_an_answer_still_prints_the_json_object(
    tiny: TinyModels, slow_options: tuple[str, ...]
) -> None:
    process = started("generate", "hello", *slow_options, "--json", home=tiny.home.root)
    until = time.monotonic() + WAIT_S  # nothing is written before the end: it is seen to load by what it maps
    while not has_mapped(process.pid, tiny.slow) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    found = json.loads(out)
    assert found.get("finish_reason") == "cancelled" or found["error"]["type"] == "CancelledError"
    assert b"Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", *BOTH])
def test_a_signal_ends_a_chat_and_keeps_its_history(tiny: TinyModels, tmp_path: Path, how: str) -> None:
    from tests.support.terminal import EDITING, Terminal

    place = Home(tmp_path / "home")
    options = ("--target", tiny.target, "--draft", "none", "--max-tokens", "3")
    terminal = Terminal(command("chat", *options), environment(place.root), term="xterm-256color")
    try:
        terminal.wait_for(r"is ready.*\n")
        terminal.wait_for(EDITING)
        terminal.type("remember me please\r")
        terminal.wait_for(r"tok/s|tokens?")
        terminal.wait_for(EDITING)
        if how == "close":
            os.close(terminal._controller)  # as a window that is closed
        else:
            terminal.process.send_signal(getattr(signal, how))
        terminal.process.wait(WAIT_S)
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
    assert "remember me please" in place.history.read_text()
    assert [path.name for path in place.root.glob("history*")] == ["history"]


# ----------------------------------------------------------------------------------------------- full outputs


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "arguments", [("models",), ("models", "--json"), ("nonsense", "--json"), ("generate", "", "--json")]
)
def test_writing_to_a_full_disk_is_reported_in_one_sentence(arguments: tuple[str, ...], home: Home) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command(*arguments), stdout=full, stderr=subprocess.PIPE, env=environment(home.root), timeout=WAIT_S
        )
    told = done.stderr.decode()
    assert done.returncode == 1
    assert "no space is left on the disk that the output is written to" in told
    assert "Traceback" not in told
    assert "unexpected" not in told
    assert "Exception" not in told


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_after_an_answer_is_reported_in_one_sentence(tiny: TinyModels) -> None:
    options = ("--target", tiny.target, "--draft", "none", "--max-tokens", "3")
    for extra in ((), ("--json",)):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                command("generate", "hello", *options, *extra),
                stdout=full,
                stderr=subprocess.PIPE,
                env=environment(tiny.home.root),
                timeout=WAIT_S,
            )
        assert done.returncode == 1
        assert b"no space is left on the disk that the output is written to" in done.stderr
        assert b"Traceback" not in done.stderr


def test_a_full_disk_error_names_the_file(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_settings: object) -> None:
        raise OSError(28, "No space left on device", "/somewhere/file")

    monkeypatch.setattr("edgespec.cli.models.catalogue", full)
    found = here("models", "--json")
    found.failed_well("no space is left on the disk that holds /somewhere/file")
    assert found.json["error"]["type"] == "DiskSpaceError"


@pytest.mark.parametrize(("name", "err"), [(None, ""), ("a:b", "something unexpected went wrong")])
def test_a_closed_pipe_on_windows_ends_a_command_without_a_word(
    here: InProcess, monkeypatch: pytest.MonkeyPatch, name: str | None, err: str
) -> None:
    def closed(*_arguments: object, **_settings: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument", name)

    monkeypatch.setattr("edgespec.cli.models.catalogue", closed)
    monkeypatch.setattr(sys, "platform", "win32")
    found = here("models")
    assert found.code == 1
    assert bool(found.err) == bool(err)
    assert err in found.err


@pytest.mark.slow
def test_a_signal_ends_a_pull_that_waits_for_an_index(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:
        port = index.getsockname()[1]
        nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(home.root / "hub")}
        process = subprocess.Popen(
            command("pull", "smollm2-135m"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(
                home.root,
                {**nowhere, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple"},
            ),
        )
        index.settimeout(WAIT_S)
        asked, _ = index.accept()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_S)
        asked.close()
    assert process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in err
    assert not [path for path in home.root.rglob("*.tmp") if path.exists()]
