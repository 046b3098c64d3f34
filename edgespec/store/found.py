"""GGUF files that other programs keep on this machine: Hugging Face's cache, Ollama's store, LM Studio's folders.

The files are used where they are: nothing is copied or written next to them. File names and contents are untrusted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.files.disk import expanded
from edgespec.files.gguf.names import is_auxiliary, part_name
from edgespec.store.ollama import ollama_models
from edgespec.store.references import hub_cache
from edgespec.store.scan import FoundModel, Ignored, entries, files_below, found_model, small_file

# Where Ollama keeps models when it runs as a service of the system.
_OLLAMA_SERVICES = (Path("/usr/share/ollama/.ollama/models"), Path("/var/snap/ollama/common/models"))


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Folders in which other programs keep models; they need not exist."""

    hub_cache: Path
    ollama: tuple[Path, ...]
    lm_studio: tuple[Path, ...]

    @classmethod
    def here(cls) -> ModelFolders:
        """Those of the current user, who may have no home folder."""
        return cls.of(os.environ, expanded("~"))

    @classmethod
    def of(cls, environ: Mapping[str, str], user: Path) -> ModelFolders:
        """The programs' own folders: from environment variables, else the defaults of ``user`` or of a service."""
        named = environ.get("OLLAMA_MODELS", "").strip().strip("\"'")  # as Ollama reads it
        usual = (user / ".ollama" / "models", *_OLLAMA_SERVICES)
        return cls(
            hub_cache=hub_cache(environ, user),
            ollama=(expanded(named),) if named else usual,
            lm_studio=tuple(_lm_studio_folders(user)),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """``models``, sorted by program and name; ``ignored``: what cannot be read or used, with the reason."""

    models: tuple[FoundModel, ...]
    ignored: Mapping[Path, str]


def find_models(folders: ModelFolders) -> Found:
    """Every GGUF file that other programs keep, each once; a model of Ollama under each of its names."""
    ignored: Ignored = {}
    models = {model.name: model for model in ollama_models(folders.ollama, ignored)}
    known = {model.path.resolve() for model in models.values()}
    for find in (_lm_studio, _hub_cache):
        for model in find(folders, ignored):
            if (file := model.path.resolve()) not in known:
                known.add(file)
                models[model.name] = model
    return Found(tuple(models.values()), ignored)


def _lm_studio_folders(user: Path) -> Iterator[Path]:
    """Where LM Studio keeps models: the folder that its settings name, and the usual ones."""
    homes = [user / ".lmstudio", user / ".cache" / "lm-studio"]
    homes = [*_named_folder(_told(user / ".lmstudio-home-pointer"), user), *homes]
    for home in homes:
        try:
            told = json.loads(_told(home / "settings.json") or "{}")
        except (ValueError, RecursionError):
            told = {}
        yield from _named_folder(told.get("downloadsFolder") if isinstance(told, dict) else None, user)
        yield home / "models"


def _told(path: Path) -> str | None:
    """The text of a program's small file; None if there is none."""
    try:
        return small_file(path).decode("utf-8-sig")
    except (OSError, ValueError):
        return None


def _named_folder(path: object, user: Path) -> list[Path]:
    """The folder that a program's settings name, in which ``~`` is the user's; none if it is not a whole path."""
    if not isinstance(path, str) or "\0" in path:
        return []
    path = path.strip()
    folder = user / path[1:].lstrip("/\\") if path.startswith("~") else Path(path)
    return [folder] if folder.is_absolute() else []


def _hub_cache(folders: ModelFolders, ignored: Ignored) -> Iterator[FoundModel]:
    for repo in entries(folders.hub_cache, ignored, lambda entry: entry.name.startswith("models--")):
        for commit in entries(repo / "snapshots", ignored):
            for paths in _gguf_models(commit, ignored):
                if (model := found_model(str(paths[0]), paths, "Hugging Face", ignored)) is not None:
                    yield model


def _lm_studio(folders: ModelFolders, ignored: Ignored) -> Iterator[FoundModel]:
    for folder in folders.lm_studio:
        for paths in _gguf_models(folder, ignored):
            if (model := found_model(str(paths[0]), paths, "LM Studio", ignored)) is not None:
                yield model


def _is_model(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and not is_auxiliary(path.name)


def _gguf_models(folder: Path, ignored: Ignored) -> Iterator[Sequence[Path]]:
    """The files of each model, parts in order; models with a missing part are ignored."""
    sets: dict[Path, dict[str, Path]] = {}
    for path in files_below(folder, ignored, _is_model):
        name = part_name(path.name)
        if name is None:
            yield [path]
        else:
            sets.setdefault(path.with_name(name.first), {})[path.name] = path
    for first, here in sets.items():
        name = part_name(first.name)
        assert name is not None
        missing = [number for number, each in enumerate(name.names, start=1) if each not in here]
        if missing:
            ignored[min(here.values())] = f"part {missing[0]} of {name.count} of this model is missing"
        else:
            yield [here[each] for each in name.names]
