"""How well a model predicts a text.

All of it is teacher-forced: a row of scores is computed after the text's own tokens, whatever the model would have
written itself. Logarithms are natural (nats) and computed in float64 from the float32 scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgespec.interfaces.model import Sequence as TokenSequence

# What every runtime scores in one forward; of a vocabulary of 152 000 tokens that is 39 MB of scores.
ROWS_AT_ONCE = 64

Logits: TypeAlias = npt.NDArray[np.float32]
Floats: TypeAlias = npt.NDArray[np.float64]


def log_softmax(logits: npt.NDArray[np.floating]) -> Floats:
    """Log-probabilities, float64 of the shape of ``logits`` (..., vocabulary), in nats.

    The largest score of a row is subtracted first, so that nothing overflows. A score of minus infinity has the
    log-probability minus infinity. Raises ValueError where a row's largest score is not finite.
    """
    scores = np.asarray(logits, dtype=np.float64)
    largest = scores.max(axis=-1, keepdims=True)
    if not np.isfinite(largest).all():
        raise ValueError("a row of scores has no finite largest score")
    shifted = scores - largest
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def token_losses(logits: Logits, tokens: Sequence[int] | npt.NDArray[np.int64]) -> Floats:
    """What each token of a text surprised the model: float64 (rows,), -log p(token) in nats.

    ``logits`` is (rows, vocabulary), ``tokens`` (rows,): the token that follows in the text. Raises ValueError for
    another number of tokens than rows, or for an id outside the vocabulary.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.shape != logits.shape[:1]:
        raise ValueError(f"{len(ids)} tokens cannot follow {len(logits)} rows")
    if len(ids) and (ids.min() < 0 or ids.max() >= logits.shape[1]):
        raise ValueError(f"token ids must be in 0..{logits.shape[1] - 1}")
    losses: Floats = -log_softmax(logits)[np.arange(len(ids)), ids]
    return losses


def perplexity(losses: Sequence[float] | Floats) -> float:
    """exp of the mean loss in nats: 1 for a model that is always sure and right, the vocabulary's size for a guess.

    Jelinek, Mercer, Bahl and Baker, 1977. Raises ValueError if there are no losses.
    """
    if len(losses) == 0:
        raise ValueError("the perplexity of no tokens is not defined")
    return float(np.exp(np.mean(np.asarray(losses, dtype=np.float64))))


def teacher_forced_rows(
    sequence: TokenSequence, tokens: Sequence[int], *, rows_at_once: int = ROWS_AT_ONCE
) -> Iterator[Logits]:
    """The scores after each of ``tokens`` in turn: float32 (rows, vocabulary), at most ``rows_at_once`` rows each.

    ``sequence`` goes on from what it holds. The arrays are the caller's to keep. Raises what a forward raises.
    """
    for first in range(0, len(tokens), rows_at_once):
        some = tokens[first : first + rows_at_once]
        rows = sequence.forward(some, len(some))
        yield np.stack([rows.logits(index) for index in range(rows.count)])
