"""A model of a hub repository: chosen if no file is named, and fetched with all its parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import DownloadError
from edgespec.files.disk import require_space
from edgespec.files.gguf.names import is_auxiliary, part_name
from edgespec.files.progress import Cancelled, ProgressCallback
from edgespec.store.hub.cache import RepoCache
from edgespec.store.hub.file import FetchedHubFile, fetch_hub_file
from edgespec.store.hub.http import hub_settings
from edgespec.store.hub.listing import HubEntry, HubListing, list_hub_files
from edgespec.store.references import HubFile


def choose_gguf(filenames: Sequence[str], repo: str) -> str:
    """The GGUF meant by a repository without a file name: the only one, else the only Q4_K_M.

    Of a split model it is the first part. Raises DownloadError that lists the candidates.
    """
    found = sorted({_model_of(name) for name in filenames if _is_model(name)})
    preferred = [name for name in found if "q4_k_m" in name.lower()]
    for candidates in (found, preferred):
        if len(candidates) == 1:
            return candidates[0]
    if not found:
        raise DownloadError(f"{repo} holds no .gguf model", hint="choose a repository with GGUF files")
    raise DownloadError(
        f"{repo} holds {len(found)} .gguf files, choose one of: {', '.join(found)}", hint=f"write hf:{repo}/FILE"
    )


def _is_model(name: str) -> bool:
    return name.lower().endswith(".gguf") and not is_auxiliary(name)


def _model_of(name: str) -> str:
    part = part_name(name)
    return name if part is None else part.first


def fetch_hub_model(
    wanted: HubFile,
    *,
    offline: bool = False,
    endpoint: str | None = None,
    cache: Path | None = None,
    progress: ProgressCallback | None = None,
    cancelled: Cancelled | None = None,
) -> tuple[FetchedHubFile, ...]:
    """The model's file, or all of its parts in order. Arguments and errors are those of ``fetch_hub_file``."""

    def fetch(name: str, revision: str, offline: bool = offline) -> FetchedHubFile:
        return fetch_hub_file(
            HubFile(wanted.repo, name, revision),
            offline=offline,
            endpoint=endpoint,
            cache=cache,
            progress=progress,
            cancelled=cancelled,
        )

    if wanted.filename is not None and part_name(wanted.filename) is None:
        return (fetch(wanted.filename, wanted.revision),)
    listing = list_hub_files(
        wanted.repo,
        wanted.revision,
        offline=offline,
        endpoint=endpoint,
        cache=cache,
        progress=progress,
        cancelled=cancelled,
    )
    filename = choose_gguf(listing.names, wanted.repo) if wanted.filename is None else wanted.filename
    part = part_name(filename)
    names = (filename,) if part is None else part.names
    _check_parts(listing, names)
    if not listing.cached:
        folder = RepoCache(cache or Path(hub_settings().HF_HUB_CACHE), wanted.repo)
        entries = {entry.name: entry for entry in listing.entries}
        needed_bytes = sum(_missing_bytes(folder, listing.commit, entries[name]) for name in names)
        require_space(folder.place, needed_bytes, f"downloading {wanted.label}")
    offline = offline or listing.cached
    first = fetch(names[0], wanted.revision, offline)  # by the revision as it was given: the cache remembers it
    return (first, *(fetch(name, first.commit, offline) for name in names[1:]))


def _check_parts(listing: HubListing, names: Sequence[str]) -> None:
    """Raises DownloadError if the repository lacks a part."""
    for number, name in enumerate(names, start=1):
        if name not in listing.names:
            where = "the hub's cache of " if listing.cached else ""
            raise DownloadError(
                f"{where}{listing.repo} has no file {name!r}"
                + (f", which is part {number} of {len(names)}" if len(names) > 1 else ""),
                hint="fetch it while online" if listing.cached else "choose another file of the repository",
            )


def _missing_bytes(folder: RepoCache, commit: str, entry: HubEntry) -> int:
    """What is left to be downloaded of a file, as far as the hub and the cache tell."""
    here = [folder.pointer(commit, entry.name)]
    if entry.sha256 is not None:
        here += [folder.blob(entry.sha256), folder.partial(entry.sha256)]
    sizes = [path.stat().st_size for path in here if path.is_file()]
    return max(0, (entry.bytes or 0) - max(sizes, default=0))
