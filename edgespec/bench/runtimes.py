"""Files of one model side by side, each in its runtime: their names, and T(w) of each, measured alternately."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from edgespec.calibration.timing import WIDTHS, Clock
from edgespec.calibration.width_probe import probe_tokens
from edgespec.errors import ESCAPES, InvalidRequestError
from edgespec.files.disk import megabytes
from edgespec.interfaces.model import Model, ModelFacts, Sequence as TokenSequence
from edgespec.planning.cost.widths import probe_starts

# Long enough for usual file names, short enough for a table on a terminal.
_NAME_CHARACTERS = 40

# Counted turns, and timed plain forwards in each. Three timed forwards after one warm-up still include the cores'
# wake-up: a 0.5B model with two heads then had a ratio of 1.10 to 1.18, against 1.31 over ten, as in decoding.
TURNS = 7
WARMING_UP = 3
PLAIN_PER_TURN = 8

# After a forward ONNX Runtime's idle threads used 31 to 36 ms of a core (until 87 ms after it on a busy machine),
# llama.cpp's 5 ms: this pause keeps them out of the next model's times.
REST_S = 0.1

# As in planning.calibration: forwards wider than chains are slow, and two of them show where a curve goes.
_OFTEN_TIMED = 8
_SELDOM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A loaded model and its name here. ``arm`` decodes with it plainly; None: it only gets a curve."""

    name: str
    arm: str | None
    model: Model


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeTimes:
    """T(w) of one of the models after ``context`` tokens.

    ``forward_s[i]``: median seconds of a forward of ``widths[i]`` rows, including the choice of their best tokens.
    ``t1_ratio``: T(1) divided by the first model's, the median over the turns' ratios, in which a change of the
    machine's speed between two turns cancels. ``t1_ratio_range``: the lowest and the highest of these ratios.
    """

    name: str
    arm: str | None
    facts: ModelFacts
    context: int
    widths: tuple[int, ...]
    forward_s: tuple[float, ...]
    t1_ratio: float
    t1_ratio_range: tuple[float, float]

    def as_json(self) -> dict[str, Any]:
        """An entry of ``runtimes`` in ``bench --json``."""
        facts = self.facts
        return {
            "name": self.name,
            "arm": self.arm,
            "model": facts.name,
            "runtime": facts.runtime,
            "device": facts.device,
            "threads": facts.threads,
            "settings": {**facts.settings, "kv_type": facts.kv_type},
            "context": self.context,
            "width": list(self.widths),
            "forward_s": list(self.forward_s),
            "weight_bytes": facts.weight_bytes,
            "bytes_per_forward": facts.bytes_per_forward,
            "t1_ratio": self.t1_ratio,
            "t1_ratio_range": list(self.t1_ratio_range),
        }


