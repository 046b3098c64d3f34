"""Hugging Face folders made from GGUF files, the inverse of export: config, tokenizer and safetensors.

Matrices are dequantised to float32. Facts that a folder cannot hold (types of unused tokens, scores) are omitted.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufArray, GgufHeader
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer

__all__ = [
    "BYTE_CHARACTERS",
    "LLAMA3_REGEX",
    "METASPACE_NORMALIZER",
    "QWEN2_REGEX",
    "byte_level",
    "write_byte_level_tokenizer",
    "write_config",
    "write_hf_folder",
    "write_safetensors",
    "write_tensors",
    "write_tokenizer",
]

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = _NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_REGEX = LLAMA3_REGEX.replace("{1,3}", "")
# As llama.cpp quotes them: Seed's file holds the ends of lines themselves.
_SEED_REGEX = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
_GPT_4O_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_REGEX = _GPT_4O_REGEX.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
METASPACE_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
# Bytes in GPT-2's notation: printable bytes as themselves, others as characters from 256.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + rank) for rank, byte in enumerate(_HIDDEN)
}


def write_hf_folder(source: Path, folder: Path) -> Path:
    """Write the GGUF ``source`` as transformers would save its model; returns ``folder``."""
    folder.mkdir(parents=True)
    header = read_header(source)
    write_config(header, folder)
    write_tensors(source, header, folder)
    write_tokenizer(source, header, folder)
    return folder


# ------------------------------------------------------------------------------------------------ weights


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, npt.NDArray[Any]]]) -> Path:
    """Write tensors (name: type and elements; BF16 as uint16 bit patterns); returns ``path``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(data.shape), "data_offsets": [offset, offset + data.nbytes]}
        offset += data.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for _, data in tensors.values():
            file.write(np.ascontiguousarray(data).tobytes())
    return path


def write_tensors(source: Path, header: GgufHeader, folder: Path) -> None:
    """Write every tensor of the GGUF as float32, with one at a time in memory."""
    heads = {"attn_q": header.head_count, "attn_k": header.head_count_kv}
    reader = gguf.GGUFReader(str(source))
    spans: dict[str, Any] = {}
    offset = 0
    for tensor in reader.tensors:
        shape = [int(length) for length in reversed(tensor.shape.tolist())]
        end = offset + 4 * int(np.prod(shape))
        spans[_their_name(tensor.name, header)] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(spans).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for tensor in reader.tensors:
            weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
            if header.architecture == "llama" and kind in heads:
                weights = _halved(weights, heads[kind])
            if header.architecture == "gemma3" and tensor.name.endswith("_norm.weight"):
                weights = weights - np.float32(1)
            file.write(np.ascontiguousarray(weights).tobytes())


def _halved(weights: npt.NDArray[np.float32], heads: Any) -> npt.NDArray[np.float32]:
    """Rows of each head in transformers' rotary order: first all even rows, then all odd ones."""
    per_head = weights.reshape(heads, -1, *weights.shape[1:])
    return np.concatenate([per_head[:, ::2], per_head[:, 1::2]], axis=1).reshape(weights.shape)


def _their_name(name: str, header: GgufHeader) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    _, layer, kind = stem.split(".")
    names = _GEMMA_NAMES if header.architecture == "gemma3" else _NAMES
    return f"model.layers.{layer}.{names[kind]}.{suffix}"


# ----------------------------------------------------------------------------------------- config, tokenizer


def write_config(header: GgufHeader, folder: Path, **more: Any) -> None:
    """Write config.json for the GGUF, with ``more`` members."""
    prefix = header.architecture
    config = {
        "architectures": [_CLASSES[prefix]],
        "model_type": "gemma3_text" if prefix == "gemma3" else prefix,
        "hidden_size": header.embedding_length,
        "intermediate_size": header.metadata[f"{prefix}.feed_forward_length"],
        "num_hidden_layers": header.block_count,
        "num_attention_heads": header.head_count,
        "num_key_value_heads": header.head_count_kv,
        "head_dim": header.key_length,
        "max_position_embeddings": header.context_length,
        "rms_norm_eps": header.metadata[f"{prefix}.attention.layer_norm_rms_epsilon"],
        "rope_theta": header.metadata.get(f"{prefix}.rope.freq_base", 10000.0),
        "vocab_size": header.vocabulary_size,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in header.tensors),
    }
    if prefix == "gemma3":
        config |= {
            "sliding_window": header.metadata["gemma3.attention.sliding_window"],
            "query_pre_attn_scalar": header.key_length,
        }
    write_json(folder / "config.json", config | more)


