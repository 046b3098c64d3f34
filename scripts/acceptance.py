"""The long checks on real models: every promise of the current release, seen on this machine, written as JSON.

    make acceptance                      run what has no result for this source yet
    make acceptance ARGS="--only equality-1 --fresh"
    make acceptance ARGS=--list

Results go to acceptance/results.json as they come, so that a run that was stopped goes on where it was. A result
counts for the source it was measured on (a digest of the code and the tests); after a change everything is due again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from acceptance_bench import BENCH_STEPS
from acceptance_equality import PROMPTS, row_of, verification_prompts
from acceptance_export import EXPORT_STEPS
from acceptance_native import NATIVE_STEPS
from acceptance_optimum import OPTIMUM_STEPS
from acceptance_pipelined import PIPELINED_STEPS
from acceptance_promises import PROMISE_STEPS
from acceptance_quality import QUALITY_STEPS
from acceptance_sampling import SAMPLING_STEPS
from acceptance_sound import SOUND_STEPS
from acceptance_static import STATIC_STEPS
from acceptance_trim import TRIM_STEPS

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "acceptance"
RESULTS = OUT / "results.json"

EQUALITY_TOKENS = 96
LONG_PROMPT_TOKENS = 700
LEAST_LONG_PROMPTS = 8


def source_digest() -> str:
    """Identifies the code, the tests and the prompts that a result was measured with."""
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
    for folder in ("edgespec", "tests", "benchmarks", "scripts"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".toml", ".jsonl", ".sh"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """What was measured so far, saved after every change."""

    def __init__(self, *, fresh: bool) -> None:
        self.digest = source_digest()
        self.steps: dict[str, dict[str, Any]] = {}
        if RESULTS.exists() and not fresh:
            stored = json.loads(RESULTS.read_text(encoding="utf-8"))
            self.steps = {n: s for n, s in stored["steps"].items() if s.get("source") == self.digest}

    def save(self, name: str, **values: Any) -> None:
        self.steps.setdefault(name, {"source": self.digest}).update(values)
        OUT.mkdir(exist_ok=True)
        temporary = RESULTS.with_suffix(".tmp")
        temporary.write_text(json.dumps({"schema_version": 1, "steps": self.steps}, indent=1), encoding="utf-8")
        temporary.replace(RESULTS)


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """One spinning process: the machine under load."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def run(*command: str, cwd: Path = ROOT, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, text=True, capture_output=True, check=False, **more)


# ---------------------------------------------------------------------------------------------- steps


def equality(results: Results, name: str) -> bool:
    """`edgespec verify` on the default pair: 40 prompts, every stable depth, greedy and sampled, under load."""
    from edgespec.bench.equality import PromptResult, check_equality
    from edgespec.engine.engine import Engine

    prompts = verification_prompts()
    rows: dict[str, Any] = dict(results.steps.get(name, {}).get("prompts", {}))
    with busy_neighbour(), Engine.load(profile="laptop", download=True, calibrate=True) as engine:
        plan = engine.plan.as_json()

        def keep(result: PromptResult) -> None:
            rows[result.prompt_id] = row_of(result)
            results.save(name, prompts=rows, plan=plan)
            print(f"  {len(rows)}/{len(prompts)} {result.prompt_id}: {not result.divergences}", flush=True)

        left = [prompt for prompt in prompts if prompt.id not in rows]
        check_equality(engine, left, max_tokens=EQUALITY_TOKENS, on_result=keep)
    identical = sum(row["identical"] for row in rows.values())
    long_prompts = sum(row["prompt_tokens"] > LONG_PROMPT_TOKENS for row in rows.values())
    results.save(
        name,
        identical=identical,
        of=len(rows),
        comparisons=sum(row["comparisons"] for row in rows.values()),
        prompts_past_700_tokens=long_prompts,
        accepted_per_proposed=sum(r["accepted"] for r in rows.values()) / sum(r["proposed"] for r in rows.values()),
    )
    return identical == len(rows) == PROMPTS and long_prompts >= LEAST_LONG_PROMPTS


