"""``edgespec export`` of a Hugging Face folder: to GGUF with edgespec's converter, to ONNX with Optimum."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.export.export_report import Written
from edgespec.cli.options import default_threads
from edgespec.cli.terminal.output import State
from edgespec.errors import InvalidRequestError
from edgespec.export.provenance import KEEP, Provenance
from edgespec.files.home import home
from edgespec.files.progress import Job

if TYPE_CHECKING:
    from edgespec.export.perplexity import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRequest:
    """The options of the command line, without the model."""

    to: str
    output: Path
    quant: str
    python: Path | None
    trimmed: bool
    static_cache: int | None
    offline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A folder with config.json and safetensors, the model's name, and the licence that its hub states."""

    name: str
    path: Path
    licence: str | None = None

    def provenance(self, quant: str) -> Provenance:
        return Provenance(name=self.name, licence=self.licence, quant=quant)


def export_if_folder(model: str, request: FolderRequest, state: State, *, as_json: bool) -> bool:
    """Export the folder that ``model`` names and print the report; False if ``model`` is not a folder.

    A hub repository without GGUF files is downloaded first. Raises EdgespecError.
    """
    source = _find(model, request, state)
    if source is None:
        if request.python is not None:
            raise InvalidRequestError(
                f"--python is only for Hugging Face folders, and {model} is not one",
                hint="leave out --python",
            )
        return False
    with state.progress() as progress:
        write = _write_onnx if request.to == "onnx" else _write_gguf
        manifest = write(source, request, progress.job)
    Written(
        folder=request.output,
        source_name=source.name,
        bytes_before=None,
        manifest=manifest,
        trimming=None,
        cost=None if request.quant in (KEEP, "f32") else _not_measured(),
    ).tell(state, as_json=as_json)
    return True


def _not_measured() -> Cost:
    from edgespec.export.perplexity import Cost

    reason = "no runtime reads a Hugging Face folder; export it with --to gguf first, then the result"
    return Cost(rounded=(), measured=None, reason=reason)


def _find(model: str, request: FolderRequest, state: State) -> _Source | None:
    """The folder to export; None if ``model`` is not one. The options are checked before anything is downloaded."""
    from edgespec.export.huggingface.gguf import is_model_folder
    from edgespec.files.gguf.names import models_among
    from edgespec.store.catalogue import catalogue
    from edgespec.store.references import HubReference, LocalPath, Network, parse_reference, spec_of_hub_reference
    from edgespec.store.store import Store

    reference = parse_reference(model, catalogue().keys())
    if isinstance(reference, LocalPath):
        path = reference.path
        # Repositories of GGUF files have a config.json as well.
        if not is_model_folder(path) or (
            models_among(each.name for each in path.glob("*")) and not any(path.glob("*.safetensors"))
        ):
            return None
        _check(model, request)
        return _Source(name=path.resolve().name, path=path)
    if (
        not isinstance(reference, HubReference)
        or (reference.filename or reference.quant) is not None
        or Store(home()).find(spec_of_hub_reference(reference).name) is not None  # the store has its GGUF
    ):
        return None
    from edgespec.store.hub.folder import fetch_hub_folder
    from edgespec.store.hub.listing import list_hub_files

    network = Network(offline=request.offline)
    with state.progress() as progress:
        listing = list_hub_files(reference.repo, reference.revision, network, progress.job)
        if not listing.is_model_folder:
            return None
        _check(model, request)
        path = fetch_hub_folder(listing, lambda folder: _read_settings(folder, request.to), network, progress.job)
    return _Source(name=listing.repo.rpartition("/")[2], path=path, licence=listing.licence)


def _check(model: str, request: FolderRequest) -> None:
    """Raise InvalidRequestError for options that folders do not support, or an output that must not be replaced."""
    from edgespec.export.staging import check_replaceable

    if request.python is not None and request.to != "onnx":
        raise InvalidRequestError(
            f"--python is only for --to onnx, and {model} is exported to {request.to}",
            hint="leave out --python",
        )
    first = f"first `edgespec export {model} --to gguf -o DIR`, then export DIR"
    if request.trimmed:
        raise InvalidRequestError(
            "only a GGUF's output head can be trimmed, and this is a Hugging Face folder", hint=first
        )
    if request.static_cache is not None:
        raise InvalidRequestError("--static-cache needs a GGUF, and this is a Hugging Face folder", hint=first)
    check_replaceable(Path(os.path.realpath(request.output)))


def _read_settings(folder: Path, to: str) -> None:
    """Raise EdgespecError for a config.json, a tokenizer or a generation_config.json that cannot be exported."""
    from edgespec.export.huggingface.config import read_config
    from edgespec.export.huggingface.description import describe_folder
    from edgespec.export.huggingface.sampling import read_sampling
    from edgespec.export.huggingface.tokenizer import read_vocabulary

    read_sampling(folder)
    rows = (describe_folder if to == "onnx" else read_config)(folder).vocabulary_size
    if rows is not None:
        read_vocabulary(folder, rows)


def _write_gguf(source: _Source, request: FolderRequest, job: Job) -> Mapping[str, Any]:
    from edgespec.export.huggingface.gguf import export_from_folder

    threads = 1 if request.quant == KEEP else default_threads()
    return export_from_folder(source.path, request.output, source.provenance(request.quant), threads=threads, job=job)


def _write_onnx(source: _Source, request: FolderRequest, job: Job) -> Mapping[str, Any]:
    from edgespec.export.onnx.from_folder import export_folder_to_onnx

    return export_folder_to_onnx(
        source.path,
        request.output,
        source.provenance(request.quant),
        home=home(),
        python=request.python,
        download=not request.offline,
        job=job,
    )
