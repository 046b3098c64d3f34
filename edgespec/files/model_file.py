"""A model on this disk: its file or exported folder, the checked header, and what identifies its content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.names import is_auxiliary, part_name
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.onnx.artefact import OnnxArtefact
from edgespec.files.onnx.folder import is_onnx_folder, read_onnx_folder
from edgespec.files.trimmed_drafter import TrimmedDrafter, is_trimmed_drafter, read_artefact

# The architecture that llama.cpp's converters state in files of projectors (mmproj-*.gguf).
_PROJECTOR = "clip"

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedModel:
    """A model's file, its checked header, and what identifies its content.

    ``identity`` is the sha256 of the file where the store recorded it, else a digest of header, size and time; of a
    folder made by export it is the digest of its manifest. ``artefact`` is set for a trimmed GGUF drafter, whose
    header then joins the trimmed tensors with the source's tokenizer; ``onnx`` for an ONNX model, whose header is
    that of the tokenizer beside it and lists no tensors. ``prepared_folder`` is where a runtime may keep what it
    prepares of it: the folder of a model from the store, one of our own for a model that runs from elsewhere, else
    None. ``runtime`` is the one that was asked for to run this very model, or "auto". ``drafter`` and ``licence`` are
    what the catalogue says of it.
    """

    name: str
    path: Path
    header: GgufHeader
    identity: str
    artefact: TrimmedDrafter | None = None
    onnx: OnnxArtefact | None = None
    prepared_folder: Path | None = None
    runtime: str = "auto"
    drafter: str | None = None
    licence: str | None = None

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


def read_model_file(path: Path, others: Sequence[Path] = ()) -> LocatedModel:
    """The model of a ``.gguf`` file, a folder with one of them, or an exported folder. Raises ModelFileError.

    Of a split model ``path`` is any part; ``others`` are what ``read_header`` takes them for.
    """
    if path.is_dir() and is_trimmed_drafter(path):
        artefact = read_artefact(path)
        return LocatedModel(
            name=path.resolve().name,
            path=artefact.path,
            header=artefact.model_header,
            identity=artefact.identity,
            artefact=artefact,
        )
    if path.is_dir() and is_onnx_folder(path):
        onnx = read_onnx_folder(path)
        return LocatedModel(
            name=path.resolve().name,
            path=onnx.graph_path,
            header=onnx.tokenizer_header,
            identity=onnx.identity,
            onnx=onnx,
        )
    header = read_header(_file_in(path) if path.is_dir() else path, others)
    first, name = header.path, part_name(header.path.name)
    if header.architecture == _PROJECTOR:
        raise ModelFileError(
            first,
            "it is a projector, which turns images into tokens for a model, and no model",
            hint="name the model's own .gguf file, which lies beside it",
        )
    digest = hashlib.sha256()
    for number, part in enumerate(header.parts):
        status = part.path.stat()
        if number == 0:
            with first.open("rb") as file:
                digest.update(file.read(header.data_offset))
        digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
    return LocatedModel(
        name=first.stem if name is None else name.stem,
        path=first,
        header=header,
        identity=f"header:{digest.hexdigest()}",
    )


def _file_in(folder: Path) -> Path:
    """The one model in a folder, which may be in several parts. Raises ModelFileError."""
    files = [path for path in sorted(folder.glob("*.gguf")) if not is_auxiliary(path.name)]
    names = [part_name(path.name) for path in files]
    models = {path.name if name is None else name.first: path for path, name in zip(files, names, strict=True)}
    if len(models) != 1:
        reason = f"the folder holds {len(models)} models, not one"
        raise ModelFileError(folder, reason, hint="name the .gguf file itself")
    return next(iter(models.values()))
