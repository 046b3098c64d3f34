from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from edgespec.errors import MemoryLimitError, ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.model_file import read_model_file
from edgespec.files.safetensors import SafeTensor, read_safetensors, read_safetensors_folder, to_float32
from edgespec.runtimes.native.weights import WeightFiles
from tests.support.hf_folder import write_safetensors
from tests.support.tiny_gguf import write_tiny_gguf

F32 = np.arange(6, dtype=np.float32).reshape(2, 3)
F16 = np.array([1.5, -2.0], dtype=np.float16)
BF16 = np.array([0x3F80, 0xC020, 0x7F80], dtype=np.uint16)  # 1, -2.5, infinity


def raw(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, dtype: str = "U8", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def read(path: Path, content: bytes) -> dict[str, SafeTensor]:
    path.write_bytes(content)
    return dict(read_safetensors(path))


# ----------------------------------------------------------------------------------------- valid files


def test_safetensors_give_offsets_and_values(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", {"x": ("F32", F32), "y": ("F16", F16), "z": ("BF16", BF16)})
    found = read_safetensors(path)
    assert list(found) == ["x", "y", "z"]
    x, y, z = found.values()
    assert (x.name, x.dtype, x.shape, x.path, x.byte_count, x.elements) == ("x", "F32", (2, 3), path, 24, 6)
    assert path.read_bytes()[x.offset : x.offset + 24] == F32.tobytes()
    assert z.offset == y.offset + 4 == x.offset + 28
    np.testing.assert_array_equal(x.view(), F32)
    np.testing.assert_array_equal(y.view(), F16)
    np.testing.assert_array_equal(z.view(), BF16)
    assert not x.view().flags.writeable
    assert [each.float32().dtype for each in found.values()] == [np.float32] * 3
    assert y.float32().tolist() == [1.5, -2.0]
    assert z.float32().tolist() == [1.0, -2.5, float("inf")]


def test_every_bf16_pattern_converts_exactly_to_float32() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    assert (to_float32(bits).view(np.uint32) == bits.astype(np.uint32) << 16).all()


def test_safetensors_with_an_empty_tensor_a_scalar_and_metadata_are_read(tmp_path: Path) -> None:
    header = {"__metadata__": {"a": "b"}, "x": entry(0, 4, "F32", []), "e": entry(0, 0, "F32", [0, 3])}
    found = read(tmp_path / "a", raw(header, F32.tobytes()[:4]))
    assert found["x"].float32().shape == ()
    assert found["e"].view().shape == (0, 3)


def test_safetensors_are_listed_in_the_order_of_their_data(tmp_path: Path) -> None:
    assert list(read(tmp_path / "a", raw({"b": entry(1, 3), "a": entry(0, 1)}, bytes(3)))) == ["a", "b"]


def test_a_tensor_of_an_unsupported_type_is_listed_but_not_readable(tmp_path: Path) -> None:
    found = read(tmp_path / "a", raw({"x": entry(0, 2, "F8_E4M3")}, bytes(2)))
    with pytest.raises(ModelFileError, match="tensor x is F8_E4M3"):
        found["x"].view()


# -------------------------------------------------------------------------------------- hostile files

BAD = [
    (b"", "too short: 0 bytes"),
    (b"\1\0\0\0", "too short: 4 bytes"),
    (raw(b"{}", length=3), "truncated: the header needs 3 bytes and 2 are left"),
    (raw(b"{}", length=2**63), "a header of 9223372036854775808 bytes is implausible"),
    (raw(b"[]"), "its header is not a JSON object"),
    (raw(b" {}"), "its header is not a JSON object"),
    (raw(b'{"x":'), "not valid JSON"),
    (raw(b'{"x":' + b"[" * 100_000), "nested too deeply"),
    (raw(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{}}', b"\0"), 'the name "x" occurs twice'),
    (raw({"__metadata__": []}), "__metadata__ is not an object of strings"),
    (raw({"__metadata__": {"a": 1}}), "__metadata__ is not an object of strings"),
    (raw({"x": []}), "must state exactly dtype, shape and data_offsets"),
    (raw({"x": {**entry(0, 1), "more": 1}}, b"\0"), "must state exactly dtype, shape and data_offsets"),
    (raw({"": entry(0, 1)}, b"\0"), "'' is not a valid tensor name"),
    (raw({"a\nb": entry(0, 1)}, b"\0"), "is not a valid tensor name"),
    (raw({"x" * 1025: entry(0, 1)}, b"\0"), "is not a valid tensor name"),
    (raw({"x": entry(0, 1, "Q4")}, b"\0"), "unknown type 'Q4'"),
    (raw({"x": {**entry(0, 1), "dtype": ["U8"]}}, b"\0"), "unknown type"),
    (raw({"x": entry(0, 1, shape=[-1])}, b"\0"), "an implausible shape"),
    (raw({"x": entry(0, 1, shape=[True])}, b"\0"), "an implausible shape"),
    (raw({"x": entry(0, 1, shape=[1.0])}, b"\0"), "an implausible shape"),
    (raw({"x": entry(0, 1, shape=[2**63])}, b"\0"), "an implausible shape"),
    (raw({"x": entry(0, 1, shape=[1] * 9)}, b"\0"), "an implausible shape"),
    (raw({"x": {**entry(0, 1), "shape": "1"}}, b"\0"), "an implausible shape"),
    (raw({"x": entry(1, 0, shape=[1])}, b"\0"), "implausible data_offsets"),
    (raw({"x": entry(-1, 0, shape=[1])}, b"\0"), "implausible data_offsets"),
    (raw({"x": {**entry(0, 1), "data_offsets": [0]}}, b"\0"), "implausible data_offsets"),
    (raw({"x": entry(0, 1, "F32")}, b"\0"), "needs 4 bytes for its shape and its data_offsets hold 1"),
    (raw({"x": entry(0, 4, shape=[2**62, 2**62])}, bytes(4)), "bytes for its shape"),
    (raw({"x": entry(0, 5)}, bytes(4)), "truncated: the data of tensor 'x'"),
    (raw({"x": entry(1, 2)}, bytes(2)), "leaves a gap"),
    (raw({"x": entry(0, 2), "y": entry(1, 3)}, bytes(3)), "overlaps the previous tensor"),
    (raw({"x": entry(0, 2), "y": entry(0, 2)}, bytes(2)), "overlaps the previous tensor"),
    (raw({"x": entry(0, 2)}, bytes(3)), "1 bytes after the last tensor belong to no tensor"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "it is a git-LFS pointer"),
]


@pytest.mark.parametrize(("content", "words"), BAD)
def test_a_malformed_safetensors_file_is_refused_with_reason_and_hint(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ModelFileError) as caught:
        read(path, content)
    assert words in caught.value.message
    assert caught.value.message.startswith(str(path))
    assert caught.value.offset is not None
    assert caught.value.hint
    assert len(caught.value.message) < len(str(path)) + 300


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_byte_in_a_safetensors_header_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", {"x": ("F32", F32), "y": ("F16", F16)})
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 29))  # the 28 bytes of data may be anything
    content[at] ^= data.draw(st.integers(1, 255))
    content = content[: data.draw(st.sampled_from([len(content), at]))]
    try:
        found = read(path, bytes(content))
    except ModelFileError:
        return
    for tensor in found.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.byte_count <= len(content)
        if tensor.dtype in ("F32", "F16", "BF16"):
            assert tensor.float32().shape == tensor.shape


def test_a_missing_safetensors_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        read_safetensors(tmp_path / "none.safetensors")
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_safetensors(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no named pipes")
def test_a_named_pipe_as_safetensors_file_is_refused_unopened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_safetensors_folder(tmp_path)


def test_reading_a_tensor_from_a_shortened_file_raises(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", {"x": ("F32", F32)})
    tensor = read_safetensors(path)["x"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelFileError, match="can no longer be read"):
        tensor.view()


def test_a_tensor_that_memory_cannot_map_raises_the_memory_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **_settings: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    tensor = read_safetensors(write_safetensors(tmp_path / "a.safetensors", {"x": ("F32", F32)}))["x"]
    monkeypatch.setattr(np, "memmap", full)
    with pytest.raises(MemoryLimitError, match="no memory to map") as caught:
        tensor.view()
    assert caught.value.hint


def test_a_header_that_memory_cannot_map_raises_the_memory_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **_settings: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    path = write_tiny_gguf(tmp_path / "a.gguf")
    weights = read_header(path).parts
    monkeypatch.setattr(mmap, "mmap", full)
    for read in (lambda: read_header(path), lambda: WeightFiles(weights)):
        with pytest.raises(MemoryLimitError, match="no memory to map"):
            read()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\0b", "a\\0b"),
        ("a\x1b]0;title\x07", "a\\x1b]0;title\\x07"),
        ("a\nhint: b\r", "a\\nhint: b\\r"),
        ("a\u202egpj.gguf\u2066\u2028", "a\\u202egpj.gguf\\u2066\\u2028"),
        ("C:\\é\u200d日", "C:\\é\u200d日"),
    ],
)
def test_control_characters_of_a_name_are_shown_escaped_in_message_and_hint(name: str, shown: str) -> None:
    error = ModelFileError(name, "no such file", hint=f"look for {name}")
    assert (str(error), error.message) == (f"{shown}: no such file",) * 2
    assert error.hint == f"look for {shown}"


# --------------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("name", ["model.safetensors", "."])
def test_a_model_in_safetensors_is_refused_with_the_command_that_converts_its_folder(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", {"a": ("F32", np.zeros((2, 2), np.float32))})
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="safetensors") as raised:
        read_model_file(folder / name)
    assert raised.value.hint == f'convert it: `edgespec export "{folder}" --to gguf -o DIR`'


def sharded(folder: Path, weight_map: Any) -> Path:
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"x": ("F32", F32)})
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"y": ("F16", F16)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_model_safetensors_takes_precedence_over_shards(tmp_path: Path) -> None:
    sharded(tmp_path, {"x": FIRST, "y": SECOND})
    found = read_safetensors_folder(tmp_path)
    assert {name: tensor.path.name for name, tensor in found.items()} == {"x": FIRST, "y": SECOND}
    write_safetensors(tmp_path / "model.safetensors", {"z": ("F32", F32)})
    assert list(read_safetensors_folder(tmp_path)) == ["z"]  # the choice of transformers


