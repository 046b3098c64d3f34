"""What an export's manifest says about the model it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from edgespec.errors import InvalidRequestError
from edgespec.files.export_folder import SCHEMA_VERSION

KEEP = "keep"
"""The ``quant`` of weights that keep their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The model that an export is made from, and how its weights are stored.

    ``sha256`` None: the source is not hashed. ``notes`` are plain JSON, how the rows of a trimmed head were chosen;
    they become the manifest's ``trim``. Raises InvalidRequestError for an empty name or other notes.
    """

    name: str
    sha256: str | None = None
    licence: str | None = None
    quant: str = KEEP
    notes: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidRequestError("a model needs a name")
        self._trim()

    def _trim(self) -> dict[str, Any]:
        """The notes, as JSON will return them."""
        if self.notes is None:
            return {}
        try:
            return {"trim": json.loads(json.dumps(self.notes, allow_nan=False))}
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"the notes for the manifest are not plain JSON: {error}") from error

    def manifest(
        self,
        kind: str,
        *,
        source_bytes: int,
        architecture: str,
        vocabulary_size: int,
        mask_token_id: int | None,
        tools: Mapping[str, str],
    ) -> dict[str, Any]:
        """The part that the manifests of all exports share. ``tools``: versions besides the gguf package's.

        ``mask_token_id`` is None except for one-pass drafters.
        """
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": kind,
            "source": {"name": self.name, "sha256": self.sha256, "bytes": source_bytes},
            "edgespec": metadata.version("edgespec"),
            "architecture": architecture,
            "vocabulary_size": vocabulary_size,
            "quant": self.quant,
            "licence": self.licence,
            "tools": {"gguf": metadata.version("gguf"), **tools},
            **({} if mask_token_id is None else {"mask_token_id": mask_token_id}),
            **self._trim(),
        }
