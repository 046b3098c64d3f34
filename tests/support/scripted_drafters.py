"""Drafters with one fixed behaviour, right or wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.decoding.sampling import Purpose, Sampling, distribution, draw
from edgespec.errors import EdgespecError
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, ChainGate, DraftState, Outcome, Proposal
from edgespec.interfaces.rows import Distribution
from tests.support.fake_runtime import FakeModel, noise_words

KIND = "scripted"


class Scripted(DraftState):
    """A drafter that calls ``script(tokens, depth)`` and records its calls.

    It has no confidences, so gates are only recorded. ``behind`` is its reported lag.
    """

    free = False

    def __init__(
        self, script: Callable[[list[int], int], Sequence[int]], *, free: bool = False, behind: int = 0
    ) -> None:
        self._script = script
        self.free = free
        self.behind = behind
        self.gates: list[ChainGate | None] = []
        self.asked: list[tuple[int, int]] = []
        self.outcomes: list[Outcome] = []
        self.cancelled = False
        self.closed = 0

    def lag(self, context: Context) -> int:
        return self.behind

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        self.asked.append((len(context), depth))
        self.gates.append(gate)
        return self._proposal(list(context.tokens), depth)

    def _proposal(self, tokens: list[int], depth: int) -> Proposal:
        proposed = tuple(self._script(tokens, depth))
        return Proposal(tokens=proposed, sources=(KIND,) * len(proposed), drafted_by=KIND)

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def cancel(self) -> None:
        self.cancelled = True

    def reset_cancel(self) -> None:
        self.cancelled = False

    def close(self) -> None:
        self.closed += 1


class Named(Scripted):
    """Knows the text; reports ``sources`` for its tokens and ``drafted_by`` for its time."""

    def __init__(self, known: Sequence[int], sources: tuple[str, ...], *, drafted_by: str | None = None) -> None:
        super().__init__(lambda tokens, depth: _next_tokens(known, tokens, depth))
        self._sources, self._drafted_by = sources, drafted_by

    def _proposal(self, tokens: list[int], depth: int) -> Proposal:
        plain = super()._proposal(tokens, depth)
        return Proposal(tokens=plain.tokens, sources=self._sources[:depth], drafted_by=self._drafted_by)


def _next_tokens(known: Sequence[int], tokens: list[int], depth: int) -> list[int]:
    return list(known[len(tokens) : len(tokens) + depth])


def oracle(known: Sequence[int]) -> Scripted:
    """Knows the text: ``known`` is the prompt and everything after it."""
    return Scripted(lambda tokens, depth: _next_tokens(known, tokens, depth))


def worst(known: Sequence[int], vocabulary_size: int) -> Scripted:
    """Knows the text and always proposes other tokens."""
    return Scripted(lambda tokens, depth: [(t + 1) % vocabulary_size for t in _next_tokens(known, tokens, depth)])


def often_right(known: Sequence[int], vocabulary_size: int, seed: int = 0) -> Scripted:
    """Right for three positions in four."""

    def script(tokens: list[int], depth: int) -> list[int]:
        right = _next_tokens(known, tokens, depth)
        lucky = noise_words("often_right", seed, len(tokens), count=len(right)) < 0.75
        return [t if hit else (t + 1) % vocabulary_size for t, hit in zip(right, lucky, strict=True)]

    return Scripted(script)


def random_tokens(vocabulary_size: int, seed: int = 0) -> Scripted:
    def script(tokens: list[int], depth: int) -> list[int]:
        noise = noise_words("random", seed, tuple(tokens), count=depth)
        return [int(u * vocabulary_size) for u in noise]

    return Scripted(script)


def stuttering(known: Sequence[int]) -> Scripted:
    """The oracle, with every second proposal empty."""
    state = oracle(known)
    knowing = state._script
    state._script = lambda tokens, depth: knowing(tokens, depth) if len(state.asked) % 2 else []
    return state


def too_long(known: Sequence[int], extra: int = 7) -> Scripted:
    """The oracle, which ignores the requested depth."""
    return Scripted(lambda tokens, depth: _next_tokens(known, tokens, depth + extra))


def empty() -> Scripted:
    return Scripted(lambda tokens, depth: [])


def eos_inside(known: Sequence[int], stop_id: int) -> Scripted:
    """The oracle, with the stop id as second token and more tokens after it."""

    def script(tokens: list[int], depth: int) -> list[int]:
        right = _next_tokens(known, tokens, depth)
        return [*right[:1], stop_id, *right[1:]][:depth]

    return Scripted(script)


class Raising(Scripted):
    """Raises ``error`` from proposal ``at`` (from 1); before that it proposes ``[0]``."""

    def __init__(self, error: EdgespecError, at: int = 1, *, when_observing: bool = False) -> None:
        super().__init__(lambda tokens, depth: [0])
        self.error = error
        self.at = at
        self.when_observing = when_observing

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        proposal = super().propose(context, depth, gate)
        if not self.when_observing and len(self.asked) >= self.at:
            raise self.error
        return proposal

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if self.when_observing and len(self.outcomes) >= self.at:
            raise self.error


class Invalid(Scripted):
    """One right token, one spoilt by ``make``, then right tokens: only the first may be used."""

    def __init__(self, known: Sequence[int], make: Callable[[int, int], tuple[object, Distribution | None]]) -> None:
        super().__init__(lambda tokens, depth: _next_tokens(known, tokens, depth))
        self._make = make

    def _proposal(self, tokens: list[int], depth: int) -> Proposal:
        right = list(self._script(tokens, depth))
        probs: list[Distribution | None] = [certain(token) for token in right]
        if len(right) > 1:
            right[1], probs[1] = self._make(right[1], depth)  # type: ignore[call-overload]
        return Proposal(tokens=tuple(right), sources=(KIND,) * len(right), draft_probs=tuple(probs), drafted_by=KIND)


def certain(token: int) -> Distribution:
    return Distribution(np.array([token], dtype=np.int64), np.ones(1))


def over(ids: Sequence[int], probs: Sequence[float]) -> Distribution:
    return Distribution(np.array(ids, dtype=np.int64), np.array(probs, dtype=np.float64))


# Tokens that are malformed under every rule: name -> (right token, depth) -> (token, its distribution).
INVALID_TOKENS: dict[str, Callable[[int, int], tuple[object, Distribution | None]]] = {
    "past the vocabulary": lambda token, depth: (10**6, certain(token)),
    "one past the vocabulary": lambda token, depth: (12, certain(token)),
    "negative": lambda token, depth: (-1, certain(token)),
    "not an integer": lambda token, depth: (float(token), certain(token)),
    "a truth value": lambda token, depth: (True, certain(token)),
    "beyond 64 bits": lambda token, depth: (2**70, certain(token)),
}

# Malformed distributions, which only the rejection rule reads. The vocabulary has 12 ids.
INVALID_PROBS: dict[str, Callable[[int, int], tuple[object, Distribution | None]]] = {
    "NaN": lambda token, depth: (token, over([token], [float("nan")])),
    "a NaN among others": lambda token, depth: (3, over([3, 4], [1.0, float("nan")])),
    "infinite": lambda token, depth: (token, over([token], [float("inf")])),
    "zero": lambda token, depth: (3, over([3, 4], [0.0, 1.0])),
    "negative": lambda token, depth: (3, over([3, 4, 5], [0.75, -0.5, 0.75])),
    "sums to less than one": lambda token, depth: (3, over([3, 4], [0.5, 0.4])),
    "sums to more than one": lambda token, depth: (3, over([3, 4], [0.5, 0.6])),
    "a probability just above one": lambda token, depth: (token, over([token], [1.00005])),
    "without the token": lambda token, depth: (3, over([4, 5], [0.5, 0.5])),
    "not ascending": lambda token, depth: (3, over([4, 3], [0.5, 0.5])),
    "a repeated id": lambda token, depth: (3, over([3, 3], [0.5, 0.5])),
    "an id past the vocabulary": lambda token, depth: (3, over([3, 12], [0.5, 0.5])),
    "a negative id": lambda token, depth: (3, over([-1, 3], [0.5, 0.5])),
    "nothing": lambda token, depth: (3, over([], [])),
    "shapes that differ": lambda token, depth: (3, over([3, 4], [1.0])),
    "two dimensions": lambda token, depth: (3, Distribution(np.array([[3, 4]]), np.array([[0.5, 0.5]]))),
    "unsigned ids that wrap": lambda token, depth: (
        3,
        Distribution(np.array([4, 3], dtype=np.uint64), np.array([0.5, 0.5])),
    ),
    "ids that are not integers": lambda token, depth: (
        3,
        Distribution(np.array([float("nan")]), np.ones(1)),
    ),
}


class WrongLengths(Scripted):
    """As many tokens as requested and one distribution too few."""

    def _proposal(self, tokens: list[int], depth: int) -> Proposal:
        proposed = tuple(self._script(tokens, depth))
        probs = tuple(certain(token) for token in proposed[:-1])
        return Proposal(tokens=proposed, sources=(KIND,) * len(proposed), draft_probs=probs, drafted_by=KIND)


class Stochastic(Scripted):
    """Draws from the distributions of a separate model: for the rejection rule."""

    def __init__(self, model: FakeModel, sampling: Sampling) -> None:
        super().__init__(lambda tokens, depth: [])
        self.model = model
        self.sampling = sampling

    def _proposal(self, tokens: list[int], depth: int) -> Proposal:
        proposed: list[int] = []
        probs: list[Distribution | None] = []
        for _ in range(depth):
            own = distribution(self.model.scores(tokens + proposed), self.sampling, tokens + proposed)
            position = len(tokens) + len(proposed)
            proposed.append(draw(own, self.sampling.noise_seed, position, Purpose.DRAFT))
            probs.append(own)
        if not proposed:
            return NOTHING
        return Proposal(tokens=tuple(proposed), sources=(KIND,) * depth, draft_probs=tuple(probs), drafted_by=KIND)
