"""The cache and the forwards that a graph of each kind needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from edgespec.files.onnx.interface import ROWS, SHARED, WHOLE
from edgespec.interfaces.rows import IdArray, LogitsArray
from edgespec.runtimes.onnx.session import OnnxWeights, StopFlag
from edgespec.runtimes.onnx.shared import SharedContext
from edgespec.runtimes.onnx.static import StaticContext
from edgespec.runtimes.onnx.whole import WholeContext

__all__ = ["OnnxContext", "open_context"]


class OnnxContext(Protocol):
    """One cache and the buffers of its forwards, over a session that other contexts use as well.

    Used on the Sequence's worker thread only, except that reading a row is safe wherever the Rows are.
    """

    def decode(self, ids: IdArray, position: int, rows: int) -> int:
        """Feed ``ids`` from ``position`` on and score the last ``rows``; returns where ``row`` has the first of them.

        Positions before ``position`` were fed before, later ones are forgotten. Whatever happens, the cache before
        ``position`` stays as it is. At most PREFILL_CHUNK_TOKENS ids and MAX_SCORED_ROWS rows. Raises CancelledError,
        ForwardError, ClosedError, MemoryLimitError.
        """

    def row(self, index: int) -> LogitsArray:
        """A view of one row of the last decode's scores: float32 (rows of the head,)."""

    def free(self) -> None:
        """Let go of the cache and of the session. Idempotent."""


def open_context(weights: OnnxWeights, context_length: int, pad_to: int, stop: StopFlag) -> OnnxContext:
    """An empty cache for ``context_length`` tokens; forwards have at least ``pad_to``. Raises MemoryLimitError."""
    return _CONTEXTS[weights.artefact.cache](weights, context_length, pad_to, stop)


_CONTEXTS: Mapping[str, Callable[[OnnxWeights, int, int, StopFlag], OnnxContext]] = {
    SHARED: SharedContext,
    WHOLE: WholeContext,
    ROWS: StaticContext,
}
