"""A source that fills the tree of a round with guesses of any token below any node."""

from __future__ import annotations

import random
from collections.abc import Callable

from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftRequest, DraftTree
from tests.support.scripted_drafters import Scripted


class Bushy:
    """The drafter. Its guesses are believed, so that the policy's whole budget is used."""

    kind = "bushy"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def start(self, request: DraftRequest) -> BushyState:
        return BushyState(self._seed, request.vocabulary_size)

    def close(self) -> None: ...


class BushyState(Scripted):
    grows_trees = True

    def __init__(self, seed: int, vocabulary_size: int) -> None:
        super().__init__(lambda tokens, depth: [], free=True)
        self._random, self._vocabulary_size = random.Random(seed), vocabulary_size

    def grow(self, context: Context, tree: DraftTree, chain: int, believes: Callable[[float], float]) -> None:
        for _ in range(3 * tree.most_nodes):
            parent = self._random.randrange(-1, min(len(tree), 20))
            token = self._random.randrange(self._vocabulary_size)
            tree.add(parent, token, self._random.uniform(0.3, 0.9), "bushy")
