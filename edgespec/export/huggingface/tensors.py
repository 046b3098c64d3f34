"""Plans and streams the tensors of a safetensors folder with the names, shapes and row order of llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.architectures.shape import EMBEDDING, HEAD, OUTPUT_NORM, layer_parts
from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.export.huggingface.config import ModelConfig
from edgespec.export.packages import require
from edgespec.files.checked import DOWNLOAD_AGAIN
from edgespec.files.safetensors import SafeTensor, to_float32

_SUFFIXES = (".weight", ".bias")

_ELEMENT_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}

# Bytes per write: large enough for full disk speed, small enough for prompt cancellation.
_CHUNK_BYTES = 8 << 20

# The limit of tokens in a tokenizer.json; the largest known vocabulary has 262144.
_MOST_ROWS = 1 << 20

# Buffers that old releases of transformers saved with the weights; config.json determines their values.
_DERIVED = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")

# Name prefixes in multimodal models: of the text model (since transformers 5, and before), and of skipped parts.
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.")
_HEAD, _TEXT_HEAD = "lm_head.weight", "language_model.lm_head.weight"
_EMBEDDINGS = tuple(f"{prefix}embed_tokens.weight" for prefix in ("model.", *_TEXT_PREFIXES))
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor of the GGUF: ``shape`` slowest dimension first, ``type_name`` F32, F16 or BF16.

    The elements come from ``source``, or from ``values`` if they are computed. ``heads``: the number of heads whose
    rows are interleaved. ``offset`` is added to every element (float32 only).
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    source: SafeTensor | None = None
    values: npt.NDArray[np.float32] | None = None
    heads: int | None = None
    offset: float = 0.0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def byte_count(self) -> int:
        return self.elements * _ELEMENT_BYTES[self.type_name]

    def chunks(self) -> Iterator[npt.NDArray[Any]]:
        """The elements in order, in pieces of a few megabytes. Raises ModelFileError if the file cannot be read."""
        if self.source is None:
            if self.values is not None:
                yield self.values
            return
        stored = self.source.view()
        height = stored.shape[0] // (self.heads or 1)
        if self.heads is None:
            row_bytes = max(stored.nbytes // max(stored.shape[0], 1), 1)
            height = max(_CHUNK_BYTES // row_bytes, 1)
        for first in range(0, stored.shape[0], max(height, 1)):
            rows = stored[first : first + height]
            if self.type_name == "F32":
                rows = to_float32(rows)
            if self.heads is not None:
                rows = interleaved(rows)
            yield np.ascontiguousarray(rows + np.float32(self.offset) if self.offset else rows)


def interleaved(head: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Reorder the n rows of a head so that the rotary pair of rows i and i + n/2 becomes neighbours."""
    halves = head.reshape(2, head.shape[0] // 2, *head.shape[1:])
    return halves.swapaxes(0, 1).reshape(head.shape)


def count_rows(tensors: Mapping[str, SafeTensor], config: ModelConfig, folder: Path) -> int:
    """The number of rows of the input embedding: the vocabulary size. Raises ModelFileError."""
    for name in _EMBEDDINGS:
        tensor = tensors.get(name)
        if tensor is not None and len(tensor.shape) == 2 and 0 < tensor.shape[0] <= _MOST_ROWS:
            if config.vocabulary_size not in (None, tensor.shape[0]):
                reason = f"{name} has {tensor.shape[0]} rows and config.json says {config.vocabulary_size}"
                raise ModelFileError(tensor.path, reason, hint=DOWNLOAD_AGAIN)
            return tensor.shape[0]
    raise ModelFileError(folder, "its weights lack model.embed_tokens.weight", hint=DOWNLOAD_AGAIN)


def has_own_head(tensors: Mapping[str, SafeTensor]) -> bool:
    """Whether the weights hold an output head that differs from the embedding. Raises ModelFileError."""
    heads = [tensors[name] for name in (_HEAD, _TEXT_HEAD) if name in tensors]
    embeddings = [tensors[name] for name in _EMBEDDINGS if name in tensors]
    return any(not head.is_copy_of(embedding) for head in heads for embedding in embeddings)


def plan_tensors(
    tensors: Mapping[str, SafeTensor], config: ModelConfig, rows: int, folder: Path
) -> tuple[PlannedTensor, ...]:
    """The tensors of the GGUF, in file order, for a vocabulary of ``rows`` tokens.

    Raises ModelFileError if a tensor is missing, unknown, of another shape than ``config`` states, or not of type
    F32, F16 or BF16.
    """
    named = _renamed(tensors, config, folder)
    # A head that differs is the model's, whatever config.json says: so transformers 5 reads it.
    if config.tied and HEAD in named and EMBEDDING in named and named[HEAD].is_copy_of(named[EMBEDDING]):
        del named[HEAD]
    needed = _shapes(config, rows, named)
    planned = []
    for name, shape in needed.items():
        tensor = named.pop(name, None)
        if tensor is None:
            raise ModelFileError(folder, f"its weights lack the tensor for {name}", hint=DOWNLOAD_AGAIN)
        planned.append(_plan(tensor, name, shape, config))
    for tensor in named.values():
        raise InvalidRequestError(
            f"{tensor.path}: llama.cpp does not use tensor {tensor.name[:80]!a} in this architecture",
            hint="`--to onnx` converts such models through Optimum",
        )
    for name, values in config.tables.items():
        planned.append(PlannedTensor(name=name, shape=values.shape, type_name="F32", values=values))
    return tuple(planned)


def _kind_of(name: str) -> str:
    """The part of a layer that a tensor belongs to: "attn_q" of "blk.3.attn_q.weight"."""
    return name.split(".")[2] if name.startswith("blk.") else ""


def _renamed(tensors: Mapping[str, SafeTensor], config: ModelConfig, folder: Path) -> dict[str, SafeTensor]:
    """The tensors of the text model by their GGUF names."""
    gguf = require("gguf")

    architecture = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == config.architecture.name)
    names = gguf.get_tensor_name_map(architecture, config.sizes.layers)
    found: dict[str, SafeTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_DERIVED) or (config.multimodal and name.startswith(_OTHER_PARTS)):
            continue
        theirs = _text_name(name) if config.multimodal else name
        ours = names.get_name(theirs, try_suffixes=_SUFFIXES)
        # A name without a suffix is a module's, and transformers never saves a tensor under its GGUF name.
        if ours is None or not theirs.endswith(_SUFFIXES) or theirs == ours:
            raise InvalidRequestError(
                f"{tensor.path}: tensor {name[:80]!a} does not belong to the {config.architecture.name} architecture",
                hint="give a folder that transformers saved; merge adapters first",
            )
        if ours in found:
            raise ModelFileError(folder, f"its weights hold {ours} twice", hint=DOWNLOAD_AGAIN)
        found[ours] = tensor
    return found


