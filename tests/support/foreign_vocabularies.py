"""A tiny model in another vocabulary: the same tokens in another order, fewer of them, or of another kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from tests.support.vocabularies import byte_letters

_BLANK = "\u2581"
_BYTE = int(gguf.TokenType.BYTE)
_CONTROL = int(gguf.TokenType.CONTROL)
_NORMAL = int(gguf.TokenType.NORMAL)


def in_another_order(
    source: Path, path: Path, *, seed: int = 5, keep: Callable[[str], bool] = lambda _text: True, renamed: str = ""
) -> Path:
    """Write ``source``'s model with the tokens to ``keep`` in another order, still SentencePiece; returns the path.

    Control tokens begin with ``renamed``, so that only their roles tell what they are.
    """
    texts, kinds = _table(source)
    order = [token for token, text in enumerate(texts) if kinds[token] != _NORMAL or keep(text)]
    np.random.default_rng(seed).shuffle(order)
    names = [renamed + texts[token] if kinds[token] == _CONTROL else texts[token] for token in order]
    return _write(source, path, order, names, [kinds[token] for token in order], "llama")


def as_byte_pairs(source: Path, path: Path) -> Path:
    """Write ``source``'s model with a byte-pair vocabulary of its words; returns the path."""
    texts, kinds = _table(source)
    letters = byte_letters()
    names: list[str] = []
    order: list[int] = []
    for token in sorted(range(len(texts)), key=lambda token: kinds[token] == _BYTE):
        text = texts[token]
        if kinds[token] == _BYTE:
            name = letters[int(text[3:5], 16)]
        elif kinds[token] == _NORMAL:
            name = "".join(letters[byte] for byte in text.replace(_BLANK, " ").encode())
        else:
            name = text
        if name not in names:
            names.append(name)
            order.append(token)
    known = set(names)
    merges = [f"{name[:-1]} {name[-1]}" for name in names if len(name) > 1 and name[:-1] in known]
    types = [_NORMAL if kinds[token] == _BYTE else kinds[token] for token in order]
    return _write(source, path, order, names, types, "gpt2", merges)


def _table(source: Path) -> tuple[list[str], list[int]]:
    fields = gguf.GGUFReader(source).fields
    return fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()


def _write(
    source: Path,
    path: Path,
    order: list[int],
    names: list[str],
    kinds: list[int],
    model: str,
    merges: list[str] | None = None,
) -> Path:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith(("GGUF.", "tokenizer.ggml")) or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        value = len(order) if field.name == "llama.vocab_size" else field.contents()
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("default" if model == "llama" else "qwen2")
    writer.add_token_list([name.encode() for name in names])
    writer.add_token_types(kinds)
    if merges is None:  # shorter pieces have better scores, as in the source
        writer.add_token_scores([-float(token) for token in order])
    else:
        writer.add_token_merges(merges)
    for key in ("bos", "eos", "unknown"):
        token = reader.fields[f"tokenizer.ggml.{key}_token_id"].contents()
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", order.index(token))
    for tensor in reader.tensors:
        rows = tensor.name in ("token_embd.weight", "output.weight")
        data = np.ascontiguousarray(tensor.data[order]) if rows else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
