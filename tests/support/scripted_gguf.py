"""A tiny model whose answer to any prompt is a given list of tokens: each token of the script leads to the next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WIDTH = 256
_KINDS = gguf.TokenType
_TABLE = [
    *[("<unk>", _KINDS.UNKNOWN), ("<s>", _KINDS.CONTROL), ("<|im_start|>", _KINDS.CONTROL)],
    ("<|im_end|>", _KINDS.CONTROL),
    *((f"<0x{byte:02X}>", _KINDS.BYTE) for byte in range(256)),
]


def write_scripted_gguf(
    path: Path, script: Sequence[str], *, template: str = CHATML, kinds: dict[str, int] | None = None
) -> Path:
    """Write the model to ``path`` and return the path.

    The texts of the script differ: each is a token, a user-defined one unless ``kinds`` names another kind. The
    last is ``<|im_end|>``, which ends answers.
    """
    table = list(_TABLE)
    known = {text: token for token, (text, _) in enumerate(table)}
    for text in script:
        if text not in known:
            known[text] = len(table)
            table.append((text, _KINDS((kinds or {}).get(text, _KINDS.USER_DEFINED))))
    ids = [known[text] for text in script]
    embeddings = _rows(np.random.default_rng(0).standard_normal((len(table), _WIDTH)))
    # All tokens outside the script share a direction, which leads to the first token.
    embeddings[:, 0] = 40.0
    embeddings[ids[:-1], 0] = 0.0
    embeddings = _rows(embeddings)
    head = np.zeros_like(embeddings)
    for before, after in itertools.pairwise(ids):
        head[after] += embeddings[before]
    head[ids[0], 0] += 40.0
    writer = _header(path, template)
    writer.add_token_list([text.encode() for text, _ in table])
    writer.add_token_scores([-float(token) for token in range(len(table))])
    writer.add_token_types([int(kind) for _, kind in table])
    square, thin = np.zeros((_WIDTH, _WIDTH), np.float32), np.zeros((64, _WIDTH), np.float32)
    tensors = {f"blk.0.attn_{name}": square for name in ("q", "k", "v", "output")}
    tensors |= {"blk.0.ffn_gate": thin, "blk.0.ffn_up": thin, "blk.0.ffn_down": thin.T.copy()}
    norms = dict.fromkeys(("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"), np.ones(_WIDTH, np.float32))
    for name, tensor in {"token_embd": embeddings, "output": head, **norms, **tensors}.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rows(rows: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float32]:
    """The rows with a mean square of one."""
    return (rows / np.sqrt((rows**2).mean(axis=1, keepdims=True))).astype(np.float32)


def _header(path: Path, template: str) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(path.stem)
    writer.add_context_length(16_384)
    writer.add_block_count(1)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_rope_dimension_count(_WIDTH // 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    for name, token in (("bos", 1), ("eos", 3), ("unknown", 0)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_add_bos_token(False)
    writer.add_bool("tokenizer.ggml.add_space_prefix", False)
    writer.add_chat_template(template)
    return writer
