"""Compiles the kernels while edgespec is being built or installed, also in place for an editable installation.

A wheel with the library fits every Python of its platform, since the library knows nothing of Python. Where it does
not compile the wheel is a pure one with a note in it, and everything but the native runtime works.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsBuildHook(BuildHookInterface):  # type: ignore[type-arg,misc]
    """Runs before a wheel, editable or not, is put together."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        kernels = Path(self.root) / "edgespec" / "kernels"
        compiling = _load(kernels / "compile.py")
        reason = compiling.build_in_place()
        name = compiling.LIBRARY_NAME if reason is None else compiling.NOTE_NAME
        # Made by the build and ignored by git, so nothing else would take it along.
        build_data["artifacts"].append(f"/edgespec/kernels/{name}")
        if reason is None:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
        else:
            self.app.display_warning(f"edgespec is built without its native runtime: {reason}")


def _load(path: Path) -> ModuleType:
    """The module at ``path``; the package around it may lack what it needs to be imported."""
    spec = importlib.util.spec_from_file_location("edgespec_kernels_compile", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 (a path of ours)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