def _text_name(name: str) -> str:
    if name == _TEXT_HEAD:
        return _HEAD
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name


def _shapes(config: ModelConfig, rows: int, named: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Every tensor that the architecture needs, and the biases that it may have, with its shape."""
    architecture, sizes = config.architecture, config.sizes
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (rows, sizes.width), OUTPUT_NORM: (sizes.width,)}
    if config.tied is False or HEAD in named:
        shapes[HEAD] = (rows, sizes.width)
    for number in range(sizes.layers):
        for _, part in layer_parts(architecture, sizes, named, number, all_biases=architecture.saved.needs_biases):
            shapes[part.tensor] = part.shape[::-1]
            if part.bias is not None:
                shapes[part.bias] = (part.height,)
    return shapes


def _plan(tensor: SafeTensor, name: str, shape: tuple[int, ...], config: ModelConfig) -> PlannedTensor:
    if tensor.shape != shape:
        reason = f"tensor {tensor.name} has the shape {list(tensor.shape)} and config.json says {list(shape)}"
        raise ModelFileError(tensor.path, reason, hint=DOWNLOAD_AGAIN)
    if tensor.dtype not in _ELEMENT_BYTES:
        raise InvalidRequestError(
            f"{tensor.path}: tensor {tensor.name} is {tensor.dtype}; only F32, F16 and BF16 weights are converted",
            hint="give the folder with the original weights; --quant quantises them",
        )
    heads = {"attn_q": config.sizes.heads, "attn_k": config.sizes.kv_heads}.get(_kind_of(name))
    reorders = config.architecture.neighbours and not config.architecture.saved.neighbours
    return PlannedTensor(
        name=name,
        shape=shape,
        type_name="F32" if len(shape) == 1 else tensor.dtype,  # llama.cpp adds and multiplies vectors in float32 only
        source=tensor,
        heads=heads if reorders else None,
        offset=config.architecture.saved.norm_offset if name.endswith("_norm.weight") else 0.0,
    )
