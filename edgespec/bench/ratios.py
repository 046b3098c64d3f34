"""How many times as fast one arm's answers were as another's: decoding alone, and whole requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from edgespec.bench.arms import AGAIN, PLAIN
from edgespec.bench.run import Answer
from edgespec.bench.statistics import Ratios

Compare = Callable[[Answer, Answer], float | None]
"""The ratio of an arm's answer to the baseline's; None if the two cannot be compared."""


def decoding(own: Answer, other: Answer) -> float | None:
    """Tokens a second divided by the baseline's."""
    if own.tokens_per_s is None or other.tokens_per_s is None:
        return None
    return own.tokens_per_s / other.tokens_per_s


def requests(own: Answer, other: Answer) -> float | None:
    """The baseline's seconds for the arm's number of tokens, divided by the arm's seconds.

    Within one numeric class both answers are equally long; in another class an answer may end elsewhere.
    """
    seconds = _request_s(other, own.tokens)
    return seconds / own.request_s if seconds and own.request_s else None


def _request_s(answer: Answer, tokens: int) -> float | None:
    """Seconds of the same request with an answer of ``tokens`` tokens; None if not known."""
    if tokens == answer.tokens or answer.ttft_s is None:
        return answer.request_s
    if tokens < 2:
        return answer.ttft_s
    return None if answer.tokens_per_s is None else answer.ttft_s + (tokens - 1) / answer.tokens_per_s


def first_token(own: Answer, other: Answer) -> float | None:
    """Seconds to the first token divided by the baseline's: above 1 is slower."""
    return own.ttft_s / other.ttft_s if own.ttft_s and other.ttft_s else None


def by_pass(answers: Sequence[Answer], name: str, against: str, compare: Compare) -> Ratios:
    """For each prompt the ratio of each ABBA pass: the geometric mean of its two halves, in which a drift cancels."""
    known = {(answer.arm, answer.prompt_id, answer.turn): answer for answer in answers}
    logs: dict[str, dict[int, list[float]]] = {}
    for answer in answers:
        other = known.get((against, answer.prompt_id, answer.turn))
        if answer.arm != name or other is None:
            continue
        ratio = compare(answer, other)
        if ratio is not None:
            logs.setdefault(answer.prompt_id, {}).setdefault(answer.turn // 2, []).append(math.log(ratio))
    return {
        prompt: [math.exp(math.fsum(both) / len(both)) for both in passes.values()] for prompt, passes in logs.items()
    }


def plain_against_itself(answers: Sequence[Answer]) -> Ratios:
    """The run's noise: the ratio of whole requests if prompts were read, else of decoding."""
    cold = any(answer.ttft_s is not None for answer in answers)
    return by_pass(answers, AGAIN, PLAIN, requests if cold else decoding)
