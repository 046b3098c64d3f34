from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.architectures.shape import Sizes
from edgespec.architectures.table import ARCHITECTURES
from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.export.huggingface.config import ModelConfig, read_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 128,
    "vocab_size": 300,
}


def config(folder: Path, base: dict[str, Any] = LLAMA, /, **changes: Any) -> ModelConfig:
    document = {key: value for key, value in {**base, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(document))
    return read_config(folder)


# ------------------------------------------------------------------------------------------------ numbers


def test_a_llama_config_json_becomes_the_keys_of_a_gguf(tmp_path: Path) -> None:
    assert config(tmp_path) == ModelConfig(
        architecture=ARCHITECTURES["llama"],
        sizes=Sizes(layers=2, context=256, width=64, inner=96, heads=4, kv_heads=2, head=16),
        metadata={
            "llama.block_count": 2,
            "llama.context_length": 256,
            "llama.embedding_length": 64,
            "llama.feed_forward_length": 96,
            "llama.attention.head_count": 4,
            "llama.attention.head_count_kv": 2,
            "llama.attention.key_length": 16,
            "llama.attention.value_length": 16,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 50000.0,
            "llama.rope.dimension_count": 16,
        },
        tables={},
        vocabulary_size=300,
        tied=False,
        multimodal=False,
    )
    gemma = config(tmp_path, GEMMA).metadata
    assert gemma["gemma3.attention.sliding_window"] == 128
    assert gemma["gemma3.rope.freq_base"] == 1_000_000.0


@pytest.mark.parametrize(
    ("name", "architecture", "permutes", "offset"),
    [
        ("LlamaForCausalLM", "llama", True, 0.0),
        ("MistralForCausalLM", "llama", True, 0.0),
        ("Qwen2ForCausalLM", "qwen2", False, 0.0),
        ("Qwen3ForCausalLM", "qwen3", False, 0.0),
    ],
)
def test_transformers_classes_map_to_gguf_architectures(
    tmp_path: Path, name: str, architecture: str, permutes: bool, offset: float
) -> None:
    found = config(tmp_path, architectures=[name])
    form = found.architecture
    assert (form.name, form.neighbours, form.saved.norm_offset) == (architecture, permutes, offset)


def test_gemma_norm_weights_get_an_offset_of_one(tmp_path: Path) -> None:
    form = config(tmp_path, GEMMA).architecture
    assert (form.name, form.neighbours, form.saved.norm_offset) == ("gemma3", False, 1.0)


def test_model_type_is_used_if_config_json_has_no_class(tmp_path: Path) -> None:
    assert config(tmp_path, architectures="absent", model_type="qwen2").architecture.name == "qwen2"
    assert config(tmp_path, architectures=[], model_type="mistral").architecture.name == "llama"
    with pytest.raises(ModelFileError, match="architectures is missing"):
        config(tmp_path, architectures="absent", model_type="absent")


def test_optional_members_of_config_json_get_defaults(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        num_key_value_heads="absent",
        rms_norm_eps="absent",
        rope_theta="absent",
        vocab_size="absent",
        tie_word_embeddings="absent",
        hidden_act="absent",
    )
    assert found.sizes.kv_heads == 4
    assert found.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6
    assert found.metadata["llama.rope.freq_base"] == 10000.0
    assert (found.vocabulary_size, found.tied) == (None, None)
    assert config(tmp_path, head_dim=32).sizes.head == 32
    gemma = config(
        tmp_path,
        GEMMA,
        **dict.fromkeys(
            ["num_attention_heads", "num_key_value_heads", "head_dim", "query_pre_attn_scalar", "sliding_window"],
            "absent",
        ),
        max_position_embeddings="absent",
    )
    assert (gemma.sizes.heads, gemma.sizes.kv_heads, gemma.sizes.head) == (8, 4, 256)
    assert gemma.metadata["gemma3.attention.sliding_window"] == 4096
    assert (gemma.sizes.context, gemma.tied) == (131072, True)


def test_the_text_config_of_a_multimodal_model_is_read(tmp_path: Path) -> None:
    text = {key: value for key, value in GEMMA.items() if key != "architectures"}
    found = config(tmp_path, {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert found.multimodal
    assert (found.architecture.name, found.sizes.width, found.tied) == ("gemma3", 64, True)
    assert not config(tmp_path, GEMMA).multimodal


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, 256),
        ({"sliding_window": 128}, 128),  # Mistral 7B v0.1
        ({"sliding_window": 128, "use_sliding_window": False}, 256),  # Qwen 2.5
        ({"sliding_window": 128, "use_sliding_window": True}, 128),
        ({"sliding_window": None, "use_sliding_window": True}, 256),
        ({"sliding_window": 512}, 256),
        ({"sliding_window": 128, "layer_types": ["full_attention"] * 2}, 256),
        ({"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]}, 128),
    ],
)
def test_an_unsupported_sliding_window_limits_the_context_length(
    tmp_path: Path, changes: dict[str, Any], context: int
) -> None:
    found = config(tmp_path, **changes)
    assert found.sizes.context == context
    assert "llama.attention.sliding_window" not in found.metadata


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("name", ["BertForMaskedLM", "T5ForConditionalGeneration", "x" * 10_000])
def test_an_unknown_architecture_is_refused_with_the_supported_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        config(tmp_path, architectures=[name])
    assert "supported are llama, qwen2, qwen3, gemma3, phi3" in caught.value.message
    assert name[:40] in caught.value.message
    assert len(caught.value.message) < 400
    assert "--to onnx" in (caught.value.hint or "")


def test_a_mixture_of_experts_is_refused_with_what_converts_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="a mixture of experts, which") as caught:
        config(tmp_path, architectures=["Qwen3MoeForCausalLM"], num_experts=128)
    assert caught.value.hint == "llama.cpp's convert_hf_to_gguf.py converts it"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, "hidden_size must be"),
        ({"hidden_size": "64"}, "hidden_size must be"),
        ({"hidden_size": 2**21}, "hidden_size must be"),
        ({"num_hidden_layers": 513}, "num_hidden_layers must be"),
        ({"num_attention_heads": True}, "num_attention_heads must be a whole number"),
        ({"num_key_value_heads": 3}, "a divisor of the 4 attention heads"),
        ({"head_dim": 15}, "head_dim must be an even number, got 15"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings must be"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be"),
        ({"rope_theta": 0}, "rope_theta must be"),
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be"),
        ({"architectures": [7]}, "architectures must be an array of names"),
        ({"layer_types": ["full_attention"]}, "for each of 2 layers"),
        ({"layer_types": [["full_attention"]] * 2}, "for each of 2 layers"),
        ({"rope_scaling": "linear"}, "rope_scaling must be"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, r"rope_scaling.factor must be"),
    ],
)
def test_a_malformed_config_json_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        config(tmp_path, **changes)
    assert words in caught.value.message
    assert caught.value.message.startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (LLAMA, {"hidden_act": "gelu"}, "its activation is 'gelu'"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "only a part of each head is rotated"),
        (LLAMA, {"rope_scaling": {"type": "longrope", "factor": 2}}, "scaled by 'longrope'"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2}}, "scaled by 'dynamic'"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 1.2}}, "with 'attention_factor'"),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "with 'llama_4_scaling"),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "only a part"),
        (LLAMA, {"final_logit_softcapping": 30.0}, "it states final_logit_softcapping"),
        (LLAMA, {"use_bidirectional_attention": True}, "its attention is bidirectional"),
        (LLAMA, {"query_pre_attn_scalar": 64}, "its queries are scaled by 64 instead of 16"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "it states attn_logit_softcapping"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "it states final_logit_softcapping"),
        (GEMMA, {"use_bidirectional_attention": True}, "its attention is bidirectional"),
        (GEMMA, {"query_pre_attn_scalar": 64}, "its queries are scaled by 64 instead of 32"),
        (GEMMA, {"sliding_window_pattern": 4}, "sliding window are not the usual"),
        (GEMMA, {"_sliding_window_pattern": 4}, "sliding window are not the usual"),
        (GEMMA, {"layer_types": ["sliding_attention"] * 8}, "sliding window are not the usual"),
        (GEMMA, {"rope_local_base_freq": 5000.0}, "rotary base of its sliding layers is 5000"),
        (GEMMA, {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_theta": 5000}}}, "is 5000"),
        (
            GEMMA,
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2}}},
            "positions of its sliding layers are scaled",
        ),
        (GEMMA, {"hidden_activation": "gelu"}, "its activation is 'gelu'"),
    ],
)
def test_settings_that_llama_cpp_computes_differently_are_refused(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        config(tmp_path, base, **changes)
    assert words in caught.value.message
    assert caught.value.hint


def test_quantised_hugging_face_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="quantised already"):
        config(tmp_path, quantization_config={"quant_method": "gptq"})


