"""Which runtime opens a model, in which settings, and what it needs of memory."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.placement import settings as opening
from edgespec.placement.memory import MemoryEstimate, estimate_memory
from edgespec.placement.settings import (
    NATIVE_SIDECAR,
    PROCESS_BYTES,
    choose_device,
    choose_threads,
    describe,
    describe_drafter,
    drafter_memory,
    drafter_settings,
    drafts_in_process,
    fewer_threads,
    memory_needed,
    open_drafter,
    open_model,
    other_caches,
    other_settings,
    stable_settings,
    target_settings,
)
from edgespec.profiles.profile import load_profile
from edgespec.runtimes.llama import library as llama_library
from edgespec.runtimes.llama.model import LlamaSettings
from edgespec.runtimes.native.native import NativeSettings
from edgespec.runtimes.onnx.model import OnnxSettings
from edgespec.runtimes.process.frames import LoadRequest
from edgespec.runtimes.process.restarting import WorkerSettings
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.support.kernel_calls import require_native
from tests.support.native_devices import gpu
from tests.support.processor import processor_runtimes
from tests.support.tiny_models import TinyModels

PROFILE = load_profile("laptop", environ={}, cwd=Path("/"), user_dir=Path("/"), only_the_named=True)
BIG, SMALL = 2 << 30, 1 << 30


@pytest.fixture
def located(tiny: TinyModels, tmp_path: Any) -> LocatedModel:
    return Locator(store=Store(Home(tmp_path))).locate(str(tiny.target))


@pytest.fixture
def folder(located: LocatedModel) -> LocatedModel:
    """The same model, as if an ONNX folder held it."""
    onnx: Any = SimpleNamespace(weight_bytes=12345, kept=None)
    return replace(located, onnx=onnx)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card and a GPU in the processor, which has far more memory."""
    devices = (
        gpu("cpu", kind="cpu", free=1 << 40),
        gpu("Vulkan1", kind="igpu", free=1 << 40, total=1 << 40),
        gpu("Vulkan0", free=SMALL + 1),
        gpu("CUDA0", free=None, total=None),
    )
    library = SimpleNamespace(devices=lambda *, with_memory=True: devices)
    monkeypatch.setattr(llama_library, "load", lambda: library)


def test_the_first_gpu_with_room_is_chosen(two_devices: None) -> None:
    assert choose_device("auto", SMALL) == "Vulkan0"
    assert choose_device("auto", SMALL + 1) == "cpu"
    assert choose_device("auto", BIG) == "cpu"


def test_a_device_asked_for_by_name(two_devices: None) -> None:
    assert choose_device("vulkan0", BIG) == "Vulkan0"
    assert choose_device("Vulkan1", BIG) == "Vulkan1"
    assert choose_device("CUDA7", BIG) == "CUDA7", "for loading to refuse"
    assert choose_device("CPU", BIG) == "cpu"


@pytest.mark.parametrize(
    ("threads", "most", "expected"), [("auto", None, 6), ("auto", 4, 4), (2, None, 2), (2, 8, 2), (9, 1, 1)]
)
def test_threads_are_the_physical_cores_unless_told(threads: Any, most: int | None, expected: int) -> None:
    machine: Any = SimpleNamespace(physical_cores=6)
    assert choose_threads(replace(PROFILE, threads=threads), machine, most) == expected


def test_a_gguf_target_in_llama_cpp(two_devices: None, located: LocatedModel) -> None:
    profile = replace(PROFILE, device="cpu", gpu_layers="auto", runtime="llama")
    settings = target_settings(profile, 3, located)
    assert isinstance(settings, LlamaSettings)
    assert (settings.threads, settings.device, settings.gpu_layers) == (3, "cpu", None)
    on_gpu = target_settings(replace(profile, device="Vulkan0", gpu_layers=2), 3, located)
    assert isinstance(on_gpu, LlamaSettings)
    assert (on_gpu.device, on_gpu.gpu_layers) == ("Vulkan0", 2)
    assert on_gpu.kv_type in ("q8_0", "f16"), "keys and values of one type"
    assert target_settings(replace(profile, device="Vulkan0", gpu_layers=0), 3, located) == settings
    assert target_settings(replace(profile, device="auto", gpu_layers=0), 3, located) == settings


def test_an_onnx_folder_runs_in_onnx_runtime(folder: LocatedModel) -> None:
    for device, provider in (("auto", "cpu"), ("cpu", "cpu"), ("DirectML", "DirectML")):
        own = target_settings(replace(PROFILE, device=device), 3, folder)
        other = drafter_settings(replace(PROFILE, draft_device=device), 3, folder)
        assert own == other == OnnxSettings(threads=3, provider=provider)


def test_a_drafter_is_repacked_whatever_the_target_needs(located: LocatedModel) -> None:
    settings = drafter_settings(replace(PROFILE, draft_device="cpu", draft_runtime="llama"), 5, located)
    assert isinstance(settings, LlamaSettings)
    assert settings.threads == 5
    assert settings.repack
    assert settings.flash_attention


def test_settings_worth_probing() -> None:
    llama, as_filed = LlamaSettings(threads=3), LlamaSettings(threads=3, repack=False)
    assert stable_settings(llama) == (llama, as_filed)
    assert stable_settings(as_filed) == (as_filed,)
    onnx, padded = OnnxSettings(threads=3), OnnxSettings(threads=3, pad_to=2)
    assert stable_settings(onnx) == (onnx, padded)
    assert stable_settings(padded) == (padded,)
    assert stable_settings(NativeSettings(threads=3)) == (NativeSettings(threads=3),)


