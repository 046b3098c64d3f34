"""The acceptance steps for whole requests: first answers, short answers, sampled answers, other text.

    UNSEEN_SUITE=FILE.jsonl python scripts/acceptance_promises.py [--only STEP]

Steps on text that nothing was tuned to need ``UNSEEN_SUITE``, a suite file; without one they say so and fail. A line
"not below X" is met unless the whole interval lies below X.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from acceptance_bench import edgespec, identical

from edgespec.bench.suite import load_suite
from edgespec.engine.engine import Engine
from edgespec.engine.events import Round
from edgespec.engine.session import Session
from edgespec.files.home import Home, home

ROOT = Path(__file__).resolve().parent.parent

PASSES = "2"
REQUESTS, REQUESTS_CATEGORY = 1.08, 0.98
TTFT, FIRST_TTFT = 1.02, 1.05
SHORT_ANSWERS = 0.96
DECODE = 1.42
SAMPLED_OF_GREEDY, SAMPLED_CATEGORY = 0.85, 0.98
FIRST_CODE, SECOND_CODE, SECOND_ALL, SECOND_CATEGORY = 1.0, 1.3, 1.15, 0.97
ORDER_WITHIN = 0.05
CUT, CUT_PROMPTS = 0.88, 10

LENGTHS, BUDGETS = (300, 1000, 3000), (8, 16, 32)

Answers = list[dict[str, Any]]


def unseen() -> str:
    """The suite nobody tuned to. Raises RuntimeError without one."""
    suite = os.environ.get("UNSEEN_SUITE")
    if not suite:
        raise RuntimeError("this step needs UNSEEN_SUITE=FILE.jsonl")
    return suite


def not_below(gain: dict[str, Any], line: float) -> bool:
    """Whether a figure of the report meets a line: its interval, where it has one, does not lie below it."""
    return bool(max(gain["geomean"], gain["ci95"][1]) >= line)


def kept(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key not in ("pairs", "plan", "machine")}


# --------------------------------------------------------------------------------- benchmarks, warm and cold


def _requests(suite: Callable[[], str]) -> Callable[[Any, str], bool]:
    def step(results: Any, name: str) -> bool:
        report = edgespec("bench", "--suite", suite(), "--cold", "--passes", PASSES, "--arms", "again,planned")
        results.save(name, report=kept(report))
        planned = report["arms"]["planned"]
        gain = planned["request_speedup"]
        return (
            identical(report)
            and gain["geomean"] >= REQUESTS
            and all(not_below(own, REQUESTS_CATEGORY) for own in gain["by_category"].values())
            and planned["ttft_ratio"]["geomean"] <= TTFT
        )

    return step


def short_answers(results: Any, name: str) -> bool:
    """Prompts of 300, 1000 and 3000 tokens with answers of at most 8, 16 and 32: none slower than plain."""
    text = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    questions = ("What is this text about?", "Name two commands in it.", "Who is it for?", "List its subjects.")
    holds = True
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "lengths.jsonl"
        lines = []
        for length in LENGTHS:
            for number, question in enumerate(questions):
                start = 3000 * number
                prompt = f"{text[start : start + int(3.1 * length)]}\n\n{question}"
                lines.append(
                    json.dumps({"id": f"{length}-{number}", "category": f"prompt {length}", "prompt": prompt})
                )
        suite.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for budget in BUDGETS:
            report = edgespec(
                "bench", "--suite", str(suite), "--cold", "--passes", PASSES, "--arms", "again,planned",
                "--max-tokens", str(budget),
            )  # fmt: skip
            results.save(name, **{f"report_{budget}": kept(report)})
            gains = report["arms"]["planned"]["request_speedup"]["by_category"]
            holds = holds and identical(report) and all(own["geomean"] >= SHORT_ANSWERS for own in gains.values())
    return holds


def decode(results: Any, name: str) -> bool:
    """Text that nothing was tuned to, prompts in the cache: the gain, and no category slower than plain."""
    report = edgespec("bench", "--suite", unseen(), "--passes", PASSES, "--arms", "again,planned")
    results.save(name, report=kept(report))
    gain = report["arms"]["planned"]["speedup"]
    categories = gain["by_category"].values()
    return identical(report) and gain["geomean"] >= DECODE and all(not_below(own, 1.0) for own in categories)


def sampled(results: Any, name: str) -> bool:
    """0.7 with top-p 0.95 keeps most of greedy's gain; top-k 40 and min-p 0.05 at 1.0 are not slower than plain."""
    common = ("bench", "--suite", unseen(), "--limit", "2", "--passes", PASSES, "--arms", "again,planned")
    runs = {
        "greedy": (),
        "top-p": ("--temperature", "0.7", "--top-p", "0.95"),
        "top-k": ("--temperature", "1.0", "--top-k", "40"),
        "min-p": ("--temperature", "1.0", "--min-p", "0.05"),
    }
    gains, same = {}, True
    for run, options in runs.items():
        report = edgespec(*common, *options)
        results.save(name, **{run: kept(report)})
        gains[run] = report["arms"]["planned"]["speedup"]
        same = same and identical(report)
    return (
        same
        and gains["top-p"]["geomean"] >= SAMPLED_OF_GREEDY * gains["greedy"]["geomean"]
        and all(not_below(own, SAMPLED_CATEGORY) for own in gains["top-p"]["by_category"].values())
        and all(not_below(gains[run], SAMPLED_CATEGORY) for run in ("top-k", "min-p"))
    )


