"""The GGUF header reader refuses hostile files quickly and with little memory."""

from __future__ import annotations

import contextlib
import gc
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from edgespec.errors import ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufArray, GgufHeader
from edgespec.files.gguf.vocabulary import compare_vocabularies
from tests.support.raw_gguf import (
    ARCH,
    ARR,
    BOOL,
    F32,
    F64,
    I32,
    STR,
    U8,
    U16,
    U32,
    U64,
    Key,
    Raw,
    array,
    build,
    read,
    string,
    tensor,
    tokens,
)
from tests.support.tiny_gguf import write_tiny_gguf

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
    "tensor-count-huge": (build(tensor_count=HUGE), "implausible"),
    "key-count-huge": (build(key_count=HUGE), "implausible"),
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
    "string-array-count-huge": (_key("k", ARR, array(STR, [], count=HUGE)), "too many strings"),
    "string-array-too-short": (_key("k", ARR, array(STR, ["a"], count=9)) + bytes(40), "truncated"),
    "string-in-array-huge": (_key("k", ARR, array(STR, [Raw(string("a", length=HUGE)), "b", "c"])), "truncated"),
    "nested-array": (_key("k", ARR, array(ARR, [Raw(array(U8, [1]))])), "nests"),
    "nested-deep": (_key("k", ARR, Raw(struct.pack("<IQ", ARR, 1) * 10_000)), "nests"),
    "too-many-strings": (_key("k", ARR, array(STR, [], count=1 << 22)) + bytes(1 << 25), "too many strings"),
    "too-much-text": (build([ARCH] + [(f"k{i}", STR, "x" * (1 << 19)) for i in range(9)]), "more than"),
    # alignment
    "alignment-zero": (_key("general.alignment", U32, 0), "alignment is 0"),
    "alignment-odd": (_key("general.alignment", U32, 33), "power of two"),
    "alignment-huge": (_key("general.alignment", U32, 1 << 31), "power of two"),
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
    "architecture-strange": (build([("general.architecture", STR, "../../x")]), "not an architecture"),
    "tokens-not-an-array": (_key("tokenizer.ggml.tokens", STR, "a"), "array of string"),
    "tokens-of-numbers": (_key("tokenizer.ggml.tokens", ARR, array(I32, [1, 2])), "array of string"),
    "tokens-empty": (_key("tokenizer.ggml.tokens", ARR, array(STR, [])), "is empty"),
    "token-types-uint32": (build([*TOKENS, ("tokenizer.ggml.token_type", ARR, array(U32, [1, 1]))]), "mlx_lm"),
    "token-types-uint64": (
        build([*TOKENS, ("tokenizer.ggml.token_type", ARR, array(U64, [1, 1]))]),
        "array of int32",
    ),
    "token-types-too-few": (
        build([*TOKENS, ("tokenizer.ggml.token_type", ARR, array(I32, [1]))]),
        "1 elements for 2",
    ),
    "scores-float64": (build([*TOKENS, ("tokenizer.ggml.scores", ARR, array(F64, [0, 0]))]), "array of float32"),
    "scores-too-many": (build([*TOKENS, ("tokenizer.ggml.scores", ARR, array(F32, [0, 0, 0]))]), "3 elements for 2"),
    "template-not-text": (_key("tokenizer.chat_template", U32, 1), "must be a string"),
    "named-template-not-text": (_key("tokenizer.chat_template.tool_use", U32, 1), "must be a string"),
    "named-template-too-long": (_key("tokenizer.chat_template.rag", STR, "x" * (1 << 20)), "too long"),
    "template-too-long": (_key("tokenizer.chat_template", STR, "x" * (1 << 20)), "too long"),
    "eos-not-a-number": (_key("tokenizer.ggml.eos_token_id", F32, 1.0), "must be an integer"),
    "mask-outside-the-vocabulary": (build([*TOKENS, ("edgespec.mask_token_id", U32, 2)]), "0 to 1 is allowed"),
    "mask-negative": (build([*TOKENS, ("edgespec.mask_token_id", I32, -1)]), "0 to 1 is allowed"),
    "mask-huge": (_key("edgespec.mask_token_id", U64, HUGE), "is allowed"),
    "mask-not-a-number": (build([*TOKENS, ("edgespec.mask_token_id", STR, "<mask>")]), "must be an integer"),
    "mask-bool": (build([*TOKENS, ("edgespec.mask_token_id", BOOL, 1)]), "must be an integer"),
    "mask-float": (build([*TOKENS, ("edgespec.mask_token_id", F32, 1.0)]), "must be an integer"),
    "masks": (build([*TOKENS, ("edgespec.mask_token_id", ARR, array(U32, [0, 1]))]), "must be an integer"),
    "context-length-zero": (_key("llama.context_length", U32, 0), "is allowed"),
    "context-length-float": (_key("llama.context_length", F32, 8.0), "must be an integer"),
    "context-length-bool": (_key("llama.context_length", BOOL, 1), "must be an integer"),
    "block-count-huge": (_key("llama.block_count", U32, 2**32 - 1), "is allowed"),
    "embedding-negative": (_key("llama.embedding_length", I32, -64), "is allowed"),
    "heads-per-layer-empty": (_key("llama.attention.head_count", ARR, array(U32, [])), "0 layers"),
    "heads-per-layer-many": (_key("llama.attention.head_count", ARR, array(U32, [1] * 513)), "513 layers"),
    "expert-length-huge": (_key("llama.expert_feed_forward_length", U64, 2**62), "is allowed"),
    "delta-heads-huge": (_key("llama.ssm.time_step_rank", U64, 2**59), "is allowed"),
    "delta-elements-huge": (_key("llama.ssm.inner_size", U64, 2**63), "is allowed"),
    "heads-per-layer-huge": (_key("llama.attention.head_count_kv", ARR, array(U32, [1, 2**31])), "is allowed"),
    "heads-uneven": (
        build([ARCH, ("llama.attention.head_count", U32, 4), ("llama.attention.head_count_kv", U32, 3)]),
        "evenly",
    ),
    "split": (_key("split.count", U16, 2), "split"),
}


