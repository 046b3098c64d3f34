"""Several chains of one drafter, side by side: for a target that scores a tree in one forward (DuoDecoding, 2025)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.interfaces.drafting import Context, Draft, DraftRequest, Proposal
from edgespec.interfaces.model import Sequence as TokenSequence
from edgespec.interfaces.model import TreeSequence
from edgespec.interfaces.rows import Rows

__all__ = ["ChainWriter", "Chains", "as_tree", "tree_proposal", "undrawn"]

# First tokens looked at: the fifth best id has odds of one in five at most, and only where the best is no better.
_MOST_CHAINS = 4


@dataclass(frozen=True, slots=True)
class Chains:
    """Chains, best first, and the forwards they took."""

    tokens: list[list[int]]
    forwards: int


class ChainWriter:
    """Writes chains after a text. ``ours`` makes the rows of a forward those of the target's ids."""

    def __init__(self, request: DraftRequest) -> None:
        self._request = request

    def firsts(self, rows: Rows, context: Context, depth: int) -> tuple[list[tuple[int, float]], int]:
        """(first token, odds) of each chain and how long they are to be; one chain or none where no more pay."""
        if context.spread is None:
            return [], 0
        most = min(depth, _MOST_CHAINS)
        found = self._request.chooser.candidates(rows, 0, context.tokens, most)
        chains, length = context.spread([odds for _, odds in found])
        firsts = list(found[: max(0, chains)])
        return firsts, min(length, depth // len(firsts)) if firsts else 0

    def in_turns(
        self,
        sequence: TokenSequence,
        known: list[int],
        context: Context,
        firsts: list[tuple[int, float]],
        length: int,
        ours: Callable[[Rows], Rows] = lambda rows: rows,
    ) -> Chains:
        """One after another, the best last, so that it is the one that stays in the cache; ``known`` follows that."""
        base, forwards = sequence.length, 0
        chains: list[list[int]] = []
        for first, _ in reversed(firsts):
            sequence.rewind(base)
            del known[base:]
            chain = [first]
            while self._goes_on(chain, length):
                rows = ours(sequence.forward(chain[-1:], 1))
                known.append(chain[-1])
                forwards += 1
                self._extend(chain, rows, 0, context)
            chains.insert(0, chain)
        return Chains(chains, forwards)

    def side_by_side(
        self,
        sequence: TreeSequence,
        known: list[int],
        context: Context,
        firsts: list[tuple[int, float]],
        length: int,
        ours: Callable[[Rows], Rows] = lambda rows: rows,
    ) -> Chains:
        """All of them with each forward; the best stays in the cache."""
        chains = [[first] for first, _ in firsts]
        paths: list[list[int]] = [[] for _ in firsts]
        nodes = forwards = 0
        while growing := [index for index, chain in enumerate(chains) if self._goes_on(chain, length)]:
            parents = [paths[index][-1] if paths[index] else -1 for index in growing]
            rows = ours(sequence.forward_tree([chains[index][-1] for index in growing], parents))
            forwards += 1
            for row, index in enumerate(growing):
                paths[index].append(nodes + row)
                self._extend(chains[index], rows, row, context)
            nodes += len(growing)
        if nodes:
            sequence.keep(paths[0])
            known += chains[0][: len(paths[0])]
        return Chains(chains, forwards)

    def _goes_on(self, chain: list[int], length: int) -> bool:
        return len(chain) < length and chain[-1] not in self._request.stop_ids

    def _extend(self, chain: list[int], rows: Rows, row: int, context: Context) -> None:
        draft = self._request.chooser.draft(rows, row, [*context.tokens, *chain], None)
        assert draft is not None, "there is no gate to end it"
        chain.append(undrawn(draft).token)


def as_tree(chains: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tokens, parents) of chains that begin with different tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for chain in chains:
        parents += [len(tokens) - 1 + place if place else -1 for place in range(len(chain))]
        tokens += chain
    return tuple(tokens), tuple(parents)


def undrawn(draft: Draft) -> Draft:
    """The same with the likeliest token in place of one that was drawn: a function of what came before it."""
    own = draft.distribution
    if own is None:
        return draft
    best = own.likeliest
    rest = None if draft.runner_up is None else own.without(best)
    return Draft(best, None, draft.confidence, None if rest is None else rest.likeliest)


def tree_proposal(chains: Chains, kind: str, forwards: int) -> Proposal:
    """The proposal of these chains, after ``forwards`` more."""
    tokens, parents = as_tree(chains.tokens)
    return Proposal(
        tokens=tokens,
        sources=(kind,) * len(tokens),
        parents=parents,
        drafted_by=kind,
        forwards=forwards + chains.forwards,
    )
