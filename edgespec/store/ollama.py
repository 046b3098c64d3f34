"""Ollama's store: the models under the names that ``ollama list`` shows, and the settings that Ollama keeps for them.

A manifest lists a model's layers: its weights, an adapter, a projector for images, a template in Ollama's own
language, a system message, parameters, and turns of a conversation. File names and contents are untrusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import InvalidRequestError, ModelFileError, ModelNotFoundError, reason_of
from edgespec.files.gguf.names import MERGE_ADAPTER, MOST_PARTS
from edgespec.store.scan import FoundModel, Ignored, files_below, found_model, small_file

if TYPE_CHECKING:
    from edgespec.files.model_file import KeptSettings

OLLAMA_PREFIX = "ollama:"

_HOST, _OWNER = "registry.ollama.ai", "library"  # what `ollama list` leaves out
_LAYER = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_SAMPLING = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repeat_penalty",
        "repeat_last_n",
        "presence_penalty",
        "frequency_penalty",
    }
)
# Parameters that say how Ollama uses the machine. They change no answer.
_OF_THE_MACHINE = re.compile(
    r"num_(gpu|batch|thread|gqa)|main_gpu|low_vram|numa|use_\w+|f16_kv|vocab_only|logits_all"
)
_KNOWN_LAYERS = {"system", "params", "template", "projector", "license"}
_NAME, _MOST_NAMES = re.compile(r"[a-z][a-z0-9_.]{0,39}"), 20
_MOST_STOPS, _LONGEST_STOP = 64, 1000  # real models have at most a dozen of at most thirty characters


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer of a manifest. ``kind`` is the end of its media type; ``digest`` is the sha256 of its file."""

    kind: str
    digest: str


def ollama_models(roots: Sequence[Path], ignored: Ignored) -> Iterator[FoundModel]:
    """Every model of Ollama's stores, under each of its names."""
    for root in roots:
        manifests = root / "manifests"
        for manifest in files_below(manifests, ignored):
            parts = manifest.relative_to(manifests).parts
            if len(parts) < 3:
                continue  # a file of another program
            try:
                layers = _layers(manifest)
            except (OSError, ValueError, RecursionError) as error:
                ignored[manifest] = f"it is not a manifest of Ollama: {reason_of(error)}"
                continue
            weights = [_blob(root, layer) for layer in layers if layer.kind == "model"]
            if not weights:
                ignored[manifest] = "this model of Ollama has no GGUF file"
                continue
            model = found_model(f"{OLLAMA_PREFIX}{_shown(parts)}", weights, "Ollama", ignored)
            kinds = {layer.kind for layer in layers}
            if model is not None:
                refused = "it has an adapter, which edgespec cannot apply" if "adapter" in kinds else None
                yield replace(model, settings=manifest, refused=refused, vision="projector" in kinds)


def find_ollama(roots: Sequence[Path], name: str) -> FoundModel:
    """The model called ``NAME[:TAG]``, as in `ollama list` or with the full name of the registry.

    Raises ModelNotFoundError, and InvalidRequestError for a model that edgespec cannot run as Ollama does.
    """
    known = list(ollama_models(roots, {}))
    same = [model for model in known if _full(model.name.removeprefix(OLLAMA_PREFIX)) == _full(name)]
    if not same:
        names = ", ".join(dict.fromkeys(model.name for model in known))
        hint = f"Ollama has {names}" if known else "no model of Ollama was found on this machine"
        raise ModelNotFoundError(f"Ollama has no model {_tagged(name)!r}", hint=hint)
    # Ollama's names may differ in case alone where the file system distinguishes it.
    model = next((each for each in same if each.name.endswith(_tagged(name))), same[0])
    if model.refused is not None:
        raise InvalidRequestError(
            f"Ollama's model {model.name.removeprefix(OLLAMA_PREFIX)} cannot be run: {model.refused}",
            hint=MERGE_ADAPTER,
        )
    return model


