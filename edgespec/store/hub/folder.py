"""A model's folder of a hub repository: which files it has, and those of them that a conversion reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import DownloadError
from edgespec.files.progress import Cancelled, ProgressCallback, ProgressEvent
from edgespec.store.hub.cache import COMMIT, RepoCache
from edgespec.store.hub.file import fetch_hub_file, run_watched
from edgespec.store.hub.http import HubHttp, HubUnreachableError, hub_settings
from edgespec.store.references import HubFile, HubReference

_CONFIG = "config.json"
# Weights only as safetensors, and no code: whatever else a repository holds stays there.
_WANTED = re.compile(
    r"config\.json|generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json"
    r"|added_tokens\.json|chat_template\.jinja|model\.safetensors|model\.safetensors\.index\.json"
    r"|model-\d{5}-of-\d{5}\.safetensors"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFolder:
    """A repository at a commit; ``filenames`` are all that it holds."""

    repo: str
    commit: str
    filenames: tuple[str, ...]

    @property
    def is_model_folder(self) -> bool:
        """Whether it holds weights as safetensors, and no GGUF that could be taken instead."""
        endings = {name.lower().rpartition(".")[2] for name in self.filenames}
        return _CONFIG in self.filenames and "safetensors" in endings and "gguf" not in endings

    @property
    def wanted(self) -> tuple[str, ...]:
        """The files that a conversion reads."""
        return tuple(name for name in self.filenames if _WANTED.fullmatch(name))


def list_hub_folder(
    reference: HubReference,
    *,
    offline: bool = False,
    endpoint: str | None = None,
    cache: Path | None = None,
    progress: ProgressCallback | None = None,
    cancelled: Cancelled | None = None,
) -> HubFolder:
    """What the repository holds, by the hub or, if it cannot be asked, as far as its cache knows.

    ``endpoint`` and ``cache`` None: what the hub's environment variables say. Raises DownloadError, CancelledError.
    """
    settings = hub_settings()
    wanted = HubFile(reference.repo, None, reference.revision)
    if not (offline or settings.HF_HUB_OFFLINE):

        def ask(stopped: Callable[[], bool]) -> HubFolder:
            http = HubHttp(endpoint, stopped)
            commit, names = http.list_files(wanted)
            if not COMMIT.fullmatch(commit):
                raise DownloadError(f"{http.endpoint} does not answer like a model hub (no commit)")
            return HubFolder(repo=reference.repo, commit=commit, filenames=tuple(names))

        def tick() -> None:
            if progress is not None:
                progress(ProgressEvent(stage="asking the hub", source=wanted.label))

        try:
            return run_watched(ask, tick=tick, cancelled=cancelled, what="asking the hub")
        except HubUnreachableError as error:
            reason: DownloadError = error
    else:
        reason = DownloadError(f"{reference.repo} is not in the hub's cache, and offline was asked for")
    folder = RepoCache(cache or Path(settings.HF_HUB_CACHE), reference.repo)
    commit = folder.commit_of(reference.revision)
    if commit is None:
        raise reason
    return HubFolder(repo=reference.repo, commit=commit, filenames=tuple(folder.files(commit)))


def fetch_hub_folder(
    folder: HubFolder,
    *,
    offline: bool = False,
    endpoint: str | None = None,
    cache: Path | None = None,
    progress: ProgressCallback | None = None,
    cancelled: Cancelled | None = None,
) -> Path:
    """A folder with the files wanted, each verified; it is the hub's own cache.

    Raises DownloadError, HashMismatchError, DiskSpaceError, CancelledError; what has arrived is kept.
    """
    place: Path | None = None
    for name in folder.wanted:
        place = fetch_hub_file(
            HubFile(folder.repo, name, folder.commit),
            offline=offline,
            endpoint=endpoint,
            cache=cache,
            progress=progress,
            cancelled=cancelled,
        ).path.parent
    if place is None:
        raise DownloadError(f"{folder.repo} holds no model that could be converted")
    return place
