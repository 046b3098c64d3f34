"""The only module that loads ONNX Runtime: availability, build identity, execution providers.

A provider is built into the installed onnxruntime, or it is a plugin: a separate wheel whose library is registered
with the process. Plugins are registered only when a caller asks for more than the CPU. The native library has one
environment per process, so what is loaded and registered here is process-wide by nature.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from edgespec.errors import RuntimeUnavailableError
from edgespec.files.installation import install_command

ProviderKind = Literal["cpu", "gpu", "npu", "other"]

# The first release whose CPU provider multiplies by 8-bit blocks, and the first that supports plugins.
MINIMUM_VERSION = (1, 22)

CPU = "CPUExecutionProvider"

# OpenVINO, Core ML and NNAPI choose among processor, GPU and NPU themselves, so their kind is unknown.
_KNOWN: Mapping[str, tuple[str, ProviderKind]] = {
    CPU: ("cpu", "cpu"),
    "XnnpackExecutionProvider": ("XNNPACK", "cpu"),
    "DnnlExecutionProvider": ("oneDNN", "cpu"),
    "CUDAExecutionProvider": ("CUDA", "gpu"),
    "TensorrtExecutionProvider": ("TensorRT", "gpu"),
    "NvTensorRTRTXExecutionProvider": ("TensorRT-RTX", "gpu"),
    "ROCMExecutionProvider": ("ROCm", "gpu"),
    "MIGraphXExecutionProvider": ("MIGraphX", "gpu"),
    "DmlExecutionProvider": ("DirectML", "gpu"),
    "WebGpuExecutionProvider": ("WebGPU", "gpu"),
    "QNNExecutionProvider": ("QNN", "npu"),
    "VitisAIExecutionProvider": ("VitisAI", "npu"),
    "CANNExecutionProvider": ("CANN", "npu"),
    "OpenVINOExecutionProvider": ("OpenVINO", "other"),
    "CoreMLExecutionProvider": ("CoreML", "other"),
    "NnapiExecutionProvider": ("NNAPI", "other"),
}

# Sends the work to a service: not a device of this machine.
_REMOTE = frozenset({"AzureExecutionProvider"})

# Names of plugin modules: the convention of their packaging guide, and one older wheel.
_PLUGIN_PREFIX = "onnxruntime_ep_"
_OTHER_PLUGINS = ("onnxruntime_qnn",)

_HARDWARE: Mapping[str, ProviderKind] = {"CPU": "cpu", "GPU": "gpu", "NPU": "npu"}

_LOADING = threading.Lock()


def install_hint() -> str:
    """How to install ONNX Runtime for this edgespec."""
    return f"install it with `{install_command('onnx')}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """An execution provider of ONNX Runtime.

    ``name`` is its name on the command line, ``provider`` its name in ONNX Runtime. For a plugin, ``ep_devices``
    holds the native descriptor of the device, and ``plugin`` the module and its version.
    """

    name: str
    provider: str
    kind: ProviderKind
    description: str
    plugin: str | None = None
    ep_devices: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class OnnxLibrary:
    """The onnxruntime module, and what identifies its build."""

    api: Any
    version: str
    build: str


def load() -> OnnxLibrary:
    """Import ONNX Runtime, once per process.

    Raises RuntimeUnavailableError, with the reason and what to install, if it is missing, broken or too old.
    """
    with _LOADING:
        return _load()


def list_devices() -> tuple[Provider, ...]:
    """Every available provider, the CPU first. Registers installed plugins with the process.

    A built-in provider means that its code is available; loading a model shows whether the hardware is. Raises
    RuntimeUnavailableError.
    """
    with _LOADING:
        return _discover()[0]


def broken_plugins() -> Mapping[str, str]:
    """Why an installed plugin cannot be used, by module name. Raises what ``load`` raises."""
    with _LOADING:
        return _discover()[1]


def find_provider(name: str) -> Provider:
    """The provider with this name on the command line, in upper or lower case.

    Raises RuntimeUnavailableError, whose hint names the available providers.
    """
    wanted = name.lower()
    if wanted == "cpu":
        load()
        return _built_in(CPU)
    providers = list_devices()
    for provider in providers:
        if wanted in (provider.name.lower(), provider.provider.lower()):
            return provider
    known = ", ".join(provider.name for provider in providers)
    broken = "".join(f"; {module}: {reason}" for module, reason in broken_plugins().items())
    raise RuntimeUnavailableError(
        f"this onnxruntime has no execution provider {name!r}", hint=f"providers here: {known}{broken}"
    )


@functools.cache
def _load() -> OnnxLibrary:
    if importlib.util.find_spec("onnxruntime") is None:
        raise RuntimeUnavailableError("onnxruntime is not installed", hint=install_hint())
    try:
        api: Any = importlib.import_module("onnxruntime")
        version, info = str(api.__version__), str(api.get_build_info())
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise RuntimeUnavailableError(
            f"onnxruntime is installed but does not load: {error}", hint=install_hint()
        ) from error
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MINIMUM_VERSION:
        needed = ".".join(map(str, MINIMUM_VERSION))
        raise RuntimeUnavailableError(
            f"onnxruntime {version} is too old; edgespec needs {needed} or newer", hint=install_hint()
        )
    with contextlib.suppress(AttributeError, RuntimeError):
        api.disable_telemetry_events()  # builds for Windows report to the system; edgespec has no telemetry
    # Builds of one version may round differently: the commit and the compiler's flags identify a build.
    return OnnxLibrary(api=api, version=version, build=f"{version}+{hashlib.sha256(info.encode()).hexdigest()[:12]}")


@functools.cache
def _discover() -> tuple[tuple[Provider, ...], Mapping[str, str]]:
    """The providers, and the reason for each unusable plugin. The caller holds the lock."""
    api = _load().api
    found = [_built_in(name) for name in api.get_available_providers() if name not in _REMOTE]
    found.sort(key=lambda provider: provider.provider != CPU)
    broken: dict[str, str] = {}
    for module in installed_plugins():
        try:
            found += _plugin(api, module)
        except Exception as error:  # a third-party module and native library may raise anything
            broken[module] = " ".join(str(error).split()) or type(error).__name__
    return tuple(found), MappingProxyType(broken)


def _built_in(provider: str) -> Provider:
    name, kind = _named(provider)
    return Provider(name=name, provider=provider, kind=kind, description=f"{provider}, part of this onnxruntime")


def _named(provider: str) -> tuple[str, ProviderKind]:
    return _KNOWN.get(provider, (provider.removesuffix("ExecutionProvider"), "other"))


def installed_plugins() -> list[str]:
    """The modules of the installed plugins, which are imported by name."""
    names = {module.name for module in pkgutil.iter_modules() if module.name.startswith(_PLUGIN_PREFIX)}
    names.update(name for name in _OTHER_PLUGINS if importlib.util.find_spec(name) is not None)
    return sorted(names)


def _plugin(api: Any, module_name: str) -> list[Provider]:
    """Register a plugin, unless other code in this process has, and describe each device it found."""
    module: Any = importlib.import_module(module_name)
    names = set(module.get_ep_names()) if hasattr(module, "get_ep_names") else {module.get_ep_name()}
    if not any(device.ep_name in names for device in api.get_ep_devices()):
        api.register_execution_provider_library(module_name, str(module.get_library_path()))
    origin = _origin(module_name)
    found: dict[str, Provider] = {}
    for device in api.get_ep_devices():
        if device.ep_name in names:
            provider = _plugin_provider(device, origin, taken=found)
            found[provider.name] = provider
    if not found:
        raise RuntimeUnavailableError("it finds none of its devices on this machine")
    return list(found.values())


def _plugin_provider(device: Any, origin: str, *, taken: Mapping[str, Provider]) -> Provider:
    name, kind = _named(device.ep_name)
    hardware = str(getattr(device.device.type, "name", device.device.type))
    if kind == "other":  # one provider for several kinds of hardware: name each kind
        name, kind = f"{name}-{hardware}", _HARDWARE.get(hardware, "other")
    others = sum(other == name or other.startswith(f"{name}:") for other in taken)
    return Provider(
        name=f"{name}:{others}" if others else name,
        provider=device.ep_name,
        kind=kind,
        description=f"{device.ep_name} on the {hardware} of {device.device.vendor or 'an unnamed vendor'} ({origin})",
        plugin=origin,
        ep_devices=(device,),
    )


def distribution_of(module_name: str) -> str:
    """The distribution that a plugin's module is installed from."""
    return module_name.replace("_", "-")


def _origin(module_name: str) -> str:
    try:
        return f"{module_name} {importlib.metadata.version(distribution_of(module_name))}"
    except importlib.metadata.PackageNotFoundError:
        return module_name
