"""The record of a checked ONNX folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.files.gguf.records import GgufHeader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DATA_NAME = "model.onnx.data"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxArtefact:
    """A checked ONNX model.

    ``tokenizer_header`` is that of ``tokenizer.gguf``: all metadata of the source, no tensors. ``ids`` is int32
    (kept,), ascending, the source token of each row of a trimmed head; None if the head has all ``vocabulary_size``
    rows. ``identity`` is a digest of the manifest. ``weight_bytes`` counts each byte of weights once,
    ``bytes_per_forward`` the bytes that a forward of width 1 reads. ``static_cache`` is the cache's fixed length in
    tokens, None if the length is free. ``cache`` is how the graph takes and returns its cache: one of
    ``interface.CACHES``. ``window`` (for graphs with masks as inputs) is the sliding window in tokens, the current
    token included; None without one.
    """

    folder: Path
    manifest: Mapping[str, Any]
    graph_path: Path
    tokenizer_header: GgufHeader
    ids: NDArray[np.int32] | None
    identity: str
    architecture: str
    vocabulary_size: int
    kept: int | None
    context_length: int
    block_count: int
    head_count_kv: int
    key_length: int
    value_length: int
    embedding_length: int
    weight_bytes: int
    bytes_per_forward: int
    static_cache: int | None
    cache: str
    window: int | None

    @property
    def data_path(self) -> Path:
        """The file with the weights."""
        return self.graph_path.with_name(DATA_NAME)

    @property
    def rows(self) -> int:
        """Rows of the head: logits per position."""
        return self.vocabulary_size if self.kept is None else self.kept

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the float32 cache per token, all layers."""
        return 4 * self.block_count * self.head_count_kv * (self.key_length + self.value_length)
