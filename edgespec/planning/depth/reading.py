"""How much of the text a drafter reads before it drafts, and what it is found to be worth while it reads.

A drafter that reads tokens which the target has written says on the way which of them it would have guessed. So one
short forward tells whether it knows this text, without a token put forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# What a share of the text is worth. The 0.5B for the 1.5B, at 168 places of Spec-Bench answers, was right in 0.81 of
# them with all of the text, 0.80 with four fifths of it, 0.68 with two fifths, 0.62 with a half of long prompts and
# 0.33 to 0.54 with a tenth or less. That share to this power is close to all of these.
_POWER = 0.25

# The fewest tokens of a longer text that drafting begins with: one slice (drafters/model.py).
LEAST_READ = 16

# Tokens of the answer that are guessed in hindsight, and those that are read where that is all the reading is for.
# Fourteen tell a text of which three tokens in four are guessed from one of which one in three is. Simulated: between
# 12 and 16, and 20 and 24, nothing changes.
HINDSIGHT = 14
LOOK = 20

# The share of the plain time of all answers that may go into looking whether the drafter knows their text. Simulated:
# with 0.8 % code is drafted late after 4 of 10 runs of twenty translations, with 1.2 % texts that the drafter hardly
# knows run at 0.982 of plain.
LOOKING = 0.009

# Tokens guessed in hindsight that what was known before is worth.
_KNOWN_BEFORE = 4.0


def worth_of(skipped: int, context: int) -> float:
    """How often a drafter that skipped so many tokens of the text is right, for each time that it would be."""
    return math.pow(1.0 - min(skipped, context) / context, _POWER)


def readings(lag: int, unread: int, context: int) -> list[int]:
    """How many tokens may be read before drafting begins: all that the drafter lacks, a half of it or a quarter.

    A drafter that skipped ``unread`` tokens of the ``context`` begins anew, unless it goes on with what it has.
    """
    if not unread:
        return [lag, *(part for part in (lag // 2, lag // 4) if part >= LEAST_READ)]
    return [context, *(part for part in (context // 2, context // 4) if part > context - unread), lag]


def rate_in_hindsight(hits: Sequence[bool], worth: float, before: float) -> float:
    """How often a drafter that had read all of the text would have been right; ``before`` is what was believed."""
    right = min(float(len(hits)), sum(hits) / worth)
    return (right + _KNOWN_BEFORE * before) / (len(hits) + _KNOWN_BEFORE)


def may_look(
    price_s: float, prompt_s: float, step_s: float, done: int, longer: Sequence[int] | None, answers: int
) -> bool:
    """Whether an answer may spend ``price_s`` on looking, after ``done`` tokens of ``step_s`` each.

    Of ``answers`` that are remembered ``longer`` are the lengths of those that came this far. Where nothing is known,
    as many tokens again are expected.
    """
    if not longer:
        return price_s <= LOOKING * (prompt_s + 2 * done * step_s)
    return sum(price_s / (prompt_s + length * step_s) for length in longer) <= LOOKING * answers
