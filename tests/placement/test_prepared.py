"""Which runtime opens a model, in which settings, and how much memory it needs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import ProfileError
from edgespec.export.onnx.export import export_onnx
from edgespec.export.provenance import Provenance
from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import ModelFacts
from edgespec.placement import prepared as prepared_module
from edgespec.placement.memory import MemoryEstimate, estimate_memory, memory_needed
from edgespec.placement.prepared import (
    PROCESS_BYTES,
    Preparation,
    PreparedModel,
    choose_threads,
    drafts_in_process,
    fewer_threads,
    other_caches,
    other_settings,
    prepare_drafter,
    prepare_model,
)
from edgespec.profiles.profile import load_profile
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.llama.library import LlamaLibrary
from edgespec.runtimes.llama.runtime import LlamaRuntime
from edgespec.runtimes.native.model import NativeSettings
from edgespec.runtimes.native.runtime import NATIVE_SIDECAR, NativeRuntime
from edgespec.runtimes.onnx import runtime as onnx_runtime
from edgespec.runtimes.onnx.model import describe_onnx
from edgespec.runtimes.onnx.session import OnnxSettings
from edgespec.runtimes.process.frames import LoadRequest
from edgespec.runtimes.process.settings import WorkerSettings
from edgespec.runtimes.runtime import Settings
from edgespec.runtimes.table import runtime_of
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.support.kernel_calls import require_native
from tests.support.native_devices import gpu
from tests.support.processor import processor_runtimes
from tests.support.tiny_models import TinyModels

PROFILE = load_profile("laptop", environ={}, cwd=Path("/"), user_dir=Path("/"), only_the_named=True)
BIG, SMALL = 2 << 30, 1 << 30
CONTEXT = 512


@pytest.fixture
def located(tiny: TinyModels, tmp_path: Any) -> LocatedModel:
    return Locator(store=Store(Home(tmp_path))).locate(str(tiny.target))


@pytest.fixture
def folder(tiny: TinyModels, tmp_path: Path) -> LocatedModel:
    """The same model in an ONNX folder."""
    export_onnx(tiny.target, tmp_path / "onnx", Provenance(name="onnx"), kept=None)
    return Locator(store=Store(Home(tmp_path))).locate(str(tmp_path / "onnx"))


def target(file: LocatedModel, threads: int, **values: Any) -> PreparedModel:
    return Preparation(replace(PROFILE, **values), threads, CONTEXT).target(file)


def drafter(file: LocatedModel, threads: int, **values: Any) -> PreparedModel:
    return Preparation(replace(PROFILE, **values), threads, CONTEXT).drafter(file)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with its own memory, and an integrated GPU with far more."""
    devices = (
        gpu("cpu", kind="cpu", free=1 << 40),
        gpu("Vulkan1", kind="igpu", free=1 << 40, total=1 << 40),
        gpu("Vulkan0", free=SMALL + 1),
        gpu("CUDA0", free=None, total=None),
    )
    monkeypatch.setattr(LlamaLibrary, "devices", lambda _self, *, with_memory=True: devices)


def test_the_first_gpu_with_room_is_chosen(two_devices: None) -> None:
    assert LlamaRuntime().find_device("auto", SMALL) == "Vulkan0"
    assert LlamaRuntime().find_device("auto", SMALL + 1) == "cpu"
    assert LlamaRuntime().find_device("auto", BIG) == "cpu"


def test_a_device_is_found_by_name_without_regard_to_case(two_devices: None) -> None:
    assert LlamaRuntime().find_device("vulkan0", BIG) == "Vulkan0"
    assert LlamaRuntime().find_device("Vulkan1", BIG) == "Vulkan1"
    assert LlamaRuntime().find_device("CUDA7", BIG) == "CUDA7", "loading refuses it later"
    assert LlamaRuntime().find_device("CPU", BIG) == "cpu"


