"""Chooses the rows of a trimmed output head: the special tokens, then the most frequent tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edgespec.errors import InvalidRequestError
from edgespec.files.gguf.records import GgufHeader

TokenIds = npt.NDArray[np.int32]


# tokenizer.ggml.token_type in llama.cpp's numbering: unknown, control, user defined, byte. Normal tokens (1) are kept
# by frequency only, and unused tokens (5) occur in no text.
_KEPT_TYPES = (2, 3, 4, 6)


# Special ids, which a file may state without one of the token types above.
_NAMED_IDS = tuple(
    f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator")
)


def always_kept(header: GgufHeader) -> TokenIds:
    """Ids of the special and byte tokens, int32, ascending, which are kept whatever their count.

    Without these tokens a drafter could neither end an answer nor propose text byte by byte. Raises ModelFileError
    if the file holds no vocabulary.
    """
    types = np.fromiter(map(int, header.values("tokenizer.ggml.token_type")), dtype=np.int64)
    kept = set(np.flatnonzero(np.isin(types, _KEPT_TYPES)).tolist())
    for key in _NAMED_IDS:
        value = header.metadata.get(key)
        # Files that mean "none" write an id beyond the vocabulary.
        if isinstance(value, int) and 0 <= value < header.vocabulary_size:
            kept.add(int(value))
    return np.array(sorted(kept), dtype=np.int32)


def rank_tokens(counts: Mapping[int, int], vocabulary_size: int) -> TokenIds:
    """Every id of the vocabulary, int32 of shape (vocabulary_size,), the most frequent first.

    If counts are equal, the lower id comes first: vocabularies list tokens in the order of learning, by falling
    frequency. Raises InvalidRequestError on an id outside the vocabulary or a negative count.
    """
    return np.argsort(-_table(counts, vocabulary_size), kind="stable").astype(np.int32)


def kept_ids(counts: Mapping[int, int], size: int, always: npt.ArrayLike, *, vocabulary_size: int) -> TokenIds:
    """The ids of the rows to keep, int32 of shape (min(size, vocabulary_size),), ascending.

    ``always`` holds ids that are kept whatever their count; they count towards ``size``. Raises InvalidRequestError
    if ``size`` is smaller than ``always``, or on ids outside the vocabulary.
    """
    fixed = np.unique(np.asarray(always, dtype=np.int64))
    if fixed.size and not 0 <= int(fixed[0]) <= int(fixed[-1]) < vocabulary_size:
        raise InvalidRequestError(f"a token to be kept lies outside the vocabulary of {vocabulary_size} tokens")
    ranked = rank_tokens(counts, vocabulary_size)
    if size >= vocabulary_size:
        return np.arange(vocabulary_size, dtype=np.int32)
    least = max(1, fixed.size)
    if size < least:
        raise InvalidRequestError(
            f"{size} rows cannot hold the {fixed.size} special and byte tokens that are always kept",
            hint=f"the least for this vocabulary is {least}",
        )
    free = ranked[~np.isin(ranked, fixed)][: size - fixed.size]
    return np.sort(np.concatenate([fixed.astype(np.int32), free]))


def _table(counts: Mapping[int, int], vocabulary_size: int) -> npt.NDArray[np.int64]:
    """Counts by token id, int64 of shape (vocabulary_size,)."""
    table = np.zeros(vocabulary_size, dtype=np.int64)
    for token, count in counts.items():
        if not 0 <= token < vocabulary_size:
            raise InvalidRequestError(f"token {token} lies outside the vocabulary of {vocabulary_size} tokens")
        if count < 0:
            raise InvalidRequestError(f"token {token} is counted {count} times; a count cannot be negative")
        table[token] = count
    return table
