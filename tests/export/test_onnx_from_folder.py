"""Exports of a Hugging Face folder to ONNX with a fake worker that returns a prepared graph, and their failures."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import (
    CancelledError,
    DiskSpaceError,
    EdgespecError,
    InvalidRequestError,
    ModelFileError,
    RuntimeUnavailableError,
)
from edgespec.export.huggingface.description import describe_folder
from edgespec.export.onnx import from_folder as onnx_from_folder
from edgespec.export.onnx.from_folder import export_folder_to_onnx
from edgespec.export.optimum import process as optimum_process
from edgespec.export.provenance import Provenance
from edgespec.files import disk
from edgespec.files.gguf.header import read_header
from edgespec.files.home import Home
from edgespec.files.onnx.folder import read_onnx_folder
from edgespec.files.progress import Job, ProgressEvent
from edgespec.files.safetensors import read_safetensors
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer
from tests.support.hf_folder import write_safetensors
from tests.support.provenance import described
from tests.support.whole_onnx import DecoderGraph, write_fake_worker, write_folder

PYTHON = Path(sys.executable)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``source`` and ``prepared``, the worker's output."""
    place = tmp_path_factory.mktemp("sound")
    write_folder(place / "source")
    (place / "prepared").mkdir()
    DecoderGraph(place / "source").write(place / "prepared")
    return place