@pytest.mark.parametrize(
    ("threads", "most", "expected"),
    [("auto", None, 6), ("auto", 4, 4), (2, None, 2), (2, 8, 2), (8, None, 8), (8, 1, 1)],
)
def test_threads_default_to_the_physical_cores(threads: Any, most: int | None, expected: int) -> None:
    machine: Any = SimpleNamespace(physical_cores=6, logical_cores=8)
    assert choose_threads(replace(PROFILE, threads=threads), machine, most) == expected


@pytest.mark.parametrize(
    ("profile", "cores", "message"),
    [
        ({"flags": {"threads": "99"}}, 2, "--threads: 99 threads are more than the 2 processors that"),
        ({"environ": {"EDGESPEC_THREADS": "2"}}, 1, "EDGESPEC_THREADS: 2 threads are more than the 1 processor that"),
        ({"flags": {"threads": 3}, "only_the_named": True}, 2, "threads: 3 threads are more than the 2 processors"),
    ],
)
def test_more_threads_than_processors_are_refused(profile: dict[str, Any], cores: int, message: str) -> None:
    machine: Any = SimpleNamespace(physical_cores=cores, logical_cores=cores)
    asked = load_profile(None, **{"environ": {}, "cwd": Path("/"), "user_dir": Path("/"), **profile})
    with pytest.raises(ProfileError, match=message) as caught:
        choose_threads(asked, machine, None)
    assert caught.value.hint == "auto takes the number that is fastest"


def test_a_gguf_target_has_llama_settings_if_llama_is_requested(two_devices: None, located: LocatedModel) -> None:
    profile: dict[str, Any] = {"device": "cpu", "gpu_layers": "auto", "runtime": "llama"}
    settings = target(located, 3, **profile).settings
    assert isinstance(settings, LlamaSettings)
    assert (settings.threads, settings.device, settings.gpu_layers) == (3, "cpu", None)
    on_gpu = target(located, 3, **{**profile, "device": "Vulkan0", "gpu_layers": 2}).settings
    assert isinstance(on_gpu, LlamaSettings)
    assert (on_gpu.device, on_gpu.gpu_layers) == ("Vulkan0", 2)
    assert on_gpu.kv_type in ("q8_0", "f16"), "keys and values of one type"
    for device in ("Vulkan0", "auto"):
        assert target(located, 3, **{**profile, "device": device, "gpu_layers": 0}).settings == settings


