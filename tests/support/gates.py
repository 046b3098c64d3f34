"""Gates that follow a test's rule and record their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgespec.interfaces.drafting import Choice, DraftTree


@dataclass
class Gate:
    """Admits while ``rule(confidence, entropy)``; allows ``forwards`` further forwards."""

    rule: Callable[[float, float | None], bool] = lambda confidence, entropy: True
    needs_entropy: bool = False
    forwards: int = 10**6
    asked: list[tuple[float, float | None]] = field(default_factory=list)

    def admits(self, confidence: float, entropy: float | None) -> bool:
        self.asked.append((confidence, entropy))
        return self.rule(confidence, entropy)

    def goes_on(self) -> bool:
        self.forwards -= 1
        return self.forwards >= 0


def at_least(limit: float) -> Gate:
    return Gate(lambda confidence, entropy: confidence >= limit)


def at_most_nats(limit: float) -> Gate:
    return Gate(lambda confidence, entropy: entropy is not None and entropy <= limit, needs_entropy=True)


@dataclass
class Shape(Gate):
    """Also chooses the admitted chain and the first ``ranks[i]`` alternatives of place i; keeps the trees."""

    ranks: Sequence[int] = (1,) * 9
    believed: list[float] = field(default_factory=list)
    trees: list[DraftTree] = field(default_factory=list)

    def admits(self, confidence: float, entropy: float | None) -> bool:
        if not super().admits(confidence, entropy):
            return False
        self.believed.append(0.5)
        return True

    def believes(self, confidence: float) -> float:
        return confidence

    def believes_alternative(self, odds: float) -> float:
        return odds

    def choose(self, tree: DraftTree, most: int) -> Choice:
        self.trees.append(tree)
        chain = len(self.believed)
        nodes = list(range(chain))
        for place in range(chain):
            below = [node for node in range(chain, len(tree)) if tree.parents[node] == place - 1]
            nodes += below[: self.ranks[place] if place < len(self.ranks) else 0]
        return Choice(tuple(sorted(nodes[:most])), 0.0)
