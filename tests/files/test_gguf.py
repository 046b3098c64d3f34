"""The GGUF header reader: what it says of good files, and that nothing bad gets past it."""

from __future__ import annotations

import hashlib
import os
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.errors import ModelFileError
from edgespec.files.gguf import GgufArray, GgufHeader, compare_vocabularies, read_header
from tests.support.tiny_gguf import CHATML, VOCABULARY, write_tiny_gguf

# ------------------------------------------------------------------------------ a writer that can lie

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", U64: "Q", I64: "q", F64: "d"}


class Raw(bytes):
    """A value's bytes, written as they are."""


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


# ----------------------------------------------------------------------------------------- good files


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", quant="Q8_0")


def test_facts_of_a_valid_file(tiny: Path) -> None:
    header = read_header(tiny)
    rows = 3 + 256 + len(VOCABULARY) + 2
    block = 64 * 64 * 2 + 32 * 64 * 2 + 128 * 64 * 3
    assert (header.version, header.architecture, header.alignment) == (3, "llama", 32)
    assert header.file_bytes == tiny.stat().st_size
    assert (header.vocabulary_size, header.context_length, header.block_count) == (rows, 2048, 2)
    assert (header.embedding_length, header.head_count, header.head_count_kv) == (64, 4, 2)
    assert (header.key_length, header.value_length) == (16, 16)
    assert header.chat_template == CHATML
    assert header.file_type_name == "Q8_0"
    assert header.parameter_count == 2 * rows * 64 + 2 * (block + 2 * 64) + 64
    matrices = (2 * rows * 64 + 2 * block) // 32 * 34
    assert header.tensor_bytes == matrices + 5 * 64 * 4
    assert header.bytes_per_forward == header.tensor_bytes - rows * 64 // 32 * 34
    assert header.kv_bytes_per_token(16) == 2 * 2 * (16 + 16) * 2
    assert header.kv_bytes_per_token(8.5) == 2 * 2 * (16 + 16) * 8.5 / 8


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0"])
def test_agrees_with_the_gguf_package(tmp_path: Path, quant: Any) -> None:
    header = read_header(write_tiny_gguf(tmp_path / "m.gguf", quant=quant, extra_tokens=3))
    other = gguf.GGUFReader(str(header.path))
    assert header.data_offset == other.data_offset
    assert [(t.name, t.shape, t.type_name, t.offset, t.byte_count) for t in header.tensors] == [
        (t.name, tuple(map(int, t.shape)), t.tensor_type.name, int(t.data_offset), int(t.n_bytes))
        for t in other.tensors
    ]
    theirs = {key: field.contents() for key, field in other.fields.items() if not key.startswith("GGUF.")}
    assert {key: _plain(each) for key, each in header.metadata.items()} == theirs


def _plain(each: Any) -> Any:
    if isinstance(each, GgufArray):
        return list(each.values())
    return list(each) if isinstance(each, tuple) else each


def test_metadata_cannot_be_changed(tiny: Path) -> None:
    with pytest.raises(TypeError):
        read_header(tiny).metadata["general.architecture"] = "other"  # type: ignore[index]


def test_every_value_type(tmp_path: Path) -> None:
    keys: list[Key] = [ARCH]
    scalars = {U8: 255, I8: -1, U16: 65535, I16: -2, U32: 2**32 - 1, I32: -3, U64: 2**64 - 1, I64: -4}
    keys += [(f"scalar.{kind}", kind, number) for kind, number in scalars.items()]
    keys += [("real.32", F32, 0.5), ("real.64", F64, 0.1), ("yes", BOOL, 1), ("no", BOOL, 0), ("text", STR, "ü🙂")]
    keys += [("none", ARR, array(U8, [])), ("flags", ARR, array(BOOL, [1, 0])), ("words", ARR, array(STR, ["a", ""]))]
    metadata = read(tmp_path / "m.gguf", build(keys)).metadata
    assert [metadata[f"scalar.{kind}"] for kind in scalars] == list(scalars.values())
    assert (metadata["real.32"], metadata["real.64"], metadata["text"]) == (0.5, 0.1, "ü🙂")
    assert metadata["yes"] is True
    assert metadata["no"] is False
    assert (metadata["none"], metadata["flags"], metadata["words"]) == ((), (True, False), ("a", ""))


