"""Folders with a fixed-shape graph: facts of a valid folder, and refusal of hostile folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import ModelFileError
from edgespec.export.onnx.export import LEAST_STATIC_CACHE, export_onnx
from edgespec.export.provenance import Provenance
from edgespec.files.onnx.folder import read_onnx_folder
from tests.files.test_onnx_folder import edit_graph
from tests.support.damaged_folders import refusal
from tests.support.tiny_onnx import WINDOW, write_tiny_model
from tests.support.trimmed_folder import edit_manifest

CAPACITY = LEAST_STATIC_CACHE


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rows")
    source = write_tiny_model(place / "a.gguf", "gemma3", quant="Q8_0", layers=3, context_length=2 * CAPACITY)
    export_onnx(source, place / "out", Provenance(name="tiny"), static_cache=CAPACITY)
    return place / "out"


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "rows"))


def test_a_valid_fixed_shape_onnx_folder_gives_its_facts(sound: Path) -> None:
    artefact = read_onnx_folder(sound)
    assert (artefact.cache, artefact.static_cache, artefact.window) == ("rows", CAPACITY, WINDOW)
    assert artefact.context_length == 2 * CAPACITY


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cache": "shared"}, "it has no input first_row"),
        ({"cache": "whole"}, "must have no fixed length"),
        ({"cache": "columns"}, 'cache is "columns", not one of'),
        ({"cache": ["rows"]}, "cache is a list"),
        ({"static_cache": None}, "none is stated"),
        ({"static_cache": CAPACITY + 1}, "instead of"),
        ({"static_cache": 10**30}, "instead of"),
        ({"static_cache": True}, "static_cache is true"),
        ({"window": None}, 'unexpected input "new_window_mask"'),
        ({"window": 0}, "window is 0"),
        ({"window": "8"}, 'window is "8"'),
        ({"window": 8.0}, "window is 8.0"),
    ],
)
def test_a_fixed_shape_manifest_that_contradicts_the_graph_is_refused(
    folder: Path, change: dict[str, Any], says: str
) -> None:
    edit_manifest(folder, lambda document: document.update(change))
    assert says in refusal(read_onnx_folder, folder).message


def named(values: Any, name: str) -> Any:
    return next(each for each in values if each.name == name)


def length(what: str, name: str, axis: int, value: int) -> Callable[[Any], None]:
    """Change a length of an input or output."""

    def change(model: Any) -> None:
        each = named(getattr(model.graph, what), name)
        each.type.tensor_type.shape.dim[axis].dim_value = value

    return change


def without(what: str, name: str) -> Callable[[Any], None]:
    return lambda model: getattr(model.graph, what).remove(named(getattr(model.graph, what), name))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (length("input", "past_mask", 3, CAPACITY - 1), "past_mask has the shape"),
        (length("input", "past_key_values.0.key", 2, 2**40), "past_key_values.0.key has the shape"),
        (length("input", "past_key_values.0.key", 1, 1), "past_key_values.0.key has the shape"),
        (length("input", "scored_row", 0, 2), "scored_row has the shape"),
        (length("input", "input_ids", 1, 8), "input_ids has the shape"),
        (length("output", "new.2.value", 3, 16), "new.2.value has the shape"),
        (length("output", "logits", 1, 4), "logits has the shape"),
        (without("input", "new_window_mask"), "it has no input new_window_mask"),
        (without("output", "new.1.key"), "it has no output new.1.key"),
        (lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 6), "wrong type"),
        (lambda m: m.graph.input[1].type.tensor_type.shape.dim.add(), "number of dimensions"),
    ],
)
def test_a_fixed_shape_graph_with_wrong_inputs_or_outputs_is_refused(
    folder: Path, change: Callable[[Any], object], says: str
) -> None:
    edit_graph(folder, change)
    assert says in refusal(read_onnx_folder, folder).message


def test_a_dynamic_onnx_graph_has_no_window(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "gemma3", quant="Q8_0")
    export_onnx(source, tmp_path / "out", Provenance(name="tiny"))
    assert read_onnx_folder(tmp_path / "out").window is None
    edit_manifest(tmp_path / "out", lambda document: document.update(cache="rows"))
    with pytest.raises(ModelFileError, match="none is stated"):
        read_onnx_folder(tmp_path / "out")
