"""Drafters in a separate process: which kinds, their memory, and their measurements."""

from __future__ import annotations

import itertools
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from edgespec.bench.arms import open_arm
from edgespec.calibration.kinds import TIMES
from edgespec.engine.engine import Engine
from edgespec.engine.pair import loaded_pair
from edgespec.engine.pair.load import Limits
from edgespec.engine.pair.measurements import PairMeasurements
from edgespec.errors import MemoryLimitError
from edgespec.export.onnx.export import export_onnx
from edgespec.export.provenance import Provenance
from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.hardware import neighbours
from edgespec.hardware.machine import describe_machine
from edgespec.hardware.neighbours import Used
from edgespec.interfaces.model import LoadsInBackground
from edgespec.placement.memory import memory_needed
from edgespec.placement.prepared import PROCESS_BYTES, Preparation, choose_threads
from edgespec.profiles.profile import load_profile
from edgespec.runtimes.background import BackgroundModel
from edgespec.runtimes.process.deadlines import Deadlines
from edgespec.runtimes.process.settings import WorkerSettings
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.support.calibrating import shorten_calibration
from tests.support.pages import fenced
from tests.support.processor import processor_runtimes
from tests.support.tiny_models import TinyModels, answer, invent_measurements, require_speculation
from tests.support.trimmed_folder import write_trimmed_folder
from tests.support.worker_loaders import command

WAIT_S = 60.0
HANGING = WorkerSettings(command=command("slow"), deadlines=Deadlines(load_s=0.2, close_s=0.2), restart_after_s=0.0)


