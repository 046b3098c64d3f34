"""The GGUF header reader on valid files: facts, time and memory."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import gguf
import pytest

from edgespec.errors import ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufArray
from tests.support.raw_gguf import (
    ARCH,
    ARR,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STR,
    U8,
    U16,
    U32,
    U64,
    Key,
    array,
    build,
    read,
    string,
    tensor,
    tokens,
)
from tests.support.tiny_gguf import CHATML, VOCABULARY, write_tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", quant="Q8_0")


def test_model_facts_come_from_the_gguf_header(tiny: Path) -> None:
    header = read_header(tiny)
    rows = 3 + 256 + len(VOCABULARY) + 2
    block = 64 * 64 * 2 + 32 * 64 * 2 + 128 * 64 * 3
    assert (header.version, header.architecture, header.alignment) == (3, "llama", 32)
    assert header.file_bytes == tiny.stat().st_size
    assert (header.vocabulary_size, header.context_length, header.block_count) == (rows, 2048, 2)
    assert (header.embedding_length, header.head_count, header.head_count_kv) == (64, 4, 2)
    assert (header.key_length, header.value_length) == (16, 16)
    assert header.chat_template == CHATML
    assert header.named_templates == {}
    assert header.parameter_count == 2 * rows * 64 + 2 * (block + 2 * 64) + 64
    matrices = (2 * rows * 64 + 2 * block) // 32 * 34
    assert header.tensor_bytes == matrices + 5 * 64 * 4
    assert header.bytes_per_forward == header.tensor_bytes - rows * 64 // 32 * 34
    assert header.kv_bytes_per_token(16) == 2 * 2 * (16 + 16) * 2
    assert header.kv_bytes_per_token(8.5) == 2 * 2 * (16 + 16) * 8.5 / 8


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0"])
def test_the_gguf_reader_agrees_with_the_gguf_package(tmp_path: Path, quant: Any) -> None:
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


def test_gguf_metadata_is_read_only(tiny: Path) -> None:
    with pytest.raises(TypeError):
        read_header(tiny).metadata["general.architecture"] = "other"  # type: ignore[index]


def test_every_gguf_value_type_is_read(tmp_path: Path) -> None:
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


def test_gguf_arrays_over_64_elements_stay_in_the_file(tmp_path: Path) -> None:
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


def test_reading_an_array_raises_if_the_file_changed(tmp_path: Path) -> None:
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


def test_head_counts_per_layer_and_default_head_lengths_are_read(tmp_path: Path) -> None:
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
    keys += [(f"llama.attention.{part}_length_swa", U32, 8) for part in ("key", "value")]
    keys.append(("llama.attention.sliding_window_pattern", ARR, array(I32, [1, 1, 0])))
    assert read(tmp_path / "m.gguf", build(keys)).kv_bytes_per_token(16) == (2 * 16 + 40) * 2
    keys.append(("llama.attention.shared_kv_layers", U32, 1))
    assert read(tmp_path / "m.gguf", build(keys)).kv_bytes_per_token(16) == 2 * 16 * 2


def test_bytes_per_forward_counts_a_tied_head_and_used_experts_only(tmp_path: Path) -> None:
    keys: list[Key] = [ARCH, ("llama.expert_count", U32, 8), ("llama.expert_used_count", U32, 2)]
    tensors = [tensor("token_embd.weight", (8, 4)), tensor("blk.0.ffn_up_exps.weight", (8, 4, 8), 0, 128)]
    tied = read(tmp_path / "m.gguf", build(keys, tensors, data=128 + 1024))
    assert tied.bytes_per_forward == 128 + 1024 * 2 // 8
    tensors.append(tensor("output.weight", (8, 4), 0, 128 + 1024))
    untied = read(tmp_path / "m.gguf", build(keys, tensors, data=128 + 1024 + 128))
    assert untied.bytes_per_forward == 1024 * 2 // 8 + 128


def test_a_gguf_without_tensors_is_read_and_missing_facts_raise(tmp_path: Path) -> None:
    header = read(tmp_path / "m.gguf", build(tokens("a", "b"), version=2))
    assert (header.version, header.vocabulary_size, header.tensors) == (2, 2, ())
    for missing in ("context_length", "head_count_kv", "key_length"):
        with pytest.raises(ModelFileError, match="does not state llama"):
            getattr(header, missing)
    with pytest.raises(ModelFileError, match="no vocabulary"):
        _ = read(tmp_path / "m.gguf", build()).vocabulary_size


def test_a_gguf_with_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    count = 152_000  # Qwen 2.5's vocabulary, with the same number of merges; the weights are a hole in the file
    texts = [b"tok%d" % number for number in range(count)]
    keys = [*tokens(*texts, types=[1] * count), ("tokenizer.ggml.merges", ARR, array(STR, texts))]
    path = tmp_path / "m.gguf"
    path.write_bytes(build(keys, [tensor("w", (1 << 20, 256))]))
    os.truncate(path, path.stat().st_size + (1 << 30))
    start = time.process_time()
    assert read_header(path).vocabulary_size == count
    assert time.process_time() - start < 0.5
