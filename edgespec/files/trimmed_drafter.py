"""Reads the folder of a drafter with a trimmed output head, as hostile input.

The output head is a third of the bytes that a forward of a drafter reads, and most of its rows are for tokens that a
target hardly ever emits. Without those rows drafting is faster at nearly the same acceptance (VocabTrim, Goel et al.,
2025; FR-Spec, Zhao et al., 2025). The input embedding keeps all its rows, in a separate file, so that a prompt may
hold any token. ``read_artefact`` reads and checks the folder without reading the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from edgespec.files.checked import shown
from edgespec.files.export_folder import (
    MANIFEST_NAME,
    bad_file,
    check_hash,
    check_manifest,
    check_said,
    check_size,
    checked_ids,
    is_export,
    read_content,
)
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GGML_TYPES, GgufHeader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TRIMMED_KIND = "trimmed-drafter"
DRAFTER_NAME, EMBEDDING_NAME = "drafter.gguf", "embedding.bin"
IDS_NAME, TOKENIZER_NAME = "ids.npy", "tokenizer.gguf"
_FILES = (DRAFTER_NAME, EMBEDDING_NAME, IDS_NAME, TOKENIZER_NAME)

# The largest known vocabulary (Gemma 3: 262 144 tokens) takes 1 MiB of ids and 16 MiB of tokenizer. Both files are
# hashed at each reading: 0.1 s at this limit on a processor without SHA instructions.
_LARGEST_HASHED_BYTES = 64 << 20

# Exactly the header that numpy writes for a vector of int32, format version 1.0; nothing is evaluated or unpickled.
_NPY_MAGIC = b"\x93NUMPY\x01\x00"
_NPY_HEADER = re.compile(rb"\{'descr': '<i4', 'fortran_order': False, 'shape': \(([0-9]{1,10}),\), \} *\n")
_LARGEST_NPY_HEADER_BYTES = 1024

# Tables other than the input embedding that a model indexes by token id; a trimmed drafter receives no ids.
_OTHER_LOOKUPS = ("per_layer_token_embd.weight",)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """The input embedding as raw bytes: ``rows`` of ``columns`` weights, each row ``row_bytes`` of a ggml type.

    The model's input is the dequantised row times ``scale``.
    """

    path: Path
    type_name: str
    rows: int
    columns: int
    row_bytes: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedDrafter:
    """A checked trimmed drafter. ``ids``: int32 (kept,), ascending, the source token of each row of the trimmed head.

    ``header`` is that of ``drafter.gguf``, which has no tokenizer; ``identity`` is a digest of the manifest.
    """

    folder: Path
    manifest: Mapping[str, Any]
    header: GgufHeader
    tokenizer_header: GgufHeader
    ids: NDArray[np.int32]
    embedding: EmbeddingTable
    identity: str

    @property
    def path(self) -> Path:
        """The file with the weights."""
        return self.header.path

    @property
    def model_header(self) -> GgufHeader:
        """The header with the trimmed tensors and the source's tokenizer, for all callers except the loader.

        Sizes are those of the trimmed model; the vocabulary is the source's.
        """
        tokenizer = {k: v for k, v in self.tokenizer_header.metadata.items() if k.startswith("tokenizer.")}
        own = {k: v for k, v in self.header.metadata.items() if not k.startswith("tokenizer.")}
        return replace(self.header, metadata=MappingProxyType(own | tokenizer))


def is_trimmed_drafter(folder: Path) -> bool:
    """Whether a folder is a trimmed drafter, even a damaged one. Raises nothing."""
    return is_export(folder, TRIMMED_KIND, (DRAFTER_NAME, IDS_NAME))


def read_artefact(folder: Path) -> TrimmedDrafter:
    """Read and check the trimmed drafter in ``folder``.

    Every size is checked against the manifest, the headers and the other files before use; the ids and the tokenizer
    are also checked by their sha256. Raises ModelFileError with the reason and a hint.
    """
    manifest, digest = check_manifest(folder, TRIMMED_KIND, _FILES)
    hashed = dict.fromkeys((IDS_NAME, TOKENIZER_NAME), _LARGEST_HASHED_BYTES)
    sizes = {name: check_size(folder, manifest, name, most_bytes=hashed.get(name)) for name in _FILES}
    header, tokenizer = read_header(folder / DRAFTER_NAME), read_header(folder / TOKENIZER_NAME)
    if tokenizer.tensors:
        raise bad_file(tokenizer.path, "it should hold no tensors")
    vocabulary_size = tokenizer.vocabulary_size
    kept = _kept_rows(header, vocabulary_size)
    found = {"architecture": header.architecture, "vocabulary_size": vocabulary_size, "kept": kept}
    check_said(folder, manifest, found)
    if tokenizer.architecture != header.architecture:
        raise bad_file(tokenizer.path, f"it is for {tokenizer.architecture}, the drafter is {header.architecture}")
    mask = header.mask_token_id
    if mask is not None and mask >= vocabulary_size:
        raise bad_file(header.path, f"its mask token {mask} is not in the vocabulary of {vocabulary_size} tokens")
    check_hash(manifest, tokenizer.path, read_content(tokenizer.path))
    return TrimmedDrafter(
        folder=folder,
        manifest=MappingProxyType(manifest),
        header=header,
        tokenizer_header=tokenizer,
        ids=_ids(folder / IDS_NAME, manifest, kept, vocabulary_size),
        embedding=_embedding(folder, manifest, header, vocabulary_size, sizes[EMBEDDING_NAME]),
        identity=f"trimmed:{digest}",
    )


# ------------------------------------------------------------------------------------------- the contents


def _kept_rows(header: GgufHeader, vocabulary_size: int) -> int:
    """The rows of the trimmed head: the key's number, and the tensors', since llama.cpp reads both."""
    said = header.metadata.get(f"{header.architecture}.vocab_size")
    if type(said) is not int:
        raise bad_file(header.path, f"it does not state {header.architecture}.vocab_size")
    if not said <= vocabulary_size:
        raise bad_file(header.path, f"it keeps {said} rows, more than the vocabulary of {vocabulary_size} tokens")
    tables = {tensor.name: tensor for tensor in header.tensors}
    for name in _OTHER_LOOKUPS:
        if name in tables:
            raise bad_file(header.path, f"it looks tokens up in {name}, which needs the whole vocabulary")
    wanted = (header.embedding_length, said)
    for name in ("token_embd.weight", "output.weight"):
        table = tables.get(name)
        if table is not None and table.shape != wanted:
            raise bad_file(header.path, f"{name} has the shape {table.shape} instead of {wanted}")
    if "token_embd.weight" not in tables:
        raise bad_file(header.path, "it has no token_embd.weight")
    return said


def _ids(path: Path, manifest: Mapping[str, Any], kept: int, vocabulary_size: int) -> NDArray[np.int32]:
    """The token of each row of the head: int32 (kept,), ascending. Parsed by hand: nothing is unpickled."""
    import numpy as np

    content = read_content(path)
    if content[:8] != _NPY_MAGIC:
        raise bad_file(path, "it is not a .npy file of version 1.0")
    start = 10
    end = start + int.from_bytes(content[8:start], "little")
    header = _NPY_HEADER.fullmatch(content, start, end) if end - start <= _LARGEST_NPY_HEADER_BYTES else None
    if header is None or len(content) < end:
        raise bad_file(path, "it is not a vector of int32")
    count = int(header[1])
    if count != kept or len(content) - end != 4 * kept:
        raise bad_file(path, f"it says {count} ids in {len(content) - end} bytes, the drafter has {kept} rows")
    check_hash(manifest, path, content)
    return checked_ids(path, np.frombuffer(content, dtype="<i4", offset=end), vocabulary_size)


def _embedding(
    folder: Path, manifest: Mapping[str, Any], header: GgufHeader, vocabulary_size: int, size: int
) -> EmbeddingTable:
    path, told = folder / MANIFEST_NAME, manifest.get("embedding")
    if not isinstance(told, dict):
        raise bad_file(path, "embedding is missing or of the wrong type")
    known = {name: (block, block_bytes) for name, block, block_bytes in GGML_TYPES.values()}
    type_name, scale = told.get("type"), told.get("scale")
    if not isinstance(type_name, str) or type_name not in known:
        raise bad_file(path, f"the embedding's type {shown(type_name)} is not known")
    block, block_bytes = known[type_name]
    columns = header.embedding_length
    if columns % block:
        raise bad_file(path, f"rows of {columns} weights do not fill the blocks of {type_name}")
    row_bytes = columns // block * block_bytes
    expected = {"rows": vocabulary_size, "columns": columns, "bytes": vocabulary_size * row_bytes}
    for name, value in expected.items():
        if type(told.get(name)) is not int or told[name] != value:
            raise bad_file(path, f"the embedding's {name} are {shown(told.get(name))} instead of {value}")
    if size != expected["bytes"]:
        raise bad_file(folder / EMBEDDING_NAME, f"it has {size} bytes instead of {expected['bytes']}")
    # Gemma's scale is the square root of its width; 2**10 is the root of the widest embedding of a valid header.
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale <= 2**10:
        raise bad_file(path, f"the embedding's scale {shown(scale)} is not plausible")
    return EmbeddingTable(
        path=folder / EMBEDDING_NAME,
        type_name=type_name,
        rows=vocabulary_size,
        columns=columns,
        row_bytes=row_bytes,
        scale=float(scale),
    )