def test_long_arrays_stay_in_the_file(tmp_path: Path) -> None:
    words, numbers = [f"w{i}" for i in range(65)], list(range(65))
    keys = [
        ARCH,
        ("words", ARR, array(STR, words)),
        ("numbers", ARR, array(U16, numbers)),
        ("big", STR, "x" * (1 << 20)),
    ]
    header = read(tmp_path / "m.gguf", build(keys))
    lazy, counts, big = (header.metadata[key] for key in ("words", "numbers", "big"))
    assert isinstance(lazy, GgufArray)
    assert isinstance(counts, GgufArray)
    assert isinstance(big, GgufArray)
    assert (lazy.element_type, lazy.count) == ("string", 65)
    assert list(lazy.strings()) == words == list(lazy.values())
    assert lazy.sha256() == hashlib.sha256(b"".join(map(string, words))).hexdigest()
    assert list(counts.values()) == numbers
    assert next(big.strings()) == "x" * (1 << 20)
    with pytest.raises(TypeError, match="uint16"):
        next(counts.strings())


def test_an_array_whose_file_changed_raises(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    words = read(path, build([ARCH, ("words", ARR, array(STR, ["abc"] * 65))])).metadata["words"]
    assert isinstance(words, GgufArray)
    path.write_bytes(path.read_bytes().replace(b"\3\0\0\0\0\0\0\0abc", b"\xff" * 11))
    with pytest.raises(ModelFileError, match="changed"):
        list(words.strings())
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="shorter"):
        words.sha256()
    path.unlink()
    with pytest.raises(ModelFileError, match="no longer"):
        words.sha256()


def test_per_layer_heads_and_defaults(tmp_path: Path) -> None:
    keys: list[Key] = [
        ARCH,
        ("llama.block_count", U32, 3),
        ("llama.embedding_length", U32, 64),
        ("llama.attention.head_count", U32, 4),
    ]
    plain = read(tmp_path / "m.gguf", build(keys))
    assert (plain.head_count_kv, plain.key_length) == (4, 16)
    assert plain.kv_bytes_per_token(16) == 3 * 4 * 32 * 2
    keys.append(("llama.attention.head_count_kv", ARR, array(I32, [2, 0, 1])))
    keys.append(("llama.attention.key_length", U32, 24))
    hybrid = read(tmp_path / "m.gguf", build(keys))
    assert (hybrid.head_count_kv, hybrid.key_length, hybrid.value_length) == ((2, 0, 1), 24, 16)
    assert hybrid.kv_bytes_per_token(16) == 3 * (24 + 16) * 2


def test_bytes_per_forward_of_tied_and_mixture_models(tmp_path: Path) -> None:
    keys: list[Key] = [ARCH, ("llama.expert_count", U32, 8), ("llama.expert_used_count", U32, 2)]
    tensors = [tensor("token_embd.weight", (8, 4)), tensor("blk.0.ffn_up_exps.weight", (8, 4, 8), 0, 128)]
    tied = read(tmp_path / "m.gguf", build(keys, tensors, data=128 + 1024))
    assert tied.bytes_per_forward == 128 + 1024 * 2 // 8
    tensors.append(tensor("output.weight", (8, 4), 0, 128 + 1024))
    untied = read(tmp_path / "m.gguf", build(keys, tensors, data=128 + 1024 + 128))
    assert untied.bytes_per_forward == 1024 * 2 // 8 + 128
    assert untied.file_type_name == "F32"


def test_a_file_without_weights_or_counts(tmp_path: Path) -> None:
    header = read(tmp_path / "m.gguf", build(tokens("a", "b"), version=2))
    assert (header.version, header.vocabulary_size, header.tensors, header.file_type_name) == (2, 2, (), "none")
    for missing in ("context_length", "head_count_kv", "key_length"):
        with pytest.raises(ModelFileError, match="does not state llama"):
            getattr(header, missing)
    with pytest.raises(ModelFileError, match="no vocabulary"):
        _ = read(tmp_path / "m.gguf", build()).vocabulary_size


