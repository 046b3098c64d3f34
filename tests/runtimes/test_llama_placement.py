"""Where a model is placed: the parameters that reach llama.cpp's native calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import InvalidRequestError, MemoryLimitError, ModelFileError, RuntimeUnavailableError
from edgespec.files.gguf.header import read_header
from edgespec.hardware.drivers import gpu_drivers
from edgespec.runtimes.llama import library
from edgespec.runtimes.llama.context import AbortFlag, LlamaSettings, NativeContext
from edgespec.runtimes.llama.devices import EVERYTHING
from edgespec.runtimes.llama.facts import describe_model, usable_settings
from edgespec.runtimes.llama.library import LlamaLibrary, load
from edgespec.runtimes.llama.runtime import LlamaRuntime
from tests.runtimes.test_llama_devices import handles
from tests.support.loading import load_model, located
from tests.support.native_devices import gpu

CARD, OTHER, BLAS = gpu("Vulkan0"), gpu("Vulkan1"), gpu("BLAS", kind="accel")


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with two graphics cards; asking for more than their names fails the test."""

    def devices(_library: LlamaLibrary, *, with_memory: bool = True) -> tuple[object, ...]:
        assert not with_memory, "loading by name wakes no driver up"
        return (gpu("cpu", kind="cpu"), CARD, OTHER, BLAS)

    monkeypatch.setattr(LlamaLibrary, "devices", devices)


class Recorder:
    """Replaces a native function: records its arguments, then calls the real function or returns null."""

    def __init__(self, note: Callable[[Any], dict[str, Any]], real: Callable[..., Any] | None) -> None:
        self.note, self.real = note, real
        self.seen: list[dict[str, Any]] = []

    def __call__(self, first: Any, params: Any) -> Any:
        self.seen.append(self.note(params))
        return None if self.real is None else self.real(first, params)


def model_params(params: Any) -> dict[str, Any]:
    assert params.devices, "a null pointer would mean every device"
    # Read here: the list lives as long as the call.
    return {"devices": handles(SimpleNamespace(devices=params.devices)), "layers": params.n_gpu_layers}


def context_params(params: Any) -> dict[str, Any]:
    return {"offload_kqv": params.offload_kqv, "op_offload": params.op_offload}


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Recorder, Recorder]]:
    def install(*, really: bool) -> tuple[Recorder, Recorder]:
        api = load().api
        loading = Recorder(model_params, api.llama_model_load_from_file if really else None)
        opening = Recorder(context_params, api.llama_init_from_model if really else None)
        monkeypatch.setattr(api, "llama_model_load_from_file", loading)
        monkeypatch.setattr(api, "llama_init_from_model", opening)
        return loading, opening

    return install


# -------------------------------------------------------------------------------------------------- the CPU


@pytest.mark.parametrize(
    "settings",
    [LlamaSettings(), LlamaSettings(device="CPU", gpu_layers=5), LlamaSettings(device="Vulkan0", gpu_layers=0)],
    ids=["by default", "with layers", "none on a card"],
)
def test_a_cpu_model_is_placed_on_no_graphics_card(
    cards: None, tiny_gguf: Path, record: Callable[..., tuple[Recorder, Recorder]], settings: LlamaSettings
) -> None:
    """Native code receives an empty device list, no layers to move, and nothing to offload."""
    loading, opening = record(really=True)
    with load_model(tiny_gguf, settings) as model, model.open(64) as sequence:
        sequence.forward([5, 6, 7], 1)
        assert (model.facts.device, model.settings.device, model.settings.gpu_layers) == ("cpu", "cpu", None)
        assert not {"gpu_layers", "device_description"} & model.facts.settings.keys()
        with model.with_settings(kv_type="f16") as other, other.open(64) as second:
            second.forward([5], 1)
    assert loading.seen == [{"devices": [], "layers": 0}]
    assert opening.seen == [{"offload_kqv": False, "op_offload": False}] * 2


def test_loading_on_the_cpu_asks_no_driver(monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path) -> None:
    def devices(_library: LlamaLibrary, *, with_memory: bool = True) -> tuple[object, ...]:
        raise AssertionError("a driver was asked")

    monkeypatch.setattr(LlamaLibrary, "devices", devices)
    with load_model(tiny_gguf, LlamaSettings()) as model:
        assert model.facts.device == "cpu"


@pytest.mark.parametrize("has_tiles", [True, False])
def test_weights_are_repacked_only_by_a_build_without_tiles(
    monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path, has_tiles: bool
) -> None:
    """GCC 12 compiles llama.cpp's code for AMX so that the first prompt ends the process."""
    found = replace(load(), has_tiles=has_tiles)
    monkeypatch.setattr(library, "_load", lambda: found)
    api = load().api
    loading = Recorder(lambda params: {"repacked": params.use_extra_bufts}, api.llama_model_load_from_file)
    monkeypatch.setattr(api, "llama_model_load_from_file", loading)
    with load_model(tiny_gguf, LlamaSettings()) as model:
        assert (model.settings.repack, model.facts.settings["repack"]) == (not has_tiles, not has_tiles)
    assert loading.seen == [{"repacked": not has_tiles}]
    assert [each.repack for each in LlamaRuntime().stable_settings(LlamaSettings())] == (
        [False] if has_tiles else [True, False]
    )


