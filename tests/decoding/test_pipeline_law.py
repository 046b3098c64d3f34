"""The distribution of the pipelined loop's text, computed exactly over all draws and all delays of the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.decoding.exact_runs import SIZE, law_of, positive
from tests.decoding.law import plain_law, random_conditional

TARGET, DRAFT = random_conditional(5, SIZE), random_conditional(31, SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("rejection", [False, True], ids=["keyed", "rejection"])
@pytest.mark.parametrize("copies", [False, True], ids=["drawn", "copied"])
@pytest.mark.parametrize(
    ("most", "ahead", "lengths"),
    [(1, 2, (9,)), (0, 2, (9,)), (1, 1, (9,)), (1, 2, (1, 0, 2))],
    ids=["full windows", "the first token only", "no further than the window", "chains that end early"],
)
def test_the_pipelined_law_over_two_drafts_is_the_targets(
    rejection: bool, copies: bool, most: int, ahead: int, lengths: Sequence[int]
) -> None:
    tokens = 5 if copies else 4  # drawn drafts need many more runs
    options: dict[str, Any] = {"most": most, "ahead": ahead, "copies": copies, "lengths": lengths}
    law, runs = law_of(TARGET, DRAFT, rejection=rejection, tokens=tokens, depth=1, **options)
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
