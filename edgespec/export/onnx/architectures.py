"""Describes the architectures that can be exported to ONNX, from a GGUF header.

``describe_model`` returns everything that the graph needs except the tensors, or refuses the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.files.gguf.records import GgufArray, GgufHeader

_DEFAULT_ROPE_BASE = 10000.0  # llama.cpp's default for a GGUF without a rotary base

# Every sixth layer of Gemma 3 has full attention, unless the file states another period.
_GEMMA3_PERIOD = 6
# The largest Gemma 3 scales scores by embedding length / heads; the other models scale by the head length.
_GEMMA3_27B_LAYERS = 62

_HEAD_MULTIPLE = 16  # GroupQueryAttention rotates only heads with a multiple of 16 elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How the graph of one architecture is built.

    ``interleaved``: rotary pairs are neighbours instead of half a head apart. ``head_norms``: each head's query and
    key are normalised before rotation. ``post_norms``: the results of attention and feed-forward are normalised
    before the addition. ``gelu``: the gate is GELU (tanh form) instead of SiLU. ``scaled_embedding``: embeddings
    are multiplied by the square root of their length.
    """

    name: str
    interleaved: bool = False
    head_norms: bool = False
    post_norms: bool = False
    gelu: bool = False
    scaled_embedding: bool = False


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        each.name: each
        for each in (
            # In GGUFs of the llama family the rows of q and k are ordered for neighbouring pairs.
            Architecture(name="llama", interleaved=True),
            Architecture(name="qwen2"),
            Architecture(name="qwen3", head_norms=True),
            Architecture(name="gemma3", head_norms=True, post_norms=True, gelu=True, scaled_embedding=True),
        )
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al., 2021): angles are position * scale / base**(2i / d), i < d / 2.

    ``factored``: the angles of pair i are divided by element i of the tensor rope_freqs.weight (Llama 3.1).
    """

    base: float
    scale: float = 1.0
    factored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer: its rope, and its window in tokens, the current token included (None: full attention)."""

    rope: Rope
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """All facts of a model except its weights. ``score_scale`` multiplies attention scores."""

    architecture: Architecture
    embedding_length: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    head_length: int
    context_length: int
    vocabulary_size: int
    epsilon: float
    score_scale: float
    blocks: tuple[Block, ...]


def describe_model(header: GgufHeader) -> ModelShape:
    """The shape of the model of ``header``.

    Raises InvalidRequestError if the architecture, or a feature of the model, cannot be exported to ONNX, and
    ModelFileError if the file lacks a needed key.
    """
    architecture = ARCHITECTURES.get(header.architecture)
    if architecture is None:
        raise InvalidRequestError(
            f"the architecture {header.architecture} cannot be exported to ONNX yet",
            hint=f"supported: {', '.join(ARCHITECTURES)}; `--to gguf` exports every architecture",
        )
    heads, kv_heads = _single(header, header.head_count), _single(header, header.head_count_kv)
    length = header.key_length
    if header.value_length != length or length % _HEAD_MULTIPLE:
        raise _unsupported(header, f"heads of {length} and {header.value_length} elements")
    if not 0 < kv_heads <= heads or heads % kv_heads:
        raise _unsupported(header, f"{heads} attention heads with {kv_heads} key-value heads")
    if _number(header, "rope.dimension_count", length) != length:
        raise _unsupported(header, "rotation of a part of each head")
    if _number(header, "final_logit_softcapping", 0) or _number(header, "attn_logit_softcapping", 0):
        raise _unsupported(header, "soft-capped logits")
    feed_forward = header.metadata.get(f"{header.architecture}.feed_forward_length")
    if not isinstance(feed_forward, int) or isinstance(feed_forward, bool):
        raise ModelFileError(header.path, f"it does not state {header.architecture}.feed_forward_length as a number")
    return ModelShape(
        architecture=architecture,
        embedding_length=header.embedding_length,
        feed_forward_length=feed_forward,
        head_count=heads,
        head_count_kv=kv_heads,
        head_length=length,
        context_length=header.context_length,
        vocabulary_size=header.vocabulary_size,
        epsilon=_number(header, "attention.layer_norm_rms_epsilon", None),
        score_scale=_score_scale(header, heads, length),
        blocks=_blocks(header),
    )


