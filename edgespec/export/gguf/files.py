"""Exports a GGUF model to a folder: a whole model, or a drafter with a trimmed output head.

A trimmed drafter has five files: ``drafter.gguf`` (the model with only the kept rows of its head, without tokenizer),
``embedding.bin`` (all rows of the input embedding, looked up by the runtime), ``ids.npy`` (the token of each kept
row), ``tokenizer.gguf`` (metadata without weights) and ``manifest.json``. See VocabTrim (Goel et al., 2025).
"""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edgespec.architectures.table import scales_tokens_only
from edgespec.errors import InvalidRequestError
from edgespec.export.gguf.parts import (
    Literal,
    Part,
    Span,
    check_kept,
    check_own_names,
    drafter_parts,
    embedding_table,
    open_source,
    read_part,
    tokenizer_parts,
    whole_parts,
)
from edgespec.export.gguf.quantize import find_quant, most_bytes, requantize
from edgespec.export.provenance import KEEP, Provenance
from edgespec.export.staging import check_replaceable, staged_folder
from edgespec.files.atomic import rename, sha256_file, write_json
from edgespec.files.export_folder import MANIFEST_NAME
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.progress import QUIET, Job
from edgespec.files.trimmed_drafter import DRAFTER_NAME, EMBEDDING_NAME, IDS_NAME, TOKENIZER_NAME, TRIMMED_KIND
from edgespec.runtimes.llama.library import load

MODEL = "model.gguf"

REQUANTISED = "requantised.gguf"  # in the temporary folder only

# The smallest piece that reports progress: larger than headers and single rows of a scattered table.
_TOLD_BYTES = 1 << 16

_Files: TypeAlias = dict[str, list[Part]]


def export_trimmed(
    source: Path,
    folder: Path,
    provenance: Provenance,
    *,
    kept: npt.NDArray[np.int32],
    threads: int = 1,
    job: Job = QUIET,
) -> Mapping[str, Any]:
    """Write the model ``source`` to ``folder`` with only the ``kept`` rows of its head; returns the manifest.

    ``kept`` is int32 of shape (N,): ascending token ids. All other tensors are copied unchanged, unless the
    provenance's ``quant`` names a format: the model is then requantised first, on ``threads`` threads. ``folder``
    appears complete or not at all; an earlier export there is replaced, any other content refused.

    Raises ModelFileError if the source is malformed or cannot be trimmed, InvalidRequestError, DiskSpaceError,
    CancelledError, EdgespecError if ``folder`` cannot be written.
    """
    header = read_header(source)
    ids = check_kept(np.asarray(kept), header.vocabulary_size)
    provenance = _named(provenance)
    files = _trimmed_files(header, ids)
    with _staged(header, folder, provenance.quant, _total_bytes(files)) as stage:
        model = _requantised(header, stage, provenance.quant, threads, job)
        if model is not header:
            files = _trimmed_files(model, ids)
        written = _write_all(model, stage, files, job)
        (stage / REQUANTISED).unlink(missing_ok=True)
        embedding = embedding_table(model)
        manifest = {
            **_described(header, TRIMMED_KIND, provenance),
            "kept": len(ids),
            "embedding": {
                "type": embedding.type_name,
                "rows": embedding.shape[1],
                "columns": embedding.shape[0],
                "bytes": embedding.byte_count,
                "scale": embedding_scale(header),
            },
            "tensors": tensor_types(model),
            "files": written,
        }
        write_json(stage / MANIFEST_NAME, manifest)
    return manifest


def export_whole(
    source: Path, folder: Path, provenance: Provenance, *, threads: int = 1, job: Job = QUIET
) -> Mapping[str, Any]:
    """Write the model ``source`` to ``folder``/model.gguf, copied or requantised; returns the manifest.

    Arguments and errors are those of ``export_trimmed``.
    """
    header = read_header(source)
    provenance = _named(provenance)
    files: _Files = {MODEL: whole_parts(header)} if provenance.quant == KEEP else {}
    with _staged(header, folder, provenance.quant, _total_bytes(files)) as stage:
        model = _requantised(header, stage, provenance.quant, threads, job)
        if model is header:
            written = _write_all(header, stage, files, job)
        else:
            path = stage / MODEL
            rename(model.path, path)
            written = {MODEL: {"bytes": model.file_bytes, "sha256": sha256_file(path, Job(cancelled=job.cancelled))}}
        manifest = {
            **_described(header, "gguf", provenance),
            "tensors": tensor_types(model),
            "files": written,
        }
        write_json(stage / MANIFEST_NAME, manifest)
    return manifest


