"""How much of the text a trimmed head covers.

A head with only the frequent tokens (VocabTrim, Goel et al., 2025; FR-Spec, Zhao et al., 2025) cannot propose the
rest. That costs a few percent of the guesses on text like the one its tokens were counted on, and most of them in
another language or alphabet. The cost shows in the text itself: it is the share of recent tokens that the head lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from edgespec.interfaces.counted_text import Context

# Recent tokens that are counted: some five lines of text. Eleven tokens in another language are enough to be noticed,
# and chance moves the share by only 3.2 % (one standard deviation at a coverage of 93 %).
WINDOW_TOKENS = 64

# For a trimmed drafter with an untrimmed one available. A head may lose 6.9 % of the tokens of the text that sized
# it; the whole head proposes 72 % of that text (default pair: vocabtrim.lost_allowed). The margin is three standard
# deviations at that loss, 9.5 %: 3 * sqrt(0.069 * 0.931 / 64). So the limit is a coverage of 1 - 0.069 - 0.095 =
# 83.6 % of the window: 11 missing tokens. Text that the head was made for exceeds it by chance once in 230 windows
# (binomial), text of 98 % coverage once in 17 million.
ESCAPE_MISSED = 11

# The trimmed head returns at 6.9 % missing tokens or fewer, the loss it was sized for. The gap between the limits
# keeps a text at the border from making both drafters read it alternately.
RETURN_MISSED = 4

# For a short head that can become whole without reading anything again: it saves 6 % of a round of the default pair,
# and loses 0.7 % of its tokens for each 1 % that it lacks (docs/results/native.md). The two are equal at 8.5 %, five
# or six tokens of the window; the limits lie on either side.
SHORT_ESCAPE_MISSED = 8
SHORT_RETURN_MISSED = 3

# Rare tokens of the text that are remembered, the latest ones. 92 prompts with the default target's answers, 53 to
# 800 tokens, held 0 to 43 tokens that the short head lacks; 512 are a hundredth of that head.
MOST_MORE = 512


class HeadCoverage:
    """Checks how much of the text a head of the tokens ``kept`` covers. ``escaped``: the head lacks too many.

    ``escaped`` becomes true at ``escape_missed`` missing tokens in the window, and false again at ``return_missed``.
    ``more`` are the latest tokens read that the head lacks, at most ``most_more``. A head that receives them lacks a
    rare token only at its first occurrence, so only that one counts. They stay when the text changes.
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
        self._missed: list[bool] = []  # for each token of ``_read``
        self._more: dict[int, None] = {}  # latest last
        self.escaped = False

    @property
    def more(self) -> Collection[int]:
        return self._more.keys()

    def look(self, context: Context) -> bool:
        """Decide by the last committed tokens; assumed tokens do not count. Less than a window changes nothing."""
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
    """Coverage of a short head that can receive the text's tokens, and become whole on the same cache."""
    return HeadCoverage(kept, MOST_MORE, SHORT_ESCAPE_MISSED, SHORT_RETURN_MISSED)
