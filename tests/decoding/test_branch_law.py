"""The distribution of a loop with branches, computed exactly; and the bias of less careful ways to use branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from edgespec.decoding.pipelined import correction_branches as branches
from edgespec.decoding.pipelined.loop import PipelinedLoop
from edgespec.decoding.round_base import second_choice
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, ChainGate, Proposal
from tests.decoding import exact_runs
from tests.decoding.exact_runs import PROMPT, SIZE, Decisions, Drawing, positive
from tests.decoding.law import Conditional, Law, plain_law, random_conditional
from tests.support.held_futures import Held

TARGET, DRAFT = random_conditional(5, SIZE), random_conditional(31, SIZE)


def law_of(target: Conditional, draft: Conditional, **options: Any) -> Law:
    """The exact distribution if every drafter has time for branches, and is late only in delivering them."""
    return positive(exact_runs.law_of(target, draft, submit=Held, **options)[0])


def best(probs: Sequence[Fraction], but: int | None = None) -> int:
    return max((token for token in range(SIZE) if token != but), key=lambda token: (probs[token], -token))


class Branching(Drawing):
    """Names an alternative of each token, and continues each with the likeliest tokens."""

    forks = drafts_branches = True
    draws_branches = False

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        proposal = super().propose(context, depth, gate)
        before = tuple(context.tokens[len(PROMPT) :])
        own = [self._draft((*before, *proposal.tokens[:place])) for place in range(len(proposal.tokens))]
        return replace(
            proposal,
            confidences=tuple(float(max(probs)) for probs in own),
            alternatives=tuple(
                ((best(probs, but=token), 0.5),) for probs, token in zip(own, proposal.tokens, strict=True)
            ),
        )

    def branch(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        copies, self._copies = self._copies, not self.draws_branches
        try:
            return self.propose(context, depth, gate)
        finally:
            self._copies = copies


class DrawnBranching(Branching):
    """A drafter that draws its branches at random, and reports that it did."""

    draws_branches = True


class Taken:
    """Counts the branches that loops take; a test can replace or drop them."""

    def __init__(self, choose: Callable[[Proposal], bool] = lambda _proposal: True) -> None:
        self.count = 0
        self._choose = choose

    def __call__(self, loop: Any) -> None:
        follow = loop._branches.follow

        def counted(history: list[int], committed: list[int]) -> Proposal | None:
            taken = follow(history, committed)
            if taken is None or not self._choose(taken):
                return None
            self.count += 1
            return taken  # type: ignore[no-any-return]

        loop._branches.follow = counted


@pytest.mark.slow
@pytest.mark.parametrize("rejection", [False, True], ids=["keyed", "rejection"])
@pytest.mark.parametrize("copies", [False, True], ids=["drawn", "copied"])
@pytest.mark.parametrize(
    ("most", "ahead", "branching"),
    [(1, 2, 1), (1, 2, 9), (0, 2, 9)],
    ids=["one branch", "every branch", "the first token only"],
)
def test_the_law_with_branches_over_two_drafts_is_the_targets(
    rejection: bool, copies: bool, most: int, ahead: int, branching: int
) -> None:
    tokens, taken = 5 if copies else 4, Taken()
    options: dict[str, Any] = {"most": most, "ahead": ahead, "copies": copies, "branching": branching}
    law = law_of(
        TARGET, DRAFT, rejection=rejection, tokens=tokens, depth=1, drafter=Branching, spoil=taken, **options
    )
    assert law == plain_law(TARGET, tokens)
    assert taken.count > 0


@pytest.mark.slow
@pytest.mark.parametrize("rejection", [False, True], ids=["keyed", "rejection"])
def test_the_law_with_branches_and_wider_windows_is_the_targets(rejection: bool) -> None:
    taken = Taken()
    options: dict[str, Any] = {"depth": 2, "most": 2, "ahead": 3, "branching": 2, "reuse": True}
    law = law_of(TARGET, DRAFT, rejection=rejection, tokens=4, drafter=Branching, spoil=taken, **options)
    assert law == plain_law(TARGET, 4)
    assert taken.count > 0


@pytest.mark.slow
@pytest.mark.parametrize("rejection", [False, True], ids=["keyed", "rejection"])
def test_the_law_with_late_branches_is_the_targets(rejection: bool) -> None:
    taken = Taken()
    options: dict[str, Any] = {"depth": 1, "most": 1, "ahead": 2, "branching": 2, "may_be_late": True}
    law = law_of(TARGET, DRAFT, rejection=rejection, tokens=4, copies=True, drafter=Branching, spoil=taken, **options)
    assert law == plain_law(TARGET, 4)
    assert taken.count > 0


# -------------------------------------------------------------------------------------- biased uses of branches

NARROW: dict[str, Any] = {"tokens": 4, "depth": 1, "most": 1, "ahead": 2, "branching": 9, "rejection": True}


def keep_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches keep the distributions that their tokens were drawn from."""

    def kept(proposal: Proposal, **_changes: object) -> Proposal:
        return proposal

    monkeypatch.setattr(branches, "replace", kept)


