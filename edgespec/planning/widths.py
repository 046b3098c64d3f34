"""Which forward widths are bit-equal: measured for one model, build and setting, and searched for the best.

A row's scores may depend on how many rows were computed beside it (another kernel, another rounding). Speculation
emits plain decoding's text only if verification stays within widths whose rows are bit-equal to width 1's, read
through the cache those widths themselves wrote.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from edgespec.decoding.contracts import LogitsArray, Model, Sequence

# Attention kernels split the cache in blocks and pad it to multiples of 256; bit-equality was seen to break at
# 512. Each probe starts a few tokens before a border and crosses it.
BORDERS = (256, 512, 1024)
POSITIONS = 12
_FIRST_START = 96

# No wider than a probe is long, so that every row of every width is compared. Deeper drafts than these 11 tokens have
# paid on a consumer CPU in no published measurement.
WIDEST = POSITIONS

# A mixture of widths must agree as well: kernels could each be stable and yet leave different caches. As in decoding,
# each forward keeps only its first few rows, so that every width's cache is read by another.
_MIXTURE_SEED = 7
_MIXTURE_KEEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextProbe:
    """Differences between width 1 and each other width at one context. ``max_abs_diff`` in logits, by width."""

    start: int
    positions: int
    max_abs_diff: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthProbe:
    """``widths`` are bit-equal to width 1 at every context probed; ``max_abs_diff`` is over all that are not.

    ``complete`` says whether every unequal width was measured to the end, as a bound for near exactness needs.
    ``plain_forward_s`` is the median time of a forward of width 1 at the first context.
    """

    widths: tuple[int, ...]
    contexts: tuple[ContextProbe, ...] = field(default_factory=tuple)
    complete: bool = False
    plain_forward_s: float | None = None

    @property
    def max_abs_diff(self) -> float:
        return max((diff for c in self.contexts for diff in c.max_abs_diff.values()), default=0.0)

    @property
    def depth_cap(self) -> int:
        """The deepest draft that verifies within the class, through every smaller width as well."""
        depth = 0
        while depth + 2 in self.widths:
            depth += 1
        return depth

    @property
    def context_range(self) -> tuple[int, int]:
        """First and last context length, in tokens, that was probed."""
        if not self.contexts:
            return (0, 0)
        return (self.contexts[0].start, self.contexts[-1].start + self.contexts[-1].positions)

    def covers(self, context_length: int) -> bool:
        """Whether this reaches as far as a probe for a context of that length does."""
        return self.context_range[1] >= probe_starts(context_length)[-1] + POSITIONS


def probe_starts(context_length: int) -> list[int]:
    """Where probes begin in a context of that length."""
    starts = [_FIRST_START, *(border - POSITIONS // 2 for border in BORDERS)]
    return [start for start in starts if start + POSITIONS <= context_length] or [0]


def probe_tokens(count: int, vocabulary_size: int) -> list[int]:
    """Pseudo-random token ids, the same every time."""
    return random.Random(_MIXTURE_SEED).choices(range(vocabulary_size), k=count)


def probe_widths(
    model: Model,
    *,
    widest: int = WIDEST,
    context_length: int = BORDERS[-1] + POSITIONS,
    complete: bool = False,
    progress: Callable[[float], None] | None = None,
) -> WidthProbe:
    """Measure the width class of ``model`` up to ``widest``, at contexts on both sides of each border.

    A width that differs anywhere is left out, and not measured further unless ``complete``. ``progress`` is given
    the fraction done. Raises what a forward raises.
    """
    starts = probe_starts(context_length)
    end = starts[-1] + POSITIONS
    tokens = probe_tokens(end, model.facts.vocabulary_size)
    equal = list(range(2, widest + 1))
    differing: list[int] = []
    contexts: list[ContextProbe] = []
    plain_forward_s: float | None = None
    with closing(model.open(end + widest)) as sequence:
        for start in starts:
            sequence.rewind(min(sequence.length, start))
            if sequence.length < start:
                sequence.forward(tokens[sequence.length : start], 0)
            span = tokens[start : start + POSITIONS]
            reference, seconds = _plain_rows(sequence, start, span)
            plain_forward_s = plain_forward_s or statistics.median(seconds)
            diffs: dict[int, float] = {}
            for width in [*equal, *(differing if complete else ())]:
                diff = _difference(sequence, start, span, _constant(width), reference, stop_early=not complete)
                if diff > 0:
                    diffs[width] = diff
            mixture = random.Random(_MIXTURE_SEED + start)
            equal, lost = [w for w in equal if w not in diffs], [w for w in equal if w in diffs]
            differing.extend(lost)
            if equal:
                widths = [mixture.choice([1, *equal]) for _ in span]
                mixed = [(width, mixture.randint(1, min(width, _MIXTURE_KEEPS))) for width in widths]
                diff = _difference(sequence, start, span, mixed, reference, stop_early=False)
                if diff > 0:  # stable one by one but not together: only width 1 is safe
                    diffs[0] = diff
                    differing.extend(equal)
                    equal = []
            contexts.append(ContextProbe(start=start, positions=POSITIONS, max_abs_diff=diffs))
            if progress is not None:
                progress((start + POSITIONS) / end)
    return WidthProbe(
        widths=(1, *equal), contexts=tuple(contexts), complete=complete, plain_forward_s=plain_forward_s
    )


def _plain_rows(sequence: Sequence, start: int, span: list[int]) -> tuple[list[LogitsArray], list[float]]:
    """The scores after each token of ``span`` at width 1, and the seconds each forward took."""
    rows, seconds = [], []
    sequence.rewind(start)
    for token in span:
        started = time.perf_counter()
        scored = sequence.forward([token], 1)
        seconds.append(time.perf_counter() - started)
        rows.append(scored.logits(0))
    return rows, seconds


def _constant(width: int) -> Iterator[tuple[int, int]]:
    while True:
        yield width, width


def _rows(
    sequence: Sequence, start: int, span: list[int], forwards: Iterable[tuple[int, int]]
) -> Iterator[LogitsArray]:
    """The scores after each token of ``span``, computed in forwards of the given (width, rows kept)."""
    sequence.rewind(start)
    done = 0
    for width, kept in forwards:
        group = span[done : done + width]
        if not group:
            return
        # The last group is filled up to the full width, so that every forward really has it.
        rows = sequence.forward((group + span * width)[:width], width)
        kept = min(kept, len(group))
        for index in range(kept):
            yield rows.logits(index)
        done += kept
        sequence.rewind(start + done)


def _difference(
    sequence: Sequence,
    start: int,
    span: list[int],
    forwards: Iterable[tuple[int, int]],
    reference: list[LogitsArray],
    *,
    stop_early: bool,
) -> float:
    """Largest absolute difference between rows in these forwards and the reference; 0.0 means bit-equal."""
    largest = 0.0
    for row, expected in zip(_rows(sequence, start, span, forwards), reference, strict=False):
        if not np.array_equal(row, expected):
            difference = float(np.abs(row - expected).max())
            largest = max(largest, difference if difference > 0 else float("inf"))  # not a number: no bound
            if stop_early:
                break
    return largest
