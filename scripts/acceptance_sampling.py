"""The acceptance steps for sampling: one token for one seed, whoever draws it and whether or not it was drafted.

python scripts/acceptance_sampling.py [--only STEP]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec.bench.suite import builtin_suite
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.runtimes.native.draws import NativeDraws
from edgespec.runtimes.native.library import load

ROOT = Path(__file__).resolve().parent.parent
# So many rows of so many scores, or with 0 of 1 to 80; a million in all.
ROWS = {0: 976_000, 300: 20_000, 3000: 3_500, 151_936: 500}

SEEDS = (1, 2, 3)
PROMPTS, TOKENS = 6, 128
SAMPLINGS = {
    "0.7, top-p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "1.0, top-k 40": {"temperature": 1.0, "top_k": 40},
    "1.0, min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "0.8, penalties": {"temperature": 0.8, "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
}


def draws(results: Any, name: str) -> bool:
    """A million generated rows: every level of this processor and numpy draw what the specification says."""
    sys.path.insert(0, str(ROOT))
    from tests.support.score_rows import by_kernels, by_numpy, by_specification, score_rows

    library = load()
    by_level = {level: NativeDraws(library.api, level) for level in library.levels}
    compared, refused, different = 0, 0, []
    for count, rows in ROWS.items():
        for number, row in enumerate(score_rows(100 + count, rows, count=count or None)):
            expected = by_specification(row)
            found = {level: by_kernels(own, row) for level, own in by_level.items()} | {"numpy": by_numpy(row)}
            different += [(count, number, who) for who, own in found.items() if own != expected]
            compared += 1
            refused += expected is None
        print(f"  {compared} rows, {refused} of them not finite, {len(different)} differences", flush=True)
    results.save(name, rows=compared, not_finite=refused, levels=list(by_level), different=different[:20])
    return not different and compared == sum(ROWS.values())


def texts(results: Any, name: str) -> bool:
    """The default pair, sampled: with speculation the ids of plain decoding with the same seed."""
    rows: list[dict[str, Any]] = []
    with Engine.load(profile="laptop", download=True, calibrate=True) as engine, engine.session() as session:

        def answer(prompt: str, sampling: Sampling, depth: int | None) -> Done:
            session.clear()
            events = session.generate(prompt, max_tokens=TOKENS, sampling=sampling, depth=depth)
            return next(event for event in events if isinstance(event, Done))

        for prompt in builtin_suite("verify")[:PROMPTS]:
            for how, options in SAMPLINGS.items():
                for seed in SEEDS:
                    sampling = Sampling(seed=seed, **options)  # type: ignore[arg-type]
                    plain, planned = answer(prompt.prompt, sampling, 0), answer(prompt.prompt, sampling, None)
                    rows.append(
                        {
                            "prompt": prompt.id,
                            "sampling": how,
                            "seed": seed,
                            "identical": plain.token_ids == planned.token_ids,
                            "tokens_per_round": planned.stats.tokens_per_round,
                            "accepted_per_proposed": planned.stats.accepted_per_proposed,
                            "speed_over_plain": speed(planned) / speed(plain),
                        }
                    )
    results.save(name, answers=rows)
    return all(row["identical"] for row in rows) and any(row["tokens_per_round"] > 1.2 for row in rows)


def speed(done: Done) -> float:
    """Tokens a second."""
    return done.stats.decode_tokens_per_s or 0.0


SAMPLING_STEPS: dict[str, Callable[[Any, str], bool]] = {"sampling-draws": draws, "sampling-texts": texts}


class _Printed:
    def save(self, name: str, **values: Any) -> None:
        print(json.dumps({"step": name, **values}, indent=1), flush=True)


def main() -> int:
    """Run the steps asked for and print what they find; 0 if all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*SAMPLING_STEPS], help="run this step (repeatable)")
    arguments = parser.parse_args()
    verdicts = {name: SAMPLING_STEPS[name](_Printed(), name) for name in arguments.only or SAMPLING_STEPS}
    print(json.dumps({"holds": verdicts}))
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
