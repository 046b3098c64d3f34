"""The bandit over policies: what it tries, what it counts, and that it finds the best in simulation."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from edgespec.interfaces.policy import Allowance, RoundRecord
from edgespec.planning.depth.bandit import ROUNDS_PER_PULL, BanditDepth
from edgespec.planning.depth.base import FixedDepth
from tests.planning.test_depth import plain_round
from tests.support.simulated_decoding import FLAT, STEEP, Machine, Source, always, decode


class Arm(FixedDepth):
    """Remembers what it was told."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.learned: list[tuple[str, tuple[float, ...], tuple[bool, ...]]] = []
        self.records: list[RoundRecord] = []
        self.asked: list[tuple[str, int]] = []

    def allow(self, source: str, lag: int = 0) -> Allowance:
        self.asked.append((source, lag))
        return super().allow(source, lag)

    def learn(self, source: str, confidences: object, hits: object) -> None:
        self.learned.append((source, tuple(confidences), tuple(hits)))  # type: ignore[arg-type]

    def record(self, record: RoundRecord) -> None:
        self.records.append(record)


def two() -> tuple[BanditDepth, Arm, Arm]:
    plain, deep = Arm(0), Arm(3)
    return BanditDepth({"plain": plain, "deep": deep}), plain, deep


def pull(bandit: BanditDepth, speed: float = 1.0) -> str:
    """One pull of the current arm at ``speed`` times plain decoding's token a second; its name."""
    name = bandit.current
    for _ in range(ROUNDS_PER_PULL):
        assert bandit.current == name, "an arm is not left in between"
        bandit.record(plain_round(1 / speed, width=1 if name == "plain" else 4))
    return name


def test_it_needs_an_arm() -> None:
    with pytest.raises(ValueError, match="at least one arm"):
        BanditDepth({})


def test_every_arm_is_tried_once_in_order() -> None:
    bandit, *_ = two()
    assert [pull(bandit), pull(bandit)] == ["plain", "deep"]


def test_the_current_arm_decides_and_all_of_them_learn() -> None:
    bandit, plain, deep = two()
    assert bandit.allow("model").depth == 0
    assert bandit.why_off("model") == "depth 0 was asked for"
    pull(bandit)
    assert bandit.allow("model", 9).depth == 3
    assert bandit.why_off("model") is None
    bandit.learn("model", (0.5, 0.6), (True, False))
    assert (plain.asked, deep.asked) == ([("model", 0)], [("model", 9)])
    assert plain.learned == deep.learned == [("model", (0.5, 0.6), (True, False))]
    assert len(plain.records) == len(deep.records) == ROUNDS_PER_PULL
    assert bandit.plain_tokens_per_s == pytest.approx(1.0)


@pytest.mark.parametrize(("speed", "best"), [(2.0, "deep"), (0.4, "plain")])
def test_the_faster_arm_is_pulled_most_and_the_other_not_forgotten(speed: float, best: str) -> None:
    bandit, *_ = two()
    pulls = Counter(pull(bandit, speed if bandit.current == "deep" else 1.0) for _ in range(200))
    assert pulls[best] > 170
    assert sum(pulls.values()) - pulls[best] >= 2


@pytest.mark.parametrize("jump_s", [-100.0, 0.0, math.nan, math.inf, -math.inf])
def test_a_clock_that_jumps_earns_nothing(jump_s: float) -> None:
    """Tokens whose time is not known must not count, or an arm would win by the clock's mistake."""
    bandit, *_ = two()
    pulls: Counter[str] = Counter()
    for _ in range(100):
        name = bandit.current
        pulls[name] += 1
        for place in range(ROUNDS_PER_PULL):
            own = plain_round(1.0 if name == "plain" else 2.0, width=1 if name == "plain" else 4)
            bandit.record(replace(own, round_s=jump_s) if name == "deep" and place == 0 else own)
    assert pulls["plain"] > 80


@pytest.mark.parametrize(
    ("rate", "curve", "best"), [(0.9, FLAT, 3), (0.0, FLAT, 0), (0.3, STEEP, 0)], ids=["code", "hopeless", "steep"]
)
def test_in_simulation_it_comes_close_to_its_best_arm_and_not_beyond(rate: float, curve: object, best: int) -> None:
    sources, machine = [Source(text=always(rate))], Machine(curve=curve)  # type: ignore[arg-type]
    depths = (0, 1, 3, 7)
    alone = {depth: decode(FixedDepth(depth), sources, machine, tokens=3000).speedup for depth in depths}
    assert max(alone, key=alone.__getitem__) == best
    bandit = BanditDepth({str(depth): FixedDepth(depth) for depth in depths})
    answer = decode(bandit, sources, machine, tokens=3000)
    assert 0.85 * alone[best] < answer.speedup < 1.02 * alone[best]
    late = answer.records[len(answer.records) // 2 :]
    assert statistics.mode(record.proposed for record in late) == best
