"""Runs the loop once for every outcome of every draw, weighted with the probabilities that the loop requested.

The loop is unchanged. Each random draw is replaced by a decision, once for each outcome, with the probability that
the loop requested as a Fraction. The sum over all runs is the exact distribution of the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from edgespec.decoding.pipelined.loop import PipelinedLoop
from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import ChainGate, DraftState, Proposal
from edgespec.interfaces.rows import Distribution, FloatArray, Rows
from edgespec.planning.depth.base import FixedDepth
from tests.decoding.law import Conditional, Law, as_array
from tests.decoding.test_pipeline import Late
from tests.support.budgets import FixedBudget
from tests.support.fake_runtime import FakeModel

SIZE = 3
PROMPT = [0]


class Decisions:
    """Runs, one after another, through the tree of all possible draws."""

    def __init__(self) -> None:
        self._path: list[tuple[int, list[tuple[Any, Fraction]]]] = []
        self._next = 0
        self.weight = Fraction(1)

    def draw(self, outcomes: Sequence[tuple[Any, Fraction]]) -> Any:
        """One of the outcomes; outcomes of probability 0 are skipped."""
        possible = [(value, prob) for value, prob in outcomes if prob > 0]
        assert sum(prob for _, prob in possible) == 1
        if self._next == len(self._path):
            self._path.append((0, possible))
        index, known = self._path[self._next]
        assert known == possible, "a run is a function of the earlier draws"
        self._next += 1
        value, prob = possible[index]
        self.weight *= prob
        return value

    def start_next(self) -> bool:
        """Whether there is a run left."""
        self._next, self.weight = 0, Fraction(1)
        while self._path:
            index, possible = self._path[-1]
            if index + 1 < len(possible):
                self._path[-1] = (index + 1, possible)
                return True
            self._path.pop()
        return False


class Exact(Distribution):
    """A distribution of Fractions."""

    def dense(self, vocabulary_size: int) -> FloatArray:
        full = as_array([Fraction(0)] * vocabulary_size)
        full[self.ids] = self.probs
        return full

    def normalised(self) -> Distribution:
        return self


def exact(probs: Sequence[Fraction]) -> Exact:
    ids = np.flatnonzero(np.array([prob > 0 for prob in probs]))
    return Exact(ids, as_array([probs[token] for token in ids]))


class Uniform:
    """A number in [0, 1) that supports only the comparison of the acceptance test: uniform * draft < target."""

    def __init__(self, decisions: Decisions, draft: Fraction | None = None) -> None:
        self._decisions, self._draft = decisions, draft

    def __mul__(self, draft: Any) -> Uniform:
        return Uniform(self._decisions, Fraction(draft))

    def __lt__(self, target: Any) -> bool:
        assert self._draft is not None
        share = min(Fraction(1), Fraction(target) / self._draft)
        return bool(self._decisions.draw([(True, share), (False, 1 - share)]))


class ExactChooser(Chooser):
    """Draws by ``decisions`` from ``target``; under the keyed rule all callers share one draw for each place."""

    def __init__(self, decisions: Decisions, target: Conditional, *, rejection: bool) -> None:
        super().__init__(Sampling(temperature=1.0, rule="rejection" if rejection else "keyed"))
        self._decisions, self._target = decisions, target
        self._by_context: dict[tuple[int, ...], int] = {}

    def _of(self, context: Sequence[int]) -> list[Fraction]:
        return self._target(tuple(context[len(PROMPT) :]))

    def distribution(self, rows: Rows, index: int, context: Sequence[int]) -> Distribution:
        return exact(self._of(context))

    def target_token(self, rows: Rows, index: int, context: Sequence[int], mask: object = None) -> int:
        assert mask is None
        key = tuple(context)
        if self.uses_rejection or key not in self._by_context:
            self._by_context[key] = int(self._decisions.draw(list(enumerate(self._of(context)))))
        return self._by_context[key]

    def accept_uniform(self, position: int) -> Any:
        return Uniform(self._decisions)

    def draw_dense(self, probs: FloatArray, position: int) -> int:
        return int(self._decisions.draw(list(enumerate(probs.tolist()))))


class Drawing(DraftState):
    """Draws each token from ``draft`` given the tokens before it, or copies the likeliest if ``copies``."""

    def __init__(self, decisions: Decisions, draft: Conditional, *, copies: bool, lengths: Sequence[int]) -> None:
        self._decisions, self._draft, self._copies, self._lengths = decisions, draft, copies, lengths
        self._asked = 0

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        # The length of a chain does not depend on its tokens.
        depth = min(depth, self._lengths[self._asked % len(self._lengths)])
        self._asked += 1
        tokens: list[int] = []
        probs: list[Distribution | None] = []
        for _ in range(depth):
            own = self._draft((*context.tokens[len(PROMPT) :], *tokens))
            if self._copies:
                tokens.append(max(range(SIZE), key=lambda token, own=own: own[token]))  # type: ignore[misc]
                probs.append(None)
            else:
                tokens.append(self._drawn(own, len(context.tokens) + len(tokens), context.committed_length))
                probs.append(exact(own))
        return Proposal(tokens=tuple(tokens), draft_probs=tuple(probs), drafted_by="drawing")

    def _drawn(self, own: Sequence[Fraction], position: int, stream: int) -> int:
        return int(self._decisions.draw(list(enumerate(own))))


def law_of(
    target: Conditional,
    draft: Conditional,
    *,
    rejection: bool,
    tokens: int,
    depth: int,
    most: int,
    ahead: int,
    copies: bool = False,
    may_be_late: bool = False,
    lengths: Sequence[int] = (9,),
    reuse: bool = False,
    drafter: type[Drawing] = Drawing,
    submit: Callable[[Callable[[], int]], Any] = Late,
    spoil: Callable[[PipelinedLoop], None] = lambda _loop: None,
) -> tuple[Law, int]:
    """The text's distribution, and the number of runs. ``submit`` makes a drafter's thread of its lateness."""
    decisions, law, runs = Decisions(), defaultdict[tuple[int, ...], Fraction](Fraction), 0
    model = FakeModel(SIZE)

    def lateness() -> int:
        half = Fraction(1, 2)
        return int(decisions.draw([(0, half), (1, half)])) if may_be_late else 0

    while runs == 0 or decisions.start_next():
        runs += 1
        history = list(PROMPT)
        loop = PipelinedLoop(
            model.open(32),
            drafter(decisions, draft, copies=copies, lengths=lengths),
            FixedDepth(depth),
            ExactChooser(decisions, target, rejection=rejection),
            history,
            LoopLimits(max_tokens=tokens, depth_cap=depth, vocabulary_size=SIZE),
            submit=submit(lateness),
            budget=FixedBudget(most=most, ahead=ahead, patience=0.0, reuse=reuse),
        )
        spoil(loop)
        for _ in loop.steps():
            pass
        law[tuple(history[len(PROMPT) :])] += decisions.weight
        model.sequences.clear()
    return dict(law), runs


def positive(law: Law) -> Law:
    return {tokens: mass for tokens, mass in law.items() if mass}
