"""Exports described by keyword arguments."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from edgespec.export.provenance import Provenance

_FIELDS = {field.name for field in fields(Provenance)}


def described(more: dict[str, Any], **defaults: Any) -> tuple[Provenance, dict[str, Any]]:
    """The provenance among the arguments of an export, and the other arguments."""
    given = {**defaults, **more}
    own = {name: given.pop(name) for name in list(given) if name in _FIELDS}
    return Provenance(**own), given
