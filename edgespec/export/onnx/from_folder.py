"""Exports a Hugging Face folder as an ONNX model, through Optimum in a separate Python environment.

PyTorch traces transformers' model, and the graph is rewritten for the inputs of edgespec's runtime. Weights are
float32, or 4-bit by onnxruntime's quantizer. Memory of this process does not grow with the model; the worker process
needs about three times the float32 weights.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from edgespec.errors import InvalidRequestError
from edgespec.export.gguf.files import check_destination
from edgespec.export.huggingface.config import CONFIG
from edgespec.export.huggingface.description import FolderModel, describe_folder
from edgespec.export.huggingface.gguf import write_weightless
from edgespec.export.huggingface.sampling import read_sampling
from edgespec.export.huggingface.tensors import has_own_head
from edgespec.export.huggingface.tokenizer import read_vocabulary
from edgespec.export.onnx.tables import ALIGNMENT, QUANTS
from edgespec.export.optimum.environment import prepare_environment
from edgespec.export.optimum.process import check_interpreter, run_worker, versions_in
from edgespec.export.packages import require
from edgespec.export.provenance import Provenance
from edgespec.export.staging import staged_folder
from edgespec.files.atomic import CHUNK_BYTES, sha256_file, when_free, write_json
from edgespec.files.export_folder import MANIFEST_NAME
from edgespec.files.home import Home
from edgespec.files.onnx.artefact import DATA_NAME
from edgespec.files.onnx.folder import GRAPH_NAME, ONNX_KIND, TOKENIZER_NAME, read_onnx_folder
from edgespec.files.onnx.interface import WHOLE
from edgespec.files.progress import QUIET, Job
from edgespec.files.safetensors import read_safetensors_folder

# The worker's output files, as optimum/worker.py names them.
_PACKED, _PACKED_DATA = "packed.onnx", "packed.data"

# Space for graph and tokenizer: a few MB each.
_OTHER_BYTES = 64 << 20


def export_folder_to_onnx(
    source: Path,
    folder: Path,
    provenance: Provenance,
    *,
    home: Home,
    python: Path | None = None,
    download: bool = True,
    job: Job = QUIET,
) -> Mapping[str, Any]:
    """Write the model in the Hugging Face folder ``source`` as an ONNX model to ``folder``; returns the manifest.

    ``quant`` "keep" stores weights as float32, lossless for every source type; "q4" makes all matrices except the
    embedding 4-bit, in blocks of 32 with a scale. ``python`` is an interpreter with Optimum; None: the interpreter
    of an environment under ``home``, which is created if missing, if ``download`` allows it. ``folder``
    appears complete or not at all; an earlier export there is replaced, any other content refused.

    Raises ModelFileError if the source is malformed, InvalidRequestError if it cannot be converted,
    RuntimeUnavailableError without the packages, DownloadError, DiskSpaceError, MemoryLimitError, CancelledError,
    EdgespecError if ``folder`` cannot be written.
    """
    quant = provenance.quant
    if quant not in QUANTS:
        raise InvalidRequestError(f"unknown quantisation {quant!r}", hint=f"for ONNX one of {', '.join(QUANTS)}")
    require("onnx", "exporting to ONNX")
    check_destination(source / CONFIG, folder)
    model = describe_folder(source)
    vocabulary, sampling = read_vocabulary(source, model.vocabulary_size), read_sampling(source, job)
    tensors = read_safetensors_folder(source)
    untied = has_own_head(tensors)
    elements = [each.elements for each in tensors.values()]
    # The files of a step coexist with those of the previous step; a tied head becomes a separate table.
    needed_bytes = 2 * 4 * (sum(elements) + max(elements, default=0)) + _OTHER_BYTES
    if python is None:
        python = prepare_environment(home, download=download, job=job)
    else:
        check_interpreter(python, job)
    with staged_folder(folder, needed_bytes=needed_bytes) as stage:
        work = stage / "work"
        work.mkdir()
        convert = ["convert", os.fspath(source.resolve()), os.fspath(work), "untied" if untied else "as stated"]
        for step in (convert, ["pack", os.fspath(work), quant]):
            result = run_worker(python, step, source=provenance.name, job=job)
        graph, files = _write_graph(work, stage, model, job)
        when_free(lambda: shutil.rmtree(work))
        values = model.metadata(graph) | sampling
        write_weightless(stage / TOKENIZER_NAME, model.architecture, provenance, values, vocabulary)
        for written in (TOKENIZER_NAME, GRAPH_NAME):
            path = stage / written
            files[written] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        manifest = {
            **provenance.manifest(
                ONNX_KIND,
                # Only the size of the weights' files: hashing the files would take as long as the export.
                source_bytes=sum(path.stat().st_size for path in {each.path for each in tensors.values()}),
                architecture=model.architecture,
                vocabulary_size=model.vocabulary_size,
                mask_token_id=model.mask_token_id,
                tools=versions_in(result),
            ),
            "model_type": model.model_type,
            "kept": None,
            "context_length": model.context_length,
            "block_count": graph.block_count,
            "embedding_length": model.embedding_length,
            "head_count": model.head_count,
            "head_count_kv": graph.head_count_kv,
            "key_length": graph.key_length,
            "kv_type": "f32",
            "cache": WHOLE,
            "static_cache": None,
            "tensors": dict(graph.types),
            "files": files,
        }
        write_json(stage / MANIFEST_NAME, manifest)
        read_onnx_folder(stage)  # a folder that the reader refuses must not get its final name
    return manifest


def _write_graph(work: Path, stage: Path, model: FolderModel, job: Job) -> tuple[Any, dict[str, Any]]:
    """Rewrite the worker's graph; returns the graph and the record of the weights' file."""
    from edgespec.export.onnx.whole_graph import load_graph, rewrite_graph

    for name in (_PACKED, _PACKED_DATA):
        if not (work / name).is_file():
            raise InvalidRequestError(f"the conversion wrote no {name}", hint="report this with the model's name")
    graph = rewrite_graph(
        load_graph(work / _PACKED),
        data_name=_PACKED_DATA,
        data_bytes=(work / _PACKED_DATA).stat().st_size,
        context_length=model.context_length,
    )
    if graph.rows != model.vocabulary_size:
        raise InvalidRequestError(
            f"its head scores {graph.rows} tokens and its config.json states {model.vocabulary_size}",
            hint="such a model cannot be exported",
        )
    digest, end = hashlib.sha256(), 0
    total = sum(each.byte_count for each in graph.weights)
    with (work / _PACKED_DATA).open("rb") as source, (stage / DATA_NAME).open("xb") as out:
        for weight in graph.weights:
            padding = bytes(-end % ALIGNMENT)
            out.write(padding)
            digest.update(padding)
            end += len(padding)
            graph.locate(weight.name, end, DATA_NAME)
            _copy(source, out, weight.offset, weight.byte_count, digest, job)
            end += weight.byte_count
            job.tell("writing", DATA_NAME, done_bytes=min(end, total), total_bytes=total)
        out.flush()
        os.fsync(out.fileno())
    with (stage / GRAPH_NAME).open("xb") as out:
        out.write(graph.model.SerializeToString())
        out.flush()
        os.fsync(out.fileno())
    return graph, {DATA_NAME: {"bytes": end, "sha256": digest.hexdigest()}}


def _copy(source: BinaryIO, out: BinaryIO, offset: int, count: int, digest: Any, job: Job) -> None:
    source.seek(offset)
    while count:
        job.check("the export was cancelled; nothing was written")
        chunk = source.read(min(count, CHUNK_BYTES))
        if not chunk:
            raise InvalidRequestError("the conversion's weights end early", hint="report this with the model's name")
        out.write(chunk)
        digest.update(chunk)
        count -= len(chunk)
