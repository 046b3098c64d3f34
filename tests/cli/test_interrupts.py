"""Ctrl-C and Ctrl-D, in a real terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from edgespec.files.home import Home
from tests.support.command_line import command, environment
from tests.support.http_server import wait_until
from tests.support.hub_server import HubServer, running
from tests.support.terminal import CTRL_C, WAIT_S, Terminal
from tests.support.tiny_models import TinyModels

CTRL_D = b"\x04"


@pytest.fixture
def slow_options(tiny: TinyModels) -> tuple[str, ...]:
    """Its answers last for seconds, and so do long prompts."""
    return ("--target", str(tiny.slow), "--draft", "none", "--depth", "0", "--context", "8192")


@pytest.fixture
def chat(tiny: TinyModels, slow_options: tuple[str, ...]) -> Iterator[Terminal]:
    """A chat that waits for its first prompt."""
    terminal = Terminal(command("chat", *slow_options), environment(tiny.home.root))
    try:
        terminal.wait_for(r"is ready.*\n")
        terminal.wait_for(r"> ")
        yield terminal
    finally:
        terminal.close()


# The answer has begun; some of its characters are rare kinds of space.
BEGUN = r"hello\s+\S+\s+\S"
STOPPED = r"(tok/s|tokens?) ·(.|\n)*?stopped"


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_the_chat_continues(chat: Terminal) -> None:
    for _ in range(2):
        chat.type("hello\r")
        chat.wait_for(BEGUN)
        chat.type(CTRL_C)
        chat.wait_for(STOPPED)
        chat.wait_for(r"> ")
    chat.type("/stats\r")
    chat.wait_for(r"answer +\d+ tokens?")
    chat.wait_for(r"> ")
    chat.type(CTRL_D)
    assert chat.exit_code() == 0


@pytest.mark.slow
def test_ctrl_c_during_prefill_stops_the_answer_and_the_prompt_is_not_lost(chat: Terminal) -> None:
    """No line of a terminal is that long: several make the prompt."""
    chat.type("hello\r")
    chat.wait_for(BEGUN)
    chat.type(CTRL_C)
    chat.wait_for(STOPPED)
    chat.wait_for(r"> ")
    chat.type('"""\r')
    for _ in range(30):
        chat.wait_for(r"\. ")
        chat.type("the " * 200 + "\r")
    chat.wait_for(r"\. ")
    chat.type('"""\r')
    for again in ("asked again: the the", "undone: the the"):
        time.sleep(1.0)
        chat.type(CTRL_C)
        chat.wait_for(r"stopped before the answer began; /more asks again,\s+/undo brings your text back")
        chat.wait_for(r"> ")
        chat.type("/more\r" if "asked" in again else "/undo\r")
        chat.wait_for(again)
    chat.wait_for(r"> ")
    chat.type("/exit\r")
    assert chat.exit_code() == 0


def test_ctrl_c_twice_leaves_in_an_empty_line_and_not_in_an_answer(chat: Terminal) -> None:
    chat.type("hello\r")
    chat.wait_for(BEGUN)
    chat.type(CTRL_C)
    chat.wait_for(STOPPED)
    chat.wait_for(r"> ")
    first_at = chat.interrupt()
    chat.wait_for(r"> ")
    assert chat.interrupt_again(first_at) == 130
    assert "interrupted" in chat.screen


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_drops_the_line_and_stays(chat: Terminal) -> None:
    chat.type("half a prompt")
    time.sleep(0.3)  # a signal in the moment between prompt and waiting for keys is noticed at the next key only
    chat.interrupt()
    chat.wait_for("leaves")
    chat.wait_for(r"> ")
    chat.type("hello\r")
    chat.wait_for(BEGUN)
    assert "half a prompthello" not in chat.screen
    chat.type(CTRL_C)
    chat.wait_for(STOPPED)
    chat.wait_for(r"> ")
    chat.type(CTRL_D)
    assert chat.exit_code() == 0


def test_ctrl_d_leaves_the_chat(chat: Terminal) -> None:
    chat.type(CTRL_D)
    assert chat.exit_code() == 0
    assert "interrupted" not in chat.screen


# Says when the program has begun to handle Ctrl-C: before, it is the interpreter's.
ANNOUNCED = """
import signal
from edgespec.cli import main
install = signal.signal
def announced(*arguments):
    before = install(*arguments)
    print("here", flush=True)
    return before
signal.signal = announced
main()
"""


@pytest.mark.parametrize("delay_s", [0.05, 0.15, 0.4])
def test_ctrl_c_while_a_model_loads_ends_the_program(
    tiny: TinyModels, slow_options: tuple[str, ...], delay_s: float
) -> None:
    """Also in the moment in which the interpreter reads its modules."""
    process = subprocess.Popen(
        [sys.executable, "-c", ANNOUNCED, "chat", *slow_options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tiny.home.root),
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted"


@pytest.mark.parametrize(
    ("asked", "stdin"), [(("generate", "hello"), ""), (("chat",), "hello\nagain\n")], ids=["generate", "chat"]
)
def test_sigint_ends_an_answer_and_keeps_the_text_so_far(
    tiny: TinyModels, slow_options: tuple[str, ...], tmp_path: Path, asked: tuple[str, ...], stdin: str
) -> None:
    """A chat that reads its prompts from a file ends too."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(stdin, encoding="utf-8")
    with prompts.open("rb") as file:
        process = subprocess.Popen(
            command(*asked, *slow_options),
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(tiny.home.root),
        )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert (first + out).endswith(b"\n")
    assert len(out) > 1
    assert err.splitlines()[-1] == b"interrupted"


def incomplete(folders: Iterable[Path]) -> list[Path]:
    """What has arrived of files that are being fetched."""
    found = [path for folder in folders for path in folder.rglob("*incomplete*")]
    return [path for path in found if path.is_file() and path.stat().st_size]


@pytest.mark.slow
def test_a_pull_resumes_after_sigint(home: Home, tmp_path: Path) -> None:
    data = os.urandom(600_000)
    hub = HubServer(files={"model.gguf": data}, chunk_delay_s=0.2)
    with running(hub):
        env = environment(
            home.root, {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
        )
        process = subprocess.Popen(
            command("pull", f"hf:{hub.repo}/model.gguf"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
        )
        folders = (home.root, tmp_path / "hub")
        wait_until(lambda: process.poll() is not None or bool(incomplete(folders)))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 130, err
        assert b"Traceback" not in err
        kept = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        partial = incomplete(folders)
        assert partial, kept
        assert partial[0].stat().st_size < len(data)
        assert not [path for path in kept if path.name == "model.gguf"], "half a file under a final name"
        # The next pull resumes.
        hub.requests.clear()
        hub.chunk_delay_s = 0
        size = partial[0].stat().st_size
        done = subprocess.run(
            command("pull", f"hf:{hub.repo}/model.gguf"), capture_output=True, env=env, check=False, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stderr
        assert hub.bodies()[0].range == f"bytes={size}-"
