"""GGUF files that other programs keep on this machine: Hugging Face's cache, Ollama's store, LM Studio's folders.

They are used where they lie: nothing is copied, and nothing written beside them. All of it is read as hostile input.
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

_LIBRARY = Path("registry.ollama.ai") / "library"  # what a name without a host and an owner means to Ollama
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MOST_MANIFEST_BYTES = 1 << 20  # real ones have a kilobyte
_DEEPEST = 8  # folders below another; the programs make three at most
# Files and folders below one that are looked at, so that a folder of something else takes no longer than a fraction
# of a second. A collection of a hundred models has a few hundred.
_MOST_ENTRIES = 20_000


Ignored = dict[Path, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A file that ``program`` keeps, by the name to give as MODEL: its path, or ``ollama:NAME:TAG``.

    ``others`` are the further parts of a split model, and ``bytes`` the size of all.
    """

    name: str
    path: Path
    bytes: int
    program: str
    others: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Places:
    """Where other programs keep models; a folder need not exist."""

    hub_cache: Path
    ollama: tuple[Path, ...]
    lm_studio: tuple[Path, ...]

    @classmethod
    def of(cls, environ: Mapping[str, str], user: Path) -> Places:
        """As the programs look for them: by environment variables, else in folders of ``user`` or of a service."""
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
    """``models`` by program and name; ``ignored``: what cannot be read or used, and why."""

    models: tuple[FoundModel, ...]
    ignored: Mapping[Path, str]


def find_models(places: Places) -> Found:
    """Every GGUF file that other programs keep. A file that several names lead to is listed once."""
    ignored: dict[Path, str] = {}
    models: dict[Path, FoundModel] = {}
    for find in (_ollama, _lm_studio, _hub_cache):
        for model in find(places, ignored):
            models.setdefault(model.path.resolve(), model)
    return Found(tuple(models.values()), ignored)


def find_ollama(places: Places, name: str) -> FoundModel:
    """``NAME[:TAG]`` of Ollama's store. Raises ModelNotFoundError."""
    wanted = OLLAMA_PREFIX + (name if ":" in name else f"{name}:latest")
    known = {model.name: model for model in _ollama(places, {})}
    if wanted not in known:
        hint = f"Ollama has {', '.join(known)}" if known else "no model of Ollama was found on this machine"
        raise ModelNotFoundError(f"Ollama has no model {wanted.removeprefix(OLLAMA_PREFIX)!r}", hint=hint)
    return known[wanted]


def _hub_cache(places: Places, ignored: Ignored) -> Iterator[FoundModel]:
    for repo in _entries(places.hub_cache, ignored, lambda entry: entry.name.startswith("models--")):
        for commit in _entries(repo / "snapshots", ignored):
            for paths in _gguf_models(commit, ignored):
                yield from _model(str(paths[0]), paths, "Hugging Face", ignored)


def _lm_studio(places: Places, ignored: Ignored) -> Iterator[FoundModel]:
    for folder in places.lm_studio:
        for paths in _gguf_models(folder, ignored):
            yield from _model(str(paths[0]), paths, "LM Studio", ignored)


def _ollama(places: Places, ignored: Ignored) -> Iterator[FoundModel]:
    for folder in places.ollama:
        manifests = folder / "manifests"
        for manifest in _files(manifests, ignored, lambda _path: True):
            place = manifest.relative_to(manifests)
            own = place.relative_to(_LIBRARY) if place.is_relative_to(_LIBRARY) else place
            if len(own.parts) < 2:
                continue
            try:
                digests = _model_digests(manifest)
            except (OSError, ValueError, RecursionError) as error:
                ignored[manifest] = f"it is no manifest of Ollama's: {error}"
                continue
            if digests:  # else it is an adapter, or a model of another kind
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
                raise ValueError("the digest of its model is none")
            found.append(digest[1])
    if len(found) > MOST_PARTS:
        raise ValueError(f"its model is in {len(found)} files")
    return found


def _model(name: str, paths: Sequence[Path], program: str, ignored: Ignored) -> Iterator[FoundModel]:
    """The model of a file, or of all of its parts; nothing where one of them cannot be used."""
    size = 0
    for path in paths:
        try:
            status = path.stat()
            regular = stat.S_ISREG(status.st_mode)  # opening a named pipe would wait for ever
            start = b""
            if regular:
                with path.open("rb") as file:
                    start = file.read(4)
        except OSError as error:
            ignored[path] = f"it cannot be read: {error.strerror}"
            return
        if start != b"GGUF":
            ignored[path] = "it is no GGUF file"
            return
        size += status.st_size
    if not name.isprintable():
        ignored[paths[0]] = "its name holds control characters"
        return
    yield FoundModel(name=name, path=paths[0], bytes=size, program=program, others=tuple(paths[1:]))


def _gguf_models(folder: Path, ignored: Ignored) -> Iterator[Sequence[Path]]:
    """The file of each model, or its parts in order; those of which a part is missing are ignored."""
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
    """Files below a folder, not too far; links to folders are not followed, so that none leads around in a circle."""
    folders, left = [(folder, 0)], _MOST_ENTRIES
    while folders:
        place, depth = folders.pop()
        below = []
        for entry in _entries(place, ignored):
            left -= 1
            if left < 0:
                ignored[folder] = f"it holds more than {_MOST_ENTRIES} entries, and the rest was not looked at"
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
