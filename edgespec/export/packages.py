"""Imports of optional packages that only exports need."""

from __future__ import annotations

import importlib
from typing import Any

from edgespec.errors import RuntimeUnavailableError
from edgespec.export.provenance import KEEP
from edgespec.files.installation import install_command
from edgespec.runtimes.llama.library import load


def require_for(to: str, quant: str) -> None:
    """Raise RuntimeUnavailableError for a missing package that an export to ``to`` as ``quant`` needs."""
    if to == "gguf" and quant != KEEP:
        load()  # its extra has the package gguf too
    require("gguf")
    if to == "onnx":
        require("onnx", "exporting to ONNX")


def require(name: str, purpose: str = "exporting") -> Any:
    """Import a package. Raises RuntimeUnavailableError, with the command that installs it, if the import fails."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"{purpose} needs the package {name}, which cannot be imported: {error}",
            hint=install_command("export"),
        ) from error
