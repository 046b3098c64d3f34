"""Fetches the files of a hub repository that a conversion of its model reads."""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.errors import DownloadError
from edgespec.files.progress import QUIET, Job
from edgespec.store.hub.file import fetch_hub_file
from edgespec.store.hub.listing import HubListing
from edgespec.store.references import ONLINE, HubFile, Network

# Weights only as safetensors, and no code: no other file of a repository is downloaded.
_WANTED = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json"
    r"|added_tokens\.json|chat_template\.jinja|chat_template\.json|model\.safetensors|model\.safetensors\.index\.json"
    r"|model-\d{5}-of-\d{5}\.safetensors|additional_chat_templates/[\w.-]+\.jinja"
)


def fetch_hub_folder(listing: HubListing, network: Network = ONLINE, job: Job = QUIET) -> Path:
    """Fetch the files that a conversion reads, each verified; returns their folder, which is in the hub's cache.

    Raises DownloadError, HashMismatchError, DiskSpaceError, CancelledError; finished downloads are kept.
    """
    parent: Path | None = None
    for name in filter(_WANTED.fullmatch, listing.names):
        path = fetch_hub_file(HubFile(listing.repo, name, listing.commit), network, job).path
        parent = path.parents[name.count("/")]
    if parent is None:
        raise DownloadError(f"{listing.repo} holds no model that can be converted")
    return parent
