"""A drafter's proposal is untrusted: what is malformed is cut off and counted before anything uses it."""

from __future__ import annotations

import numpy as np

from edgespec.decoding.contracts import Distribution, Proposal

# How far the probabilities of a proposal may be from summing to one: DESIGN.md's contract, loose enough for
# float32 drafters over large vocabularies.
SUM_TOLERANCE = 1e-4


def valid_length(proposal: Proposal, vocabulary_size: int, *, needs_probs: bool) -> int:
    """Number of leading tokens that are well-formed.

    A token must be an id of the target's vocabulary, its distribution (where given) must be finite, within
    (0, 1], sum to one, lie inside the vocabulary and contain the token. Without ``needs_probs`` distributions are
    not looked at.
    """
    if proposal.parents is not None:
        return 0  # the serial loop verifies chains: a tree read as one would be nonsense
    draft_probs = proposal.draft_probs
    if needs_probs and draft_probs is not None and len(draft_probs) != len(proposal.tokens):
        return 0
    for index, token in enumerate(proposal.tokens):
        is_id = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not is_id or not 0 <= token < vocabulary_size:
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
