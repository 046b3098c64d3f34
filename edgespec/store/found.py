"""GGUF files that other programs keep on this machine: Hugging Face's cache, Ollama's store, LM Studio's folders.

The files are used where they are: nothing is copied or written next to them. File names and contents are untrusted.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from edgespec.errors import ModelNotFoundError
from edgespec.files.gguf.names import MOST_PARTS, is_auxiliary, part_name

OLLAMA_PREFIX = "ollama:"

_LIBRARY = Path("registry.ollama.ai") / "library"  # where Ollama keeps a name without host and owner
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MOST_MANIFEST_BYTES = 1 << 20  # real manifests have about a kilobyte
_DEEPEST = 8  # levels of folders; the programs make at most three
# Most files and folders that are examined below one folder, so that scanning an unrelated folder takes only a
# fraction of a second. A collection of a hundred models has a few hundred.
_MOST_ENTRIES = 20_000


Ignored = dict[Path, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A file that ``program`` keeps. ``name`` is its MODEL argument: a path, or ``ollama:NAME:TAG``.

    ``others`` are the further parts of a split model; ``bytes`` is the size of all parts.
    """

    name: str
    path: Path
    bytes: int
    program: str
    others: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Folders in which other programs keep models; they need not exist."""

    hub_cache: Path
    ollama: tuple[Path, ...]
    lm_studio: tuple[Path, ...]

    @classmethod
    def of(cls, environ: Mapping[str, str], user: Path) -> ModelFolders:
        """The programs' own folders: from environment variables, else the defaults of ``user`` or of a service."""
        cache = Path(environ.get("XDG_CACHE_HOME") or user / ".cache")
        hub = Path(environ.get("HF_HOME") or cache / "huggingface") / "hub"
        named = environ.get("OLLAMA_MODELS")
        usual = (user / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models"))
        return cls(
            hub_cache=Path(environ.get("HF_HUB_CACHE") or hub).expanduser(),
            ollama=(Path(named),) if named else usual,
            lm_studio=(user / ".lmstudio" / "models", user / ".cache" / "lm-studio" / "models"),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """``models``, sorted by program and name; ``ignored``: what cannot be read or used, with the reason."""

    models: tuple[FoundModel, ...]
    ignored: Mapping[Path, str]


def find_models(folders: ModelFolders) -> Found:
    """Every GGUF file that other programs keep. A file with several names is listed once."""
    ignored: dict[Path, str] = {}
    models: dict[Path, FoundModel] = {}
    for find in (_ollama, _lm_studio, _hub_cache):
        for model in find(folders, ignored):
            models.setdefault(model.path.resolve(), model)
    return Found(tuple(models.values()), ignored)


def find_ollama(folders: ModelFolders, name: str) -> FoundModel:
    """Find ``NAME[:TAG]`` in Ollama's store. Raises ModelNotFoundError."""
    wanted = OLLAMA_PREFIX + (name if ":" in name else f"{name}:latest")
    known = {model.name: model for model in _ollama(folders, {})}
    if wanted not in known:
        hint = f"Ollama has {', '.join(known)}" if known else "no model of Ollama was found on this machine"
        raise ModelNotFoundError(f"Ollama has no model {wanted.removeprefix(OLLAMA_PREFIX)!r}", hint=hint)
    return known[wanted]


def _hub_cache(folders: ModelFolders, ignored: Ignored) -> Iterator[FoundModel]:
    for repo in _entries(folders.hub_cache, ignored, lambda entry: entry.name.startswith("models--")):
        for commit in _entries(repo / "snapshots", ignored):
            for paths in _gguf_models(commit, ignored):
                yield from _model(str(paths[0]), paths, "Hugging Face", ignored)


def _lm_studio(folders: ModelFolders, ignored: Ignored) -> Iterator[FoundModel]:
    for folder in folders.lm_studio:
        for paths in _gguf_models(folder, ignored):
            yield from _model(str(paths[0]), paths, "LM Studio", ignored)


def _ollama(folders: ModelFolders, ignored: Ignored) -> Iterator[FoundModel]:
    for folder in folders.ollama:
        manifests = folder / "manifests"
        for manifest in _files(manifests, ignored, lambda _path: True):
            relative = manifest.relative_to(manifests)
            own = relative.relative_to(_LIBRARY) if relative.is_relative_to(_LIBRARY) else relative
            if len(own.parts) < 2:
                continue
            try:
                digests = _model_digests(manifest)
            except (OSError, ValueError, RecursionError) as error:
                ignored[manifest] = f"it is not a manifest of Ollama: {error}"
                continue
            if digests:  # without digests: an adapter, or another kind of model
                name = f"{OLLAMA_PREFIX}{'/'.join(own.parts[:-1])}:{own.name}"
                blobs = [folder / "blobs" / f"sha256-{digest}" for digest in digests]
                yield from _model(name, blobs, "Ollama", ignored)


def _model_digests(manifest: Path) -> list[str]:
    """The sha256 of the model's file, or of each of its parts. Raises OSError, ValueError, RecursionError."""
    with manifest.open("rb") as file:
        data = file.read(_MOST_MANIFEST_BYTES + 1)
    if len(data) > _MOST_MANIFEST_BYTES:
        raise ValueError("it is too large")
    content = json.loads(data)
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, list):
        raise ValueError("it lists no layers")
    found = []
    for layer in layers:
        if isinstance(layer, dict) and layer.get("mediaType") == _MODEL_LAYER:
            digest = _DIGEST.fullmatch(str(layer.get("digest")))
            if digest is None:
                raise ValueError("its model has no valid digest")
            found.append(digest[1])
    if len(found) > MOST_PARTS:
        raise ValueError(f"its model is in {len(found)} files")
    return found


def _model(name: str, paths: Sequence[Path], program: str, ignored: Ignored) -> Iterator[FoundModel]:
    """The model in these files, or nothing if one of the files cannot be used."""
    size = 0
    for path in paths:
        try:
            status = path.stat()
            regular = stat.S_ISREG(status.st_mode)  # opening a named pipe would block forever
            start = b""
            if regular:
                with path.open("rb") as file:
                    start = file.read(4)
        except OSError as error:
            ignored[path] = f"it cannot be read: {error.strerror}"
            return
        if start != b"GGUF":
            ignored[path] = "it is not a GGUF file"
            return
        size += status.st_size
    if not name.isprintable():
        ignored[paths[0]] = "its name contains control characters"
        return
    yield FoundModel(name=name, path=paths[0], bytes=size, program=program, others=tuple(paths[1:]))


def _gguf_models(folder: Path, ignored: Ignored) -> Iterator[Sequence[Path]]:
    """The files of each model, parts in order; models with a missing part are ignored."""
    sets: dict[Path, dict[str, Path]] = {}
    for path in _files(folder, ignored, lambda path: path.suffix == ".gguf" and not is_auxiliary(path.name)):
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


def _files(folder: Path, ignored: Ignored, wanted: Callable[[Path], bool]) -> Iterator[Path]:
    """Files below a folder, to a limited depth. Links to folders are not followed, which avoids cycles."""
    folders, left = [(folder, 0)], _MOST_ENTRIES
    while folders:
        current, depth = folders.pop()
        below = []
        for entry in _entries(current, ignored):
            left -= 1
            if left < 0:
                ignored[folder] = f"it holds more than {_MOST_ENTRIES} entries; the rest was not examined"
                return
            try:
                is_folder = stat.S_ISDIR(entry.lstat().st_mode)
                is_file = not is_folder and wanted(entry) and stat.S_ISREG(entry.stat().st_mode)
            except OSError as error:
                ignored[entry] = f"it cannot be read: {error.strerror}"
                continue
            if is_file:
                yield entry
            elif is_folder and depth < _DEEPEST:
                below.append((entry, depth + 1))
        folders += reversed(below)


def _entries(folder: Path, ignored: Ignored, wanted: Callable[[Path], bool] = lambda _entry: True) -> list[Path]:
    try:
        return sorted(entry for entry in islice(folder.iterdir(), _MOST_ENTRIES + 1) if wanted(entry))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        ignored[folder] = f"it cannot be read: {error.strerror}"
        return []
