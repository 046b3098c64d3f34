"""A model on disk: its file or exported folder, its checked header, and the identity of its content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import ModelFileError
from edgespec.files.disk import is_folder
from edgespec.files.gguf.header import read_header, to_convert
from edgespec.files.gguf.names import MERGE_ADAPTER, models_among, part_name
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.onnx.artefact import OnnxArtefact
from edgespec.files.onnx.folder import is_onnx_folder, read_onnx_folder
from edgespec.files.trimmed_drafter import TrimmedDrafter, is_trimmed_drafter, read_artefact

# The architecture that llama.cpp's converters write into image projectors (mmproj-*.gguf).
_PROJECTOR = "clip"

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgespec.files.token_map import TokenMap


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSettings:
    """The settings that another program keeps with a model for its answers, by the name of that ``program``.

    ``system`` is the system message of conversations without one, ``stop`` the texts that end each answer,
    ``sampling`` values of Sampling by name, unchecked. ``has_template``: the program keeps a chat template in a
    private language. ``unused`` are the names of further settings, which edgespec does not obey.
    """

    program: str
    system: str | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    has_template: bool = False
    unused: tuple[str, ...] = ()

    @property
    def note(self) -> str | None:
        """A sentence for the user about settings that are not used; None if all are."""
        if not self.unused:
            return None
        names = ", ".join(self.unused)
        return f"not used of {self.program}'s settings for this model: {names}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedModel:
    """A model's file, its checked header, and the identity of its content.

    ``identity`` is the sha256 of the file if the store recorded it, else a digest of header, size and time; for an
    exported folder, the digest of the manifest. ``artefact`` is set for a trimmed GGUF drafter, whose ``header``
    joins the trimmed tensors with the source's tokenizer. ``onnx`` is set for an ONNX model, whose ``header`` is
    that of ``tokenizer.gguf`` and lists no tensors. ``prepared_folder`` is where a runtime may keep repacked
    weights: the folder of a model from the store, a folder of the home for other models, or None. ``runtime`` is
    the runtime that the user asked for, or "auto". ``drafter`` and ``licence`` come from the catalogue. ``kept``: the
    settings of the program that keeps the model, if there are any. ``projector``: that program keeps the model's
    vision part in another file. ``token_map``: how a drafter reads the tokens of a target with another vocabulary.
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
    kept: KeptSettings | None = None
    projector: bool = False
    token_map: TokenMap | None = None

    @property
    def vision(self) -> bool:
        """Whether the model has a vision part, in its file or in another."""
        return self.projector or bool(self.header.vision_tensors)

    @property
    def weight_bytes(self) -> int:
        return self.header.tensor_bytes if self.onnx is None else self.onnx.weight_bytes

    @property
    def context_length(self) -> int:
        """The most tokens of a text: as many as the model was trained on, or fewer in a graph of fixed shapes."""
        fixed = None if self.onnx is None else self.onnx.static_cache
        return min(self.header.context_length, self.header.context_length if fixed is None else fixed)

    @property
    def tokenizer_path(self) -> Path:
        """The GGUF with the vocabulary."""
        return self.header.path

    @property
    def drafts_only(self) -> bool:
        """Whether the output head is trimmed, so that the model can only be a drafter."""
        return self.kept_ids is not None

    @property
    def kept_ids(self) -> NDArray[np.int32] | None:
        """The tokens that a trimmed head scores, int32 (kept,), ascending; None for a whole head."""
        if self.artefact is not None:
            return self.artefact.ids
        return None if self.onnx is None else self.onnx.ids

    @property
    def source_sha256(self) -> str | None:
        """The sha256 of the file that a folder was exported from; None if not stated or not an exported folder."""
        folder = self.artefact or self.onnx
        source = {} if folder is None else folder.manifest.get("source")
        sha256 = source.get("sha256") if isinstance(source, dict) else None
        return sha256 if isinstance(sha256, str) else None


def read_model_file(path: Path, others: Sequence[Path] = ()) -> LocatedModel:
    """The model in a ``.gguf`` file, a folder with one model, or an exported folder. Raises ModelFileError.

    For a split model ``path`` is any part; ``others`` is passed to ``read_header``.
    """
    in_folder = is_folder(path)
    if in_folder and is_trimmed_drafter(path):
        artefact = read_artefact(path)
        return LocatedModel(
            name=path.resolve().name,
            path=artefact.path,
            header=artefact.model_header,
            identity=artefact.identity,
            artefact=artefact,
        )
    if in_folder and is_onnx_folder(path):
        onnx = read_onnx_folder(path)
        return LocatedModel(
            name=path.resolve().name,
            path=onnx.graph_path,
            header=onnx.tokenizer_header,
            identity=onnx.identity,
            onnx=onnx,
        )
    header = read_header(_file_in(path) if in_folder else path, others)
    first, name = header.path, part_name(header.path.name)
    if header.architecture == _PROJECTOR:
        raise ModelFileError(
            first,
            "it is an image projector of a multimodal model, not a model",
            hint="name the model's own .gguf file, which lies in the same folder",
        )
    if header.metadata.get("general.type") == "adapter":
        raise ModelFileError(first, "it is an adapter (LoRA) of a model, not a model", hint=MERGE_ADAPTER)
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
    """The first file of the only model in a folder; the model may be split. Raises ModelFileError."""
    files = [folder / name for name in models_among(sorted(path.name for path in folder.glob("*")))]
    names = [part_name(path.name) for path in files]
    models = {path.name if name is None else name.first: path for path, name in zip(files, names, strict=True)}
    if not models and any(folder.glob("*.safetensors")):
        raise ModelFileError(folder, "the folder holds safetensors, not GGUF", hint=to_convert(folder))
    if len(models) != 1:
        reason = f"the folder holds {len(models)} models, not one"
        raise ModelFileError(folder, reason, hint="name the .gguf file itself")
    return next(iter(models.values()))
