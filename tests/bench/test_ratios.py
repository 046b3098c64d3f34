"""Ratios of answers, computed by hand."""

from __future__ import annotations

import pytest

from edgespec.bench.ratios import by_pass, decoding, first_token, plain_against_itself, requests
from tests.support.bench_answers import answered


def test_decoding_is_compared_by_tokens_per_second() -> None:
    assert decoding(answered("planned", decode_s=0.05), answered(decode_s=0.1)) == pytest.approx(2)
    assert decoding(answered("planned", tokens=21, decode_s=0.1), answered(decode_s=0.1)) == pytest.approx(2)
    assert decoding(answered(tokens=1), answered()) is None
    assert decoding(answered(), answered(tokens=1)) is None


def test_requests_are_compared_by_their_whole_time() -> None:
    own, plain = answered("planned", ttft_s=1.5, decode_s=0.5), answered(ttft_s=1.0, decode_s=3.0)
    assert requests(own, plain) == pytest.approx(2)
    assert requests(answered(tokens=1, ttft_s=2.0, decode_s=0.0), answered(tokens=1, ttft_s=1.0, decode_s=0.0)) == 0.5
    assert requests(own, answered()) is None, "its prompt was not read"
    assert requests(answered(), plain) is None


def test_a_request_of_another_length_is_compared_at_the_arms_length() -> None:
    # Eleven tokens, one second to the first, two in all after it: each further token takes 0.2 s.
    plain = answered(tokens=11, ttft_s=1.0, decode_s=2.0)
    assert requests(answered("llama:x", tokens=6, ttft_s=1.0, decode_s=1.0), plain) == pytest.approx(2.0 / 2.0)
    assert requests(answered("llama:x", tokens=21, ttft_s=1.0, decode_s=1.5), plain) == pytest.approx(5.0 / 2.5)
    assert requests(answered("llama:x", tokens=1, ttft_s=0.5, decode_s=0.0), plain) == pytest.approx(2.0)
    one = answered(tokens=1, ttft_s=1.0, decode_s=0.0)
    assert requests(answered("llama:x", tokens=6, ttft_s=1.0, decode_s=1.0), one) is None, "its speed is not known"


def test_first_tokens_are_compared_by_their_time() -> None:
    assert first_token(answered("planned", ttft_s=1.1), answered(ttft_s=1.0)) == pytest.approx(1.1)
    assert first_token(answered("planned", ttft_s=1.1), answered()) is None
    assert first_token(answered("planned"), answered(ttft_s=1.0)) is None


def test_a_passs_ratio_is_the_geometric_mean_of_its_two_halves() -> None:
    answers = [
        # The machine slows down: 2 and 0.5 of the same speed are 1 over the pass.
        answered(turn=0, decode_s=0.1),
        answered("planned", turn=0, decode_s=0.05),
        answered("planned", turn=1, decode_s=0.2),
        answered(turn=1, decode_s=0.1),
        answered(turn=2, decode_s=0.1),
        answered("planned", turn=2, decode_s=0.025),
        answered("planned", turn=3, decode_s=0.1),
        answered(turn=3, decode_s=0.1),
        answered("planned", prompt="without a partner", turn=3),
        answered(prompt="one token", tokens=1),
        answered("planned", prompt="one token", tokens=1),
    ]
    assert by_pass(answers, "planned", "plain", decoding) == {"p": [pytest.approx(1.0), pytest.approx(2.0)]}
    assert by_pass(answers, "plain", "planned", decoding) == {"p": [pytest.approx(1.0), pytest.approx(0.5)]}
    assert by_pass(answers, "planned", "absent", decoding) == {}
    assert by_pass(answers, "planned", "plain", requests) == {}


def test_the_noise_is_measured_in_requests_or_else_in_decoding() -> None:
    warm = [answered(decode_s=0.1), answered("again", decode_s=0.05)]
    assert plain_against_itself(warm) == {"p": [pytest.approx(2.0)]}
    cold = [answered(decode_s=0.1, ttft_s=0.9), answered("again", decode_s=0.05, ttft_s=0.95)]
    assert plain_against_itself(cold) == {"p": [pytest.approx(1.0)]}
    assert plain_against_itself(warm[:1]) == {}
