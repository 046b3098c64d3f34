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

from edgespec.architectures.shape import (
    DEFAULT_ROPE_BASE,
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    Architecture,
    Facts,
    Sizes,
    UnsupportedError,
    read_sizes,
)
from edgespec.architectures.table import CLASSES, MODEL_TYPES
from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.files.checked import Fields, read_fields
from edgespec.files.gguf.records import MASK_TOKEN_KEY

CONFIG = "config.json"
_MOST_BYTES = 1 << 20  # real files have a few kB
_MASK = "pard_token"  # in config.json of PARD's drafters (An et al., 2025)

Value: TypeAlias = bool | int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
"""A metadata value: uint32, float32, string or bool, or an array of int32, float32 or strings."""

Table: TypeAlias = npt.NDArray[np.float32]

# The GGUF reader's limits; positions are int32 in llama.cpp and layers at most LLAMA_MAX_LAYERS.
_MOST_POSITIONS, _MOST_LAYERS, _MOST_WIDTH, _MOST_FEED_FORWARD = 2**31 - 1, 512, 2**20, 2**24
_MOST_HEADS, _MOST_HEAD_WIDTH, _MOST_TOKENS = 2**14, 2**16, 2**24

# transformers' names of the number of experts.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_EPSILON = 1e-6  # transformers' default for most architectures
_MOST_ROPE_FACTOR = 1e6
_MOST_SCALE = 1e6

