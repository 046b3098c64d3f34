"""Files of the shapes of published models with random weights: sizes, types and names of tensors.

The types are those that llama.cpp's quantiser gives (llama-quant.cpp of llama-cpp-python 0.3.36): Q4_K_M, for the
35B-A3B Q3_K_M, and for gpt-oss MXFP4 in experts and Q8_0 in other matrices. Assistants are in Q8_0.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import gguf
import numpy as np

from edgespec.architectures.facts import Facts
from edgespec.architectures.shape import (
    EMBEDDING,
    HEAD,
    INPUT_PROJECTION,
    OUTPUT_NORM,
    ROPE_FACTORS,
    ROUTER,
    Part,
    Sizes,
    layer_parts,
)
from edgespec.architectures.table import READERS, find

MOST_BYTES = 18 * 2**30

Mixture: TypeAlias = Literal["Q4_K_M", "Q3_K_M", "MXFP4", "Q8_0"]
Value: TypeAlias = int | float | str | tuple[int, ...] | tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RealShape:
    """The numbers of a published model. ``used`` of its experts are used by a row.

    ``settings``: more keys of the file. ``periods``: keys with a value for each layer, which repeat. ``caches``: the
    layers with a cache, which the others share; 0 for all. ``no_values``: layers whose values are their keys (those
    that see all positions), or that have neither (all). ``drafting``: one more layer drafts. ``drafter``: the shape
    of the model that drafts for it. ``short_head``: its drafter scores frequent tokens first, as the vocabulary is
    one of byte pairs.
    """

    architecture: str
    sizes: Sizes
    vocabulary: int
    rope_base: float
    tied: bool = False
    used: int = 0
    mixture: Mixture = "Q4_K_M"
    settings: Mapping[str, Value] = field(default_factory=dict)
    periods: Mapping[str, tuple[int, ...] | tuple[bool, ...]] = field(default_factory=dict)
    caches: int = 0
    no_values: Literal["full", "all"] | None = None
    drafting: bool = False
    drafter: str | None = None
    short_head: bool = False


def _qwen3(layers: int, width: int, inner: int, *, tied: bool) -> RealShape:
    sizes = Sizes(layers=layers, context=40960, width=width, inner=inner, heads=32, kv_heads=8, head=128)
    return RealShape(architecture="qwen3", sizes=sizes, vocabulary=151936, rope_base=1e6, tied=tied)


def _qwen35(architecture: str, sizes: Sizes, **more: Any) -> RealShape:
    """Qwen3.5's delta layers, rotation and drafting layer, the same in the 4B, the 9B and the 35B-A3B."""
    return RealShape(
        architecture=architecture,
        sizes=sizes,
        vocabulary=248320,
        rope_base=1e7,
        drafting=True,
        short_head=True,
        settings={
            "ssm.time_step_rank": 32,
            "ssm.group_count": 16,
            "ssm.state_size": 128,
            "ssm.inner_size": 4096,
            "ssm.conv_kernel": 4,
            "full_attention_interval": 4,
            "rope.dimension_count": 64,
            "rope.dimension_sections": (11, 11, 10, 0),
        },
        **more,
    )


_FIVE_OF_SIX = (True, True, True, True, True, False)
_THREE_OF_FOUR = (True, True, True, False)
_WINDOWED = "attention.sliding_window_pattern"


def _gemma4(sizes: Sizes, window: int, inputs: int, periods: Mapping[str, Any], **more: Any) -> RealShape:
    """Heads of 512 where a layer sees all positions and of 256 where it has a window, in every size."""
    return RealShape(
        architecture="gemma4",
        sizes=sizes,
        vocabulary=262144,
        rope_base=1e6,
        tied=True,
        settings=_gemma4_settings(window) | {"embedding_length_per_layer_input": inputs},
        periods={_WINDOWED: _FIVE_OF_SIX, **periods},
        **more,
    )


def _gemma4_settings(window: int) -> dict[str, Value]:
    return {
        "attention.sliding_window": window,
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "rope.dimension_count_swa": 256,
        "rope.freq_base_swa": 1e4,
        "final_logit_softcapping": 30.0,
    }


def _assistant(width: int, inner: int, heads: int, read: int, window: int, kv_heads: tuple[int, ...]) -> RealShape:
    """All have four layers of queries alone. The clusters of E4B's head are left out: all tokens are scored."""
    return RealShape(
        architecture="gemma4-assistant",
        sizes=Sizes(layers=4, context=131072, width=width, inner=inner, heads=heads, kv_heads=0, head=512),
        vocabulary=262144,
        rope_base=1e6,
        tied=True,
        mixture="Q8_0",
        settings=_gemma4_settings(window)
        | {"embedding_length_out": read, "attention.shared_kv_layers": 4, "nextn_predict_layers": 4},
        periods={_WINDOWED: _THREE_OF_FOUR, "attention.head_count_kv": kv_heads},
        no_values="all",
    )


