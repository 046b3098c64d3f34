"""Add the kernels' library to a wheel while edgespec is built or installed, or next to the sources if editable.

A wheel with the library works with every Python of its platform, since the library does not depend on Python. If the
library does not compile, the wheel is a pure one with a note, and everything but the native runtime works. The
sources are only read, except in an editable installation, whose library lies next to them.

scripts/build_wheels.py compiles for other systems and passes the result here:

    EDGESPEC_WHEEL_LIBRARY=FILE   take this library and the digest next to it, compile nothing
    EDGESPEC_WHEEL_PLATFORM=TAG   the platform tag of the wheel with it
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsBuildHook(BuildHookInterface):  # type: ignore[type-arg,misc]
    """Runs before and after a wheel, editable or not, is built."""

    PLUGIN_NAME = "custom"
    _place: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        kernels = Path(self.root) / "edgespec" / "kernels"
        compiling, binaries = _load(kernels / "compile.py"), _load(kernels / "binary.py")
        given = os.environ.get("EDGESPEC_WHEEL_LIBRARY")
        reason: str | None = None
        if version == "editable":
            reason = compiling.build_in_place()
            library = kernels / compiling.LIBRARY_NAME
        elif given:
            library = Path(given)
        else:
            self._place = tempfile.TemporaryDirectory()
            reason = compiling.build(Path(self._place.name))
            library = Path(self._place.name, compiling.LIBRARY_NAME)
        note = library.with_name(compiling.NOTE_NAME)
        made = [library, compiling.digest_path(library)] if reason is None else [note] if note.is_file() else []
        if version != "editable":
            build_data["force_include"].update({str(each): f"edgespec/kernels/{each.name}" for each in made})
        if reason is not None:
            self.app.display_warning(f"edgespec is built without its native runtime: {reason}")
            return
        binary = binaries.read_binary(library) or binaries.this_process()
        tag = os.environ.get("EDGESPEC_WHEEL_PLATFORM") or binaries.platform_tag(binary)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._place is not None:
            self._place.cleanup()


def _load(path: Path) -> ModuleType:
    """The module at ``path``, loaded without its package, whose dependencies may be missing."""
    name = f"edgespec_kernels_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 (a path of ours)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
