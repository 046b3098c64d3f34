"""Tiny GGUF models of every architecture that export converts to ONNX, and the graph run by ONNX Runtime alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import onnxruntime

from edgespec.architectures.shape import Sizes, layer_parts
from edgespec.architectures.table import find
from edgespec.files.gguf.records import GGML_TYPES
from edgespec.runtimes.llama.context import LlamaSettings
from tests.support.loading import load_model

__all__ = [
    "ARCHITECTURES",
    "VOCABULARY_SIZE",
    "WINDOW",
    "PlainGraph",
    "llama_logits",
    "random_blocks",
    "write_tiny_model",
]

# Architectures that the export has the operators for, with any settings.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "phi3", "granite")
# llama.cpp has no models of these with another head width than embedding divided by heads.
_SQUARE = ("qwen2", "phi3")
_SETTINGS = {
    "granite": {"embedding_scale": 2.0, "residual_scale": 0.5, "attention.scale": 0.1, "logit_scale": 0.5},
}
_INPUTS = ("attn_q", "attn_k", "attn_v", "attn_qkv")

# Another head width than embedding divided by heads, as in Qwen 3 and Gemma 3.
_HEAD_LENGTH = 32
_HEADS, _KV_HEADS = 4, 2
_TOKENS = (
    [("<unk>", gguf.TokenType.UNKNOWN), ("<s>", gguf.TokenType.CONTROL), ("</s>", gguf.TokenType.CONTROL)]
    + [(f"<0x{byte:02X}>", gguf.TokenType.BYTE) for byte in range(256)]
    + [(f"▁w{number}", gguf.TokenType.NORMAL) for number in range(29)]
)
VOCABULARY_SIZE = len(_TOKENS)
WINDOW = 8  # tokens; shorter than the texts of the tests


def write_tiny_model(
    path: Path,
    architecture: str = "llama",
    *,
    quant: str = "F32",
    tied: bool = False,
    head_quant: str | None = None,
    width: int = 64,
    feed_forward: int = 96,
    layers: int = 3,
    context_length: int = 128,
    head_length: int | None = None,
    rope_factors: float | None = None,
    rope_scale: float | None = None,
    extra: dict[str, Any] | None = None,
    extra_tensor: str | None = None,
    poison: bool = False,
    dequantised: bool = False,
) -> Path:
    """Write a model with random weights, determined by the arguments; returns its path.

    ``quant`` is the ggml type of its matrices, ``head_quant`` that of the head (and of a tied embedding);
    ``rope_factors`` is the first of rising divisors of its angles. ``extra``: more keys, without the architecture's
    name; with ``poison`` one weight is NaN. A ``dequantised`` model has the same weights as F32.
    """
    if head_length is None:
        head_length = width // _HEADS if architecture in _SQUARE else _HEAD_LENGTH
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(context_length)
    writer.add_block_count(layers)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(head_length)
    writer.add_value_length(head_length)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(20000.0)
    if architecture == "llama":
        writer.add_rope_dimension_count(head_length)
    if architecture == "gemma3":
        writer.add_sliding_window(WINDOW)
        writer.add_sliding_window_pattern(3)  # layers 0 and 1 attend to a window
    if rope_scale is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope_scale)
    for key, value in {**_SETTINGS.get(architecture, {}), **(extra or {})}.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text.encode() for text, _ in _TOKENS])
    writer.add_token_scores([-float(rank) for rank in range(VOCABULARY_SIZE)])
    writer.add_token_types([int(kind) for _, kind in _TOKENS])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    random = np.random.default_rng(5)

    def matrix(name: str, rows: int, columns: int, kind_name: str = quant, scale: float = 1.0) -> None:
        weights = random.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale / np.sqrt(columns))
        if poison and name == "blk.0.ffn_up.weight":
            weights[0, 0] = np.nan
        _add(writer, name, weights, kind_name, dequantised)

    def vector(name: str, length: int, middle: float = 1.0) -> None:
        writer.add_tensor(name, (middle + random.standard_normal(length) / 10).astype(np.float32))

    head_kind = head_quant or quant
    matrix("token_embd.weight", VOCABULARY_SIZE, width, head_kind if tied else quant, scale=3.0)
    sizes = Sizes(
        layers=layers,
        context=context_length,
        width=width,
        inner=feed_forward,
        heads=_HEADS,
        kv_heads=_KV_HEADS,
        head=head_length,
    )
    form = find(architecture)
    for layer in range(layers):
        parts = layer_parts(form, sizes, (), layer, all_biases=form.saved.needs_biases)
        for name, together in groupby(parts, key=lambda each: each[1].tensor):
            part = next(together)[1]
            if part.columns is None:
                vector(name, part.height)
                continue
            matrix(name, part.height, part.columns, scale=2.0 if name.split(".")[2] in _INPUTS else 1.0)
            if part.bias is not None:
                vector(part.bias, part.height, middle=0.0)
    vector("output_norm.weight", width)
    if not tied:
        matrix("output.weight", VOCABULARY_SIZE, width, head_kind)
    if rope_factors is not None:
        factors = np.linspace(rope_factors, 4, head_length // 2, dtype=np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, weights: npt.NDArray[np.float32], kind_name: str, dequantised: bool) -> None:
    """Add a matrix of any type: types that the package cannot quantise are random blocks with ordinary scales."""
    kind = gguf.GGMLQuantizationType[kind_name]
    try:
        raw = gguf.quantize(weights, kind)
    except NotImplementedError:
        raw = random_blocks(kind_name, len(weights), weights.shape[1], float(weights.std()))
    if dequantised:
        writer.add_tensor(name, gguf.dequantize(raw, kind).astype(np.float32))
    else:
        writer.add_tensor(name, raw, raw_dtype=kind)


def random_blocks(kind_name: str, rows: int, columns: int, spread: float, seed: int = 3) -> npt.NDArray[np.uint8]:
    """Rows of a ggml type, uint8 (rows, bytes of a row), with every float16 scale about ``spread`` / 16."""
    elements, size = next((e, s) for name, e, s in GGML_TYPES.values() if name == kind_name)
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    # Byte offsets of each type's scales (block_* in ggml-common.h): first, or for Q6_K last; Q4_K and Q5_K have two.
    places = {"Q6_K": (size - 2,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}
    divisor = {"Q6_K": 16 * 64, "Q4_K": 16 * 32, "Q5_K": 16 * 32, "IQ4_NL": 64}.get(kind_name, 16)
    for place in places.get(kind_name, (0,)):
        scales = (spread / divisor * (0.5 + random.random(blocks.shape[:2]))).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


class PlainGraph:
    """A graph with a cache of fixed capacity, with plain arrays, independent of edgespec's runtime."""

    def __init__(self, path: Path, *, capacity: int = 64, optimise: bool = True) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        if not optimise:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.capacity, self.length = capacity, 0
        self._cache = {
            each.name: np.zeros((1, each.shape[1], capacity, each.shape[3]), np.float32)
            for each in self.session.get_inputs()
            if each.name.startswith("past_key_values.")
        }

    def forward(self, tokens: Sequence[int], rows: int | None = None) -> npt.NDArray[np.float32]:
        """Append tokens; returns the scores of the last ``rows`` tokens (all): float32 (rows, rows of the head)."""
        count = len(tokens)
        total = self.length + count
        feeds = {
            "input_ids": np.array([tokens], dtype=np.int64),
            "seqlens_k": np.array([total - 1], dtype=np.int32),
            "total_sequence_length": np.array(total, dtype=np.int32),
            "first_row": np.array([0 if rows is None else count - rows], dtype=np.int64),
            **self._cache,
        }
        presents = [name.replace("past_key_values", "present") for name in self._cache]
        logits, *cache = self.session.run(["logits", *presents], feeds)
        self._cache = dict(zip(self._cache, cache, strict=True))
        self.length = total
        return np.array(logits[0], dtype=np.float32)

    def rewind(self, length: int) -> None:
        """Drop the tail; the graph never reads beyond the length."""
        self.length = length


def llama_logits(path: Path, tokens: Sequence[int], chunks: Sequence[int] | None = None) -> npt.NDArray[np.float32]:
    """llama.cpp's scores after each of the tokens, with a float32 cache: float32 (tokens, vocabulary)."""
    settings = LlamaSettings(kv_type="f32", flash_attention=False, repack=False)
    found, start = [], 0
    with load_model(path, settings) as model, model.open(256) as sequence:
        for size in chunks or [len(tokens)]:
            rows = sequence.forward(list(tokens[start : start + size]), size)
            found += [rows.logits(row) for row in range(size)]
            start += size
    return np.stack(found)
