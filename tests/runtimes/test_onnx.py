"""ONNX Runtime held to the contract, and its specifics: padding, shared sessions, hostile folders."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.errors import (
    CancelledError,
    ClosedError,
    ContextFullError,
    ForwardError,
    InvalidRequestError,
    MemoryLimitError,
    ModelFileError,
    RewindError,
    RuntimeUnavailableError,
)
from edgespec.export.onnx.export import export_onnx
from edgespec.files.onnx.folder import read_onnx_folder
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.onnx import shared as onnx_shared
from edgespec.runtimes.onnx.model import OnnxModel, OnnxSequence, describe_onnx, load_onnx
from edgespec.runtimes.onnx.providers import load
from edgespec.runtimes.onnx.session import OnnxSettings
from edgespec.runtimes.sequence import MAX_SCORED_ROWS
from tests.runtimes.contract import Runtime, SequenceContract, equal, ids, logits, near
from tests.runtimes.thread_contract import ThreadContract
from tests.support.quiet_process import CANCELLED, LEFT_RUNNING
from tests.support.tiny_gguf import Quant, write_tiny_gguf

REPOSITORY = Path(edgespec.__file__).parent.parent
LONGEST = 32_768  # the longest sequence the contract opens; a graph has only the positions in its metadata
SHORT = 64


@dataclass(frozen=True)
class Folders:
    """Exported tiny models, written on first use; ``kept`` rows of the head, None for all without a list."""

    place: Path

    def __call__(self, quant: Quant = "Q4_0", kept: int | None = None, context_length: int = LONGEST) -> Path:
        folder = self.place / f"{quant}-{kept}-{context_length}"
        if not folder.exists():
            source = self.place / f"{quant}-{context_length}.gguf"
            if not source.exists():
                write_tiny_gguf(source, quant=quant, width=128, context_length=context_length)
            rows = None if kept is None else np.array(some_ids(kept), dtype=np.int32)
            export_onnx(source, folder, name="tiny", sha256=None, kept=rows)
        return folder


def vocabulary_size(folder: Path) -> int:
    return read_onnx_folder(folder).vocabulary_size


def some_ids(count: int) -> list[int]:
    # Every tiny model has at least this many tokens; which tokens are kept does not matter.
    return sorted(random.Random(5).sample(range(600), count))


def load_folder(folder: Path, settings: OnnxSettings | None = None) -> OnnxModel:
    return load_onnx(read_onnx_folder(folder), settings or OnnxSettings())


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("onnx"))


@pytest.fixture(scope="module")
def model(folders: Folders) -> Iterator[OnnxModel]:
    with load_folder(folders()) as model:
        yield model


@pytest.fixture
def sequence(model: OnnxModel) -> Iterator[OnnxSequence]:
    with model.open(600) as sequence:
        yield sequence


class TestContract(SequenceContract, ThreadContract):
    @pytest.fixture(
        scope="class",
        params=[
            ("F32", OnnxSettings()),
            ("Q8_0", OnnxSettings(threads=2)),
            ("Q4_0", OnnxSettings()),
            ("Q4_0", OnnxSettings(pad_to=2)),
        ],
        ids=["F32", "Q8_0 on two threads", "Q4_0", "Q4_0 padded"],
    )
    @classmethod
    def runtime(cls, request: pytest.FixtureRequest, folders: Folders) -> Runtime:
        quant, settings = request.param
        return Runtime(
            open_model=lambda: load_folder(folders(quant), settings),
            prefill_tokens=20_000,
            context_overhead_bytes=12 * 2**20,
        )


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
    with load_folder(folders(quant)) as model, model.open(400) as sequence:
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
    with load_folder(folders(quant), OnnxSettings(pad_to=2)) as model, model.open(400) as sequence:
        prompt, text = ids(prompt_tokens, model), ids(8, model, 1)
        expected = rows_by_width(sequence, prompt, text, 8)
        for width in (1, 2, 3, 4, 5, 6, 7):
            assert equal(rows_by_width(sequence, prompt, text, width), expected), width
        assert sequence.length == prompt_tokens + 8


def test_padded_forwards_are_bit_equal_for_any_number_of_scored_rows(folders: Folders) -> None:
    with load_folder(folders(), OnnxSettings(pad_to=2)) as model, model.open(400) as sequence:
        tokens = ids(270, model)
        all_rows = logits(sequence.forward(tokens, 14))
        for rows in (1, 2, 13):
            sequence.rewind(0)
            assert equal(logits(sequence.forward(tokens, rows)), all_rows[-rows:]), rows


@pytest.mark.parametrize("pad_to", [1, 2])
def test_the_last_position_of_an_onnx_context_can_be_used(folders: Folders, pad_to: int) -> None:
    folder = folders(context_length=SHORT)
    with load_folder(folder, OnnxSettings(pad_to=pad_to)) as model:
        assert model.facts.trained_context_length == SHORT
        tokens = ids(SHORT, model)
        with model.open(SHORT) as sequence:
            sequence.forward(tokens[:-1], 0)
            last = sequence.forward(tokens[-1:], 1).logits(0)
            assert sequence.length == SHORT
            with pytest.raises(ContextFullError):
                sequence.forward([1], 0)
            sequence.rewind(0)
            assert near(sequence.forward(tokens, 1).logits(0), last)


def test_a_context_longer_than_the_graphs_positions_is_refused(folders: Folders) -> None:
    with load_folder(folders(context_length=SHORT)) as model:
        with pytest.raises(InvalidRequestError, match=str(SHORT)) as raised:
            model.open(SHORT + 1)
        assert raised.value.hint
        with pytest.raises(InvalidRequestError, match="0 tokens"):
            model.open(0)


def test_an_onnx_model_with_another_padding_shares_the_weights(folders: Folders) -> None:
    with load_folder(folders()) as model:
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


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0"])
def test_a_trimmed_onnx_head_scores_kept_tokens_in_source_ids(folders: Folders, quant: Quant) -> None:
    kept = some_ids(400)
    with load_folder(folders(quant)) as whole, load_folder(folders(quant, 400)) as trimmed:
        assert trimmed.facts.vocabulary_size == whole.facts.vocabulary_size
        assert trimmed.facts.bytes_per_forward < whole.facts.bytes_per_forward
        tokens = ids(40, whole)  # includes tokens without a score
        with whole.open(64) as left, trimmed.open(64) as right:
            expected, found = left.forward(tokens, 3), right.forward(tokens, 3)
            for index in range(3):
                row = found.logits(index)
                assert (row.dtype, row.shape) == (np.dtype(np.float32), (whole.facts.vocabulary_size,))
                assert np.abs(row[kept] - expected.logits(index)[kept]).max() < 1e-4
                assert np.isneginf(np.delete(row, kept)).all()
                assert found.argmax_row(index) == int(np.argmax(row))
            assert set(found.top_k(5)[0].ravel().tolist()) <= set(kept)


def test_a_trimmed_onnx_head_with_all_rows_scores_like_the_whole_head(folders: Folders, tmp_path: Path) -> None:
    size = vocabulary_size(folders())
    source = folders.place / f"Q4_0-{LONGEST}.gguf"
    export_onnx(source, tmp_path / "all", name="tiny", sha256=None, kept=np.arange(size, dtype=np.int32))
    with load_folder(folders()) as whole, load_folder(tmp_path / "all") as trimmed:
        tokens = ids(40, whole)
        with whole.open(64) as left, trimmed.open(64) as right:
            for width in (30, 1, 2, 7):
                rows = min(width, 3)
                assert equal(logits(left.forward(tokens[:width], rows)), logits(right.forward(tokens[:width], rows)))


# ------------------------------------------------------------------------------------------------ runs and failures


class WatchedSession:
    """A session that lets a test act before each run; otherwise the real session."""

    def __init__(self, session: Any, before: Callable[[int], None]) -> None:
        self._session = session
        self._before = before
        self.runs = 0

    def run_with_iobinding(self, *arguments: Any) -> None:
        self.runs += 1
        self._before(self.runs)
        self._session.run_with_iobinding(*arguments)


def watch(sequence: OnnxSequence, before: Callable[[int], None]) -> WatchedSession:
    weights = sequence._native._weights
    assert weights is not None
    watched = WatchedSession(weights.session, before)
    sequence._native._weights = replace(weights, session=watched)
    return watched


def unwatch(sequence: OnnxSequence, model: OnnxModel) -> None:
    sequence._native._weights = model._weights


def test_a_cancel_ends_an_onnx_run_in_progress(model: OnnxModel, sequence: OnnxSequence) -> None:
    tokens = ids(30, model)
    sequence.forward(tokens[:10], 0)
    watched = watch(sequence, lambda _run: sequence.cancel())  # after Python's check of the flag
    with pytest.raises(CancelledError):
        sequence.forward(tokens[10:], 1)
    assert (watched.runs, sequence.length) == (1, 10)
    unwatch(sequence, model)
    sequence.reset_cancel()
    after = sequence.forward(tokens[10:], 1).logits(0)
    with model.open(600) as fresh:
        fresh.forward(tokens[:10], 0)
        assert np.array_equal(fresh.forward(tokens[10:], 1).logits(0), after)


@pytest.mark.parametrize("failing_run", [1, 2])
def test_a_failed_onnx_run_leaves_the_sequence_unchanged(
    model: OnnxModel, sequence: OnnxSequence, failing_run: int
) -> None:
    def fail(run: int) -> None:
        if run == failing_run:
            raise RuntimeError("Error in execution:\n the device was lost")

    tokens = ids(500, model)
    sequence.forward(tokens[:37], 0)
    watch(sequence, fail)
    with pytest.raises(ForwardError, match="Error in execution: the device was lost"):
        sequence.forward(tokens[37:], 1)
    assert sequence.length == 37
    unwatch(sequence, model)
    after = sequence.forward([9], 1).logits(0)
    with model.open(600) as fresh:
        fresh.forward(tokens[:37], 0)
        assert np.array_equal(fresh.forward([9], 1).logits(0), after)


def test_two_onnx_sequences_in_parallel_score_like_each_alone(model: OnnxModel) -> None:
    def decode(seed: int) -> list[LogitsArray]:
        found: list[LogitsArray] = []
        with model.open(600) as sequence:
            sequence.forward(ids(300, model, seed), 0)
            for step in range(60):
                found += logits(sequence.forward(ids(1 + step % 4, model, seed + step), 1))
                sequence.rewind(sequence.length - step % 2)
        return found

    alone = [decode(seed) for seed in (10, 20)]
    together: list[list[LogitsArray]] = [[], []]

    def run(place: int, seed: int) -> None:
        together[place] = decode(seed)

    threads = [threading.Thread(target=run, args=each) for each in ((0, 10), (1, 20))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert equal(together[0], alone[0])
    assert equal(together[1], alone[1])


def test_a_provider_with_separate_memory_runs_serially_and_scores_the_same(folders: Folders) -> None:
    with load_folder(folders()) as model, model.open(300) as sequence:
        weights = model._weights
        assert weights is not None
        lock = threading.Lock()
        other = OnnxModel(replace(weights, on_cpu=False, turn=lock), model.settings, model.facts)
        with other, other.open(300) as remote:
            watch(remote, lambda _run: None if lock.locked() else pytest.fail("two runs could overlap"))
            for count in (270, 1, 3, 1):
                tokens = ids(count, model, count)
                assert equal(logits(sequence.forward(tokens, 1)), logits(remote.forward(tokens, 1)))


def test_an_onnx_forward_refuses_more_rows_than_the_maximum(sequence: OnnxSequence) -> None:
    assert sequence.forward([3] * 70, MAX_SCORED_ROWS).count == MAX_SCORED_ROWS
    with pytest.raises(InvalidRequestError, match=str(MAX_SCORED_ROWS)):
        sequence.forward([3] * 70, MAX_SCORED_ROWS + 1)


def test_a_closed_onnx_sequence_refuses_to_rewind(model: OnnxModel) -> None:
    with model.open(64) as sequence:
        sequence.forward([1, 2], 0)
        with pytest.raises(RewindError):
            sequence.rewind(3)
    with pytest.raises(ClosedError):
        sequence.rewind(1)
    with pytest.raises(ClosedError):
        sequence._native.decode(np.array([1]), 0, 0)


def test_an_onnx_cache_that_does_not_fit_raises_a_readable_error(
    model: OnnxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_keywords: object) -> None:
        raise MemoryError

    monkeypatch.setattr(onnx_shared.np, "zeros", refuse)
    threads = threading.active_count()
    with pytest.raises(MemoryLimitError) as raised:
        model.open(1000)
    assert raised.value.needed_bytes == 1000 * model.facts.kv_bytes_per_token
    assert threading.active_count() == threads


# ------------------------------------------------------------------------------------------- facts and settings


def test_onnx_facts_come_from_the_artefact_and_the_settings(folders: Folders) -> None:
    artefact = read_onnx_folder(folders())
    settings = OnnxSettings(threads=2, pad_to=2)
    with load_onnx(artefact, settings, name="tiny", sha256="ab") as model:
        facts = model.facts
    assert facts == describe_onnx(artefact, settings, name="tiny", sha256="ab")
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


def test_an_onnx_models_name_is_its_folders_unless_the_caller_passes_one(model: OnnxModel, folders: Folders) -> None:
    assert (model.facts.name, model.facts.sha256) == (folders().name, None)


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
        load_folder(folders(), settings)


def test_an_unknown_onnx_provider_raises_with_the_available_names(folders: Folders) -> None:
    with pytest.raises(RuntimeUnavailableError) as raised:
        load_folder(folders(), OnnxSettings(provider="npu9"))
    assert "cpu" in (raised.value.hint or "")


def test_two_loads_of_one_onnx_folder_are_bit_equal(folders: Folders) -> None:
    found = []
    for _ in range(2):
        with load_folder(folders(), OnnxSettings(threads=2)) as model, model.open(600) as sequence:
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
        folder = copied(folders(), tmp_path / name)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ModelFileError):
            load_folder(folder)


def test_an_onnx_folder_that_changes_after_its_check_raises_a_readable_error(
    folders: Folders, tmp_path: Path
) -> None:
    artefact = read_onnx_folder(copied(folders(), tmp_path / "changing"))
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
from edgespec.files.onnx.folder import read_onnx_folder
from edgespec.runtimes.onnx.model import OnnxSettings, load_onnx

good, bad = map(Path, sys.argv[1:])
broken = read_onnx_folder(bad)
broken.data_path.write_bytes(b"")
try:
    load_onnx(broken, OnnxSettings())
except EdgespecError:
    steps = ["refused"]
opened = lambda: load_onnx(read_onnx_folder(good), OnnxSettings()).open(3000)
"""


def test_onnx_runtime_prints_nothing_and_the_process_exits_with_status_zero(folders: Folders, tmp_path: Path) -> None:
    good, bad = copied(folders(), tmp_path / "good"), copied(folders(), tmp_path / "bad")
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{QUIET}{CANCELLED}{LEFT_RUNNING}"
    done = subprocess.run([sys.executable, "-c", code, good, bad], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr.endswith(b"\n")
    assert done.stderr.splitlines()[-1] == b""  # nothing after the line that follows the import
    assert Path(f"{good}.steps").read_text(encoding="utf-8") == "refused cancelled"