def refused(path: Path) -> ModelFileError:
    """The error of ``read_header``, raised in under two seconds and 50 MB, the limits for any corrupt file."""
    # Neither a busy machine nor memory and threads of other tests must count.
    gc.disable()
    start = time.thread_time()
    with pytest.raises(ModelFileError):
        read_header(path)
    taken_s = time.thread_time() - start
    gc.enable()
    assert taken_s < 2
    tracemalloc.start()  # after the timing: tracing makes every allocation several times slower
    try:
        with pytest.raises(ModelFileError) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    return caught.value


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_gguf_is_refused_with_a_reason(tmp_path: Path, fault: str) -> None:
    content, word = HOSTILE[fault]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    error = refused(path)
    assert word in error.reason
    assert error.offset is not None
    assert 0 <= error.offset <= len(content)
    assert error.path == path
    assert str(error).isprintable()


def test_the_test_writer_without_a_fault_writes_valid_gguf_files(tmp_path: Path) -> None:
    """Files of the test writer without a fault are read."""
    assert read(tmp_path / "m.gguf", build()).architecture == "llama"
    assert read(tmp_path / "m.gguf", build(TOKENS)).vocabulary_size == 2
    assert read(tmp_path / "m.gguf", build(TOKENS)).mask_token_id is None
    assert read(tmp_path / "m.gguf", build([*TOKENS, ("edgespec.mask_token_id", U8, 1)])).mask_token_id == 1
    header = read(tmp_path / "m.gguf", build(tensors=[T, tensor("u", (32,), 8, 128)], data=128 + 34))
    assert [each.byte_count for each in header.tensors] == [128, 34]
    aligned = build([ARCH, ("general.alignment", U32, 64)], [T], data=128, alignment=64)
    assert read(tmp_path / "m.gguf", aligned).data_offset % 64 == 0


def test_a_gguf_with_the_most_allowed_keys_is_read(tmp_path: Path) -> None:
    body = b"".join(string(b"k%d" % i) + struct.pack("<IB", U8, 1) for i in range(8192))
    (tmp_path / "m.gguf").write_bytes(build([], key_count=8192) + body)
    assert "architecture" in refused(tmp_path / "m.gguf").reason


