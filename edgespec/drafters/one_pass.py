"""A drafter that drafts all tokens in one forward (PARD: An et al., 2025).

Its weights are those of an ordinary model that was trained to guess several tokens ahead. The text is followed by one
mask token for each token after the first: the text's last row guesses the next token, the row of mask i the token
after it by i positions. No row depends on a drafted token, so under the rejection rule each row's distribution is
fixed before any token is drawn from it.
"""

from __future__ import annotations

import functools

import numpy as np

from edgespec.errors import RewindError
from edgespec.interfaces.drawing import Drawn, DrawRequest, draw_from
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.rows import IdArray, LogitsArray, Rows

# Tokens of one forward. A forward scores at most 64 rows, some of them for the hindsight guesses (planning/depth);
# results are published for up to 15 tokens (PARD-2: An et al., 2026).
MOST_TOKENS = 32


def mask_of(facts: ModelFacts) -> int | None:
    """The mask token of a one-pass drafter; None for a model that drafts token by token.

    Raises RewindError if the model cannot draft: the masks have to be dropped from its cache after each forward.
    """
    if facts.mask_id is not None and not facts.can_rewind:
        raise RewindError(
            f"{facts.name} drafts all tokens in one forward, and its cache cannot drop the mask tokens again"
        )
    return facts.mask_id


class RowsWithout(Rows):
    """The same rows, in which ``token`` scores -infinity: it is never drafted, and has no probability."""

    def __init__(self, rows: Rows, token: int) -> None:
        # Not a method: rows that refer to themselves would outlive their last use.
        super().__init__(rows.count, functools.partial(_read_without, rows, token))
        self._rows = rows
        self._token = token

    def argmax_row(self, index: int) -> int:
        best = self._rows.argmax_row(index)
        return super().argmax_row(index) if best == self._token else best

    def scored(self, index: int) -> tuple[IdArray | None, LogitsArray]:
        ids, scores = self._rows.scored(index)
        return ids, _without(scores, self._token, ids)

    def draw(self, index: int, request: DrawRequest, ids: IdArray | None = None) -> Drawn:
        """The runtime's own draw if it leaves the token out; its odds may then count the token's share.

        Such odds are confidences of the keyed rule, under which any proposal is allowed.
        """
        drawn = self._rows.draw(index, request, ids)
        if self._token not in drawn.tokens:
            return drawn
        known, scores = self.scored(index)
        return draw_from(scores, request, known)

    def first(self, size: int) -> Rows:
        return RowsWithout(self._rows.first(size), self._token)


def _read_without(rows: Rows, token: int, index: int) -> LogitsArray:
    return _without(rows.logits(index), token, None)


def _without(scores: LogitsArray, token: int, ids: IdArray | None) -> LogitsArray:
    """``scores``, the caller's own, of the tokens ``ids`` (None: 0, 1, 2, ...)."""
    columns = slice(token, token + 1) if ids is None else ids == token  # an empty slice beyond a shorter vocabulary
    scores[columns] = -np.inf
    return scores
