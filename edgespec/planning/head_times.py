"""Timing models that differ in their output heads only, to tell what a row of the head costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing

from edgespec.decoding.contracts import Model
from edgespec.planning.calibration import Clock
from edgespec.planning.widths import probe_tokens

# Tokens before the timed forward: as good as none, so that the time is that of the weights. Longer contexts add the
# same to every head.
CONTEXT_TOKENS = 64

# Timed forwards of each model. The median of 21 is that of at least 11 undisturbed ones unless half of them were hit.
REPETITIONS = 21


def measure_heads(
    models: Sequence[Model],
    *,
    context_tokens: int = CONTEXT_TOKENS,
    repetitions: int = REPETITIONS,
    clock: Clock = time.perf_counter,
) -> Generator[float, None, tuple[float, ...]]:
    """Median seconds of a forward of width 1 of each of ``models``, in steps; yields the fraction done.

    They take turns, so that a busy machine slows all of them alike. All are fed the same tokens, of the smallest
    vocabulary. Picking the best token is part of the time, as it is in drafting. Raises what a forward raises.
    """
    tokens = probe_tokens(context_tokens + 1, min(model.facts.vocabulary_size for model in models))
    samples: list[list[float]] = [[] for _ in models]
    with ExitStack() as stack:
        sequences = [stack.enter_context(closing(model.open(context_tokens + 1))) for model in models]
        for sequence in sequences:
            if context_tokens:
                sequence.forward(tokens[:context_tokens], 0)
            yield 0.0
        # Once around without counting: kernels and pages warm up.
        for turn in range(repetitions + 1):
            for sequence, kept in zip(sequences, samples, strict=True):
                sequence.rewind(context_tokens)
                before = clock()
                sequence.forward(tokens[context_tokens:], 1).argmax()
                if turn:
                    kept.append(clock() - before)
            yield turn / repetitions
    return tuple(statistics.median(kept) for kept in samples)
