"""What is read from a model's metadata, whatever file it stands in."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.architectures import shape as shape_module
from edgespec.architectures.shape import (
    Architecture,
    Facts,
    Rope,
    Scales,
    Shape,
    Sizes,
    TensorForm,
    UnsupportedError,
    Yarn,
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
    assert (shape.scales, shape.score_scale) == (Scales(), 0.25)


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


# ------------------------------------------------------------------------------------------------- single families

YARN: dict[str, Any] = {"rope__scaling__type": "yarn", "rope__scaling__factor": 8.0}
ORIGINAL = {"rope__scaling__original_context_length": 8}


def family_shape(architecture: str, layers: int = 8, **changes: Any) -> Shape:
    """A shape of that family, whose tensors fit."""
    found = ARCHITECTURES[architecture]
    stated = {key.replace("llama.", f"{architecture}."): value for key, value in metadata(**changes).items()}
    stated[f"{architecture}.block_count"] = layers
    sizes = replace(SIZES, layers=layers)
    parts = [part for number in range(layers) for _, part in layer_parts(found, sizes, (), number)]
    rows = {"token_embd.weight": (64, 300), "output_norm.weight": (64,)}
    facts = Facts(Path("x.gguf"), architecture, stated, rows | {part.tensor: part.shape for part in parts})
    return read_shape(found, facts, 300)


def test_every_fourth_layer_of_smollm3_rotates_nothing() -> None:
    assert [layer.turns for layer in family_shape("smollm3").layers] == [True, True, True, False] * 2
    assert all(layer.turns for layer in family_shape("mistral3").layers)


def test_windows_are_in_every_other_layer_of_gemma2_and_in_three_of_four_of_olmo3() -> None:
    assert [layer.window for layer in family_shape("gemma2", 4).layers] == [4096, 0, 4096, 0]
    assert [layer.window for layer in family_shape("gemma2", 4, attention__sliding_window=32).layers] == [
        32,
        0,
        32,
        0,
    ]
    assert [layer.window for layer in family_shape("olmo2", 4, attention__sliding_window=32).layers] == [
        32,
        32,
        32,
        0,
    ]
    assert not any(layer.window for layer in family_shape("olmo2", 4).layers)


def test_the_largest_exaone4_rotates_in_its_windows_alone() -> None:
    large = family_shape("exaone4", 64).layers
    assert [(layer.window, layer.turns) for layer in large[:4]] == [(4096, True)] * 3 + [(0, False)]
    assert all((layer.window, layer.turns) == (0, True) for layer in family_shape("exaone4").layers)
    with pytest.raises(UnsupportedError, match="sliding window of 32"):
        family_shape("exaone4", attention__sliding_window=32)


def test_caps_are_those_of_the_file_or_llama_cpps() -> None:
    scales = family_shape("gemma2").scales
    assert (scales.score_cap, scales.logit_cap) == (50.0, 30.0)
    scales = family_shape("gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=10.0).scales
    assert (scales.score_cap, scales.logit_cap) == (20.0, 10.0)


@pytest.mark.parametrize("key", shape_module._CHANGES)
def test_a_property_that_the_family_does_not_know_is_refused_by_name(key: str) -> None:
    stated = {key.replace(".", "__"): 10.0}
    with pytest.raises(UnsupportedError, match=f"it has {re.escape(key)}$"):
        family_shape("qwen2", **stated)
    family_shape("qwen2", **dict.fromkeys(stated, 0.0))


def test_yarn_keeps_fast_pairs_scales_slow_ones_and_mixes_those_between() -> None:
    yarn = Yarn(original_context=4096)
    kept = yarn.kept(10_000.0, 128)
    assert kept[0] == 1.0
    assert kept[-1] == 0.0
    assert list(kept) == sorted(kept, reverse=True)
    assert 10 < sum(0 < each < 1 for each in kept) < 40
    divisors = Rope(base=10_000.0, scale=8.0, yarn=yarn).divisors(128)
    assert (divisors[0], divisors[-1]) == (1.0, 8.0)
    assert Rope(base=10_000.0, scale=8.0).divisors(4) == (8.0, 8.0)


def test_yarn_of_a_file_has_its_context_betas_and_magnitude() -> None:
    stated = YARN
    (rope,) = family_shape("llama", **stated, rope__scaling__original_context_length=64).ropes
    assert rope.yarn == Yarn(original_context=64, fast=32.0, slow=1.0)
    assert rope.magnitude == pytest.approx(1 + 0.1 * math.log(8))
    (rope,) = family_shape("mistral3", **stated, rope__scaling__yarn_log_multiplier=1.0).ropes
    assert rope.yarn == Yarn(original_context=128)
    assert rope.magnitude == 1.0
    (rope,) = family_shape("mistral3", **stated, rope__scaling__yarn_beta_fast=4.0).ropes
    assert rope.yarn == Yarn(original_context=128, fast=4.0)
    with pytest.raises(UnsupportedError, match=r"yarn_ext_factor is 0\.5"):
        family_shape("llama", **stated, rope__scaling__yarn_ext_factor=0.5)


def test_queries_of_mistral3_grow_with_the_contexts_before_them() -> None:
    stated: dict[str, Any] = {"attention__temperature_scale": 0.5, "rope__scaling__original_context_length": 50}
    factors = family_shape("mistral3", **stated).query_factors()
    assert factors == pytest.approx((1.0, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(3)))
    assert family_shape("mistral3").query_factors() == ()
    with pytest.raises(ModelFileError, match="original_context_length"):
        family_shape("mistral3", attention__temperature_scale=0.5)


def test_positions_of_several_dimensions_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="several dimensions"):
        family_shape("glm4", rope__dimension_sections=(8, 12, 12, 0))
    assert family_shape("glm4", rope__dimension_sections=(8, 0, 0, 0)).ropes


@pytest.mark.parametrize(
    ("architecture", "stated", "says"),
    [
        ("gemma2", {"attn_logit_softcapping": 1e300}, "attn_logit_softcapping is 1e"),
        ("gemma2", {"final_logit_softcapping": 1e-30}, "a number from 0.001 to 1e"),
        ("gemma2", {"attention__sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("llama", {"rope__scaling__type": "yarn"}, "does not state llama.rope.scaling.factor"),
        ("llama", {**YARN, "rope__freq_base": 1.0}, "rope.freq_base is 1.0"),
        ("llama", {**YARN, "rope__scaling__yarn_beta_fast": 1e-320}, "yarn_beta_fast is"),
        ("llama", {**YARN, "rope__scaling__yarn_beta_slow": 1e308}, "yarn_beta_slow is"),
        ("llama", {**YARN, "rope__scaling__yarn_log_multiplier": 1e308}, "yarn_log_multiplier is"),
        ("llama", {**YARN, "rope__scaling__original_context_length": 0}, "original_context_length is 0"),
        (
            "mistral3",
            {"attention__temperature_scale": 1e308, "context_length": 9, **ORIGINAL},
            "temperature_scale is",
        ),
        (
            "mistral3",
            {"attention__temperature_scale": 0.1, "context_length": 2**31, **ORIGINAL},
            "its context is more",
        ),
    ],
)
def test_numbers_that_no_model_has_are_refused_before_anything_is_computed(
    architecture: str, stated: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelFileError, match=re.escape(says)):
        family_shape(architecture, **stated)
