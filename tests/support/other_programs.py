"""A user with models of other programs: Ollama's store, LM Studio's folders, Hugging Face's cache."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from edgespec.store.found import ModelFolders, find_models

LIBRARY = "registry.ollama.ai/library"


class User:
    """A user's folder with the three programs' files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ollama = root / ".ollama" / "models"
        self.folders = ModelFolders.of({}, root)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a program that this user starts."""
        return {"HOME": str(self.root), "OLLAMA_MODELS": str(self.ollama), "HF_HOME": "", "HF_HUB_CACHE": ""}

    def to_ollama(self, name: str, content: bytes, layer: str = "application/vnd.ollama.image.model") -> Path:
        digest = hashlib.sha256(content).hexdigest()
        layers = [
            {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}"},
            {"mediaType": layer, "digest": f"sha256:{digest}", "size": len(content)},
        ]
        self.manifest(name, json.dumps({"schemaVersion": 2, "layers": layers}))
        return write_file(self.ollama / "blobs" / f"sha256-{digest}", content)

    def layers_to_ollama(self, name: str, model: bytes, **others: bytes) -> Path:
        """Keep a model with further layers: ``system=b"..."``. Returns the manifest."""
        layers = []
        for kind, content in {"model": model, **others}.items():
            digest = hashlib.sha256(content).hexdigest()
            write_file(self.ollama / "blobs" / f"sha256-{digest}", content)
            layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
        return self.manifest(name, json.dumps({"schemaVersion": 2, "layers": layers}))

    def split_to_ollama(self, name: str, parts: list[Path]) -> None:
        """Keep a split model as `ollama create` does: each file is a layer, and no name marks the parts."""
        digests = [self.to_ollama(f"{name}-part", part.read_bytes()).name.removeprefix("sha256-") for part in parts]
        layers = [
            {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{each}"} for each in digests[::-1]
        ]
        self.manifest(f"{name}-part", "{}").unlink()
        self.manifest(name, json.dumps({"layers": layers}))

    def manifest(self, name: str, text: str) -> Path:
        return write_file(self.ollama / "manifests" / name, text.encode())

    def to_lm_studio(self, name: str, content: bytes) -> Path:
        return write_file(self.root / ".lmstudio" / "models" / "publisher" / name, content)

    def to_hub(self, repo: str, name: str, content: bytes) -> Path:
        folder = self.root / ".cache" / "huggingface" / "hub" / f"models--{repo.replace('/', '--')}"
        blob = write_file(folder / "blobs" / hashlib.sha256(content).hexdigest(), content)
        pointer = folder / "snapshots" / ("a" * 40) / name
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.symlink_to(blob)
        return pointer

    def names(self) -> list[str]:
        return [model.name for model in find_models(self.folders).models]

    def everything(self) -> dict[str, tuple[bytes, int]]:
        files = (path for path in self.root.rglob("*") if path.is_file())
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def write_file(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
