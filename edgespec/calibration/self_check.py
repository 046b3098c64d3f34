"""Checks bit-equality by construction for the model in this file, with these kernels, at mixed widths."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from edgespec.calibration.width_probe import probe_tokens
from edgespec.hardware.neighbours import Neighbours
from edgespec.interfaces.model import Model, Sequence
from edgespec.planning.cost.widths import POSITIONS, WIDEST, ContextProbe, WidthProbe

# The same 12 tokens in forwards of these widths, each pass from an empty cache: 9 forwards, 12 to 13 times T(1) with
# AVX-512 (0.5 s for a 1.5B model of 38 ms). Every width up to 8, a kernel's largest input, is compared with width 1
# through the rows that both share with the widest. The last forward has width 1 and warm weights: it gives a first
# T(1), if no other program took processor time.
PASSES = ((WIDEST,), (8, 4), (7, 5), (6, 3, 2, 1))


def self_check(
    sequence: Sequence,
    vocabulary_size: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    neighbours: Neighbours | None = None,
) -> Generator[float, None, WidthProbe]:
    """Compare rows bit by bit, in steps of a forward; yields the fraction done. Raises what a forward raises.

    The probe has every width, or only width 1 if any bit differs. Its T(1) is that of one forward, in seconds; None
    if other programs kept the processor busy (``neighbours`` tells).
    """
    tokens, neighbours = probe_tokens(POSITIONS, vocabulary_size), neighbours or Neighbours()
    first: list[bytes] = []
    largest, plain_s, done = 0.0, 0.0, 0
    for widths in PASSES:
        sequence.rewind(0)
        start = 0
        for width in widths:
            with neighbours:
                before = clock()
                rows = sequence.forward(tokens[start : start + width], width)
                plain_s = clock() - before
            for position in range(width):
                found = rows.logits(position).tobytes()
                if widths is PASSES[0]:
                    first.append(found)
                elif found != first[start + position]:
                    largest = float("inf")
            start, done = start + width, done + 1
            yield done / sum(map(len, PASSES))
    equal = largest == 0.0
    return WidthProbe(
        widths=tuple(range(1, WIDEST + 1)) if equal else (1,),
        contexts=(ContextProbe(start=0, positions=POSITIONS, max_abs_diff={} if equal else {0: largest}),),
        complete=equal,
        plain_forward_s=None if neighbours.busy else plain_s,
    )


class SelfCheck:
    """A ``self_check`` on a separate Sequence's thread, in parallel with the caller."""

    def __init__(self, model: Model) -> None:
        self._sequence = model.open(POSITIONS)
        self._vocabulary_size = model.facts.vocabulary_size
        self._found = self._sequence.submit(self._run)

    def _run(self) -> WidthProbe:
        steps = self_check(self._sequence, self._vocabulary_size)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                probe: WidthProbe = end.value
                return probe

    def result(self) -> WidthProbe:
        """Wait for the result. Raises what a forward raises."""
        try:
            return self._found.result()
        finally:
            self._sequence.close()
