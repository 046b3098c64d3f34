"""``edgespec export``: output, report, errors, and files after an interruption."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edgespec.cli.terminal.output import ProgressPrinter
from edgespec.errors import EdgespecError, RuntimeUnavailableError
from edgespec.export import packages
from edgespec.export.provenance import Provenance
from edgespec.files import disk
from edgespec.files.gguf.header import read_header
from edgespec.files.home import Home
from edgespec.files.installation import install_command
from edgespec.placement.prepared import PreparedModel
from tests.support.command_line import InProcess, command, environment, run_cli, succeeded
from tests.support.exporting import AUTO, GGUF, is_whole, left_behind, stop_half_done
from tests.support.tiny_models import TinyModels, put_into_store
from tests.support.trimmed_folder import write_trimmed_folder

WAIT_S = 60.0

pytestmark = pytest.mark.usefixtures("few_prompts")


# ------------------------------------------------------------------------------------------------- whole models


def test_export_json_of_a_copied_model_has_the_documented_keys(
    tiny: TinyModels, here: InProcess, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = succeeded(here("export", tiny.drafter, *GGUF, "-o", out, "--json"))
    found = result.json
    assert found["schema_version"] == 1
    assert found["folder"] == str(out)
    assert found["manifest"] == json.loads((out / "manifest.json").read_text())
    assert (found["manifest"]["kind"], found["manifest"]["quant"]) == ("gguf", "keep")
    size = read_header(tiny.drafter).bytes_per_forward
    assert found["bytes_per_token"] == {"before": size, "after": size}
    assert found["quantisation"]["head"] == "Q8_0"
    assert found["trim"] is None
    assert result.err == ""
    assert (out / "model.gguf").read_bytes() == tiny.drafter.read_bytes()


def test_export_requantises_all_matrices(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    result = succeeded(here("export", tiny.target, *GGUF, "--quant", "Q4_0", "-o", tmp_path / "out"))
    header = read_header(tmp_path / "out" / "model.gguf")
    assert {tensor.type_name for tensor in header.tensors} >= {"Q4_0", "F32"}
    assert re.search(r"^weights +.*attention Q4_0", result.out, re.MULTILINE)
    assert "quantising" in result.err


def test_export_prints_files_weights_and_licence(
    tiny: TinyModels, here: InProcess, tmp_path: Path, text: Path
) -> None:
    options = ("--trim-vocab", "400", "--trim-from", text)
    result = succeeded(here("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", *options))
    for pattern in (
        r"^written +\S*out, [\d.]+ kB$",
        r"^ +drafter\.gguf +[\d.]+ kB$",
        r"^a token +reads [\d.]+ kB of weights in drafter; here: [\d.]+ kB of weights$",
        r"^weights +embedding Q8_0; head Q8_0; attention Q8_0; feed-forward Q8_0; vectors F32$",
        r"^head +400 of \d+ rows: \d+\.\d% of the held-out tokens$",
        r"^ranked by +the text of text\.txt$",
        r"^because +400 rows were requested$",
        r"^licence +not stated$",
    ):
        assert re.search(pattern, result.out, re.MULTILINE), pattern
    assert "writing drafter.gguf" in result.err
    assert "\x1b" not in result.out + result.err


def test_a_stored_model_keeps_its_name_hash_and_licence(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    put_into_store(Home(here.home), "smollm2-135m", tiny.target.read_bytes())
    found = succeeded(here("export", "smollm2-135m", *GGUF, "-o", tmp_path / "a", "--json")).json["manifest"]
    assert found["source"]["name"] == "smollm2-135m"
    assert found["licence"] == "Apache-2.0"
    # A file that no store knows is hashed, so that its copy in a store is recognised.
    local = succeeded(here("export", tiny.target, *GGUF, "-o", tmp_path / "b", "--json")).json["manifest"]
    assert local["source"]["sha256"] == found["source"]["sha256"] == found["files"]["model.gguf"]["sha256"]
    assert local["licence"] is None
    # And what was exported can be exported again, also over itself elsewhere.
    again = succeeded(here("export", tmp_path / "a", *GGUF, "-o", tmp_path / "b", "--json")).json
    assert again["manifest"]["source"]["name"] == "model"


# ------------------------------------------------------------------------------------------------------ ONNX


@pytest.fixture
def onnx_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What an ONNX exporter that writes nothing was asked."""
    calls: list[dict[str, Any]] = []

    def export_onnx(source: Path, folder: Path, provenance: Provenance, **more: Any) -> Mapping[str, Any]:
        calls.append({"source": source, "folder": folder, "provenance": provenance, **more})
        folder.mkdir()
        return {
            "kind": "onnx-model",
            "licence": None,
            "tensors": {"head": "8 bits"},
            "files": {"model.onnx": {"bytes": 5}},
        }

    module = ModuleType("edgespec.export.onnx.export")
    module.export_onnx = export_onnx  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "edgespec.export.onnx.export", module)
    return calls


