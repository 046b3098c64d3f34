"""Identity of the GPU software outside our runtimes: drivers, libraries and the variables that affect them."""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# Prefixes of variables with which users choose other kernels or another driver.
_VARIABLES = (
    "AMD_VULKAN",
    "ANV_",
    "CUBLAS",
    "GGML_",
    "HIPBLAS",
    "HSA_OVERRIDE",
    "INTEL_",
    "MESA_",
    "MVK_CONFIG",
    "NVIDIA_TF32",
    "RADV_",
    "ROCBLAS",
    "VK_DRIVER_FILES",
    "VK_ICD_FILENAMES",
    "VK_LOADER_DRIVERS",
)

# Kernel modules with a separate version; the others have the kernel's.
_MODULES = ("amdgpu", "i915", "nvidia", "xe")

# Libraries of the GPU's maker that a runtime has loaded.
_MAKERS_LIBRARY = re.compile(r"lib(amdhip|cublas|cuda|cudart|hipblas|rocblas|ze_loader)[^/]*\.so[^/]*$")

# Windows' key of the display adapters: each has a numbered key below it.
_ADAPTERS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"

_ICD_FOLDERS = ("etc/vulkan/icd.d", "usr/local/share/vulkan/icd.d", "usr/share/vulkan/icd.d")
_LIBRARY_FOLDERS = (
    "usr/lib",
    "usr/lib64",
    "usr/local/lib",
    *(f"usr/lib/{kind}-linux-gnu" for kind in ("x86_64", "aarch64")),
)


@functools.cache
def gpu_drivers() -> str:
    """``driver_identity`` of this process, computed once so that it cannot change within a process."""
    return driver_identity()


def driver_identity(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> str:
    """A short digest that changes whenever GPU software changes that may affect a row's bits.

    A driver compiles shaders and brings its own kernels, so the same program may round differently after an update.
    Linux reports versions and files, Windows versions; on macOS the system's version is used for everything.
    """
    digest = hashlib.sha256()
    registered = _registered() if sys.platform == "win32" else ()
    for part in (
        *_system(),
        *registered,
        *_modules(root),
        *_vulkan(root, environ),
        *_loaded(root),
        *_chosen(environ),
    ):
        digest.update(f"{part}\n".encode("utf-8", "replace"))
    return digest.hexdigest()[:12]


def _system() -> Iterator[str]:
    yield f"{platform.system()} {platform.release()} {platform.mac_ver()[0] or platform.version()}"


def _registered() -> Iterator[str]:
    winreg: Any = importlib.import_module("winreg")
    with suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _ADAPTERS) as adapters:
        for index in itertools.count():
            name = winreg.EnumKey(adapters, index)  # raises OSError after the last
            with suppress(OSError), winreg.OpenKey(adapters, name) as adapter:  # one of the keys is the system's own
                yield f"{name} {winreg.QueryValueEx(adapter, 'DriverVersion')[0]}"


def _modules(root: Path) -> Iterator[str]:
    for path in (root / "proc/driver/nvidia/version", *(root / f"sys/module/{name}/version" for name in _MODULES)):
        with suppress(OSError):
            yield f"{path.parent.name} {path.read_text(encoding='utf-8', errors='replace')}"


def _vulkan(root: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Drivers that Vulkan's loader would load, with their files: a package update may keep the name."""
    manifests = [path for folder in _ICD_FOLDERS for path in sorted((root / folder).glob("*.json"))]
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        manifests += [Path(path) for path in environ.get(name, "").split(os.pathsep) if path]
    for manifest in manifests:
        with suppress(OSError, ValueError, KeyError, TypeError):
            text = manifest.read_text(encoding="utf-8")
            yield text
            library = str(json.loads(text)["ICD"]["library_path"])
            if "/" in library:
                yield from _file(root / library.lstrip("/") if library.startswith("/") else manifest.parent / library)
            else:
                for folder in _LIBRARY_FOLDERS:
                    yield from _file(root / folder / library)


def _loaded(root: Path) -> Iterator[str]:
    """The maker's libraries that are loaded already, such as those a runtime is linked with."""
    with suppress(OSError):
        maps = (root / "proc/self/maps").read_text(encoding="utf-8", errors="replace")
        paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")}
        for path in sorted(path for path in paths if _MAKERS_LIBRARY.search(path)):
            yield from _file(root / path.lstrip("/"))


def _file(path: Path) -> Iterator[str]:
    with suppress(OSError):
        found = path.stat()
        yield f"{path.resolve().name} {found.st_size} {found.st_mtime_ns}"


def _chosen(environ: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{name}={environ[name]}" for name in sorted(environ) if name.startswith(_VARIABLES))
