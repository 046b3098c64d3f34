"""Reads a Hugging Face config.json and derives the hyperparameters of a GGUF.

A setting that llama.cpp's graphs do not compute exactly is refused by name, never ignored: users would not notice a
model that loads and answers slightly wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.files.checked import Fields, read_fields
from edgespec.files.gguf.records import MASK_TOKEN_KEY

CONFIG = "config.json"
_MOST_BYTES = 1 << 20  # real files have a few kB
_MASK = "pard_token"  # in config.json of PARD's drafters (An et al., 2025)

Value: TypeAlias = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""A metadata value: uint32, float32, string or bool, or an array of int32, float32 or strings."""

_ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",  # also SmolLM
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
_BY_MODEL_TYPE: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}
_ACTIVATIONS: Mapping[str, frozenset[str]] = {
    "llama": frozenset({"silu", "swish"}),
    "qwen2": frozenset({"silu", "swish"}),
    "qwen3": frozenset({"silu", "swish"}),
    "gemma3": frozenset({"gelu_pytorch_tanh"}),
}

# The GGUF reader's limits; positions are int32 in llama.cpp and layers at most LLAMA_MAX_LAYERS.
_MOST_POSITIONS, _MOST_LAYERS, _MOST_WIDTH, _MOST_FEED_FORWARD = 2**31 - 1, 512, 2**20, 2**24
_MOST_HEADS, _MOST_HEAD_WIDTH, _MOST_TOKENS = 2**14, 2**16, 2**24

# Defaults of transformers' Gemma3TextConfig, which the config.json of the larger models leaves out.
_GEMMA3_HEADS, _GEMMA3_KV_HEADS, _GEMMA3_HEAD_WIDTH = 8, 4, 256
_GEMMA3_WINDOW, _GEMMA3_ROPE_BASE, _GEMMA3_QUERY_SCALAR = 4096, 1_000_000.0, 256.0
_GEMMA3_POSITIONS = 131_072
# Fixed in llama.cpp's gemma3: every sixth layer is global, the other layers rotate by this base, and only the model
# with 62 layers (27B) scales queries by embedding length / heads instead of the head length.
_GEMMA3_PERIOD, _GEMMA3_LOCAL_BASE, _GEMMA3_27B_LAYERS = 6, 10_000.0, 62

_ROPE_BASE = 10_000.0  # transformers' default for the other architectures
_EPSILON = 1e-6  # transformers' default for all architectures
_MOST_ROPE_FACTOR = 1e6

