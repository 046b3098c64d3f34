"""What is read from a model's metadata, whatever file it stands in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.architectures.shape import (
    Architecture,
    Facts,
    Rope,
    Shape,
    Sizes,
    TensorForm,
    UnsupportedError,
    decoder_layer,
    layer_parts,
    read_shape,
)
from edgespec.architectures.table import ARCHITECTURES
from edgespec.errors import ModelFileError

SIZES = Sizes(layers=2, context=128, width=64, inner=96, heads=4, kv_heads=2, head=16)
FUSED = replace(
    ARCHITECTURES["llama"],
    layer=decoder_layer(
        qkv=(TensorForm("attn_qkv", {"attn_q": "queries", "attn_k": "keys", "attn_v": "keys"}, "width"),),
        gated=(TensorForm("ffn_up", {"ffn_gate": "inner", "ffn_up": "inner"}, "width"),),
    ),
    biases=frozenset({"attn_qkv"}),
)


class LongArray:
    """An array that stays in its file."""

    def __init__(self, *values: int) -> None:
        self._values = values

    def values(self) -> Iterator[int]:
        return iter(self._values)


def metadata(**changes: Any) -> dict[str, Any]:
    found = {
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    return found | {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}


def tensors(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    parts = [part for number in range(2) for _, part in layer_parts(architecture, SIZES, (), number)]
    rows = {"token_embd.weight": (64, 300), "output_norm.weight": (64,), "output.weight": (64, 300)}
    return rows | {part.tensor: part.shape for part in parts}


def shape_of(
    values: dict[str, Any], architecture: Architecture = ARCHITECTURES["llama"], **more: tuple[int, ...]
) -> Shape:
    named = tensors(architecture) | {name.replace("__", "."): lengths for name, lengths in more.items()}
    return read_shape(architecture, Facts(Path("m"), "llama", values, named), 300)


def test_a_shape_lists_every_tensor_of_the_file() -> None:
    shape = shape_of(metadata())
    assert (shape.sizes, shape.rows, shape.tied) == (SIZES, 300, False)
    assert shape.tensors() == tensors(ARCHITECTURES["llama"])
    assert (shape.ropes, shape.rope_length, shape.original_context) == ((Rope(base=10000.0),), 16, 128)
    assert (shape.embedding_scale, shape.residual_scale, shape.score_scale, shape.logit_scale) == (
        1.0,
        1.0,
        0.25,
        1.0,
    )


def test_numbers_for_each_layer_are_read_if_all_are_the_same() -> None:
    assert shape_of(metadata(attention__head_count_kv=LongArray(2, 2))).sizes == SIZES
    with pytest.raises(UnsupportedError, match=r"its layers differ in their attention\.head_count_kv"):
        shape_of(metadata(attention__head_count_kv=(2, 4)))


def test_rows_of_a_stacked_matrix_are_named() -> None:
    parts = shape_of(metadata(), FUSED, blk__1__attn_qkv__bias=(128,)).layers[1].parts
    query, key, value = (parts[role] for role in ("attn_q", "attn_k", "attn_v"))
    assert [(part.first, part.rows, part.columns) for part in (query, key, value)] == [
        (0, 64, 64),
        (64, 32, 64),
        (96, 32, 64),
    ]
    assert {(part.tensor, part.bias, part.shape) for part in (query, key, value)} == {
        ("blk.1.attn_qkv.weight", "blk.1.attn_qkv.bias", (64, 128))
    }
    assert [(parts[role].first, parts[role].tensor) for role in ("ffn_gate", "ffn_up")] == [
        (0, "blk.1.ffn_up.weight"),
        (96, "blk.1.ffn_up.weight"),
    ]


def test_parts_have_the_biases_of_the_file_or_all_that_may_be() -> None:
    llama = ARCHITECTURES["llama"]
    assert {part.bias for _, part in layer_parts(llama, SIZES, ["blk.0.attn_q.bias"], 0)} == {
        None,
        "blk.0.attn_q.bias",
    }
    every = [part.bias for _, part in layer_parts(llama, SIZES, (), 0, all_biases=True)]
    assert len([bias for bias in every if bias is not None]) == 7


def test_padding_ones_in_a_shape_carry_no_information() -> None:
    shape_of(metadata(), output_norm__weight=(64, 1, 1))
    with pytest.raises(ModelFileError, match=r"tensor output_norm\.weight has shape \(64, 2\), not \(64,\)"):
        shape_of(metadata(), output_norm__weight=(64, 2))


def test_the_factors_of_a_rope_are_those_for_the_context() -> None:
    shape = replace(
        shape_of(metadata(rope__scaling__original_context_length=64)),
        ropes=(Rope(base=1e4, factors="short", long_factors="long"), Rope(base=1e4, factors="one")),
    )
    assert [rope.factors for rope in shape.in_context(64).ropes] == ["short", "one"]
    assert [rope.factors for rope in shape.in_context(65).ropes] == ["long", "one"]
    assert shape.in_context(65).sizes.context == 65
    assert all(rope.long_factors is None for rope in shape.in_context(65).ropes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_count": None}, r"does not state llama\.block_count"),
        ({"embedding_length": True}, "its embedding_length is True"),
        ({"attention__head_count": "x" * 99}, "its attention.head_count is 'xxxx"),
        ({"feed_forward_length": -1}, "its feed_forward_length is -1"),
        ({"rope__freq_base": float("inf")}, "rope.freq_base is inf: a positive number is needed"),
        ({"rope__dimension_count": 18}, "18 of 16 elements of a head cannot be rotated"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as caught:
        shape_of(metadata(**changes))
    assert len(caught.value.message) < 150
