"""Reads graphs from PyTorch's tracer: constants, the cache's shape, and the module of an operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from edgespec.errors import InvalidRequestError

PAST, PRESENT = "past_key_values.", "present."


def refuse(what: str) -> InvalidRequestError:
    """The InvalidRequestError "the graph ... ``what``", where ``what`` starts with a verb."""
    return InvalidRequestError(
        f"the graph that Optimum made of this model {what}",
        hint="try `--to gguf`, which may support this architecture",
    )


def fits_float32(value: npt.NDArray[Any]) -> bool:
    """Whether float32 represents the numbers exactly."""
    return bool(np.array_equal(value.astype(np.float32).astype(np.float64), value, equal_nan=True))


def array_of(tensor: Any) -> npt.NDArray[Any]:
    """The elements of a tensor inside the graph; a tensor in any external file is refused."""
    if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
        raise refuse("has a constant in another file")
    return np.asarray(numpy_helper.to_array(tensor))


def constant_value(node: Any) -> npt.NDArray[Any]:
    """The value of a Constant node. Raises InvalidRequestError if it is not an array of numbers."""
    for each in node.attribute:
        if each.name == "value":
            return array_of(each.t)
        if each.name in ("value_int", "value_ints"):
            return np.array(helper.get_attribute_value(each), dtype=np.int64)
        if each.name in ("value_float", "value_floats"):
            return np.array(helper.get_attribute_value(each), dtype=np.float32)
    raise refuse("has a constant that is not a number")


def fixed_length(value: Any, axis: int) -> int | None:
    """The length of an axis of an input or output, None if symbolic."""
    dimensions = value.type.tensor_type.shape.dim
    if len(dimensions) < max(-axis, axis + 1):
        return None
    return dimensions[axis].dim_value or None


def cache_shape(inputs: Mapping[str, Any], parts: Sequence[str]) -> tuple[int, int]:
    """The number of key-value heads and the head length, which must be equal for all layers."""
    found = {(fixed_length(inputs[f"{PAST}{part}"], 1), fixed_length(inputs[f"{PAST}{part}"], 3)) for part in parts}
    heads, width = found.pop() if len(found) == 1 else (None, None)
    if (
        heads is None
        or width is None
        or any(len(inputs[f"{PAST}{p}"].type.tensor_type.shape.dim) != 4 for p in parts)
    ):
        raise refuse("has a cache of another shape than heads, positions and elements, equal for all layers")
    return heads, width


def part_of(node: Any) -> str:
    """The part of the model that an operator belongs to, from the name of its PyTorch module."""
    if node.op_type == "Gather":
        return "embedding"
    name = node.name.lower()
    if "attn" in name or "attention" in name:
        return "attention"
    return "feed-forward" if any(sign in name for sign in ("mlp", "feed_forward", "ffn", "fc")) else "other"
