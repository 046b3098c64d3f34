"""Where an answer may end: stop texts, stop tokens, and how many tokens come first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgespec.text.tokenizers.tokenizer import Tokenizer

# Longer texts are not looked up among the names of control tokens, which have up to 20 characters.
_LONGEST_NAME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """An answer ends before the first of ``texts`` and at the first token of ``ids``, after ``min_tokens`` tokens.

    ``banned``: tokens that never come.
    """

    texts: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    banned: frozenset[int] = frozenset()

    @property
    def not_before(self) -> dict[int, float]:
        """How many tokens of the answer come before each token that may only come later."""
        early = dict.fromkeys(self.ids, float(self.min_tokens)) if self.min_tokens else {}
        return {**early, **dict.fromkeys(self.banned, math.inf)}


def ends_of(
    tokenizer: Tokenizer,
    stop: Sequence[str],
    stop_token_ids: Iterable[int],
    min_tokens: int = 0,
    *,
    ignore_eos: bool = False,
) -> Ends:
    """The ends of an answer. A stop text that is one control token also ends it at the token.

    With ``ignore_eos`` the model's own ends are banned, except those that the caller names. What the file suppresses
    is banned in the same way.
    """
    named = _hidden(tokenizer, stop) | frozenset(stop_token_ids)
    own = tokenizer.stop_ids
    ids = named if ignore_eos else named | own
    banned = (tokenizer.suppressed | (own if ignore_eos else frozenset())) - ids
    return Ends(texts=tuple(stop), ids=ids, min_tokens=min_tokens, banned=banned)


def _hidden(tokenizer: Tokenizer, stops: Sequence[str]) -> frozenset[int]:
    """The ids of the stop texts that are exactly one control token, which never becomes text."""
    found = set[int]()
    for stop in stops:
        if len(stop) > _LONGEST_NAME:
            continue
        ids = tokenizer.encode(stop, special=True)
        control = tokenizer.control_token(ids[0]) if len(ids) == 1 else None
        if control is not None and control.text == stop:
            found.add(ids[0])
    return frozenset(found)
