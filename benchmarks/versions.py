"""Do two versions of edgespec answer equally fast? Each in its own process, in turn, on the same prompts.

    python -m benchmarks.versions SUITE NAME=FOLDER[,KEY=VALUE…] … [--limit N] [--turns N] [--max-tokens N]
                                  [--temperature T] [--whole-requests] [--rows FILE]

FOLDER is a checkout whose kernels are built. The first version is the baseline. Keys: `draft` (a model, or `none`),
`depth` (0: plain decoding), `home` (a folder instead of the usual home). Each turn asks all versions in order and
then in the opposite order. Prompts are separate conversations. In decoding, each prompt is in the cache when the
clock starts; with `--whole-requests` it is read again, and its reading counts. Prints one JSON object: each version's
speed as a multiple of the baseline's, by category too, tokens a round, and whether all token ids are equal. Exits
with 1 if some differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import Answers, with_other_ids
from edgespec.bench.statistics import abba, by_category, geomean, speedup
from scripts.answers import chosen

# Runs in the version's own process: only what has long been public is used.
WORKER = """
import json, sys
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
given = json.loads(sys.argv[1])
with Engine.load(profile="laptop", draft=given["draft"]) as engine, engine.session() as session:
    if given["draft"] != "none" and given["depth"] is None:
        engine.load_drafter()
    def answer(prompt, max_tokens):
        events = session.generate(prompt, max_tokens=max_tokens, sampling=sampling, depth=given["depth"])
        return next(event for event in events if isinstance(event, Done))
    print("{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = Sampling(temperature=asked["temperature"], seed=1)
        session.clear(keep_cache=False)
        if not asked["whole"]:
            answer(asked["prompt"], 1)
            session.clear()
        done = answer(asked["prompt"], asked["max_tokens"])
        print(json.dumps({"token_ids": list(done.token_ids), **done.stats.as_json()}), flush=True)
"""


class Version:
    """A process that answers prompts with one version. Raises RuntimeError with its errors if it ends."""

    def __init__(self, text: str) -> None:
        self.name, _, rest = text.partition("=")
        folder, *pairs = rest.split(",")
        given = dict(pair.split("=", 1) for pair in pairs)
        depth = int(given["depth"]) if "depth" in given else None
        environment = {**os.environ, "PYTHONPATH": folder}
        if "home" in given:
            environment["EDGESPEC_HOME"] = given["home"]
        options = json.dumps({"draft": given.get("draft"), "depth": depth})
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, options],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reply()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f'the version "{self.name}" ended with exit status {self.process.wait()}')
        reply: dict[str, Any] = json.loads(line)
        return reply


def measure(versions: Sequence[Version], given: argparse.Namespace) -> Answers:
    """A row for each answer, in the order of the answers."""
    rows: Answers = []
    by_name = {version.name: version for version in versions}
    for place, prompt in enumerate(chosen(given.suite, given.category, given.limit)):
        request = {
            "prompt": prompt.prompt,
            "max_tokens": prompt.longest(given.max_tokens),
            "temperature": given.temperature,
            "whole": given.whole_requests,
        }
        for name in abba([*by_name], given.turns, place):
            answer = by_name[name].ask(request)
            rows.append({"id": prompt.id, "category": prompt.category, "version": name, **answer})
    return rows


def report(rows: Answers, names: Sequence[str], *, whole: bool) -> dict[str, Any]:
    """The figures of all versions. Seconds are of a token, or of a whole request.

    Prompts that a version answers with one token or none count only as whole requests.
    """
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    # An answer of one token takes no time to decode.
    short = {row["id"] for row in rows if row["emitted_tokens"] < 2 and not whole}
    for row in rows:
        if row["id"] not in short:
            spent = row["ttft_s"] + row["decode_s"] if whole else row["decode_s"] / (row["emitted_tokens"] - 1)
            seconds[row["version"]].setdefault(row["id"], []).append(spent)
    categories = {row["id"]: row["category"] for row in rows}
    figures = {}
    for name in names:
        ratios = {
            prompt: [before / after for before, after in zip(seconds[names[0]][prompt], own, strict=True)]
            for prompt, own in seconds[name].items()
        }
        own_rows = [row for row in rows if row["version"] == name]
        figures[name] = {
            **speedup(ratios).as_json(),
            "by_category": {category: each.as_json() for category, each in by_category(ratios, categories).items()},
            "tokens_per_round": geomean(row["tokens_per_round"] for row in own_rows if row["tokens_per_round"]),
            "tokens_per_s": geomean(1 / spent for own in seconds[name].values() for spent in own),
        }
    different = with_other_ids(rows)
    return {"baseline": names[0], "versions": figures, "identical": not different, "different": different}


def main() -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("versions", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--category", action="append", default=[])
    parser.add_argument("--limit", type=int, help="prompts of each category")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--whole-requests", action="store_true")
    parser.add_argument("--rows", type=Path, help="a file for all rows, a JSON line each")
    given = parser.parse_args()
    versions = [Version(text) for text in given.versions]
    rows = measure(versions, given)
    if given.rows is not None:
        given.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = report(rows, [version.name for version in versions], whole=given.whole_requests)
    json.dump(found, sys.stdout, indent=1)
    print()
    return 0 if found["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