# Supported members of a rope scaling, by its type; llama.cpp would compute any other member differently.
_ROPE_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ROPE_MEMBERS: Mapping[str, frozenset[str]] = {
    "default": _ROPE_COMMON,
    "linear": _ROPE_COMMON | {"factor"},
    "yarn": _ROPE_COMMON | {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"},
    "llama3": _ROPE_COMMON | {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary positions beyond the original training length. ``kind``: linear, yarn or llama3.

    ``original_context_length`` is that length in tokens (yarn, llama3). The frequency factors belong to llama3, the
    betas (None: llama.cpp's defaults, equal to transformers') to yarn (Peng et al., 2023).
    """

    kind: str
    factor: float
    original_context_length: int | None = None
    low_frequency_factor: float | None = None
    high_frequency_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The hyperparameters of a model. Lengths are elements, ``context_length`` and ``sliding_window`` are tokens.

    ``vocabulary_size`` (rows of the embedding) and ``tied`` (the embedding is also the head) are None if only the
    weights tell them. ``multimodal``: the text model is only a part of the folder.
    ``mask_token_id``: the folder's ``pard_token``, the mask of a drafter that drafts all tokens in one forward.
    """

    architecture: str
    context_length: int
    block_count: int
    embedding_length: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    head_length: int
    rms_epsilon: float
    rope_base: float
    rope_scaling: RopeScaling | None
    sliding_window: int | None
    vocabulary_size: int | None
    tied: bool | None
    multimodal: bool
    mask_token_id: int | None = None

    @property
    def permutes_heads(self) -> bool:
        """Whether llama.cpp rotates neighbouring pairs while transformers rotates halves of a head."""
        return self.architecture == "llama"

    @property
    def norm_offset(self) -> float:
        """The number that llama.cpp expects added to the weights of every norm."""
        return 1.0 if self.architecture == "gemma3" else 0.0

    def metadata(self) -> dict[str, Value]:
        """The GGUF keys of the architecture with their values."""
        values: dict[str, Value] = {
            "block_count": self.block_count,
            "context_length": self.context_length,
            "embedding_length": self.embedding_length,
            "feed_forward_length": self.feed_forward_length,
            "attention.head_count": self.head_count,
            "attention.head_count_kv": self.head_count_kv,
            "attention.key_length": self.head_length,
            "attention.value_length": self.head_length,
            "attention.layer_norm_rms_epsilon": self.rms_epsilon,
            "rope.freq_base": self.rope_base,
            "rope.dimension_count": self.head_length,
        }
        if self.sliding_window is not None:
            values["attention.sliding_window"] = self.sliding_window
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind != "llama3":  # llama3 scaling is a tensor, see rope_factors
            values["rope.scaling.type"] = scaling.kind
            values["rope.scaling.factor"] = scaling.factor
            stated = {
                "rope.scaling.original_context_length": scaling.original_context_length,
                "rope.scaling.yarn_beta_fast": scaling.beta_fast,
                "rope.scaling.yarn_beta_slow": scaling.beta_slow,
            }
            values |= {name: value for name, value in stated.items() if value is not None}
        own: dict[str, Value] = {} if self.mask_token_id is None else {MASK_TOKEN_KEY: self.mask_token_id}
        return {f"{self.architecture}.{name}": value for name, value in values.items()} | own


def rope_factors(config: ModelConfig) -> npt.NDArray[np.float32] | None:
    """The divisors of the rotary frequencies: float32 (head length / 2,); None without llama3 scaling.

    Long wavelengths are stretched by the factor, short wavelengths are unchanged, and the frequency is interpolated
    linearly between the two bounds (Llama 3.1: "The Llama 3 Herd of Models", Grattafiori et al., 2024).
    """
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "llama3":
        return None
    low, high, original = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_context_length
    assert low is not None
    assert high is not None
    assert original is not None
    exponents = np.arange(0, config.head_length, 2, dtype=np.float64) / config.head_length
    wavelengths = 2 * math.pi * config.rope_base**exponents
    share = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)  # 1: keep, 0: stretch
    return (1.0 / ((1.0 - share) / scaling.factor + share)).astype(np.float32)


# ---------------------------------------------------------------------------------------- reading config.json


def read_config(folder: Path) -> ModelConfig:
    """The model that ``folder``/config.json describes.

    Raises ModelFileError if the file is missing or malformed, InvalidRequestError if the model cannot be converted to
    GGUF.
    """
    whole = read_fields(folder / CONFIG, _MOST_BYTES)
    kind = _class_of(whole)
    architecture = _ARCHITECTURES[kind]
    multimodal = kind == "Gemma3ForConditionalGeneration"
    if whole.has_object("quantization_config"):
        hint = "give the folder with the original weights; --quant quantises them"
        raise InvalidRequestError(f"the weights in {folder} are quantised already", hint=hint)
    fields = (whole.member("text_config") or whole) if multimodal else whole
    gemma3 = architecture == "gemma3"
    activation = fields.text("hidden_activation" if gemma3 else "hidden_act")
    if activation is not None and activation not in _ACTIVATIONS[architecture]:
        raise _refused(fields, f"its activation is {activation[:40]!a}")

    width = fields.integer("hidden_size", 1, _MOST_WIDTH)
    layers = fields.integer("num_hidden_layers", 1, _MOST_LAYERS)
    heads = fields.integer("num_attention_heads", 1, _MOST_HEADS, _GEMMA3_HEADS if gemma3 else None)
    kv_heads = fields.integer("num_key_value_heads", 1, _MOST_HEADS, _GEMMA3_KV_HEADS if gemma3 else heads)
    head_length = fields.integer("head_dim", 2, _MOST_HEAD_WIDTH, _GEMMA3_HEAD_WIDTH if gemma3 else width // heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of the {heads} attention heads")
    if head_length % 2:
        raise fields.wrong("head_dim", "an even number")
    positions = fields.integer("max_position_embeddings", 1, _MOST_POSITIONS, _GEMMA3_POSITIONS if gemma3 else None)
    window = _gemma3_window(fields, width, layers, heads, head_length) if gemma3 else None
    if not gemma3:
        positions = min(positions, _window(fields, layers) or positions)
    rope_base, scaling = _rope(fields, architecture, positions)
    tied = whole.flag("tie_word_embeddings")
    return ModelConfig(
        architecture=architecture,
        context_length=positions,
        block_count=layers,
        embedding_length=width,
        feed_forward_length=fields.integer("intermediate_size", 1, _MOST_FEED_FORWARD),
        head_count=heads,
        head_count_kv=kv_heads,
        head_length=head_length,
        rms_epsilon=fields.number("rms_norm_eps", 0.0, 1.0, _EPSILON),
        rope_base=rope_base,
        rope_scaling=scaling,
        sliding_window=window,
        vocabulary_size=None if fields.raw("vocab_size") is None else fields.integer("vocab_size", 1, _MOST_TOKENS),
        tied=True if gemma3 and tied is None else tied,
        multimodal=multimodal,
        mask_token_id=mask_token_of(whole, _MOST_TOKENS),
    )


def mask_token_of(fields: Fields, vocabulary_size: int) -> int | None:
    """The mask of a drafter that drafts all tokens in one forward; None if the folder is another model.

    Raises ModelFileError for an id outside the vocabulary.
    """
    return None if fields.raw(_MASK) is None else fields.integer(_MASK, 0, vocabulary_size - 1)


def _class_of(fields: Fields) -> str:
    """The model's class in transformers, if it is supported."""
    named = fields.items("architectures")
    found = named[0] if named else _BY_MODEL_TYPE.get(fields.text("model_type") or "", fields.raw("model_type"))
    if not isinstance(found, str):
        raise fields.wrong("architectures", "an array of names")
    if found not in _ARCHITECTURES:
        raise InvalidRequestError(
            f"models of the architecture {found[:80]!a} cannot be converted to GGUF; "
            f"supported are {', '.join(_ARCHITECTURES)}",
            hint="`--to onnx` converts other architectures through Optimum",
        )
    return found


def _refused(fields: Fields, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{fields.path}: {what}, which llama.cpp does not compute for this architecture",
        hint="`--to onnx` converts such models through Optimum",
    )


def _window(fields: Fields, layers: int) -> int | None:
    """The sliding window of llama, mistral and qwen models, whose graphs in llama.cpp use full attention.

    Up to the window's length both compute the same, so the window becomes the context length.
    """
    kinds = _layer_types(fields, layers)
    slides = fields.flag("use_sliding_window") is not False and "sliding_attention" in (
        kinds or ["sliding_attention"]
    )
    if fields.raw("sliding_window") is None or not slides:
        return None
    return fields.integer("sliding_window", 1, _MOST_POSITIONS)


def _layer_types(fields: Fields, layers: int) -> list[str] | None:
    kinds = fields.items("layer_types")
    if kinds is None:
        return None
    if len(kinds) != layers or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.wrong("layer_types", f"full_attention or sliding_attention for each of {layers} layers")
    return kinds


def _gemma3_window(fields: Fields, width: int, layers: int, heads: int, head_length: int) -> int:
    """The sliding window, after a check of all settings that llama.cpp fixes for gemma3."""
    kinds = _layer_types(fields, layers)
    if kinds is None:
        name = "_sliding_window_pattern" if fields.raw("sliding_window_pattern") is None else "sliding_window_pattern"
        period = fields.integer(name, 1, _MOST_LAYERS, _GEMMA3_PERIOD)
        if period != _GEMMA3_PERIOD:
            raise _refused(fields, f"every {period}th layer has full attention")
    elif any((kind == "full_attention") != ((at + 1) % _GEMMA3_PERIOD == 0) for at, kind in enumerate(kinds)):
        raise _refused(fields, "its layers with full attention are not every sixth layer")
    local_base = fields.number("rope_local_base_freq", 1.0, 1e12, _GEMMA3_LOCAL_BASE)
    rope = fields.member("rope_parameters")
    if rope is not None and rope.has_object("sliding_attention"):
        local = rope.member("sliding_attention")
        assert local is not None
        local_base = local.number("rope_theta", 1.0, 1e12, _GEMMA3_LOCAL_BASE)
        if _rope_kind(local) != "default":
            raise _refused(fields, "the rotary positions of its sliding layers are scaled")
    if local_base != _GEMMA3_LOCAL_BASE:
        raise _refused(fields, f"the rotary base of its sliding layers is {local_base:g}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.raw(name) is not None:
            raise _refused(fields, f"it states {name}")
    if fields.flag("use_bidirectional_attention"):
        raise _refused(fields, "its attention is bidirectional")
    scalar = fields.number("query_pre_attn_scalar", 1e-6, 1e6, _GEMMA3_QUERY_SCALAR)
    expected = width // heads if layers == _GEMMA3_27B_LAYERS else head_length
    if scalar != expected:
        raise _refused(fields, f"its queries are scaled by {scalar:g} instead of {expected}")
    return fields.integer("sliding_window", 1, _MOST_POSITIONS, _GEMMA3_WINDOW)


# --------------------------------------------------------------------------------------------- rotary positions


def _rope(fields: Fields, architecture: str, positions: int) -> tuple[float, RopeScaling | None]:
    """The rotary base and scaling: in ``rope_parameters`` since transformers 5, in two members before."""
    default = _GEMMA3_ROPE_BASE if architecture == "gemma3" else _ROPE_BASE
    base = fields.number("rope_theta", 1.0, 1e12, default)
    rope = fields.member("rope_parameters")
    if rope is not None and rope.has_object("full_attention"):
        rope = rope.member("full_attention")
    if rope is None:
        rope = fields.member("rope_scaling")
    if fields.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
        raise _refused(fields, "only a part of each head is rotated")
    if rope is None:
        return base, None
    base = rope.number("rope_theta", 1.0, 1e12, base)
    if rope.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
        raise _refused(fields, "only a part of each head is rotated")
    kind = _rope_kind(rope)
    if kind not in _ROPE_MEMBERS or (kind == "llama3" and architecture != "llama"):
        raise _refused(fields, f"its rotary positions are scaled by {kind[:40]!a}")
    for name in rope.names():
        if name not in _ROPE_MEMBERS[kind]:
            raise _refused(fields, f"its rotary positions are scaled with {name[:40]!a}")
    return base, None if kind == "default" else _scaling(rope, kind, positions)


def _rope_kind(rope: Fields) -> str:
    return rope.text("rope_type") or rope.text("type") or "default"


def _scaling(rope: Fields, kind: str, positions: int) -> RopeScaling:
    factor = rope.number("factor", 1.0, _MOST_ROPE_FACTOR)
    if kind == "linear":
        return RopeScaling(kind=kind, factor=factor)
    if kind == "yarn":
        original = rope.integer("original_max_position_embeddings", 1, _MOST_POSITIONS, positions)
        fast, slow = (
            None if rope.raw(name) is None else rope.number(name, 0.0, 1e6) for name in ("beta_fast", "beta_slow")
        )
        return RopeScaling(kind=kind, factor=factor, original_context_length=original, beta_fast=fast, beta_slow=slow)
    original = rope.integer("original_max_position_embeddings", 1, _MOST_POSITIONS)
    low = rope.number("low_freq_factor", 0.0, _MOST_ROPE_FACTOR)
    high = rope.number("high_freq_factor", 0.0, _MOST_ROPE_FACTOR)
    if not low < high:
        raise ModelFileError(rope.path, f"low_freq_factor {low:g} is not below high_freq_factor {high:g}")
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context_length=original,
        low_frequency_factor=low,
        high_frequency_factor=high,
    )
