"""Do wrong measurements make later answers slower? One process a prompt, in each of several homes.

    python -m benchmarks.held_plans SUITE [--prompts N] [--max-tokens N] [--homes NAME,...]

One home is never calibrated, the others differ from it in their measurements: made by `calibrate --quick` on a quiet
machine (`quiet`), while a busy loop ran on every processor (`busy`) or on one (`one taken`), or those of `quiet` with
the drafter's times doubled (`doubled`) or halved (`halved`), or with a note that answers agreed on the pipelined
mode, in which neither side slows the other down (`pipelined`). Then the machine is quiet. `ratios` are the geometric
means over prompts of the seconds in `never` over the home's; `decode_s`, `tokens_per_round` and `modes` are by home
and prompt. `gain` is plain decoding's seconds over the planned ones in `never`. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.processes import Answers, answers, busy_loops, edgespec, fresh_home, with_other_ids
from edgespec.bench.statistics import geomean
from edgespec.bench.suite import Prompt, load_suite
from edgespec.calibration.kinds import ANSWERED, CONTENTION
from edgespec.calibration.measurement_store import Measurements
from edgespec.hardware.machine import usable_processors
from edgespec.planning.choice.settled import Answered, Settled
from edgespec.planning.cost.contention import Contention

NEVER, QUIET = "never", "quiet"
_TRIES = 5
# What runs during the calibration of a home.
BESIDE: dict[str, Callable[[], AbstractContextManager[object]]] = {
    QUIET: nullcontext,
    "busy": lambda: busy_loops(usable_processors()),
    "one taken": lambda: busy_loops(1),
}
# What is changed in a copy of the quiet home's measurements.
WRONG: dict[str, Callable[[Path], None]] = {
    "doubled": lambda folder: scale_drafter(folder, 2.0),
    "halved": lambda folder: scale_drafter(folder, 0.5),
    "pipelined": lambda folder: agree_on_pipelined(folder),
}
HOMES = (NEVER, *BESIDE, *WRONG)


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """``count`` prompts at equal distances, so that every kind is among them."""
    return [prompts[at * len(prompts) // count] for at in range(min(count, len(prompts)))]


def _pair(folder: Path) -> Mapping[str, Any]:
    """The key of the pair whose contention was measured."""
    found: Mapping[str, Any] = json.loads(next(folder.glob("contention-*.json")).read_text())["key"]
    return found


def scale_drafter(folder: Path, factor: float) -> None:
    """Multiply the stored times of the pair's drafter."""
    drafter = _pair(folder)["drafter"]
    changed = 0
    for path in folder.glob("times-*.json"):
        document = json.loads(path.read_text())
        if document["key"] == drafter:
            times = document["times"]
            times["forward_s"] = [[factor * each for each in row] for row in times["forward_s"]]
            times["prompt_token_s"] *= factor
            path.write_text(json.dumps(document))
            changed += 1
    assert changed == 1, f"{changed} files have times of the drafter"


def agree_on_pipelined(folder: Path) -> None:
    """Store that answers of the pair agreed on the pipelined mode, and times by which it is the faster one."""
    key = _pair(folder)
    store = Measurements(folder, key["target"]["machine"])
    # The key is known, the models' facts are not.
    answered: Any = replace(ANSWERED, key=lambda *about: key)
    contention: Any = replace(CONTENTION, key=lambda *about: key)
    store.save(answered, Answered(mode=Settled(chosen="pipelined")))
    store.save(contention, Contention())


def figures(rows: Mapping[str, Answers]) -> dict[str, Any]:
    """The figures of all homes, those of ``never`` among them, from the rows of each.

    Answers of one token take no time to decode, so that they have no ratio.
    """
    planned = {home: {row["id"]: row for row in own if row["arm"] == "planned"} for home, own in rows.items()}
    plain_s = {row["id"]: row["decode_s"] for row in rows[NEVER] if row["arm"] == "plain"}
    first = planned[NEVER]

    def by_prompt(name: str) -> dict[str, dict[str, Any]]:
        return {home: {prompt: row[name] for prompt, row in own.items()} for home, own in planned.items()}

    return {
        "ratios": {
            home: geomean(
                first[prompt]["decode_s"] / row["decode_s"]
                for prompt, row in own.items()
                if first[prompt]["decode_s"] and row["decode_s"]
            )
            for home, own in planned.items()
            if home != NEVER
        },
        "gain": geomean(
            seconds / first[prompt]["decode_s"]
            for prompt, seconds in plain_s.items()
            if seconds and first[prompt]["decode_s"]
        ),
        "decode_s": by_prompt("decode_s"),
        "tokens_per_round": by_prompt("tokens_per_round"),
        "modes": by_prompt("mode"),
        "identical": not with_other_ids([row for own in rows.values() for row in own]),
    }


def _calibrate(environment: Mapping[str, str]) -> None:
    edgespec("calibrate", "--quick", "--profile", "laptop", environment=environment)


def _calibrate_until_quiet(environment: Mapping[str, str], measurements: Path) -> None:
    """Calibrate again while other programs disturbed it: such times decide nothing, so changing them shows nothing.

    Also where the time ended before the pair was timed. Raises RuntimeError if the machine does not become quiet.
    """
    for _ in range(_TRIES):
        disturbed = any('"busy"' in path.read_text() for path in measurements.glob("*.json"))
        if not disturbed and any(measurements.glob("contention-*.json")):
            return
        _calibrate(environment)
    raise RuntimeError("other programs disturbed every calibration: the comparison needs a quiet machine")


def _made(folder: Path, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """The environments of the homes."""
    homes = {name: fresh_home(folder / name) for name in names}
    for name, beside in BESIDE.items():
        if name in homes or (name == QUIET and set(names) & set(WRONG)):
            with beside():
                environment = homes.get(name) or fresh_home(folder / name)
                _calibrate(environment)
                if name == QUIET:
                    _calibrate_until_quiet(environment, folder / name / "measurements")
    for name, spoil in WRONG.items():
        if name in homes:
            own = folder / name / "measurements"
            shutil.copytree(folder / QUIET / "measurements", own)
            spoil(own)
    return homes


def measure(suite: str, count: int, max_tokens: int, names: Sequence[str] = HOMES) -> dict[str, Any]:
    """Make the homes, then answer the prompts in all of them, in an order that rotates."""
    rows: dict[str, Answers] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        homes = _made(Path(folder), names)
        for at, prompt in enumerate(spread(load_suite(Path(suite)), count)):
            one = Path(folder) / "one.jsonl"
            one.write_text(json.dumps({"id": prompt.id, "category": prompt.category, "prompt": prompt.prompt}) + "\n")
            turn = at % len(names)
            for name in (*names[turn:], *names[:turn]):
                arms = "planned,plain" if name == NEVER else "planned"
                rows[name] += answers(homes[name], str(one), "--arms", arms, "--max-tokens", str(max_tokens))
    return figures(rows)


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--homes", default=",".join(HOMES), help="never must be one of them")
    given = parser.parse_args()
    print(json.dumps(measure(given.suite, given.prompts, given.max_tokens, tuple(given.homes.split(",")))))


if __name__ == "__main__":
    main()
