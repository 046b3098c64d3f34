"""What a hub repository holds: its files with their sizes, and the facts on its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.errors import DownloadError
from edgespec.files.checked import is_line
from edgespec.files.progress import QUIET, Job
from edgespec.store.hub.cache import COMMIT, SHA256, RepoCache
from edgespec.store.hub.file import ask_hub
from edgespec.store.hub.http import HubHttp
from edgespec.store.references import ONLINE, HubFile, HubReference, Network
from edgespec.store.web import UnreachableError

_MOST_WORD = 80  # characters of a licence or an architecture; real values have at most thirty


@dataclass(frozen=True, slots=True)
class HubEntry:
    """A file of a repository. ``bytes`` and ``sha256`` are None if the hub does not state them."""

    name: str
    bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubListing:
    """A repository at the commit of a revision.

    ``licence`` and ``architecture`` (of its GGUF files) are None if the page states none. ``cached``: the hub was
    unreachable, so the listing has only what its cache holds.
    """

    repo: str
    revision: str
    commit: str
    entries: tuple[HubEntry, ...]
    licence: str | None = None
    architecture: str | None = None
    cached: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    @property
    def is_model_folder(self) -> bool:
        """Whether the repository holds weights as safetensors and no GGUF to use instead."""
        endings = {name.lower().rpartition(".")[2] for name in self.names}
        return "config.json" in self.names and "safetensors" in endings and "gguf" not in endings

    def reference(self, name: str | None = None) -> str:
        """The MODEL argument for one of the repository's files, or for the repository."""
        return HubReference(self.repo, self.revision, name).text


def list_hub_files(repo: str, revision: str, network: Network = ONLINE, job: Job = QUIET) -> HubListing:
    """List the repository's files: from the hub or, if it is unreachable, as far as its cache has them.

    Raises DownloadError, CancelledError.
    """
    wanted = HubFile(repo, None, revision)

    def ask(http: HubHttp, _stopped: object) -> HubListing:
        return _listing(http.get_listing(wanted), wanted, http.endpoint)

    def tick() -> None:
        job.tell("asking", wanted.label)

    try:
        return ask_hub(ask, wanted, network, job, tick=tick, what="the request")
    except UnreachableError as error:
        reason = error
    folder = RepoCache(network.hub_cache, repo)
    commit = folder.commit_of(revision)
    if commit is None:
        raise reason
    entries = tuple(HubEntry(name, folder.pointer(commit, name).stat().st_size) for name in folder.files(commit))
    return HubListing(repo=repo, revision=revision, commit=commit, entries=entries, cached=True)


def _listing(document: Any, wanted: HubFile, endpoint: str) -> HubListing:
    """The hub's answer as a listing. Raises DownloadError."""
    strange = DownloadError(
        f"{endpoint} does not answer like a model hub", hint="check HF_ENDPOINT, the proxy, and any sign-in page"
    )
    if not isinstance(document, dict) or not isinstance(document.get("siblings"), list):
        raise strange
    commit = document.get("sha")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise strange
    try:
        entries = tuple(_entry(sibling) for sibling in document["siblings"])
    except (KeyError, TypeError, AttributeError) as error:
        raise strange from error
    return HubListing(
        repo=wanted.repo,
        revision=wanted.revision,
        commit=commit,
        entries=entries,
        licence=next(_licences(document), None),
        architecture=_word(document.get("gguf"), "architecture"),
    )


def _entry(sibling: Mapping[str, Any]) -> HubEntry:
    """A file of the hub's answer. Raises KeyError, TypeError, AttributeError if malformed."""
    large = sibling.get("lfs") or {}
    size, sha256 = large.get("size", sibling.get("size")), large.get("sha256")
    return HubEntry(
        name=str(sibling["rfilename"]),
        bytes=size if type(size) is int and size >= 0 else None,
        sha256=sha256 if isinstance(sha256, str) and SHA256.fullmatch(sha256) else None,
    )


def _licences(document: Mapping[str, Any]) -> Iterator[str]:
    stated = _word(document.get("cardData"), "license")
    if stated is not None:
        yield stated
    tags = document.get("tags")
    for tag in tags if isinstance(tags, list) else ():
        if isinstance(tag, str) and tag.startswith("license:"):
            word = _word({"tag": tag.removeprefix("license:")}, "tag")
            if word is not None:
                yield word


def _word(table: Any, key: str) -> str | None:
    """A short printable string from a table of untrusted content."""
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, str) and is_line(value) and 0 < len(value) <= _MOST_WORD else None