def test_the_onnx_exporter_receives_the_source_and_the_kept_rows(
    tiny: TinyModels, here: InProcess, tmp_path: Path, text: Path, onnx_calls: list[dict[str, Any]]
) -> None:
    options = ("--quant", "q4", "--trim-vocab", "300", "--trim-from", text)
    found = succeeded(here("export", tiny.drafter, "--to", "onnx", "-o", tmp_path / "a", *options, "--json")).json
    (call,) = onnx_calls
    provenance: Provenance = call["provenance"]
    assert (call["source"], call["folder"]) == (tiny.drafter, tmp_path / "a")
    assert (provenance.quant, provenance.name, len(provenance.sha256 or "")) == ("q4", "drafter", 64)
    assert call["kept"].dtype == np.int32
    assert len(call["kept"]) == 300
    assert found["bytes_per_token"]["after"] is None
    assert found["quantisation"] == {"head": "8 bits"}
    assert found["trim"]["kept"] == 300
    told = succeeded(here("export", tiny.drafter, "--to", "onnx", "-o", tmp_path / "b"))
    assert onnx_calls[1]["kept"] is None
    assert onnx_calls[1]["provenance"].quant == "keep"
    assert "here: not measured" in told.out


def test_a_missing_export_package_is_reported_in_one_sentence(
    tiny: TinyModels, here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    result = here("export", tiny.drafter, "--to", "onnx", "-o", tmp_path / "out", "--json")
    result.failed_well("needs the package onnx")
    assert result.hint == install_command("export")
    assert result.json["error"]["type"] == "RuntimeUnavailableError"


def test_missing_packages_are_reported_before_the_model_is_looked_for(
    here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise RuntimeUnavailableError("llama.cpp is not installed", hint="install it")

    monkeypatch.setattr(packages, "load", missing)
    place = ("missing.gguf", "-o", tmp_path / "out")
    here("export", *place, *GGUF, "--quant", "q4_0").failed_well("llama.cpp is not installed")
    here("export", *place, *GGUF).failed_well("missing.gguf")
    for package, to in (("onnx", "onnx"), ("gguf", "gguf")):
        monkeypatch.setitem(sys.modules, package, None)
        here("export", *place, "--to", to).failed_well(f"needs the package {package}")


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "words", "code"),
    [
        ((*GGUF, "--quant", "q3_7"), ("q3_7", "q4_k_m"), 2),
        (("--to", "safetensors"), ("safetensors", "gguf or onnx"), 2),
        (("--to", "onnx", "--quant", "q5_k_m"), ("q5_k_m", "keep or q4"), 2),
        ((), ("--to",), 2),
        ((*GGUF, "--trim-vocab", "many"), ("many",), 2),
        ((*GGUF, "--trim-vocab", "-5"), ("-5",), 2),
        ((*GGUF, "--trim-vocab", "0"), ("'0'",), 2),
        ((*GGUF, "--trim-vocab", "9" * 50), ("number of rows",), 2),
        ((*GGUF, "--trim-vocab", "200"), ("200 rows cannot hold the 261", "261"), 2),
        ((*GGUF, "--trim-from", "x"), ("--trim-from", "--trim-vocab"), 2),
        ((*GGUF, "--target", "x"), ("--trim-for", "--trim-vocab"), 2),
        ((*GGUF, "--trim-vocab", "300", "--trim-from", "missing.txt"), ("missing.txt", "No such file"), 2),
        ((*GGUF, "--trim-vocab", "300", "--trim-from", "."), ("is not a regular file",), 2),
        ((*GGUF, "--trim-vocab", "300", "--target", "missing.gguf"), ("missing.gguf",), 1),
        ((*GGUF, "--trim-vocab", "300", "--target", "qwen2.5-coder-1b"), ("qwen2.5-coder-1b",), 1),
    ],
)
def test_wrong_export_options_are_errors(
    tiny: TinyModels, here: InProcess, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...], code: int
) -> None:
    result = here("export", tiny.drafter, "-o", tmp_path / "out", *options, "--json")
    result.failed_well(*words, code=code)
    assert code == 1 or result.hint
    assert result.json["error"].keys() == {"type", "message", "hint"}
    assert not (tmp_path / "out").exists()


def test_a_trim_text_that_is_not_text_is_an_error(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"text\xff")
    options = ("--trim-vocab", "300", "--trim-from", tmp_path / "bytes")
    here("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", *options).failed_well("UTF-8", "byte 4", code=2)


