"""Whether a head that lacks most of the vocabulary can say what is being written.

A head with the frequent tokens only (VocabTrim, Goel et al., 2025; FR-Spec, Zhao et al., 2025) cannot say the rest.
That costs a few percent of the drafts on text like the one it was counted on, and most of them on other text: another
language, another alphabet. How much it costs can be seen in the text itself, without asking anybody: it is the share
of recent tokens that the head could have said.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from edgespec.interfaces.drafting import Context

# Tokens looked back on: some five lines of text. Eleven tokens of a text that the head lacks altogether are enough to
# be noticed, and chance moves the share by 3.2 % only (one deviation at a coverage of 93 %).
WINDOW_TOKENS = 64

# For a trimmed drafter with a whole one beside it. Sizes of a head may lose 6.9 % of the tokens they are judged by,
# where the whole head says 72 % of those (as with the default pair: vocabtrim.lost_allowed). The margin is three
# deviations of chance at that loss, 9.5 %: 3 * sqrt(0.069 * 0.931 / 64). So the head is left where it says less than
# 1 - 0.069 - 0.095 = 83.6 % of the window: 11 missing tokens or more. Text that this head was made for gets there by
# chance once in 230 windows (binomial), text of 98 % coverage never (once in 17 million).
ESCAPE_MISSED = 11

# And back where at most 6.9 % are missing: the loss that was allowed from the start. Between the two nothing changes,
# so that a text at the border does not make both drafters read it in turns.
RETURN_MISSED = 4

# For a head that can be whole again at once, without reading anything: it saves 6 % of a round of the default pair,
# and loses 0.7 % of its tokens for each 1 % that it lacks (docs/results/native.md). The two are equal at 8.5 %, five
# or six tokens of the window; the borders lie around that.
SHORT_ESCAPE_MISSED = 8
SHORT_RETURN_MISSED = 3

# Rare tokens of the text that are kept in mind, the latest. 92 prompts and what the default target answered to them,
# 53 to some 800 tokens, held 0 to 43 that the short head of its drafter lacks; this many are a hundredth of that
# head.
MOST_MORE = 512


class HeadCoverage:
    """Looks at the text for a head that says the tokens ``kept``. ``escaped``: it lacks too many of the latest.

    It does from ``escape_missed`` of a window on, until at most ``return_missed`` are missing. ``more`` are tokens of
    what was looked at that the head lacks, at most ``most_more``, the latest: a head that can be given them misses a
    rare token where it occurs for the first time, and only there it counts. They stay when the text becomes another.
    """

    def __init__(
        self,
        kept: Set[int],
        most_more: int = 0,
        escape_missed: int = ESCAPE_MISSED,
        return_missed: int = RETURN_MISSED,
    ) -> None:
        self._kept = kept
        self._escape_missed, self._return_missed = escape_missed, return_missed
        self._most_more = most_more
        self._read: list[int] = []
        self._missed: list[bool] = []  # of each token of ``_read``
        self._more: dict[int, None] = {}  # the latest last
        self.escaped = False

    @property
    def more(self) -> Collection[int]:
        return self._more.keys()

    def look(self, context: Context) -> bool:
        """Decide by the last committed tokens; assumed ones may be wrong, and fewer than a window say too little."""
        shared = min(context.common_prefix(self._read), context.committed_length)
        del self._read[shared:], self._missed[shared:]
        for token in context.tokens[shared : context.committed_length]:
            self._read.append(token)
            self._missed.append(self._is_missed(token))
        if len(self._read) >= WINDOW_TOKENS:
            missed = sum(self._missed[-WINDOW_TOKENS:])
            if missed >= self._escape_missed:
                self.escaped = True
            elif missed <= self._return_missed:
                self.escaped = False
        return self.escaped

    def _is_missed(self, token: int) -> bool:
        if token in self._kept:
            return False
        known = token in self._more
        if self._most_more:
            self._more.pop(token, None)
            self._more[token] = None
            if len(self._more) > self._most_more:
                del self._more[next(iter(self._more))]
        return not known


def short_head_watch(kept: Set[int]) -> HeadCoverage:
    """For a head that can be given what the text has had, and be whole again on the same cache."""
    return HeadCoverage(kept, MOST_MORE, SHORT_ESCAPE_MISSED, SHORT_RETURN_MISSED)