@pytest.fixture(scope="module")
def trimmed(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = [token for token in range(640) if token % 4]
    return write_trimmed_folder(tiny.drafter, tmp_path_factory.mktemp("trimmed") / "small-drafter", kept)


@pytest.fixture(scope="module")
def folder(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx") / "onnx-drafter"
    export_onnx(tiny.drafter, folder, Provenance(name="onnx-drafter"), kept=None)
    return folder


@pytest.fixture
def drafter(request: pytest.FixtureRequest, tiny: TinyModels) -> Path:
    return tiny.drafter if request.param in ("llama", "native") else request.getfixturevalue(request.param)


def wait_for_drafter(engine: Engine) -> BackgroundModel:
    model = engine.pair.pool.drafter_model()
    assert isinstance(model, BackgroundModel)
    assert model.wait(WAIT_S)
    return model


def kill(model: BackgroundModel) -> None:
    (process,) = psutil.Process().children()
    process.kill()
    for _ in range(int(WAIT_S * 100)):
        if model.waits_because is not None:
            return
        time.sleep(0.01)
    raise AssertionError("the loss was not noticed")


KINDS = [*((runtime, runtime) for runtime in processor_runtimes()), ("trimmed", "llama"), ("folder", "onnx")]


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "runtime"), KINDS, indirect=["drafter"])
def test_every_kind_of_drafter_works_in_a_process_and_restarts_after_a_loss(
    tiny: TinyModels, drafter: Path, runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(drafter.parent)
    at_once = WorkerSettings(restart_after_s=0.0)
    with tiny.load(
        draft=f"./{drafter.name}",
        lookup=False,
        depth=2,
        draft_isolation="process",
        draft_runtime="auto" if runtime == "onnx" else runtime,
        worker=at_once,
    ) as engine:
        require_speculation(engine, 2)
        model = wait_for_drafter(engine)
        assert model.facts == engine.pair.measurements.drafter, "stored measurements are found again"
        assert model.facts.runtime == runtime
        monkeypatch.chdir(tmp_path)  # the process keeps the absolute path
        with engine.session() as session:
            plain = answer(session.generate("hello world", max_tokens=40, depth=0))
            for life in ("first", "second"):
                session.clear()
                drafted = answer(session.generate("hello world", max_tokens=40))
                assert drafted.token_ids == plain.token_ids
                assert drafted.stats.rounds_by_source["model"] > 0
                assert drafted.stats.accepted > 0
                if life == "first":
                    kill(model)
                    wait_for_drafter(engine)
        (process,) = psutil.Process().children()
    assert not process.is_running()


@pytest.mark.slow
@pytest.mark.parametrize(
    "frozen",
    [False, pytest.param(True, marks=pytest.mark.skipif(sys.platform == "win32", reason="its program is a script"))],
)
def test_the_program_of_the_packaging_page_starts_its_drafter_as_a_script_and_frozen(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    (text,) = fenced("docs/embedding/packaging.md", "python")
    drafting = f'{str(tiny.target)!r}, draft={str(tiny.drafter)!r}, depth=2, threads=1, draft_isolation="process"'
    script, program = tmp_path / "program.py", tmp_path / "program"
    script.write_text(text.replace('"qwen2.5-coder-1.5b"', drafting), encoding="utf-8")
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n', encoding="utf-8")
    program.chmod(0o700)
    names = runpy.run_path(str(script))
    with monkeypatch.context() as patch:
        if frozen:
            patch.setattr(sys, "frozen", True, raising=False)
            patch.setattr(sys, "executable", str(program))
        with names["load"]() as engine:
            wait_for_drafter(engine)
            assert len(psutil.Process().children()) == 1


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_drafter_process_does_not_count_as_a_disturbing_program(
    tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    shorten_calibration(monkeypatch)
    looks, worked = itertools.count(), itertools.count()  # one of two processors is busy, by the drafter's process

    def used() -> Used:
        look = next(looks)
        return Used(own_s=0.0, busy_s=1.0 * look, total_s=2.0 * look)

    monkeypatch.setattr(neighbours, "processor_seconds", used)
    monkeypatch.setattr(loaded_pair, "worker_seconds", lambda: float(next(worked)))
    runtime = processor_runtimes()[0]  # no other runtime is timed
    with tiny.load(store_home=home, context=200, runtime=runtime, draft_isolation=isolation) as engine:
        invent_measurements(engine)
        store, facts = engine.pair.measurements.store, engine.pair.measurements.drafter
        assert facts is not None
        store.forget(TIMES, facts)
        assert engine.calibrate() == (0.0 if isolation == "process" else 0.5)
        assert engine.pair.measurements.disturbed == (isolation == "thread")


def test_a_drafter_on_the_processor_runs_in_a_thread_unless_the_profile_sets_a_process(tiny: TinyModels) -> None:
    for isolation, processes in (("auto", 0), ("thread", 0), ("process", 1)):
        with tiny.load(lookup=False, draft_isolation=isolation) as engine:
            assert engine.pair.pool.drafter_model().wait(WAIT_S)
            assert len(psutil.Process().children()) == processes


def located(tiny: TinyModels, path: Path, tmp_path: Path) -> LocatedModel:
    return Locator(store=Store(Home(tmp_path))).locate(str(path))


def test_a_drafter_process_counts_in_the_memory_estimate_like_a_thread(tiny: TinyModels, tmp_path: Path) -> None:
    profile = load_profile(
        None, environ={}, cwd=tmp_path, user_dir=tmp_path, flags={"threads": 1, "device": "cpu"}, only_the_named=True
    )
    prepare = Preparation(profile, choose_threads(profile, describe_machine(), None), 2048)
    needed = 0
    for path, prepared in ((tiny.target, prepare.target), (tiny.drafter, prepare.drafter)):
        model = located(tiny, path, tmp_path)
        needed += memory_needed(model, prepared(model).settings, 2048).total_bytes
    cases = (("thread", needed, True), ("process", needed, False), ("process", needed + PROCESS_BYTES, True))
    for isolation, allowed, fits in cases:
        limits = Limits(max_memory_bytes=allowed)
        refused = nullcontext() if fits else pytest.raises(MemoryLimitError, match="drafter needs about")
        with refused, tiny.load(lookup=False, draft_isolation=isolation, device="cpu", limits=limits) as engine:
            assert engine.plan.drafter_off is None


# -------------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_calibration(monkeypatch)
    monkeypatch.setattr(PairMeasurements, "may_pay", lambda _self, _source: False)


Load = Callable[..., Engine]


@pytest.fixture
def load(tiny: TinyModels, home: Home, quick: None) -> Load:
    def load(**overrides: object) -> Engine:
        return tiny.load(store_home=home, context=256, lookup=False, draft_isolation="process", **overrides)

    return load


def test_a_drafter_in_a_process_is_calibrated_in_that_process(load: Load) -> None:
    with load(calibrate=True) as engine:
        assert not engine.unmeasured
        assert engine.pair.measurements.drafter_times() is not None
        assert engine.pair.measurements.drafter is not None
        assert engine.pair.measurements.drafter.settings["process"] is True
        here = replace(engine.pair.measurements.drafter, settings={})
        assert engine.pair.measurements.store.load(TIMES, here) is None, "times in a thread differ"


@pytest.mark.slow
@pytest.mark.parametrize("learn", [False, True])
def test_a_drafter_process_that_does_not_load_leaves_the_rest_measured(load: Load, learn: bool) -> None:
    with load(worker=HANGING) as engine:
        if learn:
            while not engine.calibrate_for(0.05):
                pass
        else:
            engine.calibrate()
        assert engine.pair.measurements.target_times() is not None
        assert "did not start again" in str(engine.pair.measurements.drafter_failure)
        assert any("the model drafter is lost: drafter is off" in reason for reason in engine.plan.reasons)


def test_a_drafter_process_lost_during_calibration_is_left_out(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_arguments: object) -> Iterator[float]:
        (process,) = psutil.Process().children()
        process.kill()
        drafter = engine.pair.pool.drafter_model()
        while True:
            sequence = drafter.open(16)
            sequence.forward([1], 1)
            sequence.close()
            yield 0.0

    monkeypatch.setattr("edgespec.engine.pair.calibration_run.measure_drafter", lose)
    with load() as engine:
        engine.calibrate()
        assert "is lost: it was ended by SIGKILL" in str(engine.pair.measurements.drafter_failure)
        assert engine.pair.measurements.drafter_times() is None


def test_the_benchmark_arm_with_a_loaded_drafter_waits_for_its_process(load: Load) -> None:
    with load() as engine, open_arm(engine, "loaded", 2).session:
        model = engine.pair.pool.drafter_model()
        assert isinstance(model, LoadsInBackground)
        assert model.waits_because is None
