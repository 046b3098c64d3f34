"""What gates let through: of a chain, and of the alternatives beside it.

A chain breaks at the first token that is not the target's, and where it does the drafter's second or third choice is
the target's token about as often as its odds say. A sibling takes the drafter no forward, only the target's is a row
wider; if it stands the round brings one token more. Goose has such trees around a text that was copied. OPT-Tree
(Wang et al., 2024) and EAGLE-2 (Li et al., 2024) draft below the second choices as well: that takes their drafters no
more forwards, but wider ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.interfaces.drafting import ChainGate, Proposal, SiblingGate


def admitted(gate: ChainGate, confidences: Sequence[float]) -> int:
    """How many leading tokens ``gate`` lets through; past the first one it stops it is not asked.

    ``confidences`` are those of the drafted tokens, from 0 to 1. There is no distribution, so never an entropy.
    """
    return next((index for index, own in enumerate(confidences) if not gate.admits(own, None)), len(confidences))


# Alternatives at each place: the second choice is the target's in 10.5 % of places, the third in 4.2 %, the fourth in
# 1.8 % (the places of planning/cost/acceptance.py), and all others together in 4 %.
MOST_ALTERNATIVES = 3


def with_siblings(chain: Proposal, gate: SiblingGate, most: int, stop_ids: frozenset[int]) -> Proposal:
    """The chain and, behind it, the alternatives that ``gate`` finds worth verifying: at most ``most`` tokens in all.

    A stop is never put forward so: nothing can follow it, and the target says it anyway.
    """
    known = chain.alternatives[: len(chain.tokens)]
    odds = [[0.0 if token in stop_ids else own for token, own in place] for place in known]
    tokens: list[int] = []
    parents: list[int] = []
    for place, rank in gate.siblings(odds, most - len(chain.tokens)):
        token = known[place][rank][0]
        if token not in stop_ids:
            tokens.append(token)
            parents.append(place - 1)
    if not tokens:
        return chain
    return replace(
        chain,
        tokens=(*chain.tokens, *tokens),
        sources=(*chain.sources, *(chain.sources[0],) * len(tokens)),
        parents=(*range(-1, len(chain.tokens) - 1), *parents),
    )
