"""What is known about a llama.cpp model before loading: its possible settings and its facts."""

from __future__ import annotations

from dataclasses import replace

from edgespec.errors import InvalidRequestError
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.model_file import LocatedModel
from edgespec.hardware.drivers import gpu_drivers
from edgespec.interfaces.model import ModelFacts
from edgespec.runtimes.llama.context import KV_TYPES, LlamaSettings
from edgespec.runtimes.llama.devices import find_device
from edgespec.runtimes.llama.library import LlamaLibrary, load
from edgespec.runtimes.runtime import Device, mixture_of


def describe_model(file: LocatedModel, settings: LlamaSettings) -> ModelFacts:
    """The facts of a model as ``load_model`` would report them, from its header alone.

    Raises InvalidRequestError, and RuntimeUnavailableError if llama.cpp or the device is missing.
    """
    header = file.header
    library = load()
    settings = without_tiles(usable_settings(settings, header), library)
    device = device_of(library, settings)
    said = settings.as_json()
    if device is not None:
        # A name such as Vulkan0 counts devices in the order they were found: later it may be another card.
        said["device_description"] = device.description
        said["drivers"] = gpu_drivers()
    return ModelFacts(
        name=file.name,
        sha256=file.identity,
        architecture=header.architecture,
        runtime="llama",
        build=library.build,
        device="cpu" if device is None else device.name,
        threads=settings.threads,
        vocabulary_size=header.vocabulary_size,
        trained_context_length=header.context_length,
        weight_bytes=header.tensor_bytes,
        bytes_per_forward=header.bytes_per_forward,
        kv_bytes_per_token=header.kv_bytes_per_token(KV_TYPES[settings.kv_type][1]),
        kv_type=settings.kv_type,
        mask_id=header.mask_token_id,
        mixture=mixture_of(header),
        settings=said,
    )


def usable_settings(settings: LlamaSettings, header: GgufHeader) -> LlamaSettings:
    """The settings this model can have: a cache type that fits, and one spelling for each placement.

    Raises InvalidRequestError.
    """
    settings = _plainly_placed(settings, header)
    if "q" not in settings.kv_type:
        return settings
    if not settings.flash_attention:
        raise InvalidRequestError(f"a {settings.kv_type} cache needs flash attention", hint="use cache type f16")
    # Quantised caches hold blocks of 32 along a head; llama.cpp accepts no other length.
    if header.key_length % 32 or header.value_length % 32:
        return replace(settings, kv_type="f16")
    return settings


def without_tiles(settings: LlamaSettings, library: LlamaLibrary) -> LlamaSettings:
    """The settings with weights as in the file where ``library`` would multiply repacked ones by AMX.

    Compiled by GCC 12, llama.cpp lacks the stores that configure the tiles: the first prompt ends the process
    with an illegal instruction. The library does not say which compiler made it.
    """
    return replace(settings, repack=False) if library.has_tiles else settings


def device_of(library: LlamaLibrary, settings: LlamaSettings) -> Device | None:
    """The device of these settings; None for the CPU, for which no driver is asked.

    Raises RuntimeUnavailableError if this build does not have the device.
    """
    if settings.device == "cpu":
        return None
    return find_device(library.devices(with_memory=False), settings.device)


def _plainly_placed(settings: LlamaSettings, header: GgufHeader) -> LlamaSettings:
    """Write zero layers on a device as the CPU, and all layers as None: one class, one key for measurements."""
    layers = settings.gpu_layers
    if settings.device.lower() == "cpu" or layers == 0:
        return replace(settings, device="cpu", gpu_layers=None)
    if layers is not None and layers > header.block_count:  # plus one for the head
        return replace(settings, gpu_layers=None)
    return settings
