"""A model of a hub repository: the file is chosen if none is named, and all parts are fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.errors import DownloadError
from edgespec.files.disk import require_space
from edgespec.files.gguf.names import part_name
from edgespec.files.progress import QUIET, Job
from edgespec.hardware.machine import memory_bytes
from edgespec.store.hub.cache import RepoCache
from edgespec.store.hub.file import FetchedHubFile, fetch_hub_file
from edgespec.store.hub.listing import HubEntry, HubListing, list_hub_files
from edgespec.store.hub.quantisations import choose_quantisation
from edgespec.store.references import ONLINE, HubFile, Network


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedHubModel:
    """The file of a model, or all its parts in order. ``licence`` is the repository's, None if it states none."""

    files: tuple[FetchedHubFile, ...]
    licence: str | None = None


def fetch_hub_model(wanted: HubFile, network: Network = ONLINE, job: Job = QUIET) -> FetchedHubModel:
    """Fetch the named model, or choose a quantisation for this machine and tell the job.

    Arguments and errors are those of ``fetch_hub_file`` and ``choose_quantisation``.
    """

    if wanted.filename is not None and part_name(wanted.filename) is None:
        return FetchedHubModel(files=(fetch_hub_file(wanted, network, job),))
    listing = list_hub_files(wanted.repo, wanted.revision, network, job)
    filename = wanted.filename
    if filename is None:
        choice = choose_quantisation(listing, memory_bytes()[1], wanted.quant)
        filename = choice.chosen.files[0]
        if not listing.cached:
            rest = f"; `edgespec pull {listing.reference()}` lists all {len(choice.found)}"
            note = choice.words + (rest if len(choice.found) > 1 else "")
            job.tell("chosen", wanted.label, note=note)
    part = part_name(filename)
    names = (filename,) if part is None else part.names
    _check_parts(listing, names)
    if not listing.cached:
        folder = RepoCache(network.hub_cache, wanted.repo)
        entries = {entry.name: entry for entry in listing.entries}
        needed_bytes = sum(_missing_bytes(folder, listing.commit, entries[name]) for name in names)
        require_space(folder.path, needed_bytes, f"downloading {wanted.label}")
    own = replace(network, offline=network.offline or listing.cached)
    # By the revision as given, which the cache remembers.
    first = fetch_hub_file(replace(wanted, filename=names[0]), own, job)
    files = (first, *(fetch_hub_file(HubFile(wanted.repo, name, first.commit), own, job) for name in names[1:]))
    return FetchedHubModel(files=files, licence=listing.licence)


def _check_parts(listing: HubListing, names: Sequence[str]) -> None:
    """Check that the repository has every part. Raises DownloadError."""
    for number, name in enumerate(names, start=1):
        if name not in listing.names:
            where = "the hub's cache of " if listing.cached else ""
            raise DownloadError(
                f"{where}{listing.repo} has no file {name!r}"
                + (f", which is part {number} of {len(names)}" if len(names) > 1 else ""),
                hint="fetch it while online" if listing.cached else "choose another file of the repository",
            )


def _missing_bytes(folder: RepoCache, commit: str, entry: HubEntry) -> int:
    """Bytes of a file that are still to be downloaded, as far as the hub and the cache tell."""
    here = [folder.pointer(commit, entry.name)]
    if entry.sha256 is not None:
        here += [folder.blob(entry.sha256), folder.partial(entry.sha256)]
    sizes = [path.stat().st_size for path in here if path.is_file()]
    return max(0, (entry.bytes or 0) - max(sizes, default=0))