# Supported members of a rope scaling, by its type, and the value that others may have because it changes nothing.
# llama.cpp would compute any other member differently.
_ROPE_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ROPE_MEMBERS: Mapping[str, frozenset[str]] = {
    "default": _ROPE_COMMON,
    "linear": _ROPE_COMMON | {"factor"},
    "yarn": _ROPE_COMMON
    | {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "max_position_embeddings"},
    "longrope": _ROPE_COMMON | {"factor", "original_max_position_embeddings", "long_factor", "short_factor"},
    "llama3": _ROPE_COMMON | {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}
_ROPE_NEUTRAL: Mapping[str, Mapping[str, object]] = {"yarn": {"truncate": True, "mscale": 1}}
_LONG_MEMBERS = {LONG_FACTORS: "long_factor", SHORT_FACTORS: "short_factor"}
# The tensors that a scaling needs.
_ROPE_TENSORS = {"llama3": frozenset({ROPE_FACTORS}), "longrope": frozenset(_LONG_MEMBERS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a config.json says. ``metadata``: the GGUF's keys of the architecture; ``tables``: tensors that the GGUF
    has in addition to the weights, by name.

    ``vocabulary_size`` (rows of the embedding) and ``tied`` (the embedding is also the head) are None if only the
    weights tell them. ``multimodal``: the text model is only a part of the folder.
    ``mask_token_id``: the folder's ``pard_token``, the mask of a drafter that drafts all tokens in one forward.
    """

    architecture: Architecture
    sizes: Sizes
    metadata: Mapping[str, Value]
    tables: Mapping[str, Table]
    vocabulary_size: int | None
    tied: bool | None
    multimodal: bool
    mask_token_id: int | None = None


def read_config(folder: Path) -> ModelConfig:
    """The model that ``folder``/config.json describes.

    Raises ModelFileError if the file is missing or malformed, InvalidRequestError if the model cannot be converted to
    GGUF.
    """
    whole = read_fields(folder / CONFIG, _MOST_BYTES)
    kind = _class_of(whole)
    architecture = CLASSES[kind]
    saved, multimodal = architecture.saved, kind in architecture.saved.multimodal
    if whole.has_object("quantization_config"):
        hint = "give the folder with the original weights; --quant quantises them"
        raise InvalidRequestError(f"the weights in {folder} are quantised already", hint=hint)
    text = (whole.member("text_config") or whole) if multimodal else whole
    fields = text.or_else(saved.defaults)
    activation = fields.text(saved.activation)
    if activation is not None and activation not in saved.activations:
        raise _refused(fields, f"its activation is {activation[:40]!a}")
    values = _numbers(fields, architecture)
    scaling, tables = _rope(fields, architecture, values)
    values |= scaling
    mask = mask_token_of(whole, _MOST_TOKENS)
    metadata: dict[str, Value] = {f"{architecture.name}.{key}": value for key, value in values.items()}
    facts = Facts(fields.path, architecture.name, metadata, {})
    sizes = read_sizes(facts)
    try:
        _refuse_others(fields, architecture, facts, sizes)
    except UnsupportedError as error:
        raise _refused(fields, str(error)) from error
    return ModelConfig(
        architecture=architecture,
        sizes=sizes,
        metadata=metadata if mask is None else {**metadata, MASK_TOKEN_KEY: mask},
        tables=tables,
        vocabulary_size=None if fields.raw("vocab_size") is None else fields.integer("vocab_size", 1, _MOST_TOKENS),
        tied=_tied(whole, text, fields),
        multimodal=multimodal,
        mask_token_id=mask,
    )


def _tied(*places: Fields) -> bool | None:
    """Whether one of them says that the embedding is also the head; None if all are silent."""
    stated = [each.flag("tie_word_embeddings") for each in places]
    return True if True in stated[:-1] else False if False in stated[:-1] else stated[-1]


def mask_token_of(fields: Fields, vocabulary_size: int) -> int | None:
    """The mask of a drafter that drafts all tokens in one forward; None if the folder is another model.

    Raises ModelFileError for an id outside the vocabulary.
    """
    return None if fields.raw(_MASK) is None else fields.integer(_MASK, 0, vocabulary_size - 1)


def _class_of(fields: Fields) -> str:
    """The model's class in transformers, if it is supported."""
    named = fields.items("architectures")
    found = named[0] if named else MODEL_TYPES.get(fields.text("model_type") or "", fields.raw("model_type"))
    if not isinstance(found, str):
        raise fields.wrong("architectures", "an array of names")
    if found not in CLASSES and any(fields.raw(member) is not None for member in _EXPERT_COUNTS):
        raise InvalidRequestError(
            f"{fields.path}: it is a mixture of experts, which edgespec does not convert to GGUF",
            hint="llama.cpp's convert_hf_to_gguf.py converts it",
        )
    if found not in CLASSES:
        raise InvalidRequestError(
            f"models of the architecture {found[:80]!a} cannot be converted to GGUF; "
            f"supported are {', '.join(dict.fromkeys(each.name for each in CLASSES.values()))}",
            hint="llama.cpp's convert_hf_to_gguf.py converts others; `--to onnx` converts them through Optimum",
        )
    return found


def _refused(fields: Fields, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{fields.path}: {what}, which llama.cpp does not compute for this architecture",
        hint="`--to onnx` converts such models through Optimum",
    )


def _numbers(fields: Fields, architecture: Architecture) -> dict[str, Value]:
    """The numbers of the GGUF, except those of rotary positions."""
    width = fields.integer("hidden_size", 1, _MOST_WIDTH)
    layers = fields.integer("num_hidden_layers", 1, _MOST_LAYERS)
    heads = fields.integer("num_attention_heads", 1, _MOST_HEADS)
    kv_heads = fields.integer("num_key_value_heads", 1, _MOST_HEADS, heads)
    head_length = fields.integer("head_dim", 2, _MOST_HEAD_WIDTH, width // heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of the {heads} attention heads")
    if head_length % 2:
        raise fields.wrong("head_dim", "an even number")
    positions, window = fields.integer("max_position_embeddings", 1, _MOST_POSITIONS), _window(fields, layers)
    values: dict[str, Value] = {
        "block_count": layers,
        # llama.cpp computes other architectures' windows as full attention, which is the same up to their length.
        "context_length": positions if window is None or architecture.saved.keeps_windows else min(positions, window),
        "embedding_length": width,
        "feed_forward_length": fields.integer("intermediate_size", 1, _MOST_FEED_FORWARD),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_length,
        "attention.value_length": head_length,
        "attention.layer_norm_rms_epsilon": fields.number("rms_norm_eps", 0.0, 1.0, _EPSILON),
    }
    if window is not None and architecture.saved.keeps_windows:
        values["attention.sliding_window"] = window
    return values | {key: fields.number(name, 0.0, _MOST_SCALE) for key, name in architecture.saved.keys.items()}


def _window(fields: Fields, layers: int) -> int | None:
    """The sliding window of some layers, in tokens."""
    kinds = _layer_types(fields, layers)
    slides = fields.flag("use_sliding_window") is not False and "sliding_attention" in (
        kinds or ["sliding_attention"]
    )
    if not slides or (kinds is None and fields.raw("sliding_window") is None):
        return None
    return fields.integer("sliding_window", 1, _MOST_POSITIONS)


def _layer_types(fields: Fields, layers: int) -> list[str] | None:
    kinds = fields.items("layer_types")
    if kinds is None:
        return None
    if len(kinds) != layers or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.wrong("layer_types", f"full_attention or sliding_attention for each of {layers} layers")
    return kinds


def _refuse_others(fields: Fields, architecture: Architecture, facts: Facts, sizes: Sizes) -> None:
    """Refuse settings that the architecture's graph would compute differently from what they say."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.raw(name) is not None and not architecture.caps:
            raise _refused(fields, f"it states {name}")
    if fields.flag("use_bidirectional_attention"):
        raise _refused(fields, "its attention is bidirectional")
    if architecture.saved.keeps_windows:
        windowed = [window > 0 for window in architecture.windows(facts, sizes)]
        _refuse_other_windows(fields, windowed, architecture.ropes(facts)[-1].base)
    if _turning(fields, sizes.layers) not in (None, list(architecture.turns(facts, sizes))):
        raise _refused(fields, "its layers without rotary positions are not the usual ones")
    scale = architecture.scales(facts, sizes).score or 1.0 / math.sqrt(sizes.head)
    scalar = fields.number("query_pre_attn_scalar", 1e-6, 1e6, scale**-2)
    if not math.isclose(scalar, scale**-2):
        raise _refused(fields, f"its queries are scaled by {scalar:g} instead of {scale**-2:g}")


def _turning(fields: Fields, layers: int) -> list[bool] | None:
    """Which layers rotate their queries and keys, by SmolLM3's members; None if the file has neither."""
    stated = fields.items("no_rope_layers")  # of ones and zeros: 0 rotates nothing
    if stated is not None:
        return [bool(each) for each in stated]
    interval = fields.integer("no_rope_layer_interval", 0, _MOST_LAYERS, 0)
    return [(layer + 1) % interval != 0 for layer in range(layers)] if interval else None


def _refuse_other_windows(fields: Fields, windowed: list[bool], usual: float) -> None:
    """``windowed``: which layers have a window in the graph. ``usual``: the rotary base of these layers."""
    kinds, stated = _layer_types(fields, len(windowed)), windowed
    if kinds is not None:
        stated = [kind == "sliding_attention" for kind in kinds]
    elif any(windowed):
        name = "_sliding_window_pattern" if fields.raw("sliding_window_pattern") is None else "sliding_window_pattern"
        if fields.raw(name) is not None:
            period = fields.integer(name, 1, _MOST_LAYERS)
            stated = [(layer + 1) % period != 0 for layer in range(len(windowed))]
    if stated != windowed:
        raise _refused(fields, "its layers with a sliding window are not the usual ones")
    base = fields.number("rope_local_base_freq", 1.0, 1e12, usual)
    rope = fields.member("rope_parameters")
    local = rope.member("sliding_attention") if rope is not None and rope.has_object("sliding_attention") else None
    if local is not None:
        base = local.number("rope_theta", 1.0, 1e12, usual)
        if _rope_kind(local) != "default":
            raise _refused(fields, "the rotary positions of its sliding layers are scaled")
    if base != usual:
        raise _refused(fields, f"the rotary base of its sliding layers is {base:g}")


# --------------------------------------------------------------------------------------------- rotary positions


def _rope(
    fields: Fields, architecture: Architecture, values: Mapping[str, Value]
) -> tuple[dict[str, Value], dict[str, Table]]:
    """The keys and tensors of rotary positions, which transformers 5 keeps in one member, older releases in two."""
    base = fields.number("rope_theta", 1.0, 1e12, DEFAULT_ROPE_BASE)
    rope = fields.member("rope_parameters")
    if rope is not None and rope.has_object("full_attention"):
        rope = rope.member("full_attention")
    rope = rope or fields.member("rope_scaling") or Fields(fields.path, {})
    base = rope.number("rope_theta", 1.0, 1e12, base)
    share = rope.number("partial_rotary_factor", 0.0, 1.0, fields.number("partial_rotary_factor", 0.0, 1.0, 1.0))
    if share != 1.0 and not architecture.saved.rotates_part:
        raise _refused(fields, "only a part of each head is rotated")
    kind = _rope_kind(rope)
    if kind not in _ROPE_MEMBERS or _ROPE_TENSORS.get(kind, frozenset()) - architecture.rope_tensors:
        raise _refused(fields, f"its rotary positions are scaled by {kind[:40]!a}")
    own = architecture.saved.rope_keys if kind == "yarn" else {}
    if rope.raw("mscale_all_dim") and rope.raw("mscale") != 1:  # transformers takes both or none, llama.cpp 1 for one
        raise _refused(fields, "its rotary positions are scaled with 'mscale'")
    for name in rope.names():
        if name not in _ROPE_MEMBERS[kind] | set(own.values()) and not _is_neutral(rope, kind, name):
            raise _refused(fields, f"its rotary positions are scaled with {name[:40]!a}")
    length, positions = values["attention.key_length"], values["context_length"]
    assert isinstance(length, int)
    assert isinstance(positions, int)
    length = int(length * share)
    found: dict[str, Value] = {"rope.freq_base": base, "rope.dimension_count": length}
    if kind == "llama3":
        return found, {ROPE_FACTORS: _llama3_factors(rope, length, base)}
    if kind == "longrope":
        tables = {name: _listed(rope, member, length) for name, member in _LONG_MEMBERS.items()}
        return found | _long_scaling(fields, rope), tables
    found |= {key: rope.number(name, 0.0, _MOST_SCALE) for key, name in own.items() if rope.raw(name) is not None}
    return found | _scaling(rope, kind, positions), {}


def _rope_kind(rope: Fields) -> str:
    return rope.text("rope_type") or rope.text("type") or "default"


def _is_neutral(rope: Fields, kind: str, name: str) -> bool:
    """Whether the member says what is computed without it."""
    if kind == "yarn" and name == "attention_factor" and rope.raw("mscale_all_dim") is None:
        usual = 1.0 + 0.1 * math.log(rope.number("factor", 1.0, _MOST_ROPE_FACTOR))
        return math.isclose(rope.number(name, 0.0, _MOST_SCALE), usual, rel_tol=1e-6)
    return name in _ROPE_NEUTRAL.get(kind, {}) and rope.raw(name) == _ROPE_NEUTRAL[kind][name]


def _scaling(rope: Fields, kind: str, positions: int) -> dict[str, Value]:
    """Scaling of positions beyond the original training length. yarn: Peng et al., 2023; its betas are optional, with
    the same defaults in llama.cpp and transformers.
    """
    if kind == "default":
        return {}
    found: dict[str, Value] = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": rope.number("factor", 1.0, _MOST_ROPE_FACTOR),
    }
    if kind == "yarn":
        original = rope.integer("original_max_position_embeddings", 1, _MOST_POSITIONS, positions)
        found["rope.scaling.original_context_length"] = original
        for name in ("beta_fast", "beta_slow"):
            if rope.raw(name) is not None:
                found[f"rope.scaling.yarn_{name}"] = rope.number(name, 0.0, 1e6)
    return found


def _long_scaling(fields: Fields, rope: Fields) -> dict[str, Value]:
    """The length from which the long factors are used, and the magnitude for both (LongRoPE: Ding et al., 2024)."""
    name = "original_max_position_embeddings"
    original = (fields if rope.raw(name) is None else rope).integer(name, 2, _MOST_POSITIONS)
    longest = fields.integer("max_position_embeddings", 1, _MOST_POSITIONS)
    factor = rope.number("factor", 1e-6, _MOST_ROPE_FACTOR, longest / original)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": magnitude}


def _listed(rope: Fields, name: str, length: int) -> Table:
    """The divisors that the file lists: float32 (length / 2,)."""
    values = rope.items(name)
    if values is None or len(values) != length // 2:
        raise rope.wrong(name, f"a list of {length // 2} numbers")
    numbers = [Fields(rope.path, {name: value}).number(name, 1e-6, _MOST_ROPE_FACTOR) for value in values]
    return np.array(numbers, dtype=np.float32)


def _llama3_factors(rope: Fields, length: int, base: float) -> Table:
    """The divisors of the rotary frequencies: float32 (length / 2,).

    Long wavelengths are stretched by the factor, short wavelengths are unchanged, and the frequency is interpolated
    linearly between the two bounds (Llama 3.1: "The Llama 3 Herd of Models", Grattafiori et al., 2024).
    """
    factor = rope.number("factor", 1.0, _MOST_ROPE_FACTOR)
    original = rope.integer("original_max_position_embeddings", 1, _MOST_POSITIONS)
    low = rope.number("low_freq_factor", 0.0, _MOST_ROPE_FACTOR)
    high = rope.number("high_freq_factor", 0.0, _MOST_ROPE_FACTOR)
    if not low < high:
        raise ModelFileError(rope.path, f"low_freq_factor {low:g} is not below high_freq_factor {high:g}")
    exponents = np.arange(0, length, 2, dtype=np.float64) / length
    wavelengths = 2 * math.pi * base**exponents
    share = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)  # 1: keep, 0: stretch
    return (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)
