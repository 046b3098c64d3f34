"""Tiny Hugging Face folders with random weights, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.architectures.table import ARCHITECTURES
from tests.support.hf_folder import write_byte_level_tokenizer, write_safetensors

Tensors = dict[str, tuple[str, npt.NDArray[Any]]]

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_WIDTH, ROWS = 64, 96, 2, 4, 2, 16, 265


def bf16(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The weights truncated to BF16; rounding does not matter for tests."""
    return (weights.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def random_tensors(architecture: str, dtype: str = "F32", *, tied: bool = False) -> Tensors:
    """Weights with transformers' names, from a fixed seed."""
    random = np.random.default_rng(5)
    found: Tensors = {}

    def add(name: str, *shape: int) -> None:
        weights = random.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))
        if len(shape) == 1 and architecture != "gemma3" and name.endswith("norm.weight"):
            weights = 1 + weights
        stored = {"F32": weights, "F16": weights.astype(np.float16), "BF16": bf16(weights)}[dtype]
        found[name] = (dtype, stored)

    add("model.embed_tokens.weight", ROWS, WIDTH)
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        for name, rows in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}.items():
            add(f"{block}.self_attn.{name}_proj.weight", rows * HEAD_WIDTH, WIDTH)
            if architecture == "qwen2":
                add(f"{block}.self_attn.{name}_proj.bias", rows * HEAD_WIDTH)
        add(f"{block}.self_attn.o_proj.weight", WIDTH, HEADS * HEAD_WIDTH)
        if architecture in ("qwen3", "gemma3"):
            add(f"{block}.self_attn.q_norm.weight", HEAD_WIDTH)
            add(f"{block}.self_attn.k_norm.weight", HEAD_WIDTH)
        if architecture == "gemma3":
            add(f"{block}.pre_feedforward_layernorm.weight", WIDTH)
            add(f"{block}.post_feedforward_layernorm.weight", WIDTH)
        add(f"{block}.mlp.gate_proj.weight", INNER, WIDTH)
        add(f"{block}.mlp.up_proj.weight", INNER, WIDTH)
        add(f"{block}.mlp.down_proj.weight", WIDTH, INNER)
        add(f"{block}.input_layernorm.weight", WIDTH)
        add(f"{block}.post_attention_layernorm.weight", WIDTH)
        if architecture == "phi3":
            _fuse(found, f"{block}.self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj"))
            _fuse(found, f"{block}.mlp", "gate_up_proj", ("gate_proj", "up_proj"))
    add("model.norm.weight", WIDTH)
    if not tied:
        add("lm_head.weight", ROWS, WIDTH)
    return found


def _fuse(tensors: Tensors, module: str, name: str, parts: tuple[str, ...]) -> None:
    drawn = [tensors.pop(f"{module}.{part}.weight") for part in parts]
    tensors[f"{module}.{name}.weight"] = (drawn[0][0], np.concatenate([weights for _, weights in drawn]))


def random_config(architecture: str, *, tied: bool = False, **changes: Any) -> dict[str, Any]:
    """The config.json for ``random_tensors``."""
    return {
        "architectures": [next(iter(ARCHITECTURES[architecture].saved.classes))],
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_WIDTH,
        "query_pre_attn_scalar": HEAD_WIDTH,
        "max_position_embeddings": 256,
        "sliding_window": 128 if architecture == "gemma3" else None,
        "vocab_size": ROWS,
        "tie_word_embeddings": tied,
        **changes,
    }


def write_random_folder(
    folder: Path,
    architecture: str = "llama",
    *,
    dtype: str = "F32",
    tied: bool = False,
    tensors: Tensors | None = None,
    **changes: Any,
) -> Path:
    """Write a folder as transformers saves it, with ``changes`` in config.json; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_tensors(architecture, dtype, tied=tied) if tensors is None else tensors
    write_safetensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps(random_config(architecture, tied=tied, **changes)))
    write_byte_level_tokenizer(folder)
    return folder
