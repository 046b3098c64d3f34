"""Do saved sessions of the default pair continue bit for bit in another process?

    python -m benchmarks.saved_sessions
    python -m benchmarks.saved_sessions --target smollm2-135m

Twenty conversations of one to three turns, greedy and sampled, are saved and continued with two more answers. Another
process, on another number of threads, restores the files and gives the same two answers. Prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT
from edgespec.bench.suite import builtin_suite
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.session import Session

CONVERSATIONS, TOKENS = 20, 32
SAMPLED = Sampling(temperature=0.7, top_p=0.95, seed=11)
SYSTEM = "Answer briefly."
FURTHER = ("Explain that in other words.", "Now as a list.")
DEFAULT = "qwen2.5-coder-1.5b"


def answers(session: Session) -> list[dict[str, Any]]:
    """Two more answers: their tokens, and how much of their prompts was in the cache."""
    found = []
    for prompt, sampling in zip(FURTHER, (Sampling(), SAMPLED), strict=True):
        done = list(session.generate(prompt, max_tokens=TOKENS, sampling=sampling))[-1]
        assert isinstance(done, Done)
        own = done.stats
        found.append({"ids": list(done.token_ids), "prompt": own.prompt_tokens, "cached": own.cached_tokens})
    return found


def save(engine: Engine, folder: Path) -> dict[str, Any]:
    """Hold the conversations, save them, and continue them."""
    prompts = [prompt.prompt for prompt in builtin_suite("ours")]
    continued, seconds, sizes = {}, [], []
    for number in range(CONVERSATIONS):
        with engine.session(system=SYSTEM if number % 2 else None) as session:
            for turn in range(1 + number % 3):
                prompt = prompts[(3 * number + turn) % len(prompts)]
                sampling = SAMPLED if number % 2 else Sampling()
                list(session.generate(prompt, max_tokens=TOKENS, sampling=sampling))
            started = time.monotonic()
            sizes.append(session.save(folder / f"{number:02}"))
            seconds.append(time.monotonic() - started)
            continued[f"{number:02}"] = answers(session)
    return {"continued": continued, "save_s": seconds, "bytes": sizes}


def restore(engine: Engine, folder: Path) -> dict[str, Any]:
    """Continue the saved conversations."""
    continued, seconds = {}, []
    for path in sorted(folder.iterdir()):
        started = time.monotonic()
        with engine.restore(path) as session:
            seconds.append(time.monotonic() - started)
            continued[path.name] = answers(session)
    return {"continued": continued, "restore_s": seconds}


def in_process(target: str, part: str, folder: Path, threads: int) -> dict[str, Any]:
    """What one part gives in a new process. Raises RuntimeError with its errors."""
    command = [sys.executable, "-m", "benchmarks.saved_sessions", "--target", target, "--part", part]
    command += ["--folder", str(folder), "--threads", str(threads)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare(target: str) -> dict[str, Any]:
    """Save in one process, restore in another."""
    with tempfile.TemporaryDirectory() as folder:
        saved = in_process(target, "save", Path(folder), 2)
        restored = in_process(target, "restore", Path(folder), 1)
    left, right = saved["continued"], restored["continued"]
    return {
        "conversations": len(left),
        "identical": sum(left[name] == right.get(name) for name in left),
        "read_again": sum(not own[0]["cached"] for own in right.values()),
        "largest_bytes": max(saved["bytes"]),
        "longest_save_s": max(saved["save_s"]),
        "longest_restore_s": max(restored["restore_s"]),
    }


def main() -> None:
    """Print one JSON object."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=DEFAULT, help="the model, %(default)s if not given")
    parser.add_argument("--part", choices=("save", "restore"), help="only one part, in this process")
    parser.add_argument("--folder", type=Path, help="where that part has the files")
    parser.add_argument("--threads", type=int, default=1, help="of that part")
    given = parser.parse_args()
    if given.part is None:
        print(json.dumps(compare(given.target)))
        return
    with Engine.load(given.target, profile="laptop", download=True, threads=given.threads) as engine:
        print(json.dumps((save if given.part == "save" else restore)(engine, given.folder)))


if __name__ == "__main__":
    main()
