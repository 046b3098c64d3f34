"""GGUF blocks in the layout of MatMulNBits: exact types are lossless, other types are rounded correctly."""

from __future__ import annotations

import warnings
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgespec.export.onnx.weights import BLOCK, PackedRows, can_read, exact_bits, float_rows, pack_rows
from tests.support.tiny_onnx import random_blocks

EXACT = [("Q4_0", 4), ("Q5_0", 8), ("Q8_0", 8), ("IQ4_NL", 8)]
ROUNDED = ["Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32"]


def unpack_rows(packed: PackedRows, bits: int) -> npt.NDArray[np.float32]:
    """The weights that MatMulNBits sees: float32 (rows, columns)."""
    weights = packed.weights
    if bits == 4:
        weights = np.stack([weights & 15, weights >> 4], axis=-1).reshape(*weights.shape[:2], BLOCK)
    values = (weights.astype(np.float32) - np.float32(1 << (bits - 1))) * packed.scales[..., None].astype(np.float32)
    return values.reshape(len(weights), -1)


def source(kind: str, rows: int = 7, columns: int = 512) -> npt.NDArray[np.uint8]:
    """Rows of a ggml type as bytes."""
    if kind in ("F16", "BF16", "F32"):
        values = np.random.default_rng(1).standard_normal((rows, columns), dtype=np.float32)
        return np.ascontiguousarray(gguf.quantize(values, gguf.GGMLQuantizationType[kind])).view(np.uint8)
    return random_blocks(kind, rows, columns, 1.0)


def dequantised(raw: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    return np.asarray(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]), dtype=np.float32)


