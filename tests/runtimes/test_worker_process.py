"""Runtimes in a child process, held to the contract, and the specifics of the child process."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from edgespec.errors import (
    CancelledError,
    EdgespecError,
    InvalidRequestError,
    MemoryLimitError,
    ModelFileError,
    NonFiniteLogitsError,
    RuntimeUnavailableError,
    StaleRowsError,
)
from edgespec.export.provenance import Provenance
from edgespec.files.onnx.folder import read_onnx_folder
from edgespec.interfaces.drawing import DrawRequest, Measure, draw_from
from edgespec.interfaces.rows import Rows
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.llama.model import LlamaModel
from edgespec.runtimes.native.model import NativeSettings
from edgespec.runtimes.onnx.session import OnnxSettings
from edgespec.runtimes.process.deadlines import Deadlines
from edgespec.runtimes.process.frames import Frame, LoadRequest
from edgespec.runtimes.process.model import WorkerModel
from tests.runtimes.contract import Runtime, SequenceContract, ids, near
from tests.runtimes.thread_contract import ThreadContract
from tests.support.kernel_calls import require_native
from tests.support.loading import load_model, load_native, load_onnx, start_model
from tests.support.split_gguf import split_gguf
from tests.support.tiny_gguf import Quant, write_tiny_gguf
from tests.support.worker_loaders import command


def llama_request(path: Path, settings: LlamaSettings | None = None) -> LoadRequest:
    return LoadRequest(runtime="llama", path=path, settings=asdict(settings or LlamaSettings()), sha256="sha256:1")


def fake_model(loader: str = "fake", **options: Any) -> WorkerModel:
    return start_model(LoadRequest(runtime="fake", path=Path("tiny")), command=command(loader), **options)


@pytest.fixture(scope="module")
def near_model(tiny_gguf: Path) -> Iterator[LlamaModel]:
    with load_model(tiny_gguf, LlamaSettings(), sha256="sha256:1") as model:
        yield model


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Iterator[WorkerModel]:
    with start_model(llama_request(tiny_gguf)) as model:
        yield model


class TestContract(SequenceContract, ThreadContract):
    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, tiny_ggufs: dict[Quant, Path]) -> Runtime:
        path = tiny_ggufs["Q8_0"]
        return Runtime(
            open_model=lambda: start_model(llama_request(path)),
            prefill_tokens=4000,
            context_overhead_bytes=12 * 2**20,
        )


class TestContractOfTheFake(SequenceContract):
    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls) -> Runtime:
        return Runtime(open_model=fake_model)


# -------------------------------------------------------------------------- the same results as in this process


def test_a_worker_models_facts_equal_those_of_a_model_in_this_process(
    near_model: LlamaModel, model: WorkerModel
) -> None:
    assert model.facts == near_model.facts


def test_a_worker_models_scores_equal_those_of_a_model_in_this_process(
    near_model: LlamaModel, model: WorkerModel
) -> None:
    tokens = ids(300, near_model)
    with near_model.open(512) as near, model.open(512) as far:
        expected, found = near.forward(tokens, 5), far.forward(tokens, 5)
        assert np.array_equal(found.argmax(), expected.argmax())
        (found_ids, found_scores), (best_ids, best_scores) = found.top_k(7), expected.top_k(7)
        assert np.array_equal(found_ids, best_ids)
        assert np.array_equal(found_scores, best_scores)
        assert (found_ids.dtype, found_scores.dtype) == (best_ids.dtype, best_scores.dtype)
        for index in range(5):
            assert np.array_equal(found.logits(index), expected.logits(index))


def test_a_worker_loads_a_split_model_from_the_requests_part_paths(
    near_model: LlamaModel, tiny_gguf: Path, tmp_path: Path
) -> None:
    """As Ollama stores them: the request names each part."""
    split = split_gguf(tiny_gguf, tmp_path, tensors=9)
    parts = [part.rename(part.with_name(f"sha256-{number}")) for number, part in enumerate(split)]
    request = replace(llama_request(parts[0]), others=tuple(parts[1:]))
    with start_model(request) as model, model.open(64) as far, near_model.open(64) as near:
        assert np.array_equal(far.forward([1, 2, 3], 1).logits(0), near.forward([1, 2, 3], 1).logits(0))


@pytest.mark.parametrize("k", [0, -1, 10**6])
def test_an_invalid_top_k_raises_without_ending_the_worker(model: WorkerModel, k: int) -> None:
    with model.open(16) as sequence:
        rows = sequence.forward([1, 2], 1)
        with pytest.raises(ValueError, match=r"kth|negative dimensions|broadcast"):
            rows.top_k(k)
        assert rows.logits(0).shape == (model.facts.vocabulary_size,)


def test_a_top_k_larger_than_one_answer_is_fetched_correctly(
    model: WorkerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model.open(16) as sequence:
        rows = sequence.forward([1, 2, 3], 2)
        best_ids, best_scores = rows.top_k(9)
        monkeypatch.setattr("edgespec.runtimes.process.model._MOST_TOP_K", 8)
        found_ids, found_scores = rows.top_k(9)
        assert np.array_equal(found_ids, best_ids)
        assert np.array_equal(found_scores, best_scores)


def test_best_ids_are_available_without_fetching_rows(model: WorkerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with model.open(16) as sequence:
        rows = sequence.forward([1, 2, 3], 3)
        expected = [int(np.argmax(rows.logits(index))) for index in range(3)]
        monkeypatch.setattr(sequence, "fetch", lambda *_arguments: pytest.fail("a row was fetched"))
        assert rows.argmax().tolist() == expected


def test_draws_are_computed_in_the_worker(model: WorkerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with model.open(16) as sequence:
        rows = sequence.forward([1, 2, 3], 3)
        requests = (
            DrawRequest(measure=Measure.MASS, wanted=4),
            DrawRequest(key=(1, 2, 3, 4), top_p=0.9, seen={3: 1}, repeat_penalty=1.2, wanted=2),
        )
        size = model.facts.vocabulary_size // 2
        asked = [(index, own) for index in range(3) for own in requests]
        whole = [draw_from(rows.logits(index), own) for index, own in asked]
        half = [draw_from(rows.logits(index)[:size], own) for index, own in asked]
        monkeypatch.setattr(Frame, "scores", lambda *_arguments: pytest.fail("a row crossed"))
        sequence.rewind(0)
        rows = sequence.forward([1, 2, 3], 3)
        assert [rows.draw(index, own) for index, own in asked] == whole
        assert [rows.first(size).draw(index, own) for index, own in asked] == half
        assert rows.first(size).argmax().tolist() == [drawn.tokens[0] for drawn in half[::2]]


def test_a_row_is_fetched_once_and_the_caller_may_overwrite_it(
    model: WorkerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model.open(16) as sequence:
        rows = sequence.forward([1, 2], 2)
        first, other = rows.logits(0), rows.logits(1)
        assert not near(first, other)
        monkeypatch.setattr(sequence, "fetch", lambda *_arguments: pytest.fail("it crossed again"))
        again = rows.logits(1)  # the latest row
        assert np.array_equal(again, other)
        again[:] = 0
        assert np.array_equal(rows.logits(1), other)


def test_worker_scores_that_are_not_finite_raise_when_used() -> None:
    with fake_model("with_nan") as model, model.open(16) as sequence:
        assert sequence.forward([1], 1).argmax_row(0) >= 0
        rows = sequence.forward([1, 2], 2)
        for use in (
            rows.argmax,
            lambda: rows.argmax_row(1),
            lambda: Rows.argmax_row(rows, 1),
            lambda: rows.draw(1, DrawRequest()),
        ):
            with pytest.raises(NonFiniteLogitsError, match="nan at token id 49"):
                use()
        assert np.isnan(rows.logits(0)[49])
        assert sequence.forward([3], 1).argmax_row(0) >= 0


@pytest.mark.parametrize("make_missing", [True, False], ids=["missing", "truncated"])
def test_a_broken_file_raises_the_same_error_from_a_worker(
    tiny_gguf: Path, tmp_path: Path, make_missing: bool
) -> None:
    path = tmp_path / "broken.gguf"
    if not make_missing:
        path.write_bytes(tiny_gguf.read_bytes()[:5000])
    with pytest.raises(EdgespecError) as near:
        load_model(path, LlamaSettings())
    with pytest.raises(ModelFileError) as far:
        start_model(llama_request(path))
    assert type(far.value) is type(near.value)
    assert isinstance(near.value, ModelFileError)
    for name in ("message", "hint", "path", "reason", "offset"):
        assert getattr(far.value, name) == getattr(near.value, name)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (LlamaSettings(device="no such device"), RuntimeUnavailableError),
        (LlamaSettings(threads=0), InvalidRequestError),
        (LlamaSettings(kv_type="q9"), InvalidRequestError),
    ],
    ids=["device", "threads", "cache type"],
)
def test_invalid_settings_raise_the_same_error_from_a_worker(
    tiny_gguf: Path, settings: LlamaSettings, error: type[EdgespecError]
) -> None:
    with pytest.raises(error) as near:
        load_model(tiny_gguf, settings)
    with pytest.raises(error) as far:
        start_model(llama_request(tiny_gguf, settings))
    assert (far.value.message, far.value.hint) == (near.value.message, near.value.hint)


def test_a_worker_refuses_an_unknown_setting_or_runtime(tiny_gguf: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no setting 'thread'"):
        start_model(LoadRequest(runtime="llama", path=tiny_gguf, settings={"thread": 1}))
    with pytest.raises(InvalidRequestError, match="no runtime 'tests"):
        start_model(LoadRequest(runtime="tests.support.worker_loaders:fake", path=tiny_gguf))


def test_a_context_that_does_not_fit_leaves_the_worker_running() -> None:
    with fake_model("with_little_memory") as model:
        with pytest.raises(MemoryLimitError, match="no memory for 17 tokens") as caught:
            model.open(17)
        assert (caught.value.needed_bytes, caught.value.available_bytes) == (17, None)
        assert caught.value.hint == "try 16"
        for length in (0, -1, 2**31):
            with pytest.raises(InvalidRequestError):
                model.open(length)
        with model.open(16) as sequence:
            assert sequence.forward([1], 1).count == 1


def test_a_worker_models_facts_have_the_requested_name_and_sha256(tiny_gguf: Path) -> None:
    request = replace(llama_request(tiny_gguf), name="a name", sha256="ab" * 32)
    with start_model(request) as model:
        assert (model.facts.name, model.facts.sha256) == ("a name", "ab" * 32)


def test_an_onnx_model_runs_in_a_worker(tiny_gguf: Path, tmp_path: Path) -> None:
    from edgespec.export.onnx.export import export_onnx

    folder = tmp_path / "folder"
    export_onnx(tiny_gguf, folder, Provenance(name="tiny"), kept=None)
    request = LoadRequest(runtime="onnx", path=folder, settings=asdict(OnnxSettings()), sha256="sha256:1")
    with load_onnx(read_onnx_folder(folder), OnnxSettings(), sha256="sha256:1") as near, start_model(request) as far:
        assert far.facts == near.facts
        with near.open(64) as one, far.open(64) as other:
            assert np.array_equal(one.forward([1, 2, 3], 1).logits(0), other.forward([1, 2, 3], 1).logits(0))


def test_a_rewind_in_a_worker_may_drop_more_than_was_asked(tmp_path: Path) -> None:
    require_native()
    path = write_tiny_gguf(tmp_path / "m.gguf", architecture="gemma3", window=16, layers=7, kv_heads=1, quant="Q8_0")
    request = LoadRequest(runtime="native", path=path, settings=asdict(NativeSettings()), name="s", sha256="sha256:1")
    with load_native(path, NativeSettings(), name="s", sha256="sha256:1") as near, start_model(request) as far:
        tokens = ids(3000, near)
        with near.open(3100) as here, far.open(3100) as there:
            for sequence in (here, there):
                sequence.forward(tokens, 0)
                sequence.rewind(20)
            assert there.length == here.length == 0, "layers with a window gave back what the next tokens would see"
            expected, found = here.forward(tokens[:40], 1), there.forward(tokens[:40], 1)
            assert found.logits(0).tobytes() == expected.logits(0).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_native_model_runs_in_a_worker(tiny_gguf: Path, threads: int) -> None:
    require_native()
    settings = NativeSettings(threads=threads)
    request = LoadRequest(runtime="native", path=tiny_gguf, settings=asdict(settings), name="own", sha256="sha256:1")
    with load_native(tiny_gguf, settings, name="own", sha256="sha256:1") as near, start_model(request) as far:
        assert far.facts == replace(near.facts, can_fork=False, can_branch=False)
        tokens = ids(11, near)
        with near.open(64) as here, far.open(64) as there:
            here.forward(tokens[:8], 0)
            there.forward(tokens[:8], 0)
            expected, found = here.forward(tokens[8:], 3), there.forward(tokens[8:], 3)
            for row in range(3):
                assert found.logits(row).tobytes() == expected.logits(row).tobytes()
    with (
        pytest.raises(InvalidRequestError, match="no setting 'repack'"),
        start_model(replace(request, settings={"repack": True})),
    ):
        pass


@pytest.mark.slow
def test_cancels_at_any_moment_do_not_change_later_worker_scores(near_model: LlamaModel, model: WorkerModel) -> None:
    rng = random.Random(4)
    outcomes = {True: 0, False: 0}
    sizes = (1, 2, 30, 300)
    with near_model.open(600) as near, model.open(600) as far:

        def forward_s(size: int) -> float:
            """Seconds of a forward that nothing disturbs."""
            times = []
            for _ in range(5):
                started = time.perf_counter()
                far.forward(ids(size, near_model), 1)
                times.append(time.perf_counter() - started)
                far.rewind(0)
            return min(times)

        usual_s = {size: forward_s(size) for size in sizes}
        for step in range(300):
            far.rewind(min(far.length, rng.randrange(40)))
            near.rewind(far.length)
            tokens = ids(rng.choice(sizes), near_model, step)
            cancel = threading.Timer(2 * usual_s[len(tokens)] * rng.random(), far.cancel)
            cancel.start()
            before = far.length
            try:
                far.forward(tokens, 1)
            except CancelledError:
                assert far.length == before
                cancelled = True
            else:
                near.forward(tokens, 0)
                cancelled = False
            outcomes[cancelled] += 1
            cancel.join()
            far.reset_cancel()
        far.rewind(min(far.length, 40))
        near.rewind(far.length)
        assert near.forward([1, 2], 1).argmax_row(0) == far.forward([1, 2], 1).argmax_row(0)
    assert min(outcomes.values()) > 20
    assert model.lost is None


def test_worker_rows_read_on_another_thread_are_correct_or_stale(model: WorkerModel) -> None:
    rng = random.Random(6)
    found = {"read": 0, "stale": 0}
    with model.open(64) as sequence:
        expected = [sequence.forward([token], 1).logits(0) for token in range(1, 4)]
        assert not near(expected[0], expected[1])
        assert not near(expected[1], expected[2])
        for step in range(200):
            sequence.rewind(0)
            for token in range(1, 3):
                rows = sequence.forward([token], 1)
            going_on = sequence.submit(lambda: sequence.forward([3], 1))
            time.sleep(0.0005 * rng.random())
            try:
                assert near(rows.logits(0), expected[1]), step
                found["read"] += 1
            except StaleRowsError:
                found["stale"] += 1
            assert near(going_on.result(60).logits(0), expected[2])
    assert found["read"] + found["stale"] == 200
    assert found["stale"] > 0


# ------------------------------------------------------------------------------------------- the process itself


def test_the_environment_setting_changes_only_the_workers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGESPEC_TEST_ONLY", raising=False)
    with fake_model(environment={"EDGESPEC_TEST_ONLY": "there"}) as model:
        assert psutil.Process(model.pid).environ()["EDGESPEC_TEST_ONLY"] == "there"
        assert "EDGESPEC_TEST_ONLY" not in os.environ
    with fake_model() as model:
        assert "EDGESPEC_TEST_ONLY" not in psutil.Process(model.pid).environ()


def test_a_worker_does_not_import_modules_from_the_working_directory(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("numpy", "json", "edgespec"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger was imported')")
    monkeypatch.chdir(tmp_path)
    with start_model(llama_request(tiny_gguf)) as model:
        assert model.facts.runtime == "llama"


def test_a_worker_command_that_cannot_be_started_raises_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    request = LoadRequest(runtime="llama", path=Path("tiny.gguf"))
    with pytest.raises(RuntimeUnavailableError, match="cannot be started"):
        start_model(request, command=["no-such-command-anywhere"])
    for name, value in (("executable", ""), ("frozen", True)):
        with monkeypatch.context() as changed:
            changed.setattr(sys, name, value, raising=False)
            with pytest.raises(RuntimeUnavailableError, match="no Python interpreter") as caught:
                start_model(request)
        assert "worker.main()" in str(caught.value.hint)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_worker_whose_readers_cannot_be_started_is_ended(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    start, begun, before = threading.Thread.start, list[str](), set(psutil.Process().children())

    def limited(thread: threading.Thread) -> None:
        begun.append(thread.name)
        if len(begun) == failing:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(MemoryLimitError, match="no thread can be started"):
        start_model(LoadRequest(runtime="llama", path=Path("tiny.gguf")))
    assert set(psutil.Process().children()) <= before


def test_a_worker_can_be_started_with_a_custom_command(tiny_gguf: Path) -> None:
    own = [sys.executable, "-c", "from edgespec.runtimes.process.worker import main; main([])"]
    with start_model(llama_request(tiny_gguf), command=own) as model, model.open(16) as sequence:
        assert sequence.forward([1], 1).count == 1


def test_an_unreferenced_worker_model_ends_its_process() -> None:
    model = fake_model()
    process = psutil.Process(model.pid)
    sequence = model.open(16)
    forgotten = weakref.ref(sequence)
    sequence.forward([1], 1)
    del sequence, model
    gc.collect()
    assert forgotten() is None
    process.wait(60)


def test_output_printed_in_a_worker_does_not_disturb_its_answers() -> None:
    with fake_model() as quiet, fake_model("printing") as loud:
        with quiet.open(64) as one, loud.open(64) as other:
            for token in range(20):
                assert one.forward([token], 1).argmax_row(0) == other.forward([token], 1).argmax_row(0)
        assert loud.lost is None


def test_default_worker_settings_have_the_documented_values() -> None:
    assert Deadlines() == Deadlines(
        load_s=600.0, answer_s=30.0, token_s=None, timed_s=2.0, cancel_s=20.0, close_s=2.0
    )
    request = LoadRequest(runtime="llama", path=Path("x"))
    assert (request.settings, request.name, request.sha256) == ({}, None, None)