def check_destination(source: Path, folder: Path) -> None:
    """Raise InvalidRequestError if an export of the file ``source`` may not replace ``folder``.

    Every export checks this first; callers that work for minutes before an export can check earlier.
    """
    if source.resolve().is_relative_to(folder.resolve()):
        raise InvalidRequestError(
            f"{source} lies in {folder}, which would be replaced", hint="export to another folder"
        )
    check_replaceable(Path(os.path.realpath(folder)))


def embedding_scale(header: GgufHeader) -> float:
    """The factor of input embedding rows that llama.cpp receives as embeddings instead of token ids."""
    return math.sqrt(header.embedding_length) if scales_tokens_only(header.architecture) else 1.0


# ------------------------------------------------------------------------------------------- the files


def _trimmed_files(header: GgufHeader, ids: npt.NDArray[np.int32]) -> _Files:
    embedding = embedding_table(header)
    array = io.BytesIO()
    np.save(array, ids.astype("<i4"), allow_pickle=False)
    return {
        DRAFTER_NAME: drafter_parts(header, ids),
        EMBEDDING_NAME: [Span(embedding.offset, embedding.byte_count)],
        IDS_NAME: [Literal(array.getvalue())],
        TOKENIZER_NAME: tokenizer_parts(header),
    }


def _total_bytes(files: _Files) -> int:
    return sum(part.byte_count for parts in files.values() for part in parts)


@contextmanager
def _staged(header: GgufHeader, folder: Path, quant: str, cut_bytes: int) -> Iterator[Path]:
    """The temporary folder, after a check of the disk space; ``cut_bytes`` is needed without requantisation."""
    needed_bytes = cut_bytes
    if quant != KEEP:
        # The requantised model and the files cut out of it exist at the same time.
        most = most_bytes(header, find_quant(quant))
        needed_bytes = most + cut_bytes * most // header.file_bytes
    check_destination(header.path, folder)
    with staged_folder(folder, needed_bytes=needed_bytes) as stage:
        yield stage


def _requantised(header: GgufHeader, stage: Path, quant: str, threads: int, job: Job) -> GgufHeader:
    check_own_names(header)
    if quant == KEEP:
        return header
    return requantize(header.path, stage / REQUANTISED, quant, threads, job)


def _write_all(header: GgufHeader, stage: Path, files: _Files, job: Job) -> dict[str, dict[str, int | str]]:
    """Write and fsync every file; returns the manifest's record of each file."""
    total, done = _total_bytes(files), 0
    written: dict[str, dict[str, int | str]] = {}
    with open_source(header) as source:
        for name, parts in files.items():
            digest, size = hashlib.sha256(), 0
            with (stage / name).open("xb") as file:
                for part in parts:
                    for data in read_part(part, source, header.path):
                        job.check("the export was cancelled; nothing was written")
                        file.write(data)
                        digest.update(data)
                        size += len(data)
                        if len(data) >= _TOLD_BYTES:
                            job.tell("writing", name, done_bytes=done + size, total_bytes=total)
                file.flush()
                os.fsync(file.fileno())
            done += size
            written[name] = {"bytes": size, "sha256": digest.hexdigest()}
            job.tell("writing", name, done_bytes=done, total_bytes=total)
    return written


# ---------------------------------------------------------------------------------------- the manifest


def _named(provenance: Provenance) -> Provenance:
    """With the format's own name. Raises InvalidRequestError for an unknown one."""
    return provenance if provenance.quant == KEEP else replace(provenance, quant=find_quant(provenance.quant).name)


def _described(header: GgufHeader, kind: str, provenance: Provenance) -> dict[str, Any]:
    return provenance.manifest(
        kind,
        source_bytes=header.file_bytes,
        architecture=header.architecture,
        vocabulary_size=header.vocabulary_size,
        mask_token_id=header.mask_token_id,
        tools={} if provenance.quant == KEEP else {"llama.cpp": load().build},
    )


def tensor_types(header: GgufHeader) -> dict[str, int]:
    """The number of tensors of each type."""
    return dict(sorted(Counter(tensor.type_name for tensor in header.tensors).items()))
