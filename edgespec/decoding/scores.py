"""How well a model predicts a text.

All functions are teacher-forced: a row of scores follows the text's own tokens, whatever the model would have
written. Logarithms are natural (nats) and computed in float64 from the float32 scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgespec.interfaces.model import Sequence as TokenSequence

# Every runtime scores this many tokens in one forward; with a vocabulary of 152 000 tokens the scores take 39 MB.
ROWS_AT_ONCE = 64

Logits: TypeAlias = npt.NDArray[np.float32]
Floats: TypeAlias = npt.NDArray[np.float64]


def log_softmax(logits: npt.NDArray[np.floating]) -> Floats:
    """Log-probabilities in nats, float64 with the shape of ``logits`` (..., vocabulary).

    The largest score of a row is subtracted first, so that nothing overflows. The log-probability of a score of minus
    infinity is minus infinity. Raises ValueError if a row's largest score is not finite.
    """
    scores = np.asarray(logits, dtype=np.float64)
    largest = scores.max(axis=-1, keepdims=True)
    if not np.isfinite(largest).all():
        raise ValueError("a row of scores has no finite largest score")
    shifted = scores - largest
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def token_losses(logits: Logits, tokens: Sequence[int] | npt.NDArray[np.int64]) -> Floats:
    """The loss of each token of a text: float64 (rows,), -log p(token) in nats.

    ``logits`` is (rows, vocabulary); ``tokens`` is (rows,): the text's next token for each row. Raises ValueError if
    the numbers of tokens and rows differ, or for an id outside the vocabulary.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.shape != logits.shape[:1]:
        raise ValueError(f"{len(ids)} tokens cannot follow {len(logits)} rows")
    if len(ids) and (ids.min() < 0 or ids.max() >= logits.shape[1]):
        raise ValueError(f"token ids must be in 0..{logits.shape[1] - 1}")
    losses: Floats = -log_softmax(logits)[np.arange(len(ids)), ids]
    return losses


def perplexity(losses: Sequence[float] | Floats) -> float:
    """exp of the mean loss in nats: 1 for a model that is certain and right, the vocabulary's size for uniform
    guesses.

    Jelinek, Mercer, Bahl and Baker, 1977. Raises ValueError if there are no losses.
    """
    if len(losses) == 0:
        raise ValueError("the perplexity of zero tokens is not defined")
    return float(np.exp(np.mean(np.asarray(losses, dtype=np.float64))))


def teacher_forced_rows(
    sequence: TokenSequence, tokens: Sequence[int], *, rows_at_once: int = ROWS_AT_ONCE
) -> Iterator[Logits]:
    """Yield the scores after each of ``tokens``: float32 (rows, vocabulary), at most ``rows_at_once`` rows each.

    ``sequence`` continues after its current tokens. The caller may keep the arrays. Raises what a forward raises.
    """
    for first in range(0, len(tokens), rows_at_once):
        some = tokens[first : first + rows_at_once]
        rows = sequence.forward(some, len(some))
        yield np.stack([rows.logits(index) for index in range(rows.count)])
