"""A repository of the hub with a model's folder: its files, and those that a conversion reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import DownloadError
from edgespec.files.progress import QUIET, Job
from edgespec.store.hub.file import fetch_hub_file
from edgespec.store.hub.listing import list_hub_files
from edgespec.store.references import ONLINE, HubFile, HubReference, Network

_CONFIG = "config.json"
# Weights only as safetensors, and no code: no other file of a repository is downloaded.
_WANTED = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json"
    r"|added_tokens\.json|chat_template\.jinja|chat_template\.json|model\.safetensors|model\.safetensors\.index\.json"
    r"|model-\d{5}-of-\d{5}\.safetensors|additional_chat_templates/[\w.-]+\.jinja"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFolder:
    """A repository at a commit; ``filenames`` are all its files. ``licence`` is None if its page states none."""

    repo: str
    commit: str
    filenames: tuple[str, ...]
    licence: str | None = None

    @property
    def is_model_folder(self) -> bool:
        """Whether the repository holds weights as safetensors and no GGUF to use instead."""
        endings = {name.lower().rpartition(".")[2] for name in self.filenames}
        return _CONFIG in self.filenames and "safetensors" in endings and "gguf" not in endings

    @property
    def wanted(self) -> tuple[str, ...]:
        """The files that a conversion reads."""
        return tuple(name for name in self.filenames if _WANTED.fullmatch(name))


def list_hub_folder(reference: HubReference, network: Network = ONLINE, job: Job = QUIET) -> HubFolder:
    """List the repository's files. Arguments and errors are those of ``list_hub_files``."""
    listing = list_hub_files(reference.repo, reference.revision, network, job)
    return HubFolder(repo=listing.repo, commit=listing.commit, filenames=listing.names, licence=listing.licence)


def fetch_hub_folder(folder: HubFolder, network: Network = ONLINE, job: Job = QUIET) -> Path:
    """Fetch the files that a conversion reads, each verified; returns their folder, which is in the hub's cache.

    Raises DownloadError, HashMismatchError, DiskSpaceError, CancelledError; finished downloads are kept.
    """
    parent: Path | None = None
    for name in folder.wanted:
        path = fetch_hub_file(HubFile(folder.repo, name, folder.commit), network, job).path
        parent = path.parents[name.count("/")]
    if parent is None:
        raise DownloadError(f"{folder.repo} holds no model that can be converted")
    return parent
