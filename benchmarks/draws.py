"""How long does it take to choose a token? Milliseconds per row of the target and per drafted token, by sampling.

Rows are real models' scores for a text of the suite; the drafter has its short head, if it has one. Compared are our
kernels and numpy on the same scores, which other runtimes and machines without a compiler use. Both must choose the
same tokens. A drafted token includes the inputs of gates and alternatives: the confidence and three alternatives.

    python benchmarks/draws.py [--target MODEL] [--draft MODEL] [--rows N]

Prints one JSON object. Requires an idle machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing

from edgespec.bench.suite import builtin_suite
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters.model import MOST_ALTERNATIVES
from edgespec.files.home import home
from edgespec.hardware.machine import describe_machine
from edgespec.interfaces.drawing import Drawn, DrawRequest, draw_from
from edgespec.interfaces.model import Sequence
from edgespec.interfaces.rows import IdArray, Rows
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.runtime import NativeRuntime, frequent_head_rows
from edgespec.runtimes.runtime import DraftForm
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from edgespec.text.tokenizers.choice import open_tokenizer

SAMPLINGS = {
    "greedy": Sampling(),
    "0.7, top-p 0.95": Sampling(temperature=0.7, top_p=0.95),
    "1.0, top-k 40": Sampling(temperature=1.0, top_k=40),
    "1.0, min-p 0.05": Sampling(temperature=1.0, min_p=0.05),
    "1.0": Sampling(temperature=1.0),
}


class _Open:
    """A gate that admits every token and reads its confidence."""

    needs_entropy = False

    def admits(self, confidence: float, entropy: float | None) -> bool:
        return confidence > 0

    def goes_on(self) -> bool:
        return True


class _WithNumpy(Rows):
    """The rows in a class without the runtime's own computations."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows.count, rows.logits)
        self._rows = rows

    def argmax_row(self, index: int) -> int:
        return self._rows.argmax_row(index)

    def draw(self, index: int, request: DrawRequest, ids: IdArray | None = None) -> Drawn:
        own, scores = self._rows.scored(index)
        return draw_from(scores, request, own)


def open_model(name: str, *, drafts: bool) -> tuple[NativeModel, list[int]]:
    """The model, a drafter with its short head, and a text in its tokens."""
    file = Locator(store=Store(home()), download=True).locate(name)
    head = frequent_head_rows(file.header) if drafts else None
    settings = NativeSettings(threads=describe_machine().physical_cores, sidecar=False)
    with closing(open_tokenizer(file.path, file.header)) as tokenizer:
        tokens = tokenizer.encode("\n".join(prompt.prompt for prompt in builtin_suite("verify")))
    return NativeRuntime().load(file, settings, DraftForm(head_rows=head)), tokens


def draft(chooser: Chooser, rows: Rows, index: int, context: list[int]) -> object:
    """Choose as a drafter does in a chain with alternatives."""
    return chooser.draft(rows, index, context, _Open(), alternatives=MOST_ALTERNATIVES)


def timed(rows: list[Callable[[], object]], passes: int) -> tuple[float, list[object]]:
    """Median milliseconds of one call, and the results."""
    found, seconds = list[object](), list[float]()
    for _ in range(passes):
        found = []
        for call in rows:
            started = time.perf_counter()
            found.append(call())
            seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds), found


def measure(sequence: Sequence, tokens: list[int], count: int, *, drafts: bool) -> dict[str, dict[str, float]]:
    """Milliseconds by sampling, with our kernels and with numpy."""
    sequence.forward(tokens[:-count], 0)
    result: dict[str, dict[str, float]] = {name: {} for name in SAMPLINGS}
    choose: Callable[[Chooser, Rows, int, list[int]], object] = draft if drafts else Chooser.target_token
    seen: dict[tuple[str, str], list[object]] = {}
    for name, sampling in SAMPLINGS.items():
        for way in ("kernels", "numpy"):
            sequence.rewind(len(tokens) - count)
            native = sequence.forward(tokens[-count:], count)
            rows = native if way == "kernels" else _WithNumpy(native)
            calls: list[Callable[[], object]] = [
                functools.partial(choose, Chooser(sampling), rows, index, tokens[: len(tokens) - count + index + 1])
                for index in range(count)
            ]
            milliseconds, seen[name, way] = timed(calls, 3)
            result[name][way] = round(milliseconds, 4)
        assert seen[name, "kernels"] == seen[name, "numpy"], name
    return result


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--rows", type=int, default=40)
    arguments = parser.parse_args()
    found: dict[str, object] = {"processor": describe_machine().processor}
    for role, name in (("target, ms a row", arguments.target), ("drafter, ms a token", arguments.draft)):
        model, tokens = open_model(name, drafts=role.startswith("drafter"))
        with model, model.open(512) as sequence:
            found[role] = measure(sequence, tokens[:512], arguments.rows, drafts=role.startswith("drafter"))
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
