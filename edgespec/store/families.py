"""Families of models, read from ``families.toml`` and checked key by key: their drafters and sampling settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

from edgespec.files.checked import Check, From, Range
from edgespec.files.gguf.records import GgufHeader
from edgespec.store.catalogue import catalogue, read_table
from edgespec.store.references import HubFile, HubReference

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
    draft_bytes: Annotated[int, Range(1)]
    cache_bytes: Annotated[int, Range(1)]
    bytes: Annotated[int, Range(1)] | None = None

    @property
    def model(self) -> str:
        """The MODEL argument that fetches the drafter: its name in the catalogue, else its repository on the hub."""
        for name, spec in catalogue().items():
            if HubFile(self.repo, self.filename) in spec.sources:
                return name
        return HubReference(self.repo, filename=self.filename).text


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error


_SIZES = "the smallest and the largest number of tokens"
_Tokens: TypeAlias = Annotated[int, Range(1)]
_Setting: TypeAlias = Literal["temperature", "top_p", "top_k", "min_p"]
_Sampling: TypeAlias = Annotated[Mapping[str, float], From(dict[_Setting, int | float], MappingProxyType)]


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
    vocabulary: Annotated[tuple[_Tokens, _Tokens], Check(lambda size: size[0] <= size[1], _SIZES)]
    called: Annotated[re.Pattern[str], From(str, _pattern)]
    not_called: Annotated[re.Pattern[str] | None, From(str, _pattern)] = None
    sampling: _Sampling = field(default_factory=dict)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Families:
    schema_version: int
    families: tuple[Family, ...]


def parse_families(text: str) -> tuple[Family, ...]:
    """Read families from TOML. Raises ProfileError, which names the invalid family and key."""
    return read_table(_Families, "the table of families", text).families