def test_links_as_in_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_safetensors(tmp_path / "blobs" / "0123", {"x": ("F32", F32)})
    try:
        (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "0123")
    except OSError:
        pytest.skip("this account may not make links")
    assert list(read_safetensors_folder(tmp_path / "snapshot")) == ["x"]


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        (None, "weight_map is missing"),
        ([], "weight_map must be"),
        ({}, "weight_map must be"),
        ({"x": 1}, "which is not a plain .safetensors name"),
        ({"x": "../model.safetensors"}, "which is not a plain .safetensors name"),
        ({"x": "/etc/x.safetensors"}, "which is not a plain .safetensors name"),
        ({"x": "a\\b.safetensors"}, "which is not a plain .safetensors name"),
        ({"x": "c:b.safetensors"}, "which is not a plain .safetensors name"),
        ({"x": ".safetensors"}, "which is not a plain .safetensors name"),
        ({"x": "model.gguf"}, "which is not a plain .safetensors name"),
        ({"x": FIRST, "y": "model-3.safetensors"}, "no such file"),
        ({"x": FIRST, "y": FIRST}, "tensor 'y' is missing, though the index names it"),
        ({"y": SECOND, "z": SECOND}, "tensor 'z' is missing, though the index names it"),
        ({f"t{number}": f"m{number}.safetensors" for number in range(4097)}, "a count of 4097 shards is implausible"),
    ],
)
def test_an_invalid_safetensors_index_is_refused(tmp_path: Path, weight_map: Any, words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read_safetensors_folder(sharded(tmp_path, weight_map))
    assert words in caught.value.message


def test_a_tensor_missing_from_the_index_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path, {"x": FIRST})
    write_safetensors(tmp_path / FIRST, {"x": ("F32", F32), "extra": ("F32", F32)})
    with pytest.raises(ModelFileError, match="tensor 'extra' is not in the index for this file"):
        read_safetensors_folder(tmp_path)


def test_a_folder_without_safetensors_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"holds neither model\.safetensors nor"):
        read_safetensors_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(raw({}))
    with pytest.raises(ModelFileError, match="holds no tensors"):
        read_safetensors_folder(tmp_path)
