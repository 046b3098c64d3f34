"""The acceptance step for Hugging Face folders through Optimum: what comes out chats, as target and as drafter.

    python scripts/acceptance_optimum.py

SmolLM2 135M is taken from the store, written as a folder of safetensors, and exported by `edgespec export --to onnx`
as a user would. EDGESPEC_TRANSFORMERS_PYTHON names an interpreter that has Optimum; without it the environment is
made under the home, as for a user.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the tests' folder writer

from edgespec.files.home import home  # noqa: E402
from edgespec.store.catalogue import lookup  # noqa: E402
from edgespec.store.store import Store  # noqa: E402
from tests.support.hf_folder import write_hf_folder  # noqa: E402

INTERPRETER = "EDGESPEC_TRANSFORMERS_PYTHON"
MODEL = "smollm2-135m"
PROMPT = "What is a hash map? One sentence."
ANSWER_TOKENS = "32"
DEPTH = "3"
QUANTS = ("keep", "q4")


class Results(Protocol):
    def save(self, name: str, **values: Any) -> None: ...


def edgespec(*arguments: str | Path) -> dict[str, Any]:
    """What a command answers as JSON. Raises RuntimeError with its last words if it fails."""
    command = [sys.executable, "-m", "edgespec", *map(str, arguments), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])}: {done.stderr[-1000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def generate(target: str | Path, *options: str | Path) -> dict[str, Any]:
    return edgespec("generate", PROMPT, "--target", target, "--max-tokens", ANSWER_TOKENS, *options)


@contextmanager
def source_folder() -> Iterator[Path]:
    """The model as transformers would have saved it."""
    stored = Store(home()).fetch(lookup(MODEL))
    with tempfile.TemporaryDirectory(prefix="edgespec optimum ") as place:
        folder = write_hf_folder(stored.path, Path(place) / "smollm2")
        config = folder / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "llama"}))
        yield folder


def optimum_chats(results: Results, name: str) -> bool:
    """The exported folder answers as target, as the same weights do in llama.cpp, and drafts for the GGUF."""
    python = os.environ.get(INTERPRETER)
    interpreter = ("--python", python) if python else ()
    found: dict[str, Any] = {}
    with source_folder() as folder:
        place = folder.parent
        edgespec("export", folder, "--to", "gguf", "-o", place / "gguf")
        same_weights = generate(place / "gguf", "--plain")["text"]
        alone = generate(MODEL, "--plain")["token_ids"]
        for quant in QUANTS:
            out = place / quant
            exported = edgespec("export", folder, "--to", "onnx", "--quant", quant, "-o", out, *interpreter)
            answer = generate(out, "--plain")
            drafted = generate(MODEL, "--draft", out, "--depth", DEPTH)
            stats = drafted["stats"]
            found[quant] = {
                "bytes_per_token": exported["bytes_per_token"]["after"],
                "tools": exported["manifest"]["tools"],
                "text": answer["text"],
                "as_llama_cpp": answer["text"] == same_weights,
                "drafted_as_alone": drafted["token_ids"] == alone,
                "proposed": stats["proposed"],
                "accepted": stats["accepted"],
            }
            results.save(name, exported=found)
    return holds(found)


def holds(found: dict[str, Any]) -> bool:
    """Whether both answered and drafted without changing a token; float32 weights also answer as in llama.cpp."""
    return list(found) == list(QUANTS) and all(
        each["text"].strip()
        and each["drafted_as_alone"]
        and each["accepted"] > 0
        and (each["as_llama_cpp"] or quant != "keep")
        for quant, each in found.items()
    )


OPTIMUM_STEPS: dict[str, Callable[[Results, str], bool]] = {"optimum-chats": optimum_chats}


class _Printed:
    """Results for whoever runs this file by itself."""

    def save(self, name: str, **values: Any) -> None:
        print(json.dumps({name: values}), flush=True)


def main() -> int:
    """Run the step; 0 if it holds."""
    return 0 if optimum_chats(_Printed(), "optimum-chats") else 1


if __name__ == "__main__":
    sys.exit(main())
