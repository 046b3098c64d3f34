"""Forwards over a cache that is an input and an output of the graph as a whole.

The graph returns the old rows and the new rows in one new array for each layer, and that array is the next forward's
past. ONNX Runtime owns the arrays, and nothing is copied except after a rewind: then the next forward first copies
the kept rows once.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ForwardError
from edgespec.interfaces.rows import IdArray
from edgespec.runtimes.onnx.session import OnnxWeights, PaddedContext, StopFlag, bind, forward_errors
from edgespec.runtimes.sequence import MAX_SCORED_ROWS


class WholeContext(PaddedContext):
    """A cache that every forward returns as a new array, over a session that other contexts share."""

    def __init__(self, weights: OnnxWeights, context_length: int, pad_to: int, stop: StopFlag) -> None:
        super().__init__(weights, pad_to, stop)
        artefact = weights.artefact
        self._context_length = context_length
        # A forward holds two copies of the cache: the old one, and one with the new rows.
        self._needed_bytes = 2 * context_length * artefact.kv_bytes_per_token
        self._heads, self._width = artefact.head_count_kv, artefact.key_length
        names = [f"{layer}.{part}" for layer in range(artefact.block_count) for part in ("key", "value")]
        try:
            self._logits = np.empty((MAX_SCORED_ROWS, artefact.rows), dtype=np.float32)
        except MemoryError as error:
            raise self._no_memory(self._context_length, self._needed_bytes) from error
        # The next forward's past: keys and values of the first ``_held`` positions.
        empty = np.zeros(self._shape(0), dtype=np.float32)
        self._past: dict[str, Any] = {name: weights.api.OrtValue.ortvalue_from_numpy(empty) for name in names}
        self._held = 0

    def _shape(self, length: int) -> list[int]:
        return [1, self._heads, length, self._width]

    def decode(self, ids: IdArray, position: int, rows: int) -> int:
        weights = self._loaded()
        fed, scored = self._feed(ids, rows)
        with forward_errors(self._stop, lambda: self._no_memory(self._context_length, self._needed_bytes)):
            if position < self._held:
                self._cut(weights, position)
            binding = self._bound(weights, fed, scored)
            self._run(weights, binding, fed)
            present = binding.get_outputs()[1:]
        wanted = self._shape(position + fed)
        for name, value in zip(self._past, present, strict=True):
            if value.shape() != wanted:
                raise ForwardError(f"the graph gave present.{name} the shape {value.shape()} instead of {wanted}")
        self._past = dict(zip(self._past, present, strict=True))
        self._held = position + fed
        return (len(ids) - rows) - (fed - scored)

    def _bound(self, weights: OnnxWeights, fed: int, scored: int) -> Any:
        binding = weights.session.io_binding()
        bind(binding.bind_input, "input_ids", self._ids, [1, fed])
        bind(binding.bind_input, "first_row", self._first_row)
        bind(binding.bind_output, "logits", self._logits, [1, scored, self._logits.shape[1]])
        for name, value in self._past.items():
            binding.bind_ortvalue_input(f"past_key_values.{name}", value)
            binding.bind_output(f"present.{name}", "cpu")  # in memory that the graph allocates
        return binding

    def _cut(self, weights: OnnxWeights, length: int) -> None:
        """Keep the first ``length`` positions only, in arrays without gaps."""
        kept = {}
        for name, value in self._past.items():
            # With one head the first positions have no gaps either; they are copied all the same, as the graph's own
            # array ends here.
            rows = _view(value, self._shape(self._held))[:, :, :length].copy()
            kept[name] = weights.api.OrtValue.ortvalue_from_numpy(rows)
        self._past, self._held = kept, length

    def free(self) -> None:
        self._weights = None
        self._past, self._held = {}, 0


def _view(value: Any, shape: list[int]) -> NDArray[np.float32]:
    """The elements of a native array, not copied: float32 of ``shape``, valid as long as ``value`` lives."""
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype=np.float32)
    elements: NDArray[np.float32] = np.ctypeslib.as_array((ctypes.c_float * count).from_address(value.data_ptr()))
    return elements.reshape(shape)
