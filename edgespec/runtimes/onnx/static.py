"""Forwards of fixed shapes over a cache of fixed length, as NPUs require.

The graph takes the whole cache and returns only the rows of the new tokens; this module writes them into the cache at
their positions. Masks hide every position beyond the length, so a rewind only lowers the length. There are two
shapes: one token, and WIDE_TOKENS of a prompt, padded if fewer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.interfaces.rows import IdArray
from edgespec.runtimes.onnx.session import WIDE_TOKENS, OnnxContext, OnnxWeights, StopFlag, bind, forward_errors
from edgespec.runtimes.sequence import MAX_SCORED_ROWS

# Added to a score, it makes the score's share zero. The least number of float16, in which NPUs compute: a smaller
# number would be infinite there, and a softmax's difference of two infinities is NaN.
HIDDEN = -65504.0

# From this many tokens on, a padded chunk is faster than single tokens: with Qwen2.5-Coder-0.5B a chunk took as long
# as 4.6 tokens on the CPU provider, as 3.5 through OpenVINO (two cores of an AMD EPYC, a cache of 1024).
_WIDE_FROM = 5

FloatArray = NDArray[np.float32]


def past_mask(length: int, width: int, capacity: int, window: int | None) -> FloatArray:
    """What ``width`` tokens after ``length`` see of the cache: 0 or HIDDEN, float32 (width, capacity)."""
    positions = np.arange(capacity)
    seen = np.broadcast_to(positions < length, (width, capacity))
    if window is not None:
        seen = seen & (positions > length + np.arange(width)[:, None] - window)
    return np.where(seen, np.float32(0), np.float32(HIDDEN))


def new_mask(width: int, window: int | None) -> FloatArray:
    """What ``width`` tokens of one forward see of each other: 0 or HIDDEN, float32 (width, width)."""
    behind = np.arange(width)[:, None] - np.arange(width)
    seen = (behind >= 0) & (behind < (width if window is None else window))
    return np.where(seen, np.float32(0), np.float32(HIDDEN))


class StaticContext(OnnxContext):
    """A cache of fixed length, over sessions that other contexts share.

    Forwards have one token or WIDE_TOKENS, whatever ``pad_to`` says. Each scores one token, so several rows are
    computed one by one.
    """

    def __init__(self, weights: OnnxWeights, context_length: int, pad_to: int, stop: StopFlag) -> None:
        super().__init__(weights, stop)
        artefact = weights.artefact
        assert artefact.static_cache is not None  # checked by read_onnx_folder
        shape = (2 * artefact.block_count, artefact.head_count_kv, artefact.static_cache, artefact.key_length)
        try:
            # Zeros: a hidden row has share 0, and 0 times NaN would be NaN.
            self._cache = np.zeros(shape, dtype=np.float32)
            self._logits = np.empty((MAX_SCORED_ROWS, artefact.rows), dtype=np.float32)
            self._step = _Forward(weights, weights.session, 1, self._cache, stop)
            self._piece = _Forward(weights, weights.wide, WIDE_TOKENS, self._cache, stop)
        except (MemoryError, ValueError) as error:  # ValueError: more elements than an array can have
            needed_bytes = artefact.static_cache * artefact.kv_bytes_per_token
            hint = "export it with a smaller --static-cache"
            raise self._no_memory(context_length, needed_bytes, hint) from error

    def decode(self, ids: IdArray, position: int, rows: int) -> int:
        weights = self._loaded()
        done, alone = 0, rows if rows > 1 else 0
        while done < len(ids):
            left = len(ids) - done - alone
            forward, size = (self._piece, min(left, WIDE_TOKENS)) if left >= _WIDE_FROM else (self._step, 1)
            # Scores of the tokens before the requested rows are not needed: the first requested row overwrites them.
            row = max(0, done + size - 1 - (len(ids) - rows)) if rows else 0
            forward.run(weights, ids[done : done + size], position + done, self._cache, self._logits[row])
            done += size
        return 0

    def free(self) -> None:
        if self._weights is not None:
            self._weights = None
            del self._cache, self._step, self._piece


class _Forward:
    """Forwards of one width: the session, and buffers with fixed addresses."""

    def __init__(self, weights: OnnxWeights, session: Any, width: int, cache: FloatArray, stop: StopFlag) -> None:
        artefact = weights.artefact
        self._session, self._stop, self._width = session, stop, width
        self._window = artefact.window
        layers, heads, self._capacity, length = cache.shape
        self._new = np.empty((layers, heads, width, length), dtype=np.float32)
        self._inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros((1, width), dtype=np.int64),
            "position_ids": np.zeros((1, width), dtype=np.int64),
            "scored_row": np.zeros(1, dtype=np.int64),
            "past_mask": np.zeros((1, 1, width, self._capacity), dtype=np.float32),
            "new_mask": new_mask(width, None)[None, None],
        }
        if self._window is not None:
            self._inputs["past_window_mask"] = np.zeros_like(self._inputs["past_mask"])
            self._inputs["new_window_mask"] = new_mask(width, self._window)[None, None]
        self._binding: Any = session.io_binding()
        for layer in range(artefact.block_count):
            for which, part in enumerate(("key", "value")):
                index = 2 * layer + which
                self._inputs[f"past_key_values.{layer}.{part}"] = cache[index][None]
                bind(self._binding.bind_output, f"new.{layer}.{part}", self._new[index][None])
        self._bind_inputs()

    def _bind_inputs(self) -> None:
        for name, array in self._inputs.items():
            bind(self._binding.bind_input, name, array)

    def run(self, weights: OnnxWeights, ids: IdArray, position: int, cache: FloatArray, logits: FloatArray) -> None:
        """Feed some tokens, write their rows into ``cache``, and score the last token into ``logits``."""
        size, inputs = len(ids), self._inputs
        inputs["input_ids"][0, :size] = ids
        inputs["input_ids"][0, size:] = ids[-1]
        # Padding has no position; any existing position serves.
        inputs["position_ids"][0] = np.minimum(position + np.arange(self._width), position + size - 1)
        inputs["scored_row"][0] = size - 1
        inputs["past_mask"][0, 0] = past_mask(position, self._width, self._capacity, None)
        if self._window is not None:
            inputs["past_window_mask"][0, 0] = past_mask(position, self._width, self._capacity, self._window)
        bind(self._binding.bind_output, "logits", logits[None, None])
        if not weights.on_cpu:  # other providers copy inputs to the device when they are bound
            self._bind_inputs()
        with weights.turn, forward_errors(self._stop):
            self._session.run_with_iobinding(self._binding, self._stop.step_options)
        cache[:, :, position : position + size] = self._new[:, :, :size]
