"""Placements of target and drafter on machines with GPUs; the processor has only llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import MemoryLimitError
from edgespec.export.onnx.export import export_onnx
from edgespec.export.provenance import Provenance
from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.placement.candidates import (
    Placement,
    Placements,
    default_settings,
    require_room,
    room_for_drafter,
    target_places,
    with_drafter,
)
from edgespec.placement.memory import layer_bytes
from edgespec.placement.prepared import Preparation
from edgespec.planning.choice.options import HEADROOM_BYTES
from edgespec.profiles.profile import load_profile
from edgespec.runtimes.llama.context import KV_TYPES, LlamaSettings
from edgespec.runtimes.llama.library import LlamaLibrary
from edgespec.runtimes.onnx.session import OnnxSettings
from edgespec.runtimes.runtime import Device
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.support.native_devices import gpu
from tests.support.tiny_models import TinyModels

CONTEXT = 512
ROOMY = 1 << 33
PROFILE = replace(
    load_profile("laptop", environ={}, cwd=Path("/"), user_dir=Path("/"), only_the_named=True),
    device="auto",
    draft_device="auto",
    gpu_layers="auto",
    runtime="llama",
    draft_runtime="llama",
    max_memory_fraction=1.0,
)

Install = Callable[..., None]


@pytest.fixture
def target(tiny: TinyModels, tmp_path: Path) -> LocatedModel:
    return Locator(store=Store(Home(tmp_path))).locate(str(tiny.target))


@pytest.fixture
def drafter(tiny: TinyModels, tmp_path: Path) -> LocatedModel:
    return Locator(store=Store(Home(tmp_path))).locate(str(tiny.drafter))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Let llama.cpp list these GPUs besides its processor."""

    def install(*devices: Device) -> None:
        found = (gpu("cpu", kind="cpu"), *devices)
        monkeypatch.setattr(LlamaLibrary, "devices", lambda _self, *, with_memory=True: found)

    return install


def places(target: LocatedModel, drafter: LocatedModel | None = None, **values: Any) -> Placements:
    known = values.pop("known", lambda _facts: False)
    prepare = Preparation(replace(PROFILE, **values), 1, CONTEXT)
    found = target_places(prepare, target, known)
    return found if drafter is None else with_drafter(found, prepare, drafter)


def needed(model: LocatedModel, layers: int | None) -> int:
    """Bytes of device memory for ``layers`` layers, working buffers included."""
    bits = KV_TYPES["q8_0"][1]
    return layer_bytes(model.header, bits).split(layers, CONTEXT).device_bytes + HEADROOM_BYTES


def names(found: tuple[Placement, ...]) -> list[str]:
    return [place.name for place in found]


# ----------------------------------------------------------------------------------------------- enumeration


def test_a_machine_without_a_gpu_offers_no_placements(
    cards: Install, target: LocatedModel, drafter: LocatedModel
) -> None:
    cards()
    assert places(target, drafter) == Placements()
    cards(gpu("BLAS", kind="accel"))
    assert places(target, drafter) == Placements()


def test_a_cpu_only_profile_queries_no_gpu_driver(
    monkeypatch: pytest.MonkeyPatch, target: LocatedModel, drafter: LocatedModel
) -> None:
    def devices(_library: LlamaLibrary, *, with_memory: bool = True) -> tuple[Device, ...]:
        raise AssertionError("a driver was asked")

    monkeypatch.setattr(LlamaLibrary, "devices", devices)
    assert places(target, drafter, device="cpu", draft_device="CPU") == Placements()


def test_placements_list_each_model_on_each_device(
    cards: Install, target: LocatedModel, drafter: LocatedModel
) -> None:
    cards(gpu("Vulkan1", kind="igpu"), gpu("CUDA0", free=ROOMY), gpu("CUDA1", free=None))
    found = places(target, drafter)
    everywhere = ["cpu", "CUDA0", "CUDA1", "Vulkan1"]  # integrated GPUs come last
    everywhere[0] = "cpu (llama)"  # the processor may have two runtimes
    assert names(found.targets) == [f"target on {device}" for device in everywhere]
    assert names(found.drafters) == [f"drafter on {device}" for device in everywhere]
    assert found.memory_bytes == {"CUDA0": ROOMY}
    assert [place.memory for place in found.targets] == ["cpu", "CUDA0", "CUDA1", "cpu"]
    assert places(target).drafters == ()


def test_max_memory_fraction_limits_the_usable_gpu_memory(cards: Install, target: LocatedModel) -> None:
    cards(gpu("CUDA0", free=1000))
    assert places(target, max_memory_fraction=0.75).memory_bytes == {"CUDA0": 750}


