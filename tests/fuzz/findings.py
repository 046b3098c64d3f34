"""What a fuzzer did and found."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

# More sentences tell nothing new.
MOST_KEPT = 20


@dataclass
class Findings:
    """``counts`` of what happened, and sentences of what is wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def unless(self, holds: bool, sentence: str) -> None:
        """Keep the sentence if something does not hold."""
        if not holds:
            self.counts["wrong"] += 1
            if len(self.wrong) < MOST_KEPT:
                self.wrong.append(sentence)


Fuzzer = Callable[[random.Random, Iterable[int], Findings], None]
"""Tries once for each item of the iterable, which ends by time or after some rounds."""
