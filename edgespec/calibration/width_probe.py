"""Measures which forward widths are bit-equal for one model, build and setting.

A row's scores may depend on how many rows are computed with it (another kernel, another rounding). Speculation emits
plain decoding's text only if verification uses widths whose rows are bit-equal to width 1's, read through the cache
that those widths wrote.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

import numpy as np

from edgespec.interfaces.model import Model, Sequence
from edgespec.interfaces.rows import LogitsArray
from edgespec.planning.cost.widths import (
    BORDERS,
    POSITIONS,
    WIDEST,
    ContextProbe,
    WidthProbe,
    probe_starts,
)

# Tokens read at a time before a probe: under a second on a machine that reads 77 prompt tokens a second.
STEP_TOKENS = 64

# A mixture of widths must agree as well: kernels could each be stable and yet leave different caches. As in decoding,
# each forward keeps only its first few rows, so that another width reads every width's cache.
_MIXTURE_SEED = 7
_MIXTURE_KEEPS = 4


def probe_tokens(count: int, vocabulary_size: int) -> list[int]:
    """Pseudo-random token ids, the same on every call."""
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

    A width that differs at a context is left out, and not measured further unless ``complete``. ``progress`` receives
    the fraction done. Raises what a forward raises.
    """
    starts = probe_starts(context_length)
    end = starts[-1] + POSITIONS
    with closing(model.open(end + widest)) as sequence:
        tokens = probe_tokens(end, model.facts.vocabulary_size)
        prober = WidthProber(sequence, tokens, widest=widest, complete=complete)
        for start in starts:
            for _ in prober.steps_at(start):
                pass
            if progress is not None:
                progress((start + POSITIONS) / end)
    return prober.result()


class WidthProber:
    """Probes one sequence at ascending contexts, in short steps; the caller may stop between steps.

    ``tokens`` are the text, to where the last probe ends.
    """

    def __init__(
        self, sequence: Sequence, tokens: list[int], *, widest: int = WIDEST, complete: bool = False
    ) -> None:
        self._sequence = sequence
        self._complete = complete
        self._equal = list(range(2, widest + 1))
        self._differing: list[int] = []
        self._contexts: list[ContextProbe] = []
        self._plain_forward_s: float | None = None
        self.tokens = tokens

    def steps_at(self, start: int) -> Iterator[None]:
        """Probe at ``start``, which ascends from call to call, after reading the prompt before it."""
        sequence, tokens = self._sequence, self.tokens
        yield from self.read_to(start)
        span = tokens[start : start + POSITIONS]
        reference, seconds = _plain_rows(sequence, start, span)
        self._plain_forward_s = self._plain_forward_s or statistics.median(seconds)
        yield
        diffs: dict[int, float] = {}
        for width in [*self._equal, *(self._differing if self._complete else ())]:
            diff = _difference(sequence, start, span, _constant(width), reference, stop_early=not self._complete)
            if diff > 0:
                diffs[width] = diff
            yield
        mixture = random.Random(_MIXTURE_SEED + start)
        self._differing.extend(width for width in self._equal if width in diffs)
        self._equal = [width for width in self._equal if width not in diffs]
        if self._equal:
            widths = [mixture.choice([1, *self._equal]) for _ in span]
            mixed = [(width, mixture.randint(1, min(width, _MIXTURE_KEEPS))) for width in widths]
            diff = _difference(sequence, start, span, mixed, reference, stop_early=False)
            if diff > 0:  # stable alone but not when mixed: only width 1 is safe
                diffs[0] = diff
                self._differing.extend(self._equal)
                self._equal = []
        self._contexts.append(ContextProbe(start=start, positions=POSITIONS, max_abs_diff=diffs))
        yield

    def read_to(self, start: int) -> Iterator[None]:
        """Fill the cache with exactly the first ``start`` tokens."""
        sequence = self._sequence
        sequence.rewind(min(sequence.length, start))
        while sequence.length < start:
            sequence.forward(self.tokens[sequence.length : min(start, sequence.length + STEP_TOKENS)], 0)
            yield

    def result(self) -> WidthProbe:
        """The result of the contexts probed so far."""
        return WidthProbe(
            widths=(1, *self._equal),
            contexts=tuple(self._contexts),
            complete=self._complete,
            plain_forward_s=self._plain_forward_s,
        )


def _plain_rows(sequence: Sequence, start: int, span: list[int]) -> tuple[list[LogitsArray], list[float]]:
    """The scores after each token of ``span`` at width 1, and the seconds of each forward."""
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
        # The last group is padded, so that every forward has the full width.
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
            largest = max(largest, difference if difference > 0 else float("inf"))  # NaN: no bound
            if stop_early:
                break
    return largest
