"""The runtimes of the processor (our kernels, llama.cpp, or either) and the resulting placements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import InvalidRequestError, ModelFileError, RuntimeUnavailableError
from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.placement import prepared
from edgespec.placement.candidates import Placement, Placements, default_settings, target_places, with_drafter
from edgespec.placement.prepared import Preparation
from edgespec.profiles.profile import Profile, load_profile
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.llama.library import LlamaLibrary
from edgespec.runtimes.native import runtime as native_runtime
from edgespec.runtimes.native.model import NativeSettings
from edgespec.runtimes.native.runtime import NativeRuntime
from edgespec.runtimes.onnx.session import OnnxSettings
from edgespec.runtimes.runtime import Device, Settings
from edgespec.runtimes.table import runtime_of
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.support.kernel_calls import require_native
from tests.support.native_devices import gpu
from tests.support.tiny_models import TinyModels
from tests.support.trimmed_folder import write_trimmed_folder

CONTEXT = 512
PLENTY = 1 << 40
PROFILE = load_profile(None, environ={}, cwd=Path("/"), user_dir=Path("/"), only_the_named=True)
BOTH = ("native", "llama")

Locate = Callable[[Path], LocatedModel]


@pytest.fixture(autouse=True)
def _library() -> None:
    require_native()


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """The devices that llama.cpp lists: the processor, and what a test adds."""
    found = [gpu("cpu", kind="cpu")]
    monkeypatch.setattr(LlamaLibrary, "devices", lambda _self, *, with_memory=True: tuple(found))
    return found


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor for whose instructions the kernels are built."""
    levels(monkeypatch, "portable", "fast")


def levels(patch: pytest.MonkeyPatch, *names: str) -> None:
    patch.setattr(native_runtime, "library", SimpleNamespace(load=lambda: SimpleNamespace(levels=names)))


