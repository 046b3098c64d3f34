"""Forms of answers without a grammar: which tokens may follow is a pure function of the tokens before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.errors import ConstraintError
from edgespec.interfaces.drawing import UintArray


class RandomForm:
    """After each text a random choice of tokens is allowed, at least one, of a vocabulary of at most 32."""

    def __init__(self, vocabulary_size: int, share: float = 0.4, seed: int = 0) -> None:
        self.size, self.share, self.seed = vocabulary_size, share, seed

    def allowed(self, tokens: Sequence[int]) -> list[int]:
        draw = np.random.default_rng([self.seed, len(tokens), *tokens])
        few = np.flatnonzero(draw.random(self.size) < self.share).tolist()
        return few or [int(draw.integers(self.size))]

    def cursor(self) -> RandomCursor:
        return RandomCursor(self)


class RandomCursor:
    def __init__(self, form: RandomForm) -> None:
        self._form = form
        self._here: list[int] = []

    def at(self, tokens: Sequence[int]) -> None:
        for place, token in enumerate(tokens):
            if token not in self._form.allowed(tokens[:place]):
                raise ConstraintError(f"token {token} is not allowed")
        self._here = list(tokens)

    def allows(self, tokens: Sequence[int]) -> int:
        for place, token in enumerate(tokens):
            if token not in self._form.allowed([*self._here, *tokens[:place]]):
                return place
        return len(tokens)

    @property
    def mask(self) -> UintArray:
        return np.array([sum(1 << token for token in self._form.allowed(self._here))], dtype=np.uint32)

    @property
    def forced(self) -> Sequence[int]:
        found: list[int] = []
        while len(found) < 4 and len(only := self._form.allowed([*self._here, *found])) == 1:
            found += only
        return found