def test_settings_that_plain_decoding_may_be_faster_in() -> None:
    def loaded(settings: opening.ModelSettings) -> Any:
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


def test_what_a_model_takes_of_memory(located: LocatedModel, folder: LocatedModel) -> None:
    header = located.header
    llama = memory_needed(header, located.weight_bytes, 512, LlamaSettings(kv_type="f16"))
    assert llama == estimate_memory(header, 512, 16)
    onnx = memory_needed(header, folder.weight_bytes, 512, OnnxSettings())
    assert onnx.weights_bytes == 12345
    assert onnx.cache_bytes == 2 * llama.cache_bytes, "float32 keys and values"
    assert memory_needed(header, located.weight_bytes, 512, NativeSettings()) == llama


def test_a_target_runs_in_our_own_kernels_if_the_profile_says_so(located: LocatedModel) -> None:
    require_native()
    settings = target_settings(replace(PROFILE, runtime="native"), 2, located)
    assert settings == NativeSettings(threads=2)
    with open_model(located, settings) as model:
        assert model.facts == describe(located, settings)
        assert model.facts.runtime == "native"


def test_only_a_model_from_the_store_has_a_sidecar_in_its_folder(located: LocatedModel, tmp_path: Path) -> None:
    require_native()
    folder = tmp_path / "of the model"
    folder.mkdir()
    open_model(located, NativeSettings()).close()
    assert list(folder.iterdir()) == []
    stored = replace(located, identity="sha256:ab", store_folder=folder)
    for _ in range(2):
        with open_model(stored, NativeSettings()) as model:
            assert model.facts == describe(stored, NativeSettings())
    assert [each.name for each in folder.iterdir()] == [NATIVE_SIDECAR]


def test_a_profile_may_do_without_sidecars(located: LocatedModel, tmp_path: Path) -> None:
    require_native()
    stored = replace(located, identity="sha256:ab", store_folder=tmp_path / "of the model")
    (tmp_path / "of the model").mkdir()
    settings = target_settings(replace(PROFILE, runtime="native", native_sidecar=False), 2, stored)
    assert settings == NativeSettings(threads=2, sidecar=False)
    open_model(stored, settings).close()
    assert list((tmp_path / "of the model").iterdir()) == []


def test_what_lies_on_a_card_takes_no_memory_of_the_machine(two_devices: None, located: LocatedModel) -> None:
    def needed(**settings: Any) -> MemoryEstimate:
        wanted = LlamaSettings(kv_type="f16", **settings)
        return memory_needed(located.header, located.weight_bytes, 512, wanted)

    here, whole, some = needed(), needed(device="Vulkan0"), needed(device="vulkan0", gpu_layers=2)
    assert whole.cache_bytes == 0
    assert 0 < whole.weights_bytes < some.weights_bytes < here.weights_bytes
    assert some.cache_bytes == here.cache_bytes / 2, "one block of two"
    assert whole.buffers_bytes == here.buffers_bytes
    assert needed(device="Vulkan1") == here, "a GPU in the processor has none of its own"
    assert needed(device="CUDA7") == here


@pytest.mark.parametrize("runtime", processor_runtimes())
def test_facts_before_and_after_loading_agree(located: LocatedModel, runtime: Any) -> None:
    settings = target_settings(replace(PROFILE, device="cpu", runtime=runtime), 1, located)
    with open_model(located, settings) as model:
        said = describe(located, settings)
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
def test_a_drafter_on_a_gpu_or_npu_has_a_process_of_its_own(isolation: Any, device: str, expected: bool) -> None:
    profile = replace(PROFILE, draft_isolation=isolation)
    assert drafts_in_process(profile, LlamaSettings(device=device)) is expected
    assert drafts_in_process(profile, OnnxSettings(provider=device)) is expected


@pytest.mark.parametrize("runtime", processor_runtimes())
def test_a_process_takes_memory_and_has_times_of_its_own(located: LocatedModel, runtime: str) -> None:
    settings = NativeSettings() if runtime == "native" else LlamaSettings()
    profiles = [replace(PROFILE, draft_isolation=kind) for kind in ("thread", "process")]
    here, apart = (drafter_memory(profile, located, 512, settings) for profile in profiles)
    assert here == memory_needed(located.header, located.weight_bytes, 512, settings)
    assert apart.total_bytes - here.total_bytes == PROCESS_BYTES
    own, other = (describe_drafter(profile, located, settings) for profile in profiles)
    assert own == describe(located, settings)
    forkless = replace(own, can_fork=False, can_branch=False)
    assert other == replace(forkless, settings={**own.settings, "process": True})


@pytest.mark.parametrize("runtime", processor_runtimes())
def test_a_process_is_told_its_runtime(located: LocatedModel, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LoadRequest] = []
    monkeypatch.setattr(opening, "run_in_process", lambda facts, request, _worker: asked.append(request) or facts)
    profile = replace(PROFILE, draft_isolation="process", draft_device="cpu", draft_runtime=runtime)
    settings = drafter_settings(profile, 2, located)
    facts: Any = open_drafter(profile, located, settings, WorkerSettings())
    (request,) = asked
    assert (request.runtime, facts.runtime) == (runtime, runtime)
    assert request.settings == asdict(settings)
    assert (request.path, request.name, request.sha256) == (located.path, located.name, located.identity)
