"""Do openai, instructor, pydantic-ai, LangChain, LlamaIndex and DSPy get the answers of a form that they ask for?

    python -m benchmarks.form_clients [--model MODEL] [--keep FOLDER]

Each program of tests/support/form_clients runs as a process against a server, in an environment that has the newest
version of its packages. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, serving

PROGRAMS = ROOT / "tests" / "support" / "form_clients"
# Each has its environment: some packages exclude the newest versions of others.
PACKAGES: Mapping[str, Sequence[str]] = {
    "openai": ("openai",),
    "instructor": ("instructor",),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
    "langchain": ("langchain-openai",),
    "llama_index": ("llama-index-core", "llama-index-llms-openai-like"),
    "dspy": ("dspy",),
}
EXPECTED = {"name": "Maria Keller", "age": 34}
# The first import of some packages takes half a minute.
WAIT_S = 180


def environment(folder: Path, packages: Sequence[str]) -> str:
    """A Python that has the packages."""
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    done = folder / "done"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True, stdout=sys.stderr)
        done.touch()
    return str(python)


def ask(python: str, program: Path, url: str) -> dict[str, Any]:
    """What a program got: its objects by the way they were asked for, or its error."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "PYTHON"))}
    command = [python, str(program), f"{url}/v1"]
    try:
        done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=WAIT_S, env=clean)
    except subprocess.TimeoutExpired:
        return {"works": False, "error": f"it did not end within {WAIT_S} s"}
    if done.returncode:
        return {"works": False, "error": done.stderr[-1500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"works": True, "right": all(found[way] == EXPECTED for way in found), "found": found}


def measure(model: str, keep: Path | None) -> dict[str, Any]:
    """The results of all programs."""
    with tempfile.TemporaryDirectory(prefix="edgespec form clients ") as place:
        folder = keep or Path(place)
        pythons = {name: environment(folder / name, packages) for name, packages in PACKAGES.items()}
        with serving(Path(place), model) as (url, _):
            return {
                "programs": {name: ask(python, PROGRAMS / f"with_{name}.py", url) for name, python in pythons.items()}
            }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="what is served")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the environments stay for the next run")
    given = parser.parse_args()
    print(json.dumps(measure(given.model, given.keep)))


if __name__ == "__main__":
    main()
