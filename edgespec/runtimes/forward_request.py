"""What a forward is asked for, checked and cut into native calls: the same for every runtime."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

import numpy as np

from edgespec.errors import ContextFullError, InvalidRequestError
from edgespec.interfaces.rows import IdArray

__all__ = ["MAX_SCORED_ROWS", "PREFILL_CHUNK_TOKENS", "checked_ids", "chunk_sizes"]

# Prompt tokens per native call. Larger chunks gain under 3 % on CPUs (the weights are already read once per 256
# tokens) and delay a cancel where native code does not look for one.
PREFILL_CHUNK_TOKENS = 256

# Rows one forward can score. Verification needs one more than are proposed; the scores of more rows would enlarge the
# buffers by vocabulary x 4 bytes each.
MAX_SCORED_ROWS = 64


def checked_ids(
    tokens: abc.Sequence[int], rows: int, *, length: int, context_length: int, vocabulary_size: int
) -> IdArray:
    """The tokens as int64 of shape (len(tokens),), if they may follow the ``length`` that are in the cache.

    Raises InvalidRequestError (rows or ids out of range), ContextFullError.
    """
    count = len(tokens)
    if not 0 <= rows <= min(count, MAX_SCORED_ROWS):
        raise InvalidRequestError(f"cannot score {rows} rows of {count} tokens (at most {MAX_SCORED_ROWS})")
    if length + count > context_length:
        raise ContextFullError(
            f"{count} more tokens do not fit: {length} of {context_length} are used",
            hint="a larger --context holds more",
        )
    try:
        ids = np.asarray(tokens, dtype=np.int64)  # wider than native ids, so that nothing wraps into the range
    except (OverflowError, TypeError, ValueError):
        ids = np.full(count, -1)
    if count and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary_size):
        raise InvalidRequestError(f"token ids must be in 0..{vocabulary_size - 1}")
    return ids


def chunk_sizes(count: int, rows: int) -> Iterator[int]:
    """How many tokens each native call takes of ``count``, whose last ``rows`` are scored.

    The scored rows share the last call, so no chunk ends inside them.
    """
    left = count
    while left:
        size = min(PREFILL_CHUNK_TOKENS, left)
        if 0 < left - size < rows:
            size = left - rows
        yield size
        left -= size
