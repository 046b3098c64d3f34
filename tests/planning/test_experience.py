"""What the depth policy remembers of answers: their lengths, and what drafting saved."""

from __future__ import annotations

import pytest

from edgespec.planning.depth.experience import PAYS, Experience, Lengths


def test_answer_lengths_are_known_after_a_few_answers_and_cut_by_the_budget() -> None:
    lengths = Lengths()
    assert lengths.longer_than(0, None) is None
    for tokens in (5, 7, 300, 9, 11, 400):
        lengths.known.append(tokens)
    assert lengths.longer_than(9, None) == [11, 300, 400]
    assert lengths.longer_than(9, 64) == [11, 64, 64]
    assert lengths.longer_than(500, None) == []
    for _ in range(40):
        lengths.known.append(20)
    assert lengths.longer_than(0, None) == [20] * 32


def test_a_short_answers_savings_count_as_little_as_its_tokens() -> None:
    known = Experience()
    known.learn(2.6, 4, 1)
    assert known.gain(0.4) == pytest.approx((2.6 / 6 + 2 * PAYS * 0.4) / (4 / 6 + 2))


def test_experience_follows_recent_answers_and_fades_without_trials() -> None:
    known = Experience()
    assert known.gain(0.4) == pytest.approx(PAYS * 0.4)
    for _ in range(30):
        known.learn(-2.0, 100, 10)
    assert known.gain(0.4) < 0.03
    for _ in range(200):
        known.learn(0.0, 100, 0)
    assert known.gain(0.4) > 0.2
    for _ in range(40):
        known.learn(50.0, 100, 30)
    assert known.gain(0.4) == pytest.approx(0.5, abs=0.05)
