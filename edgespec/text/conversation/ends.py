"""Where an answer may end: stop texts, stop tokens, and how many tokens come first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from edgespec.text.tokenizers.tokenizer import Tokenizer, control_tokens

# Longer texts are not searched for the names of control tokens, which have up to 20 characters.
LONGEST_SEARCHED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """An answer ends before the first of ``texts`` and at the first token of ``ids``, after ``min_tokens`` tokens.

    ``names``: the control tokens that the texts name, and their names. ``banned``: tokens that never come.
    """

    texts: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()
    names: Mapping[int, str] = field(default_factory=dict)
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
    found = control_tokens(tokenizer, (text for text in stop if len(text) <= LONGEST_SEARCHED))
    names = {token: name.decode() for token, name in found.items()}
    named = {token for token, name in names.items() if name in stop}.union(stop_token_ids)
    own = tokenizer.stop_ids
    ids = frozenset(named if ignore_eos else named | own)
    banned = (tokenizer.suppressed | (own if ignore_eos else frozenset())) - ids
    return Ends(texts=tuple(stop), ids=ids, names=names, min_tokens=min_tokens, banned=banned)
