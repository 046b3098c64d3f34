"""Which forward widths were measured as bit-equal to plain decoding: the record."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from edgespec.files.checked import From, Range
from edgespec.interfaces.model import ModelFacts

# Attention kernels split the cache into blocks and pad it to multiples of 256; bit-equality broke at 512. Each probe
# starts a few tokens before a border and crosses it.
BORDERS = (256, 512, 1024)


POSITIONS = 12

# Tokens of context that a measurement reads or fills at most: reading more takes the 1.5B minutes on two slow cores.
# Beyond, the times are a line over the context, as those of attention are.
MOST_CONTEXT = 8192


_FIRST_START = 96


# Every row of every width is compared, so no width exceeds a probe's length. No published measurement on a consumer
# CPU gained from drafts deeper than these 11 tokens.
WIDEST = POSITIONS


def _differences(stored: Mapping[str, float | None]) -> dict[int, float]:
    """JSON has no infinity: null means a difference without a bound."""
    return {int(width): math.inf if each is None else each for width, each in stored.items()}


_Positive: TypeAlias = Annotated[float, Range(0, above=True)]
_Differences: TypeAlias = Annotated[dict[int, float], From(dict[str, _Positive | None], _differences)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextProbe:
    """Differences between width 1 and each other width at one context. ``max_abs_diff`` in logits, by width."""

    start: int
    positions: int
    max_abs_diff: _Differences


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthProbe:
    """``widths`` are bit-equal to width 1 at every context probed; ``max_abs_diff`` covers the other widths.

    ``complete`` says whether every unequal width was measured to the end, which a bound for near exactness needs.
    ``plain_forward_s`` is the time of a forward of width 1 at the first context: the median, or in a self-check that
    of one forward; None if other programs disturbed that.
    """

    widths: tuple[int, ...]
    complete: bool = False
    plain_forward_s: _Positive | None = None
    contexts: tuple[ContextProbe, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether the widths start with 1 and ascend, and no width that is bit-equal has a difference."""
        ascend = self.widths[:1] == (1,) and all(left < right for left, right in itertools.pairwise(self.widths))
        differ = {width for context in self.contexts for width in context.max_abs_diff}
        return ascend and (len(self.widths) == 1 or differ.isdisjoint(self.widths))

    @property
    def max_abs_diff(self) -> float:
        return max((diff for c in self.contexts for diff in c.max_abs_diff.values()), default=0.0)

    @property
    def depth_cap(self) -> int:
        """The deepest draft whose width, and every smaller width, is bit-equal."""
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
        """Whether this probe reaches as far as a probe for a context of that length does."""
        return self.context_range[1] >= probe_starts(context_length)[-1] + POSITIONS


def probe_starts(context_length: int, *, to_end: bool = False) -> list[int]:
    """Where probes begin in a context of that length.

    With ``to_end`` also at every further power of two, and where the context ends.
    """
    borders = list(BORDERS)
    while to_end and 2 * borders[-1] < context_length:
        borders.append(2 * borders[-1])
    starts = [_FIRST_START, *(border - POSITIONS // 2 for border in borders)]
    within = [start for start in starts if start + POSITIONS <= context_length] or [0]
    last = context_length - POSITIONS
    return [*within, last] if to_end and last > within[-1] else within


def exact_length(probe: WidthProbe | None, target: ModelFacts) -> int | None:
    """The longest context that the probe covers for this target; None if length does not matter.

    The split of a sum may depend on its length, unless rows are bit-equal by construction, so a comparison at shorter
    contexts says nothing about longer ones.
    """
    if probe is None or not probe.contexts or target.bit_equal_by_construction:
        return None
    return probe.context_range[1]


def holds_for(probe: WidthProbe, target: ModelFacts, context_length: int) -> bool:
    """Whether the probe covers contexts of that length."""
    return target.bit_equal_by_construction or probe.covers(context_length)


def width_classes(
    model: str, runtime: str, settings: Mapping[str, Any], probe: WidthProbe | None
) -> list[dict[str, Any]]:
    """A probe as ``width_classes`` of the JSON: the class of width 1 first, every other width by itself."""
    if probe is None:
        return []
    others = sorted({width for context in probe.contexts for width in context.max_abs_diff if width > 0})
    return [
        {
            "model": model,
            "runtime": runtime,
            "settings": dict(settings),
            "context": list(probe.context_range),
            "widths": [list(probe.widths), *([width] for width in others)],
            # A width that differs is measured to the end only if a bound is needed.
            "max_abs_diff": probe.max_abs_diff if probe.complete or not probe.max_abs_diff else None,
        }
    ]