@pytest.mark.slow
def test_choosing_a_branch_by_its_own_token_is_biased_if_it_counts_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branch tokens count as not drawn, so choosing a branch by its own token adds no bias."""

    def picky() -> Taken:
        return Taken(lambda proposal: proposal.tokens[0] != 0)

    law = law_of(TARGET, DRAFT, copies=True, drafter=DrawnBranching, spoil=picky(), **NARROW)
    assert law == plain_law(TARGET, 4)
    keep_probs(monkeypatch)
    honest = law_of(TARGET, DRAFT, copies=True, drafter=DrawnBranching, spoil=Taken(), **NARROW)
    assert honest == plain_law(TARGET, 4)
    biased = law_of(TARGET, DRAFT, copies=True, drafter=DrawnBranching, spoil=picky(), **NARROW)
    assert biased != plain_law(TARGET, 4)


@pytest.mark.slow
def test_proposing_an_alternative_as_a_drawn_token_is_biased() -> None:
    """Under the rejection rule an alternative only names the text that a branch follows; it is never verified."""

    def spoil(loop: Any) -> None:
        land = loop._land

        def other_first() -> Any:
            landed = land()
            for index, each in enumerate(loop._pending[:1]):
                other = second_choice(each.piece.proposal, each.place, SIZE)
                if other is not None and each.place == 0 and not each.piece.evaluated:
                    loop._pending[index] = replace(each, token=other)
                    del loop._pending[1:]
            return landed

        loop._land = other_first

    law = law_of(TARGET, DRAFT, drafter=Branching, spoil=spoil, **NARROW)
    assert law != plain_law(TARGET, 4)


class Noisy(Branching):
    """Draws one of two tokens with noise that belongs to a place, as Chooser does, and to the flight if ``fresh``.

    The confidence in its third token depends on its second token, and so does the start of its one branch.
    """

    fresh = True

    def __init__(self, decisions: Decisions, draft: Conditional, *, copies: bool, lengths: Sequence[int]) -> None:
        super().__init__(decisions, draft, copies=copies, lengths=lengths)
        self._noise: dict[tuple[int, int], int] = {}

    def _drawn(self, own: Sequence[Fraction], position: int, stream: int) -> int:
        place = (stream if self.fresh else 0, position)
        if place not in self._noise:
            self._noise[place] = self._decisions.draw([(half, Fraction(1, 2)) for half in range(2)])
        return next(token for token in range(SIZE) if 2 * sum(own[: token + 1]) > self._noise[place])

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        proposal = super().propose(context, depth, gate)
        if len(proposal.tokens) < 3:
            return proposal
        return replace(proposal, confidences=(0.9, 0.9, 0.1 if proposal.tokens[1] == 0 else 0.9))


class Stale(Noisy):
    """Draws a place again with the same noise as the first time."""

    fresh = False


def quarters(*parts: int) -> list[Fraction]:
    assert sum(parts) == 4
    return [Fraction(part, 4) for part in parts]


def either(_prefix: tuple[int, ...]) -> list[Fraction]:
    return quarters(2, 2, 0)


def narrow_target(prefix: tuple[int, ...]) -> list[Fraction]:
    return quarters(1, 3, 0) if len(prefix) in (1, 2) else quarters(4, 0, 0)


@pytest.mark.parametrize("drafter", [Noisy, Stale])
def test_drafting_a_place_again_with_the_same_noise_is_biased(drafter: type[Noisy]) -> None:
    """A missing branch depends on the noise that drafted its place, so that noise must not be used twice."""
    options: dict[str, Any] = {"tokens": 5, "depth": 2, "most": 0, "ahead": 3, "branching": 1, "rejection": True}
    law = law_of(narrow_target, either, drafter=drafter, lengths=(3, *[1] * 9), **options)
    assert (law == plain_law(narrow_target, 5)) is (drafter is Noisy)


def test_each_flight_uses_a_different_noise_stream() -> None:
    streams: list[tuple[int, int]] = []

    class Watched(Branching):
        loop: PipelinedLoop

        def branch(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
            return NOTHING  # no token is drawn

        def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
            streams.append((self.loop._chooser.draft_stream, context.committed_length))
            return super().propose(context, depth, gate)

    ended: list[PipelinedLoop] = []

    def spoil(loop: Any) -> None:
        loop._drafter.loop = loop
        ended.append(loop)

    law_of(narrow_target, either, drafter=Watched, spoil=spoil, copies=True, **NARROW)
    assert all(stream == committed for stream, committed in streams)
    assert len(set(streams)) > 1
    assert all(loop._chooser.draft_stream == 0 for loop in ended)
