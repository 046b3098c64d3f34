"""Whether a head that lacks most of the vocabulary can say what is being written.

A head with the frequent tokens only (VocabTrim, Goel et al., 2025; FR-Spec, Zhao et al., 2025) cannot say the rest.
That costs a few percent of the drafts on text like the one it was counted on, and most of them on other text: another
language, another alphabet. How much it costs can be seen in the text itself, without asking anybody: it is the share
of recent tokens that the head could have said.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.decoding.contracts import Context

__all__ = ["ESCAPE_MISSED", "RETURN_MISSED", "WINDOW_TOKENS", "HeadWatch"]

# Tokens looked back on: some five lines of text. Eleven tokens of a text that the head lacks altogether are enough to
# be noticed, and chance moves the share by 3.2 % only (one deviation at a coverage of 93 %).
WINDOW_TOKENS = 64

# Sizes of a head may lose 6.9 % of the tokens they are judged by, where the whole head says 72 % of those (as with
# the default pair: vocabtrim.lost_allowed). The margin is three deviations of chance at that loss, 9.5 %:
# 3 * sqrt(0.069 * 0.931 / 64). So the head is left where it says less than 1 - 0.069 - 0.095 = 83.6 % of the window:
# 11 missing tokens or more. Text that this head was made for gets there by chance once in 230 windows (binomial),
# text of 98 % coverage never (once in 17 million).
ESCAPE_MISSED = 11

# And back where at most 6.9 % are missing: the loss that was allowed from the start. Between the two nothing changes,
# so that a text at the border does not make both drafters read it in turns.
RETURN_MISSED = 4


class HeadWatch:
    """Looks at the text for a head that says the tokens ``kept``. ``escaped``: it lacks too many of the latest."""

    def __init__(self, kept: Iterable[int]) -> None:
        self._kept = frozenset(kept)
        self.escaped = False

    def look(self, context: Context) -> bool:
        """Decide by the last committed tokens; assumed ones may be wrong, and fewer than a window say too little."""
        end = context.committed_length
        if end >= WINDOW_TOKENS:
            missed = sum(token not in self._kept for token in context.tokens[end - WINDOW_TOKENS : end])
            if missed >= ESCAPE_MISSED:
                self.escaped = True
            elif missed <= RETURN_MISSED:
                self.escaped = False
        return self.escaped
