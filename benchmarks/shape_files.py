"""Files of the shapes of published models with random weights: sizes, types and names of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from edgespec.architectures.shape import HEAD, ROPE_FACTORS, ROUTER, Part, Sizes, layer_parts
from edgespec.architectures.table import find

MOST_BYTES = 18 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class RealShape:
    """The numbers of a published model. ``used`` of its experts are used by a row. ``settings``: more keys.

    The types are those of Q4_K_M or, with ``mxfp4``, MXFP4 in experts and Q8_0 in other matrices.
    """

    architecture: str
    sizes: Sizes
    vocabulary: int
    rope_base: float
    tied: bool = False
    used: int = 0
    mxfp4: bool = False
    settings: Mapping[str, int | float | str] = field(default_factory=dict)


def _qwen3(layers: int, width: int, inner: int, *, tied: bool) -> RealShape:
    sizes = Sizes(layers=layers, context=40960, width=width, inner=inner, heads=32, kv_heads=8, head=128)
    return RealShape(architecture="qwen3", sizes=sizes, vocabulary=151936, rope_base=1e6, tied=tied)


SHAPES: dict[str, RealShape] = {
    "Llama-3.2-3B": RealShape(
        architecture="llama",
        sizes=Sizes(layers=28, context=131072, width=3072, inner=8192, heads=24, kv_heads=8, head=128),
        vocabulary=128256,
        rope_base=5e5,
        tied=True,
    ),
    "Qwen3-4B": _qwen3(36, 2560, 9728, tied=True),
    "Qwen3-8B": _qwen3(36, 4096, 12288, tied=False),
    "Qwen3-30B-A3B": RealShape(
        architecture="qwen3moe",
        sizes=Sizes(layers=48, context=40960, width=2048, inner=768, heads=32, kv_heads=4, head=128, experts=128),
        vocabulary=151936,
        rope_base=1e6,
        used=8,
    ),
    "gpt-oss-20b": RealShape(
        architecture="gpt-oss",
        sizes=Sizes(layers=24, context=131072, width=2880, inner=2880, heads=64, kv_heads=8, head=64, experts=32),
        vocabulary=201088,
        rope_base=150000.0,
        used=4,
        mxfp4=True,
        settings={
            "attention.sliding_window": 128,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    ),
    # For a run that takes seconds.
    "small": RealShape(
        architecture="qwen3moe",
        sizes=Sizes(layers=2, context=2048, width=256, inner=256, heads=4, kv_heads=2, head=64, experts=16),
        vocabulary=1000,
        rope_base=1e6,
        used=4,
    ),
}

# ------------------------------------------------------------------------------------------------------- files


def has_more_bits(layer: int, layers: int) -> bool:
    """Whether Q4_K_M has a layer's values and second feed-forward matrices in Q6_K, as llama.cpp writes it."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def type_of(shape: RealShape, role: str, part: Part, layer: int) -> str:
    layers = shape.sizes.layers
    if part.columns is None or role == ROUTER:
        return "F32"
    if shape.mxfp4:
        return "MXFP4" if part.experts else "Q8_0"
    return "Q6_K" if role in ("attn_v", "ffn_down") and has_more_bits(layer, layers) else "Q4_K"


