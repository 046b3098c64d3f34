"""A runtime is added in one place: a fake runtime is added here, and it chooses, loads and decodes models."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel, read_model_file
from edgespec.files.progress import QUIET, Job
from edgespec.interfaces.model import ModelFacts
from edgespec.placement.prepared import Preparation
from edgespec.profiles.profile import load_profile
from edgespec.runtimes.process.settings import WorkerSettings
from edgespec.runtimes.runtime import AS_FILED, DraftForm, Runtime
from edgespec.runtimes.table import RUNTIMES, runtime_of
from tests.support.fake_runtime import FakeModel
from tests.support.tiny_models import TinyModels, answer

CONTEXT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSettings:
    runtime: ClassVar[str] = "own"
    threads: int = 1
    device: str = "cpu"
    gpu_layers: int | None = None


class OwnRuntime(Runtime):
    name = "own"
    settings_type = OwnSettings

    def check(self, file: LocatedModel, device: str) -> None: ...

    def preference(self) -> int:
        return -1

    def settings(self, file: LocatedModel, *, threads: int, device: str, **_more: Any) -> OwnSettings:
        return OwnSettings(threads=threads, device=device)

    def describe(self, file: LocatedModel, settings: OwnSettings, form: DraftForm = AS_FILED) -> ModelFacts:
        return OwnModel(file, settings).facts

    def load(self, file: LocatedModel, settings: OwnSettings, form: DraftForm = AS_FILED, job: Job = QUIET) -> Any:
        return OwnModel(file, settings)

    def cache_bits(self, settings: OwnSettings) -> float:
        return 8


class OwnModel(FakeModel):
    """The fake model of all tests, loaded from a file; it does not depend on the new runtime."""

    def __init__(self, file: LocatedModel, settings: OwnSettings) -> None:
        super().__init__(file.header.vocabulary_size, seed=3, order=2)
        self.file, self.header, self.settings = file, file.header, settings

    @property
    def facts(self) -> ModelFacts:
        own = {"name": self.file.name, "sha256": self.file.identity, "runtime": "own"}
        return replace(super().facts, **own, threads=self.settings.threads)  # type: ignore[arg-type]

    def facts_with(self, **changed: Any) -> ModelFacts:
        return self.with_settings(**changed).facts

    def with_settings(self, **changed: Any) -> OwnModel:
        return OwnModel(self.file, replace(self.settings, **changed))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RUNTIMES, OwnRuntime.name, OwnRuntime())


def test_a_new_runtime_needs_fewer_than_thirty_lines() -> None:
    lines = inspect.getsource(OwnSettings) + inspect.getsource(OwnRuntime)
    assert len([line for line in lines.splitlines() if line.strip()]) < 30


def test_a_new_runtime_can_choose_load_and_decode_models(tiny: TinyModels, tmp_path: Path) -> None:
    profile = load_profile(None, environ={}, cwd=tmp_path, user_dir=tmp_path, only_the_named=True)
    prepare = Preparation(profile, 3, CONTEXT)
    for prepared in (prepare.target(read_model_file(tiny.target)), prepare.drafter(read_model_file(tiny.drafter))):
        assert prepared.settings == OwnSettings(threads=3)
        assert isinstance(runtime_of(prepared.settings), OwnRuntime)
        assert prepared.facts.runtime == "own"
        assert prepared.memory.cache_bytes == prepared.file.header.kv_bytes_per_token(8) * CONTEXT
        beside = prepared.in_background(WorkerSettings())
        assert beside.wait(60.0)
        for model in (prepared.load(), beside):
            assert model.facts == prepared.facts
            sequence = model.open(CONTEXT)
            text = [1, 5]
            for _ in range(8):
                rows = sequence.forward(text[sequence.length :], 1)
                text.append(int(rows.logits(0).argmax()))
            assert len(text) == 10
            model.close()


def test_an_engine_can_prefer_a_new_runtime_and_speculate_in_it(tiny: TinyModels, home: Home) -> None:
    with tiny.load(store_home=home, context=CONTEXT, lookup=False, depth=2) as engine:
        assert engine.plan.target.runtime == engine.pair.target.facts.runtime == "own"
        assert engine.pair.pool.drafter_model().facts.runtime == "own"
        assert "own" in [place.facts.runtime for place in engine.pair.pool.places.targets]
        with engine.session() as session:
            plain, drafted = (
                answer(session.generate("hello", raw=True, max_tokens=12, depth=depth)) for depth in (0, 2)
            )
        assert drafted.stats.accepted > 0
        assert plain.token_ids == drafted.token_ids
