"""ONNX Runtime: padding, shared sessions, settings, hostile folders. The contract: test_onnx_caches.py."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.errors import (
    ClosedError,
    InvalidRequestError,
    ModelFileError,
    RuntimeUnavailableError,
)
from edgespec.export.onnx.export import export_onnx
from edgespec.export.provenance import Provenance
from edgespec.files.onnx.folder import read_onnx_folder
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.onnx.model import OnnxModel, OnnxSequence, describe_onnx
from edgespec.runtimes.onnx.providers import load
from edgespec.runtimes.onnx.session import OnnxSettings
from edgespec.runtimes.sequence import MAX_SCORED_ROWS
from tests.runtimes.contract import equal, ids, logits, near
from tests.support.loading import load_onnx, located
from tests.support.onnx_folders import Folders, load_folder, watch
from tests.support.quiet_process import CANCELLED, LEFT_RUNNING
from tests.support.tiny_gguf import Quant
from tests.support.whole_onnx import LONGEST

REPOSITORY = Path(edgespec.__file__).parent.parent


@pytest.fixture(scope="module")
def model(folders: Folders) -> Iterator[OnnxModel]:
    with load_folder(folders.shared()) as model:
        yield model


@pytest.fixture
def sequence(model: OnnxModel) -> Iterator[OnnxSequence]:
    with model.open(600) as sequence:
        yield sequence


# --------------------------------------------------------------------------------------------------- width classes


def rows_by_width(sequence: OnnxSequence, prompt: list[int], text: list[int], width: int) -> list[LogitsArray]:
    """The scores after each token of ``text``, computed ``width`` at a time."""
    sequence.rewind(0)
    sequence.forward(prompt, 0)
    found: list[LogitsArray] = []
    for start in range(0, len(text), width):
        part = text[start : start + width]
        found += logits(sequence.forward(part, len(part)))
    return found


@pytest.mark.parametrize("prompt_tokens", [20, 255, 256, 300])
@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0"])
def test_onnx_rows_of_width_two_and_above_are_bit_equal(folders: Folders, quant: Quant, prompt_tokens: int) -> None:
    with load_folder(folders.shared(quant)) as model, model.open(400) as sequence:
        prompt, text = ids(prompt_tokens, model), ids(8, model, 1)
        expected = rows_by_width(sequence, prompt, text, 8)
        for width in (2, 4):  # widths that divide the text without a remainder
            assert equal(rows_by_width(sequence, prompt, text, width), expected), width
        for width in (2, 3, 4, 5, 6, 7):
            assert equal(rows_by_width(sequence, prompt, text[:width], width), expected[:width]), width
        for found, own in zip(rows_by_width(sequence, prompt, text, 1), expected, strict=True):
            assert near(found, own)


@pytest.mark.parametrize("prompt_tokens", [1, 20, 255, 257, 300])
@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0"])
def test_onnx_forwards_padded_to_two_are_bit_equal_at_every_width(
    folders: Folders, quant: Quant, prompt_tokens: int
) -> None:
    with load_folder(folders.shared(quant), OnnxSettings(pad_to=2)) as model, model.open(400) as sequence:
        prompt, text = ids(prompt_tokens, model), ids(8, model, 1)
        expected = rows_by_width(sequence, prompt, text, 8)
        for width in (1, 2, 3, 4, 5, 6, 7):
            assert equal(rows_by_width(sequence, prompt, text, width), expected), width
        assert sequence.length == prompt_tokens + 8


def test_padded_forwards_are_bit_equal_for_any_number_of_scored_rows(folders: Folders) -> None:
    with load_folder(folders.shared(), OnnxSettings(pad_to=2)) as model, model.open(400) as sequence:
        tokens = ids(270, model)
        all_rows = logits(sequence.forward(tokens, 14))
        for rows in (1, 2, 13):
            sequence.rewind(0)
            assert equal(logits(sequence.forward(tokens, rows)), all_rows[-rows:]), rows


def test_an_onnx_model_with_another_padding_shares_the_weights(folders: Folders) -> None:
    with load_folder(folders.shared()) as model:
        padded = model.with_settings(pad_to=2)
        assert (padded.settings.pad_to, model.settings.pad_to) == (2, 1)
        assert padded.facts == replace(model.facts, settings=padded.settings.as_json())
        with pytest.raises(InvalidRequestError, match="3"):
            model.with_settings(pad_to=3)
        model.close()
        with pytest.raises(ClosedError):
            model.with_settings(pad_to=2)
        with padded, padded.open(32) as sequence:
            assert sequence.forward([3, 4], 1).count == 1


# -------------------------------------------------------------------------------------------------- trimmed heads


def test_a_trimmed_onnx_head_with_all_rows_scores_like_the_whole_head(folders: Folders, tmp_path: Path) -> None:
    size = read_onnx_folder(folders.shared()).vocabulary_size
    export_onnx(folders.source(), tmp_path / "all", Provenance(name="tiny"), kept=np.arange(size, dtype=np.int32))
    with load_folder(folders.shared()) as whole, load_folder(tmp_path / "all") as trimmed:
        tokens = ids(40, whole)
        with whole.open(64) as left, trimmed.open(64) as right:
            for width in (30, 1, 2, 7):
                rows = min(width, 3)
                assert equal(logits(left.forward(tokens[:width], rows)), logits(right.forward(tokens[:width], rows)))


# ------------------------------------------------------------------------------------------------ runs and failures


def test_a_provider_with_separate_memory_runs_serially_and_scores_the_same(folders: Folders) -> None:
    with load_folder(folders.shared()) as model, model.open(300) as sequence:
        weights = model._weights
        assert weights is not None
        lock = threading.Lock()
        other = OnnxModel(replace(weights, on_cpu=False, turn=lock), model._file, model.settings, model.facts)
        with other, other.open(300) as remote:
            watch(remote, lambda: None if lock.locked() else pytest.fail("two runs could overlap"))
            for count in (270, 1, 3, 1):
                tokens = ids(count, model, count)
                assert equal(logits(sequence.forward(tokens, 1)), logits(remote.forward(tokens, 1)))


def test_an_onnx_forward_refuses_more_rows_than_the_maximum(sequence: OnnxSequence) -> None:
    assert sequence.forward([3] * 70, MAX_SCORED_ROWS).count == MAX_SCORED_ROWS
    with pytest.raises(InvalidRequestError, match=str(MAX_SCORED_ROWS)):
        sequence.forward([3] * 70, MAX_SCORED_ROWS + 1)


# ------------------------------------------------------------------------------------------- facts and settings


def test_onnx_facts_come_from_the_artefact_and_the_settings(folders: Folders) -> None:
    artefact = read_onnx_folder(folders.shared())
    settings = OnnxSettings(threads=2, pad_to=2)
    with load_onnx(artefact, settings, name="tiny", sha256="ab") as model:
        facts = model.facts
    assert facts == describe_onnx(located(artefact, name="tiny", sha256="ab"), settings)
    assert (facts.name, facts.sha256, facts.architecture) == ("tiny", "ab", "llama")
    assert (facts.runtime, facts.device, facts.threads) == ("onnx", "cpu", 2)
    assert facts.build == f"{load().build} CPUExecutionProvider"
    assert facts.vocabulary_size == artefact.vocabulary_size
    assert facts.trained_context_length == LONGEST
    assert facts.weight_bytes == artefact.weight_bytes
    assert 0 < facts.bytes_per_forward < facts.weight_bytes
    assert (facts.kv_type, facts.kv_bytes_per_token) == ("f32", 2 * 2 * 2 * 32 * 4)
    assert facts.settings == settings.as_json()
    assert facts.can_rewind
    assert not facts.can_fork


def test_an_onnx_models_name_is_its_folders(model: OnnxModel, folders: Folders) -> None:
    assert (model.facts.name, model.facts.sha256) == (
        folders.shared().name,
        read_onnx_folder(folders.shared()).identity,
    )


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        (OnnxSettings(threads=0), InvalidRequestError, "threads"),
        (OnnxSettings(pad_to=0), InvalidRequestError, "padded to 0"),
        (OnnxSettings(pad_to=3), InvalidRequestError, "padded to 3"),
        (OnnxSettings(provider="npu9"), RuntimeUnavailableError, "npu9"),
    ],
)
def test_invalid_onnx_settings_are_refused_before_loading(
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    settings: OnnxSettings,
    error: type[Exception],
    says: str,
) -> None:
    monkeypatch.setattr(load().api, "InferenceSession", lambda *_, **__: pytest.fail("a session was made"))
    with pytest.raises(error, match=says):
        load_folder(folders.shared(), settings)


def test_an_unknown_onnx_provider_raises_with_the_available_names(folders: Folders) -> None:
    with pytest.raises(RuntimeUnavailableError) as raised:
        load_folder(folders.shared(), OnnxSettings(provider="npu9"))
    assert "cpu" in (raised.value.hint or "")


def test_two_loads_of_one_onnx_folder_are_bit_equal(folders: Folders) -> None:
    found = []
    for _ in range(2):
        with load_folder(folders.shared(), OnnxSettings(threads=2)) as model, model.open(600) as sequence:
            sequence.forward(ids(500, model), 0)
            found.append(logits(sequence.forward([7, 8, 9], 3)))
    assert equal(*found)


# ----------------------------------------------------------------------------------------- hostile files, no output


def copied(folder: Path, place: Path) -> Path:
    place.mkdir()
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def test_a_damaged_onnx_folder_never_reaches_native_code(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load().api, "InferenceSession", lambda *_, **__: pytest.fail("native code was given it"))
    for name in ("model.onnx", "model.onnx.data", "tokenizer.gguf", "manifest.json"):
        folder = copied(folders.shared(), tmp_path / name)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ModelFileError):
            load_folder(folder)


def test_an_onnx_folder_that_changes_after_its_check_raises_a_readable_error(
    folders: Folders, tmp_path: Path
) -> None:
    artefact = read_onnx_folder(copied(folders.shared(), tmp_path / "changing"))
    content = artefact.data_path.read_bytes()
    artefact.data_path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelFileError, match="could not load it"):
        load_onnx(artefact, OnnxSettings())
    assert not any(thread.name == "edgespec-load" for thread in threading.enumerate())


QUIET = """
import sys, threading
from pathlib import Path
import onnxruntime
print(file=sys.stderr)  # whatever it says when imported is its own
from edgespec.errors import CancelledError, EdgespecError
from edgespec.files.model_file import read_model_file
from edgespec.runtimes.onnx.model import OnnxSettings, load_onnx

good, bad = map(Path, sys.argv[1:])
broken = read_model_file(bad)
broken.onnx.data_path.write_bytes(b"")
try:
    load_onnx(broken, OnnxSettings())
except EdgespecError:
    steps = ["refused"]
opened = lambda: load_onnx(read_model_file(good), OnnxSettings()).open(3000)
"""


def test_onnx_runtime_prints_nothing_and_the_process_exits_with_status_zero(folders: Folders, tmp_path: Path) -> None:
    good, bad = copied(folders.shared(), tmp_path / "good"), copied(folders.shared(), tmp_path / "bad")
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{QUIET}{CANCELLED}{LEFT_RUNNING}"
    done = subprocess.run([sys.executable, "-c", code, good, bad], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.endswith(b"\n")
    assert done.stderr.splitlines()[-1] == b""  # nothing after the line that follows the import
    assert Path(f"{good}.steps").read_text(encoding="utf-8") == "refused cancelled"
