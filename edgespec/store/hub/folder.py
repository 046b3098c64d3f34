"""Fetches the files of a hub repository that a conversion of its model reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from edgespec.errors import DownloadError
from edgespec.files.progress import QUIET, Job
from edgespec.files.safetensors import INDEX, SINGLE, read_shards
from edgespec.store.hub.file import fetch_hub_file
from edgespec.store.hub.listing import HubListing
from edgespec.store.references import ONLINE, HubFile, Network

# Weights only as safetensors, and no code: no other file of a repository is downloaded.
_SMALL = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json"
    r"|added_tokens\.json|chat_template\.jinja|chat_template\.json|model\.safetensors\.index\.json"
    r"|additional_chat_templates/[\w.-]+\.jinja"
)


def fetch_hub_folder(
    listing: HubListing, check: Callable[[Path], object], network: Network = ONLINE, job: Job = QUIET
) -> Path:
    """Fetch the files that a conversion reads, each verified; returns their folder, which is in the hub's cache.

    ``check`` gets the folder before the weights are fetched, and may raise. Raises DownloadError, HashMismatchError,
    ModelFileError, DiskSpaceError, CancelledError; finished downloads are kept.
    """

    def fetch(name: str) -> Path:
        path = fetch_hub_file(HubFile(listing.repo, name, listing.commit), network, job).path
        return path.parents[name.count("/")]

    folders = {fetch(name) for name in filter(_SMALL.fullmatch, listing.names)}
    if not folders:
        raise DownloadError(f"{listing.repo} holds no model that can be converted")
    folder = folders.pop()
    check(folder)
    shards = [SINGLE] if SINGLE in listing.names else read_shards(folder / INDEX) if INDEX in listing.names else ()
    for name in shards:
        fetch(name)
    return folder
