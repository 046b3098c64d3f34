"""Calibrating other places: every place with room is timed, and a place that fails stays unmeasured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import edgespec.placement.model_pool as pool_module
from edgespec.calibration.kinds import PLACE, TIMES
from edgespec.engine.engine import Engine
from edgespec.engine.pair.load import Limits
from edgespec.engine.pair.target_setting import settled_settings
from edgespec.errors import ClosedError, MemoryLimitError, ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import QUIET, Job
from edgespec.placement.candidates import Placements
from edgespec.placement.memory import layer_bytes
from edgespec.placement.prepared import Preparation, PreparedModel, prepare_drafter, prepare_model
from edgespec.planning.choice.options import HEADROOM_BYTES, Ranking
from edgespec.profiles.profile import Profile
from edgespec.runtimes.llama.context import KV_TYPES, LlamaSettings
from edgespec.runtimes.llama.library import LlamaLibrary
from edgespec.runtimes.runtime import LoadedModel
from tests.support.calibrating import fix_plain_ratio, shorten_calibration, stored
from tests.support.native_devices import gpu
from tests.support.tiny_models import TinyModels

CONTEXT = 256


@pytest.fixture
def opened() -> list[LlamaSettings]:
    """The models opened in other places."""
    return []


@pytest.fixture(autouse=True)
def cards(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, opened: list[LlamaSettings]) -> None:
    """Two devices, simulated on the processor: a card with room for two of three layers, and an integrated GPU."""
    header = read_header(tiny.target)
    bits = KV_TYPES["q8_0"][1]
    free = layer_bytes(header, bits).split(2, CONTEXT).device_bytes + HEADROOM_BYTES
    devices = (gpu("cpu", kind="cpu"), gpu("Vulkan0", free=free), gpu("Vulkan1", kind="igpu"))
    monkeypatch.setattr(LlamaLibrary, "devices", lambda _self, *, with_memory=True: devices)

    def on_the_processor(settings: LlamaSettings) -> LlamaSettings:
        opened.append(settings)
        return replace(settings, device="cpu", gpu_layers=None)

    def target(file: LocatedModel, settings: Any, context_length: int) -> PreparedModel:
        return prepare_model(file, on_the_processor(settings), context_length)

    def drafter(profile: Profile, file: LocatedModel, settings: Any, context_length: int) -> PreparedModel:
        return prepare_drafter(profile, file, on_the_processor(settings), context_length)

    monkeypatch.setattr(pool_module, "prepare_model", target)
    monkeypatch.setattr(pool_module, "prepare_drafter", drafter)
    shorten_calibration(monkeypatch)
    fix_plain_ratio(monkeypatch, 1.5)


@pytest.fixture
def engine(tiny: TinyModels, home: Home) -> Iterator[Engine]:
    with tiny.load(
        store_home=home,
        context=CONTEXT,
        device="auto",
        draft_device="auto",
        runtime="llama",
        draft_runtime="llama",
        max_memory_fraction=1.0,
    ) as engine:
        assert (engine.plan.target.device, engine.profile.draft_device) == ("cpu", "cpu"), "nothing is measured yet"
        yield engine


def ranked(engine: Engine) -> Ranking:
    ranking = engine.pair.ranking
    assert ranking is not None
    return ranking


def test_a_full_calibration_times_every_place_with_room(
    engine: Engine, home: Home, opened: list[LlamaSettings]
) -> None:
    engine.calibrate(alternatives=True)
    assert [(settings.device, settings.gpu_layers) for settings in opened] == [
        ("Vulkan0", 2),
        ("Vulkan1", None),  # first the target there, then the drafter
        ("Vulkan1", None),
    ]
    assert {kind: stored(home)[kind] for kind in ("times", "widths")} == {"times": 5, "widths": 3}
    ranking = ranked(engine)
    assert {candidate.target.short_name for candidate in ranking.candidates} == {"target on cpu"}
    stays = {refusal.what for refusal in ranking.rejected if refusal.verdict.code == "target_stays"}
    assert stays == {"target, 2 of 3 layers on Vulkan0", "target on Vulkan1"}
    assert [refusal.what for refusal in ranking.rejected if refusal.target is None] == [
        "target on Vulkan0",
        "drafter on Vulkan0, drafting",
    ]
    considered = {(c.target.facts.device, c.drafter.device) for c in ranking.candidates if c.drafter is not None}
    considered |= {(r.target.facts.device, r.drafter.device) for r in ranking.rejected if r.target and r.drafter}
    assert {("cpu", "cpu"), ("cpu", "Vulkan1")} <= considered


def test_contention_of_pairs_on_different_devices_is_measured(engine: Engine, home: Home) -> None:
    """Target elsewhere with the drafter here, and the reverse. Pairs on one device only in the current place."""
    engine.calibrate(alternatives=True)
    assert stored(home)["contention"] == 4  # current place, target on either GPU, drafter on one GPU


def test_a_second_full_calibration_times_no_known_place_again(engine: Engine, opened: list[LlamaSettings]) -> None:
    engine.calibrate(alternatives=True)
    first = len(opened)
    engine.calibrate(alternatives=True)
    assert len(opened) == first
    engine.calibrate(alternatives=True, afresh=True)
    assert len(opened) == 2 * first


def test_a_quick_calibration_times_no_other_place(engine: Engine, opened: list[LlamaSettings]) -> None:
    engine.calibrate()
    assert opened == []
    assert any("2 of 3 layers on Vulkan0: not measured" in refusal.sentence for refusal in ranked(engine).rejected)


def test_a_place_where_timing_fails_stays_unmeasured(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    load = PreparedModel.load

    def refuse(model: PreparedModel, job: Job = QUIET) -> LoadedModel:
        if model.file is engine.pair.pool.target:
            raise ModelFileError(model.file.path, "llama.cpp could not load it there")
        return load(model, job)

    monkeypatch.setattr(PreparedModel, "load", refuse)
    engine.calibrate(alternatives=True)
    unmeasured = [refusal.what for refusal in ranked(engine).rejected if refusal.verdict.code == "not_measured"]
    assert unmeasured == ["target, 2 of 3 layers on Vulkan0", "target on Vulkan1"]
    assert {candidate.target.facts.device for candidate in ranked(engine).candidates} == {"cpu"}


def test_a_device_found_faster_twice_runs_the_target_from_the_next_load_on(engine: Engine) -> None:
    engine.calibrate(alternatives=True)
    place = next(place for place in engine.pair.pool.places.targets if place.footprint.layers is not None)
    times = engine.pair.measurements.store.load(TIMES, place.facts)
    assert times is not None
    fast = tuple(tuple(seconds / 1000 for seconds in row) for row in times.forward_s)
    on_cpu_now = engine.pair.measurements.target_times()
    assert on_cpu_now is not None
    faster = replace(times, forward_s=fast, prompt_token_s=on_cpu_now.prompt_token_s)  # it reads prompts as fast
    engine.pair.measurements.store.save(TIMES, faster, place.facts)
    engine.pair.replan()
    assert ranked(engine).best.target.short_name == "target on cpu"
    stays = [refusal.speedup for refusal in ranked(engine).rejected if refusal.what == place.name]
    assert stays[0] is not None
    assert stays[0] > 100
    pair, store = engine.pair, engine.pair.measurements.store
    for count in range(2):
        assert store.settled(PLACE, place.facts).count == count
        pair.measurements.settle_place(pair.pool.places)
    assert store.settled(PLACE, place.facts).chosen == place.key
    own, here = Preparation(pair.profile, 1, CONTEXT).target(pair.pool.target), pair.target.settings
    moved, said = settled_settings(store, own, pair.profile, here, pair.pool.places, 1 << 40)
    assert (moved.device, moved.gpu_layers) == ("Vulkan0", 2)
    assert said[0].startswith("target, 2 of 3 layers on Vulkan0 from now on")
    told = settled_settings(store, own, pair.profile, here, pair.pool.places, 1 << 40)
    assert told == (moved, said), "no reader has seen the notice yet"
    on_cpu = Placements(targets=tuple(each for each in pair.pool.places.targets if each.facts.device == "cpu"))
    for places, allowed in ((on_cpu, 1 << 40), (pair.pool.places, 10)):
        assert settled_settings(store, own, pair.profile, here, places, allowed) == (here, ())


# ------------------------------------------------------------------------------------------ opening in another place


def test_opening_in_another_place_respects_the_machines_memory(tiny: TinyModels, home: Home) -> None:
    limits = Limits(max_memory_bytes=1 << 28)
    with tiny.load(store_home=home, context=CONTEXT, device="auto", draft_device="auto", limits=limits) as engine:
        pool = engine.pair.pool
        pool.left_bytes = 1000
        for place, open_there in (
            (pool.places.targets[-1], pool.open_target),
            (pool.places.drafters[-1], pool.open_drafter),
        ):
            with pytest.raises(MemoryLimitError, match=place.facts.name):
                open_there(place)


def test_opening_a_drafter_without_one_raises(tiny: TinyModels, home: Home) -> None:
    with tiny.load(store_home=home, context=CONTEXT, device="auto", draft="none") as engine:
        assert engine.pair.pool.places.drafters == ()
        with pytest.raises(ClosedError, match="no drafter"):
            engine.pair.pool.open_drafter(engine.pair.pool.places.targets[0])
