"""From a MODEL argument to a file on this machine: catalogue, store, hub reference, or path."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import ModelFileError, ModelNotFoundError
from edgespec.files.artefact import TrimmedDrafter, is_trimmed_drafter, read_artefact
from edgespec.files.gguf import GgufHeader, read_header
from edgespec.files.progress import Cancelled, ProgressCallback
from edgespec.files.specs import CatalogueName, LocalPath, ModelSpec, parse_reference, spec_of_hub_reference
from edgespec.files.store import Store
from edgespec.profiles.catalogue import catalogue, lookup


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedModel:
    """A model's file, its checked header, and what identifies its content.

    ``identity`` is the sha256 of the file where the store recorded it, else a digest of header, size and time; of a
    trimmed drafter it is the digest of its manifest. ``artefact`` is set for one of those, whose header then joins
    the trimmed tensors with the source's tokenizer.
    """

    name: str
    path: Path
    header: GgufHeader
    identity: str
    spec: ModelSpec | None
    artefact: TrimmedDrafter | None = None


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
        )

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