def rope_tables(
    rope: Rope, positions: npt.NDArray[np.int64], head_length: int, factors: npt.NDArray[np.float32] | None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines at ``positions`` (P,), each float32 (P, head_length / 2).

    ``factors`` is float32 (head_length / 2,), used only if the rope is ``factored``.
    """
    exponents = np.arange(0, head_length, 2, dtype=np.float64) / head_length
    with np.errstate(all="ignore"):  # an implausible base gives NaN or infinity, which the caller checks
        frequencies = rope.scale * np.float64(rope.base) ** -exponents
        if rope.factored and factors is not None:
            frequencies = frequencies / factors.astype(np.float64)
        # In float64: the float32 product of a late position and a frequency has an error of 0.01 radian.
        angles = positions.astype(np.float64)[:, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _unsupported(header: GgufHeader, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{header.path.name} has {what}, which the ONNX export does not support", hint="export it with `--to gguf`"
    )


def _single(header: GgufHeader, heads: int | tuple[int, ...]) -> int:
    if isinstance(heads, int):
        return heads
    if len(set(heads)) != 1:
        raise _unsupported(header, "layers that differ in their number of heads")
    return heads[0]


def _number(header: GgufHeader, suffix: str, default: float | None) -> float:
    """A finite number of the metadata. Raises ModelFileError if it is not finite, or missing without a default."""
    key = f"{header.architecture}.{suffix}"
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelFileError(header.path, f"{key} is missing or not a number")
    return float(value)


def _score_scale(header: GgufHeader, heads: int, head_length: int) -> float:
    if header.architecture == "gemma3" and header.block_count == _GEMMA3_27B_LAYERS:
        return 1 / math.sqrt(header.embedding_length // heads)
    return 1 / math.sqrt(head_length)


# ------------------------------------------------------------------------------------------------ positions


def _blocks(header: GgufHeader) -> tuple[Block, ...]:
    whole = Block(rope=_rope(header))
    window = _number(header, "attention.sliding_window", 0) if header.architecture == "gemma3" else 0
    if window <= 0:
        return (whole,) * header.block_count
    # Layers with a sliding window rotate by a separate base without scaling.
    base = _positive(header, "rope.freq_base_swa", _DEFAULT_ROPE_BASE)
    windowed = Block(rope=Rope(base=base), window=int(window))
    return tuple(windowed if narrow else whole for narrow in _narrow_layers(header))


def _narrow_layers(header: GgufHeader) -> tuple[bool, ...]:
    """Whether each layer has a sliding window: stated per layer, or as the period of full-attention layers."""
    stated = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern", _GEMMA3_PERIOD)
    if isinstance(stated, GgufArray):
        stated = tuple(stated.values())
    if isinstance(stated, tuple) and len(stated) == header.block_count:
        return tuple(bool(each) for each in stated)
    if isinstance(stated, bool) or not isinstance(stated, int) or stated < 0:
        raise ModelFileError(header.path, "its sliding_window_pattern fits neither its layers nor a period")
    return tuple(stated == 0 or layer % stated < stated - 1 for layer in range(header.block_count))


def _rope(header: GgufHeader) -> Rope:
    kind = header.metadata.get(f"{header.architecture}.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise _unsupported(header, f"rotary positions scaled by {kind!r}")
    if _number(header, "rope.scaling.attn_factor", 1) != 1:
        raise _unsupported(header, "an attention factor in its rotary positions")
    factor = _number(header, "rope.scaling.factor", 0) or _number(header, "rope.scale_linear", 0)
    if factor < 0:
        raise ModelFileError(header.path, "its rope.scaling.factor is negative")
    return Rope(
        base=_positive(header, "rope.freq_base", _DEFAULT_ROPE_BASE),
        scale=1.0 if kind == "none" or factor == 0 else 1 / factor,
        factored=header.architecture == "llama" and any(t.name == "rope_freqs.weight" for t in header.tensors),
    )


def _positive(header: GgufHeader, suffix: str, default: float) -> float:
    value = _number(header, suffix, default)
    if value <= 0:
        raise ModelFileError(header.path, f"{header.architecture}.{suffix} is {value}, not positive")
    return value