# -------------------------------------------------------------------------------------- processes of their own


def fresh_home(folder: Path) -> dict[str, str]:
    """An environment with an empty home but for the models."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(home().root / "models")
    return {**os.environ, "EDGESPEC_HOME": str(folder)}


def answers(environment: dict[str, str], *arguments: str) -> Answers:
    """What scripts/answers.py prints in a process of its own. Raises RuntimeError with its errors."""
    command = [sys.executable, str(ROOT / "scripts" / "answers.py"), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


def seconds(row: dict[str, Any]) -> float:
    """Of the whole request."""
    return float(row["ttft_s"] + row["decode_s"])


def request_gains(rows: Answers) -> dict[str, float]:
    """By prompt: plain's seconds over planned's, geometric mean over the turns."""
    logs: dict[str, list[float]] = {}
    plain = {(row["id"], row["turn"]): seconds(row) for row in rows if row["arm"] == "plain"}
    for row in rows:
        if row["arm"] == "planned":
            logs.setdefault(row["id"], []).append(math.log(plain[row["id"], row["turn"]] / seconds(row)))
    return {prompt: math.exp(statistics.fmean(own)) for prompt, own in logs.items()}


def geomean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def first_answers(results: Any, name: str) -> bool:
    """A home that nobody calibrated: the first process drafts and is not slower, the second one gains."""
    suite = unseen()
    with tempfile.TemporaryDirectory() as folder:
        environment = fresh_home(Path(folder) / "home")
        both = ("--arms", "planned,plain", "--turns", "2")
        first = answers(environment, suite, "--category", "coding", "--limit", "1", *both)
        second = answers(environment, suite, "--max-tokens", "96", *both)
    categories = {row["id"]: row["category"] for row in second}
    gains = request_gains(second)
    by_category = {
        category: geomean(gain for prompt, gain in gains.items() if categories[prompt] == category)
        for category in sorted(set(categories.values()))
    }
    opening = {row["arm"]: row for row in first if row["turn"] == 0}
    of_first = seconds(opening["plain"]) / seconds(opening["planned"])
    drafted = bool(opening["planned"]["proposed"])
    same = _same_ids(first) and _same_ids(second)
    results.save(name, first=of_first, drafted=drafted, second=geomean(gains.values()), by_category=by_category)
    return (
        same
        and drafted
        and of_first >= FIRST_CODE
        and by_category["coding"] >= SECOND_CODE
        and geomean(gains.values()) >= SECOND_ALL
        and min(by_category.values()) >= SECOND_CATEGORY
    )


def cut(results: Any, name: str) -> bool:
    """Ten answers that end right after their first drafted round: what the drafter took is not earned back."""
    suite, ratios = load_suite(Path(unseen())), {}
    with tempfile.TemporaryDirectory() as folder:
        fresh_home(Path(folder) / "home")
        engine = Engine.load(profile="laptop", store_home=Home(Path(folder) / "home"))
        with engine, engine.session() as planned, engine.session() as plain:
            engine.load_drafter()
            for prompt in suite[:: max(1, len(suite) // 13)]:
                turns = []
                for _ in range(3):
                    tokens, bought_s = _until_drafted(planned, prompt.prompt)
                    if tokens:
                        plain.clear(keep_cache=False)
                        started = time.perf_counter()
                        with plain.generate(prompt.prompt, max_tokens=tokens, depth=0) as generation:
                            sum(1 for _ in generation)
                        turns.append((time.perf_counter() - started) / bought_s)
                if turns and len(ratios) < CUT_PROMPTS:
                    ratios[prompt.id] = statistics.median(turns)
    results.save(name, ratios=ratios)
    return len(ratios) == CUT_PROMPTS and min(ratios.values()) >= CUT


def _until_drafted(session: Session, prompt: str) -> tuple[int, float]:
    """Tokens and seconds of an answer that is given up after its first drafted round; 0 where none was drafted."""
    session.clear(keep_cache=False)
    tokens, started = 1, time.perf_counter()
    with session.generate(prompt, max_tokens=256) as generation:
        for event in generation:
            if isinstance(event, Round):
                tokens += event.record.emitted
                if event.record.source == "model":
                    return tokens, time.perf_counter() - started
    return 0, 0.0


def _same_ids(rows: Answers) -> bool:
    ids: dict[str, set[tuple[int, ...]]] = {}
    for row in rows:
        ids.setdefault(row["id"], set()).add(tuple(row["token_ids"]))
    return all(len(own) == 1 for own in ids.values())


def order(results: Any, name: str) -> bool:
    """Tokens a round of code and of translations, a process each, in either order and alone."""
    suite = unseen()
    kinds = ("translation", "coding")

    def tokens_a_round(sequence: Sequence[str]) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            environment = fresh_home(Path(folder) / "home")
            rows: dict[str, Answers] = {}
            answers(environment, suite, "--category", "stem", "--limit", "1")  # so that none is the first there
            for kind in sequence:
                rows[kind] = answers(environment, suite, "--category", kind, "--max-tokens", "128")
        return {kind: geomean(row["tokens_per_round"] for row in own) for kind, own in rows.items()}

    alone = {kind: tokens_a_round([kind])[kind] for kind in kinds}
    there, back = tokens_a_round(kinds), tokens_a_round(kinds[::-1])
    results.save(name, alone=alone, translations_first=there, code_first=back)
    return all(abs(run[kind] / alone[kind] - 1.0) <= ORDER_WITHIN for run in (there, back) for kind in kinds)


PROMISE_STEPS: dict[str, Callable[[Any, str], bool]] = {
    "requests-short": _requests(lambda: "short"),
    "requests-unseen": _requests(unseen),
    "short-answers": short_answers,
    "decode-unseen": decode,
    "sampled-unseen": sampled,
    "first-answers": first_answers,
    "cut-after-a-purchase": cut,
    "order": order,
}


class _Printed:
    def save(self, name: str, **values: Any) -> None:
        print(json.dumps({"step": name, **values}, indent=1), flush=True)


def main() -> int:
    """Run the steps asked for and print what they find; 0 if all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*PROMISE_STEPS], help="run this step (repeatable)")
    arguments = parser.parse_args()
    verdicts = {name: PROMISE_STEPS[name](_Printed(), name) for name in arguments.only or PROMISE_STEPS}
    print(json.dumps({"holds": verdicts}))
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