def test_an_onnx_folder_runs_in_onnx_runtime(folder: LocatedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(file: LocatedModel, settings: OnnxSettings) -> ModelFacts:
        return describe_onnx(file, replace(settings, provider="cpu"))

    monkeypatch.setattr(onnx_runtime, "describe_onnx", describe)  # the provider may be missing on this machine
    for device, provider in (("auto", "cpu"), ("cpu", "cpu"), ("CPU", "cpu"), ("DirectML", "DirectML")):
        own, other = target(folder, 3, device=device), drafter(folder, 3, draft_device=device)
        assert own.settings == other.settings == OnnxSettings(threads=3, provider=provider)


def test_a_llama_drafter_is_repacked_even_if_the_target_is_not(located: LocatedModel) -> None:
    settings = drafter(located, 5, draft_device="cpu", draft_runtime="llama").settings
    assert isinstance(settings, LlamaSettings)
    assert settings.threads == 5
    assert settings.repack
    assert settings.flash_attention


@pytest.mark.usefixtures("llama_repacks")
def test_each_runtime_lists_the_settings_worth_probing() -> None:
    def stable_settings(preferred: Settings) -> tuple[Settings, ...]:
        return tuple(runtime_of(preferred).stable_settings(preferred))

    llama, as_filed = LlamaSettings(threads=3), LlamaSettings(threads=3, repack=False)
    assert stable_settings(llama) == (llama, as_filed)
    assert stable_settings(as_filed) == (as_filed,)
    onnx, padded = OnnxSettings(threads=3), OnnxSettings(threads=3, pad_to=2)
    assert stable_settings(onnx) == (onnx, padded)
    assert stable_settings(padded) == (padded,)
    assert stable_settings(NativeSettings(threads=3)) == (NativeSettings(threads=3),)


def test_each_runtime_names_its_fastest_settings_for_prompts() -> None:
    llama, as_filed = LlamaSettings(threads=3), LlamaSettings(threads=3, repack=False)
    on_gpu = LlamaSettings(threads=3, device="Vulkan0")
    for preferred, expected in ((llama, as_filed), (as_filed, as_filed), (on_gpu, on_gpu)):
        assert runtime_of(preferred).prompt_settings(preferred) == expected
    for other in (NativeSettings(threads=3), OnnxSettings(threads=3)):
        assert runtime_of(other).prompt_settings(other) == other


def test_other_settings_offer_fewer_threads_and_other_caches() -> None:
    def loaded(settings: Settings) -> Any:
        return SimpleNamespace(settings=settings)

    for threads, fewer in ((1, []), (2, [1]), (6, [1, 2, 4]), (8, [1, 2, 4])):
        assert fewer_threads(loaded(LlamaSettings(threads=threads))) == fewer
    llama = loaded(LlamaSettings(threads=2))
    assert other_caches(llama) == [{"kv_type": "f16"}, {"kv_type": "f16", "flash_attention": False}]
    assert other_settings(llama) == [{"threads": 1}, *other_caches(llama)]
    assert other_caches(loaded(LlamaSettings(kv_type="f16"))) == []
    assert other_caches(loaded(OnnxSettings(threads=1))) == []
    assert other_caches(loaded(OnnxSettings(threads=1, pad_to=2))) == [{"pad_to": 1}]
    native = loaded(NativeSettings(threads=2))
    assert other_caches(native) == []
    assert other_settings(native) == [{"threads": 1}]


def test_memory_needed_is_weights_cache_and_buffers(located: LocatedModel, folder: LocatedModel) -> None:
    header = located.header
    llama = memory_needed(located, LlamaSettings(kv_type="f16"), 512)
    assert llama == estimate_memory(header, 512, 16)
    onnx = memory_needed(folder, OnnxSettings(), 512)
    assert onnx.weights_bytes == folder.weight_bytes != located.weight_bytes
    assert onnx.cache_bytes == 2 * llama.cache_bytes > 0, "float32 keys and values"
    assert memory_needed(located, NativeSettings(), 512) == replace(llama, grows=True)
    for settings, grows in ((LlamaSettings(kv_type="f16"), False), (NativeSettings(), True)):
        assert prepare_model(located, settings, 512).memory == replace(llama, grows=grows)


def test_a_target_runs_in_the_native_kernels_if_the_profile_requests_them(located: LocatedModel) -> None:
    require_native()
    prepared = target(located, 2, runtime="native")
    assert prepared.settings == NativeSettings(threads=2)
    with prepared.load() as model:
        assert model.facts == prepared.facts == NativeRuntime().describe(located, prepared.settings)
        assert model.facts.runtime == "native"


def test_only_a_model_from_the_store_keeps_its_sidecar_in_the_store(located: LocatedModel, tmp_path: Path) -> None:
    require_native()
    folder = tmp_path / "of the model"
    folder.mkdir()
    NativeRuntime().load(located, NativeSettings()).close()
    assert list(folder.iterdir()) == []
    stored = replace(located, identity="sha256:ab", prepared_folder=folder)
    for _ in range(2):
        with NativeRuntime().load(stored, NativeSettings()) as model:
            assert model.facts == NativeRuntime().describe(stored, NativeSettings())
    assert [each.name for each in folder.iterdir()] == [NATIVE_SIDECAR]


def test_a_profile_can_disable_sidecars(located: LocatedModel, tmp_path: Path) -> None:
    require_native()
    stored = replace(located, identity="sha256:ab", prepared_folder=tmp_path / "of the model")
    (tmp_path / "of the model").mkdir()
    prepared = target(stored, 2, runtime="native", native_sidecar=False)
    assert prepared.settings == NativeSettings(threads=2, sidecar=False)
    prepared.load().close()
    assert list((tmp_path / "of the model").iterdir()) == []


def test_layers_on_a_gpu_take_no_memory_of_the_machine(two_devices: None, located: LocatedModel) -> None:
    def needed(**settings: Any) -> MemoryEstimate:
        wanted = LlamaSettings(kv_type="f16", **settings)
        return memory_needed(located, wanted, 512)

    here, whole, some = needed(), needed(device="Vulkan0"), needed(device="vulkan0", gpu_layers=2)
    assert whole.cache_bytes == 0
    assert 0 < whole.weights_bytes < some.weights_bytes < here.weights_bytes
    assert some.cache_bytes == here.cache_bytes / 2, "one block of two"
    assert whole.buffers_bytes == here.buffers_bytes
    assert needed(device="Vulkan1") == here, "an integrated GPU uses the machine's memory"
    assert needed(device="CUDA7") == here


@pytest.mark.parametrize("runtime", processor_runtimes())
def test_facts_before_and_after_loading_agree(located: LocatedModel, runtime: Any) -> None:
    prepared = target(located, 1, device="cpu", runtime=runtime)
    with prepared.load() as model:
        said = prepared.facts
        assert said == runtime_of(prepared.settings).describe(located, prepared.settings)
        assert model.facts == replace(
            said, trained_context_length=model.facts.trained_context_length, can_rewind=model.facts.can_rewind
        )


# --------------------------------------------------------------------------------- a process for the drafter


@pytest.mark.parametrize(
    ("isolation", "device", "expected"),
    [
        ("auto", "cpu", False),
        ("auto", "CPU", False),
        ("auto", "Vulkan0", True),
        ("thread", "Vulkan0", False),
        ("process", "cpu", True),
    ],
)
def test_a_drafter_on_a_gpu_or_npu_runs_in_a_separate_process(isolation: Any, device: str, expected: bool) -> None:
    profile = replace(PROFILE, draft_isolation=isolation)
    for settings in (LlamaSettings(device=device), OnnxSettings(provider=device)):
        assert drafts_in_process(profile, settings.device) is expected


@pytest.mark.parametrize("runtime", processor_runtimes())
def test_a_drafter_in_a_process_needs_more_memory_and_has_separate_times(located: LocatedModel, runtime: str) -> None:
    settings: Settings = NativeSettings() if runtime == "native" else LlamaSettings()
    profiles = [replace(PROFILE, draft_isolation=kind) for kind in ("thread", "process")]
    here, apart = (prepare_drafter(profile, located, settings, 512) for profile in profiles)
    assert (here.in_process, apart.in_process) == (False, True)
    assert here.memory == memory_needed(located, settings, 512)
    assert apart.memory.total_bytes - here.memory.total_bytes == PROCESS_BYTES
    own, other = here.facts, apart.facts
    assert own == runtime_of(settings).describe(located, settings)
    forkless = replace(own, can_fork=False, can_branch=False)
    assert other == replace(forkless, settings={**own.settings, "process": True})


@pytest.mark.parametrize("runtime", processor_runtimes())
def test_a_drafters_process_receives_its_runtime_settings_and_file(
    located: LocatedModel, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LoadRequest] = []
    monkeypatch.setattr(
        prepared_module, "run_in_process", lambda facts, request, *_more: asked.append(request) or facts
    )
    prepared = drafter(located, 2, draft_isolation="process", draft_device="cpu", draft_runtime=runtime)
    facts: Any = prepared.in_background(WorkerSettings())
    assert facts == prepared.facts
    (request,) = asked
    assert (request.runtime, facts.runtime) == (runtime, runtime)
    settings: Any = prepared.settings
    assert request.settings == asdict(settings)
    assert (request.path, request.name, request.sha256) == (located.path, located.name, located.identity)
