"""From a MODEL argument to a file on this machine: catalogue, store, hub reference, or path."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edgespec.errors import HashMismatchError, ModelFileError, ModelNotFoundError
from edgespec.files.gguf.header import GgufHeader, read_header
from edgespec.files.onnx.folder import OnnxArtefact, is_onnx_folder, read_onnx_folder
from edgespec.files.progress import Cancelled, ProgressCallback
from edgespec.files.trimmed_drafter import TrimmedDrafter, is_trimmed_drafter, read_artefact
from edgespec.store.catalogue import catalogue, lookup
from edgespec.store.references import CatalogueName, LocalPath, ModelSpec, parse_reference, spec_of_hub_reference
from edgespec.store.store import Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedModel:
    """A model's file, its checked header, and what identifies its content.

    ``identity`` is the sha256 of the file where the store recorded it, else a digest of header, size and time; of a
    folder made by export it is the digest of its manifest. ``artefact`` is set for a trimmed GGUF drafter, whose
    header then joins the trimmed tensors with the source's tokenizer; ``onnx`` for an ONNX model, whose header is
    that of the tokenizer beside it and lists no tensors. ``store_folder`` is the folder of a model from the store,
    ``runtime`` the one that was asked for to run this very model, or "auto".
    """

    name: str
    path: Path
    header: GgufHeader
    identity: str
    spec: ModelSpec | None
    artefact: TrimmedDrafter | None = None
    onnx: OnnxArtefact | None = None
    store_folder: Path | None = None
    runtime: Literal["auto", "llama", "native"] = "auto"

    @property
    def weight_bytes(self) -> int:
        return self.header.tensor_bytes if self.onnx is None else self.onnx.weight_bytes

    @property
    def tokenizer_path(self) -> Path:
        """The GGUF with the vocabulary."""
        return self.header.path

    @property
    def drafts_only(self) -> bool:
        """Whether its output head was trimmed, so that it cannot say everything."""
        return self.kept_ids is not None

    @property
    def kept_ids(self) -> NDArray[np.int32] | None:
        """The tokens that a trimmed head can say, int32 (kept,), ascending; None for a whole head."""
        if self.artefact is not None:
            return self.artefact.ids
        return None if self.onnx is None else self.onnx.ids

    @property
    def source_sha256(self) -> str | None:
        """Of the file that a folder was exported from; None where the manifest states none, and for other files."""
        folder = self.artefact or self.onnx
        source = {} if folder is None else folder.manifest.get("source")
        sha256 = source.get("sha256") if isinstance(source, dict) else None
        return sha256 if isinstance(sha256, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Locator:
    """Finds models. Without ``download`` nothing touches the network."""

    store: Store
    download: bool = False
    progress: ProgressCallback | None = None
    cancelled: Cancelled | None = None

    def locate(self, text: str) -> LocatedModel:
        """The file behind a MODEL argument, fetched first if that is allowed and needed.

        Raises InvalidRequestError, ModelNotFoundError, ModelFileError, DownloadError, DiskSpaceError.
        """
        reference = parse_reference(text, catalogue().keys())
        if isinstance(reference, LocalPath):
            return self._local(reference.path)
        spec = lookup(reference.name) if isinstance(reference, CatalogueName) else spec_of_hub_reference(reference)
        if spec.kind != "model":
            raise ModelNotFoundError(f"{spec.name} is not a model", hint="see `edgespec models`")
        return self.locate_spec(spec)

    def locate_spec(self, spec: ModelSpec) -> LocatedModel:
        """The file of a known model."""
        stored = self.store.find(spec.name)
        if stored is None and not self.download:
            raise ModelNotFoundError(
                f"{spec.name} is not on this machine", hint=f"fetch it with `edgespec pull {spec.name}`"
            )
        if stored is None:
            stored = self.store.fetch(spec, progress=self.progress, cancelled=self.cancelled)
        return LocatedModel(
            name=spec.name,
            path=stored.path,
            header=read_header(stored.path),
            identity=f"sha256:{stored.sha256}",
            spec=spec,
            store_folder=stored.folder,
        )

    def find_source(self, exported: LocatedModel) -> LocatedModel | None:
        """The model in the store that ``exported`` was made from; None if it is not there, or not as it was."""
        sha256 = exported.source_sha256
        for stored in self.store.list():
            if sha256 is not None and stored.sha256 == sha256:
                try:
                    found = self.store.find(stored.name)
                    header = None if found is None else read_header(found.path)
                except (HashMismatchError, ModelFileError):
                    continue
                if found is not None and header is not None:
                    return LocatedModel(
                        name=found.name,
                        path=found.path,
                        header=header,
                        identity=f"sha256:{sha256}",
                        spec=None,
                        store_folder=found.folder,
                    )
        return None

    def _local(self, path: Path) -> LocatedModel:
        if path.is_dir() and is_trimmed_drafter(path):
            artefact = read_artefact(path)
            return LocatedModel(
                name=path.resolve().name,
                path=artefact.path,
                header=artefact.model_header,
                identity=artefact.identity,
                spec=None,
                artefact=artefact,
            )
        if path.is_dir() and is_onnx_folder(path):
            onnx = read_onnx_folder(path)
            return LocatedModel(
                name=path.resolve().name,
                path=onnx.graph_path,
                header=onnx.tokenizer_header,
                identity=onnx.identity,
                spec=None,
                onnx=onnx,
            )
        if path.is_dir():
            files = sorted(path.glob("*.gguf"))
            if len(files) != 1:
                raise ModelFileError(
                    path, f"the folder holds {len(files)} .gguf files, not one", hint="name the file itself"
                )
            path = files[0]
        header = read_header(path)
        status = path.stat()
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(header.data_offset))
        digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
        return LocatedModel(
            name=path.stem, path=path, header=header, identity=f"header:{digest.hexdigest()}", spec=None
        )