@pytest.fixture
def place(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage, and a fake worker that returns it."""
    for name in ("source", "prepared"):
        shutil.copytree(sound / name, tmp_path / name)
    worker = write_fake_worker(tmp_path / "worker.py", tmp_path / "prepared")
    monkeypatch.setattr(optimum_process, "WORKER", worker)
    return tmp_path


def export(place: Path, **more: Any) -> Any:
    provenance, options = described(more, name="tiny", home=Home(place / "home"), python=PYTHON)
    return export_folder_to_onnx(place / "source", place / "out", provenance, **options)


def left(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.name not in ("source", "prepared", "worker.py"))


def edit_config(place: Path, **values: Any) -> None:
    path = place / "source" / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def test_an_onnx_export_of_a_folder_writes_graph_weights_and_manifest(place: Path) -> None:
    events: list[ProgressEvent] = []
    manifest = export(place, licence="MIT", job=Job(events.append))
    assert manifest == json.loads((place / "out" / "manifest.json").read_text())
    assert sorted(path.name for path in (place / "out").iterdir()) == [
        "manifest.json",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.gguf",
    ]
    artefact = read_onnx_folder(place / "out")
    weights = (place / "source" / "model.safetensors").stat().st_size
    assert manifest["source"] == {"name": "tiny", "sha256": None, "bytes": weights}
    assert (manifest["cache"], manifest["quant"], manifest["licence"]) == ("whole", "keep", "MIT")
    assert (manifest["architecture"], manifest["model_type"]) == ("llama", "llama")
    assert manifest["tools"]["optimum-onnx"] == "0.1.0"
    assert artefact.weight_bytes == pytest.approx(weights, rel=0.01)
    stages = [event.stage for event in events]
    assert stages[0] == "converting the model"
    assert stages[-1] == "writing"
    assert events[-1].done_bytes == events[-1].total_bytes
    assert left(place) == ["out"]


def test_the_exported_tokenizer_splits_text_like_the_source(place: Path) -> None:
    (place / "source" / "generation_config.json").write_text('{"do_sample": true, "top_k": 20}')
    export(place)
    source = read_header(read_onnx_folder(place / "out").tokenizer_header.path)
    assert not source.tensors
    config = json.loads((place / "source" / "config.json").read_text())
    assert source.context_length == config["max_position_embeddings"]
    assert source.metadata["general.name"] == "tiny"
    assert source.sampling == {"temperature": 1.0, "top_k": 20}
    vocabulary = LlamaTokenizer(place / "out" / "tokenizer.gguf")
    try:
        assert vocabulary.detokenize(vocabulary.encode("the water")) == " the water"  # SentencePiece adds a space
        assert vocabulary.vocabulary_size == config["vocab_size"]
    finally:
        vocabulary.close()


def test_an_onnx_export_of_a_folder_replaces_only_earlier_exports(place: Path) -> None:
    export(place)
    before = (place / "out" / "model.onnx.data").read_bytes()
    export(place, quant="q4")
    assert json.loads((place / "out" / "manifest.json").read_text())["quant"] == "q4"
    assert (place / "out" / "model.onnx.data").read_bytes() == before  # the fake worker does not quantise
    (place / "out" / "mine").write_text("precious")
    with pytest.raises(InvalidRequestError, match="mine"):
        export(place)
    with pytest.raises(InvalidRequestError, match="would be replaced"):
        export_folder_to_onnx(
            place / "source", place / "source", Provenance(name="tiny"), home=Home(place), python=PYTHON
        )


def test_without_an_interpreter_the_optimum_environment_is_created(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes: list[Home] = []

    def prepare(home: Home, **_more: Any) -> Path:
        homes.append(home)
        return PYTHON

    monkeypatch.setattr(onnx_from_folder, "prepare_environment", prepare)
    export(place, python=None)
    assert homes == [Home(place / "home")]


@pytest.mark.parametrize(("copied", "said"), [(False, "untied"), (True, "as stated")])
def test_the_converter_keeps_a_head_that_differs_from_the_embedding(
    place: Path, monkeypatch: pytest.MonkeyPatch, copied: bool, said: str
) -> None:
    weights = place / "source" / "model.safetensors"
    tensors = {name: ("F32", each.float32()) for name, each in read_safetensors(weights).items()}
    rows = tensors["model.embed_tokens.weight"][1]
    write_safetensors(weights, {**tensors, "lm_head.weight": ("F32", rows if copied else rows[::-1])})
    edit_config(place, tie_word_embeddings=True)
    asked: list[list[str]] = []

    def run_worker(_python: Path, arguments: list[str], **_more: Any) -> Any:
        asked.append(arguments)
        raise CancelledError("enough")

    monkeypatch.setattr(onnx_from_folder, "run_worker", run_worker)
    with pytest.raises(CancelledError):
        export(place)
    assert [arguments[0::3] for arguments in asked] == [["convert", said]]


@pytest.mark.parametrize(("name", "quant", "words"), [("", "keep", "name"), ("tiny", "q5_k_m", "q5_k_m")])
def test_invalid_arguments_of_a_folder_export_are_refused(place: Path, name: str, quant: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        export(place, name=name, quant=quant)
    assert left(place) == []


def test_a_folder_export_without_the_onnx_package_raises_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(RuntimeUnavailableError, match="needs the package onnx") as raised:
        export(place)
    assert "[export]" in (raised.value.hint or "")


# ------------------------------------------------------------------------------------------------ failures


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


WORKERS = {
    "nothing packed": lambda place: (place / "prepared" / "packed.onnx").unlink(),
    "no weights": lambda place: (place / "prepared" / "packed.data").unlink(),
    "weights cut": lambda place: cut(place / "prepared" / "packed.data"),
    "a graph cut": lambda place: cut(place / "prepared" / "packed.onnx"),
    "a graph of nonsense": lambda place: (place / "prepared" / "packed.onnx").write_bytes(b"\xff" * 1000),
    "an error": lambda place: (place / "worker.py").write_text("raise SystemExit('broken')"),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", WORKERS)
def test_a_bad_worker_result_leaves_no_incomplete_export(place: Path, damage: str) -> None:
    export(place)
    before = (place / "out" / "manifest.json").read_bytes()
    WORKERS[damage](place)
    with pytest.raises(EdgespecError) as raised:
        export(place)
    assert raised.value.hint
    assert left(place) == ["out"]
    assert (place / "out" / "manifest.json").read_bytes() == before


SOURCES: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no config": (lambda place: (place / "source" / "config.json").unlink(), ModelFileError, "no such file"),
    "no type": (lambda place: edit_config(place, model_type=None), InvalidRequestError, "model_type"),
    "quantised": (
        lambda place: edit_config(place, quantization_config={"bits": 4}),
        InvalidRequestError,
        "quantised already",
    ),
    "no positions": (lambda place: edit_config(place, max_position_embeddings=None), ModelFileError, "position"),
    "another vocabulary": (lambda place: edit_config(place, vocab_size=100_000), InvalidRequestError, "100000"),
    "no tokenizer": (lambda place: (place / "source" / "tokenizer.json").unlink(), ModelFileError, "tokenizer.json"),
    "a tokenizer unknown": (
        lambda place: (place / "source" / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}'),
        InvalidRequestError,
        "Unigram",
    ),
    "no weights": (lambda place: (place / "source" / "model.safetensors").unlink(), ModelFileError, "safetensors"),
    "weights cut": (lambda place: cut(place / "source" / "model.safetensors"), ModelFileError, "model.safetensors"),
}


@pytest.mark.parametrize("damage", SOURCES)
def test_hugging_face_folders_that_cannot_be_exported_are_refused(place: Path, damage: str) -> None:
    change, error, words = SOURCES[damage]
    change(place)
    with pytest.raises(error) as raised:
        export(place)
    assert words in str(raised.value)
    assert left(place) == []


def test_disk_space_is_checked_before_the_worker_starts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _path: 1000)
    events: list[ProgressEvent] = []
    with pytest.raises(DiskSpaceError):
        export(place, job=Job(events.append))
    assert events == []
    assert left(place) == []


@pytest.mark.parametrize("stage", ["converting the model", "writing"])
def test_a_folder_export_cancelled_at_any_stage_leaves_no_files(place: Path, stage: str) -> None:
    seen: set[str] = set()
    with pytest.raises(CancelledError):
        export(place, job=Job(lambda event: seen.add(event.stage), cancelled=lambda: stage in seen))
    assert left(place) == []


# ------------------------------------------------------------------------------------------------ descriptions


def write_config(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


GPT2 = {"model_type": "gpt2", "n_positions": 1024, "n_embd": 768, "n_head": 12, "vocab_size": 50257}


def test_transformers_model_types_map_to_llama_cpp_architectures(tmp_path: Path) -> None:
    found = describe_folder(write_config(tmp_path, **GPT2))
    assert (found.model_type, found.architecture, found.context_length) == ("gpt2", "gpt2", 1024)
    assert (found.vocabulary_size, found.embedding_length, found.head_count) == (50257, 768, 12)
    assert describe_folder(write_config(tmp_path, **{**GPT2, "model_type": "gpt_neox"})).architecture == "gptneox"
    # llama.cpp reads only the tokenizer, under any known architecture.
    assert describe_folder(write_config(tmp_path, **{**GPT2, "model_type": "opt"})).architecture == "llama"


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({"sliding_window": 64}, 64),
        ({"sliding_window": 64, "use_sliding_window": False}, 1024),
        ({"sliding_window": 64, "model_type": "gemma3_text"}, 1024),
        ({"sliding_window": None}, 1024),
        ({"sliding_window": 4096}, 1024),
    ],
)
def test_an_untested_sliding_window_limits_the_context_length(
    tmp_path: Path, more: dict[str, Any], tokens: int
) -> None:
    assert describe_folder(write_config(tmp_path, **{**GPT2, "model_type": "phi3", **more})).context_length == tokens


@pytest.mark.parametrize(
    ("rope", "more", "tokens"),
    [
        ({"type": "longrope"}, {"original_max_position_embeddings": 256}, 256),
        ({"rope_type": "longrope", "original_max_position_embeddings": 128}, {}, 128),
        ({"type": "su", "original_max_position_embeddings": 4096}, {}, 1024),
        ({"type": "linear", "original_max_position_embeddings": 128}, {}, 1024),
    ],
)
def test_factors_for_long_texts_limit_the_context_length_to_short_ones(
    tmp_path: Path, rope: dict[str, Any], more: dict[str, Any], tokens: int
) -> None:
    folder = write_config(tmp_path, **{**GPT2, "model_type": "phi3", "rope_scaling": rope, **more})
    assert describe_folder(folder).context_length == tokens


def test_the_text_config_of_a_multimodal_folder_is_described(tmp_path: Path) -> None:
    found = describe_folder(write_config(tmp_path, model_type="gemma3", text_config=GPT2))
    assert (found.model_type, found.embedding_length) == ("gemma3", 768)