# --------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize(("kind", "bits"), EXACT)
@pytest.mark.parametrize("half", [False, True])
def test_block_types_of_scaled_integers_are_packed_without_loss(kind: str, bits: int, half: bool) -> None:
    raw = source(kind)
    packed = pack_rows(raw, kind, bits, half_scales=half)
    assert exact_bits(kind) == bits
    assert packed.weights.dtype == np.uint8
    assert packed.weights.shape == (7, 16, BLOCK * bits // 8)
    assert packed.scales.dtype == (np.float16 if half else np.float32)
    assert packed.scales.shape == (7, 16)
    assert np.array_equal(unpack_rows(packed, bits), dequantised(raw, kind))


def test_packed_scales_are_float32_by_default() -> None:
    assert pack_rows(source("Q4_0"), "Q4_0", 4).scales.dtype == np.float32


def test_q4_0_half_bytes_are_reordered_for_matmulnbits() -> None:
    """Q4_0 has weights j and j + 16 in byte j; MatMulNBits needs neighbouring weights in a byte."""
    weights = np.arange(32) % 16
    raw = np.zeros((1, 18), dtype=np.uint8)
    raw[0, :2] = np.array([1], dtype=np.float16).view(np.uint8)
    raw[0, 2:] = weights[:16] | (weights[16:] << 4)
    packed = pack_rows(raw, "Q4_0", 4)
    assert packed.weights[0, 0].tolist() == [weights[2 * i] | (weights[2 * i + 1] << 4) for i in range(16)]
    assert unpack_rows(packed, 4)[0].tolist() == (weights - 8).tolist()


def test_the_value_minus_128_of_q8_0_is_kept() -> None:
    raw = np.zeros((1, 34), dtype=np.uint8)
    raw[0, :2] = np.array([0.5], dtype=np.float16).view(np.uint8)
    raw[0, 2:5] = np.array([-128, 127, -1], dtype=np.int8).view(np.uint8)
    assert unpack_rows(pack_rows(raw, "Q8_0", 8), 8)[0, :4].tolist() == [-64, 63.5, -0.5, 0]


# ------------------------------------------------------------------------------------------------- rounded


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("half", [False, True])
def test_other_types_are_rounded_to_8_bits_by_block_maximum(kind: str, half: bool) -> None:
    assert exact_bits(kind) is None
    raw = source(kind)
    values = dequantised(raw, kind)
    packed = pack_rows(raw, kind, 8, half_scales=half)
    largest = np.abs(values.reshape(7, 16, BLOCK)).max(axis=-1)
    np.testing.assert_allclose(packed.scales.astype(np.float32), largest / 127, rtol=1e-3 if half else 1e-6)
    error = np.abs(unpack_rows(packed, 8) - values).reshape(7, 16, BLOCK).max(axis=-1)
    # Half a step; a float16 scale may be too small by 1/2048, which adds up to 127 steps for the largest weight.
    assert (error <= packed.scales.astype(np.float32) * (0.5 + (127 / 2048 if half else 1e-3))).all()


def test_rounding_to_4_bits_equals_llama_cpps_q4_0() -> None:
    values = np.random.default_rng(2).standard_normal((9, 320), dtype=np.float32)
    packed = pack_rows(values.view(np.uint8), "F32", 4)
    theirs = pack_rows(gguf.quantize(values, gguf.GGMLQuantizationType.Q4_0), "Q4_0", 4)
    assert np.array_equal(packed.weights, theirs.weights)
    np.testing.assert_allclose(packed.scales, theirs.scales, rtol=1e-3)
    halves = pack_rows(values.view(np.uint8), "F32", 4, half_scales=True)
    assert np.array_equal(halves.scales, theirs.scales.astype(np.float16))


def test_q8_0_can_be_rounded_to_4_bits() -> None:
    raw = source("Q8_0")
    step = np.abs(dequantised(raw, "Q8_0").reshape(7, 16, BLOCK)).max(axis=-1) / 8
    error = np.abs(unpack_rows(pack_rows(raw, "Q8_0", 4), 4) - dequantised(raw, "Q8_0")).reshape(7, 16, BLOCK)
    assert (error.max(axis=-1) <= step * 1.001).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_of_zeros_is_packed_as_zeros(bits: int) -> None:
    packed = pack_rows(np.zeros((2, 4 * 64), dtype=np.uint8), "F32", bits)
    assert not unpack_rows(packed, bits).any()
    assert not packed.scales.any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("half", [False, True])
def test_nan_and_infinite_weights_show_in_the_scales_without_warning(bits: int, bad: float, half: bool) -> None:
    values = np.ones((1, 64), dtype=np.float32)
    values[0, 40] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed = pack_rows(values.view(np.uint8), "F32", bits, half_scales=half)
    assert np.isfinite(packed.scales[0]).tolist() == [True, False]


def test_float_types_are_read_as_float32() -> None:
    for kind in ("F32", "F16", "BF16"):
        values = float_rows(source(kind), kind)
        assert values.dtype == np.float32
        assert np.array_equal(values, dequantised(source(kind), kind))


def test_can_read_names_the_readable_ggml_types() -> None:
    assert all(can_read(kind) for kind in ["F32", "F16", "BF16", "Q4_0", "Q6_K", "IQ4_XS", "MXFP4"])
    assert not any(can_read(kind) for kind in ["I32", "F64", "Q2_0"])


# -------------------------------------------------------------------------------------------- the operator


def multiplied(values: npt.NDArray[np.float32], packed: PackedRows, bits: int) -> npt.NDArray[np.float32]:
    """The product by ONNX Runtime's MatMulNBits, with float32 activations and the default zero point."""
    rows, blocks, _ = packed.weights.shape
    attributes: dict[str, Any] = {"K": blocks * BLOCK, "N": rows, "bits": bits, "block_size": BLOCK}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, "tokens", blocks * BLOCK))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, "tokens", rows))],
        initializer=[
            numpy_helper.from_array(packed.weights, "w"),
            numpy_helper.from_array(packed.scales.reshape(-1), "s"),
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], {"x": values[None]})[0][0])


@pytest.mark.parametrize(("kind", "bits"), [*EXACT, ("F32", 4), ("F32", 8)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_matmulnbits_multiplies_by_the_packed_weights(kind: str, bits: int, tokens: int) -> None:
    packed = pack_rows(source(kind), kind, bits)
    values = np.random.default_rng(3).standard_normal((tokens, 512), dtype=np.float32)
    wanted = values @ unpack_rows(packed, bits).T
    np.testing.assert_allclose(multiplied(values, packed, bits), wanted, atol=2e-3 * np.abs(wanted).max())
