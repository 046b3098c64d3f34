"""ONNX folders: facts of a valid folder, and quick refusal of hostile folders."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgespec.errors import ModelFileError
from edgespec.export.onnx.export import export_onnx
from edgespec.export.provenance import Provenance
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.vocabulary import compare_vocabularies
from edgespec.files.onnx.folder import is_onnx_folder, read_onnx_folder
from tests.support.damaged_folders import refusal
from tests.support.tiny_onnx import VOCABULARY_SIZE, write_tiny_model
from tests.support.trimmed_folder import edit_manifest, record_file

KEPT = np.arange(1, VOCABULARY_SIZE, 2, dtype=np.int32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source") / "source.gguf", quant="Q8_0", layers=2)


@pytest.fixture(scope="module")
def sound(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "small"
    export_onnx(source, folder, Provenance(name="tiny"), kept=KEPT)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "small"))


def edit_graph(folder: Path, change: Callable[[Any], object]) -> None:
    """Apply ``change`` to the model, and record the new file in the manifest."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    record_file(folder, "model.onnx")


def constant(model: Any, name: str) -> Any:
    return next(each for each in model.graph.initializer if each.name == name)


# -------------------------------------------------------------------------------------------------- a sound one


def test_a_valid_onnx_folder_gives_the_facts_of_its_source(sound: Path, source: Path) -> None:
    artefact, header = read_onnx_folder(sound), read_header(source)
    assert (artefact.folder, artefact.graph_path) == (sound, sound / "model.onnx")
    assert artefact.data_path == sound / "model.onnx.data"
    assert (artefact.architecture, artefact.vocabulary_size) == ("llama", VOCABULARY_SIZE)
    assert (artefact.kept, artefact.rows) == (len(KEPT), len(KEPT))
    assert artefact.ids is not None
    assert artefact.ids.dtype == np.int32
    assert artefact.ids.tolist() == KEPT.tolist()
    with pytest.raises(ValueError, match="read-only"):
        artefact.ids[0] = 1
    assert (artefact.context_length, artefact.block_count) == (128, 2)
    assert (artefact.head_count_kv, artefact.key_length, artefact.value_length) == (2, 32, 32)
    assert artefact.embedding_length == 64
    assert artefact.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4
    assert artefact.static_cache is None
    assert artefact.manifest["kind"] == "onnx-model"
    assert artefact.identity.startswith("onnx:")
    assert artefact.tokenizer_header.tensors == ()
    assert compare_vocabularies(header, artefact.tokenizer_header) is None


def test_an_onnx_model_with_a_whole_head_has_no_kept_ids(source: Path, tmp_path: Path) -> None:
    export_onnx(source, tmp_path / "out", Provenance(name="tiny"))
    artefact = read_onnx_folder(tmp_path / "out")
    assert (artefact.ids, artefact.kept, artefact.rows) == (None, None, VOCABULARY_SIZE)


def test_bytes_per_forward_of_an_onnx_model_count_its_matrices(tmp_path: Path) -> None:
    """Nine bits per weight of a matrix: eight bits, and a float32 per 32 weights."""
    head, width = VOCABULARY_SIZE * 64 * 9 // 8, 64
    for tied in (False, True):
        source = write_tiny_model(tmp_path / f"{tied}.gguf", quant="Q8_0", layers=1, tied=tied)
        export_onnx(source, tmp_path / str(tied), Provenance(name="tiny"))
        artefact = read_onnx_folder(tmp_path / str(tied))
        layer = (width * (128 + 64 + 64) + 128 * width + 3 * width * 96) * 9 // 8
        norms, small = 3 * width * 4, 200
        assert 0 <= artefact.bytes_per_forward - (head + layer + norms) < small
        ropes = 2 * 129 * 16 * 4
        embedding = 0 if tied else VOCABULARY_SIZE * 64 * 17 // 16
        assert 0 <= artefact.weight_bytes - artefact.bytes_per_forward - ropes - embedding < small


def test_an_onnx_folder_is_recognised_by_its_manifest_or_its_files(folder: Path, tmp_path: Path) -> None:
    assert is_onnx_folder(folder)
    assert not is_onnx_folder(tmp_path)
    assert not is_onnx_folder(tmp_path / "absent")
    (folder / "manifest.json").write_bytes(b"{")
    assert is_onnx_folder(folder)
    (folder / "manifest.json").unlink()
    assert is_onnx_folder(folder)
    assert "manifest.json" in refusal(read_onnx_folder, folder).message
    (folder / "model.onnx.data").unlink()
    assert not is_onnx_folder(folder)
    (tmp_path / "manifest.json").write_text('{"schema_version": 1, "kind": "gguf"}')
    assert not is_onnx_folder(tmp_path)


