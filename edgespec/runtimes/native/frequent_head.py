"""The short head that a drafter gets by itself: the rows of its output head that text mostly needs.

For every token it proposes a drafter reads its whole output head, a third of a 0.5B model's bytes, and text uses few
of its rows (VocabTrim, Goel et al., 2025; FR-Spec, Zhao et al., 2025). Nothing has to be counted to know most of
those: a byte-pair vocabulary lists its merges in the order they were learned, which is by falling frequency. Our own
kernels keep the whole head beside them, so a text of another kind costs nothing but the time of that
(``drafters/head_coverage.py``).
"""

from __future__ import annotations

import numpy as np

from edgespec.files.gguf.records import GgufHeader
from edgespec.files.gguf.token_rows import always_kept, kept_ids
from edgespec.interfaces.rows import IdArray

# With the default pair 97.4 % of the tokens that the target writes are among these or have been in the text, and a
# step of the drafter takes 0.78 of its time; with 32768 rows 95.7 % and 0.76, with 65536 98.2 % and 0.81. Drafting is
# three tenths of a round, so that of a step three points are worth one of acceptance (docs/results/native.md).
FREQUENT_HEAD_ROWS = 49152

# A head that is not at least twice as long is left whole: a tenth of such a drafter's bytes would be saved.
_LEAST_RATIO = 2

# As llama.cpp names byte-pair vocabularies. Others need not be in order of frequency.
_BYTE_PAIRS = "gpt2"


def frequent_head_rows(header: GgufHeader) -> int | None:
    """How many rows a drafter's short head has; None for a model whose head had better stay whole."""
    if header.metadata.get("tokenizer.ggml.model") != _BYTE_PAIRS:
        return None
    return FREQUENT_HEAD_ROWS if header.vocabulary_size >= _LEAST_RATIO * FREQUENT_HEAD_ROWS else None


def frequent_head_ids(header: GgufHeader) -> IdArray:
    """The tokens of a short head, int64 (FREQUENT_HEAD_ROWS,), ascending: special ones and the first of the others.

    Raises ModelFileError.
    """
    always = always_kept(header)
    if len(always) > FREQUENT_HEAD_ROWS:  # a strange vocabulary, whose special tokens are not worth more than others
        always = always[:0]
    return kept_ids({}, FREQUENT_HEAD_ROWS, always, vocabulary_size=header.vocabulary_size).astype(np.int64)