@pytest.mark.parametrize(
    ("device", "draft_device", "targets", "drafters"),
    [
        ("cpu", "auto", ["cpu"], ["cpu", "Vulkan0"]),
        ("vulkan0", "CPU", ["Vulkan0"], ["cpu"]),
        ("auto", "Vulkan0", ["cpu", "Vulkan0"], ["Vulkan0"]),
        ("CUDA7", "auto", [], ["cpu", "Vulkan0"]),
    ],
)
def test_placements_stay_on_the_devices_that_the_profile_names(
    cards: Install,
    target: LocatedModel,
    drafter: LocatedModel,
    device: str,
    draft_device: str,
    targets: list[str],
    drafters: list[str],
) -> None:
    cards(gpu("Vulkan0"))
    found = places(target, drafter, device=device, draft_device=draft_device)
    assert [place.facts.device for place in found.targets] == targets
    assert [place.facts.device for place in found.drafters] == drafters


def test_onnx_models_have_no_other_placements(cards: Install, target: LocatedModel, drafter: LocatedModel) -> None:
    onnx: Any = SimpleNamespace(weight_bytes=1)
    cards(gpu("Vulkan0"))
    found = places(replace(target, onnx=onnx), drafter)
    assert (found.targets, len(found.drafters)) == ((), 2)
    found = places(target, replace(drafter, onnx=onnx))
    assert (len(found.targets), found.drafters) == (2, ())


# --------------------------------------------------------------------------------------------- partial offload


def test_a_gpu_too_small_for_the_target_is_offered_the_layers_that_fit(cards: Install, target: LocatedModel) -> None:
    cards(gpu("Vulkan0", free=needed(target, 2)))
    found = places(target)
    assert names(found.targets) == ["target on cpu (llama)", "target on Vulkan0", "target, 2 of 3 layers on Vulkan0"]
    assert [place.settings.gpu_layers for place in found.targets] == [None, None, 2]
    assert [found.room(place) for place in found.targets] == [True, False, True]
    whole, some = found.targets[1:]
    assert whole.needed_bytes["Vulkan0"] == needed(target, None)
    assert some.needed_bytes["Vulkan0"] == needed(target, 2)
    assert some.needed_bytes["cpu"] > whole.needed_bytes["cpu"]
    assert some.facts.settings["gpu_layers"] == 2
    assert some.facts != whole.facts


@pytest.mark.parametrize(("spare", "layers"), [(-1, [None]), (0, [None, 1]), (1 << 33, [None])])
def test_no_partial_offload_if_no_layer_or_every_layer_fits(
    cards: Install, target: LocatedModel, spare: int, layers: list[int | None]
) -> None:
    cards(gpu("Vulkan0", free=needed(target, 1) + spare, total=1 << 40))
    assert [p.settings.gpu_layers for p in places(target, device="Vulkan0").targets] == layers


def test_a_requested_number_of_layers_is_the_only_placement_on_the_gpu(cards: Install, target: LocatedModel) -> None:
    cards(gpu("Vulkan0", free=10))
    here = "target on cpu (llama)"
    assert names(places(target, gpu_layers=2).targets) == [here, "target, 2 of 3 layers on Vulkan0"]
    assert names(places(target, gpu_layers=0).targets) == [here]
    assert names(places(target, gpu_layers=50).targets) == [here, "target on Vulkan0"]


@pytest.mark.usefixtures("llama_repacks")
def test_a_placement_uses_settings_that_were_measured(cards: Install, target: LocatedModel) -> None:
    cards(gpu("Vulkan0"))
    found = places(target, known=lambda facts: not facts.settings["repack"] and facts.device == "cpu")
    assert [place.settings.repack for place in found.targets] == [False, True]


# ------------------------------------------------------------------------------------------------ as options


def test_a_placements_footprint_is_in_the_memories_that_hold_the_model(cards: Install, target: LocatedModel) -> None:
    cards(gpu("Vulkan0", free=needed(target, 2)), gpu("Vulkan1", kind="igpu"))
    here, whole, some, shared = (place.footprint for place in places(target).targets)
    assert [one.memory for one in (here, whole, some, shared)] == ["cpu", "Vulkan0", "Vulkan0", "cpu"]
    split = layer_bytes(target.header, KV_TYPES["q8_0"][1]).split(2, CONTEXT)
    assert (some.device_bytes, some.host_bytes, some.layers) == (split.device_bytes, split.host_bytes, (2, 3))
    assert (here.host_bytes, shared.host_bytes) == (0, 0)
    assert here.device_bytes > target.weight_bytes
    assert some.taken() == {"Vulkan0": split.device_bytes + HEADROOM_BYTES, "cpu": split.host_bytes}


def test_a_placement_without_measurements_is_rejected_as_not_measured(
    cards: Install, target: LocatedModel, drafter: LocatedModel
) -> None:
    cards(gpu("Vulkan0", free=needed(target, 2)), gpu("CUDA1", free=None))
    found = places(target, drafter)
    whole, some, unknown = found.targets[1:]
    refusal = some.not_measured("edgespec calibrate m.gguf")
    assert (
        refusal.sentence
        == "target, 2 of 3 layers on Vulkan0: not measured yet; `edgespec calibrate m.gguf` does that"
    )
    assert (
        found.drafters[0].not_measured("edgespec calibrate", drafting=True).what == "drafter on cpu (llama), drafting"
    )
    assert found.too_small(some) is None
    too_small = found.too_small(whole)
    assert too_small is not None
    assert (too_small.needed_bytes, too_small.available_bytes) == (needed(target, None), needed(target, 2))
    assert too_small.sentence.startswith("target on Vulkan0: needs ")
    too_small = found.too_small(unknown, drafting=True)
    assert too_small is not None
    assert too_small.sentence == "target on CUDA1, drafting: how much memory CUDA1 has is not known"
    assert too_small.needed_bytes is None


