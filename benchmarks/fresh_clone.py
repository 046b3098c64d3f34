"""The README's commands in a new clone without .venv and with an empty home, and the time of the second start.

    python -m benchmarks.fresh_clone

Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT


def run(*command: str, cwd: Path = ROOT, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, text=True, capture_output=True, check=False, **more)


def measure() -> dict[str, Any]:
    """Exit codes, seconds and last lines of each command."""
    folder = Path(tempfile.mkdtemp(prefix="edgespec fresh "))
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment["EDGESPEC_HOME"] = str(folder / "home")
    clone = folder / "clone"
    try:
        run("git", "clone", "-q", str(ROOT), str(clone))
        started = time.monotonic()
        prompts = "What is a hash map? One sentence.\nAnd a set? One sentence.\n"
        chat = run("make", "-s", "chat", cwd=clone, input=prompts, env=environment)
        chat_s = time.monotonic() - started
        answers = [line for line in chat.stdout.splitlines() if line.strip()]
        status = [line for line in chat.stderr.splitlines() if "tok/s" in line]
        started = time.monotonic()
        run("make", "-s", "setup", cwd=clone, env=environment)
        second_start_s = time.monotonic() - started
        started = time.monotonic()
        test = run("make", "-s", "test", cwd=clone, env=environment, stdin=subprocess.DEVNULL)
        test_s = time.monotonic() - started
        return {
            "chat_exit_code": chat.returncode,
            "chat_s": chat_s,
            "answers": answers,
            "status_lines": status,
            "second_start_s": second_start_s,
            "test_exit_code": test.returncode,
            "test_s": test_s,
            "test_summary": test.stdout.strip().splitlines()[-1:],
            "test_failures": [
                line for line in test.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))
            ],
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Print one JSON object."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(measure()))


if __name__ == "__main__":
    main()
