"""Ranking over places: what was measured competes, what was not is named, and without GPUs all is as ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration.measurement_store import Measurements
from edgespec.engine.assembly import choose_places
from edgespec.engine.pair_measurements import PairMeasurements
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import ModelFacts
from edgespec.placement.candidates import NOT_MEASURED, Placement, Placements
from edgespec.placement.layer_split import Split
from edgespec.placement.memory import MemoryEstimate
from edgespec.placement.prepared import Preparation, PreparedModel
from edgespec.planning.choice.options import Ranking
from edgespec.planning.choice.ranking import explain, reasons
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.widths import BORDERS, ContextProbe, WidthProbe
from edgespec.profiles.profile import load_profile
from edgespec.runtimes.llama.context import LlamaSettings
from tests.support.fake_runtime import FakeModel
from tests.support.tiny_models import invented_times

GIB = 2**30
CONTEXT = 1024
END = BORDERS[-1] + 12
PROBE = WidthProbe(widths=(1, 2, 3, 4, 5), contexts=(ContextProbe(start=END - 12, positions=12, max_abs_diff={}),))
PROFILE = replace(
    load_profile("laptop", environ={}, cwd=Path("/"), user_dir=Path("/"), only_the_named=True),
    device="auto",
    draft_device="auto",
)
BASE = replace(FakeModel().facts, runtime="llama", kv_type="q8_0", settings={"flash_attention": True, "repack": True})


def facts(name: str, device: str, layers: int | None = None) -> ModelFacts:
    settings = dict(BASE.settings)
    if device != "cpu":
        settings["gpu_layers"] = -1 if layers is None else layers
    size = 8 * GIB if name == "big" else GIB
    return replace(
        BASE, name=name, sha256=f"sha256:{name}", device=device, weight_bytes=size, settings=settings, threads=4
    )


def place(name: str, device: str, device_bytes: int, host_bytes: int, layers: int | None = None) -> Placement:
    on_card = device != "cpu"
    return Placement(
        settings=LlamaSettings(threads=4, device=device, gpu_layers=layers, kv_type="q8_0"),
        facts=facts(name, device, layers),
        memory=device,
        split=Split(device_weights=device_bytes, device_cache=0, host_weights=host_bytes, host_cache=0),
        buffers_bytes=GIB // 4,
        layers=(layers, 25) if on_card and layers is not None else None,
    )


HERE, WHOLE = place("big", "cpu", 0, 8 * GIB), place("big", "Vulkan0", 8 * GIB, GIB // 8)
SOME = place("big", "Vulkan0", 4 * GIB, 4 * GIB, layers=12)
DRAFTING_HERE, DRAFTING_THERE = place("small", "cpu", 0, GIB), place("small", "Vulkan0", GIB, 0)
BOTH = Placements(
    targets=(HERE, WHOLE, SOME), drafters=(DRAFTING_HERE, DRAFTING_THERE), memory_bytes={"Vulkan0": 6 * GIB}
)


@pytest.fixture
def store(tmp_path: Path) -> Measurements:
    return Measurements(tmp_path / "measurements", "machine-1", "mains")


@pytest.fixture
def measured(store: Measurements) -> Measurements:
    """Target and drafter where they run without a GPU: ten tokens a second, and no gain from drafting."""
    store.save_times(HERE.facts, invented_times(0.1))
    store.save_widths(HERE.facts, PROBE)
    store.save_times(DRAFTING_HERE.facts, invented_times(0.09))
    return store


def rank(
    store: Measurements, places: Placements | None = BOTH, *, own: Placement = HERE, allowed: int = 32 * GIB
) -> Ranking:
    known = PairMeasurements(store, own.facts, DRAFTING_HERE.facts, ("model",), CONTEXT)
    ranking = known.ranking((), CONTEXT, allowed, near=False, places=places)
    assert ranking is not None
    return ranking


def time_target(store: Measurements, at: Placement, seconds: float, *, probe: bool = True) -> None:
    store.save_times(at.facts, invented_times(seconds))
    if probe:
        store.save_widths(at.facts, PROBE)


def said(ranking: Ranking) -> list[str]:
    return [refusal.sentence for refusal in ranking.rejected]


# ------------------------------------------------------------------------------------------------- enumeration


def test_without_places_nothing_changes(measured: Measurements) -> None:
    assert rank(measured, Placements()) == rank(measured, None)
    known = PairMeasurements(measured, HERE.facts, DRAFTING_HERE.facts, ("model",), CONTEXT)
    assert known.ranking((), CONTEXT, 32 * GIB, near=False) == rank(measured, None)
    assert {candidate.target.device for candidate in rank(measured, None).candidates} == {"cpu"}


def test_what_was_not_measured_is_named_and_not_guessed(measured: Measurements) -> None:
    ranking = rank(measured)
    assert ranking.best.what == "big on cpu, plain"
    unmeasured = [refusal for refusal in ranking.rejected if refusal.target is None]
    assert [(refusal.what, refusal.reason) for refusal in unmeasured] == [
        ("big on Vulkan0", "needs 8.19 GiB on Vulkan0 and 6.00 GiB may be used"),
        ("big, 12 of 25 layers on Vulkan0", NOT_MEASURED),
        ("small on Vulkan0, drafting", NOT_MEASURED),
    ]
    for sentences in (reasons(ranking), explain(ranking)):
        assert any("big, 12 of 25 layers on Vulkan0: not measured" in sentence for sentence in sentences)
        assert any("small on Vulkan0, drafting: not measured" in sentence for sentence in sentences)
    assert all(refusal.as_json()["speedup"] is None for refusal in unmeasured)


def test_the_notes_say_which_part_is_on_the_card(store: Measurements) -> None:
    def note(at: Placement) -> str:
        return PairMeasurements(store, at.facts, None, (), CONTEXT).notes[0]

    assert note(HERE) == "big on cpu, 4 threads"
    assert note(WHOLE) == "big on Vulkan0, 4 threads"
    assert note(SOME) == "big, 12 of its layers on Vulkan0, 4 threads"


def test_nothing_is_ranked_before_the_target_was_measured_where_it_runs(store: Measurements) -> None:
    time_target(store, SOME, 0.01)
    known = PairMeasurements(store, HERE.facts, None, (), CONTEXT)
    assert known.ranking((), CONTEXT, 32 * GIB, near=False, places=BOTH) is None


def test_a_part_of_the_target_on_the_card_competes(measured: Measurements) -> None:
    time_target(measured, SOME, 0.05)
    ranking = rank(measured)
    best = ranking.best
    assert best.what == "big, 12 of 25 layers on Vulkan0, plain"
    assert best.tokens_per_s == pytest.approx(20)
    assert best.memory_bytes["cpu"] == 4 * GIB
    assert 4 * GIB < best.memory_bytes["Vulkan0"] < 5 * GIB
    assert "big, 12 of 25 layers on Vulkan0" in reasons(ranking)[0]
    assert any(candidate.what == "big on cpu, plain" for candidate in ranking.candidates)


def test_both_memories_of_a_parted_target_are_checked(measured: Measurements) -> None:
    time_target(measured, SOME, 0.05)
    small_card = replace(BOTH, memory_bytes={"Vulkan0": 4 * GIB})
    refused = said(rank(measured, small_card))
    assert any("12 of 25 layers on Vulkan0: needs 4.19 GiB on Vulkan0" in line for line in refused)
    time_target(measured, WHOLE, 0.02)
    roomy_card = replace(BOTH, memory_bytes={"Vulkan0": 16 * GIB})
    own_is_whole = rank(measured, roomy_card, own=WHOLE, allowed=2 * GIB)
    assert own_is_whole.best.target.device == "Vulkan0"
    assert any("12 of 25 layers on Vulkan0: needs 4.00 GiB on cpu" in line for line in said(own_is_whole))
    assert any("big on cpu: needs 8.19 GiB on cpu" in line for line in said(own_is_whole))


def test_targets_and_drafters_are_crossed_over_the_devices(measured: Measurements) -> None:
    """Drafter on the card and target beside it, drafter beside the card and part of the target on it, and so on."""
    time_target(measured, SOME, 0.08)
    measured.save_times(DRAFTING_THERE.facts, invented_times(0.001))
    for target in (HERE, SOME):
        for drafter in (DRAFTING_HERE, DRAFTING_THERE):
            measured.save_contention(target.facts, drafter.facts, Contention())
    ranking = rank(measured)
    looked_at = " ".join([*(candidate.what for candidate in ranking.candidates), *said(ranking)])
    for target in ("big on cpu", "big, 12 of 25 layers on Vulkan0"):
        for drafter in ("small on cpu", "small on Vulkan0"):
            assert f"{drafter} drafting for {target}, serial" in looked_at
    assert "small on Vulkan0 drafting for big on cpu, pipelined" in looked_at
    assert "small on cpu drafting for big, 12 of 25 layers on Vulkan0, pipelined" in looked_at
    assert ranking.best.drafter is not None
    assert ranking.best.drafter.device == "Vulkan0"


def test_a_pair_that_was_not_run_at_once_is_not_pipelined(measured: Measurements) -> None:
    measured.save_times(DRAFTING_THERE.facts, invented_times(0.001))
    ranking = rank(measured)
    assert any("small on Vulkan0 drafting for big on cpu, pipelined: what" in line for line in said(ranking))
    assert not any(c.mode == "pipelined" and c.drafter and c.drafter.device == "Vulkan0" for c in ranking.candidates)


def test_of_two_contentions_of_one_pair_of_devices_the_worse_counts(measured: Measurements) -> None:
    assert Contention(target_factor=2.0).worse(None) == Contention(target_factor=2.0)
    one, other = Contention(target_factor=1.2), Contention(target_factor=1.1, drafter_factor=1.5)
    assert one.worse(other) == other.worse(one) == Contention(target_factor=1.2, drafter_factor=1.5)
    time_target(measured, SOME, 0.08)
    time_target(measured, WHOLE, 0.08)
    roomy = replace(BOTH, memory_bytes={"Vulkan0": 64 * GIB})
    measured.save_times(DRAFTING_HERE.facts, invented_times(0.001))
    measured.save_contention(SOME.facts, DRAFTING_HERE.facts, one)
    measured.save_contention(WHOLE.facts, DRAFTING_HERE.facts, other)
    pipelined = [c for c in rank(measured, roomy).candidates if c.mode == "pipelined"]
    assert pipelined
    for candidate in pipelined:
        assert "the target 1.20x and the drafter 1.50x" in " ".join(candidate.reasons)


def test_processors_that_both_share_do_no_more_work_than_there_are(
    measured: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What says otherwise was measured while other programs had the processors."""
    loaded = Contention(target_factor=1.0, drafter_factor=1.2)
    done = 4 / 1.0 + 4 / 1.2
    raised = loaded.on_shared_processors(4, 4, 4)
    assert raised.drafter_factor == pytest.approx(1.2 * raised.target_factor)
    assert 4 / raised.target_factor + 4 / raised.drafter_factor == pytest.approx(1.1 * 4)
    quiet = Contention(target_factor=1.86, drafter_factor=1.97)
    assert quiet.on_shared_processors(2, 2, 2) == quiet
    assert loaded.on_shared_processors(4, 4, 8) == loaded, "each has its own"
    assert loaded.on_shared_processors(1, 3, 4) == loaded, "each has its own"

    # A dear drafter that takes nothing from the target would pay at once, if that could be.
    measured.save_times(DRAFTING_HERE.facts, invented_times(0.04))
    measured.save_contention(HERE.facts, DRAFTING_HERE.facts, loaded)
    measured.save_contention(WHOLE.facts, DRAFTING_HERE.facts, loaded)
    known = PairMeasurements(measured, HERE.facts, DRAFTING_HERE.facts, ("model",), CONTEXT)
    elsewhere = PairMeasurements(measured, WHOLE.facts, DRAFTING_HERE.facts, ("model",), CONTEXT)
    for processors, factor, mode in ((4, done / 4.4, "serial"), (8, 1.0, "pipelined")):
        monkeypatch.setattr(
            "edgespec.engine.pair_measurements.usable_processors", lambda processors=processors: processors
        )
        found = known.costs().contention
        assert found is not None
        assert found.target_factor == pytest.approx(factor)
        assert rank(measured).best.mode == mode
        assert elsewhere.costs().contention == loaded, "a card does its own work"