def test_a_gemma_with_listed_layer_types_is_read(tmp_path: Path) -> None:
    kinds = ["full_attention" if layer == 5 else "sliding_attention" for layer in range(8)]
    rope = {"full_attention": {"rope_theta": 2e6, "rope_type": "linear", "factor": 8}, "sliding_attention": {}}
    found = config(tmp_path, GEMMA, layer_types=kinds, sliding_window_pattern=6, rope_parameters=rope)
    assert found.metadata["gemma3.rope.freq_base"] == 2e6
    assert found.metadata["gemma3.rope.scaling.factor"] == 8.0


def test_only_the_largest_gemma_scales_queries_by_embedding_length(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 62, "query_pre_attn_scalar": 16}
    assert config(tmp_path, GEMMA, **changes).sizes.layers == 62
    with pytest.raises(InvalidRequestError, match="scaled by 16 instead of 32"):
        config(tmp_path, GEMMA, query_pre_attn_scalar=16)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), ("[]", "not a JSON object"), ("{", "not valid JSON"), (" " * (2 << 20), "too large")],
)
def test_a_missing_or_invalid_config_json_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFileError, match=words):
        read_config(tmp_path)


# ---------------------------------------------------------------------------------------- rotary positions


def test_the_rotary_base_is_read_from_both_formats_of_transformers(tmp_path: Path) -> None:
    new = {"rope_type": "default", "rope_theta": 7000.0}
    key = "llama.rope.freq_base"
    assert config(tmp_path, rope_theta="absent", rope_parameters=new).metadata[key] == 7000.0
    assert config(tmp_path, rope_scaling=None).metadata[key] == 50000.0
    assert config(tmp_path, rope_scaling={"rope_type": "default"}) == config(tmp_path)