def near(results: Results, name: str) -> bool:
    """A depth outside the class, asked for by name: reported N, every divergence's gap under the bound."""
    done = run(
        sys.executable, "-m", "edgespec", "verify", "--profile", "laptop", "--exactness", "near", "--depth", "5",
        "--prompts", "6", "--json",
    )  # fmt: skip
    report = json.loads(done.stdout)
    gaps = [divergence["gap"] for divergence in report.get("divergences", [])]
    results.save(name, exit_code=done.returncode, level=report.get("level"), bound=report.get("bound"), gaps=gaps)
    return done.returncode == 0 and report["level"] == "N" and all(gap <= report["bound"] for gap in gaps)


def busy_thread(results: Results, name: str) -> bool:
    """Decoding beside a busy Python thread stays within 10 % of decoding beside a busy process."""
    done = run(sys.executable, "benchmarks/busy_thread.py")
    measured = json.loads(done.stdout)
    results.save(name, **measured)
    return bool(measured["thread_over_process_median"] >= 0.9)


def pytest_step(*paths: str) -> Callable[[Results, str], bool]:
    """A step that runs tests."""

    def step(results: Results, name: str) -> bool:
        done = run(sys.executable, "-m", "pytest", "-q", *paths)
        results.save(name, exit_code=done.returncode, summary=done.stdout.strip().splitlines()[-1:])
        return done.returncode == 0

    return step


def fresh_clone(results: Results, name: str) -> bool:
    """The README's two commands in a new clone with no .venv and an empty store; then the second start's time."""
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
        results.save(
            name,
            chat_exit_code=chat.returncode,
            chat_s=chat_s,
            answers=answers,
            status_lines=status,
            second_start_s=second_start_s,
            test_exit_code=test.returncode,
            test_s=test_s,
            test_summary=test.stdout.strip().splitlines()[-1:],
            test_failures=[line for line in test.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))],
        )
        return (
            chat.returncode == 0
            and len(status) == 2
            and len(answers) >= 2
            and second_start_s < 3
            and test.returncode == 0
            and test_s < 25 * 60
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


STEPS: dict[str, Callable[[Results, str], bool]] = {
    "laws-and-mutations": pytest_step("tests/decoding"),
    "drafters-and-loop": pytest_step("tests/decoding/test_loop.py", "tests/drafters", "tests/runtimes"),
    "import-and-manners": pytest_step("tests/architecture/test_import.py"),
    "bad-input": pytest_step("tests/cli", "tests/files", "tests/text"),
    "busy-thread": busy_thread,
    "near": near,
    "equality-1": equality,
    "equality-2": equality,
    "export-safety": pytest_step("tests/export", "tests/cli/test_export.py", "tests/files/test_onnx_folder.py"),
    **EXPORT_STEPS,
    **QUALITY_STEPS,
    **OPTIMUM_STEPS,
    **STATIC_STEPS,
    **TRIM_STEPS,
    **PIPELINED_STEPS,
    **NATIVE_STEPS,
    **SAMPLING_STEPS,
    **PROMISE_STEPS,
    **SOUND_STEPS,
    **BENCH_STEPS,
    "fresh-clone": fresh_clone,
}


def main() -> int:
    """Run the steps that are due; 0 if every promise holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*STEPS], help="run this step (repeatable)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--list", action="store_true", help="list the steps and their results")
    arguments = parser.parse_args()
    results = Results(fresh=arguments.fresh and not arguments.only)
    for name in arguments.only or STEPS:
        if arguments.list:
            print(f"{name:34} {results.steps.get(name, {}).get('holds', 'due')}")
            continue
        if results.steps.get(name, {}).get("holds") and not arguments.fresh:
            print(f"{name}: holds (measured before)", flush=True)
            continue
        print(f"{name}: running", flush=True)
        started = time.monotonic()
        if arguments.fresh:
            results.steps.pop(name, None)
        try:
            holds = STEPS[name](results, name)
        except Exception as error:  # one broken step must not cost the others their run
            results.save(name, error=f"{type(error).__name__}: {error}")
            holds = False
        results.save(name, holds=holds, seconds=round(time.monotonic() - started, 1))
        print(f"{name}: {'holds' if holds else 'DOES NOT HOLD'}", flush=True)
    return 0 if arguments.list or all(results.steps.get(n, {}).get("holds") for n in arguments.only or STEPS) else 1


if __name__ == "__main__":
    sys.exit(main())
