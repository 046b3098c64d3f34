"""Converts a Hugging Face folder (config.json, tokenizer.json, safetensors) to GGUF, without PyTorch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.export.gguf.files import MODEL, REQUANTISED, check_destination, tensor_types
from edgespec.export.gguf.quantize import find_quant, requantize
from edgespec.export.huggingface.config import CONFIG, ModelConfig, Value, read_config
from edgespec.export.huggingface.sampling import read_sampling
from edgespec.export.huggingface.tensors import PlannedTensor, count_rows, plan_tensors
from edgespec.export.huggingface.tokenizer import Vocabulary, read_vocabulary
from edgespec.export.packages import require
from edgespec.export.provenance import KEEP, Provenance
from edgespec.export.staging import staged_folder
from edgespec.files.atomic import rename, sha256_file, write_json
from edgespec.files.checked import DOWNLOAD_AGAIN
from edgespec.files.export_folder import MANIFEST_NAME
from edgespec.files.gguf.header import read_header
from edgespec.files.progress import QUIET, Job
from edgespec.files.safetensors import read_safetensors_folder
from edgespec.runtimes.llama.library import load

# general.file_type in the numbering of llama.h (enum llama_ftype), by the type of most weights.
_FILE_TYPES: Mapping[str, int] = {"F32": 0, "F16": 1, "BF16": 32}

# Estimates of the header's size: about 30 bytes per token and merge, under 200 per tensor record.
_TOKEN_BYTES, _TENSOR_BYTES, _HEADER_BYTES = 128, 256, 4 << 20

# The smallest piece that reports progress: larger than a norm.
_TOLD_BYTES = 1 << 16


def is_model_folder(path: Path) -> bool:
    """Whether ``path`` is a folder with a config.json, as transformers saves it."""
    return (path / CONFIG).is_file()


def export_from_folder(
    source: Path, folder: Path, provenance: Provenance, *, threads: int = 1, job: Job = QUIET
) -> Mapping[str, Any]:
    """Write the model in the folder ``source`` to ``folder``/model.gguf; returns the manifest.

    With ``quant`` "keep" the matrices keep their type (F32, F16 or BF16) and all bits; any other format quantises
    them on ``threads`` threads. Name and licence go into manifest and GGUF. ``folder`` appears complete or not at
    all; an earlier export there is replaced, any other content refused. Tensors are read in pieces of a few
    megabytes, so memory does not grow with the model.

    Raises ModelFileError if the source is malformed, InvalidRequestError if it cannot be converted, DiskSpaceError,
    CancelledError, EdgespecError if ``folder`` cannot be written.
    """
    chosen = None if provenance.quant == KEEP else find_quant(provenance.quant)
    if threads < 1:
        raise InvalidRequestError(f"threads must be at least 1, not {threads}")
    check_destination(source / CONFIG, folder)
    config = read_config(source)
    tensors = read_safetensors_folder(source)
    rows = count_rows(tensors, config, source)
    mask = config.mask_token_id
    if mask is not None and mask >= rows:
        raise ModelFileError(
            source / CONFIG, f"pard_token is {mask}, and the embedding has {rows} rows", hint=DOWNLOAD_AGAIN
        )
    planned = plan_tensors(tensors, config, rows, source)
    vocabulary, sampling = read_vocabulary(source, rows), read_sampling(source, job)

    kept_bytes = sum(tensor.byte_count for tensor in planned)
    header_bytes = _HEADER_BYTES + _TOKEN_BYTES * rows + _TENSOR_BYTES * len(planned)
    needed_bytes = kept_bytes + header_bytes
    if chosen is not None:  # both files exist until the quantised file is complete
        bits = sum(each.elements * (chosen.most_bits if len(each.shape) > 1 else 32) for each in planned)
        needed_bytes += int(bits / 8) + header_bytes
    with staged_folder(folder, needed_bytes=needed_bytes) as stage:
        path = stage / MODEL
        values = _metadata(config, vocabulary, planned, provenance) | sampling
        _write(path, config.architecture.name, planned, values, job)
        header = read_header(path)
        if chosen is not None:
            quantised = stage / REQUANTISED
            requantize(path, quantised, chosen.name, threads, job)
            rename(quantised, path)
            header = read_header(path)
        digest = sha256_file(path, Job(cancelled=job.cancelled))
        manifest = {
            **(provenance if chosen is None else replace(provenance, quant=chosen.name)).manifest(
                "gguf",
                # Only the size of the weights' files: hashing the files would take as long as the export.
                source_bytes=_bytes_of({tensor.path for tensor in tensors.values()}),
                architecture=config.architecture.name,
                vocabulary_size=rows,
                mask_token_id=mask,
                tools={} if chosen is None else {"llama.cpp": load().build},
            ),
            "tensors": tensor_types(header),
            "files": {MODEL: {"bytes": header.file_bytes, "sha256": digest}},
        }
        write_json(stage / MANIFEST_NAME, manifest)
    return manifest


def write_weightless(
    path: Path, architecture: str, provenance: Provenance, values: Mapping[str, Value], vocabulary: Vocabulary
) -> None:
    """Write a GGUF with the tokenizer and the architecture's keys ``values``, without weights."""
    _write(path, architecture, (), {**_general(provenance, vocabulary), **values, **vocabulary.metadata()}, QUIET)


