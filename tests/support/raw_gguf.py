"""A GGUF writer for invalid files: bytes in the format's layout, with any value in any field."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", U64: "Q", I64: "q", F64: "d"}


class Raw(bytes):
    """A value's bytes, written unchanged."""


def string(text: str | bytes, *, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(kind: int, content: Any) -> bytes:
    if isinstance(content, Raw):
        return bytes(content)
    if kind == STR:
        return string(content)
    if kind == BOOL:
        return bytes([content])
    return struct.pack("<" + _FORMATS[kind], content)


def array(kind: int, items: Any, *, count: int | None = None) -> Raw:
    items = list(items)
    head = struct.pack("<IQ", kind, len(items) if count is None else count)
    return Raw(head + b"".join(value(kind, item) for item in items))


def tensor(
    name: str | bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0, *, dims: int | None = None
) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return (
        string(name)
        + struct.pack("<I", len(shape) if dims is None else dims)
        + sizes
        + struct.pack("<IQ", kind, offset)
    )


Key = tuple[str | bytes, int, Any]
ARCH: Key = ("general.architecture", STR, "llama")


def build(
    keys: list[Key] | None = None,
    tensors: list[bytes] | None = None,
    *,
    data: int = 0,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    keys = [ARCH] if keys is None else keys
    tensors = tensors or []
    out = magic + struct.pack("<I", version)
    out += struct.pack(
        "<QQ", len(tensors) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count
    )
    for name, kind, content in keys:
        out += string(name) + struct.pack("<I", kind) + value(kind, content)
    out += b"".join(tensors)
    return out + bytes(-len(out) % alignment if tensors else 0) + bytes(data)


def tokens(*texts: str | bytes, model: str = "llama", types: list[int] | None = None, **ids: int) -> list[Key]:
    keys: list[Key] = [ARCH, ("tokenizer.ggml.model", STR, model), ("tokenizer.ggml.tokens", ARR, array(STR, texts))]
    if types is not None:
        keys.append(("tokenizer.ggml.token_type", ARR, array(I32, types)))
    keys += [(f"tokenizer.ggml.{name}_token_id", U32, number) for name, number in ids.items()]
    return keys


def read(path: Path, content: bytes) -> GgufHeader:
    path.write_bytes(content)
    return read_header(path)