def test_linear_and_yarn_scaling_become_gguf_keys(tmp_path: Path) -> None:
    linear = config(tmp_path, rope_scaling={"type": "linear", "factor": 4}).metadata
    assert linear["llama.rope.scaling.type"] == "linear"
    assert linear["llama.rope.scaling.factor"] == 4.0
    assert "llama.rope.scaling.original_context_length" not in linear
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16}
    found = config(tmp_path, architectures=["Qwen2ForCausalLM"], rope_scaling=yarn)
    assert {key: value for key, value in found.metadata.items() if ".scaling." in key} == {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 64,
        "qwen2.rope.scaling.yarn_beta_fast": 16.0,
    }
    slow = config(tmp_path, rope_scaling={"type": "yarn", "factor": 2, "beta_slow": 2}).metadata
    assert slow["llama.rope.scaling.yarn_beta_slow"] == 2.0
    assert slow["llama.rope.scaling.original_context_length"] == 256
    assert found.tables == {}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama3_rope_scaling_becomes_a_table_of_factors(tmp_path: Path) -> None:
    found = config(tmp_path, head_dim=128, rope_theta=500000.0, rope_scaling=LLAMA3)
    (factors,) = found.tables.values()
    assert (factors.dtype, factors.shape) == (np.float32, (64,))
    assert not [key for key in found.metadata if ".scaling." in key]
    # The formula of Llama 3.1's code, for one frequency at a time.
    for index, factor in enumerate(factors):
        frequency = 500000.0 ** (-2 * index / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected = frequency
        elif wavelength > 8192:
            expected = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        assert frequency / factor == pytest.approx(expected, rel=1e-6)
    assert factors[0] == 1.0
    assert factors[-1] == 8.0
    assert ((factors > 1) & (factors < 8)).any()


def test_the_scales_of_granite_become_keys(tmp_path: Path) -> None:
    names = ["GraniteForCausalLM"]
    scales = {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.05}
    found = config(tmp_path, architectures=names, logits_scaling=8, **scales).metadata
    keys = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
    assert [found[f"granite.{key}"] for key in keys] == [12.0, 0.22, 0.05, 8.0]
    plain = config(tmp_path, architectures=names).metadata
    assert [plain[f"granite.{key}"] for key in keys] == [1.0] * 4


LONG = {"type": "longrope", "long_factor": [1.5] * 6, "short_factor": [1.0] * 6}
PHI: dict[str, Any] = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 64}


def test_long_rope_scaling_becomes_two_tables_and_a_magnitude(tmp_path: Path) -> None:
    found = config(tmp_path, PHI, partial_rotary_factor=0.75, rope_scaling=LONG)
    assert {name: table.tolist() for name, table in found.tables.items()} == {
        "rope_factors_long.weight": [1.5] * 6,
        "rope_factors_short.weight": [1.0] * 6,
    }
    assert found.metadata["phi3.rope.dimension_count"] == 12
    assert found.metadata["phi3.rope.scaling.original_context_length"] == 64
    # The context is four times the original one: sqrt(1 + log(4) / log(64)).
    assert found.metadata["phi3.rope.scaling.attn_factor"] == pytest.approx(math.sqrt(1 + 1 / 3))
    stated = config(tmp_path, PHI, partial_rotary_factor=0.75, rope_scaling={**LONG, "factor": 1.0})
    assert stated.metadata["phi3.rope.scaling.attn_factor"] == 1.0


def test_invalid_long_rope_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"long_factor must be a list of 8 numbers"):
        config(tmp_path, PHI, rope_scaling=LONG)
    with pytest.raises(ModelFileError, match=r"short_factor must be a number from 1e-06"):
        config(tmp_path, PHI, rope_scaling={**LONG, "long_factor": [1.0] * 8, "short_factor": ["x"] * 8})


def test_invalid_llama3_rope_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="low_freq_factor 4 is not below high_freq_factor 4"):
        config(tmp_path, rope_scaling=LLAMA3 | {"low_freq_factor": 4.0})
    with pytest.raises(InvalidRequestError, match="scaled by 'llama3'"):
        config(tmp_path, architectures=["Qwen2ForCausalLM"], rope_scaling=LLAMA3)
