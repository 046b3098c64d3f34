"""Chooses the size of a drafter's trimmed output head from token counts.

For every proposed token a drafter reads its whole output head, but text uses few of the head's rows. A head with only
the frequent rows is read faster. A missing token is never proposed; the target emits it instead, so the text stays
the same. VocabTrim (Goel et al., 2025) counts the tokens of the target's answers, FR-Spec (Zhao et al., 2025) the
tokens of a corpus; these functions accept counts from either source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.errors import InvalidRequestError
from edgespec.files.gguf.token_rows import kept_ids

# FR-Spec's sizes (8k to 64k rows), half the smallest size for a drafter of one narrow task, and steps between the
# larger sizes, where a third more rows is a tenth more bytes of a 0.5B drafter. All are multiples of 64, so kernels
# that interleave 4, 8 or 16 rows work with a trimmed head.
CANDIDATE_SIZES = (4096, 8192, 16384, 24576, 32768, 40960, 49152, 65536)

# VocabTrim reports 1 to 5 % shorter accepted blocks at its recommended sizes. A head that loses more is faster only
# for text similar to the counted text.
ACCEPTANCE_LOSS_ALLOWED = 0.05

# A missing token lowers acceptance only if the whole head would have proposed it. A smaller measured share is raised
# to this minimum: 61 to 72 % were measured with Qwen2.5-Coder 0.5B drafting for the 1.5B, 99 % with a model drafting
# for itself.
LEAST_RIGHT_OF_LOST = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCost:
    """Seconds of a drafter's forward of width 1: ``rest_s`` without the head, and ``row_s`` per row of the head."""

    rest_s: float
    row_s: float

    def forward_s(self, rows: int) -> float:
        """The seconds of a forward with a head of ``rows``."""
        return self.rest_s + rows * self.row_s

    @staticmethod
    def through(trimmed: tuple[int, float], whole: tuple[int, float]) -> HeadCost:
        """The line through two measurements, each (rows of the head, seconds of a forward).

        If the smaller head was not faster, ``row_s`` is 0; if ``rest_s`` would be negative, it is 0 and rows take all
        the time. Raises InvalidRequestError unless the sizes differ and the times are positive.
        """
        (fewer, fewer_s), (more, more_s) = trimmed, whole
        if not 0 < fewer < more:
            raise InvalidRequestError(f"two sizes of heads are needed, the smaller first, not {fewer} and {more}")
        if not (0 < fewer_s < math.inf and 0 < more_s < math.inf):
            raise InvalidRequestError("the seconds of a forward must be positive")
        row_s = max(0.0, (more_s - fewer_s) / (more - fewer))
        row_s = min(row_s, more_s / more)
        return HeadCost(rest_s=max(0.0, more_s - more * row_s), row_s=row_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCandidate:
    """One size of the head. ``coverage`` is a share of the held-out tokens, ``forward_s`` the time of a draft token.

    ``relative_speed`` is the predicted rate of usable draft tokens, relative to the whole vocabulary (1.0).
    """

    size: int
    coverage: float
    forward_s: float
    relative_speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeDecision:
    """The chosen size with reasons. ``candidates``: all compared sizes, ascending, the whole vocabulary last."""

    chosen: SizeCandidate
    candidates: tuple[SizeCandidate, ...]
    vocabulary_size: int
    reasons: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of rows that the head keeps."""
        return self.chosen.size

    @property
    def trims(self) -> bool:
        """Whether the chosen size is smaller than the whole vocabulary."""
        return self.chosen.size < self.vocabulary_size


def coverage(counts: Mapping[int, int], kept: npt.ArrayLike) -> float:
    """The share, 0 to 1, of the counted tokens that are in the rows ``kept``.

    ``counts`` should come from text that was not used to choose ``kept``. Raises InvalidRequestError if empty.
    """
    total = sum(counts.values())
    if total <= 0 or min(counts.values()) < 0:
        raise InvalidRequestError("the counts of held-out text are empty or negative", hint="count more text")
    said = set(np.asarray(kept).tolist())
    return sum(count for token, count in counts.items() if token in said) / total


def lost_allowed(right_of_lost: float | None) -> float:
    """The share of the held-out tokens that a head may lack within ACCEPTANCE_LOSS_ALLOWED.

    ``right_of_lost`` is the share (0 to 1) of missing tokens that the whole head would propose; None counts as 1.
    """
    return ACCEPTANCE_LOSS_ALLOWED / (1.0 if right_of_lost is None else max(right_of_lost, LEAST_RIGHT_OF_LOST))


def choose_size(
    counts: Mapping[int, int],
    held_out: Mapping[int, int],
    always: npt.ArrayLike,
    sizes: Sequence[int] = CANDIDATE_SIZES,
    *,
    vocabulary_size: int,
    cost: HeadCost,
    lost_allowed: float = ACCEPTANCE_LOSS_ALLOWED,
    right_of_lost: float = 1.0,
) -> SizeDecision:
    """Choose the size of the head with the highest predicted rate of usable draft tokens.

    A draft token takes one forward, whose time is ``cost`` for the size. Usable is the share of ``held_out`` (token
    counts, like ``counts``) that the head covers, plus the missing tokens that the whole head would not propose
    either (1 - ``right_of_lost`` of them). The rate is that share divided by the time. A size that lacks more than
    ``lost_allowed`` (0 to 1) of the held-out tokens is excluded; the whole vocabulary is always a candidate. If two
    sizes are equally fast, the larger is chosen.

    Raises InvalidRequestError on empty held-out text, sizes below 1, or invalid times.
    """
    if not (0 <= cost.rest_s < math.inf and 0 <= cost.row_s < math.inf and cost.forward_s(1) > 0):
        raise InvalidRequestError("a drafter's forward must take a positive time, and its head no negative time")
    if not 0 <= lost_allowed <= 1:
        raise InvalidRequestError(f"the allowed loss must be a share from 0 to 1, not {lost_allowed}")
    if min(sizes, default=1) < 1:
        raise InvalidRequestError(f"a head must keep at least 1 row, not {min(sizes)}")
    least = max(1, np.unique(np.asarray(always, dtype=np.int64)).size)
    smaller = sorted({size for size in sizes if least <= size < vocabulary_size})
    whole_s = cost.forward_s(vocabulary_size)
    whole_coverage = coverage(held_out, np.arange(vocabulary_size))

    def candidate(size: int) -> SizeCandidate:
        kept = kept_ids(counts, size, always, vocabulary_size=vocabulary_size)
        share, forward_s = coverage(held_out, kept), cost.forward_s(size)
        left = 1 - (whole_coverage - share) * right_of_lost
        speed = left * whole_s / forward_s if whole_coverage else 0.0
        return SizeCandidate(size=size, coverage=share, forward_s=forward_s, relative_speed=speed)

    candidates = tuple(candidate(size) for size in (*smaller, vocabulary_size))
    whole = candidates[-1]
    # Compare coverages, not losses: in floating point 1 - 0.95 is a little more than 0.05.
    within = [each for each in candidates if each.coverage >= 1 - lost_allowed]
    chosen = max(within or [whole], key=lambda each: (each.relative_speed, each.size))
    return SizeDecision(
        chosen=chosen,
        candidates=candidates,
        vocabulary_size=vocabulary_size,
        reasons=_reasons(chosen, candidates, sizes, least, lost_allowed),
    )


def _reasons(
    chosen: SizeCandidate, candidates: Sequence[SizeCandidate], sizes: Sequence[int], least: int, loss_allowed: float
) -> tuple[str, ...]:
    whole = candidates[-1]
    if chosen is whole:
        said = [f"all {whole.size} rows are kept"]
    else:
        said = [
            f"{chosen.size} of {whole.size} rows hold {chosen.coverage:.1%} of the held-out tokens, and a forward "
            f"in llama.cpp takes {chosen.forward_s / whole.forward_s:.0%} of the time: usable draft tokens come "
            f"{chosen.relative_speed:.2f} times as fast"
        ]
    for each in candidates:
        if each is chosen:
            continue
        if each is not whole and each.coverage < 1 - loss_allowed:
            said.append(
                f"{each.size} rows lose {1 - each.coverage:.1%} of the held-out tokens; {loss_allowed:.1%} is allowed"
            )
        elif each is not whole:
            said.append(f"{each.size} rows are predicted at {each.relative_speed:.2f} times the whole head's speed")
    said += [
        f"{size} rows cannot hold the {least} tokens that are always kept"
        for size in sorted(set(sizes))
        if size < least
    ]
    return tuple(said)
