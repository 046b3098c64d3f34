"""Calibrating tiny models in tests: quickly, and separately from answering."""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

import edgespec.engine.pair.calibration_run as learning_module
from edgespec.calibration.kinds import PLAIN
from edgespec.calibration.timing import ModelTimes, Scope, measure_contention, measure_drafter, measure_target
from edgespec.engine.engine import Engine
from edgespec.files.home import Home
from edgespec.hardware.machine import Machine
from edgespec.interfaces.model import Model
from edgespec.runtimes.llama.context import LlamaSettings, NativeContext
from edgespec.runtimes.native.batch import NativeBatch
from tests.support.tiny_models import FORWARD_S

T = TypeVar("T")
KINDS = ("acceptance", "contention", "plain", "times", "widths")


def result_of(steps: Generator[float, None, T]) -> T:
    """Run a measurement to its end."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return cast("T", end.value)


def shorten_calibration(patch: pytest.MonkeyPatch) -> None:
    """Measure briefly, on one thread whatever the settings say: no test looks at the numbers.

    Each width is timed once, and drafter and target run in parallel for a moment instead of a second.
    """
    on_one_thread(patch)
    patch.setattr(learning_module, "measure_contention", functools.partial(measure_contention, seconds=0.02))

    def target(
        model: Model, context_length: int, scope: Scope, *, text: Sequence[int]
    ) -> Generator[float, None, tuple[ModelTimes, object]]:
        times, probe = yield from measure_target(model, context_length, replace(scope, repetitions=1), text=text)
        return replace(times, repetitions=scope.repetitions), probe

    def drafter(model: Model, context_length: int, scope: Scope) -> Generator[float, None, ModelTimes]:
        times = yield from measure_drafter(model, context_length, replace(scope, repetitions=1))
        return replace(times, repetitions=scope.repetitions)

    patch.setattr(learning_module, "measure_target", target)
    patch.setattr(learning_module, "measure_drafter", drafter)


def on_one_thread(patch: pytest.MonkeyPatch) -> None:
    """Compute on one thread: two that wait for each other's core take seconds where other tests run."""
    context, batch = NativeContext.__init__, NativeBatch.__init__

    def init(self: NativeContext, api: Any, model: Any, settings: LlamaSettings, *others: Any) -> None:
        context(self, api, model, replace(settings, threads=1), *others)

    patch.setattr(NativeContext, "__init__", init)
    patch.setattr(NativeBatch, "__init__", lambda self, part, **named: batch(self, part, **{**named, "threads": 1}))


def fix_plain_ratio(patch: pytest.MonkeyPatch, ratio: float) -> None:
    """Make plain decoding take ``ratio`` times as long in every other setting of the target."""

    def measure(*_models: object) -> Generator[float, None, float]:
        yield 1.0
        return ratio

    patch.setattr(learning_module, "measure_plain_ratio", measure)
    patch.setattr(learning_module, "measure_prompt_ratio", measure)


def stored(home: Home) -> dict[str, int]:
    """The number of stored files for each kind of measurement."""
    names = [path.name.partition("-")[0] for path in home.measurements.glob("*.json")]
    return {kind: names.count(kind) for kind in KINDS if kind in names}


def measured(home: Home) -> dict[str, int]:
    """``stored`` for the engine's two models in the settings they run in.

    Acceptance is only measured if drafting could be faster, which depends on speed; plain decoding is only timed in
    another runtime if this machine has both.
    """
    return {kind: count for kind, count in stored(home).items() if kind not in ("acceptance", "plain")}


def damage(home: Home, kind: str, data: bytes = b"{") -> list[Path]:
    """Overwrite every file of a kind."""
    paths = sorted(home.measurements.glob(f"{kind}-*.json"))
    assert paths
    for path in paths:
        path.write_bytes(data)
    return paths


def on_cores(patch: pytest.MonkeyPatch, cores: int) -> None:
    """Pretend that this machine has ``cores`` physical cores."""
    real = Machine.__init__

    def init(self: Machine, *args: Any, **values: Any) -> None:
        real(self, *args, **{**values, "physical_cores": cores})

    patch.setattr(Machine, "__init__", init)


def time_other(engine: Engine, factor: float) -> None:
    """Store a measurement of plain decoding in another setting (an F16 cache) that is ``factor`` times as fast."""
    facts = engine.pair.target.facts_with(kv_type="f16")
    engine.pair.measurements.store.save(PLAIN, FORWARD_S / factor, facts)