def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    count = 152_000  # Qwen 2.5's, with as many merges; the weights are a hole in the file
    texts = [b"tok%d" % number for number in range(count)]
    keys = [*tokens(*texts, types=[1] * count), ("tokenizer.ggml.merges", ARR, array(STR, texts))]
    path = tmp_path / "m.gguf"
    path.write_bytes(build(keys, [tensor("w", (1 << 20, 256))]))
    os.truncate(path, path.stat().st_size + (1 << 30))
    start = time.perf_counter()
    assert read_header(path).vocabulary_size == count
    assert time.perf_counter() - start < 0.5


# -------------------------------------------------------------------------------------- hostile files

HUGE = 2**64 - 1
T = tensor("t", (32,))
TOKENS = tokens("a", "b")


def _key(name: str | bytes, kind: int, content: Any, **more: Any) -> bytes:
    return build([ARCH, (name, kind, content)], **more)


HOSTILE: dict[str, tuple[bytes, str]] = {
    # not GGUF at all
    "empty": (b"", "empty"),
    "one-byte": (b"G", "short"),
    "magic-only": (b"GGUF", "short"),
    "bad-magic": (build(magic=b"ABCD"), "magic"),
    "web-page": (b"\n<!DOCTYPE html><html><body>404</body></html>", "web page"),
    "lfs-pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "LFS"),
    "safetensors": (struct.pack("<Q", 20) + b'{"__metadata__":{}}  ', "safetensors"),
    "zip": (b"PK\x03\x04" + bytes(60), "zip"),
    "json": (b'{"error": "gated"}', "JSON"),
    "old-ggml": (b"tjgg" + bytes(60), "older"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    # counts
    "version-0": (build(version=0), "version 0"),
    "version-1": (build(version=1), "version 1"),
    "version-4": (build(version=4), "version 4"),
    "tensor-count-huge": (build(tensor_count=HUGE), "absurd"),
    "key-count-huge": (build(key_count=HUGE), "absurd"),
    "tensor-count-too-high": (build(tensors=[T], data=128, tensor_count=2), "name"),
    "key-count-too-high": (build(key_count=2) + bytes(64), "key"),
    # keys
    "key-empty": (_key("", U8, 1), "key of 0"),
    "key-too-long": (_key("k" * 65536, U8, 1), "65536"),
    "key-length-huge": (build(key_count=1, keys=[])[:24] + string("k", length=HUGE) + bytes(20), "bytes"),
    "key-bad-utf8": (_key(b"\xff\xfe", U8, 1), "UTF-8"),
    "key-with-nul": (_key("a\0b", U8, 1), "NUL"),
    "key-duplicate": (build([ARCH, ARCH]), "duplicate key"),
    # values
    "value-type-unknown": (_key("k", 13, Raw(bytes(8))), "unknown value type 13"),
    "element-type-unknown": (_key("k", ARR, array(99, [])), "unknown value type 99"),
    "bool-two": (_key("k", BOOL, 2), "bool"),
    "bool-array-two": (_key("k", ARR, array(BOOL, [0] * 100 + [2])), "bool"),
    "string-length-huge": (_key("k", STR, Raw(string("x", length=HUGE))), "truncated"),
    "string-bad-utf8": (_key("k", STR, b"ab\xc3"), "UTF-8"),
    "array-count-huge": (_key("k", ARR, array(U8, [], count=HUGE)), "truncated"),
    "string-array-count-huge": (_key("k", ARR, array(STR, [], count=HUGE)), "absurd"),
    "string-array-too-short": (_key("k", ARR, array(STR, ["a"], count=9)) + bytes(40), "truncated"),
    "string-in-array-huge": (_key("k", ARR, array(STR, [Raw(string("a", length=HUGE)), "b", "c"])), "truncated"),
    "nested-array": (_key("k", ARR, array(ARR, [Raw(array(U8, [1]))])), "nests"),
    "nested-deep": (_key("k", ARR, Raw(struct.pack("<IQ", ARR, 1) * 10_000)), "nests"),
    "too-many-strings": (_key("k", ARR, array(STR, [], count=1 << 22)) + bytes(1 << 25), "absurd"),
    "too-much-text": (build([ARCH] + [(f"k{i}", STR, "x" * (1 << 19)) for i in range(9)]), "more than"),
    # alignment
    "alignment-zero": (_key("general.alignment", U32, 0), "alignment is 0"),
    "alignment-odd": (_key("general.alignment", U32, 33), "power of two"),
    "alignment-absurd": (_key("general.alignment", U32, 1 << 31), "power of two"),
    "alignment-wrong-type": (_key("general.alignment", U64, 32), "must be a uint32"),
    "alignment-string": (_key("general.alignment", STR, "32"), "must be a uint32"),
    # tensors
    "name-too-long": (build(tensors=[tensor("t" * 64, (32,))], data=128), "64 bytes"),
    "name-empty": (build(tensors=[tensor("", (32,))], data=128), "name of 0"),
    "name-bad-utf8": (build(tensors=[tensor(b"\xff", (32,))], data=128), "UTF-8"),
    "name-duplicate": (build(tensors=[T, tensor("t", (32,), 0, 128)], data=256), "duplicate tensor"),
    "dims-0": (build(tensors=[tensor("t", ())], data=128), "0 dimensions"),
    "dims-5": (build(tensors=[tensor("t", (1,) * 5)], data=128), "5 dimensions"),
    "dims-huge": (build(tensors=[tensor("t", (32,), dims=2**32 - 1)], data=128), "dimensions"),
    "dim-zero": (build(tensors=[tensor("t", (32, 0))], data=128), "elements"),
    "dim-huge": (build(tensors=[tensor("t", (HUGE,))], data=128), "elements"),
    "dims-overflow-to-small": (build(tensors=[tensor("t", (2**32, 2**32, 1, 32))], data=128), "elements"),
    "bytes-overflow": (build(tensors=[tensor("t", (2**62,))], data=128), "truncated"),
    "ggml-type-unknown": (build(tensors=[tensor("t", (32,), 43)], data=128), "unknown or removed"),
    "ggml-type-removed": (build(tensors=[tensor("t", (32,), 31)], data=128), "unknown or removed"),
    "ggml-type-q8-1": (build(tensors=[tensor("t", (32,), 9)], data=128), "unknown or removed"),
    "row-not-whole-blocks": (build(tensors=[tensor("t", (33,), 8)], data=128), "multiple of the 32"),
    "offset-unaligned": (build(tensors=[tensor("t", (32,), 0, 8)], data=256), "aligned"),
    "offset-huge": (build(tensors=[tensor("t", (32,), 0, 2**64 - 32)], data=128), "truncated"),
    "offset-gap": (build(tensors=[tensor("t", (32,), 0, 64)], data=256), "gap"),
    "overlap": (build(tensors=[T, tensor("u", (32,), 0, 96)], data=256), "overlaps"),
    "overlap-same-place": (build(tensors=[T, tensor("u", (32,))], data=256), "overlaps"),
    "data-truncated": (build(tensors=[T], data=127), "truncated"),
    # well-known keys
    "architecture-missing": (build([]), "architecture"),
    "architecture-not-text": (build([("general.architecture", U32, 1)]), "must be a string"),
    "architecture-array": (build([("general.architecture", ARR, array(STR, ["llama"]))]), "must be a string"),
    "architecture-strange": (build([("general.architecture", STR, "../../x")]), "no architecture"),
    "tokens-not-an-array": (_key("tokenizer.ggml.tokens", STR, "a"), "array of string"),
    "tokens-of-numbers": (_key("tokenizer.ggml.tokens", ARR, array(I32, [1, 2])), "array of string"),
    "tokens-empty": (_key("tokenizer.ggml.tokens", ARR, array(STR, [])), "is empty"),
    "token-types-uint32": (
        build([*TOKENS, ("tokenizer.ggml.token_type", ARR, array(U32, [1, 1]))]),
        "array of int32",
    ),
    "token-types-too-few": (
        build([*TOKENS, ("tokenizer.ggml.token_type", ARR, array(I32, [1]))]),
        "1 elements for 2",
    ),
    "scores-float64": (build([*TOKENS, ("tokenizer.ggml.scores", ARR, array(F64, [0, 0]))]), "array of float32"),
    "scores-too-many": (build([*TOKENS, ("tokenizer.ggml.scores", ARR, array(F32, [0, 0, 0]))]), "3 elements for 2"),
    "template-not-text": (_key("tokenizer.chat_template", U32, 1), "must be a string"),
    "template-too-long": (_key("tokenizer.chat_template", STR, "x" * (1 << 20)), "absurd"),
    "eos-not-a-number": (_key("tokenizer.ggml.eos_token_id", F32, 1.0), "must be an integer"),
    "context-length-zero": (_key("llama.context_length", U32, 0), "not sane"),
    "context-length-float": (_key("llama.context_length", F32, 8.0), "must be an integer"),
    "context-length-bool": (_key("llama.context_length", BOOL, 1), "must be an integer"),
    "block-count-huge": (_key("llama.block_count", U32, 2**32 - 1), "not sane"),
    "embedding-negative": (_key("llama.embedding_length", I32, -64), "not sane"),
    "heads-per-layer-empty": (_key("llama.attention.head_count", ARR, array(U32, [])), "0 layers"),
    "heads-per-layer-many": (_key("llama.attention.head_count", ARR, array(U32, [1] * 513)), "513 layers"),
    "heads-per-layer-huge": (_key("llama.attention.head_count_kv", ARR, array(U32, [1, 2**31])), "not sane"),
    "heads-uneven": (
        build([ARCH, ("llama.attention.head_count", U32, 4), ("llama.attention.head_count_kv", U32, 3)]),
        "evenly",
    ),
    "split": (_key("split.count", U16, 2), "split"),
}


@pytest.fixture
def bounded() -> Iterator[None]:
    """Under a second and 50 MB, as promised for any corrupt file."""
    tracemalloc.start()
    start = time.perf_counter()
    yield
    elapsed, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert elapsed < 1
    assert peak < 50e6


@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_file_is_refused(tmp_path: Path, fault: str, request: pytest.FixtureRequest) -> None:
    content, word = HOSTILE[fault]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    request.getfixturevalue("bounded")
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert word in caught.value.reason
    assert caught.value.offset is not None
    assert 0 <= caught.value.offset <= len(content)
    assert caught.value.path == path
    assert str(caught.value).isprintable()


def test_the_hostile_files_are_one_step_from_valid(tmp_path: Path) -> None:
    """The writer itself is right: without a fault, its files are read."""
    assert read(tmp_path / "m.gguf", build()).architecture == "llama"
    assert read(tmp_path / "m.gguf", build(TOKENS)).vocabulary_size == 2
    header = read(tmp_path / "m.gguf", build(tensors=[T, tensor("u", (32,), 8, 128)], data=128 + 34))
    assert [each.byte_count for each in header.tensors] == [128, 34]
    aligned = build([ARCH, ("general.alignment", U32, 64)], [T], data=128, alignment=64)
    assert read(tmp_path / "m.gguf", aligned).data_offset % 64 == 0


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("most", ["keys", "tensors"])
def test_the_largest_counts_allowed_stay_bounded(tmp_path: Path, most: str) -> None:
    path = tmp_path / "m.gguf"
    if most == "keys":
        body = b"".join(string(b"k%d" % i) + struct.pack("<IB", U8, 1) for i in range(8192))
        path.write_bytes(build([], key_count=8192) + body)
        word = "architecture"
    else:
        records = b"".join(tensor(b"t%d" % i, (32,), 0, i * 128 + 32 * (i == 65535)) for i in range(65536))
        path.write_bytes(build(tensor_count=65536) + records)
        os.truncate(path, path.stat().st_size + 65537 * 128)
        word = "gap"
    tracemalloc.reset_peak()
    with pytest.raises(ModelFileError, match=word):
        read_header(path)


@pytest.mark.usefixtures("bounded")
def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        read_header(tmp_path / "missing.gguf")
    with pytest.raises(ModelFileError, match="directory"):
        read_header(tmp_path)
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_header(tmp_path / "a\0b")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ModelFileError, match="not a regular file"):
            read_header(tmp_path / "pipe")


