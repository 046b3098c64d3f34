"""Reads GGUF headers as hostile input, before native code sees the file.

Every count, length and offset is checked against the file's size with Python integers before use. No stated size is
allocated unchecked. A file that ggml's own reader would refuse is refused here first.
"""

from __future__ import annotations

import math
import mmap
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgespec.architectures.shape import EMBEDDING, OllamaNames
from edgespec.architectures.table import ARCHITECTURES, OLLAMAS
from edgespec.errors import ModelFileError
from edgespec.files.checked import cannot_map
from edgespec.files.gguf.cursor import DOWNLOAD_AGAIN, INLINE_BYTES, Cursor, Entry, quote, read_entry
from edgespec.files.gguf.names import MOST_PARTS, part_name
from edgespec.files.gguf.records import (
    CHAT_TEMPLATE,
    GGML_TYPES,
    MASK_TOKEN_KEY,
    FilePart,
    GgufArray,
    GgufHeader,
    MetadataValue,
    TensorInfo,
)

_VERSIONS = (2, 3)  # what ggml reads; 1 was withdrawn, 4 does not exist
_FIXED_BYTES = 24  # magic, version, two counts
_LEAST_KEY_BYTES = 8 + 1 + 4 + 1  # length, one character, type, one byte of value
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length, one character, dimension count, one dimension, type, offset
_MOST_KEY_BYTES = 65535  # the format's own limit
_MOST_NAME_BYTES = 63  # GGML_MAX_NAME is 64 and counts the closing NUL
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
_DEFAULT_ALIGNMENT = 32  # GGUF_DEFAULT_ALIGNMENT
_LEAST_ALIGNMENT = 8  # the format asks for a multiple of 8
_MOST_ALIGNMENT = 65536  # the largest memory page in use (64 KiB, on ARM)
_OLLAMAS_MXFP4 = 4  # of its first files of gpt-oss; their blocks have another order than MXFP4

# Limits that keep reading a hostile file under a second and 50 MB. Real files stay far below: models have under 100
# keys, and DeepSeek-R1 with unmerged experts has the most tensors, a little over 61 * 256 * 3 = 46848.
_MOST_KEYS = 8192
_MOST_TENSORS = 65536

_ARCHITECTURE = re.compile(r"[A-Za-z0-9._-]{1,64}")
# The smallest and largest allowed value of each known number. 0 heads or feed-forward rows occur in recurrent models.
# Positions are int32 in llama.cpp, layers at most LLAMA_MAX_LAYERS = 512. The other limits are at least ten times
# above any known model and keep the product of any two below 2**63.
_LIMITS: Mapping[str, tuple[int, int]] = {
    "context_length": (1, 2**31 - 1),
    "block_count": (1, 512),
    "embedding_length": (1, 2**20),
    "feed_forward_length": (0, 2**24),
    "attention.head_count": (0, 2**14),
    "attention.head_count_kv": (0, 2**14),
    "attention.key_length": (1, 2**16),
    "attention.value_length": (1, 2**16),
    "attention.key_length_swa": (1, 2**16),
    "attention.value_length_swa": (1, 2**16),
    "attention.sliding_window": (0, 2**32 - 1),
    "attention.shared_kv_layers": (0, 512),
    "embedding_length_per_layer_input": (0, 2**16),
    "rope.dimension_count": (0, 2**16),
    "rope.dimension_count_swa": (0, 2**16),
    "expert_count": (0, 2**14),
    "expert_used_count": (0, 2**14),
    "expert_feed_forward_length": (0, 2**24),
    "ssm.conv_kernel": (0, 2**10),
    "ssm.group_count": (0, 2**14),
    "ssm.inner_size": (0, 2**24),
    "ssm.state_size": (0, 2**16),
    "ssm.time_step_rank": (0, 2**14),
    "vocab_size": (1, 2**31 - 1),
}
_PER_LAYER = frozenset(
    {"feed_forward_length", "expert_feed_forward_length", "attention.head_count", "attention.head_count_kv"}
)
_INTEGERS = frozenset({"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"})
_SPLIT_NUMBER, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_TOKEN_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "unknown", "padding"))

