"""How many times as fast one arm's answers were as another's: decoding alone, and whole requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from edgespec.bench.arms import AGAIN, PLAIN
from edgespec.bench.run import Answer
from edgespec.bench.statistics import Ratios

Compare = Callable[[Answer, Answer], float | None]
"""From an arm's answer and the baseline's to their ratio; None where there is nothing to compare."""


def decoding(own: Answer, other: Answer) -> float | None:
    """Tokens a second over the baseline's."""
    if own.tokens_per_s is None or other.tokens_per_s is None:
        return None
    return own.tokens_per_s / other.tokens_per_s


def requests(own: Answer, other: Answer) -> float | None:
    """The seconds that the baseline takes for as many tokens, over the arm's own.

    In one numeric class both answers are equally long; in another one an answer may end elsewhere.
    """
    seconds = _request_s(other, own.tokens)
    return seconds / own.request_s if seconds and own.request_s else None


def _request_s(answer: Answer, tokens: int) -> float | None:
    """Of the same request, had it been answered in so many tokens; None if that is not known."""
    if tokens == answer.tokens or answer.ttft_s is None:
        return answer.request_s
    if tokens < 2:
        return answer.ttft_s
    return None if answer.tokens_per_s is None else answer.ttft_s + (tokens - 1) / answer.tokens_per_s


def first_token(own: Answer, other: Answer) -> float | None:
    """Seconds to the first token over the baseline's: above 1 is slower."""
    return own.ttft_s / other.ttft_s if own.ttft_s and other.ttft_s else None


def by_pass(answers: Sequence[Answer], name: str, against: str, compare: Compare) -> Ratios:
    """Of each prompt the ratio in each ABBA pass: the geometric mean of there and back, in which a drift cancels."""
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
    """The noise of a run, in what it measures: whole requests where the prompts were read, decoding where not."""
    cold = any(answer.ttft_s is not None for answer in answers)
    return by_pass(answers, AGAIN, PLAIN, requests if cold else decoding)
