"""A drafter's proposal is untrusted: what is malformed is cut off and counted before anything uses it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgespec.interfaces.drafting import Proposal
from edgespec.interfaces.rows import Distribution

# How far the probabilities of a proposal may be from summing to one: DESIGN.md's contract, loose enough for
# float32 drafters over large vocabularies.
SUM_TOLERANCE = 1e-4


def valid_length(proposal: Proposal, vocabulary_size: int, *, needs_probs: bool, trees: bool = False) -> int:
    """Number of leading tokens that are well-formed.

    A token must be an id of the target's vocabulary, its distribution (where given) must be finite, within
    (0, 1], sum to one, lie inside the vocabulary and contain the token. Without ``needs_probs`` distributions are
    not looked at, nor are those of a tree. A tree is well-formed only where ``trees`` can be verified, and its tokens
    follow earlier ones.
    """
    draft_probs, parents = proposal.draft_probs, proposal.parents
    if parents is not None:
        if not trees or len(parents) != len(proposal.tokens):
            return 0  # a tree read as a chain would be nonsense
        needs_probs = False
    if needs_probs and draft_probs is not None and len(draft_probs) != len(proposal.tokens):
        return 0
    for index, token in enumerate(proposal.tokens):
        is_id = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not is_id or not 0 <= token < vocabulary_size:
            return index
        if parents is not None and not (type(parents[index]) is int and -1 <= parents[index] < index):
            return index
        if needs_probs and draft_probs is not None:
            own = draft_probs[index]
            if own is not None and not _well_formed(own, int(token), vocabulary_size):
                return index
    return len(proposal.tokens)


def _well_formed(distribution: Distribution, token: int, vocabulary_size: int) -> bool:
    ids, probs = distribution.ids, distribution.probs
    if ids.dtype.kind != "i" or ids.ndim != 1 or ids.shape != probs.shape or not len(ids):
        return False
    if ids[0] < 0 or ids[-1] >= vocabulary_size or not (np.diff(ids) > 0).all():
        return False
    # Written so that a NaN fails each comparison. Nothing above one may pass: acceptance refuses such a token each
    # time while the residual takes its mass away, so it would never be emitted.
    if not ((probs > 0) & (probs <= 1)).all() or not abs(float(probs.sum()) - 1) <= SUM_TOLERANCE:
        return False
    place = int(np.searchsorted(ids, token))
    return place < len(ids) and int(ids[place]) == token


def runner_up(proposal: Proposal, place: int, vocabulary_size: int) -> int | None:
    """The runner-up at ``place``, if there is one that is an id of the vocabulary and not the token itself."""
    other = proposal.runners_up[place] if place < len(proposal.runners_up) else None
    is_id = isinstance(other, int | np.integer) and not isinstance(other, bool)
    if not is_id or not 0 <= other < vocabulary_size or other == proposal.tokens[place]:  # type: ignore[operator]
        return None
    return int(other)  # type: ignore[arg-type]


def first_chain(proposal: Proposal) -> Proposal:
    """The leading tokens of a tree of which each follows the one before, as a chain."""
    parents = proposal.parents
    if parents is None:
        return proposal
    length = next((index for index, parent in enumerate(parents) if parent != index - 1), len(parents))
    return replace(proposal.cut(length), parents=None)


def height(proposal: Proposal) -> int:
    """Tokens on the longest path of a tree; all of a chain's."""
    if proposal.parents is None:
        return len(proposal.tokens)
    heights: list[int] = []
    for parent in proposal.parents:
        heights.append(1 if parent < 0 else heights[parent] + 1)
    return max(heights, default=0)
