"""The text that exported and native models predict, and distances between the scores of two models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.bench.suite import builtin_suite
from edgespec.decoding import scores
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer

TOKENS, KL_TOKENS = 4096, 512  # of the text: for the perplexity, and for the KL divergence
WINDOW = 1024  # tokens that are predicted from an empty cache
FLOAT32 = "float32"  # the name of the reference
SUITES = ("long-prompts", "ours")  # prose of several kinds, and functions of Python's standard library


def reference_settings(threads: int) -> LlamaSettings:
    """Settings of the reference, in which llama.cpp rounds nothing to fewer bits than float32."""
    return LlamaSettings(threads=threads, kv_type="f32", flash_attention=False, repack=False)


def text_to_predict() -> str:
    """The prompts of our suites, always in the same order."""
    return "\n\n".join(prompt.prompt for suite in SUITES for prompt in builtin_suite(suite))


def tokens_to_predict(model: Path, count: int) -> list[int]:
    """The first ``count`` + 1 tokens of the text. Raises RuntimeError if the text has fewer."""
    with closing(LlamaTokenizer(model)) as vocabulary:
        tokens = vocabulary.encode(text_to_predict(), add_bos=True)[: count + 1]
    if len(tokens) <= count:
        raise RuntimeError(f"the text has only {len(tokens)} tokens")
    return tokens


def windows(tokens: Sequence[int], length: int) -> Iterator[Sequence[int]]:
    """Windows that each predict ``length`` tokens from an empty cache; the last window may predict fewer.

    A window has ``length`` + 1 tokens: its last token is the first token of the next window, so that each token but
    the text's first is predicted exactly once. Raises ValueError for a length below 1.
    """
    if length < 1:
        raise ValueError(f"a window must predict at least one token, not {length}")
    for first in range(0, len(tokens) - 1, length):
        yield tokens[first : first + length + 1]


def kl_divergences(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """KL(reference || other) at each position: float64 (rows,), in nats, of scores of shape (rows, vocabulary).

    The increase of the expected loss per token if ``other`` predicts tokens of ``reference`` (Kullback and Leibler,
    1951). Infinite if ``other`` excludes a token that ``reference`` allows. Raises ValueError if the shapes differ.
    """
    if reference.shape != other.shape:
        raise ValueError(f"scores of shape {reference.shape} cannot be compared with {other.shape}")
    true, believed = scores.log_softmax(reference), scores.log_softmax(other)
    possible = np.isfinite(true)  # 0 log 0 is 0
    difference = np.subtract(true, believed, where=possible, out=np.zeros_like(true))
    # A divergence is never negative; rounding may give -1e-16.
    divergences: npt.NDArray[np.float64] = np.maximum((np.exp(true) * difference).sum(axis=-1), 0.0)
    return divergences


def agreements(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Whether both models choose the same token greedily: bool (rows,). Of equal scores the lowest id is chosen.

    Raises ValueError if the shapes differ.
    """
    if reference.shape != other.shape:
        raise ValueError(f"scores of shape {reference.shape} cannot be compared with {other.shape}")
    same: npt.NDArray[np.bool_] = reference.argmax(axis=-1) == other.argmax(axis=-1)
    return same
