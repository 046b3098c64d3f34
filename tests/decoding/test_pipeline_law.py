"""The distribution of the pipelined loop's text, computed exactly over all draws and all delays of the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from edgespec.interfaces.drafting import ChainGate, Context, Proposal
from tests.decoding.exact_runs import SIZE, Decisions, Drawing, law_of, positive
from tests.decoding.law import Conditional, plain_law, random_conditional

TARGET, DRAFT = random_conditional(5, SIZE), random_conditional(31, SIZE)


# Under the keyed rule the tokens are plain decoding's, which test_pipeline.py compares one by one.
@pytest.mark.slow
@pytest.mark.parametrize("copies", [False, True], ids=["drawn", "copied"])
@pytest.mark.parametrize(
    ("most", "ahead", "lengths"),
    [(1, 2, (9,)), (0, 2, (9,)), (1, 1, (9,)), (1, 2, (1, 0, 2))],
    ids=["full windows", "the first token only", "no further than the window", "chains that end early"],
)
def test_the_pipelined_law_over_two_drafts_is_the_targets(
    copies: bool, most: int, ahead: int, lengths: Sequence[int]
) -> None:
    tokens = 5 if copies else 4  # drawn drafts need many more runs
    options: dict[str, Any] = {"most": most, "ahead": ahead, "copies": copies, "lengths": lengths}
    law, runs = law_of(TARGET, DRAFT, rejection=True, tokens=tokens, depth=1, **options)
    assert positive(law) == plain_law(TARGET, tokens)
    assert runs >= len(plain_law(TARGET, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("rejection", [False, True], ids=["keyed", "rejection"])
@pytest.mark.parametrize("copies", [False, True], ids=["drawn", "copied"])
def test_the_pipelined_law_with_late_and_reused_drafts_is_the_targets(rejection: bool, copies: bool) -> None:
    law, _ = law_of(
        TARGET, DRAFT, rejection=rejection, tokens=4, depth=2, most=2, ahead=2, copies=copies, may_be_late=True
    )
    assert positive(law) == plain_law(TARGET, 4)


@pytest.mark.slow
@pytest.mark.parametrize("rejection", [False, True], ids=["keyed", "rejection"])
def test_tokens_drafted_behind_a_rejected_token_are_proposed_again(rejection: bool) -> None:
    law, _ = law_of(TARGET, DRAFT, rejection=rejection, tokens=4, depth=2, most=2, ahead=3, reuse=True)
    assert positive(law) == plain_law(TARGET, 4)


def test_dropping_a_drawn_token_by_its_value_is_detected_as_bias() -> None:
    """The same computation detects a loop with a different distribution."""

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


class Noisy(Drawing):
    """Draws one of two tokens with noise of the position, as Chooser does, and of the flight if ``fresh``."""

    fresh = True

    def __init__(self, decisions: Decisions, draft: Conditional, *, copies: bool, lengths: Sequence[int]) -> None:
        super().__init__(decisions, draft, copies=copies, lengths=lengths)
        self._noise: dict[tuple[int, int], int] = {}

    def _drawn(self, own: Sequence[Fraction], position: int, stream: int) -> int:
        key = (stream if self.fresh else 0, position)
        if key not in self._noise:
            self._noise[key] = self._decisions.draw([(half, Fraction(1, 2)) for half in range(2)])
        return next(token for token in range(SIZE) if 2 * sum(own[: token + 1]) > self._noise[key])


class Stale(Noisy):
    """Draws for a position again with the same noise as the first time."""

    fresh = False


def quarters(*parts: int) -> list[Fraction]:
    assert sum(parts) == 4
    return [Fraction(part, 4) for part in parts]


def either(_prefix: tuple[int, ...]) -> list[Fraction]:
    return quarters(2, 2, 0)


def narrow_target(prefix: tuple[int, ...]) -> list[Fraction]:
    return quarters(1, 3, 0) if len(prefix) in (1, 2) else quarters(4, 0, 0)


@pytest.mark.parametrize("drafter", [Noisy, Stale])
def test_drafting_for_a_position_again_with_the_same_noise_is_biased(drafter: type[Noisy]) -> None:
    """Whether tokens are proposed again depends on the noise that drafted them: it must not be used twice."""
    options: dict[str, Any] = {"tokens": 5, "depth": 2, "most": 0, "ahead": 3, "reuse": True, "rejection": True}
    law, _ = law_of(narrow_target, either, drafter=drafter, lengths=(3, *[1] * 9), **options)
    assert (positive(law) == plain_law(narrow_target, 5)) is (drafter is Noisy)


def test_each_flight_of_an_answer_has_another_committed_length() -> None:
    """The committed length chooses the noise of a draft."""
    flights: list[list[int]] = []

    class Watched(Drawing):
        def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
            flights[-1].append(context.committed_length)
            return super().propose(context, depth, gate)

    options: dict[str, Any] = {"tokens": 4, "depth": 1, "most": 1, "ahead": 2, "rejection": True}
    law_of(narrow_target, either, drafter=Watched, spoil=lambda _: flights.append([]), copies=True, **options)
    assert any(len(lengths) > 1 for lengths in flights)
    assert all(lengths == sorted(set(lengths)) for lengths in flights)
