"""Processes that the benchmarks start: commands of edgespec, a server, ``scripts/answers.py``, and busy loops."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgespec.files.home import home

ROOT = Path(__file__).resolve().parent.parent

Answers = list[dict[str, Any]]

_SERVING = re.compile(r"on (http://\S+)/v1$")


def edgespec(*arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The JSON report of one command. Raises RuntimeError with the command's errors if there is no report."""
    command = [sys.executable, "-m", "edgespec", *arguments, "--json"]
    done = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, check=False)
    return report_of(done)


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object on a process's stdout. Raises RuntimeError with the errors if there is none.

    The exit status is not used: `bench` and `verify` print their report and exit with 1 if a text differs.
    """
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise RuntimeError(done.stderr[-2000:]) from error
    if "error" in report:
        raise RuntimeError(report["error"]["message"])
    return report


def fresh_home(folder: Path) -> dict[str, str]:
    """An environment with a new home that shares only the models of the present home."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(home().create(home().models))
    return {**os.environ, "EDGESPEC_HOME": str(folder)}


def answers(environment: Mapping[str, str], *arguments: str) -> Answers:
    """The rows that one process of scripts/answers.py prints. Raises RuntimeError with its errors."""
    command = [sys.executable, str(ROOT / "scripts" / "answers.py"), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


def with_other_ids(rows: Answers) -> list[str]:
    """The prompts whose answers do not all have the same token ids."""
    ids: dict[str, set[tuple[int, ...]]] = {}
    for row in rows:
        ids.setdefault(row["id"], set()).add(tuple(row["token_ids"]))
    return sorted(prompt for prompt, own in ids.items() if len(own) > 1)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """``count`` processes that only spin, on the processors that this process may use."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def serving(folder: Path, model: str, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of ``model``: its address, and its process. Its log is a file in ``folder``.

    Raises RuntimeError with the log if the server ends at its start.
    """
    log = folder / "server.log"
    with log.open("wb") as err:
        command = [sys.executable, "-m", "edgespec", "serve", model, "--port", "0", *options]
        process = subprocess.Popen(command, stderr=err, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, cwd=ROOT)
    try:
        while True:
            found = [match[1] for line in log.read_text().splitlines() if (match := _SERVING.search(line))]
            if found:
                break
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.01)
        yield found[0], process
    finally:
        process.terminate()
        process.wait(90)