@pytest.mark.slow
def test_a_gguf_with_the_most_allowed_tensors_is_read(tmp_path: Path) -> None:
    path, count = tmp_path / "m.gguf", 65536
    gap_before_the_last = [0] * (count - 1) + [32]
    records = (tensor(b"t%d" % i, (32,), 0, i * 128 + gap) for i, gap in enumerate(gap_before_the_last))
    path.write_bytes(build(tensor_count=count) + b"".join(records))
    os.truncate(path, path.stat().st_size + (count + 1) * 128)
    assert "gap" in refused(path).reason


def test_a_missing_gguf_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "missing.gguf").reason
    assert "directory" in refused(tmp_path).reason
    assert "cannot be read" in refused(tmp_path / "a\0b").reason
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert "not a regular file" in refused(tmp_path / "pipe").reason


def test_scores_may_be_whole_numbers_as_in_mistrals_own_files(tmp_path: Path) -> None:
    keys = [*tokens("<unk>", "a"), ("tokenizer.ggml.scores", ARR, array(I32, [0, -1]))]
    assert list(read(tmp_path / "m.gguf", build(keys)).values("tokenizer.ggml.scores")) == [0, -1]


@pytest.fixture(scope="module")
def small() -> bytes:
    """A complete model file of a few hundred bytes, so that tests can change every byte."""
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


def test_every_truncation_of_a_small_gguf_is_refused(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "m.gguf"
    assert read(path, small).parameter_count == 32 * 4
    for length in range(len(small)):
        with pytest.raises(ModelFileError):
            read(path, small[:length])


@pytest.mark.slow
def test_every_truncation_of_a_real_gguf_header_is_refused(tmp_path: Path) -> None:
    tiny = write_tiny_gguf(tmp_path / "tiny.gguf", quant="Q8_0")
    path = tmp_path / "m.gguf"
    content, header = tiny.read_bytes(), read_header(tiny)
    last = header.tensors[-1]
    end = last.offset + last.byte_count
    # Truncate backwards, without rewriting the file: samples of the weights, then every byte of the header.
    path.write_bytes(content[:end])
    assert read_header(path).tensors == header.tensors
    lengths = [*range(end - 1, header.data_offset, -4099), *range(header.data_offset, -1, -1)]
    for length in lengths:
        os.truncate(path, length)
        with pytest.raises(ModelFileError):
            read_header(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_gguf_with_flipped_bytes_is_refused_or_usable(tmp_path: Path, small: bytes, data: st.DataObject) -> None:
    broken = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(small) - 1))] = data.draw(st.sampled_from([0, 1, 8, 9, 127, 128, 255]))
    try:
        header = read(tmp_path / "m.gguf", bytes(broken))
    except ModelFileError:
        return
    _use(header)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=200), keys=st.integers(0, 3), tensors=st.integers(0, 3))
def test_random_bytes_after_a_gguf_start_are_refused_or_usable(
    tmp_path: Path, tail: bytes, keys: int, tensors: int
) -> None:
    head = build(key_count=1 + keys, tensor_count=tensors)
    try:
        header = read(tmp_path / "m.gguf", head + tail)
    except ModelFileError:
        return
    _use(header)


def _use(header: GgufHeader) -> None:
    """Read every fact of an accepted header: a fact is present or raises ModelFileError."""
    for each in header.tensors:
        assert header.data_offset <= each.offset
        assert each.offset + each.byte_count <= header.file_bytes
    for each_value in header.metadata.values():
        if isinstance(each_value, GgufArray):
            each_value.sha256()
            assert len(list(each_value.values())) == each_value.count
    for name in ("vocabulary_size", "context_length", "head_count", "head_count_kv", "key_length"):
        with contextlib.suppress(ModelFileError):
            getattr(header, name)
    assert header.parameter_count >= 0
    assert header.bytes_per_forward <= header.tensor_bytes
    assert compare_vocabularies(header, header) is None or "tokenizer.ggml.tokens" not in header.metadata


@pytest.mark.parametrize(("version", "hint"), [(1, "fetch a file of version 3"), (99, "update edgespec")])
def test_an_unsupported_gguf_version_gives_a_hint_about_the_version(tmp_path: Path, version: int, hint: str) -> None:
    with pytest.raises(ModelFileError, match=f"version {version} is not supported") as caught:
        read(tmp_path / "m.gguf", build(version=version))
    assert hint in (caught.value.hint or "")
    assert "cut short" not in (caught.value.hint or "")
