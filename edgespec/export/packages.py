"""Imports of optional packages that only exports need."""

from __future__ import annotations

import importlib
from typing import Any

from edgespec.errors import RuntimeUnavailableError
from edgespec.files.installation import install_command


def require(name: str, purpose: str = "exporting") -> Any:
    """Import a package. Raises RuntimeUnavailableError, with the command that installs it, if the import fails."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"{purpose} needs the package {name}, which cannot be imported: {error}",
            hint=install_command("export"),
        ) from error
