"""The prediction that a benchmark is held against."""

from __future__ import annotations

import pytest

from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import Curve, DraftCost, expected_tokens, round_seconds
from edgespec.planning.cost.round_simulation import SimulatedPair, expected_pipelined
from edgespec.planning.predicted_rates import predicted_rates
from tests.support.simulated_decoding import FLAT as GENTLE
from tests.support.simulated_decoding import STEEP


def pair(curve: Curve) -> SimulatedPair:
    return SimulatedPair(curve=curve, draft=DraftCost(token_s=0.007), acceptance=(0.8,))


def test_what_a_benchmark_may_expect() -> None:
    found = predicted_rates(GENTLE, 0.007, 0.8, 5)
    assert found.plain_tokens_per_s == pytest.approx(1 / 0.028)
    by_depth = {
        d: expected_tokens([0.8] * d) / round_seconds(GENTLE, DraftCost(token_s=0.007), d) for d in range(1, 6)
    }
    assert found.serial_tokens_per_s == pytest.approx(max(by_depth.values()))
    assert found.serial_depth == max(by_depth, key=by_depth.__getitem__)
    assert found.pipelined == expected_pipelined(pair(GENTLE), 5)
    assert found.pipelined_tokens_per_s == found.pipelined.tokens_per_s
    assert found.gain_over_serial == pytest.approx(found.pipelined_tokens_per_s / found.serial_tokens_per_s)


def test_a_benchmark_may_say_what_is_in_the_way() -> None:
    free, far = (predicted_rates(GENTLE, 0.007, [0.8, 0.7], 5, hand_over_s=s) for s in (0.0, 0.01))
    assert far.serial_tokens_per_s < free.serial_tokens_per_s
    assert far.pipelined_tokens_per_s < free.pipelined_tokens_per_s
    crowded = predicted_rates(GENTLE, 0.007, [0.8, 0.7], 5, contention=Contention(target_factor=2.0))
    assert crowded.serial_tokens_per_s == free.serial_tokens_per_s
    assert crowded.pipelined_tokens_per_s < free.pipelined_tokens_per_s
    everything = predicted_rates(STEEP, 0.007, 0.8, 5, window="all")
    assert everything.pipelined == expected_pipelined(pair(STEEP), 5, window="all")
    with pytest.raises(ValueError, match="plain decoding"):
        predicted_rates(GENTLE, 0.007, 0.8, 0)
    with pytest.raises(ValueError, match="acceptance"):
        predicted_rates(GENTLE, 0.007, 1.5, 2)