def _bytes_of(paths: set[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _metadata(
    config: ModelConfig, vocabulary: Vocabulary, planned: Sequence[PlannedTensor], provenance: Provenance
) -> dict[str, Value]:
    """All keys of the GGUF except general.architecture, which the GGUF writer adds."""
    share: Counter[str] = Counter()
    for tensor in planned:
        share[tensor.type_name] += tensor.byte_count
    general = _general(provenance, vocabulary)
    general["general.file_type"] = _FILE_TYPES[share.most_common(1)[0][0]]
    sizes: dict[str, Value] = {f"{config.architecture.name}.vocab_size": len(vocabulary.tokens)}
    return general | dict(config.metadata) | sizes | vocabulary.metadata()


def _general(provenance: Provenance, vocabulary: Vocabulary) -> dict[str, Value]:
    general: dict[str, Value] = {"general.type": "model", "general.name": vocabulary.named(provenance.name)}
    if provenance.licence:
        general["general.license"] = provenance.licence
    return general


def _write(
    path: Path,
    architecture: str,
    planned: Sequence[PlannedTensor],
    values: Mapping[str, Value],
    job: Job,
) -> None:
    """Write and fsync the GGUF."""
    alignment = _write_header(path, architecture, planned, values)
    total, done = sum(tensor.byte_count for tensor in planned), 0
    # The gguf package writes only the header: it would write weights a whole tensor at a time, and report a full disk
    # as a byte count.
    with path.open("ab") as file:
        file.write(bytes(-file.tell() % alignment))
        for tensor in planned:
            for chunk in tensor.chunks():
                job.check("the export was cancelled; nothing was written")
                file.write(chunk.data)
                done += chunk.nbytes
                if chunk.nbytes >= _TOLD_BYTES or done == total:
                    job.tell("writing", MODEL, done_bytes=done, total_bytes=total)
            file.write(bytes(-file.tell() % alignment))
        file.flush()
        os.fsync(file.fileno())


def _write_header(
    path: Path, architecture: str, planned: Sequence[PlannedTensor], values: Mapping[str, Value]
) -> int:
    """Write the part of the file before the weights; returns the alignment of tensor data in bytes."""
    import numpy as np

    gguf = require("gguf")

    writer = gguf.GGUFWriter(path, architecture)
    kinds = gguf.GGUFValueType
    types = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING, tuple: kinds.ARRAY}
    try:
        for key, value in values.items():
            writer.add_key_value(key, value, types[type(value)])
        for tensor in planned:
            # raw_dtype decides the type; the numpy dtype matters only for quantised tensors.
            kind = gguf.GGMLQuantizationType[tensor.type_name]
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.byte_count, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    return int(writer.data_alignment)
