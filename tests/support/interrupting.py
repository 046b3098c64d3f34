"""Commands on tiny models that are interrupted at some moment, and what is wrong with how they end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.command_line import environment
from tests.support.exporting import is_whole
from tests.support.hub_server import HubServer
from tests.support.tiny_models import TinyModels

# A person waits this long for the end of a program; the machine may be busy.
END_S = 60.0

# Tells on a pipe when the program has begun to handle Ctrl-C: before, it is the interpreter's.
_ANNOUNCED = """
import os, signal, sys
from edgespec.cli import main
pipe, install = int(sys.argv.pop(1)), signal.signal
def announced(*arguments):
    before = install(*arguments)
    os.write(pipe, b".")
    return before
signal.signal = announced
main()
"""

# Loads all modules once. Each message on the socket, arguments with the files for 0, 1, 2 and the announcement, is a
# command in a fork. Sends back its process's number, and how it ended.
_FORKED = """
import contextlib, gc, importlib, json, os, pkgutil, signal, socket, sys
import edgespec.cli, pydantic
for module in pkgutil.walk_packages(edgespec.__path__, "edgespec."):
    with contextlib.suppress(ImportError):
        importlib.import_module(module.name)
gc.freeze()  # a fork that ends need not look at what all have
asked, install = socket.socket(fileno=int(sys.argv[1])), signal.signal
while True:
    arguments, files, _, _ = socket.recv_fds(asked, 2**16, 4)
    if not arguments:
        break
    child = os.fork()
    if not child:
        asked.close()
        for number in (0, 1, 2):
            os.dup2(files[number], number)
        for file in files[:3]:
            os.close(file)
        def announced(*given):
            before = install(*given)
            with contextlib.suppress(OSError):
                os.write(files[3], b".")
            return before
        signal.signal, sys.argv = announced, ["edgespec", *json.loads(arguments)]
        edgespec.cli.main()
    for file in files:
        os.close(file)
    asked.send(b"%d\\n" % child)
    asked.send(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptible:
    """A command line, and the input that it reads. ``writes``: the folder of its output, if it has one.

    ``endless``: it runs until it is interrupted.
    """

    name: str
    arguments: tuple[str | Path, ...]
    stdin: bytes = b""
    writes: Path | None = None
    endless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended. ``took_s``: seconds from the signal, or from the start without one, to the end.

    ``code`` is None for a command that did not end within END_S and was killed.
    """

    code: int | None
    out: str
    err: str
    took_s: float


def commands(tiny: TinyModels, work: Path, hub: HubServer) -> tuple[Interruptible, ...]:
    """One command of each kind, of half a second to several seconds."""
    work.mkdir(parents=True, exist_ok=True)
    text, suite = work / "text.txt", work / "suite.jsonl"
    text.write_text("the water is on the way, they said twice.\n" * 200, encoding="utf-8")
    suite.write_text('{"id": "a", "category": "chat", "prompt": "hello"}\n', encoding="utf-8")
    pair = ("--target", tiny.target, "--draft", tiny.drafter, "--context", "300")
    slow = ("--target", tiny.slow, "--draft", "none", "--context", "2048")
    suited = ("--suite", suite, "--max-tokens", "8")
    return (
        Interruptible(name="generate", arguments=("generate", "hello", *slow, "--max-tokens", "100")),
        Interruptible(name="generate --json", arguments=("generate", "hello", *slow, "--max-tokens", "60", "--json")),
        Interruptible(
            name="chat",
            arguments=("chat", *pair, "--max-tokens", "60", "--verbose"),
            stdin=b"hello\nagain\n/exit\n",
        ),
        Interruptible(name="calibrate", arguments=("calibrate", "--quick", *pair)),
        Interruptible(name="verify", arguments=("verify", *pair, *suited)),
        Interruptible(name="bench", arguments=("bench", *pair, *suited, "--passes", "1", "--json")),
        Interruptible(
            name="export",
            arguments=("export", tiny.slow, "--to", "gguf", "--quant", "q4_0", "-o", work / "gguf"),
            writes=work / "gguf",
        ),
        Interruptible(
            name="export --trim-vocab",
            arguments=("export", tiny.drafter, "--to", "gguf", "--trim-vocab", "auto", "--trim-from", text, "-o",
                       work / "trimmed"),
            writes=work / "trimmed",
        ),
        Interruptible(
            name="export to ONNX",
            arguments=("export", tiny.slow, "--to", "onnx", "-o", work / "onnx"),
            writes=work / "onnx",
        ),
        Interruptible(name="learn", arguments=("learn", text, "--target", tiny.target)),
        Interruptible(name="pull", arguments=("pull", f"hf:{hub.repo}/model.gguf")),
        Interruptible(name="models", arguments=("models",)),
        Interruptible(name="doctor", arguments=("doctor", "--json")),
        Interruptible(name="plan", arguments=("plan", "--explain", *pair)),
        Interruptible(name="serve", arguments=("serve", tiny.target, "--draft", "none", "--port", "0"), endless=True),
    )  # fmt: skip


def interrupted(command: Interruptible, env: dict[str, str], after_s: float | None) -> Ended:
    """Run a command, and send SIGINT ``after_s`` seconds after it has begun to handle signals; None: never."""
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", _ANNOUNCED, str(writing), *map(str, command.arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(writing,),
        env=env,
    ) as process:
        os.close(writing)
        try:
            assert process.stdin is not None
            process.stdin.write(command.stdin)
            process.stdin.close()
            process.stdin = None
            select.select([reading], [], [], END_S)
            started = time.monotonic()
            if after_s is not None:
                time.sleep(after_s)
                started = time.monotonic()
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=END_S)
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            (out, err), code = process.communicate(), None
        except BaseException:
            process.kill()
            raise
        finally:
            os.close(reading)
    return Ended(code=code, out=out.decode(), err=err.decode(), took_s=time.monotonic() - started)


class Forks:
    """Starts commands as forks of one process that has loaded all modules: a command begins within milliseconds.

    What a signal meets while modules load is not tried so; ``interrupted`` does. One command at a time.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._asking, asked = socket.socketpair()
        self._answers = self._asking.makefile("rb", buffering=0)  # so that select sees what was not read
        code = [sys.executable, "-c", _FORKED, str(asked.fileno())]
        self._process = subprocess.Popen(code, pass_fds=(asked.fileno(),), env=dict(env))
        asked.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answers.close()
        self._asking.close()
        self._process.wait(END_S)

    def interrupted(self, command: Interruptible, work: Path, after_s: float | None) -> Ended:
        """As ``interrupted`` above. What the command reads and writes are files in ``work``."""
        streams = [work / name for name in ("stdin", "stdout", "stderr")]
        streams[0].write_bytes(command.stdin)
        reading, writing = os.pipe()
        files = [os.open(streams[0], os.O_RDONLY)]
        files += [os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600) for path in streams[1:]]
        socket.send_fds(self._asking, [json.dumps([*map(str, command.arguments)]).encode()], [*files, writing])
        for file in (*files, writing):
            os.close(file)
        process = int(self._answers.readline())
        select.select([reading], [], [], END_S)
        started = time.monotonic()
        if after_s is not None:
            time.sleep(after_s)
            started = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGINT)
        code = self._ended(process)
        os.close(reading)
        out, err = (path.read_text(encoding="utf-8") for path in streams[1:])
        return Ended(code=code, out=out, err=err, took_s=time.monotonic() - started)

    def _ended(self, process: int) -> int | None:
        """The exit status; None for a command that did not end within END_S and was killed."""
        if not select.select([self._asking], [], [], END_S)[0]:
            os.kill(process, signal.SIGKILL)
            self._answers.readline()
            return None
        return int(self._answers.readline())