_CONVERT = "convert it: `edgespec export {} --to gguf -o DIR`"

# Other files that users pass as a model, recognised by their first bytes.
_IMPOSTORS: tuple[tuple[re.Pattern[bytes], str, str], ...] = (
    (
        re.compile(rb"version https://git-lfs"),
        "it is a git-LFS pointer, not the file itself",
        "run `git lfs pull`, or download the file from its page",
    ),
    (
        re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml|head|!--)", re.IGNORECASE),
        "it is a web page, not a model",
        "the download link led to a page: use the file's direct address",
    ),
    (re.compile(rb"\s*\{"), "it is JSON, not a model", "open the file: it may hold a server's error message"),
    (re.compile(rb"(?s).{6}\0\0\{"), "it is a safetensors file, not GGUF", _CONVERT),
    (re.compile(rb"PK\x03\x04"), "it is a zip archive (or a PyTorch checkpoint), not GGUF", "unpack or convert it"),
    (re.compile(rb"\x1f\x8b"), "it is gzip-compressed", "unpack it first"),
    (re.compile(rb"\x80[\x02-\x05]"), "it is a Python pickle, not GGUF", "never load a pickle you do not trust"),
    (re.compile(rb"lmgg|tjgg|fmgg|algg"), "it is in a GGML format older than GGUF", "fetch a GGUF version of it"),
    (re.compile(rb"FUGG"), "it is a big-endian GGUF, which is not supported", "fetch a little-endian version of it"),
)


def read_header(path: Path, others: Sequence[Path] = ()) -> GgufHeader:
    """Read and check the header of the GGUF file at ``path`` without reading the weights.

    For a split model ``path`` is any part, and the header is that of the whole model. The other parts lie in the
    same folder under the names of llama-gguf-split, or are ``others``, in any order.

    Raises ModelFileError with the reason, the byte offset and a hint if a file is missing, is not GGUF, or
    contradicts itself, its size or the other parts in a way that could harm native code.
    """
    header = _read_file(path)
    if _parts_of(header) == 1:
        if others:
            raise ModelFileError(path, "it is a whole model, not a part of a split model")
        return _text_part(header)
    return _text_part(
        _joined(sorted([header, *map(_read_file, others)], key=_number) if others else _siblings(header))
    )


def _read_file(path: Path) -> GgufHeader:
    """The header of one file: a whole model or a part of a split model."""
    try:
        # Checked before opening: opening a named pipe would block.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise ModelFileError(path, f"it is {what}", hint="give the path of a .gguf file")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise ModelFileError(path, "the file is empty", offset=0, hint=DOWNLOAD_AGAIN)
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
                return _read(path, data, size)
    except FileNotFoundError as error:
        raise ModelFileError(path, "no such file", hint="check the path") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or a file that shrank while it was read
        raise cannot_map(path, error, "the file cannot be read") from error