@pytest.mark.parametrize("probe", [True, False])
def test_drafting_needs_the_widths_of_each_place(measured: Measurements, probe: bool) -> None:
    time_target(measured, SOME, 0.05, probe=probe)
    refused = any("12 of 25 layers on Vulkan0: which widths are bit-equal" in line for line in said(rank(measured)))
    assert refused is not probe


def test_where_only_plain_decoding_was_timed(measured: Measurements) -> None:
    measured.save_plain_s(SOME.facts, 0.05)
    ranking = rank(measured)
    assert ranking.best.what == "big, 12 of 25 layers on Vulkan0, plain"
    assert any("only plain decoding has been measured there" in line for line in said(ranking))
    assert not any("no width beyond 1" in line for line in said(ranking))


def test_times_of_a_shorter_context_are_none(measured: Measurements) -> None:
    measured.save_times(SOME.facts, replace(invented_times(0.05), contexts=(16,)))
    assert any("12 of 25 layers on Vulkan0: not measured" in line for line in said(rank(measured)))


def test_another_setting_of_the_place_in_use_is_not_called_unmeasured(store: Measurements) -> None:
    own = replace(HERE, facts=replace(HERE.facts, threads=2))
    time_target(store, own, 0.1)
    ranking = rank(store, own=own)
    assert [candidate.target.short_name for candidate in ranking.candidates] == ["big on cpu"]
    assert not any(line.startswith("big on cpu: not measured") for line in said(ranking))
    time_target(store, HERE, 0.09)
    assert {candidate.target.threads for candidate in rank(store, own=own).candidates} == {2, 4}


