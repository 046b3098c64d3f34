"""``edgespec export`` of Hugging Face folders: converters, reports and errors."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgespec.export.optimum import process as optimum_process
from edgespec.files.gguf.header import read_header
from edgespec.files.onnx.folder import read_onnx_folder
from tests.support.command_line import InProcess, Result, run_cli, succeeded
from tests.support.exporting import GGUF, is_whole, left_behind
from tests.support.hub_server import HubServer, running
from tests.support.tiny_models import TinyModels
from tests.support.tiny_onnx import llama_logits
from tests.support.whole_onnx import DecoderGraph, write_fake_worker, write_folder

ONNX = ("--to", "onnx", "--python", sys.executable)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    write_folder(place / "tiny-llama", context_length=512)
    (place / "prepared").mkdir()
    DecoderGraph(place / "tiny-llama").write(place / "prepared")
    return place


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose conversion is prepared."""
    worker = write_fake_worker(made / "worker.py", made / "prepared")
    monkeypatch.setattr(optimum_process, "WORKER", worker)
    return made / "tiny-llama"


def test_a_hugging_face_folder_is_exported_to_gguf_by_our_converter(
    folder: Path, here: InProcess, tmp_path: Path
) -> None:
    found = succeeded(here("export", folder, *GGUF, "-o", tmp_path / "out", "--json")).json
    assert found["manifest"] == json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (found["manifest"]["kind"], found["manifest"]["source"]["name"]) == ("gguf", "tiny-llama")
    assert found["bytes_per_token"]["before"] is None
    assert found["bytes_per_token"]["after"] == read_header(tmp_path / "out" / "model.gguf").bytes_per_forward
    assert found["quantisation"]["attention"] == "F32"
    assert (found["trim"], found["perplexity"]) == (None, None)
    tokens = list(range(40, 60))
    ours, theirs = (
        llama_logits(path, tokens) for path in (tmp_path / "out" / "model.gguf", folder.with_suffix(".gguf"))
    )
    assert np.array_equal(ours, theirs)


def test_a_pard_folders_export_names_its_mask_token(folder: Path, here: InProcess, tmp_path: Path) -> None:
    own = tmp_path / "pard-tiny"
    shutil.copytree(folder, own)
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"pard_token": 300}))
    told = succeeded(here("export", own, *GGUF, "-o", tmp_path / "out"))
    assert "as a drafter drafts all tokens in one forward, with token 300 as the mask" in told.out
    found = succeeded(here("export", own, *ONNX, "-o", tmp_path / "onnx", "--json")).json
    assert found["manifest"]["mask_token_id"] == 300
    assert read_onnx_folder(tmp_path / "onnx").tokenizer_header.mask_token_id == 300
    (own / "config.json").write_text(json.dumps(config | {"pard_token": "the mask"}))
    here("export", own, *GGUF, "-o", tmp_path / "other").failed_well(
        "pard_token must be a whole number from 0 to", 'got "the mask"'
    )


def test_a_hugging_face_folder_is_exported_to_quantised_gguf(folder: Path, here: InProcess, tmp_path: Path) -> None:
    told = succeeded(here("export", folder, *GGUF, "--quant", "q8_0", "-o", tmp_path / "out"))
    types = {tensor.type_name for tensor in read_header(tmp_path / "out" / "model.gguf").tensors}
    assert types == {"Q8_0", "F32"}
    assert re.search(r"^a token +reads [0-9.]+ kB of weights$", told.out, re.MULTILINE)
    assert re.search(r"^perplexity +not measured: no runtime reads a Hugging Face folder", told.out, re.MULTILINE)
    assert is_whole(tmp_path / "out")


def test_a_hugging_face_folder_is_exported_to_onnx_by_the_given_python(
    folder: Path, here: InProcess, tmp_path: Path
) -> None:
    found = succeeded(here("export", folder, *ONNX, "-o", tmp_path / "out", "--quant", "q4", "--json")).json
    artefact = read_onnx_folder(tmp_path / "out")
    assert found["manifest"]["cache"] == artefact.cache == "whole"
    assert (found["manifest"]["quant"], found["manifest"]["source"]["name"]) == ("q4", "tiny-llama")
    assert found["bytes_per_token"] == {"before": None, "after": artefact.bytes_per_forward}
    assert found["quantisation"]["head"] == "float32"
    told = succeeded(here("export", folder, *ONNX, "-o", tmp_path / "out"))
    assert "converting the model tiny-llama" in told.err
    assert re.search(r"^written +.*out, ", told.out, re.MULTILINE)
    assert left_behind(tmp_path) == ["out"]


