"""Times output heads, with models that differ only in their heads, and measures what their rows are worth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing

from edgespec.calibration.timing import Clock, time_plain
from edgespec.interfaces.model import Model

# Tokens before the timed forward: few, so that the time is that of the weights. Longer contexts add the same to every
# head.
CONTEXT_TOKENS = 64

# Timed forwards of each model. The median of 21 is undisturbed unless half of them were hit.
REPETITIONS = 21

ROWS_AT_ONCE = 64  # rows of scores: the most that a Sequence gives

# Fewer lost tokens are not significant: with 30, a share is known to within 9 points (one deviation).
ENOUGH_LOST = 30


def measure_heads(
    models: Sequence[Model],
    *,
    context_tokens: int = CONTEXT_TOKENS,
    repetitions: int = REPETITIONS,
    clock: Clock = time.perf_counter,
) -> Generator[float, None, tuple[float, ...]]:
    """Median seconds of a width-1 forward of each of ``models``, measured as in ``time_plain``, in steps."""
    samples = yield from time_plain(models, context_tokens, repetitions, clock)
    return tuple(statistics.median(kept) for kept in samples)


def right_of_lost(
    model: Model, texts: Sequence[tuple[Sequence[int], Sequence[int]]], kept: Iterable[int]
) -> Generator[float, None, float | None]:
    """Share of the tokens outside ``kept`` that ``model`` ranks first, in steps; yields the fraction done.

    ``texts`` are (tokens before the text, the text); every token is predicted from all tokens before it. None if too
    few tokens are outside ``kept``. Raises what opening a sequence and a forward raise.
    """
    held, lost, right = frozenset(kept), 0, 0
    pairs = [(list(before), list(text)) if before else (list(text[:1]), list(text[1:])) for before, text in texts]
    longest = max((len(before) + len(text) for before, text in pairs), default=0)
    room = min(longest, model.facts.trained_context_length)
    if not room:
        return None
    with closing(model.open(room)) as sequence:
        for number, (before, text) in enumerate(pairs):
            yield number / len(pairs)
            text = text[: max(0, room - len(before))]
            if not text:
                continue
            sequence.rewind(0)
            if len(before) > 1:
                sequence.forward(before[:-1], 0)
            fed = [before[-1], *text[:-1]]
            for start in range(0, len(fed), ROWS_AT_ONCE):
                some = fed[start : start + ROWS_AT_ONCE]
                said = sequence.forward(some, len(some)).argmax().tolist()
                for own, token in zip(said, text[start : start + ROWS_AT_ONCE], strict=True):
                    lost += token not in held
                    right += token not in held and own == token
    return right / lost if lost >= ENOUGH_LOST else None
