"""What an exported ONNX folder holds, once it is checked."""

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
    """A checked artefact.

    ``tokenizer_header`` is that of ``tokenizer.gguf``: all metadata of the source, no tensors. ``ids`` is int32
    (kept,), ascending, the source token of each row of a trimmed head; None where the head has all
    ``vocabulary_size`` rows. ``identity`` names the content as the manifest states it. ``weight_bytes`` counts each
    byte of weights once, ``bytes_per_forward`` those that a forward of width 1 reads. ``static_cache`` is the fixed
    length of the cache of a graph of fixed shape, None where the cache may have any length. ``cache`` tells how the
    graph takes and gives its cache: one of ``interface.CACHES``. ``window`` is for a graph that is given its
    masks: the tokens, itself included, that a token sees in layers with a window; None where there are none.
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
        """Bytes of the cache per token, all layers: it is float32."""
        return 4 * self.block_count * self.head_count_kv * (self.key_length + self.value_length)