def blocks(draw: np.random.Generator, kind: str, rows: int, columns: int) -> np.ndarray:
    """Rows of random blocks, whose numbers have about the spread of 1 / sqrt(columns) around 0."""
    if kind == "F32":
        return np.float32(2.0 / np.sqrt(columns)) * draw.standard_normal((rows, columns), dtype=np.float32)
    elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.frombuffer(draw.bytes(rows * columns // elements * block_bytes), dtype=np.uint8).copy()
    raw = raw.reshape(-1, block_bytes)
    # Codes of Q4_K are 0 to 15 and its scales 0 to 63, those of Q6_K -32 to 31 and -128 to 127, all equally often.
    # The mean square of Q8_0's codes is 5461.5, that of MXFP4's values 8.5625, to be scaled by powers of two.
    if kind == "Q4_K":
        scale = 1.0 / (256.0 * np.sqrt(columns))
        raw[:, 0:2] = np.array([scale], dtype="<f2").view(np.uint8)
        raw[:, 2:4] = np.array([7.5 * scale], dtype="<f2").view(np.uint8)
    elif kind == "Q8_0":
        raw[:, 0:2] = np.array([1.0 / np.sqrt(5461.5 * columns)], dtype="<f2").view(np.uint8)
    elif kind == "MXFP4":  # of two powers, as often as gives the spread
        power = -0.5 * np.log2(8.5625 * columns)
        share = (4.0 ** (power - np.floor(power)) - 1.0) / 3.0
        raw[:, 0] = 127 + int(np.floor(power)) + (draw.random(len(raw)) < share)
    else:
        raw[:, 208:210] = np.array([1.0 / (1370.0 * np.sqrt(columns))], dtype="<f2").view(np.uint8)
    return raw.reshape(rows, -1)


def tensors_of(shape: RealShape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Each tensor's name, lengths as in numpy, and type."""
    sizes, form = shape.sizes, find(shape.architecture)
    table = (shape.vocabulary, sizes.width)
    yield "token_embd.weight", table, "Q8_0" if shape.mxfp4 else "Q6_K" if shape.tied else "Q4_K"
    if shape.architecture == "llama":
        yield ROPE_FACTORS, (sizes.head // 2,), "F32"
    yield "output_norm.weight", (sizes.width,), "F32"
    if not shape.tied:
        yield HEAD, table, "Q8_0" if shape.mxfp4 else "Q6_K"
    for layer in range(sizes.layers):
        own = layer_parts(form, sizes, (), layer, all_biases=form.requires_biases)
        for name, (role, part) in {part.tensor: (role, part) for role, part in own}.items():
            yield name, part.shape[::-1], type_of(shape, role, part, layer)
            if part.bias is not None:
                yield part.bias, part.shape[:0:-1], "F32"


def bytes_of(shape: RealShape) -> int:
    """Bytes of the file's tensors."""
    total = 0
    for _name, lengths, kind in tensors_of(shape):
        elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        total += int(np.prod(lengths)) // elements * size
    return total


def that_fits(shape: RealShape) -> RealShape:
    """The shape, with a third of its layers if file and prepared weights would exceed MOST_BYTES."""
    if 2 * bytes_of(shape) <= MOST_BYTES:
        return shape
    return with_layers(shape, shape.sizes.layers // 3)


def with_layers(shape: RealShape, layers: int) -> RealShape:
    return replace(shape, sizes=replace(shape.sizes, layers=layers))


def write_shape(shape: RealShape, path: Path) -> None:
    """Write the file, a tensor at a time."""
    sizes, writer = shape.sizes, gguf.GGUFWriter(str(path), shape.architecture)
    writer.add_context_length(sizes.context)
    writer.add_block_count(sizes.layers)
    writer.add_embedding_length(sizes.width)
    writer.add_feed_forward_length(sizes.inner * max(1, shape.used))
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.head)
    writer.add_value_length(sizes.head)
    writer.add_rope_dimension_count(sizes.head)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocabulary)
    kinds = gguf.LlamaFileType
    writer.add_file_type(kinds.MOSTLY_MXFP4_MOE if shape.mxfp4 else kinds.MOSTLY_Q4_K_M)
    for key, value in shape.settings.items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{shape.architecture}.{key}", value)
    if shape.used:
        writer.add_expert_count(sizes.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(sizes.inner)
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    tokens += [f"\u2581t{number}".encode() for number in range(len(tokens), shape.vocabulary)]
    kind = gguf.TokenType
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(rank) for rank in range(len(tokens))])
    writer.add_token_types([*map(int, types), *[int(kind.NORMAL)] * (len(tokens) - len(types))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    draw, listed = np.random.default_rng(7), list(tensors_of(shape))
    for name, lengths, quant in listed:
        elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant]]
        byte_lengths = (*lengths[:-1], lengths[-1] // elements * size)
        raw = None if quant == "F32" else gguf.GGMLQuantizationType[quant]
        writer.add_tensor_info(
            name,
            lengths if raw is None else byte_lengths,
            np.dtype(np.float32 if raw is None else np.uint8),
            int(np.prod(byte_lengths)),
            raw_dtype=raw,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _name, lengths, quant in listed:
        if len(lengths) == 1:
            writer.write_tensor_data(np.ones(lengths, np.float32))
        else:
            writer.write_tensor_data(blocks(draw, quant, int(np.prod(lengths[:-1])), lengths[-1]))
    writer.close()
