"""Makes a tiny random model with transformers and writes what it computes, for benchmarks/transformers_logits.py.

Runs in a Python that has torch and transformers (4.51 or newer), and imports nothing else of this repository:

    python scripts/transformers_reference.py KIND|real FOLDER

writes the model as ``save_pretrained`` does, tokens.npy (int64, positions), logits.npy (float32, positions x rows).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

POSITIONS = 256
ROWS = 288  # of which the tokenizer that is added later has 265
FIRST_TOKEN, TOKENS = 3, 262  # none of the markers

COMMON: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 128,
    "intermediate_size": 224,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 4.0}
# Seven layers: the sixth attends to everything. A window below the positions, so that it shows.
GEMMA = {"num_hidden_layers": 7, "sliding_window": 64, "query_pre_attn_scalar": 32}

GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
    "logits_scaling": 1.25,
}
# Half of the positions are beyond the original context.
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * pair for pair in range(12)],
    "long_factor": [1.2**pair for pair in range(12)],
}
PHI: dict[str, Any] = {"pad_token_id": None, "original_max_position_embeddings": 128}

# Name of the classes, and what differs from COMMON.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama3": ("Llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-yarn": ("Llama", {"rope_scaling": YARN}),
    "llama-linear": ("Llama", {"rope_scaling": LINEAR}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 48}),
    "qwen2": ("Qwen2", {"rope_theta": 1000000.0}),
    "qwen2-yarn": ("Qwen2", {"rope_scaling": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 48}),
    "gemma3": ("Gemma3", GEMMA | {"tie_word_embeddings": True}),
    "granite": ("Granite", GRANITE),
    "phi3": ("Phi3", PHI),
    "phi3-long": ("Phi3", PHI | {"partial_rotary_factor": 0.75, "rope_scaling": LONG}),
}


REAL = "real"  # in place of a kind: the folder holds a model already, and only the tokens and logits are written


def main() -> int:
    """Write the model of the kind and the folder that the command line names, and what it computes."""
    import numpy as np
    import torch
    import transformers

    kind, folder = sys.argv[1], Path(sys.argv[2])
    tokens = np.random.default_rng(1).integers(FIRST_TOKEN, FIRST_TOKEN + TOKENS, POSITIONS)
    if kind == REAL:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    else:
        model = random_model(kind)
        model.save_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None]).logits[0].float().numpy()
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "logits.npy", logits)
    return 0


def random_model(kind: str) -> Any:
    """A model with weights such that scores and logits are about 1."""
    import torch
    import transformers

    name, changes = KINDS[kind]
    own = COMMON | changes
    if name == "Qwen2":
        del own["head_dim"]  # this kind has no such setting
    text = "Text" if name == "Gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(**own)
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for label, weights in model.named_parameters():
            if weights.dim() > 1:  # scores and logits of about 1, where transformers' own start gives almost 0
                # A tied embedding is the head as well, which adds up as many products as the state has numbers.
                unit = "embed" in label and not own["tie_word_embeddings"]
                weights.normal_(0.0, 1.0 if unit else weights.shape[1] ** -0.5)
            else:
                weights.normal_(0.0 if name == "Gemma3" or label.endswith("bias") else 1.0, 0.1)
    return model


if __name__ == "__main__":
    sys.exit(main())