# ----------------------------------------------------------------------------------------------------- the files


def test_weights_shorter_than_the_graph_states_are_refused(folder: Path) -> None:
    with (folder / "model.onnx.data").open("r+b") as file:
        file.truncate(4096)
    record_file(folder, "model.onnx.data")
    assert "model.onnx.data" in refusal(read_onnx_folder, folder).message


# -------------------------------------------------------------------------------------------------- the manifest


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kept": None}, "kept_ids"),
        ({"kept": 5}, "logits has the shape"),
        ({"kept": True}, "kept is true"),
        ({"kept": 0}, "kept is 0"),
        ({"kept": 10**6}, "it keeps 1000000 rows"),
        ({"static_cache": 64}, "instead of"),
        ({"static_cache": -1}, "static_cache is -1"),
        ({"vocabulary_size": 5}, "vocabulary_size"),
        ({"architecture": "gemma3"}, "architecture"),
        ({"context_length": 129}, "context_length"),
        ({"block_count": 3}, "block_count"),
        ({"embedding_length": 32}, "embedding_length"),
        ({"head_count_kv": 1}, "head_count_kv"),
        ({"key_length": 16}, "key_length"),
        ({"kv_type": "f16"}, "kv_type"),
    ],
)
def test_an_onnx_manifest_that_contradicts_the_files_is_refused(
    folder: Path, change: dict[str, Any], says: str
) -> None:
    edit_manifest(folder, lambda document: document.update(change))
    assert says in refusal(read_onnx_folder, folder).message


def test_an_onnx_folder_with_another_models_tokenizer_is_refused(folder: Path, source: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.gguf").write_bytes(source.read_bytes())
    record_file(folder, "tokenizer.gguf")
    assert "no tensors" in refusal(read_onnx_folder, folder).message


# ----------------------------------------------------------------------------------------------------- the graph


def place(**changes: str) -> Callable[[Any], None]:
    """Change the stated place of the first constant in the data file."""

    def change(model: Any) -> None:
        tensor = next(t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL)
        entries = {entry.key: entry.value for entry in tensor.external_data} | changes
        del tensor.external_data[:]
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)

    return change


def twice(model: Any) -> None:
    model.graph.initializer[0].external_data.add(key="location", value="/etc/passwd")


def attribute(value: Any) -> Callable[[Any], None]:
    return lambda model: model.graph.node[0].attribute.append(helper.make_attribute("hidden", value))


def compiled(model: Any) -> None:
    node = helper.make_node("EPContext", ["input_ids"], ["more"], domain="com.microsoft", ep_cache_context="../x.bin")
    model.graph.node.append(node)


def function(model: Any) -> None:
    node = helper.make_node("Identity", ["a"], ["b"])
    model.functions.append(helper.make_function("com.microsoft", "MatMulNBits", ["a"], ["b"], [node], []))


def sparse(model: Any) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "sparse")
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, numpy_helper.from_array(np.zeros(1, np.int64), "at"), [4])
    )


def dims(*shape: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        del model.graph.initializer[0].dims[:]
        model.graph.initializer[0].dims.extend(shape)

    return change


def shadow(model: Any) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 1), np.int64), "input_ids"))