def without_library(patch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeUnavailableError("the native runtime is missing: no compiler", hint="install one")

    patch.setattr(native_runtime, "library", SimpleNamespace(load=refuse))


def processor_runtimes(wanted: str, device: str, file: LocatedModel) -> tuple[str, ...]:
    return tuple(runtime.name for runtime in prepared.processor_runtimes(wanted, device, file))


def target_settings(profile: Profile, threads: int, file: LocatedModel) -> Settings:
    return Preparation(profile, threads, CONTEXT).target(file).settings


def drafter_settings(profile: Profile, threads: int, file: LocatedModel) -> Settings:
    return Preparation(profile, threads, CONTEXT).drafter(file).settings


@pytest.fixture
def locate(tmp_path: Path) -> Locate:
    locator = Locator(store=Store(Home(tmp_path)))
    return lambda path: locator.locate(str(path))


@pytest.fixture
def target(tiny: TinyModels, locate: Locate) -> LocatedModel:
    return locate(tiny.target)


@pytest.fixture
def drafter(tiny: TinyModels, locate: Locate) -> LocatedModel:
    return locate(tiny.drafter)


@pytest.fixture
def narrow(tiny: TinyModels, locate: Locate) -> LocatedModel:
    """A known architecture in an unsupported shape: heads of 16, with separate keys."""
    return locate(tiny._make("narrow-alone", heads=4, kv_heads=4))


# ---------------------------------------------------------------------------------------------- the choice of runtime


@pytest.mark.parametrize(("wanted", "expected"), [("auto", BOTH), ("native", ("native",)), ("llama", ("llama",))])
@pytest.mark.parametrize("device", ["cpu", "CPU"])
def test_a_file_for_both_runtimes_prefers_the_native_kernels(
    target: LocatedModel, wanted: str, expected: tuple[str, ...], device: str
) -> None:
    assert processor_runtimes(wanted, device, target) == expected


def test_portable_kernels_are_less_preferred_than_llama_cpp(
    target: LocatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels(monkeypatch, "portable")
    assert processor_runtimes("auto", "cpu", target) == ("llama", "native")
    assert processor_runtimes("native", "cpu", target) == ("native",)


def test_without_the_kernel_library_llama_cpp_runs_the_file(
    target: LocatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_library(monkeypatch)
    assert processor_runtimes("auto", "cpu", target) == processor_runtimes("llama", "cpu", target) == ("llama",)
    with pytest.raises(RuntimeUnavailableError, match="no compiler") as caught:
        processor_runtimes("native", "cpu", target)
    assert caught.value.hint == "install one"


def test_requesting_llama_cpp_does_not_load_the_kernel_library(
    target: LocatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(native_runtime, "library", SimpleNamespace(load=fail))
    assert processor_runtimes("llama", "cpu", target) == ("llama",)


def test_a_file_without_native_kernels_runs_in_llama_cpp(narrow: LocatedModel) -> None:
    assert processor_runtimes("auto", "cpu", narrow) == ("llama",)
    with pytest.raises(RuntimeUnavailableError, match=f"does not run {narrow.name}: .*head") as caught:
        processor_runtimes("native", "cpu", narrow)
    assert caught.value.hint == 'runtime "auto" or "llama" runs it with llama.cpp'


def test_both_runtimes_run_a_trimmed_head(tiny: TinyModels, locate: Locate, tmp_path: Path) -> None:
    located = locate(write_trimmed_folder(tiny.drafter, tmp_path / "trimmed", range(300)))
    assert processor_runtimes("auto", "cpu", located) == BOTH
    with NativeRuntime().load(located, NativeSettings()) as model:
        assert model.facts == NativeRuntime().describe(located, NativeSettings())


def test_an_architecture_unknown_to_the_kernels_runs_in_llama_cpp(target: LocatedModel) -> None:
    other = replace(target, header=replace(target.header, architecture="mamba"))
    assert processor_runtimes("auto", "cpu", other) == ("llama",)
    with pytest.raises(RuntimeUnavailableError, match="mamba"):
        processor_runtimes("native", "cpu", other)


def test_a_damaged_file_is_left_for_llama_cpp_to_refuse(tiny: TinyModels, locate: Locate) -> None:
    broken = locate(tiny.broken_inside())
    assert processor_runtimes("auto", "cpu", broken) == ("llama",)
    with pytest.raises(ModelFileError, match="is missing"):
        processor_runtimes("native", "cpu", broken)


def test_other_devices_than_the_processor_run_llama_cpp_only(target: LocatedModel) -> None:
    assert (
        processor_runtimes("auto", "Vulkan0", target) == processor_runtimes("llama", "Vulkan0", target) == ("llama",)
    )
    with pytest.raises(InvalidRequestError, match="runs on the processor, not on Vulkan0"):
        processor_runtimes("native", "Vulkan0", target)


# ----------------------------------------------------------------------------------------------------- settings


def test_settings_name_their_runtime() -> None:
    settings = (LlamaSettings(), NativeSettings(), OnnxSettings())
    assert [each.runtime for each in settings] == ["llama", "native", "onnx"]
    assert [runtime_of(each).name for each in settings] == ["llama", "native", "onnx"]


def test_runtime_and_draft_runtime_are_chosen_independently(target: LocatedModel, drafter: LocatedModel) -> None:
    for wanted, kind in (("auto", NativeSettings), ("native", NativeSettings), ("llama", LlamaSettings)):
        own: Any = replace(PROFILE, runtime=wanted)
        settings = target_settings(own, 2, target)
        assert (type(settings), settings.threads, settings.device) == (kind, 2, "cpu")
        assert isinstance(drafter_settings(own, 2, drafter), NativeSettings)
        own = replace(PROFILE, draft_runtime=wanted)
        settings = drafter_settings(own, 2, drafter)
        assert (type(settings), settings.threads, settings.device) == (kind, 2, "cpu")
        assert isinstance(target_settings(own, 2, target), NativeSettings)


def test_the_name_of_a_runtime_is_not_a_device(target: LocatedModel) -> None:
    runtime, device = prepared.choose_runtime("auto", "native", target)
    settings = runtime.settings(target, threads=2, device=device)
    assert isinstance(settings, LlamaSettings)
    with pytest.raises(RuntimeUnavailableError, match="no device 'native'"):
        runtime.load(target, settings)
    with pytest.raises(RuntimeUnavailableError, match="no device 'native'"):
        target_settings(replace(PROFILE, device="native"), 2, target)


def test_a_runtime_in_the_model_argument_overrides_the_profile(target: LocatedModel) -> None:
    """For any runtime in the profile."""
    for wanted, kind in (("native", NativeSettings), ("llama", LlamaSettings)):
        located: Any = replace(target, runtime=wanted)
        for runtime in ("auto", *BOTH):
            profile: Any = replace(PROFILE, runtime=runtime)
            assert isinstance(target_settings(profile, 1, located), kind)


def test_a_gpu_is_used_through_llama_cpp_not_the_native_kernels(
    target: LocatedModel, drafter: LocatedModel, devices: list[Device]
) -> None:
    devices.append(gpu("Vulkan0"))
    for settings, prefix, located in ((target_settings, "", target), (drafter_settings, "draft_", drafter)):

        def chosen(
            device: str, runtime: str, settings: Any = settings, prefix: str = prefix, located: Any = located
        ) -> Any:
            values: Any = {f"{prefix}device": device, f"{prefix}runtime": runtime}
            return settings(replace(PROFILE, **values), 1, located)

        own = chosen("auto", "auto")
        assert (own.runtime, own.device) == ("llama", "Vulkan0")
        assert chosen("auto", "native") == chosen("cpu", "auto") == NativeSettings(threads=1)
        with pytest.raises(InvalidRequestError, match="not on vulkan0"):
            chosen("vulkan0", "native")


# ------------------------------------------------------------------------------------------------------- places


def places(target: LocatedModel, drafter: LocatedModel | None = None, **values: Any) -> Placements:
    prepare = Preparation(replace(PROFILE, **values), 1, CONTEXT)
    found = target_places(prepare, target)
    return found if drafter is None else with_drafter(found, prepare, drafter)


def before_measuring(target: LocatedModel, found: Placements, allowed_bytes: int) -> Settings:
    return default_settings(Preparation(PROFILE, 1, CONTEXT).target(target).settings, found, allowed_bytes)


def names(found: tuple[Placement, ...]) -> list[str]:
    return [place.name for place in found]


def test_the_processor_is_one_placement_for_each_runtime(target: LocatedModel, drafter: LocatedModel) -> None:
    found = places(target, drafter)
    assert names(found.targets) == ["target on cpu (native)", "target on cpu (llama)"]
    assert names(found.drafters) == ["drafter on cpu (native)", "drafter on cpu (llama)"]
    assert [type(place.settings) for place in found.targets] == [NativeSettings, LlamaSettings]
    assert [place.facts.runtime for place in found.targets] == list(BOTH)
    assert {place.memory for place in (*found.targets, *found.drafters)} == {"cpu"}
    assert found.memory_bytes == {}
    assert all(place.needed_bytes["cpu"] > place.facts.weight_bytes for place in found.targets)


def test_placements_on_the_processor_query_no_driver(
    target: LocatedModel, drafter: LocatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_library: LlamaLibrary, *, with_memory: bool = True) -> tuple[Device, ...]:
        raise AssertionError("a driver was asked")

    monkeypatch.setattr(LlamaLibrary, "devices", fail)
    assert len(places(target, drafter, device="cpu", draft_device="cpu").targets) == 2


def test_one_runtime_on_the_processor_leaves_no_placements_to_choose(
    target: LocatedModel, drafter: LocatedModel, narrow: LocatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for runtime in BOTH:
        assert places(target, drafter, runtime=runtime, draft_runtime=runtime) == Placements()
    assert places(narrow, narrow) == Placements()
    without_library(monkeypatch)
    assert places(target, drafter) == Placements()


def test_fixing_one_models_runtime_leaves_two_placements_for_the_other(
    target: LocatedModel, drafter: LocatedModel
) -> None:
    found = places(target, drafter, runtime="llama")
    assert [len(each) for each in (found.targets, found.drafters)] == [0, 2], "the target cannot move"
    found = places(target, drafter, draft_runtime="native")
    assert [len(each) for each in (found.targets, found.drafters)] == [2, 1]
    assert places(target, None).drafters == ()


def test_onnx_models_have_no_placement_on_the_processor(target: LocatedModel, drafter: LocatedModel) -> None:
    onnx: Any = SimpleNamespace(weight_bytes=1)
    found = places(replace(target, onnx=onnx), drafter)
    assert (found.targets, len(found.drafters)) == ((), 2)
    assert places(replace(target, onnx=onnx), replace(drafter, onnx=onnx)) == Placements()


def test_a_gpu_is_offered_in_llama_cpp_only(
    target: LocatedModel, drafter: LocatedModel, devices: list[Device]
) -> None:
    devices.append(gpu("Vulkan0"))
    found = places(target, drafter)
    assert names(found.targets) == ["target on cpu (native)", "target on cpu (llama)", "target on Vulkan0"]
    assert found.targets[2].facts.runtime == "llama"
    found = places(target, drafter, runtime="native", draft_runtime="native")
    assert names(found.targets) == ["target on cpu (native)"]
    assert names(found.drafters) == ["drafter on cpu (native)"]


def test_settings_of_either_runtime_can_be_moved_to_a_placement(target: LocatedModel, devices: list[Device]) -> None:
    devices.append(gpu("Vulkan0"))
    native, llama, card = places(target).targets
    own = LlamaSettings(threads=7, repack=False)
    assert native.is_of(NativeSettings(threads=7))
    assert not native.is_of(own)
    assert llama.is_of(own)
    assert native.put(own) == native.settings == NativeSettings(threads=1)
    assert llama.put(NativeSettings(threads=7)) == llama.settings
    put = card.put(own)
    assert isinstance(put, LlamaSettings)
    assert (put.device, put.threads, put.repack, put.kv_type) == ("Vulkan0", 7, False, "q8_0")


def test_before_measurement_the_first_placement_with_room_is_used(
    target: LocatedModel, devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = places(target)
    native, llama = found.targets
    assert before_measuring(target, found, PLENTY) == native.settings
    least = min(native.needed_bytes["cpu"], llama.needed_bytes["cpu"])
    smaller = native if native.needed_bytes["cpu"] == least else llama
    assert smaller is llama, "its cache is quantised"
    assert before_measuring(target, found, least) == llama.settings
    assert before_measuring(target, found, least - 1) == native.settings, "loading refuses it later"
    levels(monkeypatch, "portable")
    assert before_measuring(target, places(target), PLENTY) == llama.settings


def test_a_target_too_large_for_its_gpu_starts_in_the_native_kernels(
    target: LocatedModel, devices: list[Device]
) -> None:
    devices.append(gpu("Vulkan0", free=target.weight_bytes + 1))  # enough for the weights alone
    assert target_settings(PROFILE, 1, target).device == "Vulkan0"
    found = places(target)
    assert before_measuring(target, found, PLENTY) == found.targets[0].settings == NativeSettings(threads=1)