# --------------------------------------------------------------------------------------------- what is then used


class Located:
    """As much of a located drafter as choosing looks at."""

    onnx = None
    weight_bytes = GIB


def choose(
    store: Measurements, monkeypatch: pytest.MonkeyPatch, places: Placements, **values: Any
) -> tuple[Any, Any]:
    def drafter(own: Preparation, file: LocatedModel) -> PreparedModel:
        device = "Vulkan0" if own.profile.draft_device == "auto" else own.profile.draft_device
        settings = LlamaSettings(threads=own.threads, device=device, kv_type="q8_0")
        nothing = MemoryEstimate(weights_bytes=0, cache_bytes=0, buffers_bytes=0)
        return PreparedModel(file=file, settings=settings, facts=facts("small", device), memory=nothing)

    monkeypatch.setattr(Preparation, "drafter", drafter)
    located: Any = Located()
    prepare = Preparation(replace(PROFILE, **values), 1, CONTEXT)
    wanted, drafting = choose_places(store, prepare, HERE.settings, located, places, 32 * GIB)
    assert drafting == drafter(prepare, located), "it is prepared for where the profile says it runs"
    return wanted, prepare.profile.draft_device


def test_without_places_settings_and_profile_are_left_alone(
    measured: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(measured, monkeypatch, Placements()) == (HERE.settings, "auto")


def test_what_nobody_measured_does_not_move_the_target(store: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    time_target(store, SOME, 0.001)
    assert choose(store, monkeypatch, BOTH) == (HERE.settings, "Vulkan0")


def test_the_fastest_place_that_was_measured_is_used(measured: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    time_target(measured, SOME, 0.01)
    wanted, _ = choose(measured, monkeypatch, BOTH)
    assert (wanted.device, wanted.gpu_layers) == ("Vulkan0", 12)


def test_a_drafter_on_the_card_for_a_target_beside_it(
    measured: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dovetail's placement: the card holds part of the target or the drafter, and the drafter brings more."""
    time_target(measured, SOME, 0.095)
    measured.save_times(DRAFTING_THERE.facts, invented_times(0.001))
    room_for_one = replace(BOTH, memory_bytes={"Vulkan0": 5 * GIB})
    wanted, draft_device = choose(measured, monkeypatch, room_for_one)
    assert (wanted.device, draft_device) == ("cpu", "Vulkan0")


def test_a_drafter_without_room_on_the_card_goes_to_the_processor(
    measured: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowded = replace(BOTH, memory_bytes={"Vulkan0": GIB})
    assert choose(measured, monkeypatch, crowded)[1] == "cpu"
    assert choose(measured, monkeypatch, crowded, draft_device="Vulkan0")[1] == "Vulkan0", "asked for by name"
