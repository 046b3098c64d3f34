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

SCHEMA_VERSION = 1

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*[a-z0-9]")
# A hint names at most this many repositories: two are read, ten are not.
_MOST_OTHERS = 2
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
_REQUIRED = {"kind", "file_name", "licence", "description", "bytes", "chat"}
_HUB_KEYS = {"repo": str, "filename": str, "revision": str}
_PARTS_KEYS = {"bytes": int, "sha256": str, "parts": list}
_PART_KEYS = {"package": str, "version": str, "member": str, "bytes": int, "sha256": str}


@cache
def catalogue() -> Mapping[str, ModelSpec]:
    """Every known model and prompt set by name, in the file's order. Raises ProfileError for an invalid file."""
    folders = ("edgespec.store", "edgespec.store.mirrors")
    texts = (resources.files(each).joinpath("catalogue.toml").read_text(encoding="utf-8") for each in folders)
    return MappingProxyType(parse_catalogue(*texts))


def lookup(name: str, *, to_fetch: bool = False, others: Mapping[str, str] | None = None) -> ModelSpec:
    """The entry called ``name``. Raises ModelNotFoundError, whose hint has the nearest names.

    ``to_fetch``: the caller wants something to download, so the hint offers prompt sets too and no local paths.
    ``others`` are MODEL arguments of models outside the catalogue, by the names that users may try.
    """
    known = catalogue()
    if name in known:
        return known[name]
    names = [each for each, spec in known.items() if to_fetch or spec.kind == "model"]
    tried = name.lower()
    near = [each for each in names if each.startswith(tried)]
    elsewhere = sorted((each for each in others or {} if each.startswith(tried)), key=len)
    near = near or [(others or {})[each] for each in elsewhere[:_MOST_OTHERS]]
    near = near or difflib.get_close_matches(tried, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known names: {', '.join(names)}."
    raise ModelNotFoundError(
        f"no model is called {name!r} in the catalogue",
        hint=f"{hint} {'' if to_fetch else 'A path to a .gguf file or '}hf:ORG/REPO works too.",
    )


def parse_catalogue(text: str, mirrors: str) -> dict[str, ModelSpec]:
    """Read a catalogue and its mirrors from TOML. Raises ProfileError, which names the invalid entry and key."""
    models, mirrored = _read("the catalogue", text), _read("the catalogue of mirrors", mirrors)
    specs = {name: _model(name, table, mirrored.pop(name, None)) for name, table in models.items()}
    if mirrored:
        raise ProfileError(f"the catalogue of mirrors: {next(iter(mirrored))!r} is not a known model")
    for spec in specs.values():
        if spec.drafter is not None and (spec.drafter not in specs or specs[spec.drafter].kind != "model"):
            raise ProfileError(f"catalogue entry {spec.name!r}: its drafter {spec.drafter!r} is not a known model")
    return specs


def _read(what: str, text: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{what} is not valid TOML: {error}") from error
    check_table(what, document, {"schema_version": int, "models": dict}, {"schema_version", "models"})
    if document["schema_version"] != SCHEMA_VERSION:
        raise ProfileError(
            f"{what} has schema_version {document['schema_version']}, this edgespec reads {SCHEMA_VERSION}",
            hint="update edgespec",
        )
    models: dict[str, Any] = document["models"]
    return models


def _model(name: str, table: Any, mirror: Any) -> ModelSpec:
    where = f"catalogue entry {name!r}"
    if not _NAME.fullmatch(name):
        raise ProfileError(f"{where}: a name has lower-case letters, digits, dots and dashes only")
    check_table(where, table, _MODEL_KEYS, _REQUIRED)
    if table["kind"] not in ("model", "prompts"):
        raise ProfileError(f"{where}: kind is {table['kind']!r}, neither 'model' nor 'prompts'")
    sources: list[Source] = [_hub_source(where, source) for source in table.get("sources", [])]
    sources += [] if mirror is None else [_mirror(where, mirror)]
    if table["bytes"] <= 0 or "/" in table["file_name"] or "\\" in table["file_name"] or not sources:
        raise ProfileError(f"{where}: bytes must be positive, file_name a plain name, and a source or a mirror given")
    return ModelSpec(
        name=name,
        kind=table["kind"],
        file_name=table["file_name"],
        licence=table["licence"],
        description=table["description"],
        sources=tuple(sources),
        bytes=table["bytes"],
        drafter=table.get("drafter"),
        chat=table["chat"],
        notes=table.get("notes", ""),
    )


def _hub_source(where: str, table: Any) -> HubFile:
    check_table(f"{where}, source", table, {"hub": dict}, {"hub"})
    hub = table["hub"]
    check_table(f"{where}, hub source", hub, _HUB_KEYS, {"repo", "filename"})
    return HubFile(hub["repo"], hub["filename"], hub.get("revision", "main"))


def _mirror(where: str, table: Any) -> PackageParts:
    check_table(f"{where}, mirror", table, _PARTS_KEYS, set(_PARTS_KEYS))
    parts = []
    for number, part in enumerate(table["parts"], start=1):
        check_table(f"{where}, part {number}", part, _PART_KEYS, {"package", "version", "member"})
        parts.append(PackagePart(**part))
    known_sizes = [part.bytes for part in parts if part.bytes is not None]
    if not parts or (len(known_sizes) == len(parts) and sum(known_sizes) != table["bytes"]):
        raise ProfileError(f"{where}: its parts do not add up to {table['bytes']} bytes")
    return PackageParts(tuple(parts), table["bytes"], table["sha256"])


def check_table(where: str, table: Any, keys: Mapping[str, type[Any]], required: set[str]) -> None:
    """Check that every key is known and has its type, that no key is missing, and that every sha256 is well formed.

    Raises ProfileError.
    """
    if not isinstance(table, dict):
        raise ProfileError(f"{where}: expected a table")
    for key, value in table.items():
        if key not in keys:
            raise ProfileError(f"{where}: unknown key {key!r}", hint=f"known keys: {', '.join(keys)}")
        # In Python a bool is an int; in TOML it is not.
        if not isinstance(value, keys[key]) or (keys[key] is int and isinstance(value, bool)):
            raise ProfileError(f"{where}: {key} must be of type {keys[key].__name__}")
        if key == "sha256" and not _SHA256.fullmatch(str(value)):
            raise ProfileError(f"{where}: sha256 must be 64 lower-case hex digits")
    if missing := sorted(required - set(table)):
        raise ProfileError(f"{where}: missing key {missing[0]!r}")