# -------------------------------------------------------------------------------------- before measurement


def chosen(target: LocatedModel, allowed: int, **values: Any) -> tuple[str, int | None]:
    profile = replace(PROFILE, **values)
    settings = default_settings(
        Preparation(profile, 1, CONTEXT).target(target).settings, places(target, **values), allowed
    )
    assert isinstance(settings, LlamaSettings)
    assert settings.kv_type == ("q8_0+f16" if settings.device == "cpu" else "q8_0")
    return settings.device, settings.gpu_layers


def test_an_unmeasured_target_runs_on_the_device_where_it_fits(cards: Install, target: LocatedModel) -> None:
    plenty = 1 << 40
    cards()
    assert chosen(target, plenty) == chosen(target, 0) == ("cpu", None), "unchanged without a GPU"
    cards(gpu("Vulkan0"))
    assert chosen(target, plenty) == ("Vulkan0", None)
    assert chosen(target, plenty, device="cpu") == ("cpu", None)
    cards(gpu("Vulkan0", free=needed(target, 2)))
    assert chosen(target, plenty, device="Vulkan0") == ("Vulkan0", 2)
    assert chosen(target, plenty, device="Vulkan0", gpu_layers=1) == ("Vulkan0", 1)
    cards(gpu("Vulkan0", free=5))
    assert chosen(target, plenty) == ("cpu", None)
    assert chosen(target, plenty, device="Vulkan0") == ("Vulkan0", None), "require_room refuses it later"


def test_a_target_too_large_for_one_memory_is_split_between_two(cards: Install, target: LocatedModel) -> None:
    cards(gpu("Vulkan0", free=needed(target, 2)))
    some = next(place for place in places(target).targets if place.footprint.layers)
    here = places(target).targets[0]
    assert some.needed_bytes["cpu"] < here.needed_bytes["cpu"]
    assert chosen(target, here.needed_bytes["cpu"]) == ("cpu", None)
    assert chosen(target, here.needed_bytes["cpu"] - 1) == ("Vulkan0", 2)


def test_an_onnx_target_keeps_its_settings(cards: Install, tiny: TinyModels, tmp_path: Path) -> None:
    cards(gpu("Vulkan0"))
    export_onnx(tiny.target, tmp_path / "onnx", Provenance(name="onnx"), kept=None)
    folder = Locator(store=Store(Home(tmp_path))).locate(str(tmp_path / "onnx"))
    prepare = Preparation(PROFILE, 2, CONTEXT)
    settings = default_settings(prepare.target(folder).settings, places(folder), 1 << 40)
    assert settings == OnnxSettings(threads=2, provider="cpu")


def test_a_target_too_large_for_its_gpu_raises_with_both_sizes(cards: Install, target: LocatedModel) -> None:
    cards(gpu("Vulkan0", free=needed(target, 2)), gpu("CUDA1", free=None))
    found = places(target)
    on_card = LlamaSettings(device="Vulkan0", kv_type="q8_0")
    with pytest.raises(MemoryLimitError, match="target on Vulkan0 needs about") as raised:
        require_room(on_card, found)
    assert (raised.value.needed_bytes, raised.value.available_bytes) == (needed(target, None), needed(target, 2))
    assert "gpu_layers" in (raised.value.hint or "")
    for fitting in (
        replace(on_card, gpu_layers=2),
        LlamaSettings(),
        LlamaSettings(device="CUDA1"),
        OnnxSettings(),
    ):
        require_room(fitting, found)
    require_room(on_card, Placements())


def test_room_for_a_drafter_is_what_the_target_leaves_on_the_gpu(
    cards: Install, target: LocatedModel, drafter: LocatedModel
) -> None:
    free = needed(target, None) + 1000
    cards(gpu("Vulkan0", free=free, total=1 << 40), gpu("CUDA1", free=None))
    found = places(target, drafter)
    alone, beside = (room_for_drafter(LlamaSettings(device=d), "Vulkan0", found) for d in ("cpu", "Vulkan0"))
    assert alone == (needed(drafter, None), free)
    assert beside == (needed(drafter, None), 1000)
    for device in ("cpu", "CUDA1", "CUDA9"):
        assert room_for_drafter(LlamaSettings(), device, found) is None


def test_a_place_is_a_runtime_a_device_and_its_layers(cards: Install, target: LocatedModel) -> None:
    cards(gpu("Vulkan0", free=needed(target, 2)))
    here, whole, some = (place.facts for place in places(target).targets)
    assert here.place == replace(here, threads=9, kv_type="f16").place
    assert here.place != whole.place
    assert whole.place != some.place
