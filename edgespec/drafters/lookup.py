"""Copying from earlier text: what followed the same tokens before is likely to follow them again.

Sources: prompt lookup decoding (Saxena, 2023), CopySpec (Dumitru et al., 2025) and SuffixDecoding (Oliaro et al.,
2024), over the whole conversation. ``drafters/stored.py`` copies from texts in files.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from edgespec.drafters.text_index import EarlierText, Match, TextIndex
from edgespec.files.stored_text import LONGEST_MATCH_TOKENS
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import (
    COPIES,
    NOTHING,
    ChainGate,
    DraftRequest,
    DraftState,
    DraftTree,
    Proposal,
    admitted,
)

# Share of copies that are wrong after a match of one token, and the factor for each further token. Measured after 1,
# 2, 3, 4 and 6 tokens: 0.74, 0.57, 0.42, 0.35 and 0.20 (docs/results/drafting.md).
_WRONG_AFTER_ONE, _LESS_WRONG = 0.74, 0.77

# Different tokens that followed the same match and are guessed side by side.
_MOST_BRANCHES = 2

# Guesses below this probability pay in no round: a further row costs two hundredths of a step at least, in which more
# than one token is usual.
_LEAST_REACH = 0.03

# Guesses added to a tree in a round, if it may not have more nodes: as many as a round of the default policy verifies
# at most (planning/cost/widths.py).
_ENOUGH_ADDED = 11

# By the number of matching tokens: every guess of every round looks one up.
_CONFIDENCES = [1.0 - _WRONG_AFTER_ONE * _LESS_WRONG ** (matched - 1) for matched in range(LONGEST_MATCH_TOKENS + 1)]


def match_confidence(matched_tokens: int) -> float:
    """How likely a copy after that many matching tokens is right, before the policy has counted any.

    Matches longer than LONGEST_MATCH_TOKENS count as that long.
    """
    return _CONFIDENCES[min(matched_tokens, LONGEST_MATCH_TOKENS)]


class LookupDrafter:
    """Proposes what followed the longest earlier match. Needs no model."""

    kind = COPIES

    def start(self, request: DraftRequest) -> LookupDraftState:
        return LookupDraftState(request, TextIndex(), COPIES)

    def close(self) -> None:
        """Do nothing: there are no resources."""


class LookupDraftState(DraftState):
    """Copies from the text of an index."""

    free = True
    grows_trees = True

    def __init__(self, request: DraftRequest, index: EarlierText, kind: str) -> None:
        self._stop_ids = request.stop_ids
        self._index = index
        self._kind = kind
        self._latest: tuple[Context, int, list[Match]] | None = None  # a text, its length, the matches of its end

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        """A copy of what followed the longest match; of several, the first of the index."""
        found = self._matches(context)
        if depth < 1 or not found:
            return NOTHING
        source, matched = max(found, key=_length)
        copied = self._index.copy(source, depth)
        for index, token in enumerate(copied):
            if token in self._stop_ids:
                copied = copied[: index + 1]
                break
        # If a copied token is right, the match before the next token is one token longer.
        sure = [match_confidence(matched + index) for index in range(len(copied))]
        kept = len(copied) if gate is None else admitted(gate, sure)
        return Proposal(
            tokens=tuple(copied[:kept]),
            sources=(self._kind,) * kept,
            drafted_by=self._kind,
            confidences=tuple(sure[:kept]),
        )

    def grow(self, context: Context, tree: DraftTree, chain: int, believes: Callable[[float], float]) -> None:
        """Add what followed the text and each prefix of the chain; the likeliest guesses first.

        Where the tree has guesses of others, a different guess only gets the probability that they leave.
        """
        # By descending reach; the count breaks ties.
        open_: list[tuple[float, int, int, list[Match]]] = [(-1.0, 0, -1, self._matches(context))]
        tail, reach = context.tokens[-LONGEST_MATCH_TOKENS:], 1.0
        for node in range(chain):
            tail = [*tail[1:], tree.tokens[node]]
            reach *= tree.odds[node]
            if reach < _LEAST_REACH or tree.tokens[node] in self._stop_ids:
                break
            if self._index.is_quick or node == chain - 1:
                open_.append((-reach, len(open_), node, self._index.matches(tail)))
        limit = len(tree) + max(_ENOUGH_ADDED, tree.most_nodes)
        count = len(open_)
        believed: dict[int, float] = {}  # by the length of the match, most of which are equal
        while open_ and len(tree) < limit:
            negative, _, parent, found = heapq.heappop(open_)
            left = tree.left_over(parent)
            for token, share, longest in self._followers(found):
                if longest not in believed:
                    believed[longest] = believes(match_confidence(longest))
                node = tree.add(parent, token, believed[longest] * share * left, self._kind)
                here = negative * tree.odds[node]
                if node < chain or token in self._stop_ids or here > -_LEAST_REACH:
                    continue  # the chain's own end comes later, nothing follows it, or it is too unlikely
                count += 1
                heapq.heappush(open_, (here, count, node, self._beyond(found, token)))

    def _matches(self, context: Context) -> list[Match]:
        """Earlier positions that end as the text does; found once for each context."""
        if self._latest is None or self._latest[:2] != (context, len(context)):
            self._index.follow(context.tokens)
            found = self._index.matches(context.tokens[-LONGEST_MATCH_TOKENS:])
            self._latest = context, len(context), found
        return self._latest[2]

    def _followers(self, found: Sequence[Match]) -> list[tuple[int, float, int]]:
        """The tokens that followed the longest match: each with its share of positions, and the match's length."""
        if len(found) == 1:  # as after most guesses: no counting
            end, longest = found[0]
            token = self._index.after(end)
            return [] if token is None else [(token, 1.0, longest)]
        longest = max(found, key=_length)[1] if found else 0
        following = [self._index.after(end) for end, length in found if length == longest]
        known = [token for token in following if token is not None]
        counted = Counter(known)
        return [(token, times / len(known), longest) for token, times in counted.most_common(_MOST_BRANCHES)]

    def _beyond(self, found: Sequence[Match], token: int) -> list[Match]:
        """The matches that continue with ``token``, one token longer."""
        after = self._index.after
        return [
            (end + 1, min(length + 1, LONGEST_MATCH_TOKENS))
            for end, length in found
            if after(end) == token and after(end + 1) is not None
        ]

    def close(self) -> None:
        self._index.clear()
        self._latest = None


def _length(match: Match) -> int:
    return match[1]
