"""Gates that follow a test's rule and record their calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


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