def _read(path: Path, data: mmap.mmap, size: int) -> GgufHeader:
    cursor = Cursor(path, data, size)
    _check_start(cursor, data[:64])
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version != 0:
        raise cursor.fail("it is a big-endian GGUF, which is not supported", 4, "fetch a little-endian version of it")
    if version not in _VERSIONS:
        newer = version > max(_VERSIONS)
        hint = "update edgespec, or fetch a file of version 3" if newer else "fetch a file of version 3"
        raise cursor.fail(f"GGUF version {version} is not supported (2 and 3 are)", 4, hint)
    tensor_count, key_count = cursor.u64("the tensor count"), cursor.u64("the key count")
    if tensor_count > min(_MOST_TENSORS, size // _LEAST_TENSOR_BYTES):
        raise cursor.fail(f"a count of {tensor_count} tensors is implausible for {size} bytes", 8)
    if key_count > min(_MOST_KEYS, size // _LEAST_KEY_BYTES):
        raise cursor.fail(f"a count of {key_count} keys is implausible for {size} bytes", 16)

    entries: dict[str, Entry] = {}
    for _ in range(key_count):
        start = cursor.position
        key = cursor.name("key", _MOST_KEY_BYTES)
        if key in entries:
            raise cursor.fail(f"duplicate key {quote(key)}", start)
        entries[key] = read_entry(cursor, key)
    architecture = _check_known(cursor, entries)
    alignment = _alignment(cursor, entries)
    tensors, data_offset = _tensors(cursor, tensor_count, alignment)
    return GgufHeader(
        path=path,
        file_bytes=size,
        version=version,
        architecture=architecture,
        alignment=alignment,
        metadata=MappingProxyType({key: entry.value for key, entry in entries.items()}),
        tensors=tensors,
        data_offset=data_offset,
    )


def to_convert(model: Path | str) -> str:
    """The hint for weights in safetensors: the command that converts a folder, or a repository, with them."""
    named = str(model)
    return _CONVERT.replace("{}", f'"{named}"' if " " in named else named)


def _check_start(cursor: Cursor, head: bytes) -> None:
    if head[:4] == b"GGUF":
        if cursor.size < _FIXED_BYTES:
            raise cursor.fail(f"too short: {cursor.size} bytes hold no GGUF header", cursor.size, DOWNLOAD_AGAIN)
        cursor.position = 4
        return
    for pattern, reason, hint in _IMPOSTORS:
        if pattern.match(head):
            raise cursor.fail(reason, 0, to_convert(cursor.path.parent) if hint is _CONVERT else hint)
    if cursor.size < 4:
        raise cursor.fail(f"too short: {cursor.size} bytes hold no GGUF header", cursor.size, DOWNLOAD_AGAIN)
    raise cursor.fail(
        f"bad magic: it starts with {head[:4]!r} instead of b'GGUF'", 0, "give the path of a .gguf file"
    )


# ------------------------------------------------------------------------------------ well-known keys


def _check_known(cursor: Cursor, entries: Mapping[str, Entry]) -> str:
    """Check the keys that edgespec or llama.cpp read.

    Returns the architecture, or "" for a later part of a split model.
    """
    number = _check_split(cursor, entries)
    if "general.architecture" not in entries:
        if number > 0:
            return ""
        raise cursor.fail("it does not state general.architecture")
    architecture = _text(cursor, entries, "general.architecture") or ""
    if not _ARCHITECTURE.fullmatch(architecture):
        offset = entries["general.architecture"].offset
        raise cursor.fail(
            f"general.architecture is {quote(architecture)}, which is not an architecture's name", offset
        )
    named = [key for key in entries if key.startswith(f"{CHAT_TEMPLATE}.")]
    for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre", CHAT_TEMPLATE, *named):
        _text(cursor, entries, key)
    tokens = _table(cursor, entries, "tokenizer.ggml.tokens", "string", None)
    if tokens == 0:
        raise cursor.fail("tokenizer.ggml.tokens is empty", entries["tokenizer.ggml.tokens"].offset)
    types = entries.get("tokenizer.ggml.token_type")
    if types is not None and types.kind == "uint32" and types.count is not None:
        reason = "its token types are uint32 instead of int32, as in mlx_lm's files, whose tokens have no ranks"
        raise cursor.fail(reason, types.offset, "convert the model's folder instead: `edgespec export`")
    # llama.cpp indexes token_type and scores by token id without a bounds check.
    _table(cursor, entries, "tokenizer.ggml.token_type", "int32", tokens)
    _table(cursor, entries, "tokenizer.ggml.scores", "float32", tokens, or_kind="int32")  # Mistral's own files
    _table(cursor, entries, "tokenizer.ggml.merges", "string", None)
    for key in (*_TOKEN_IDS, "general.file_type"):
        _integers(cursor, entries, key, 0, 2**32 - 1, per_layer=False)
    # A mask is fed to the model, so it needs a row of the embedding. A trimmed drafter states no tokens here.
    _integers(cursor, entries, MASK_TOKEN_KEY, 0, (tokens or 2**31) - 1, per_layer=False)
    for suffix, (least, most) in _LIMITS.items():
        _integers(cursor, entries, f"{architecture}.{suffix}", least, most, per_layer=suffix in _PER_LAYER)
    _check_heads(cursor, entries, f"{architecture}.attention.head_count")
    return architecture


def _check_split(cursor: Cursor, entries: Mapping[str, Entry]) -> int:
    """The number of this part of a split model, from 0; 0 for a model in one file."""
    _integers(cursor, entries, _SPLIT_COUNT, 0, MOST_PARTS, per_layer=False)
    _integers(cursor, entries, _SPLIT_NUMBER, 0, MOST_PARTS, per_layer=False)
    _integers(cursor, entries, _SPLIT_TENSORS, 0, _MOST_TENSORS, per_layer=False)
    count, number = (entries[key].value if key in entries else 0 for key in (_SPLIT_COUNT, _SPLIT_NUMBER))
    assert isinstance(count, int)
    assert isinstance(number, int)
    if number >= max(count, 1):
        raise cursor.fail(f"it is part {number + 1} of {count}", entries[_SPLIT_NUMBER].offset)
    if count > 1 and _SPLIT_TENSORS not in entries:
        raise cursor.fail(f"it is part of a split model and does not state {_SPLIT_TENSORS}")
    return number


def _text(cursor: Cursor, entries: Mapping[str, Entry], key: str) -> str | None:
    entry = entries.get(key)
    if entry is None:
        return None
    if entry.kind != "string" or entry.count is not None:
        raise cursor.fail(f"{key} must be a string but is {_describe(entry)}", entry.offset)
    if not isinstance(entry.value, str):
        raise cursor.fail(f"{key} is too long: over {INLINE_BYTES} bytes of text", entry.offset)
    return entry.value


def _table(
    cursor: Cursor, entries: Mapping[str, Entry], key: str, kind: str, count: int | None, *, or_kind: str = ""
) -> int | None:
    entry = entries.get(key)
    if entry is None:
        return None
    if entry.kind not in (kind, or_kind) or entry.count is None:
        raise cursor.fail(f"{key} must be an array of {kind} but is {_describe(entry)}", entry.offset)
    if count is not None and entry.count != count:
        raise cursor.fail(f"{key} has {entry.count} elements for {count} tokens", entry.offset)
    return entry.count


def _integers(
    cursor: Cursor, entries: Mapping[str, Entry], key: str, least: int, most: int, *, per_layer: bool
) -> None:
    entry = entries.get(key)
    if entry is None:
        return
    if entry.kind not in _INTEGERS or (entry.count is not None and not per_layer):
        raise cursor.fail(f"{key} must be an integer but is {_describe(entry)}", entry.offset)
    most_layers = _LIMITS["block_count"][1]
    if entry.count is not None and not 0 < entry.count <= most_layers:
        raise cursor.fail(f"{key} lists {entry.count} layers: 1 to {most_layers} are allowed", entry.offset)
    if isinstance(entry.value, GgufArray):
        values = tuple(entry.value.values())
    else:
        values = entry.value if isinstance(entry.value, tuple) else (entry.value,)
    for value in values:
        if not least <= int(value) <= most:
            raise cursor.fail(f"{key} is {value}: {least} to {most} is allowed", entry.offset)


def _check_heads(cursor: Cursor, entries: Mapping[str, Entry], key: str) -> None:
    """Grouped attention needs whole groups; an assertion in native code would end the process otherwise."""
    heads, kv_heads = entries.get(key), entries.get(f"{key}_kv")
    if heads is None or kv_heads is None or not isinstance(heads.value, int) or not isinstance(kv_heads.value, int):
        return
    if kv_heads.value and heads.value % kv_heads.value:
        reason = f"{heads.value} attention heads cannot share {kv_heads.value} key-value heads evenly"
        raise cursor.fail(reason, kv_heads.offset)


def _alignment(cursor: Cursor, entries: Mapping[str, Entry]) -> int:
    entry = entries.get("general.alignment")
    if entry is None:
        return _DEFAULT_ALIGNMENT
    if entry.kind != "uint32" or not isinstance(entry.value, int):
        raise cursor.fail(f"general.alignment must be a uint32 but is {_describe(entry)}", entry.offset)
    value = entry.value
    if value & (value - 1) or not _LEAST_ALIGNMENT <= value <= _MOST_ALIGNMENT:
        wanted = f"a power of two from {_LEAST_ALIGNMENT} to {_MOST_ALIGNMENT} is needed"
        raise cursor.fail(f"general.alignment is {value}: {wanted}", entry.offset)
    return value


def _describe(entry: Entry) -> str:
    return f"a {entry.kind}" if entry.count is None else f"an array of {entry.kind}"


# --------------------------------------------------------------------------------------------- tensors


def _tensors(cursor: Cursor, count: int, alignment: int) -> tuple[tuple[TensorInfo, ...], int]:
    """The tensors, and the absolute offset of the data section."""
    found: dict[str, tuple[TensorInfo, int]] = {}
    for _ in range(count):
        start = cursor.position
        tensor = _tensor(cursor)
        if tensor.name in found:
            raise cursor.fail(f"duplicate tensor name {quote(tensor.name)}", start)
        if tensor.offset % alignment:
            reason = f"tensor {quote(tensor.name)} starts at {tensor.offset}, not aligned to {alignment} bytes"
            raise cursor.fail(reason, start)
        found[tensor.name] = (tensor, start)
    base = _round_up(cursor.position, alignment) if count else cursor.position
    tensors: list[TensorInfo] = []
    expected = base  # ggml requires the tensors in order and without gaps
    for name, (info, start) in found.items():
        tensor = TensorInfo(name, info.shape, info.type_name, base + info.offset, info.byte_count)
        end = tensor.offset + tensor.byte_count
        if end > cursor.size:
            reason = f"truncated: the data of tensor {quote(name)} ends at byte {end} and the file at {cursor.size}"
            raise cursor.fail(reason, start, DOWNLOAD_AGAIN)
        if tensor.offset != expected:
            other = next((t for t in tensors if t.offset < end and tensor.offset < t.offset + t.byte_count), None)
            fault = f"overlaps with {quote(other.name)}" if other else "leaves a gap or is out of order"
            reason = f"the data of tensor {quote(name)} {fault}: it starts at {tensor.offset} instead of {expected}"
            raise cursor.fail(reason, start)
        expected = _round_up(end, alignment)
        tensors.append(tensor)
    return tuple(tensors), base


def _tensor(cursor: Cursor) -> TensorInfo:
    """One tensor's record; its offset is relative to the data section."""
    start = cursor.position
    name = cursor.name("tensor name", _MOST_NAME_BYTES)
    what = f"tensor {quote(name)}"
    dimensions = cursor.u32(what)
    if not 0 < dimensions <= _MOST_DIMENSIONS:
        raise cursor.fail(f"{what} has {dimensions} dimensions: 1 to {_MOST_DIMENSIONS} are allowed", start)
    shape = tuple(int(length) for length in cursor.unpack("Q", dimensions, 8, what))
    elements = math.prod(shape)
    if elements == 0 or elements >= 2**63:
        raise cursor.fail(f"{what} has an impossible number of elements: shape {shape}", start)
    number, offset = cursor.u32(what), cursor.u64(what)
    if number not in GGML_TYPES:
        hint = "an early version of Ollama wrote it: pull the model again" if number == _OLLAMAS_MXFP4 else None
        raise cursor.fail(f"{what} has the unknown or removed ggml type {number}", start, hint)
    type_name, block, block_bytes = GGML_TYPES[number]
    if shape[0] % block:
        reason = f"{what} has rows of {shape[0]} elements, not a multiple of the {block} in a block of {type_name}"
        raise cursor.fail(reason, start)
    return TensorInfo(name, shape, type_name, offset, elements // block * block_bytes)


def _round_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


# ------------------------------------------------------------------------------------- parts of a split model

_TOGETHER = "put all parts of the split model into one folder, from the same download and under their original names"


def _stated(header: GgufHeader, key: str) -> int:
    value = header.metadata.get(key, 0)
    assert isinstance(value, int)  # checked with the other known keys
    return int(value)


def _number(header: GgufHeader) -> int:
    """The number of this part, from 1."""
    return _stated(header, _SPLIT_NUMBER) + 1


def _parts_of(header: GgufHeader) -> int:
    return max(1, _stated(header, _SPLIT_COUNT))


def _which(header: GgufHeader) -> str:
    count = _parts_of(header)
    return "a whole model" if count == 1 else f"part {_number(header)} of {count}"


def _siblings(header: GgufHeader) -> Iterator[GgufHeader]:
    """All parts of the split model of ``header``, found by their names. Raises ModelFileError."""
    path, name = header.path, part_name(header.path.name)
    if name is None:
        raise ModelFileError(
            path,
            f"it is {_which(header)} of a split model, and its name does not tell the names of the other parts",
            hint="give the parts their published names, for example model-00001-of-00003.gguf",
        )
    for number, each in enumerate(name.names, start=1):
        sibling = path.with_name(each)
        if sibling != path and not sibling.exists():
            raise ModelFileError(sibling, f"part {number} of {name.count} of this model is missing", hint=_TOGETHER)
        part = header if sibling == path else _read_file(sibling)
        if (_number(part), _parts_of(part)) != (number, name.count):
            said = f"its name says part {number} of {name.count}, its content says {_which(part)}"
            raise ModelFileError(sibling, said, hint=_TOGETHER)
        yield part


def _joined(in_order: Iterable[GgufHeader]) -> GgufHeader:
    """Join the headers of all parts. Raises ModelFileError if parts are missing or of different models."""
    parts = iter(in_order)
    first = next(parts)
    count, total = _parts_of(first), _stated(first, _SPLIT_TENSORS)
    split: list[FilePart] = []
    tensors: dict[str, TensorInfo] = {}
    start = 0
    for number, part in enumerate(chain((first,), parts), start=1):
        if _number(part) != number or _parts_of(part) != count:
            said = f"it is {_which(part)}, but part {number} of {count} was expected"
            raise ModelFileError(part.path, said, hint=_TOGETHER)
        if part.architecture not in ("", first.architecture) or _stated(part, _SPLIT_TENSORS) != total:
            raise ModelFileError(part.path, f"it is part {number} of another model", hint=_TOGETHER)
        for tensor in part.tensors:
            if tensor.name in tensors:
                reason = f"it and an earlier part hold tensor {quote(tensor.name)}: they are of different models"
                raise ModelFileError(part.path, reason, hint=_TOGETHER)
            tensors[tensor.name] = replace(tensor, offset=start + tensor.offset)
        split.append(FilePart(part.path, start, part.file_bytes))
        start += part.file_bytes
        if len(tensors) > total:
            reason = f"parts 1 to {number} hold {len(tensors)} tensors, but the model has {total}"
            raise ModelFileError(part.path, reason, hint=_TOGETHER)
    if len(split) != count:
        raise ModelFileError(first.path, f"it has {count} parts, but {len(split)} are given", hint=_TOGETHER)
    if len(tensors) < total:
        reason = f"its {count} parts hold {len(tensors)} tensors, but the model has {total}"
        raise ModelFileError(first.path, reason, hint=_TOGETHER)
    return replace(first, file_bytes=start, tensors=tuple(tensors.values()), split=tuple(split))


# ------------------------------------------------------------------------- the text model of a file from Ollama

# Ollama keeps a model that sees in one file, and writes some keys and names differently than llama.cpp reads them, or
# not at all. The file of each architecture says which.

# Name prefixes in llama.cpp's projector files: image encoder, audio encoder, and projection to the text model.
_OTHER_SENSES = ("v.", "a.", "mm.")

_TABLES = ("tokens", "scores", "token_type")


def _text_part(header: GgufHeader) -> GgufHeader:
    """The header with only the text model's tensors, and with the keys and names that llama.cpp's reader needs.

    Raises ModelFileError if the file changes while it is read, or if its tensors cannot have those names.
    """
    aside = tuple(tensor for tensor in header.tensors if tensor.name.startswith(_OTHER_SENSES))
    if aside and len(aside) < len(header.tensors):
        text = tuple(tensor for tensor in header.tensors if not tensor.name.startswith(_OTHER_SENSES))
        header = replace(header, tensors=text, vision_tensors=aside)
    architecture = ARCHITECTURES.get(header.architecture) or OLLAMAS.get(header.architecture)
    if architecture is None:
        return header
    more = None
    if architecture.completed is not None:
        more = architecture.completed(header.metadata, is_multimodal=bool(header.vision_tensors))
    if architecture.ollama is not None:
        header = _renamed(header, architecture.name, architecture.ollama)
    return header if more is None else _completed(header, more)


def _renamed(header: GgufHeader, name: str, names: OllamaNames) -> GgufHeader:
    """The header with llama.cpp's names, of which ``name`` is the architecture's, in place of Ollama's ``names``."""
    if names.architecture not in ("", header.architecture):
        return header
    tensors = tuple(_under_other_names(header, names))
    if header.architecture == name:
        return header if tensors == header.tensors else replace(header, tensors=tensors, completed=True)
    # Keys that begin with llama.cpp's name were not checked, and Ollama's converter writes none.
    kept = {key: value for key, value in header.metadata.items() if not key.startswith(f"{name}.")}
    old = f"{header.architecture}."
    metadata = {f"{name}.{key.removeprefix(old)}" if key.startswith(old) else key: kept[key] for key in kept}
    metadata["general.architecture"] = name
    return replace(header, architecture=name, metadata=MappingProxyType(metadata), tensors=tensors, completed=True)


def _under_other_names(header: GgufHeader, names: OllamaNames) -> Iterator[TensorInfo]:
    """The tensors that are read, each by llama.cpp's name. Raises ModelFileError."""
    found = set[str]()
    for tensor in header.tensors:
        *layer, own = tensor.name.split(".", 2)
        new = names.tensors.get(own, own)
        if not new and own:
            reason = f"its tensor {quote(tensor.name)} joins what is read apart, as Ollama's converter wrote it"
            raise ModelFileError(header.path, reason, hint="fetch the same model from the hub")
        new = ".".join((*layer, new))
        if new in found:
            reason = f"it holds tensor {quote(new)} twice, once by another name"
            raise ModelFileError(header.path, reason)
        found.add(new)
        if not new.startswith(names.aside):
            yield tensor if new == tensor.name else replace(tensor, name=new)


def _completed(header: GgufHeader, more: Mapping[str, Any]) -> GgufHeader:
    metadata = {**header.metadata, **more}
    rows = next((tensor for tensor in header.tensors if tensor.name == EMBEDDING), None)
    if rows is not None and len(rows.shape) > 1:
        for table in _TABLES:
            key = f"tokenizer.ggml.{table}"
            if key in metadata:
                metadata[key] = _cut(metadata[key], rows)
    return replace(header, metadata=MappingProxyType(metadata), completed=True)


def _cut(table: MetadataValue, embedding: TensorInfo) -> MetadataValue:
    """The table without image tokens, which have no row in the embedding."""
    rows = embedding.shape[1]
    if isinstance(table, tuple):
        return table[:rows]
    return table.first(rows) if isinstance(table, GgufArray) else table
