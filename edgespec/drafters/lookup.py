"""Copying from the conversation itself: what followed the same tokens before is likely to follow them again.

Source: prompt lookup decoding (Saxena, 2023) and CopySpec (Dumitru et al., 2025), over the whole conversation.
"""

from __future__ import annotations

from edgespec.interfaces.drafting import NOTHING, ChainGate, Context, DraftRequest, Outcome, Proposal, admitted

KIND = "lookup"

# Tokens that must match before anything is copied. Prompt lookup decoding uses up to 3; shorter matches are
# mostly chance in running text.
MINIMUM_MATCH_TOKENS = 3

# Earlier occurrences that are compared, most recent first: bounds the time on text that repeats one phrase thousands
# of times.
_CANDIDATES = 64

# Longer matches than this say nothing more about what follows.
_LONGEST_MATCH_TOKENS = 32


def match_confidence(matched_tokens: int) -> float:
    """A number from 0 to 1 that grows with the length of the match.

    Only its order matters: the policy counts what share of such copies is right (planning/cost/acceptance.py).
    1 - 2/(n + 1) spreads matches of 3 to 32 tokens evenly over the bins counted there.
    """
    return 1.0 - 2.0 / (matched_tokens + 1)


class LookupDrafter:
    """Proposes a copy of what followed the longest, then most recent, earlier match. Needs no model."""

    kind = KIND

    def __init__(self, *, minimum_match_tokens: int = MINIMUM_MATCH_TOKENS) -> None:
        self._minimum_match_tokens = minimum_match_tokens

    def start(self, request: DraftRequest) -> LookupDraftState:
        return LookupDraftState(request, self._minimum_match_tokens)

    def close(self) -> None:
        """Do nothing: there are no resources."""


class LookupDraftState:
    """An index from every run of ``minimum_match_tokens`` tokens to where it ended, grown as the text grows."""

    free = True

    def __init__(self, request: DraftRequest, minimum_match_tokens: int) -> None:
        self._stop_ids = request.stop_ids
        self._minimum = minimum_match_tokens
        self._indexed: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def lag(self, context: Context) -> int:
        """0, since indexing takes a microsecond a token."""
        return 0

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        tokens = context.tokens
        self._sync(context)
        if depth < 1 or len(tokens) <= self._minimum:
            return NOTHING
        source, matched = self._longest_match(tokens)
        if source is None:
            return NOTHING
        copied = tokens[source : source + depth]
        for index, token in enumerate(copied):
            if token in self._stop_ids:
                copied = copied[: index + 1]
                break
        # If a copied token is right, the match before the next token is one token longer.
        sure = [match_confidence(matched + index) for index in range(len(copied))]
        kept = len(copied) if gate is None else admitted(gate, sure)
        return Proposal(
            tokens=tuple(copied[:kept]),
            sources=(KIND,) * kept,
            drafted_by=KIND,
            confidences=tuple(sure[:kept]),
        )

    def _sync(self, context: Context) -> None:
        """Index every run that has a following token; start over if earlier tokens changed."""
        shared = context.common_prefix(self._indexed)
        if shared < len(self._indexed):
            self._indexed.clear()
            self._ends.clear()
            shared = 0
        tokens, size = context.tokens, self._minimum
        for end in range(max(shared, size), len(tokens)):
            self._ends.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self._indexed.extend(tokens[shared:])

    def _longest_match(self, tokens: list[int]) -> tuple[int | None, int]:
        """Where the text after the best match begins, or None, and the number of matching tokens."""
        best_end, best_length = None, 0
        for end in reversed(self._ends.get(tuple(tokens[-self._minimum :]), [])[-_CANDIDATES:]):
            length = self._minimum
            limit = min(end, _LONGEST_MATCH_TOKENS)
            while length < limit and tokens[end - length - 1] == tokens[len(tokens) - length - 1]:
                length += 1
            if length > best_length:
                best_end, best_length = end, length
        return best_end, best_length

    def observe(self, outcome: Outcome) -> None:
        """Do nothing: the next proposal indexes committed tokens."""

    def cancel(self) -> None:
        """Do nothing: a proposal takes microseconds."""

    def reset_cancel(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        self._indexed.clear()
        self._ends.clear()
