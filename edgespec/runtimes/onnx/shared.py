"""Forwards over a cache that stays in place.

Keys and values live in arrays of the full context length, bound as past and as present: attention writes new rows in
place, copies nothing, and ignores everything beyond the length it receives. So a rewind only lowers the length.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgespec.interfaces.rows import IdArray
from edgespec.runtimes.onnx.session import OnnxWeights, PaddedContext, StopFlag, bind, forward_errors
from edgespec.runtimes.sequence import MAX_SCORED_ROWS


class SharedContext(PaddedContext):
    """A cache that stays in place, bound to a session that other contexts share."""

    def __init__(self, weights: OnnxWeights, context_length: int, pad_to: int, stop: StopFlag) -> None:
        super().__init__(weights, pad_to, stop)
        artefact = weights.artefact
        # The padding after the last token needs a position as well.
        capacity = artefact.static_cache or context_length + pad_to - 1
        shape = [1, artefact.head_count_kv, capacity, artefact.key_length]
        names = [f"{layer}.{part}" for layer in range(artefact.block_count) for part in ("key", "value")]
        try:
            # Zeros, in pages that take no memory before they are written.
            self._caches = {name: np.zeros(shape, dtype=np.float32) for name in names}
            self._logits = np.empty((MAX_SCORED_ROWS, artefact.rows), dtype=np.float32)
        except (MemoryError, ValueError) as error:  # ValueError: more elements than an array can have
            raise self._no_memory(context_length, capacity * artefact.kv_bytes_per_token) from error
        self._last_position = np.zeros(1, dtype=np.int32)
        self._total_length = np.zeros((), dtype=np.int32)
        self._binding: Any = weights.session.io_binding()
        for name, array in self._caches.items():
            bind(self._binding.bind_output, f"present.{name}", array)
        self._bind_lasting_inputs()

    def _bind_lasting_inputs(self) -> None:
        """Bind everything whose address and shape never change."""
        bind(self._binding.bind_input, "seqlens_k", self._last_position)
        bind(self._binding.bind_input, "total_sequence_length", self._total_length)
        bind(self._binding.bind_input, "first_row", self._first_row)
        for name, array in self._caches.items():
            bind(self._binding.bind_input, f"past_key_values.{name}", array)

    def decode(self, ids: IdArray, position: int, rows: int) -> int:
        weights = self._loaded()
        fed, scored = self._feed(ids, rows)
        self._total_length[...] = position + fed
        self._last_position[0] = position + fed - 1
        bind(self._binding.bind_input, "input_ids", self._ids, [1, fed])
        bind(self._binding.bind_output, "logits", self._logits, [1, scored, self._logits.shape[1]])
        if not weights.on_cpu:  # other providers copy inputs to the device when they are bound
            self._bind_lasting_inputs()
        with forward_errors(self._stop):
            self._run(weights, self._binding, fed)
        return (len(ids) - rows) - (fed - scored)

    def free(self) -> None:
        self._binding = self._weights = None
        self._caches = {}