@pytest.fixture(scope="module")
def small() -> bytes:
    """A complete model file of a few hundred bytes, so that every byte of it can be tried."""
    keys: list[Key] = [
        *tokens("<unk>", "a", "ü", types=[2, 1, 1], bos=1, eos=2),
        ("tokenizer.ggml.scores", ARR, array(F32, [0, -1, -2])),
        ("llama.context_length", U32, 128),
        ("llama.attention.head_count", ARR, array(U32, [4, 4])),
        ("flag", BOOL, 1),
        ("long", ARR, array(U8, range(70))),
    ]
    tensors = [tensor("token_embd.weight", (32, 3), 8), tensor("output_norm.weight", (32,), 0, 128)]
    return build(keys, tensors, data=128 + 128)


def test_every_truncation_is_refused(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "m.gguf"
    assert read(path, small).parameter_count == 32 * 4
    for length in range(len(small)):
        with pytest.raises(ModelFileError):
            read(path, small[:length])


def test_every_truncation_of_a_real_header_is_refused(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "m.gguf"
    content, header = tiny.read_bytes(), read_header(tiny)
    last = header.tensors[-1]
    end = last.offset + last.byte_count
    # Backwards, so that the file need not be written again; all of the header, then samples of the weights.
    path.write_bytes(content[:end])
    assert read_header(path).tensors == header.tensors
    lengths = [*range(end - 1, header.data_offset, -4099), *range(header.data_offset, -1, -1)]
    for length in lengths:
        os.truncate(path, length)
        with pytest.raises(ModelFileError):
            read_header(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_are_refused_or_harmless(tmp_path: Path, small: bytes, data: st.DataObject) -> None:
    broken = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(small) - 1))] = data.draw(st.sampled_from([0, 1, 8, 9, 127, 128, 255]))
    try:
        header = read(tmp_path / "m.gguf", bytes(broken))
    except ModelFileError as error:
        assert error.reason
        return
    _use(header)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=200), keys=st.integers(0, 3), tensors=st.integers(0, 3))