def complaints(command: Interruptible, ended: Ended, home: Path) -> list[str]:
    """What is wrong with the end of an interrupted command."""
    words = ("Traceback", "Exception ignored", "unexpected")
    found = [f"{word} in its errors" for word in words if word in ended.err]
    lines = ended.err.splitlines()
    # A command that was complete when the signal came has not failed. A server that has nothing to finish ends well.
    if ended.code == 130:
        if lines[-1:] not in (["interrupted"], ["edgespec: interrupted"]):
            found.append("its last line does not say that it was interrupted")
    elif ended.code != 0 and not _at_exit(ended):
        found.append("it did not end" if ended.code is None else f"it ended with {ended.code}")
    elif "· stopped" in ended.err:
        found.append("an answer was stopped, and the command continued as if it were complete")
    if "--json" in command.arguments and ended.out:
        found += _unless_one_object(ended.out)
    if command.writes is not None:
        found += [f"it left {path}" for path in command.writes.parent.glob(".*.tmp")]
        if command.writes.exists() and not is_whole(command.writes):
            found.append(f"{command.writes} is half written")
    found += [f"it left {path}" for path in home.rglob("*.tmp")]
    found += [f"{path} is half written" for path in home.rglob("*.json") if not _is_json(path)]
    return found


def _at_exit(ended: Ended) -> bool:
    """Whether Python had put its own signal handlers away: the process ends by the signal, for a shell with 130."""
    return ended.code == -signal.SIGINT and not ended.err.endswith("KeyboardInterrupt\n")


def _unless_one_object(out: str) -> list[str]:
    try:
        json.loads(out)
    except ValueError:
        return ["its output is not one JSON object"]
    return []


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True


def pulling(env_home: Path, hub: HubServer, hub_home: Path) -> dict[str, str]:
    """The environment of a command that may fetch from ``hub``."""
    return environment(env_home, {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(hub_home), "HF_HUB_DISABLE_XET": "1"})
