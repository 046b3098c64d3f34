"""Which tokens a drafter's output head keeps: counts of what the target writes in, token ids out.

Every token a drafter proposes costs it a read of its whole output head, and text uses few of the head's rows. A head
with only the frequent rows is read faster; what it lacks is never proposed and left to the target, so the text stays
the same. VocabTrim (Goel et al., 2025) counts the tokens of the target's own answers, FR-Spec (Zhao et al., 2025)
those of a corpus; both are counts to the functions here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.errors import InvalidRequestError
from edgespec.files.gguf.token_rows import kept_ids

# The sizes FR-Spec compared (8k to 64k rows), half the least of them, for a drafter of one narrow task, and steps
# between the larger ones, where a third more rows is a tenth more bytes of a 0.5B drafter. All are multiples of 64:
# kernels which interleave 4, 8 or 16 rows take the trimmed head as they took the whole one.
CANDIDATE_SIZES = (4096, 8192, 16384, 24576, 32768, 40960, 49152, 65536)

# VocabTrim reports accepted blocks shorter by 1 to 5 % at the sizes it recommends. A head that loses more pays only
# as long as the text stays what it was counted on.
ACCEPTANCE_LOSS_ALLOWED = 0.05

# A token that the head lacks costs acceptance only where the whole head would have said it. Less than this share is
# not believed, however few a text seems to show: 61 to 72 % were seen with Qwen2.5-Coder 0.5B drafting for the 1.5B,
# 99 % with a model that drafts for itself.
LEAST_RIGHT_OF_LOST = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCost:
    """Seconds of a drafter's forward of width 1: ``rest_s`` without its head, and ``row_s`` for each row of it."""

    rest_s: float
    row_s: float

    def forward_s(self, rows: int) -> float:
        """Seconds of a forward with a head of ``rows``."""
        return self.rest_s + rows * self.row_s

    @staticmethod
    def through(trimmed: tuple[int, float], whole: tuple[int, float]) -> HeadCost:
        """The line through two measurements, each (rows of the head, seconds of a forward).

        Where the smaller head was not the faster one, rows cost nothing; where the rest would have to take less than
        nothing, all of the time goes into rows. Raises InvalidRequestError if these are no two such measurements.
        """
        (fewer, fewer_s), (more, more_s) = trimmed, whole
        if not 0 < fewer < more:
            raise InvalidRequestError(f"a line needs heads of two sizes, the smaller first, not {fewer} and {more}")
        if not (0 < fewer_s < math.inf and 0 < more_s < math.inf):
            raise InvalidRequestError("a forward takes a positive number of seconds")
        row_s = max(0.0, (more_s - fewer_s) / (more - fewer))
        row_s = min(row_s, more_s / more)
        return HeadCost(rest_s=max(0.0, more_s - more * row_s), row_s=row_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCandidate:
    """One size of the head. ``coverage`` is a share of the held-out tokens, ``forward_s`` the time of a draft token.

    ``relative_speed`` is the predicted rate of usable draft tokens, 1.0 being the whole vocabulary's.
    """

    size: int
    coverage: float
    forward_s: float
    relative_speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeDecision:
    """The size chosen and why. ``candidates`` are those compared, smallest first, the whole vocabulary last."""

    chosen: SizeCandidate
    candidates: tuple[SizeCandidate, ...]
    vocabulary_size: int
    reasons: tuple[str, ...]

    @property
    def size(self) -> int:
        """Rows the head keeps."""
        return self.chosen.size

    @property
    def trims(self) -> bool:
        """Whether anything is left out at all."""
        return self.chosen.size < self.vocabulary_size


def coverage(counts: Mapping[int, int], kept: npt.ArrayLike) -> float:
    """The share, 0 to 1, of the counted tokens that a head with the rows ``kept`` can say.

    Meant for counts of text held out from those that chose ``kept``. Raises InvalidRequestError if there are none.
    """
    total = sum(counts.values())
    if total <= 0 or min(counts.values()) < 0:
        raise InvalidRequestError(
            "coverage needs counts of held-out text, and they are empty or negative", hint="count more text"
        )
    said = set(np.asarray(kept).tolist())
    return sum(count for token, count in counts.items() if token in said) / total


def lost_allowed(right_of_lost: float | None) -> float:
    """The share of the held-out tokens that a head may lack: as many as cost the acceptance that may be lost.

    ``right_of_lost`` is the share (0 to 1) of such tokens that the whole head says; None, not known, counts as all.
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
    """The size of the head at which usable draft tokens are predicted to come fastest.

    A draft token takes one forward, whose time grows with the head as ``cost`` says. Of these tokens, only the share
    of the ``held_out`` text (token counts, like ``counts``) that the head can say is accepted at best, and of the
    others only ``right_of_lost`` would have been with the whole head; what is left, divided by the time, decides.
    Sizes that lose more than ``lost_allowed`` (0 to 1) of the held-out tokens do not compete, the whole vocabulary
    always does. Equally fast: the larger one.

    Raises InvalidRequestError on empty held-out text, sizes below 1, or times that are none.
    """
    if not (0 <= cost.rest_s < math.inf and 0 <= cost.row_s < math.inf and cost.forward_s(1) > 0):
        raise InvalidRequestError("a drafter's forward must take some time, and its head no less than none")
    if not 0 <= lost_allowed <= 1:
        raise InvalidRequestError(f"the loss allowed is a share from 0 to 1, not {lost_allowed}")
    if min(sizes, default=1) < 1:
        raise InvalidRequestError(f"a head keeps at least 1 row, not {min(sizes)}")
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
    # Compared as coverages: 1 - 0.95 is a little more than 0.05.
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
            f"takes {chosen.forward_s / whole.forward_s:.0%} of the time: usable draft tokens come "
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