def test_exports_of_a_folder_generate_the_same_text(folder: Path, here: InProcess, tmp_path: Path) -> None:
    succeeded(here("export", folder, *ONNX, "-o", tmp_path / "onnx"))
    succeeded(here("export", folder, *GGUF, "-o", tmp_path / "gguf"))
    texts = [
        succeeded(here("generate", "the water", "--raw", "--plain", "--max-tokens", "12", "--target", target)).out
        for target in (tmp_path / "onnx", tmp_path / "gguf")
    ]
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*ONNX, "--trim-vocab", "300"), ("only a GGUF's output head can be trimmed", "--to gguf")),
        ((*GGUF, "--trim-vocab", "auto"), ("only a GGUF's output head can be trimmed", "--to gguf")),
        ((*ONNX, "--static-cache", "256"), ("--static-cache needs a GGUF", "--to gguf")),
        ((*GGUF, "--python", sys.executable), ("is only for --to onnx",)),
        (("--to", "onnx", "--python", "missing/python"), ("missing/python is not a program",)),
        ((*ONNX, "--quant", "q8_0"), ("q8_0", "keep or q4")),
    ],
)
def test_wrong_options_for_a_hugging_face_folder_are_errors(
    folder: Path, here: InProcess, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    result = here("export", folder, "-o", tmp_path / "out", *options)
    result.failed_well(*words, code=2)
    assert result.hint
    assert not (tmp_path / "out").exists()


def test_offline_no_environment_is_made_for_a_hugging_face_folder(
    folder: Path, here: InProcess, tmp_path: Path
) -> None:
    result = here("--offline", "export", folder, "--to", "onnx", "-o", tmp_path / "out")
    result.failed_well("the environment for Optimum is not on this machine")
    assert "--python PATH" in result.hint
    assert left_behind(tmp_path) == []


def test_the_python_option_is_an_error_for_a_gguf(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    result = here("export", tiny.drafter, *ONNX, "-o", tmp_path / "out")
    result.failed_well("--python", "is not one", code=2)


def test_an_output_folder_in_use_is_reported_before_converting(folder: Path, here: InProcess, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("precious")
    for way in (ONNX, GGUF):
        here("export", folder, *way, "-o", tmp_path / "full").failed_well("not an exported model", code=2)


def test_a_gguf_next_to_a_config_json_is_exported_as_a_gguf(folder: Path, here: InProcess, tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    shutil.copyfile(folder / "config.json", tmp_path / "repository" / "config.json")
    shutil.copyfile(folder.with_suffix(".gguf"), tmp_path / "repository" / "some.gguf")
    succeeded(here("export", tmp_path / "repository", *GGUF, "-o", tmp_path / "out"))
    assert (tmp_path / "out" / "model.gguf").read_bytes() == folder.with_suffix(".gguf").read_bytes()


def test_an_architecture_that_cannot_be_converted_hints_at_an_alternative(
    folder: Path, here: InProcess, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["PhiForCausalLM"]}))
    result = here("export", other, *GGUF, "-o", tmp_path / "out")
    result.failed_well("PhiForCausalLM", code=2)
    assert "--to onnx" in result.hint


# ------------------------------------------------------------------------------------------------ from the hub


@pytest.fixture
def hub(folder: Path) -> Iterator[HubServer]:
    with running(HubServer(files={path.name: path.read_bytes() for path in folder.iterdir()})) as hub:
        yield hub


def export_from(hub: HubServer, place: Path, *options: str | Path) -> Result:
    """In a separate process: the hub's library reads its variables when it is imported."""
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(place / "home" / "hub")}
    return run_cli("export", "hf:org/repo", "-o", place / "out", *options, home=place / "home", env=variables)


@pytest.mark.slow
def test_a_hub_repository_is_downloaded_and_exported(hub: HubServer, tmp_path: Path) -> None:
    hub.described = {"cardData": {"license": "apache-2.0"}}
    found = succeeded(export_from(hub, tmp_path, *GGUF, "--json")).json
    assert (found["manifest"]["source"]["name"], found["manifest"]["licence"]) == ("repo", "apache-2.0")
    assert read_header(tmp_path / "out" / "model.gguf").metadata["general.license"] == "apache-2.0"
    assert is_whole(tmp_path / "out")


def test_nothing_is_downloaded_for_a_wrong_export_request(hub: HubServer, tmp_path: Path) -> None:
    export_from(hub, tmp_path, *GGUF, "--trim-vocab", "300").failed_well("trimmed", code=2)
    assert hub.bodies() == []


@pytest.mark.slow
@pytest.mark.parametrize(("way", "words"), [(GGUF, "PhiForCausalLM"), (ONNX, "model_type")])
def test_no_weights_are_downloaded_for_an_architecture_that_cannot_be_converted(
    hub: HubServer, tmp_path: Path, way: tuple[str, ...], words: str
) -> None:
    hub.files["config.json"] = b'{"architectures": ["PhiForCausalLM"]}'
    export_from(hub, tmp_path, *way).failed_well(words, code=2)
    assert hub.bodies()
    assert not list((tmp_path / "home" / "hub").rglob("model.safetensors"))


@pytest.mark.slow
def test_no_weights_are_downloaded_for_sampling_that_is_refused(hub: HubServer, tmp_path: Path) -> None:
    hub.files["generation_config.json"] = b"{%s}" % (b" " * (1 << 20))
    export_from(hub, tmp_path, *GGUF).failed_well("generation_config.json")
    assert not list((tmp_path / "home" / "hub").rglob("model.safetensors"))


@pytest.mark.slow
def test_a_hub_repository_with_ggufs_is_exported_as_a_gguf(hub: HubServer, made: Path, tmp_path: Path) -> None:
    gguf = (made / "tiny-llama.gguf").read_bytes()
    hub.files = {"config.json": b"{}", "model.safetensors": b"x", "some.gguf": gguf}
    succeeded(export_from(hub, tmp_path, *GGUF))
    assert (tmp_path / "out" / "model.gguf").read_bytes() == gguf
    asked = len(hub.requests)
    succeeded(export_from(hub, tmp_path, *GGUF))  # it is in the store, so nothing is downloaded
    assert len(hub.requests) == asked
