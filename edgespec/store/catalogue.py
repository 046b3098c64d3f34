"""The catalogue: what edgespec knows by name, read from ``catalogue.toml`` and checked key by key."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias, TypeVar

from edgespec.errors import ModelNotFoundError, ProfileError
from edgespec.files.checked import Check, Range, WrongValueError, read, shown
from edgespec.store.references import HubFile, ModelSpec, PackageParts, Source

SCHEMA_VERSION = 1
T = TypeVar("T")

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*[a-z0-9]")
# A hint names at most this many models: two are read, ten are not.
_MOST_OTHERS = 2


_Name: TypeAlias = Annotated[str, Check(_NAME.fullmatch, "lower-case letters, digits, dots and dashes only")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _HubSource:
    hub: HubFile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    kind: Literal["model", "prompts"]
    file_name: Annotated[str, Check(lambda name: name and not set(name) & {"/", "\\"}, "a plain name")]
    licence: str
    description: str
    bytes: Annotated[int, Range(1)]
    chat: bool
    drafter: str | None = None
    notes: str = ""
    sources: tuple[_HubSource, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Catalogue:
    schema_version: int
    models: dict[_Name, _Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mirrors:
    schema_version: int
    models: dict[str, PackageParts]


@cache
def catalogue() -> Mapping[str, ModelSpec]:
    """Every known model and prompt set by name, in the file's order. Raises ProfileError for an invalid file."""
    folders = ("edgespec.store", "edgespec.store.mirrors")
    texts = (resources.files(each).joinpath("catalogue.toml").read_text(encoding="utf-8") for each in folders)
    return MappingProxyType(parse_catalogue(*texts))


def lookup(
    name: str, *, to_fetch: bool = False, others: Mapping[str, str] | None = None, here: Sequence[str] = ()
) -> ModelSpec:
    """The entry called ``name``. Raises ModelNotFoundError, whose hint has the nearest names.

    ``to_fetch``: the caller wants something to download, so the hint offers no local paths.
    ``others`` are MODEL arguments of models outside the catalogue, by the names that users may try. ``here`` are
    those of another program's models on this machine, PROGRAM:NAME.
    """
    known = catalogue()
    if name in known:
        return known[name]
    names = [each for each, spec in known.items() if spec.kind == "model"]
    tried = name.lower()
    near = [each for each in (*names, *here) if _named(each).startswith(tried)][:_MOST_OTHERS]
    elsewhere = sorted((each for each in others or {} if each.startswith(tried)), key=len)
    near = near or [(others or {})[each] for each in elsewhere[:_MOST_OTHERS]]
    close = {_named(each): each for each in (*here, *names)}
    near = near or [close[each] for each in difflib.get_close_matches(tried, list(close), n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known names: {', '.join(names)}."
    raise ModelNotFoundError(
        f"no model is called {name!r} in the catalogue" + ("" if to_fetch else ", and no such file is here"),
        hint=f"{hint} {'' if to_fetch else 'A path to a .gguf file, ollama:NAME or '}hf:ORG/REPO works too.",
    )


def _named(argument: str) -> str:
    """What a user may call the model of a MODEL argument, in small letters."""
    return argument.removeprefix("ollama:").lower()


def parse_catalogue(text: str, mirrors: str) -> dict[str, ModelSpec]:
    """Read a catalogue and its mirrors from TOML. Raises ProfileError, which names the invalid entry and key."""
    models = read_table(_Catalogue, "the catalogue", text).models
    mirrored = read_table(_Mirrors, "the catalogue of mirrors", mirrors).models
    specs = {name: _model(name, entry, mirrored.pop(name, None)) for name, entry in models.items()}
    if mirrored:
        raise ProfileError(f"the catalogue of mirrors: {next(iter(mirrored))!r} is not a known model")
    for spec in specs.values():
        if spec.drafter is not None and (spec.drafter not in specs or specs[spec.drafter].kind != "model"):
            raise ProfileError(f"catalogue entry {spec.name!r}: its drafter {spec.drafter!r} is not a known model")
    return specs


def _model(name: str, entry: _Entry, mirror: PackageParts | None) -> ModelSpec:
    if mirror is not None:
        sizes = [part.bytes for part in mirror.parts if part.bytes is not None]
        if len(sizes) == len(mirror.parts) and sum(sizes) != mirror.bytes:
            raise ProfileError(f"catalogue entry {name!r}: its parts do not add up to {mirror.bytes} bytes")
    sources: list[Source] = [source.hub for source in entry.sources]
    sources += [] if mirror is None else [mirror]
    if not sources:
        raise ProfileError(f"catalogue entry {name!r}: it needs a source or a mirror")
    return ModelSpec(
        name=name,
        kind=entry.kind,
        file_name=entry.file_name,
        licence=entry.licence,
        description=entry.description,
        sources=tuple(sources),
        bytes=entry.bytes,
        drafter=entry.drafter,
        chat=entry.chat,
        notes=entry.notes,
    )


def read_table(record: type[T], what: str, text: str) -> T:
    """A table of ours in TOML as a ``record``. Raises ProfileError, which calls the table ``what``."""
    try:
        document = tomllib.loads(text)
        version = document.get("schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            reason = f"has schema_version {shown(version)}, this edgespec reads {SCHEMA_VERSION}"
            raise ProfileError(f"{what} {reason}", hint="update edgespec")
        return read(record, document)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{what} is not valid TOML: {error}") from error
    except WrongValueError as error:
        raise ProfileError(f"{what}: {error}", hint=error.hint) from error
