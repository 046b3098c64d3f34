"""Families of models, read from ``families.toml`` and checked key by key: their drafters and sampling settings."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from edgespec.errors import ProfileError
from edgespec.files.gguf.records import GgufHeader
from edgespec.store.catalogue import catalogue, check_table
from edgespec.store.references import HubFile, HubReference

SCHEMA_VERSION = 1

_FAMILY_KEYS = {
    "name": str,
    "architectures": list,
    "pre": list,
    "vocabulary": list,
    "called": str,
    "not_called": str,
    "sampling": dict,
    "drafters": list,
    "larger": list,
    "why_no_drafter": str,
}
_DRAFTER_KEYS = {
    "name": str,
    "repo": str,
    "filename": str,
    "licence": str,
    "bytes": int,
    "draft_bytes": int,
    "cache_bytes": int,
}
_SAMPLING_KEYS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}

# Longest name that is matched, in characters: file headers are untrusted input, and model names are short.
_LONGEST_NAME = 200

# Suffixes that repositories append to a model's usual name.
_DECORATION = re.compile(r"(-(gguf|instruct|it|chat))+$")
_MAKER = re.compile(r"^(meta|mistralai|google)[-_]")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDrafter:
    """A small model on the hub. ``bytes`` is None where the table states no size.

    ``draft_bytes``: bytes read per draft token. ``cache_bytes``: bytes of the KV cache per token.
    """

    name: str
    repo: str
    filename: str
    licence: str
    draft_bytes: int
    cache_bytes: int
    bytes: int | None = None

    @property
    def model(self) -> str:
        """The MODEL argument that fetches the drafter: its name in the catalogue, else its place on the hub."""
        for name, spec in catalogue().items():
            if HubFile(self.repo, self.filename) in spec.sources:
                return name
        return HubReference(self.repo, filename=self.filename).text


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the models of a family are recognised, and what is known of the family.

    ``vocabulary``: the smallest and the largest vocabulary of the family's files, in tokens. ``sampling``: values of
    Sampling by name, as the model's makers publish them; empty if they publish none. ``larger``: hub repositories of
    larger models.
    """

    name: str
    architectures: frozenset[str]
    pre: frozenset[str]
    vocabulary: tuple[int, int]
    called: re.Pattern[str]
    not_called: re.Pattern[str] | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    drafters: tuple[KnownDrafter, ...] = ()
    larger: tuple[str, ...] = ()
    why_no_drafter: str | None = None

    def has(self, header: GgufHeader, file_name: str) -> bool:
        """Whether a file with this header and name belongs to the family."""
        metadata = header.metadata
        if header.architecture not in self.architectures or "tokenizer.ggml.tokens" not in metadata:
            return False
        least, most = self.vocabulary
        if (
            metadata.get("tokenizer.ggml.pre", "default") not in self.pre
            or not least <= header.vocabulary_size <= most
        ):
            return False
        stated = (metadata.get(f"general.{key}") for key in ("basename", "name"))
        names = [str(name)[:_LONGEST_NAME] for name in (*stated, file_name) if isinstance(name, str)]
        if self.not_called is not None and any(map(self.not_called.search, names)):
            return False
        return any(map(self.called.search, names))


@cache
def families() -> Sequence[Family]:
    """Every known family, in the file's order. Raises ProfileError if the file is invalid."""
    return parse_families(resources.files("edgespec.store").joinpath("families.toml").read_text(encoding="utf-8"))


def family_of(header: GgufHeader, file_name: str, known: Iterable[Family] | None = None) -> Family | None:
    """The first family that a file with this header and name belongs to, or None."""
    return next((each for each in (families() if known is None else known) if each.has(header, file_name)), None)


@cache
def models_by_name() -> Mapping[str, str]:
    """MODEL arguments of models on the hub, by the models' usual names ("qwen3-4b")."""
    found: dict[str, str] = {}
    for family in families():
        for repo in (*(drafter.repo for drafter in family.drafters), *family.larger):
            plain = _MAKER.sub("", _DECORATION.sub("", repo.rpartition("/")[2].lower()))
            found.setdefault(plain, f"hf:{repo}")
    return MappingProxyType(found)


def parse_families(text: str) -> tuple[Family, ...]:
    """Read families from TOML. Raises ProfileError, which names the invalid family and key."""
    what = "the table of families"
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{what} is not valid TOML: {error}") from error
    check_table(what, document, {"schema_version": int, "families": list}, {"schema_version", "families"})
    if document["schema_version"] != SCHEMA_VERSION:
        raise ProfileError(
            f"{what} has schema_version {document['schema_version']}, this edgespec reads {SCHEMA_VERSION}",
            hint="update edgespec",
        )
    return tuple(_family(number, table) for number, table in enumerate(document["families"], start=1))


def _family(number: int, table: Any) -> Family:
    where = f"family {table.get('name', number)!r}" if isinstance(table, dict) else f"family {number}"
    check_table(where, table, _FAMILY_KEYS, {"name", "architectures", "pre", "vocabulary", "called"})
    for key in ("architectures", "pre", "larger"):
        if not all(isinstance(each, str) for each in table.get(key, [])):
            raise ProfileError(f"{where}: {key} must be a list of strings")
    size = table["vocabulary"]
    if len(size) != 2 or not all(type(each) is int for each in size) or not 0 < size[0] <= size[1]:
        raise ProfileError(f"{where}: vocabulary must be the smallest and the largest number of tokens")
    sampling = table.get("sampling", {})
    check_table(f"{where}, sampling", sampling, _SAMPLING_KEYS, set())
    return Family(
        name=table["name"],
        architectures=frozenset(table["architectures"]),
        pre=frozenset(table["pre"]),
        vocabulary=(size[0], size[1]),
        called=_pattern(where, table["called"]),
        not_called=_pattern(where, table["not_called"]) if "not_called" in table else None,
        sampling=MappingProxyType(sampling),
        drafters=tuple(_drafter(where, each) for each in table.get("drafters", [])),
        larger=tuple(table.get("larger", [])),
        why_no_drafter=table.get("why_no_drafter"),
    )


def _pattern(where: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ProfileError(f"{where}: {text!r} is not a regular expression: {error}") from error


def _drafter(where: str, table: Any) -> KnownDrafter:
    check_table(f"{where}, drafter", table, _DRAFTER_KEYS, set(_DRAFTER_KEYS) - {"bytes"})
    if any(table[key] <= 0 for key in ("bytes", "draft_bytes", "cache_bytes") if key in table):
        raise ProfileError(f"{where}, drafter: sizes must be positive")
    return KnownDrafter(**table)
