"""Ranking over places: measured places compete, unmeasured ones are listed, and without GPUs one place remains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration.kinds import CONTENTION, PLACE, PLAIN, TIMES, WIDTHS
from edgespec.calibration.measurement_store import Measurements
from edgespec.engine.pair.drafter_choice import in_the_fastest_place
from edgespec.engine.pair.measurements import PairMeasurements
from edgespec.engine.pair.target_setting import PlacedTarget
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import ModelFacts
from edgespec.placement.candidates import Placement, Placements
from edgespec.placement.prepared import Preparation, PreparedModel
from edgespec.planning.choice.options import Footprint, Ranking
from edgespec.planning.choice.planner import DraftingModel
from edgespec.planning.choice.ranking import explain, reasons
from edgespec.planning.choice.settled import Settled
from edgespec.planning.cost.acceptance import Acceptance
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.widths import BORDERS, ContextProbe, WidthProbe
from edgespec.profiles.profile import load_profile
from edgespec.runtimes.llama.context import LlamaSettings
from tests.support.planning import GIB, model_facts, request
from tests.support.tiny_models import invented_times

CONTEXT = 1024
END = BORDERS[-1] + 12
PROBE = WidthProbe(widths=(1, 2, 3, 4, 5), contexts=(ContextProbe(start=END - 12, positions=12, max_abs_diff={}),))
PROFILE = replace(
    load_profile("laptop", environ={}, cwd=Path("/"), user_dir=Path("/"), only_the_named=True),
    device="auto",
    draft_device="auto",
)


def facts(name: str, device: str, layers: int | None = None) -> ModelFacts:
    settings: dict[str, bool | int] = {"flash_attention": True, "repack": True}
    if device != "cpu":
        settings["gpu_layers"] = -1 if layers is None else layers
    size = 8 * GIB if name == "big" else GIB
    return model_facts(name, device=device, weight_bytes=size, kv_type="q8_0", settings=settings)


def place(name: str, device: str, device_bytes: int, host_bytes: int, layers: int | None = None) -> Placement:
    on_card = device != "cpu"
    return Placement(
        settings=LlamaSettings(threads=4, device=device, gpu_layers=layers, kv_type="q8_0"),
        facts=facts(name, device, layers),
        footprint=Footprint(
            memory=device,
            device_bytes=device_bytes if on_card else host_bytes,
            host_bytes=host_bytes if on_card else 0,
            layers=(layers, 25) if on_card and layers is not None else None,
        ),
        buffers_bytes=GIB // 4,
        position_bytes=(0.0, 0.0),
        context_length=2048,
    )


HERE, WHOLE = place("big", "cpu", 0, 8 * GIB), place("big", "Vulkan0", 8 * GIB, GIB // 8)
SOME = place("big", "Vulkan0", 4 * GIB, 4 * GIB, layers=12)
DRAFTING_HERE, DRAFTING_THERE = place("small", "cpu", 0, GIB), place("small", "Vulkan0", GIB, 0)
BOTH = Placements(
    targets=(HERE, WHOLE, SOME), drafters=(DRAFTING_HERE, DRAFTING_THERE), memory_bytes={"Vulkan0": 6 * GIB}
)


def pair(store: Measurements, at: Placement, drafter: Placement | None = None) -> PairMeasurements:
    drafters = () if drafter is None else (DraftingModel(facts=drafter.facts),)
    return PairMeasurements(store, at.facts, request(context_length=CONTEXT, drafters=drafters))


@pytest.fixture
def store(tmp_path: Path) -> Measurements:
    return Measurements(tmp_path / "measurements", "machine-1", "mains")


@pytest.fixture
def measured(store: Measurements) -> Measurements:
    """Target and drafter on the processor: ten tokens a second, and no gain from drafting."""
    store.save(TIMES, invented_times(0.1), HERE.facts)
    store.save(WIDTHS, PROBE, HERE.facts)
    store.save(TIMES, invented_times(0.09), DRAFTING_HERE.facts)
    return store


def rank(
    store: Measurements,
    places: Placements = BOTH,
    *,
    own: Placement = HERE,
    allowed: int = 32 * GIB,
    loaded: bool = True,
) -> Ranking:
    known = pair(store, own, DRAFTING_HERE)
    costs = replace(known.costs(), acceptance={"model": (0.6,)})
    ranking = known.ranking(known.widths(), costs, places, allowed, loaded=loaded)
    assert ranking is not None
    return ranking


def time_target(store: Measurements, at: Placement, seconds: float, *, probe: bool = True) -> None:
    store.save(TIMES, invented_times(seconds), at.facts)
    if probe:
        store.save(WIDTHS, PROBE, at.facts)


def said(ranking: Ranking) -> list[str]:
    return [refusal.sentence for refusal in ranking.rejected]


# ----------------------------------------------------------------------------- which places are ranked


def test_without_other_places_only_the_current_one_is_ranked(measured: Measurements) -> None:
    ranking = rank(measured, Placements())
    assert {candidate.target.facts.device for candidate in ranking.candidates} == {"cpu"}
    assert not [refusal for refusal in ranking.rejected if refusal.target is None]
    assert [refusal for refusal in rank(measured).rejected if refusal.target is None]


def test_unmeasured_places_are_listed_and_not_estimated(measured: Measurements) -> None:
    ranking = rank(measured)
    assert ranking.best.target.facts.device == "cpu"
    unmeasured = [refusal for refusal in ranking.rejected if refusal.target is None]
    assert [(refusal.what, refusal.verdict.text) for refusal in unmeasured] == [
        ("big on Vulkan0", "needs 8.19 GiB on Vulkan0 and 6.00 GiB may be used"),
        ("big, 12 of 25 layers on Vulkan0", "not measured yet; `edgespec calibrate` does that"),
        ("small on Vulkan0, drafting", "not measured yet; `edgespec calibrate` does that"),
    ]
    for sentences in ([reason.text for reason in reasons(ranking)], explain(ranking)):
        assert any("big, 12 of 25 layers on Vulkan0: not measured" in sentence for sentence in sentences)
        assert any("small on Vulkan0, drafting: not measured" in sentence for sentence in sentences)
    assert all(refusal.as_json()["speedup"] is None for refusal in unmeasured)


def test_the_notes_say_how_many_layers_are_on_the_card(store: Measurements) -> None:
    def note(at: Placement) -> str:
        return pair(store, at).notes[0].text

    assert note(HERE) == "big on cpu, 4 threads"
    assert note(WHOLE) == "big on Vulkan0, 4 threads"
    assert note(SOME) == "big, 12 of its layers on Vulkan0, 4 threads"


def test_without_times_in_the_current_place_there_is_no_ranking(store: Measurements) -> None:
    time_target(store, SOME, 0.01)
    assert pair(store, HERE).ranking(None, Costs(), BOTH, 32 * GIB) is None


def test_a_place_with_some_layers_on_the_card_is_compared_and_the_target_stays(measured: Measurements) -> None:
    time_target(measured, SOME, 0.05)
    ranking = rank(measured)
    assert ranking.best.target.facts.device == "cpu"
    (stays,) = [refusal for refusal in ranking.rejected if refusal.verdict.code == "target_stays"]
    assert (stays.what, stays.speedup) == ("big, 12 of 25 layers on Vulkan0", 2.0)
    assert rank(measured, own=SOME).best.target.footprint.layers == (12, 25)


def test_which_place_is_faster_does_not_depend_on_the_drafter(measured: Measurements) -> None:
    """Two calibrations found the card more than 10 % faster, with each kind of drafter."""
    for drafter in (None, DRAFTING_HERE, DRAFTING_THERE):
        for seconds, faster in ((0.095, False), (0.08, True)):
            time_target(measured, SOME, seconds)
            known = pair(measured, HERE, drafter)
            measured.save(PLACE, Settled(), HERE.facts)
            for count in range(2):
                assert measured.settled(PLACE, HERE.facts).chosen is None
                assert measured.settled(PLACE, HERE.facts).count == count * faster
                known.settle_place(BOTH)
            assert measured.settled(PLACE, HERE.facts).chosen == (SOME.key if faster else None)


def test_a_place_without_room_is_not_chosen_by_calibrations(measured: Measurements) -> None:
    time_target(measured, SOME, 0.01)
    crowded = replace(BOTH, memory_bytes={"Vulkan0": GIB})
    known = pair(measured, HERE)
    known.settle_place(crowded)
    assert measured.settled(PLACE, HERE.facts) == Settled()
    known.settle_place(Placements())
    assert measured.settled(PLACE, HERE.facts) == Settled()


def test_a_target_split_over_two_devices_is_checked_against_both_memories(measured: Measurements) -> None:
    time_target(measured, SOME, 0.05)
    small_card = replace(BOTH, memory_bytes={"Vulkan0": 4 * GIB})
    refused = said(rank(measured, small_card))
    assert any("12 of 25 layers on Vulkan0: needs 4.19 GiB on Vulkan0" in line for line in refused)
    time_target(measured, WHOLE, 0.02)
    roomy_card = replace(BOTH, memory_bytes={"Vulkan0": 16 * GIB})
    own_is_whole = rank(measured, roomy_card, own=WHOLE, allowed=2 * GIB)
    assert own_is_whole.best.target.facts.device == "Vulkan0"
    assert any("12 of 25 layers on Vulkan0: needs 4.00 GiB on cpu" in line for line in said(own_is_whole))
    assert any("big on cpu: needs 8.19 GiB on cpu" in line for line in said(own_is_whole))


def test_drafters_are_ranked_over_all_devices_and_a_loaded_one_stays(measured: Measurements) -> None:
    measured.save(TIMES, invented_times(0.001), DRAFTING_THERE.facts)
    for drafter in (DRAFTING_HERE, DRAFTING_THERE):
        measured.save(CONTENTION, Contention(), HERE.facts, drafter.facts)
    before = rank(measured, loaded=False)
    assert (before.best.drafter and before.best.drafter.device) == "Vulkan0"
    assert before.best.mode == "serial"
    ranking = rank(measured)
    looked_at = " ".join([*(candidate.what for candidate in ranking.candidates), *said(ranking)])
    for mode in ("serial", "pipelined"):
        assert f"small on Vulkan0 drafting for big on cpu, {mode}" in looked_at
    stays = [refusal.what for refusal in ranking.rejected if refusal.verdict.code == "drafter_stays"]
    assert stays == ["small on Vulkan0 drafting for big on cpu, serial"]
    assert all(one.drafter is None or one.drafter.device == "cpu" for one in ranking.candidates)


def test_a_pair_without_measured_contention_is_not_pipelined(measured: Measurements) -> None:
    measured.save(TIMES, invented_times(0.001), DRAFTING_THERE.facts)
    ranking = rank(measured, loaded=False)
    assert any("small on Vulkan0 drafting for big on cpu, pipelined: how much" in line for line in said(ranking))
    assert not any(c.mode == "pipelined" and c.drafter and c.drafter.device == "Vulkan0" for c in ranking.candidates)


def test_of_two_contentions_for_the_same_devices_the_worse_one_is_used(measured: Measurements) -> None:
    assert Contention(target_factor=2.0).worse(None) == Contention(target_factor=2.0)
    one, other = Contention(target_factor=1.2), Contention(target_factor=1.1, drafter_factor=1.5)
    assert one.worse(other) == other.worse(one) == Contention(target_factor=1.2, drafter_factor=1.5)


def test_contention_measured_beside_other_programs_pairs_no_devices(measured: Measurements) -> None:
    measured.save(TIMES, invented_times(0.04), DRAFTING_THERE.facts)
    measured.save(CONTENTION, Contention(busy=0.4), HERE.facts, DRAFTING_THERE.facts)
    assert pair(measured, HERE, DRAFTING_THERE).costs().contention is None
    assert not any(candidate.mode == "pipelined" for candidate in rank(measured, loaded=False).candidates)
    measured.save(CONTENTION, Contention(), HERE.facts, DRAFTING_THERE.facts)
    assert rank(measured, loaded=False).best.mode == "pipelined"


def test_places_timed_beside_other_programs_are_not_compared(measured: Measurements) -> None:
    """Neither the target nor the drafter moves because of a busy minute."""
    for at in (SOME, DRAFTING_THERE):
        measured.save(TIMES, replace(invented_times(0.001), busy=0.4), at.facts)
        measured.save(WIDTHS, PROBE, at.facts)
    ranking, known = rank(measured, loaded=False), pair(measured, HERE, DRAFTING_HERE)
    assert {one.drafter.device for one in ranking.candidates if one.drafter is not None} <= {"cpu"}
    assert [one.what for one in ranking.rejected if one.verdict.code == "not_measured"] == [
        "big, 12 of 25 layers on Vulkan0",
        "small on Vulkan0, drafting",
    ]
    known.settle_place(BOTH)
    assert measured.settled(PLACE, HERE.facts) == Settled()


def test_a_target_timed_beside_other_programs_is_not_moved(store: Measurements) -> None:
    store.save(TIMES, replace(invented_times(0.1), busy=0.4), HERE.facts)
    time_target(store, SOME, 0.01)
    pair(store, HERE).settle_place(BOTH)
    assert store.settled(PLACE, HERE.facts) == Settled()
    store.save(TIMES, invented_times(0.1), HERE.facts)
    pair(store, HERE).settle_place(BOTH)
    assert store.settled(PLACE, HERE.facts).ahead == SOME.key


@pytest.mark.parametrize("probe", [True, False])
def test_drafting_in_a_place_needs_the_widths_of_that_place(store: Measurements, probe: bool) -> None:
    time_target(store, SOME, 0.05, probe=probe)
    store.save(TIMES, invented_times(0.001), DRAFTING_HERE.facts)
    ranking = rank(store, own=SOME)
    assert (ranking.best.mode == "serial") is probe
    assert any("how many guesses keep the text identical" in line for line in said(ranking)) is not probe


def test_a_place_with_only_plain_times_is_ranked_for_plain_decoding(measured: Measurements) -> None:
    measured.save(PLAIN, 0.05, SOME.facts)
    stays = [refusal.speedup for refusal in rank(measured).rejected if refusal.verdict.code == "target_stays"]
    assert stays == [2.0]


def test_times_measured_for_a_shorter_context_are_not_used(measured: Measurements) -> None:
    measured.save(TIMES, replace(invented_times(0.05), contexts=(16,)), SOME.facts)
    assert any("12 of 25 layers on Vulkan0: not measured" in line for line in said(rank(measured)))


def test_another_setting_of_the_current_place_is_not_listed_as_unmeasured(store: Measurements) -> None:
    own = replace(HERE, facts=replace(HERE.facts, threads=2))
    time_target(store, own, 0.1)
    ranking = rank(store, own=own)
    assert {candidate.target.short_name for candidate in ranking.candidates} == {"big on cpu"}
    assert not any(line.startswith("big on cpu: not measured") for line in said(ranking))
    time_target(store, HERE, 0.09)
    assert {candidate.target.facts.threads for candidate in rank(store, own=own).candidates} == {2}


# --------------------------------------------------------------------------------------------- the drafter's place


class Located:
    """The attributes of a located drafter that choosing needs."""

    name = "small"
    onnx = None
    weight_bytes = GIB


def choose(store: Measurements, monkeypatch: pytest.MonkeyPatch, places: Placements, **values: Any) -> str:
    """The device that the profile names for the drafter after choosing."""

    def drafter(own: Preparation, file: LocatedModel) -> PreparedModel:
        device = "Vulkan0" if own.profile.draft_device == "auto" else own.profile.draft_device
        settings = LlamaSettings(threads=own.threads, device=device, kv_type="q8_0")
        return PreparedModel(file=file, settings=settings, facts=facts("small", device), context_length=CONTEXT)

    monkeypatch.setattr(Preparation, "drafter", drafter)
    located: Any = Located()
    prepare = Preparation(replace(PROFILE, **values), 1, CONTEXT)
    model = PreparedModel(file=located, settings=HERE.settings, facts=HERE.facts, context_length=CONTEXT)
    target = PlacedTarget(model=model, prepare=prepare, places=places, allowed_bytes=32 * GIB, notices=())
    wanted = request(context_length=CONTEXT)
    return in_the_fastest_place(prepare, located, target, places, store, wanted).profile.draft_device


def test_without_other_places_the_profiles_drafter_device_is_kept(
    measured: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(measured, monkeypatch, Placements()) == "auto"


def test_without_measurements_the_drafter_uses_its_default_device(
    store: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(store, monkeypatch, BOTH) == "Vulkan0"


def test_a_drafter_measured_faster_on_the_card_is_placed_there(
    measured: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dovetail's placement: the drafter on the card, the target on the processor."""
    measured.save(TIMES, invented_times(0.001), DRAFTING_THERE.facts)
    taught = Acceptance()
    for _ in range(50):
        taught.learn((0.9,), (True, True))
    known = pair(measured, HERE, DRAFTING_HERE)
    known.learn_prior("model", taught)
    room_for_one = replace(BOTH, memory_bytes={"Vulkan0": 5 * GIB})
    assert choose(measured, monkeypatch, room_for_one) == "Vulkan0"
    measured.save(TIMES, invented_times(0.0001), DRAFTING_HERE.facts)
    assert choose(measured, monkeypatch, room_for_one) == "cpu"


def test_a_drafter_without_room_on_the_card_runs_on_the_processor(
    measured: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowded = replace(BOTH, memory_bytes={"Vulkan0": GIB})
    assert choose(measured, monkeypatch, crowded) == "cpu"
    asked = replace(crowded, drafters=(DRAFTING_THERE,))
    assert choose(measured, monkeypatch, asked, draft_device="Vulkan0") == "Vulkan0", "the caller set the device"