# Numbers of the models' config.json, as the headers of published GGUF files and conversion scripts repeat them.
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
        mixture="MXFP4",
        settings={
            "attention.sliding_window": 128,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    ),
    "Qwen3.5-4B": _qwen35(
        "qwen35",
        Sizes(layers=32, context=262144, width=2560, inner=9216, heads=16, kv_heads=4, head=256),
        tied=True,
    ),
    "Qwen3.5-9B": _qwen35(
        "qwen35", Sizes(layers=32, context=262144, width=4096, inner=12288, heads=16, kv_heads=4, head=256)
    ),
    "Qwen3.5-35B-A3B": _qwen35(
        "qwen35moe",
        Sizes(
            layers=40, context=262144, width=2048, inner=512, heads=16, kv_heads=2, head=256, experts=256, shared=512
        ),
        used=8,
        mixture="Q3_K_M",
    ),
    "Gemma-4-E4B": _gemma4(
        Sizes(layers=42, context=131072, width=2560, inner=10240, heads=8, kv_heads=2, head=512),
        512,
        256,
        {},
        caches=24,
        drafter="Gemma-4-E4B-assistant",
    ),
    "Gemma-4-12B": _gemma4(
        Sizes(layers=48, context=262144, width=3840, inner=15360, heads=16, kv_heads=8, head=512),
        1024,
        0,
        {"attention.head_count_kv": (8, 8, 8, 8, 8, 1)},
        no_values="full",
        drafter="Gemma-4-12B-assistant",
    ),
    "Gemma-4-E4B-assistant": _assistant(256, 2048, 4, 2560, 512, (2, 2, 2, 2)),
    "Gemma-4-12B-assistant": _assistant(1024, 8192, 16, 3840, 1024, (8, 8, 8, 1)),
    # For a run that takes seconds.
    "small": RealShape(
        architecture="qwen3moe",
        sizes=Sizes(layers=2, context=2048, width=256, inner=256, heads=4, kv_heads=2, head=64, experts=16),
        vocabulary=1000,
        rope_base=1e6,
        used=4,
    ),
}


def with_layers(shape: RealShape, layers: int) -> RealShape:
    """Its first layers, and the layer that drafts. Layers share caches only behind those that have one."""
    caches = shape.caches if shape.caches < layers else 0
    return replace(shape, sizes=replace(shape.sizes, layers=layers), caches=caches)


