"""Which forward widths were measured as bit-equal to plain decoding: the record, and its JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgespec.interfaces.model import ModelFacts

# Attention kernels split the cache into blocks and pad it to multiples of 256; bit-equality broke at 512. Each probe
# starts a few tokens before a border and crosses it.
BORDERS = (256, 512, 1024)


POSITIONS = 12


_FIRST_START = 96


# Every row of every width is compared, so no width exceeds a probe's length. No published measurement on a consumer
# CPU gained from drafts deeper than these 11 tokens.
WIDEST = POSITIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextProbe:
    """Differences between width 1 and each other width at one context. ``max_abs_diff`` in logits, by width."""

    start: int
    positions: int
    max_abs_diff: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthProbe:
    """``widths`` are bit-equal to width 1 at every context probed; ``max_abs_diff`` covers the other widths.

    ``complete`` says whether every unequal width was measured to the end, which a bound for near exactness needs.
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


def widths_to_json(probe: WidthProbe) -> dict[str, Any]:
    """A probe as JSON."""
    return {
        "widths": list(probe.widths),
        "complete": probe.complete,
        "plain_forward_s": probe.plain_forward_s,
        "contexts": [
            {
                "start": context.start,
                "positions": context.positions,
                # JSON has no infinity: null means a difference without a bound.
                "max_abs_diff": {
                    str(width): diff if math.isfinite(diff) else None for width, diff in context.max_abs_diff.items()
                },
            }
            for context in probe.contexts
        ],
    }


def widths_from_json(stored: Mapping[str, Any]) -> WidthProbe:
    """Read a probe from JSON. Raises ValueError, KeyError, TypeError or AttributeError if it is malformed."""
    widths = tuple(int(width) for width in stored["widths"])
    if widths[:1] != (1,) or any(left >= right for left, right in itertools.pairwise(widths)):
        raise ValueError("the widths of a class start with 1 and ascend")
    contexts = tuple(
        ContextProbe(
            start=int(context["start"]),
            positions=int(context["positions"]),
            max_abs_diff={int(width): _difference_from_json(diff) for width, diff in context["max_abs_diff"].items()},
        )
        for context in stored["contexts"]
    )
    if len(widths) > 1 and any(width in context.max_abs_diff for context in contexts for width in widths):
        raise ValueError("a width that is bit-equal has no difference")
    seconds = stored["plain_forward_s"]
    if seconds is not None and not 0 < float(seconds) < math.inf:
        raise ValueError("the seconds of a forward are positive and finite")
    return WidthProbe(
        widths=widths,
        complete=bool(stored["complete"]),
        contexts=contexts,
        plain_forward_s=None if seconds is None else float(seconds),
    )


def _difference_from_json(stored: float | None) -> float:
    difference = math.inf if stored is None else float(stored)
    if not difference > 0:
        raise ValueError("a difference is positive")
    return difference