def test_noise_is_refused_or_harmless(tmp_path: Path, tail: bytes, keys: int, tensors: int) -> None:
    head = build(key_count=1 + keys, tensor_count=tensors)
    try:
        header = read(tmp_path / "m.gguf", head + tail)
    except ModelFileError:
        return
    _use(header)


def _use(header: GgufHeader) -> None:
    """A header that was let through can be used: every fact is there or refused with a sentence."""
    for each in header.tensors:
        assert header.data_offset <= each.offset
        assert each.offset + each.byte_count <= header.file_bytes
    for each_value in header.metadata.values():
        if isinstance(each_value, GgufArray):
            each_value.sha256()
            assert len(list(each_value.values())) == each_value.count
    for name in ("vocabulary_size", "context_length", "head_count", "head_count_kv", "key_length", "file_type_name"):
        try:
            getattr(header, name)
        except ModelFileError as error:
            assert "state" in error.reason or "vocabulary" in error.reason
    assert header.parameter_count >= 0
    assert header.bytes_per_forward <= header.tensor_bytes
    assert compare_vocabularies(header, header) is None or "tokenizer.ggml.tokens" not in header.metadata


# --------------------------------------------------------------------------------------- vocabularies


def _pair(tmp_path: Path, target: list[Key], drafter: list[Key]) -> tuple[GgufHeader, GgufHeader]:
    return read(tmp_path / "target.gguf", build(target)), read(tmp_path / "drafter.gguf", build(drafter))


