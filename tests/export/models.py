"""Tiny models of several architectures, tied and untied, and llama.cpp's logits for them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from edgespec.runtimes.llama.library import load

WIDTH, LAYERS, HEADS, FEED_FORWARD = 64, 2, 2, 96
WORDS = tuple(f"▁w{number}" for number in range(41))
_TYPES = gguf.TokenType
TABLE: tuple[tuple[str, int], ...] = (
    ("<unk>", _TYPES.UNKNOWN),
    ("<s>", _TYPES.CONTROL),
    ("</s>", _TYPES.CONTROL),
    *((f"<0x{byte:02X}>", _TYPES.BYTE) for byte in range(256)),
    *((word, _TYPES.NORMAL) for word in WORDS),
    ("<tool>", _TYPES.USER_DEFINED),
    *((f"[PAD{number}]", _TYPES.UNUSED) for number in range(9)),
)
VOCABULARY_SIZE = len(TABLE)


def write_model(
    path: Path,
    architecture: str = "llama",
    *,
    tied: bool = False,
    quant: str = "Q8_0",
    bias: bool = False,
) -> Path:
    """Write a model with random weights from a fixed seed."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_key_length(WIDTH // HEADS)
    writer.add_value_length(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    if architecture in {"gemma2", "gemma3"}:
        writer.add_sliding_window(128)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text.encode() for text, _ in TABLE])
    writer.add_token_scores([-float(rank) for rank in range(VOCABULARY_SIZE)])
    writer.add_token_types([int(kind) for _, kind in TABLE])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(11)

    def matrix(name: str, rows: int, columns: int) -> None:
        weights = random.standard_normal((rows, columns), dtype=np.float32) / np.float32(np.sqrt(columns))
        kind = gguf.GGMLQuantizationType[quant]
        writer.add_tensor(name, gguf.quantize(weights, kind), raw_dtype=kind)

    def vector(name: str, length: int) -> None:
        writer.add_tensor(name, 1 + random.standard_normal(length, dtype=np.float32) / 10)

    matrix("token_embd.weight", VOCABULARY_SIZE, WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        vector(f"{block}.attn_norm.weight", WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"{block}.{name}.weight", WIDTH, WIDTH)
        if architecture == "gemma3":
            vector(f"{block}.attn_q_norm.weight", WIDTH // HEADS)
            vector(f"{block}.attn_k_norm.weight", WIDTH // HEADS)
        if architecture in {"gemma2", "gemma3"}:
            vector(f"{block}.post_attention_norm.weight", WIDTH)
            vector(f"{block}.post_ffw_norm.weight", WIDTH)
        vector(f"{block}.ffn_norm.weight", WIDTH)
        matrix(f"{block}.ffn_gate.weight", FEED_FORWARD, WIDTH)
        matrix(f"{block}.ffn_up.weight", FEED_FORWARD, WIDTH)
        matrix(f"{block}.ffn_down.weight", WIDTH, FEED_FORWARD)
    vector("output_norm.weight", WIDTH)
    if not tied:
        matrix("output.weight", VOCABULARY_SIZE, WIDTH)
    if bias:
        vector("output.bias", VOCABULARY_SIZE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loads(path: Path) -> bool:
    """Whether llama.cpp loads the model with its weights."""
    pointer = _load(path)
    if pointer:
        load().api.llama_model_free(pointer)
    return bool(pointer)


def _load(path: Path) -> Any:
    api = load().api
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False  # GCC 12 compiles the code for AMX wrongly
    return api.llama_model_load_from_file(os.fsencode(path), params)


def logits(
    path: Path, tokens: list[int] | None = None, embeddings: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float32]:
    """llama.cpp's logits after each of the ``tokens`` or rows of ``embeddings``: float32 (count, vocabulary)."""
    api = load().api
    model = _load(path)
    assert model, f"llama.cpp does not load {path}"
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = 256, 64, 1, 1
    context = api.llama_init_from_model(model, params)
    assert context
    count = len(tokens) if tokens is not None else len(embeddings)  # type: ignore[arg-type]
    batch = api.llama_batch_init(count, 0 if embeddings is None else embeddings.shape[1], 1)
    try:
        for row in range(count):
            batch.pos[row], batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = row, 1, 0, 1
            if tokens is not None:
                batch.token[row] = tokens[row]
        if embeddings is not None:
            ctypes.memmove(batch.embd, np.ascontiguousarray(embeddings).ctypes.data, embeddings.nbytes)
        batch.n_tokens = count
        assert api.llama_decode(context, batch) == 0
        size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        rows = [np.ctypeslib.as_array(api.llama_get_logits_ith(context, row), (size,)).copy() for row in range(count)]
        return np.stack(rows)
    finally:
        api.llama_batch_free(batch)
        api.llama_free(context)
        api.llama_model_free(model)
