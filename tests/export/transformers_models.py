"""Tiny models of every dense family as transformers saves them, and the logits that transformers computed with them.

The weights come from the names of the tensors, so that only shapes, settings and some logits are kept:

    python tests/export/transformers_models.py

writes them again where torch and transformers are installed. It needs nothing else of this repository.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

RECORD = Path(__file__).with_name("transformers_logits.json")
ROWS = 265  # those of the tokenizer that tests write
TOKENS = tuple((7 * place * place + 3 * place) % ROWS for place in range(72))
PLACES, LOGITS = (0, 9, 40, 71), 12  # the recorded rows, and how many of the first logits of each

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": ROWS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LONG_HEADS = {"head_dim": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "tie_word_embeddings": True}

# By a name: transformers' class, and the settings of its configuration.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rope_parameters": _LLAMA3}),
    "llama with biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", _LONG_HEADS),
    "gemma2": ("Gemma2ForCausalLM", {**_GEMMA, "num_hidden_layers": 3}),
    "gemma3": ("Gemma3ForCausalLM", {**_GEMMA, "num_hidden_layers": 7}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": None}),
    "phi3 of long contexts": (
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 4.0,
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 9.0],
            },
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.05,
            "logits_scaling": 1.25,
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "mistral3": (
        "Ministral3ForCausalLM",
        {
            "head_dim": 32,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
        },
    ),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 16}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            "num_hidden_layers": 5,
            "sliding_window": 24,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    "exaone4": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": _LLAMA3},
    ),
    "exaone4 of 64 layers": (
        "Exaone4ForCausalLM",
        {"num_hidden_layers": 64, "intermediate_size": 32, "sliding_window": 24, "rope_parameters": _LLAMA3},
    ),
    "seed_oss": ("SeedOssForCausalLM", _LONG_HEADS),
}
_OFFSET = ("gemma2", "gemma3")  # their norms multiply by one more than the weight


def weights(model: str, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The tensor ``name`` of ``model``: float32, from a stream that numpy keeps."""
    drawn = np.random.RandomState(zlib.crc32(f"{model} {name}".encode())).standard_normal(shape)
    if name.endswith("norm.weight"):
        drawn = 0.2 * drawn + (0.0 if model in _OFFSET else 1.0)
    elif len(shape) == 1:
        drawn *= 0.2
    else:
        drawn *= 1.5 / math.sqrt(shape[-1])
    return drawn.astype(np.float32)


def recorded() -> dict[str, Any]:
    """By a model's name: ``config``, ``shapes`` of the first layer's and other tensors, ``logits`` of ``PLACES``."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["models"]
    return found


def _record(model: str) -> dict[str, Any]:
    import torch
    import transformers

    kind, settings = MODELS[model]
    config_class = getattr(transformers, kind).config_class
    config = config_class(**{**_SIZES, **settings})
    config._attn_implementation = "eager"
    network = getattr(transformers, kind)(config).float().eval()
    shapes = {
        name: list(tensor.shape)
        for name, tensor in network.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    network.load_state_dict(
        {name: torch.tensor(weights(model, name, tuple(shape))) for name, shape in shapes.items()}, strict=False
    )
    network.tie_weights()
    with torch.no_grad():
        rows = network(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].double()
    return {
        "config": {**config.to_diff_dict(), "architectures": [kind]},
        "shapes": {name: shape for name, shape in shapes.items() if ".layers." not in name or ".layers.0." in name},
        "logits": [[round(float(each), 5) for each in rows[place][:LOGITS]] for place in PLACES],
    }


def main() -> None:
    import transformers

    models = {model: _record(model) for model in MODELS}
    lines = [f"{json.dumps(model)}: {json.dumps(found)}" for model, found in models.items()]
    text = f'{{"transformers": "{transformers.__version__}", "models": {{\n' + ",\n".join(lines) + "\n}}\n"
    RECORD.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