def _words(count: int, **changed: str) -> list[str]:
    return [changed.get(f"w{i}", f"w{i}") for i in range(count)]


@pytest.mark.parametrize("count", [3, 100], ids=["short", "long"])
def test_equal_vocabularies(tmp_path: Path, count: int) -> None:
    keys = tokens(*_words(count), types=[1] * count, bos=1, eos=2)
    assert compare_vocabularies(*_pair(tmp_path, keys, keys)) is None
    # What only one of the two states is not compared.
    assert compare_vocabularies(*_pair(tmp_path, keys, tokens(*_words(count)))) is None


@pytest.mark.parametrize("count", [10, 100], ids=["short", "long"])
def test_first_differing_token_is_named(tmp_path: Path, count: int) -> None:
    target, drafter = tokens(*_words(count)), tokens(*_words(count, w7="seven", w9="nine"))
    difference = compare_vocabularies(*_pair(tmp_path, target, drafter))
    assert difference is not None
    assert (difference.token_id, difference.target_text, difference.drafter_text) == (7, "w7", "seven")
    assert difference.reason == "token 7 is 'w7' in the target but 'seven' in the drafter"


def test_bytes_that_are_not_text_are_compared_too(tmp_path: Path) -> None:
    texts: list[str | bytes] = [*_words(80)]
    other: list[str | bytes] = [*_words(80)]
    texts[5], other[5] = b"\xff", b"\\xff"  # the same when shown, different when stored
    difference = compare_vocabularies(*_pair(tmp_path, tokens(*texts), tokens(*other)))
    assert difference is not None
    assert difference.token_id == 5


