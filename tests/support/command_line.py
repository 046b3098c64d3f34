"""Run the program as a user does: in a separate process with a separate home."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The single JSON object on stdout."""
        lines = self.out.splitlines()
        assert len(lines) == 1, self.out
        return json.loads(lines[0])

    def failed_well(self, *words: str, code: int = 1) -> None:
        """Check that it failed with ``code``, a message and a hint that contain ``words``, and no traceback."""
        assert self.code == code, (self.code, self.err)
        assert "Traceback" not in self.err + self.out
        assert "edgespec: something unexpected" not in self.err
        lines = self.err.splitlines()
        sentences = [line for line in lines if line.startswith("edgespec: ")]
        assert len(sentences) == 1, self.err
        assert len(sentences[0]) > 20
        for word in words:
            assert word in self.err, self.err

    @property
    def hint(self) -> str:
        hints = [line.removeprefix("hint: ") for line in self.err.splitlines() if line.startswith("hint: ")]
        assert len(hints) == 1, self.err
        return hints[0]


def succeeded(result: Result) -> Result:
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    return result


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without variables that change the program's behaviour."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("EDGESPEC_", "HF_"))}
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "PYTHONIOENCODING"):
        kept.pop(name, None)
    repository = str(Path(__file__).parents[2])
    return {
        **kept,
        "PYTHONPATH": repository,
        "PYTHONUTF8": "1",
        "EDGESPEC_HOME": str(home),
        "EDGESPEC_THREADS": "1",  # leaves cores for the test machine's other work
        **(extra or {}),
    }


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "edgespec", *map(str, arguments)]


def run_cli(
    *arguments: str | Path,
    home: Path,
    stdin: str | bytes = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Result:
    """Run one command line to its end, without a terminal."""
    done = subprocess.run(
        command(*arguments),
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        env=environment(home, env),
        cwd=cwd or home.parent,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def run_here(
    *arguments: str | Path,
    home: Path,
    stdin: str | bytes = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Result:
    """``run_cli`` in this process, which saves the start of another: for what does not depend on having its own."""
    from edgespec.cli.app import run

    typed = stdin.encode() if isinstance(stdin, str) else stdin
    written = io.BytesIO(), io.BytesIO()
    out, err = (io.TextIOWrapper(each, encoding="utf-8") for each in written)
    wanted = environment(home, env)
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - wanted.keys():
            patch.delenv(name)
        for name, value in wanted.items():
            patch.setenv(name, value)
        patch.chdir(cwd or home.parent)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code = run([str(argument) for argument in arguments])
    for stream in (out, err):
        stream.flush()
    return Result(code, written[0].getvalue().decode(), written[1].getvalue().decode())


class InProcess:
    """The program in this process, for tables of cases: starting a process takes half a second."""

    def __init__(self, home: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self.home = home
        self._capture = capture
        patch.setenv("EDGESPEC_HOME", str(home))
        patch.setenv("EDGESPEC_THREADS", "1")
        patch.chdir(home.parent)

    def __call__(self, *arguments: str | Path, stdin: str = "") -> Result:
        from edgespec.cli.app import run

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
            self._capture.readouterr()
            code = run([str(argument) for argument in arguments])
        written = self._capture.readouterr()
        return Result(code, written.out, written.err)


def run_python(code: str, *arguments: str | Path, home: Path) -> Result:
    """Run a script in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(home),
        timeout=_TIMEOUT_S,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def status_lines(err: str) -> Sequence[str]:
    """The status lines that follow answers."""
    return [line for line in err.splitlines() if re.match(r"(\d+(\.\d)? tok/s|\d+ tokens?)( · |$)", line)]