def test_export_does_not_replace_other_folders(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for out, words in (("full", "not an exported model"), ("file", "not a folder"), ("file/below", "not a folder")):
        for model in (tiny.drafter, "smollm2-135m"):  # said before anything is fetched
            here("export", model, *GGUF, "-o", tmp_path / out, "--offline").failed_well(words, code=2)
    assert (tmp_path / "full" / "a").read_text() == (tmp_path / "file").read_text() == "precious"


def test_export_rejects_unsupported_source_models(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    trimmed = write_trimmed_folder(tiny.drafter, tmp_path / "trimmed", range(400))
    result = here("export", trimmed, *GGUF, "-o", tmp_path / "out")
    result.failed_well("trimmed already is a drafter with a trimmed output head", code=2)
    assert "made from" in result.hint
    weightless = here("export", trimmed / "tokenizer.gguf", *GGUF, "-o", tmp_path / "out")
    weightless.failed_well("holds no weights")
    here("export", tmp_path / "missing.gguf", *GGUF, "-o", tmp_path / "out").failed_well("no such file")
    succeeded(here("export", tiny.drafter, *GGUF, "-o", tmp_path / "own"))
    itself = here("export", tmp_path / "own", *GGUF, "-o", tmp_path / "own")
    itself.failed_well("would be replaced", code=2)
    assert not (tmp_path / "out").exists()


def test_every_way_to_export_rejects_a_damaged_source_file(
    tiny: TinyModels, here: InProcess, tmp_path: Path, text: Path
) -> None:
    """tests/files/test_gguf_hostile.py damages files in every way."""
    path = tmp_path / "damaged.gguf"
    path.write_bytes(tiny.drafter.read_bytes()[:-100_000])
    for options in ((), ("--trim-vocab", "300", "--trim-from", text), ("--quant", "q4_0")):
        here("export", path, *GGUF, "-o", tmp_path / "out", *options).failed_well("damaged.gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("sizes")
def test_export_to_a_full_disk_is_an_error(
    tiny: TinyModels, here: InProcess, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    for options in ((), ("--trim-vocab", "300", "--trim-from", text), (*AUTO, "--trim-from", text)):
        here("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", *options).failed_well("free disk space")
    assert left_behind(tmp_path) == []


@pytest.mark.usefixtures("sizes")
def test_failed_timing_is_reported_and_leaves_no_files(
    tiny: TinyModels, here: InProcess, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise EdgespecError("the drafter cannot be timed", hint="give a number")

    monkeypatch.setattr(PreparedModel, "load", fail)
    result = here("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", *AUTO, "--trim-from", text)
    result.failed_well("the drafter cannot be timed")
    assert left_behind(tmp_path) == []


# --------------------------------------------------------------------------------------- interrupted and killed


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("when", ["counting what slow writes", "timing", "writing"])
def test_ctrl_c_in_an_export_leaves_no_files(
    tiny: TinyModels, here: InProcess, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    told = ProgressPrinter.__call__

    def interrupted(printer: Any, event: Any) -> None:
        told(printer, event)
        label = getattr(event, "stage", "")
        if label.startswith(when):
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressPrinter, "__call__", interrupted)
    rank = ("--target", tiny.slow) if when.startswith("counting") else ("--trim-from", text)
    result = here("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", *AUTO, *rank)
    assert result.code == 130
    assert result.err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in result.err
    assert result.out == ""
    assert left_behind(tmp_path) == []


def test_sigint_in_an_export_process_leaves_no_files(tiny: TinyModels, home: Home, tmp_path: Path) -> None:
    arguments = command("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", "--trim-vocab", "300")
    process = subprocess.Popen(
        [*arguments, "--target", str(tiny.slow)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(home.root),
        text=True,
    )
    assert process.stderr is not None
    told = ""
    until = time.monotonic() + WAIT_S
    while "counting what slow writes" not in told and time.monotonic() < until:
        told += process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, (told, err)
    assert (told + err).splitlines()[-1] == "interrupted"
    assert "Traceback" not in told + err
    assert out == ""
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_export_json_is_alone_on_stdout(tiny: TinyModels, home: Home, tmp_path: Path, text: Path) -> None:
    """In a separate process, without patches."""
    options = ("--trim-vocab", "300", "--trim-from", text)
    result = succeeded(
        run_cli("export", tiny.drafter, *GGUF, "-o", tmp_path / "out", *options, "--json", home=home.root)
    )
    assert result.json["trim"]["kept"] == 300
    assert result.err == ""


# Small reads make many small writes, so that most moments are in the middle of something.
EXPORTER = """
import sys
from edgespec.cli.app import run
from edgespec.export.gguf import parts as gguf_parts
gguf_parts.CHUNK_BYTES = 512
number = 0
while True:
    number += 1
    options = [sys.argv[1], "--to", "onnx" if number % 3 == 2 else "gguf", "-o", sys.argv[2], "--json"]
    if number % 3:
        options += ["--trim-vocab", str(300 + number % 50), "--trim-from", sys.argv[3]]
    assert run(["export", *options]) == 0
"""


@pytest.mark.slow
def test_an_export_killed_at_any_time_leaves_no_partial_folder_under_its_name(
    tiny: TinyModels, home: Home, tmp_path: Path, text: Path
) -> None:
    out, moments = tmp_path / "out", random.Random(20)

    def check() -> None:
        assert not out.exists() or is_whole(out)

    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", EXPORTER, str(tiny.drafter), str(out), str(text)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(home.root),
        )
        stop_half_done(process, tmp_path, moments.uniform(0, 0.3), check)
        process.send_signal(signal.SIGCONT)
        stop_half_done(process, tmp_path, moments.uniform(0, 0.3), check)
        process.kill()
        process.wait()
        check()
    succeeded(run_cli("export", tiny.drafter, *GGUF, "-o", out, home=home.root))
    assert is_whole(out)
    assert [name for name in left_behind(tmp_path) if name.startswith(".")] == []
