"""Files of one model side by side, each in its runtime: what they are called, and T(w) of each, measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from edgespec.calibration.timing import WIDTHS, Clock
from edgespec.calibration.width_probe import probe_tokens
from edgespec.errors import InvalidRequestError
from edgespec.files.disk import megabytes
from edgespec.interfaces.model import Model, ModelFacts, Sequence as TokenSequence
from edgespec.planning.cost.widths import probe_starts

# Long enough for every name that people give files, short enough for a table on a terminal.
_NAME_CHARACTERS = 40

# Turns that count, and timed plain forwards in each. With one forward of warming up and three timed, each model was
# timed while its turn began, when two cores wake up: of one 0.5B model with two heads the ratio came out as 1.10 to
# 1.18 that was 1.31 over ten, as in decoding.
TURNS = 7
WARMING_UP = 3
PLAIN_PER_TURN = 8

# ONNX Runtime's idle threads were seen to take 31 to 36 ms of a core's time after a forward (until 87 ms after it on
# a machine that had other work), llama.cpp's 5 ms: nothing of another runtime is timed in that.
REST_S = 0.1

# As in planning.calibration: wider forwards than chains use take long, and two of them show where a curve goes.
_OFTEN_TIMED = 8
_SELDOM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A loaded model and what it is called here. ``arm`` decodes with it plainly; None: it only gets a curve."""

    name: str
    arm: str | None
    model: Model


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeTimes:
    """T(w) of one of the models after ``context`` tokens.

    ``forward_s[i]`` are the median seconds of a forward of ``widths[i]`` rows, picking their best tokens included.
    ``t1_ratio`` is its T(1) over the first model's: the median of the turns' ratios, in which a change of the
    machine's pace between two turns cancels; ``t1_ratio_range`` are the lowest and the highest of them.
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
        """An entry of ``runtimes`` in CLI.md's ``bench`` object."""
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

    A colon is in no arm that can be asked for by name, so that none of these is mistaken for one.
    """
    names: list[str] = []
    for runtime, model in models:
        # A folder may be called anything, and a terminal would obey a control character.
        shown = "".join(letter if letter.isprintable() else "?" for letter in model)
        whole = f"{runtime}:{shown}"
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
    """T(w) of each of ``models`` at the first context of the probes, in steps; yields the fraction done.

    The models take turns, in an order that is reversed each time, so that a busy machine slows all of them alike.
    Within its turn a model makes all its forwards in a row, as in decoding, after some that do not count; before it
    the machine rests for ``REST_S``, until the other runtime's threads sleep. All are fed the same tokens, of the
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
        # Once around without counting: kernels and pages warm up.
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
    """One model's forwards. ``plain_s`` is the median plain forward of each turn that counts."""

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
        """All widths once, width 1 a few times; turn 0 does not count. Yields ``done``."""
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


def runtimes_json(times: Iterable[RuntimeTimes]) -> list[dict[str, Any]]:
    """The value of ``runtimes`` in CLI.md's ``bench`` object; empty where nothing was put beside the target."""
    return [each.as_json() for each in times]


def runtime_lines(runtimes: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """``runtimes`` for people: T(1), and what it (in all turns: the range) and the bytes are of the first one's."""
    if not runtimes:
        return ()
    first = runtimes[0]
    width = max(len(each["name"]) for each in runtimes)
    lines = [f"a forward of one token after {first['context']}, in turns"]
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
