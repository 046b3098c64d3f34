"""A cursor that takes tokens and gives them back at random, held against a fresh one behind the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import numpy as np

from edgespec.decoding.constraint import Cursor
from edgespec.interfaces.drawing import UintArray

# Tokens of the longest text: a fresh cursor reads all of them.
LONGEST = 40


def allowed_ids(mask: UintArray) -> list[int]:
    """The tokens that a mask allows."""
    return [int(each) for each in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def wander(
    fresh: Callable[[], Cursor], draw: random.Random, steps: int, vocabulary_size: int, stops: Collection[int]
) -> list[list[int]]:
    """The texts behind which the cursor says something else than a fresh one."""
    own, tokens, different = fresh(), list[int](), list[list[int]]()
    for _ in range(steps):
        other = fresh()
        own.at(tokens)
        other.at(tokens)
        mask, expected = own.mask, other.mask
        same = expected is None if mask is None else expected is not None and np.array_equal(mask, expected)
        following = [draw.randrange(vocabulary_size) for _ in range(2)]
        if not same or own.allows(following) != other.allows(following) or own.forced != other.forced:
            different.append(list(tokens))
        may = [each for each in (range(vocabulary_size) if mask is None else allowed_ids(mask)) if each not in stops]
        if len(tokens) < LONGEST and may and draw.random() < 0.75:
            tokens.append(draw.choice(may))
        else:
            del tokens[draw.randrange(len(tokens) + 1) :]
    return different
