"""Checks that a graph has exactly the inputs and outputs that the runtime binds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from edgespec.files.checked import shown
from edgespec.files.export_folder import bad_file
from edgespec.files.onnx.artefact import OnnxArtefact
from edgespec.files.onnx.parser import FLOAT, INT32, INT64, OnnxGraph, ValueInfo

KEPT_IDS = "kept_ids"  # the output with the token of each row of a trimmed head

# How a graph takes and returns keys and values. Shared: arrays of the cache's full length, bound both as past and as
# present. Whole: each forward takes the past rows and returns a new array, with the new rows appended.
# Rows: arrays of a fixed length are inputs, only the new rows are outputs, and the caller writes them into the cache.
SHARED, WHOLE, ROWS = "shared", "whole", "rows"
CACHES = (SHARED, WHOLE, ROWS)

# An element type and a shape by name; a symbolic length is None.
Wanted: TypeAlias = Mapping[str, tuple[int, tuple[int | None, ...]]]


def check_interface(artefact: OnnxArtefact, graph: OnnxGraph) -> None:
    """Raise ModelFileError unless inputs and outputs are exactly those of the graph's kind of cache."""
    if artefact.key_length != artefact.value_length:
        raise bad_file(artefact.graph_path, "keys and values of different lengths are not supported")
    inputs, outputs = _WANTED[artefact.cache](artefact)
    if artefact.kept is not None:
        outputs = {**outputs, KEPT_IDS: (INT64, (artefact.kept,))}
    _compare(artefact.graph_path, "input", graph.inputs, inputs)
    _compare(artefact.graph_path, "output", graph.outputs, outputs)


def _shared(artefact: OnnxArtefact) -> tuple[Wanted, Wanted]:
    cache = (FLOAT, (1, artefact.head_count_kv, artefact.static_cache, artefact.key_length))
    inputs = {
        "input_ids": (INT64, (1, None)),
        "seqlens_k": (INT32, (1,)),
        "total_sequence_length": (INT32, ()),
        "first_row": (INT64, (1,)),
        **dict.fromkeys(_names(artefact, "past_key_values"), cache),
    }
    outputs = {
        "logits": (FLOAT, (1, None, artefact.rows)),
        **dict.fromkeys(_names(artefact, "present"), cache),
    }
    return inputs, outputs


def _whole(artefact: OnnxArtefact) -> tuple[Wanted, Wanted]:
    if artefact.static_cache is not None:
        raise bad_file(artefact.graph_path, f"a cache of the kind {WHOLE} must have no fixed length")
    cache = (FLOAT, (1, artefact.head_count_kv, None, artefact.key_length))
    inputs = {
        "input_ids": (INT64, (1, None)),
        "first_row": (INT64, (1,)),
        **dict.fromkeys(_names(artefact, "past_key_values"), cache),
    }
    outputs = {
        "logits": (FLOAT, (1, None, artefact.rows)),
        **dict.fromkeys(_names(artefact, "present"), cache),
    }
    return inputs, outputs


def _rows(artefact: OnnxArtefact) -> tuple[Wanted, Wanted]:
    capacity, heads, length = artefact.static_cache, artefact.head_count_kv, artefact.key_length
    if capacity is None:
        raise bad_file(artefact.graph_path, f"a cache of the kind {ROWS} needs a fixed length, and none is stated")
    masks = ("mask",) if artefact.window is None else ("mask", "window_mask")
    inputs = {
        "input_ids": (INT64, (1, None)),
        "position_ids": (INT64, (1, None)),
        "scored_row": (INT64, (1,)),
        **{f"past_{mask}": (FLOAT, (1, 1, None, capacity)) for mask in masks},
        **{f"new_{mask}": (FLOAT, (1, 1, None, None)) for mask in masks},
        **dict.fromkeys(_names(artefact, "past_key_values"), (FLOAT, (1, heads, capacity, length))),
    }
    outputs = {
        "logits": (FLOAT, (1, 1, artefact.rows)),
        **dict.fromkeys(_names(artefact, "new"), (FLOAT, (1, heads, None, length))),
    }
    return inputs, outputs


_WANTED = {SHARED: _shared, WHOLE: _whole, ROWS: _rows}


def _names(artefact: OnnxArtefact, prefix: str) -> list[str]:
    return [f"{prefix}.{layer}.{part}" for layer in range(artefact.block_count) for part in ("key", "value")]


def _compare(path: Path, what: str, found: Mapping[str, ValueInfo], wanted: Wanted) -> None:
    for name in sorted(wanted.keys() ^ found.keys()):
        raise bad_file(
            path, f"it has no {what} {name}" if name in wanted else f"it has the unexpected {what} {shown(name)}"
        )
    for name, (kind, shape) in wanted.items():
        value = found[name]
        if value.kind != kind or len(value.shape) != len(shape):
            raise bad_file(path, f"its {what} {name} has the wrong type or number of dimensions")
        for have, want in zip(value.shape, shape, strict=True):
            if have != want:
                raise bad_file(path, f"its {what} {name} has the shape {shown(str(value.shape))} instead of {shape}")
