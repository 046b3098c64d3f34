"""Log-probabilities of emitted tokens, as the target gave them before sampling changed anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgespec.interfaces.drawing import LogitsArray, highest

# The most other tokens to report: OpenAI's limit for ``top_logprobs``.
MOST_TOP = 20


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of the probability that the target gave an emitted token.

    The probability is from the softmax over the target's raw scores: before bias, penalties, temperature and
    truncation, as OpenAI's ``logprobs``. ``top`` has the likeliest tokens and their log-probabilities, the likeliest
    first, ties by lowest id; the emitted token may be among them. A token without a score has -infinity. In an answer
    that has a form, and behind a healed prompt, the softmax is over the tokens that are allowed there, and ``top``
    has no others.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprob(scores: LogitsArray, token: int, top: int) -> TokenLogprob:
    """The log-probability of ``token`` in a row of scores, and of the ``top`` likeliest tokens above -infinity.

    ``scores``: float32 of shape (vocabulary,), in natural-logarithm units. The sum is taken in float64, relative to
    the highest score (log-sum-exp): equal rows give equal bits.
    """
    peak = float(scores.max())
    total = peak + math.log(float(np.exp(scores.astype(np.float64) - peak).sum()))
    likely = highest(scores, top).tolist() if top else []
    best = [each for each in likely if scores[each] > -math.inf]
    return TokenLogprob(
        token, float(scores[token]) - total, tuple((each, float(scores[each]) - total) for each in best)
    )