def test_a_build_with_tiles_is_known_by_what_it_says_of_itself() -> None:
    assert load().has_tiles == (b"AMX_INT8 = 1" in load().api.llama_print_system_info())


# ----------------------------------------------------------------------------------------- a graphics card


@pytest.mark.parametrize(
    ("device", "layers", "expected"),
    [
        ("Vulkan0", None, {"devices": [CARD.handle], "layers": EVERYTHING}),
        ("vulkan1", None, {"devices": [OTHER.handle], "layers": EVERYTHING}),
        ("Vulkan0", 1, {"devices": [CARD.handle], "layers": 1}),
        ("Vulkan0", 2, {"devices": [CARD.handle], "layers": 2}),
        ("Vulkan0", 3, {"devices": [CARD.handle], "layers": EVERYTHING}),  # two blocks and the head: all of it
        ("Vulkan0", 40, {"devices": [CARD.handle], "layers": EVERYTHING}),
    ],
)
def test_a_named_graphics_card_is_the_only_device_in_native_code(
    cards: None,
    tiny_gguf: Path,
    record: Callable[..., tuple[Recorder, Recorder]],
    device: str,
    layers: int | None,
    expected: dict[str, Any],
) -> None:
    loading, _ = record(really=False)
    with pytest.raises(ModelFileError, match=rf"could not load it on {device.title()}, which may be too small"):
        load_model(tiny_gguf, LlamaSettings(device=device, gpu_layers=layers))
    assert loading.seen == [expected]


def test_a_models_cache_is_placed_on_the_models_graphics_card(
    record: Callable[..., tuple[Recorder, Recorder]],
) -> None:
    _, opening = record(really=False)
    for device in ("Vulkan0", "cpu"):
        with pytest.raises(MemoryLimitError):
            NativeContext(load().api, None, LlamaSettings(device=device), 64, AbortFlag())
    assert opening.seen == [
        {"offload_kqv": True, "op_offload": True},
        {"offload_kqv": False, "op_offload": False},
    ]


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(("device", "says"), [("CUDA0", "no device 'CUDA0'"), ("BLAS", "cannot hold a model")])
def test_a_device_that_is_not_a_graphics_card_is_refused_before_loading(
    tiny_gguf: Path, record: Callable[..., tuple[Recorder, Recorder]], device: str, says: str
) -> None:
    loading, _ = record(really=False)
    for use in (load_model, lambda path, settings: describe_model(located(path), settings)):
        with pytest.raises(RuntimeUnavailableError, match=says):
            use(tiny_gguf, LlamaSettings(device=device))
    assert loading.seen == []


def test_a_negative_number_of_gpu_layers_is_refused(tiny_gguf: Path) -> None:
    with pytest.raises(InvalidRequestError, match="gpu_layers must be at least 0, not -1"):
        load_model(tiny_gguf, LlamaSettings(gpu_layers=-1))


# --------------------------------------------------------------------------------------- equivalent placements


@pytest.mark.parametrize(
    ("device", "layers", "expected"),
    [
        ("cpu", None, ("cpu", None)),
        ("Cpu", 3, ("cpu", None)),
        ("Vulkan0", 0, ("cpu", None)),
        ("Vulkan0", 1, ("Vulkan0", 1)),
        ("Vulkan0", 2, ("Vulkan0", 2)),
        ("Vulkan0", 3, ("Vulkan0", None)),
        ("Vulkan0", None, ("Vulkan0", None)),
    ],
)
def test_equivalent_placements_get_the_same_settings(
    tiny_gguf: Path, device: str, layers: int | None, expected: tuple[str, int | None]
) -> None:
    settings = usable_settings(LlamaSettings(device=device, gpu_layers=layers), read_header(tiny_gguf))
    assert (settings.device, settings.gpu_layers) == expected
    assert usable_settings(settings, read_header(tiny_gguf)) == settings


@pytest.mark.usefixtures("cards", "llama_repacks")
def test_facts_hold_the_devices_name_and_description(tiny_gguf: Path) -> None:
    """Measurements of one card must not be used for another card with the same name."""
    header = read_header(tiny_gguf)

    def facts(**settings: Any) -> Any:
        return describe_model(located(header), LlamaSettings(**settings))

    some = facts(device="vulkan0", gpu_layers=2)
    assert some.device == "Vulkan0"
    assert some.settings == {
        "flash_attention": True,
        "repack": True,
        "gpu_layers": 2,
        "device_description": "the Vulkan0",
        "drivers": gpu_drivers(),
    }
    assert facts(device="Vulkan0", gpu_layers=9) == facts(device="VULKAN0")
    assert facts(device="Vulkan0").settings["gpu_layers"] == -1
    assert facts(device="Vulkan0", gpu_layers=0) == facts() == facts(device="cpu", gpu_layers=4)
    assert replace(facts(device="Vulkan1"), device="Vulkan0") != facts(device="Vulkan0")
