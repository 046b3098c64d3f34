"""Models loaded from paths: what tests name instead of a ``LocatedModel``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.files.gguf.records import GgufHeader
from edgespec.files.model_file import LocatedModel, read_model_file
from edgespec.files.onnx.artefact import OnnxArtefact
from edgespec.files.progress import Cancelled, Job
from edgespec.files.trimmed_drafter import TrimmedDrafter
from edgespec.runtimes.llama import model as llama
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.llama.model import LlamaModel
from edgespec.runtimes.native import model as native
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.weights import SidecarFile
from edgespec.runtimes.onnx import model as onnx
from edgespec.runtimes.onnx.model import OnnxModel
from edgespec.runtimes.onnx.session import OnnxSettings
from edgespec.runtimes.process.frames import LoadRequest
from edgespec.runtimes.process.model import WorkerModel
from edgespec.runtimes.process.settings import StartingWorker, WorkerSettings

__all__ = ["load_model", "load_native", "load_onnx", "located", "start_model"]

Source = Path | GgufHeader | TrimmedDrafter | OnnxArtefact


def located(source: Source, *, name: str | None = None, sha256: str | None = None) -> LocatedModel:
    """The model of a file, or one that was read already, by default with the file's name and identity."""
    if isinstance(source, Path):
        file = read_model_file(source)
    elif isinstance(source, GgufHeader):
        file = LocatedModel(name=source.path.stem, path=source.path, header=source, identity="test")
    elif isinstance(source, TrimmedDrafter):
        path, header, identity = source.path, source.model_header, source.identity
        file = LocatedModel(name=path.stem, path=path, header=header, identity=identity, artefact=source)
    else:
        path, header, identity = source.graph_path, source.tokenizer_header, source.identity
        file = LocatedModel(name=source.folder.name, path=path, header=header, identity=identity, onnx=source)
    return replace(file, name=name or file.name, identity=sha256 or file.identity)


def load_native(
    source: Source,
    settings: NativeSettings,
    *,
    name: str | None = None,
    sha256: str | None = None,
    sidecar: Path | None = None,
    requantized: bool = False,
    cancelled: Cancelled | None = None,
) -> NativeModel:
    """``sidecar`` is the file for the laid out weights."""
    file = located(source, name=name, sha256=sha256)
    kept = None if sidecar is None else SidecarFile(path=sidecar, sha256=file.identity)
    return native.load_native(file, settings, sidecar=kept, requantized=requantized, job=Job.of(None, cancelled))


def load_model(
    source: Source,
    settings: LlamaSettings,
    *,
    name: str | None = None,
    sha256: str | None = None,
    cancelled: Cancelled | None = None,
) -> LlamaModel:
    return llama.load_model(located(source, name=name, sha256=sha256), settings, Job.of(None, cancelled))


def load_onnx(
    source: Source, settings: OnnxSettings, *, name: str | None = None, sha256: str | None = None
) -> OnnxModel:
    return onnx.load_onnx(located(source, name=name, sha256=sha256), settings)


def start_model(request: LoadRequest, **how: Any) -> WorkerModel:
    """A model in another process, once it is loaded."""
    return StartingWorker(request, WorkerSettings(**how)).wait()