def write_tokenizer(source: Path, header: GgufHeader, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for the GGUF without its unused tokens."""
    texts, types = _array(header, "tokens"), _array(header, "token_type")
    vocab = {text: token for token, text in enumerate(texts) if types[token] != _UNUSED}
    added = [
        {"id": token, "content": text, "special": types[token] != _USER_DEFINED}
        for text, token in vocab.items()
        if types[token] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    document: dict[str, Any] = {"version": "1.0", "added_tokens": added, "post_processor": None}
    if header.metadata["tokenizer.ggml.model"] == "gpt2":
        merges = [merge.split(" ") for merge in _array(header, "merges")]
        document |= byte_level(str(header.metadata["tokenizer.ggml.pre"]))
        document["model"] = {"type": "BPE", "vocab": vocab, "merges": merges, **document.pop("more")}
    else:
        document |= {"normalizer": METASPACE_NORMALIZER, "pre_tokenizer": None}
        document["model"] = {
            "type": "BPE",
            "unk_token": texts[types.index(_UNKNOWN)],
            "byte_fallback": True,
            "vocab": vocab,
            "merges": _merges_by_score(texts, types, _array(header, "scores")),
        }
    write_json(folder / "tokenizer.json", document)
    with_bos = LlamaTokenizer(source)
    config: dict[str, Any] = {"add_bos_token": with_bos.adds_bos, "chat_template": header.chat_template}
    with_bos.close()
    for key, name in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
        token = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int):
            config[f"{name}_token"] = {"content": texts[token], "special": True}
    write_json(folder / "tokenizer_config.json", config)


def byte_level(pre: str) -> dict[str, Any]:
    """The normalizer and pre-tokenizer that llama.cpp calls ``pre``; "more" has the model's other members."""
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

    def split(regex: str, behavior: str = "Isolated") -> dict[str, Any]:
        how = {"behavior": behavior, "invert": behavior == "Removed"}
        first = {"type": "Split", "pattern": {"Regex": regex}, **how}
        return {"type": "Sequence", "pretokenizers": [first, plain | {"use_regex": False}]}

    digits = {"type": "Digits", "individual_digits": True}
    known: dict[str, dict[str, Any]] = {
        "gpt-2": {"normalizer": None, "pre_tokenizer": plain, "more": {}},
        "smollm": {
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, plain]},
            "more": {},
        },
        "llama-bpe": {"normalizer": None, "pre_tokenizer": split(LLAMA3_REGEX), "more": {"ignore_merges": True}},
        "dbrx": {"normalizer": None, "pre_tokenizer": split(LLAMA3_REGEX), "more": {}},
        "gpt-4o": {"normalizer": None, "pre_tokenizer": split(_GPT_4O_REGEX, "Removed"), "more": {}},
        "tekken": {"normalizer": None, "pre_tokenizer": split(_TEKKEN_REGEX), "more": {"ignore_merges": True}},
        "seed-coder": {"normalizer": None, "pre_tokenizer": split(_SEED_REGEX), "more": {}},
        "qwen2": {"normalizer": {"type": "NFC"}, "pre_tokenizer": split(QWEN2_REGEX), "more": {}},
    }
    return known[pre]


def write_byte_level_tokenizer(folder: Path, pre: str = "gpt-2", **config: Any) -> None:
    """Write a tokenizer of 256 bytes, a few merges and three markers: 0 ends a text, 1 begins one, 2 ends a turn."""
    vocab: dict[str, int] = {}
    for text in (*BYTE_CHARACTERS.values(), "th", "the", "Ġthe", "in", "er", "Ġa"):
        vocab[text] = 3 + len(vocab)
    markers = ("<|endoftext|>", "<|begin|>", "<|im_end|>")
    structure = byte_level(pre)
    more = structure.pop("more")
    merges = ["t h", "th e", "Ġ the", "i n", "e r", "Ġ a"]
    document = {
        "added_tokens": [{"id": token, "content": text, "special": True} for token, text in enumerate(markers)],
        "post_processor": None,
        **structure,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, **more},
    }
    write_json(folder / "tokenizer.json", document)
    write_json(folder / "tokenizer_config.json", {"eos_token": markers[0], "bos_token": markers[1]} | config)


def _merges_by_score(texts: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """All ways to merge two pieces into another, ordered by the resulting piece's score."""
    tokens = {text: token for token, text in enumerate(texts) if types[token] == _NORMAL}
    merges = []
    for piece in sorted(tokens, key=lambda text: -scores[tokens[text]]):
        splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        merges += [[left, right] for left, right in splits if left in tokens and right in tokens]
    return merges


def _array(header: GgufHeader, name: str) -> list[Any]:
    value = header.metadata[f"tokenizer.ggml.{name}"]
    return list(value.values()) if isinstance(value, GgufArray) else list(value)  # type: ignore[arg-type]


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