def that_fits(shape: RealShape) -> RealShape:
    """The shape, with a third of its layers if file and prepared weights would exceed MOST_BYTES."""
    if 2 * bytes_of(shape) <= MOST_BYTES:
        return shape
    return with_layers(shape, shape.sizes.layers // 3)


# --------------------------------------------------------------------------------------------- keys and tensors


def keys_of(shape: RealShape) -> dict[str, Value]:
    """The file's keys of the architecture, without its name."""
    sizes = shape.sizes
    found: dict[str, Value] = {
        "context_length": sizes.context,
        "block_count": sizes.layers + shape.drafting,
        "embedding_length": sizes.width,
        "feed_forward_length": sizes.inner * max(1, shape.used),
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": sizes.kv_heads,
        "attention.key_length": sizes.head,
        "attention.value_length": sizes.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": sizes.head,
        "rope.freq_base": shape.rope_base,
        "vocab_size": shape.vocabulary,
    }
    if shape.used:
        found |= {"expert_count": sizes.experts, "expert_used_count": shape.used}
        found["expert_feed_forward_length"] = sizes.inner
    if sizes.shared:
        found["expert_shared_feed_forward_length"] = sizes.shared
    if shape.drafting:
        found["nextn_predict_layers"] = 1
    if shape.caches:
        found["attention.shared_kv_layers"] = sizes.layers - shape.caches
    repeated = {key: tuple(itertools.islice(itertools.cycle(of), sizes.layers)) for key, of in shape.periods.items()}
    return found | dict(shape.settings) | repeated


class _Published(dict[str, tuple[int, ...]]):
    """Names of tensors that a layer of Gemma 4 may have or lack: those of the published file."""

    def __init__(self, shape: RealShape) -> None:
        super().__init__({EMBEDDING: (shape.sizes.width, shape.vocabulary)})
        self._kinds, self._no_values = keys_of(shape).get(_WINDOWED), shape.no_values

    def __contains__(self, name: object) -> bool:
        _, number, what, *_ = f"{name}..".split(".")
        if what in ("attn_k", "attn_k_norm"):
            return self._no_values != "all"
        if what == "attn_v":
            assert isinstance(self._kinds, tuple)
            return self._no_values is None or (self._no_values == "full" and bool(self._kinds[int(number)]))
        return what == "layer_output_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a file: lengths as in numpy."""

    name: str
    lengths: tuple[int, ...]
    kind: str

    @property
    def byte_lengths(self) -> tuple[int, ...]:
        elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
        return (*self.lengths[:-1], self.lengths[-1] // elements * size)

    @property
    def byte_count(self) -> int:
        return int(np.prod(self.byte_lengths))


def tensors_of(shape: RealShape) -> Iterator[Tensor]:
    """Every tensor of the file."""
    architecture, form = shape.architecture, READERS.get(shape.architecture) or find(shape.architecture)
    facts = Facts(
        Path(),
        architecture,
        {f"{architecture}.{key}": each for key, each in keys_of(shape).items()},
        _Published(shape),
    )
    sizes, varied = shape.sizes, None if form.varied is None else form.varied(facts)
    if form.deltas is not None:
        sizes = replace(sizes, deltas=form.deltas(facts, sizes.layers))
    table = (shape.vocabulary, sizes.width)
    yield Tensor(name=EMBEDDING, lengths=table, kind=_table_kind(shape, EMBEDDING))
    if ROPE_FACTORS in form.rope_tensors:
        yield Tensor(name=ROPE_FACTORS, lengths=(sizes.head // 2,), kind="F32")
    yield Tensor(name=OUTPUT_NORM, lengths=(sizes.width,), kind="F32")
    if not shape.tied:
        yield Tensor(name=HEAD, lengths=table, kind=_table_kind(shape, HEAD))
    for name, lengths in {} if varied is None else varied.tensors.items():
        yield Tensor(name=name, lengths=lengths[::-1], kind=_table_kind(shape, name) if len(lengths) > 1 else "F32")
    layers: list[dict[str, Part]] = []
    for layer in range(sizes.layers + shape.drafting):
        own, forms = (sizes, None) if varied is None else (varied.sizes[layer], varied.forms[layer])
        forms = form.drafting_layer if layer == sizes.layers else forms
        layers.append(dict(layer_parts(form, own, (), layer, forms=forms, all_biases=form.requires_biases)))
    yield from _layer_tensors(shape, layers)
    if shape.drafting:
        yield Tensor(name=f"blk.{sizes.layers}.nextn.shared_head_norm.weight", lengths=(sizes.width,), kind="F32")


def _layer_tensors(shape: RealShape, layers: list[dict[str, Part]]) -> Iterator[Tensor]:
    count, values = shape.sizes.layers, 0
    with_values = sum(any(_of(part) in _VALUES for part in own.values()) for own in layers)
    for layer, own in enumerate(layers):
        for role, part in {part.tensor: (role, part) for role, part in own.items()}.values():
            number, of = (values, with_values) if _of(part) in _VALUES else (layer, count)
            values += _of(part) in _VALUES
            plain = part.columns is None or role in _FLOATS
            kind = "F32" if plain else _kind(shape.mixture, _of(part), number, of, is_experts=part.experts > 0)
            yield Tensor(name=part.tensor, lengths=part.shape[::-1], kind=kind)
            if part.bias is not None:
                yield Tensor(name=part.bias, lengths=part.shape[:0:-1], kind="F32")


_FLOATS = (ROUTER, "ssm_conv1d")
_VALUES = ("attn_v", "attn_qkv")
_DOWN = ("ffn_down", "ffn_down_exps", "ffn_down_shexp")


def _of(part: Part) -> str:
    """The name of a layer's tensor in every layer."""
    return part.tensor.split(".")[2]


def has_more_bits(layer: int, layers: int) -> bool:
    """Whether Q4_K_M has a layer's values and second feed-forward matrices in Q6_K, as llama.cpp writes it."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _table_kind(shape: RealShape, name: str) -> str:
    """The type of a matrix that belongs to no layer."""
    if name == INPUT_PROJECTION:
        return "BF16"  # which the quantiser leaves as it is
    if shape.mixture in ("MXFP4", "Q8_0"):
        return "Q8_0"
    return "Q6_K" if shape.tied or name == HEAD else _BASE[shape.mixture]


_BASE = {"Q4_K_M": "Q4_K", "Q3_K_M": "Q3_K"}


def _kind(mixture: Mixture, name: str, number: int, count: int, *, is_experts: bool) -> str:
    """The type of a layer's matrix, the ``number``th of ``count`` of its kind."""
    if mixture in ("MXFP4", "Q8_0"):
        return "MXFP4" if is_experts and mixture == "MXFP4" else "Q8_0"
    if mixture == "Q4_K_M":
        return "Q6_K" if name in _VALUES + _DOWN and has_more_bits(number, count) else "Q4_K"
    if name in _VALUES:
        return "Q5_K" if number < 2 else "Q4_K"
    if name in _DOWN:
        return "Q5_K" if number < count // 16 else "Q4_K"
    return "Q4_K" if name == "attn_output" else "Q3_K"


def bytes_of(shape: RealShape) -> int:
    """Bytes of the file's tensors."""
    return sum(tensor.byte_count for tensor in tensors_of(shape))


# -------------------------------------------------------------------------------------------------------- files


# Of a larger matrix the drawn bytes repeat: to draw all of 30 GB takes minutes, and forwards take as long.
_DRAWN_BYTES = 2**26


def blocks(draw: np.random.Generator, kind: str, rows: int, columns: int) -> np.ndarray:
    """Rows of random blocks, whose numbers have about the spread of 1 / sqrt(columns) around 0."""
    if kind in ("F32", "BF16"):
        drawn = np.float32(2.0 / np.sqrt(columns)) * draw.standard_normal((rows, columns), dtype=np.float32)
        return drawn if kind == "F32" else (drawn.view("<u4") >> 16).astype("<u2").view(np.uint8)
    elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    size = rows * columns // elements * block_bytes
    raw = np.resize(np.frombuffer(draw.bytes(min(size, _DRAWN_BYTES)), dtype=np.uint8), size).reshape(-1, block_bytes)
    # All codes are equally often, and all scales: codes of Q4_K are 0 to 15, of Q5_K 0 to 31, and their scales 0 to
    # 63; codes of Q6_K are -32 to 31, its scales -128 to 127; codes of Q3_K -4 to 3, its scales -32 to 31. The mean
    # square of Q8_0's codes is 5461.5, that of MXFP4's values 8.5625, to be scaled by powers of two.
    if kind in ("Q4_K", "Q5_K"):
        spread, middle = (256.0, 7.5) if kind == "Q4_K" else (527.0, 15.5)
        scale = 1.0 / (spread * np.sqrt(columns))
        raw[:, 0:2] = np.array([scale], dtype="<f2").view(np.uint8)
        raw[:, 2:4] = np.array([middle * scale], dtype="<f2").view(np.uint8)
    elif kind == "Q8_0":
        raw[:, 0:2] = np.array([1.0 / np.sqrt(5461.5 * columns)], dtype="<f2").view(np.uint8)
    elif kind == "MXFP4":  # of two powers, as often as gives the spread
        power = -0.5 * np.log2(8.5625 * columns)
        share = (4.0 ** (power - np.floor(power)) - 1.0) / 3.0
        raw[:, 0] = 127 + int(np.floor(power)) + (draw.random(len(raw)) < share)
    elif kind == "Q3_K":
        raw[:, 108:110] = np.array([1.0 / (43.3 * np.sqrt(columns))], dtype="<f2").view(np.uint8)
    else:
        raw[:, 208:210] = np.array([1.0 / (1370.0 * np.sqrt(columns))], dtype="<f2").view(np.uint8)
    return raw.reshape(rows, -1)


_FILE_TYPES = {
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q3_K_M": gguf.LlamaFileType.MOSTLY_Q3_K_M,
    "MXFP4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}


def write_shape(shape: RealShape, path: Path) -> None:
    """Write the file to the disk, a tensor at a time."""
    writer = gguf.GGUFWriter(str(path), shape.architecture)
    adders: dict[type, Any] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        tuple: lambda key, value: writer.add_array(key, list(value)),
    }
    for key, value in keys_of(shape).items():
        adders[type(value)](f"{shape.architecture}.{key}", value)
    writer.add_file_type(_FILE_TYPES[shape.mixture])
    _add_vocabulary(writer, shape.vocabulary)
    draw, listed = np.random.default_rng(7), list(tensors_of(shape))
    for tensor in listed:
        raw = None if tensor.kind == "F32" else gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(
            tensor.name,
            tensor.lengths if raw is None else tensor.byte_lengths,
            np.dtype(np.float32 if raw is None else np.uint8),
            tensor.byte_count,
            raw_dtype=raw,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in listed:
        writer.write_tensor_data(_data(draw, tensor))
    writer.close()
    with path.open("rb") as file:  # or the system would write it while forwards are timed
        os.fsync(file.fileno())


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    tokens += [f"\u2581t{number}".encode() for number in range(len(tokens), size)]
    kind = gguf.TokenType
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(rank) for rank in range(len(tokens))])
    writer.add_token_types([*map(int, types), *[int(kind.NORMAL)] * (len(tokens) - len(types))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _data(draw: np.random.Generator, tensor: Tensor) -> np.ndarray:
    if tensor.name.endswith(".ssm_a"):
        return np.full(tensor.lengths, -1.0, np.float32)  # so that states decay
    if len(tensor.lengths) == 1:
        return np.ones(tensor.lengths, np.float32)
    return blocks(draw, tensor.kind, int(np.prod(tensor.lengths[:-1])), tensor.lengths[-1])