def kept_settings(model: FoundModel) -> KeptSettings:
    """The settings that Ollama keeps with a model that ``find_ollama`` found. Raises ModelFileError."""
    from edgespec.files.model_file import KeptSettings  # completion of names reads no header

    assert model.settings is not None
    root = model.path.parent.parent  # its weights are ROOT/blobs/sha256-...
    try:
        blobs = {layer.kind: _blob(root, layer) for layer in _layers(model.settings) if layer.kind != "model"}
        system = _text(blobs["system"]) if "system" in blobs else None
        told = json.loads(_text(blobs["params"])) if "params" in blobs else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(
            model.settings,
            f"Ollama's settings of {model.name} cannot be read: {error}",
            hint="pull it with Ollama again",
        ) from error
    stop, sampling, unused = _parameters(told if isinstance(told, dict) else {})
    return KeptSettings(
        program="Ollama",
        system=system or None,
        stop=stop,
        sampling=sampling,
        has_template="template" in blobs,
        unused=_named({*unused, *blobs} - _KNOWN_LAYERS),
    )


def _parameters(told: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, float], tuple[str, ...]]:
    """The stop texts, the settings of sampling, and the names of parameters that are not used."""
    stop = told.get("stop", [])
    stops = stop if isinstance(stop, list) else [stop]
    usable = tuple(text for text in stops if isinstance(text, str) and 0 < len(text) <= _LONGEST_STOP)[:_MOST_STOPS]
    sampling = {
        name: value
        for name, value in told.items()
        if name in _SAMPLING and isinstance(value, int | float) and not isinstance(value, bool)
    }
    used = {"stop", *sampling} if len(usable) == len(stops) else set(sampling)
    unused = [name for name in told if name not in used and not _OF_THE_MACHINE.fullmatch(name)]
    return usable, sampling, _named(unused)


def _named(names: Iterable[str]) -> tuple[str, ...]:
    """The names that may be shown, in order: a hostile file may have millions, with any characters."""
    return tuple(sorted(filter(_NAME.fullmatch, names)))[:_MOST_NAMES]


def _layers(manifest: Path) -> list[_Layer]:
    """The layers of a manifest. Raises OSError, ValueError, RecursionError."""
    content = json.loads(small_file(manifest))
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, list):
        raise ValueError("it lists no layers")
    found = []
    for layer in layers:
        kind = layer.get("mediaType") if isinstance(layer, dict) else None
        if isinstance(kind, str) and kind.startswith(_LAYER):
            digest = _DIGEST.fullmatch(str(layer.get("digest")))
            if digest is None:
                raise ValueError(f"its {kind.removeprefix(_LAYER)[:20]!r} has no valid digest")
            found.append(_Layer(kind.removeprefix(_LAYER), digest[1]))
    count = sum(layer.kind == "model" for layer in found)
    if count > MOST_PARTS:
        raise ValueError(f"its model is in {count} files")
    return found


def _blob(root: Path, layer: _Layer) -> Path:
    return root / "blobs" / f"sha256-{layer.digest}"


def _text(path: Path) -> str:
    return small_file(path).decode("utf-8")


def _shown(parts: Sequence[str]) -> str:
    """The name in `ollama list` of the manifest HOST/OWNER/MODEL/TAG."""
    *path, tag = parts
    if path[0] == _HOST:
        path = path[1:]
        if len(path) > 1 and path[0] == _OWNER:
            path = path[1:]
    return f"{'/'.join(path)}:{tag}"


def _tagged(name: str) -> str:
    """``name`` with its tag; ``latest`` if it has none. The host may have a port."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _full(name: str) -> str:
    """A name in the form HOST/OWNER/MODEL:TAG and in small letters: Ollama ignores case."""
    path = _tagged(name.rpartition("://")[2]).split("/")
    if len(path) == 1:
        path = [_OWNER, *path]
    if len(path) == 2:
        path = [_HOST, *path]
    return "/".join(path).lower()
