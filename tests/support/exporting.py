"""Shared by the tests of ``edgespec export``: prompts with short answers, a text, and checks of the result."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec.bench.suite import Prompt
from edgespec.files.gguf.header import read_header
from edgespec.files.trimmed_drafter import read_artefact
from tests.support.command_line import InProcess, succeeded

__all__ = [
    "ANSWER_TOKENS",
    "AUTO",
    "GGUF",
    "PROMPTS",
    "TEXT",
    "export_trimmed",
    "is_whole",
    "left_behind",
    "stop_half_done",
    "vocabulary_size",
]

PROMPTS = tuple(
    Prompt(id=f"p{number}", category="chat", prompt=text)
    for number, text in enumerate(("hello", "water", "one two", "你好", "who", "time"))
)
ANSWER_TOKENS = 12
TEXT = "".join(f"the water is on the way, they said {number} times.\n" for number in range(120))

GGUF = ("--to", "gguf")
AUTO = ("--trim-vocab", "auto")


def export_trimmed(here: InProcess, source: Path, out: Path, *options: str | Path) -> dict[str, Any]:
    """Run the export and return its JSON."""
    found: dict[str, Any] = succeeded(here("export", source, *GGUF, "-o", out, *options, "--json")).json
    return found


def vocabulary_size(path: Path) -> int:
    return read_header(path).vocabulary_size


def left_behind(folder: Path) -> list[str]:
    """The contents of a test's folder without its home and its text."""
    return sorted(path.name for path in folder.iterdir() if path.name not in ("home", "text.txt"))


def is_whole(folder: Path) -> bool:
    """Whether a complete export exists: every byte that its manifest states, and nothing else."""
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["kind"] == "trimmed-drafter":
        read_artefact(folder)
    for name, record in manifest["files"].items():
        data = (folder / name).read_bytes()
        if len(data) != record["bytes"] or hashlib.sha256(data).hexdigest() != record["sha256"]:
            return False
    return {path.name for path in folder.iterdir()} == {*manifest["files"], "manifest.json"}


def stop_half_done(
    exporter: subprocess.Popen[bytes], folder: Path, delay_s: float, check: Callable[[], None]
) -> None:
    """Stop a process that exports into ``folder`` repeatedly, ``delay_s`` after one of its temporary files appears.

    If the process is between two exports then, it continues and is stopped sooner in a later export. ``check`` is
    called at every stop: a stopped process leaves the same files as a killed one.
    """
    until = time.monotonic() + 60

    def at_work() -> bool:
        return any(f"-{exporter.pid}-" in path.name for path in folder.iterdir())

    while True:
        while not at_work():
            assert exporter.poll() is None
            assert time.monotonic() < until
            time.sleep(0.002)
        time.sleep(delay_s)
        exporter.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(exporter.pid, os.WUNTRACED)[1])
        check()
        if at_work():
            return
        exporter.send_signal(signal.SIGCONT)
        delay_s /= 2