TENSOR = numpy_helper.from_array(np.ones(3, np.float32), "t")
SUBGRAPH = helper.make_graph([], "sub", [], [])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (place(location="/etc/passwd"), "/etc/passwd"),
        (place(location="../model.onnx.data"), "../model.onnx.data"),
        (place(location="./model.onnx.data"), "instead of model.onnx.data"),
        (place(location=""), "instead of model.onnx.data"),
        (place(location="tokenizer.gguf"), "tokenizer.gguf"),
        (place(location="x" * 5000), "instead of model.onnx.data"),
        (place(offset="99999999"), "which has"),
        (place(offset="-4096"), "not an offset and a length"),
        (place(offset="1" * 30), "not an offset and a length"),
        (place(offset="0x10"), "not an offset and a length"),
        (place(length="4"), "but its range has"),
        (place(length=""), "not an offset and a length"),
        (place(checksum="x"), "an unknown key"),
        (twice, "stated twice"),
        (dims(2**39, 2**39), "but its range has"),
        (dims(2**62), "impossible shape"),
        (dims(-1, 5), "impossible shape"),
        (dims(0), "impossible shape"),
        (dims(*[1] * 9), "impossible shape"),
        (lambda model: setattr(model.graph.initializer[0], "data_type", TensorProto.STRING), "element type 8"),
        (lambda model: setattr(model.graph.initializer[0], "data_type", 99), "element type 99"),
        (lambda model: setattr(model.graph.initializer[0], "name", ""), "empty or occurs twice"),
        (lambda model: setattr(model.graph.initializer[0], "name", model.graph.initializer[1].name), "occurs twice"),
        (lambda model: constant(model, "integers.1").float_data.append(1), "no exported graph has"),
        (lambda model: setattr(constant(model, "integers.1"), "raw_data", b"\0"), "instead of 8"),
        (shadow, "both an input and a constant"),
        (lambda model: model.opset_import.append(helper.make_opsetid("evil.example", 1)), "evil.example"),
        (lambda model: setattr(model.graph.node[0], "domain", "evil.example"), "evil.example"),
        (compiled, "a compiled graph (EPContext)"),
        (function, "no exported graph has"),
        (sparse, "no exported graph has"),
        (attribute(SUBGRAPH), "no exported graph has"),
        (attribute([SUBGRAPH]), "no exported graph has"),
        (attribute(TENSOR), "no exported graph has"),
        (attribute([TENSOR]), "no exported graph has"),
        (lambda model: model.training_info.add(), "no exported graph has"),
        (lambda model: model.graph.input.pop(), "it has no input past_key_values.1.value"),
        (lambda model: model.graph.output.pop(0), "it has no output logits"),
        (lambda model: setattr(model.graph.input[0], "name", "ids"), "input"),
        (lambda model: setattr(model.graph.input[0].type.tensor_type, "elem_type", 1), "wrong type"),
        (lambda model: model.graph.input[0].type.tensor_type.shape.dim.pop(), "number of dimensions"),
        (lambda model: setattr(model.graph.output[0].type.tensor_type.shape.dim[2], "dim_value", 7), "instead of"),
        (lambda model: model.graph.node.pop(), "not a constant of"),
        (lambda model: model.ClearField("graph"), "no graph"),
        (lambda model: setattr(model.graph, "doc_string", "x" * 5_000_000), "too large"),
        (lambda model: model.graph.node[0].input.extend(["x"] * 500_000), "more than 200000 fields"),
    ],
)
def test_a_hostile_onnx_graph_is_refused_with_a_reason(
    folder: Path, change: Callable[[Any], object], says: str
) -> None:
    edit_graph(folder, change)
    assert says in refusal(read_onnx_folder, folder).message


def test_an_onnx_graph_with_overlapping_weights_is_refused(folder: Path) -> None:
    def change(model: Any) -> None:
        size = (folder / "model.onnx.data").stat().st_size
        for number in range(40):
            tensor = model.graph.initializer.add(name=f"more.{number}", data_type=TensorProto.UINT8)
            tensor.dims.append(size - number)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "model.onnx.data"), ("length", str(size - number))):
                tensor.external_data.add(key=key, value=value)

    edit_graph(folder, change)
    assert "overlap" in refusal(read_onnx_folder, folder).message


@pytest.mark.parametrize(
    ("ids", "says"),
    [(KEPT[::-1], "ascending"), (KEPT - 2, "outside"), (KEPT + 200, "outside"), (KEPT * 0, "ascending")],
)
def test_invalid_kept_ids_in_an_onnx_graph_are_refused(folder: Path, ids: Any, says: str) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    offset = next(int(e.value) for e in constant(model, "kept_ids.values").external_data if e.key == "offset")
    with (folder / "model.onnx.data").open("r+b") as file:
        file.seek(offset)
        file.write(ids.astype("<i8").tobytes())
    assert says in refusal(read_onnx_folder, folder).message  # the weights' hash is not checked


def test_a_truncated_or_damaged_onnx_graph_is_refused_or_read(folder: Path) -> None:
    """The only exception is ModelFileError, raised quickly."""
    path = folder / "model.onnx"
    whole, choose = path.read_bytes(), random.Random(1)
    for number in range(300):
        damaged = bytearray(whole)
        if number % 3 == 0:
            damaged = damaged[: choose.randrange(len(whole))]
        else:
            for _ in range(number % 7 + 1):
                damaged[choose.randrange(len(whole))] = choose.randrange(256)
        path.write_bytes(damaged)
        record_file(folder, path.name)
        started = time.process_time()
        try:
            read_onnx_folder(folder)
        except ModelFileError as error:
            assert error.hint  # noqa: PT017
        assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"\xff" * 100, b"\x3a\xff\xff\xff\xff\x0f", b"{}", bytes(1000), b"\x3d" * 9]
)
def test_a_file_that_is_not_an_onnx_graph_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.onnx").write_bytes(content)
    record_file(folder, "model.onnx")
    assert refusal(read_onnx_folder, folder).path.name == "model.onnx"
