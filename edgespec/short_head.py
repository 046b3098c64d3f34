"""The short head that a drafter gets by itself: the rows of its output head that text mostly needs.

For every token it proposes a drafter reads its whole output head, a third of a 0.5B model's bytes, and text uses few
of its rows (VocabTrim, Goel et al., 2025; FR-Spec, Zhao et al., 2025). Nothing has to be counted to know most of
those: a byte-pair vocabulary lists its merges in the order they were learned, which is by falling frequency. Our own
kernels keep the whole head beside them, so a text of another kind costs nothing but the time of that
(``drafters/head_watch.py``).
"""

from __future__ import annotations

from edgespec.decoding.contracts import IdArray
from edgespec.errors import EdgespecError
from edgespec.export.vocabtrim import always_kept, kept_ids
from edgespec.files.gguf_types import GgufHeader

__all__ = ["SHORT_HEAD_ROWS", "short_head_ids"]

SHORT_HEAD_ROWS = 49152

# A head that is not at least twice as long is left whole: a tenth of such a drafter's bytes would be saved.
_LEAST_RATIO = 2

# As llama.cpp names byte-pair vocabularies. Others need not be in order of frequency.
_BYTE_PAIRS = "gpt2"


def short_head_ids(header: GgufHeader) -> IdArray | None:
    """The tokens of a drafter's short head, int64 ascending; None for a model whose head had better stay whole."""
    size = header.vocabulary_size
    if header.metadata.get("tokenizer.ggml.model") != _BYTE_PAIRS or size < _LEAST_RATIO * SHORT_HEAD_ROWS:
        return None
    try:
        always = always_kept(header)
        return kept_ids({}, SHORT_HEAD_ROWS, always, vocabulary_size=size).astype("int64")
    except EdgespecError:  # a vocabulary of special tokens, say
        return None