def arm_names(models: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """A unique, printable name such as ``onnx:smol`` for each (runtime, model).

    No other arm's name has a colon, so these names cannot be mistaken for one.
    """
    names: list[str] = []
    for runtime, model in models:
        # A folder's name may contain control characters, which a terminal would obey.
        whole = f"{runtime}:{model.translate(ESCAPES)}"
        name = whole if len(whole) <= _NAME_CHARACTERS else f"{whole[: _NAME_CHARACTERS - 1]}…"
        count, unique = 1, name
        while unique in names:
            count += 1
            unique = f"{name} ({count})"
        names.append(unique)
    return tuple(names)


def measure_runtimes(
    models: Sequence[NamedModel],
    context_length: int,
    *,
    clock: Clock = time.perf_counter,
    rest: Callable[[float], None] = time.sleep,
) -> Generator[float, None, tuple[RuntimeTimes, ...]]:
    """Measure T(w) of each of ``models`` at the first context of the probes, in steps; yields the fraction done.

    The models alternate, in an order that is reversed each time, so that a busy machine slows all models equally.
    Within its turn a model makes all its forwards in a row, as in decoding, after uncounted ones; before the turn the
    process pauses for ``REST_S``, until the other runtime's threads sleep. All models read the same tokens, from the
    smallest vocabulary. Raises InvalidRequestError for a model that cannot take tokens back, and what opening a
    sequence and a forward raise.
    """
    for each in models:
        if not each.model.facts.can_rewind:
            raise InvalidRequestError(
                f"{each.name} cannot take tokens back, so its forwards cannot be timed side by side",
                hint="leave --compare out",
            )
    longest = min([context_length, *(each.model.facts.trained_context_length for each in models)])
    start = probe_starts(longest)[0]
    widths = tuple(width for width in WIDTHS if start + width <= longest)
    room = start + widths[-1]
    tokens = probe_tokens(room, min(each.model.facts.vocabulary_size for each in models))
    with ExitStack() as stack:
        sequences = [stack.enter_context(closing(each.model.open(room))) for each in models]
        for sequence in sequences:
            if start:
                sequence.forward(tokens[:start], 0)
            yield 0.0
        timings = [_Timing(sequence, start, tokens, widths, clock) for sequence in sequences]
        # The first turn is not counted: kernels and pages warm up.
        for turn in range(TURNS + 1):
            for timing in timings if turn % 2 == 0 else timings[::-1]:
                rest(REST_S)
                yield from timing.take_turn(turn, turn / (TURNS + 1))
        yield 1.0
    found = []
    for each, timing in zip(models, timings, strict=True):
        ratios = [own / first for own, first in zip(timing.plain_s, timings[0].plain_s, strict=True)]
        found.append(
            RuntimeTimes(
                name=each.name,
                arm=each.arm,
                facts=each.model.facts,
                context=start,
                widths=widths,
                forward_s=timing.medians(),
                t1_ratio=statistics.median(ratios),
                t1_ratio_range=(min(ratios), max(ratios)),
            )
        )
    return tuple(found)


class _Timing:
    """One model's forwards. ``plain_s``: the median plain forward of each counted turn."""

    def __init__(
        self, sequence: TokenSequence, start: int, tokens: list[int], widths: tuple[int, ...], clock: Clock
    ) -> None:
        self._sequence = sequence
        self._start = start
        self._tokens = tokens
        self._clock = clock
        self._samples: dict[int, list[float]] = {width: [] for width in widths}
        self.plain_s: list[float] = []

    def take_turn(self, turn: int, done: float) -> Generator[float, None, None]:
        """Run all widths once, width 1 several times; turn 0 is not counted. Yields ``done``."""
        for _ in range(WARMING_UP):
            self._forward_s(1)
        plain: list[float] = []
        for _ in range(PLAIN_PER_TURN):
            plain.append(self._forward_s(1))
            yield done
        if turn:
            self._samples[1] += plain
            self.plain_s.append(statistics.median(plain))
        for width, kept in self._samples.items():
            if width == 1 or (width > _OFTEN_TIMED and not 1 <= turn <= _SELDOM):
                continue
            seconds = self._forward_s(width)
            if turn:
                kept.append(seconds)
            yield done

    def medians(self) -> tuple[float, ...]:
        return tuple(statistics.median(kept) for kept in self._samples.values())

    def _forward_s(self, width: int) -> float:
        self._sequence.rewind(self._start)
        before = self._clock()
        self._sequence.forward(self._tokens[self._start : self._start + width], width).argmax()
        return self._clock() - before


def runtime_lines(runtimes: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """``runtimes`` as text: T(1), its ratio to the first model's (with the turns' range), and the ratio of bytes."""
    if not runtimes:
        return ()
    first = runtimes[0]
    width = max(len(each["name"]) for each in runtimes)
    lines = [f"a forward of one token after {first['context']}, measured alternately"]
    for each in runtimes:
        read = each["bytes_per_forward"]
        line = f"  {each['name']:{width}}  T(1) {1000 * each['forward_s'][0]:7.2f} ms, {megabytes(read)} read"
        if each is not first:
            low, high = each["t1_ratio_range"]
            line += f"; {each['t1_ratio']:.2f}x ({low:.2f}-{high:.2f}) of {first['name']}'s time"
            if first["bytes_per_forward"]:
                line += f", {read / first['bytes_per_forward']:.2f}x of its bytes"
        lines.append(line)
    return tuple(lines)
