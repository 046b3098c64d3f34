"""Folders with a graph that takes and returns the whole cache: valid and hostile folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from edgespec.files.onnx.folder import read_onnx_folder
from tests.support.damaged_folders import refusal
from tests.support.trimmed_folder import edit_manifest, record_file
from tests.support.whole_onnx import write_folder, write_whole_onnx


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sound")
    return write_whole_onnx(write_folder(place / "source", context_length=512), place / "whole", place)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "whole"))


def test_a_valid_whole_cache_onnx_folder_gives_its_facts(sound: Path) -> None:
    artefact = read_onnx_folder(sound)
    assert (artefact.cache, artefact.static_cache, artefact.kept, artefact.context_length) == (
        "whole",
        None,
        None,
        512,
    )
    assert (artefact.block_count, artefact.head_count_kv, artefact.key_length) == (2, 2, 16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cache": "shared"}, "it has no input seqlens_k"),
        ({"cache": None}, "cache is null"),
        ({"static_cache": 64}, "no fixed length"),
        ({"kept": 10}, "no output kept_ids"),
        ({"key_length": 8}, "key_length is 8"),
        ({"head_count_kv": True}, "head_count_kv is true"),
        ({"block_count": 3}, "block_count is 3"),
    ],
)
def test_a_whole_cache_manifest_that_contradicts_the_graph_is_refused(
    folder: Path, change: dict[str, Any], says: str
) -> None:
    edit_manifest(folder, lambda document: document.update(change))
    assert says in refusal(read_onnx_folder, folder).message


def named(values: Any, name: str) -> Any:
    return next(each for each in values if each.name == name)


def set_length(model: Any, what: str, name: str, axis: int, length: int) -> None:
    named(getattr(model.graph, what), name).type.tensor_type.shape.dim[axis].dim_value = length


def set_weight(model: Any, key: str, value: str) -> None:
    tensor = next(each for each in model.graph.initializer if each.external_data)
    named_entry = next(each for each in tensor.external_data if each.key == key)
    named_entry.value = value


GRAPHS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a missing cache input": (
        lambda m: m.graph.input.remove(named(m.graph.input, "past_key_values.1.key")),
        "it has no input",
    ),
    "no first row": (lambda m: m.graph.input.remove(named(m.graph.input, "first_row")), "no input first_row"),
    "an extra input": (lambda m: m.graph.input.add(name="more"), 'unexpected input "more"'),
    "heads": (lambda m: set_length(m, "input", "past_key_values.0.key", 1, 3), "past_key_values.0.key"),
    "a fixed past": (lambda m: set_length(m, "input", "past_key_values.0.key", 2, 7), "past_key_values.0.key"),
    "a fixed present": (lambda m: set_length(m, "output", "present.0.value", 2, 7), "present.0.value"),
    "rows": (lambda m: set_length(m, "output", "logits", 2, 7), "logits"),
    "weights in another file": (
        lambda m: set_weight(m, "location", "../model.onnx.data"),
        "instead of model.onnx.data",
    ),
    "beyond the end": (lambda m: set_weight(m, "offset", str(2**40)), "which has"),
}


@pytest.mark.parametrize("damage", GRAPHS)
def test_a_hostile_whole_cache_graph_is_refused(folder: Path, damage: str) -> None:
    change, says = GRAPHS[damage]
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    record_file(folder, "model.onnx")
    assert says in refusal(read_onnx_folder, folder).message
