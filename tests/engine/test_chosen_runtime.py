"""Two runtimes on one processor: the next load uses the one that was measured faster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.calibration.kinds import PLAIN, TIMES, WIDTHS
from edgespec.calibration.width_probe import probe_widths
from edgespec.engine.engine import Engine
from edgespec.files.home import Home
from edgespec.placement.candidates import Placement
from edgespec.runtimes.native import runtime as native_runtime
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import (
    DRAFT_S,
    FORWARD_S,
    TinyModels,
    answer,
    invent_measurements,
    invented_times,
    load_drafter,
    require_speculation,
)

OTHER = {"native": "llama", "llama": "native"}

Load = Callable[..., Engine]


@pytest.fixture(autouse=True)
def _library() -> None:
    require_native()


@pytest.fixture
def load(tiny: TinyModels, home: Home) -> Load:
    """The tiny pair on a machine without measurements."""
    return lambda **overrides: tiny.load(**{"store_home": home, "context": 300, "lookup": False, **overrides})


def begin_with(patch: pytest.MonkeyPatch, runtime: str) -> None:
    """Make ``runtime`` the first choice: our kernels if they are more than portable C."""
    names = ("portable", "fast") if runtime == "native" else ("portable",)
    patch.setattr(native_runtime, "library", SimpleNamespace(load=lambda: SimpleNamespace(levels=names)))


def place(places: tuple[Placement, ...], runtime: str) -> Placement:
    (found,) = [each for each in places if each.facts.runtime == runtime]
    return found


def settle(engine: Engine) -> None:
    """Two calibrations with the stored times as results."""
    for _ in range(2):
        engine.pair.measurements.settle_place(engine.pair.pool.places)


@pytest.mark.parametrize("first", OTHER)
def test_a_runtime_that_decodes_faster_is_used_from_the_next_load_on(
    load: Load, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_with(monkeypatch, first)
    with load(draft="none", lookup=True) as engine:
        assert engine.plan.target.runtime == first
        store, places = engine.pair.measurements.store, engine.pair.pool.places
        store.save(TIMES, invented_times(FORWARD_S), engine.pair.target.facts)
        rival = place(places.targets, OTHER[first]).facts
        store.save(PLAIN, FORWARD_S / 1.05, rival)
        settle(engine)
    with load(draft="none", lookup=True) as engine:
        assert engine.plan.target.runtime == first, "the difference is within a calibration's error"
        store.save(PLAIN, FORWARD_S / 2, rival)
        settle(engine)
        assert engine.plan.target.runtime == first
    with load(draft="none", lookup=True) as engine:
        assert engine.plan.target.runtime == engine.pair.target.facts.runtime == OTHER[first]
        assert engine.unmeasured, "drafting was not measured there"
        with engine.session() as session:
            assert answer(session.generate("hello", max_tokens=5)).plan.target.runtime == OTHER[first]
    for runtime in OTHER:
        with load(draft="none", lookup=True, runtime=runtime) as engine:
            assert engine.plan.target.runtime == runtime, "asked for by name"


def test_with_full_times_of_both_runtimes_the_faster_one_is_used(load: Load) -> None:
    found = {}
    for runtime in OTHER:
        with load(runtime=runtime) as engine:
            invent_measurements(engine)
            found[runtime] = engine.pair.target.facts
            store = engine.pair.measurements.store
    for fast, slow in OTHER.items():
        store.save(TIMES, invented_times(FORWARD_S / 3), found[fast])
        store.save(TIMES, invented_times(FORWARD_S), found[slow])
        with load() as engine:
            settle(engine)
        with load() as engine:
            assert engine.plan.target.runtime == fast
            assert engine.pair.target.facts == found[fast]


@pytest.mark.parametrize("fast", OTHER)
def test_the_drafters_runtime_is_chosen_separately_from_the_targets(load: Load, fast: str) -> None:
    with load() as engine:
        invent_measurements(engine)
        store, drafters = engine.pair.measurements.store, engine.pair.pool.places.drafters
        for runtime in OTHER:
            seconds = DRAFT_S / 2 if runtime == fast else DRAFT_S * 2
            store.save(TIMES, invented_times(seconds), place(drafters, runtime).facts)
    with load() as engine:
        require_speculation(engine)
        assert engine.plan.target.runtime == "native"
        assert (engine.profile.draft_device, engine.profile.draft_runtime) == ("cpu", fast)
        assert engine.pair.measurements.drafter is not None
        assert engine.pair.measurements.drafter == engine.pair.pool.drafter_model().facts
        assert engine.pair.measurements.drafter.runtime == fast
        assert engine.plan.drafter is not None
        assert engine.plan.drafter.runtime == fast
        load_drafter(engine)
        with engine.session() as session:
            done = answer(session.generate("hello world", max_tokens=60, depth=2))
            plain = answer(session.generate("hello world", max_tokens=60, depth=0, raw=True))
        assert done.stats.rounds_by_source["model"] > 0
        assert plain.stats.proposed == 0
    with load(draft_runtime=OTHER[fast]) as engine:
        assert engine.pair.pool.drafter_model().facts.runtime == OTHER[fast], "asked for by name"


def test_measurements_of_one_runtime_are_not_used_for_the_other(load: Load) -> None:
    for runtime in OTHER:
        with load(runtime=runtime, draft_runtime=runtime) as engine:
            assert engine.pair.measurements.target_times() is engine.pair.measurements.drafter_times() is None
            invent_measurements(engine)
            assert None not in (engine.pair.measurements.target_times(), engine.pair.measurements.drafter_times())


def test_an_unmeasured_place_is_listed_with_its_runtime(load: Load) -> None:
    with load() as engine:
        invent_measurements(engine)
        ranking = engine.pair.ranking
        assert ranking is not None
        unmeasured = [refusal.what for refusal in ranking.rejected if refusal.verdict.code == "not_measured"]
        assert unmeasured == ["target on cpu (llama)", "drafter on cpu (llama), drafting"]
        other = place(engine.pair.pool.places.targets, "llama")
        with closing(engine.pair.pool.open_target(other)) as model:
            assert model.wait(60.0)
            probe: Any = probe_widths(model, context_length=300)
        engine.pair.measurements.store.save(TIMES, invented_times(FORWARD_S), other.facts)
        engine.pair.measurements.store.save(WIDTHS, probe, other.facts)
        engine.pair.replan()
        ranking = engine.pair.ranking
        assert ranking is not None
        assert {each.target.facts.runtime for each in ranking.candidates} == {"native"}
        (stays,) = [each.what for each in ranking.rejected if each.verdict.code == "target_stays"]
        assert stays.startswith("target on cpu (llama")
