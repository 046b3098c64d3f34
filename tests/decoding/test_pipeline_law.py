"""The pipelined loop's law, computed exactly: every outcome of every draw, and every way to be late, is followed.

The loop runs as it is. Whatever it draws at random is decided here instead, once each way, with the probability that
the loop itself asked for as a Fraction; so the sum over all runs is the law of the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.contracts import ChainGate, Context, Distribution, FloatArray, Outcome, Proposal, Rows
from edgespec.decoding.pipeline import FixedBudget, PipelinedLoop
from edgespec.decoding.rounds import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.planning.depth import FixedDepth
from tests.decoding.law import Conditional, Law, as_array, plain_law, random_conditional
from tests.decoding.test_pipeline import Late
from tests.support.fake_runtime import FakeModel

SIZE = 3
PROMPT = [0]


class Decisions:
    """One run after another through the tree of everything that could have been drawn."""

    def __init__(self) -> None:
        self._path: list[tuple[int, list[tuple[Any, Fraction]]]] = []
        self._next = 0
        self.weight = Fraction(1)

    def draw(self, outcomes: Sequence[tuple[Any, Fraction]]) -> Any:
        """One of the outcomes; those without probability do not happen."""
        possible = [(value, prob) for value, prob in outcomes if prob > 0]
        assert sum(prob for _, prob in possible) == 1
        if self._next == len(self._path):
            self._path.append((0, possible))
        index, known = self._path[self._next]
        assert known == possible, "a run is a function of what was drawn before"
        self._next += 1
        value, prob = possible[index]
        self.weight *= prob
        return value

    def start_next(self) -> bool:
        """Whether there is a run that was not made yet."""
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
    """A number in [0, 1) that is only ever compared, as acceptance does it: uniform * draft < target."""

    def __init__(self, decisions: Decisions, draft: Fraction | None = None) -> None:
        self._decisions, self._draft = decisions, draft

    def __mul__(self, draft: Any) -> Uniform:
        return Uniform(self._decisions, Fraction(draft))

    def __lt__(self, target: Any) -> bool:
        assert self._draft is not None
        share = min(Fraction(1), Fraction(target) / self._draft)
        return bool(self._decisions.draw([(True, share), (False, 1 - share)]))


class ExactChooser(Chooser):
    """Draws by ``decisions`` from ``target``; under the keyed rule each place has one draw for all who ask."""

    def __init__(self, decisions: Decisions, target: Conditional, *, rejection: bool) -> None:
        super().__init__(Sampling(temperature=1.0, rule="rejection" if rejection else "keyed"))
        self._decisions, self._target = decisions, target
        self._by_context: dict[tuple[int, ...], int] = {}

    def _of(self, context: Sequence[int]) -> list[Fraction]:
        return self._target(tuple(context[len(PROMPT) :]))

    def distribution(self, rows: Rows, index: int, context: Sequence[int]) -> Distribution:
        return exact(self._of(context))

    def target_token(self, rows: Rows, index: int, context: Sequence[int]) -> int:
        key = tuple(context)
        if self.uses_rejection or key not in self._by_context:
            self._by_context[key] = int(self._decisions.draw(list(enumerate(self._of(context)))))
        return self._by_context[key]

    def accept_uniform(self, position: int) -> Any:
        return Uniform(self._decisions)

    def draw_dense(self, probs: FloatArray, position: int) -> int:
        return int(self._decisions.draw(list(enumerate(probs.tolist()))))


class Drawing:
    """Draws each token from ``draft`` given everything before it, or copies its likeliest if ``copies``."""

    free = False

    def __init__(self, decisions: Decisions, draft: Conditional, *, copies: bool, lengths: Sequence[int]) -> None:
        self._decisions, self._draft, self._copies, self._lengths = decisions, draft, copies, lengths
        self._asked = 0

    def lag(self, context: Context) -> int:
        return 0

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        # How long a chain is does not depend on its tokens.
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
                tokens.append(int(self._decisions.draw(list(enumerate(own)))))
                probs.append(exact(own))
        return Proposal(tokens=tuple(tokens), draft_probs=tuple(probs), drafted_by="drawing")

    def observe(self, outcome: Outcome) -> None: ...

    def cancel(self) -> None: ...

    def reset_cancel(self) -> None: ...

    def close(self) -> None: ...


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
    spoil: Callable[[PipelinedLoop], None] = lambda _loop: None,
) -> tuple[Law, int]:
    """The law of the text, and in how many runs it was found."""
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
            Drawing(decisions, draft, copies=copies, lengths=lengths),
            FixedDepth(depth),
            ExactChooser(decisions, target, rejection=rejection),
            history,
            LoopLimits(max_tokens=tokens, depth_cap=depth, vocabulary_size=SIZE),
            submit=Late(lateness),
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


TARGET, DRAFT = random_conditional(5, SIZE), random_conditional(31, SIZE)


@pytest.mark.parametrize("rejection", [False, True], ids=["keyed", "rejection"])
@pytest.mark.parametrize("copies", [False, True], ids=["drawn", "copied"])
@pytest.mark.parametrize(
    ("most", "ahead", "lengths"),
    [(1, 2, (9,)), (0, 2, (9,)), (1, 1, (9,)), (1, 2, (1, 0, 2))],
    ids=["full windows", "the first token only", "no further than the window", "chains that end early"],
)
def test_two_chunks_deep(rejection: bool, copies: bool, most: int, ahead: int, lengths: Sequence[int]) -> None:
    tokens = 5 if copies else 4  # drawn drafts make many more runs
    options: dict[str, Any] = {"most": most, "ahead": ahead, "copies": copies, "lengths": lengths}
    law, runs = law_of(TARGET, DRAFT, rejection=rejection, tokens=tokens, depth=1, **options)
    assert positive(law) == plain_law(TARGET, tokens)
    assert runs >= len(plain_law(TARGET, tokens))


@pytest.mark.parametrize("rejection", [False, True], ids=["keyed", "rejection"])
@pytest.mark.parametrize("copies", [False, True], ids=["drawn", "copied"])
def test_drafts_that_may_be_late_and_are_reused(rejection: bool, copies: bool) -> None:
    law, _ = law_of(
        TARGET, DRAFT, rejection=rejection, tokens=4, depth=2, most=2, ahead=2, copies=copies, may_be_late=True
    )
    assert positive(law) == plain_law(TARGET, 4)


@pytest.mark.parametrize("rejection", [False, True], ids=["keyed", "rejection"])
def test_what_was_drafted_behind_a_rejected_token_is_put_forward_again(rejection: bool) -> None:
    law, _ = law_of(TARGET, DRAFT, rejection=rejection, tokens=4, depth=2, most=2, ahead=3, reuse=True)
    assert positive(law) == plain_law(TARGET, 4)


def test_a_token_dropped_because_of_itself_is_noticed() -> None:
    """The same machinery finds a loop whose law is not the target's."""

    def spoil(loop: Any) -> None:
        land = loop._land

        def picky() -> Any:
            landed = land()
            if loop._pending and loop._pending[-1].token == 0:
                loop._pending.pop()
            return landed

        loop._land = picky

    options: dict[str, Any] = {"tokens": 3, "depth": 1, "most": 1, "ahead": 2}
    right, _ = law_of(TARGET, DRAFT, rejection=True, **options)
    assert positive(right) == plain_law(TARGET, 3)
    spoilt, _ = law_of(TARGET, DRAFT, rejection=True, spoil=spoil, **options)
    assert positive(spoilt) != plain_law(TARGET, 3)