def test_differing_types_special_ids_and_models(tmp_path: Path) -> None:
    keys = tokens(*_words(70), types=[1] * 70, bos=1, eos=2)
    cases: list[tuple[list[Key], str]] = [
        (tokens(*_words(70), types=[1] * 69 + [3]), "token 69 is 'w69' of type 1 in the target but 'w69' of type 3"),
        (tokens(*_words(70), types=[1] * 70, bos=1, eos=3), "end-of-sequence token is 2 in the target but 3"),
        (tokens(*_words(70), types=[1] * 70, bos=0, eos=2), "begin-of-sequence token is 1 in the target but 0"),
        (tokens(*_words(70), model="gpt2"), "'llama' but the drafter's is 'gpt2'"),
        ([ARCH], "the drafter holds no vocabulary"),
    ]
    for drafter, words in cases:
        difference = compare_vocabularies(*_pair(tmp_path, keys, drafter))
        assert difference is not None
        assert words in difference.reason


@pytest.mark.parametrize("longer", ["target", "drafter"])
def test_padding_at_the_tail_is_allowed(tmp_path: Path, longer: str) -> None:
    plain = tokens(*_words(70), types=[1] * 70)
    by_type = tokens(*_words(70), "unused", types=[1] * 70 + [5])
    by_text = tokens(*_words(70), "[PAD70]", "[PAD71]")
    real = tokens(*_words(70), "[PAD70]", "more", types=[1] * 70 + [5, 1])
    far = tokens(*_words(70), *(f"[PAD{i}]" for i in range(1025)))
    for padded, words in ((by_type, None), (by_text, None), (real, "token 71 is 'more'"), (far, "1025 tokens more")):
        pair = (padded, plain) if longer == "target" else (plain, padded)
        difference = compare_vocabularies(*_pair(tmp_path, *pair))
        if words is None:
            assert difference is None
        else:
            assert difference is not None
            assert words in difference.reason
            assert f"in the {longer}" in difference.reason or f"the {longer} has" in difference.reason


def test_tiny_models_share_their_vocabulary(tmp_path: Path, tiny: Path) -> None:
    target = read_header(tiny)
    padded = read_header(write_tiny_gguf(tmp_path / "padded.gguf", seed=1, extra_tokens=7))
    assert compare_vocabularies(target, padded) is None
    assert compare_vocabularies(padded, target) is None
    changed = list(VOCABULARY)
    changed[40] = "▁other"
    difference = compare_vocabularies(target, read_header(write_tiny_gguf(tmp_path / "c.gguf", vocabulary=changed)))
    assert difference is not None
    assert difference.token_id == 3 + 256 + 40
    assert difference.drafter_text == "▁other"
