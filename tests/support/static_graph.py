"""A graph of fixed shapes with plain arrays for input and output, independent of edgespec's runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

__all__ = ["PlainStaticGraph"]


class PlainStaticGraph:
    """One cache of a static graph, whose forwards have ``width`` tokens, padded with token 0.

    Unused and padding rows of the cache are filled with 7s: the graph must not read them.
    """

    def __init__(self, path: Path, *, width: int, window: int | None = None, optimise: bool = True) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.add_free_dimension_override_by_name("tokens", width)
        if not optimise:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.width, self.window, self.length = width, window, 0
        self.inputs = {each.name: each for each in self.session.get_inputs()}
        self.cache: dict[str, npt.NDArray[np.float32]] = {
            name: np.full(each.shape, 7, np.float32)
            for name, each in self.inputs.items()
            if name.startswith("past_key_values.")
        }
        self.capacity = next(iter(self.cache.values())).shape[2]

    def forward(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Append up to ``width`` tokens; returns the last token's scores: float32 (rows of the head,)."""
        (logits, *rows), names = self.run(tokens, len(tokens) - 1)
        for name, new in zip(names, rows, strict=True):
            cache = self.cache[name.replace("new.", "past_key_values.")]
            cache[:, :, self.length : self.length + len(tokens)] = new[:, :, : len(tokens)]
        self.length += len(tokens)
        return np.array(logits[0, 0], dtype=np.float32)

    def run(self, tokens: Sequence[int], scored_row: int) -> tuple[list[Any], list[str]]:
        """The graph's outputs, logits first, and the names of the other outputs."""
        padding = self.width - len(tokens)
        feeds: dict[str, Any] = {
            "input_ids": np.array([[*tokens, *[0] * padding]], dtype=np.int64),
            "position_ids": np.array([[self.length + min(i, len(tokens) - 1) for i in range(self.width)]]),
            "scored_row": np.array([scored_row]),
            **self.cache,
        }
        for name, window in (("mask", None), ("window_mask", self.window)):
            if f"past_{name}" in self.inputs:
                feeds[f"past_{name}"], feeds[f"new_{name}"] = self._masks(window)
        names = [each.name for each in self.session.get_outputs() if each.name.startswith("new.")]
        return self.session.run(["logits", *names], feeds), names

    def _masks(self, window: int | None) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        past = np.full((1, 1, self.width, self.capacity), -np.inf, np.float32)
        new = np.full((1, 1, self.width, self.width), -np.inf, np.float32)
        for row in range(self.width):
            position = self.length + row
            first = 0 if window is None else max(0, position - window + 1)
            past[..., row, min(first, self.length) : self.length] = 0
            new[..., row, max(0, first - self.length) : row + 1] = 0
        return past, new
