"""Exports a GGUF model as an ONNX model in a folder, without PyTorch.

The folder holds ``model.onnx`` (the graph), ``model.onnx.data`` (all weights), ``tokenizer.gguf`` (the source's
metadata without weights) and ``manifest.json``. Weights are converted a few rows at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from edgespec.architectures.shape import Rope, Shape
from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.export.gguf.files import check_destination
from edgespec.export.gguf.parts import Part, Rows, Span, check_kept, open_source, read_part, tokenizer_parts
from edgespec.export.onnx.model import describe_model, rope_tables
from edgespec.export.onnx.tables import RopeTable, Table, TablePlan, plan_tables
from edgespec.export.onnx.weights import float_rows, pack_rows
from edgespec.export.packages import require
from edgespec.export.provenance import Provenance
from edgespec.export.staging import staged_folder
from edgespec.files.atomic import write_json
from edgespec.files.export_folder import MANIFEST_NAME
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader, TensorInfo
from edgespec.files.onnx.artefact import DATA_NAME
from edgespec.files.onnx.folder import GRAPH_NAME, ONNX_KIND, TOKENIZER_NAME, read_onnx_folder
from edgespec.files.onnx.interface import ROWS, SHARED
from edgespec.files.progress import QUIET, Job

# Calibration needs this many tokens to time a drafter (calibration/timing.py), and so does a chat's first answer.
LEAST_STATIC_CACHE = 256


# Weights per piece: 4 MiB as float32. Larger pieces are not faster, and a cancellation waits for the current piece.
_CHUNK_WEIGHTS = 1 << 20

_Files = dict[str, dict[str, int | str]]


def check_static_cache(tokens: int, context_length: int) -> None:
    """Raise InvalidRequestError unless ``tokens`` is a valid length of a fixed cache for a model of this context."""
    if not LEAST_STATIC_CACHE <= tokens <= context_length:
        most = f"and at most this model's context of {context_length}"
        raise InvalidRequestError(
            f"a fixed cache cannot have {tokens} tokens",
            hint=f"give at least {LEAST_STATIC_CACHE} {most}",
        )


def export_onnx(
    source: Path,
    folder: Path,
    provenance: Provenance,
    *,
    kept: npt.NDArray[np.int32] | None = None,
    static_cache: int | None = None,
    job: Job = QUIET,
) -> Mapping[str, Any]:
    """Write the model ``source`` as an ONNX model to ``folder``; returns the manifest.

    ``quant`` "keep" is lossless for Q4_0, Q5_0, Q8_0, IQ4_NL and plain numbers, and rounds other types to 8 bits;
    "q4" makes every matrix 4-bit, except a head with more bits in the source, which becomes 8-bit. ``kept`` is int32
    of shape (N,), ascending token ids: the head then has only these rows. With ``static_cache`` the graph has fixed
    shapes, as NPUs need, and a cache of that many tokens: at least LEAST_STATIC_CACHE, at most the context length.
    ``folder`` appears complete or not at all; an earlier export there is replaced, any other content refused.

    Raises ModelFileError if the source is malformed, InvalidRequestError if it cannot become an ONNX model,
    RuntimeUnavailableError without the package onnx, DiskSpaceError, CancelledError, EdgespecError if ``folder``
    cannot be written.
    """
    build_graph = _graph_builder(static_cache)
    check_destination(source, folder)
    header = read_header(source)
    shape = describe_model(header)
    ids = None if kept is None else check_kept(np.asarray(kept), header.vocabulary_size)
    shape = _limited(shape, static_cache)
    plan = plan_tables(header, shape, provenance.quant, ids)
    graph: bytes = build_graph(shape, plan).SerializeToString()
    tokenizer = tokenizer_parts(header)
    needed_bytes = plan.data_bytes + len(graph) + sum(part.byte_count for part in tokenizer)
    with staged_folder(folder, needed_bytes=needed_bytes) as stage:
        files: _Files = {}
        with open_source(header) as file:
            reader = _Reader(header, file, job)
            with _written(stage / DATA_NAME, files) as out:
                told = _Told(out, plan.data_bytes, job)
                _write_tables(reader, plan, out, told)
                _write_constants(reader, shape, plan, ids, out, told)
            with _written(stage / TOKENIZER_NAME, files) as out:
                for part in tokenizer:
                    for data in reader.pieces(part):
                        out.write(data)
        with _written(stage / GRAPH_NAME, files) as out:
            out.write(graph)
        manifest = {
            **provenance.manifest(
                ONNX_KIND,
                source_bytes=header.file_bytes,
                architecture=header.architecture,
                vocabulary_size=shape.rows,
                mask_token_id=header.mask_token_id,
                tools={"onnx": metadata.version("onnx")},
            ),
            "kept": None if ids is None else len(ids),
            "context_length": header.context_length,
            "block_count": shape.sizes.layers,
            "embedding_length": shape.sizes.width,
            "head_count": shape.sizes.heads,
            "head_count_kv": shape.sizes.kv_heads,
            "key_length": shape.sizes.head,
            "kv_type": "f32",
            "cache": SHARED if static_cache is None else ROWS,
            "static_cache": static_cache,
            "window": None if static_cache is None else _window(shape),
            "tensors": plan.types(),
            "files": files,
        }
        write_json(stage / MANIFEST_NAME, manifest)
        read_onnx_folder(stage)  # a folder that the reader refuses must not get its final name
    return manifest


def _limited(shape: Shape, static_cache: int | None) -> Shape:
    """The shape for the context of the graph: that of a fixed cache, if any. Raises InvalidRequestError."""
    if static_cache is not None:
        check_static_cache(static_cache, shape.sizes.context)
    return shape.in_context(static_cache or shape.sizes.context)


def _window(shape: Shape) -> int | None:
    """The sliding window in tokens, which is the same for all layers with a window."""
    return next((layer.window for layer in shape.layers if layer.window), None)


def _graph_builder(static_cache: int | None) -> Callable[[Shape, TablePlan], Any]:
    require("onnx", "exporting to ONNX")
    from edgespec.export.onnx.graph import build_graph
    from edgespec.export.onnx.static_graph import build_static_graph

    return build_graph if static_cache is None else partial(build_static_graph, capacity=static_cache)


# ------------------------------------------------------------------------------------------- reading


class _Reader:
    """The open source; every read checks for cancellation."""

    def __init__(self, header: GgufHeader, file: BinaryIO, job: Job) -> None:
        self.header = header
        self._file, self._job = file, job

    def pieces(self, part: Part) -> Iterator[bytes]:
        for data in read_part(part, self._file, self.header.path):
            self.check_cancelled()
            yield data

    def check_cancelled(self) -> None:
        self._job.check("the export was cancelled; nothing was written")

    def rows(self, tensor: TensorInfo, ids: npt.NDArray[np.int32] | None) -> Iterator[npt.NDArray[np.uint8]]:
        """The rows ``ids`` (None: all) of a tensor, in pieces: uint8 (rows, bytes of a row)."""
        columns, *rest = tensor.shape
        total = rest[0] if rest else 1
        row_bytes = tensor.byte_count // total
        count = total if ids is None else len(ids)
        at_once = max(1, _CHUNK_WEIGHTS // columns)
        for first in range(0, count, at_once):
            some = min(at_once, count - first)
            part: Part = (
                Span(tensor.offset + first * row_bytes, some * row_bytes)
                if ids is None
                else Rows(tensor.offset, row_bytes, ids[first : first + some])
            )
            yield np.frombuffer(b"".join(self.pieces(part)), dtype=np.uint8).reshape(some, row_bytes)

    def check_finite(self, values: npt.NDArray[Any], what: str) -> None:
        if not np.isfinite(values).all():
            raise ModelFileError(self.header.path, f"{what} holds weights that are not finite numbers")


# ------------------------------------------------------------------------------------------- writing


class _Output:
    """A new file that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest, self.size = hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.size += len(data)

    def pad_to(self, offset: int) -> None:
        self.write(bytes(offset - self.size))


@contextmanager
def _written(path: Path, files: _Files) -> Iterator[_Output]:
    """Create the file ``path``; fsync it and record it in ``files`` when the block ends without an exception."""
    with path.open("xb") as file:
        out = _Output(file)
        yield out
        file.flush()
        os.fsync(file.fileno())
    files[path.name] = {"bytes": out.size, "sha256": out.digest.hexdigest()}


class _Told:
    """Reports the progress of the data file to the caller."""

    def __init__(self, out: _Output, total_bytes: int, job: Job) -> None:
        self._out, self._total_bytes, self._job = out, total_bytes, job

    def __call__(self) -> None:
        self._job.tell("writing", DATA_NAME, done_bytes=self._out.size, total_bytes=self._total_bytes)


def _write_tables(reader: _Reader, plan: TablePlan, out: _Output, told: _Told) -> None:
    for table in plan.tables.values():
        out.pad_to(table.values.offset)
        scales = []
        for tensor in table.tensors:
            for raw in reader.rows(tensor, table.ids):
                values, some = _converted(reader, table, tensor, raw)
                out.write(values.tobytes())
                if some is not None:
                    scales.append(some)
                told()
        if table.scales is not None:
            out.pad_to(table.scales.offset)
            for some in scales:
                out.write(some.tobytes())


def _converted(
    reader: _Reader, table: Table, tensor: TensorInfo, raw: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """The values of some rows, and their scales if the table is packed."""
    if table.bits is not None and table.scales is not None:
        half = table.scales.element == "float16"
        packed = pack_rows(raw, tensor.type_name, table.bits, half_scales=half)
        reader.check_finite(packed.scales, tensor.name)
        return packed.weights, packed.scales
    if table.values.element != "float32":
        return raw, None
    values = float_rows(raw, tensor.type_name)
    reader.check_finite(values, tensor.name)
    return values, None


def _write_constants(
    reader: _Reader,
    shape: Shape,
    plan: TablePlan,
    ids: npt.NDArray[np.int32] | None,
    out: _Output,
    told: _Told,
) -> None:
    for table in plan.ropes.values():
        factors = _rope_factors(reader, table.rope)
        for which, stored in enumerate((table.cosines, table.sines)):
            out.pad_to(stored.offset)
            for rows in _rope_rows(shape, table, factors, which):
                reader.check_cancelled()
                reader.check_finite(rows, "its rotary embedding")
                out.write(rows.tobytes())
                told()
    if ids is not None and plan.kept_ids is not None:
        out.pad_to(plan.kept_ids.offset)
        out.write(ids.astype("<i8").tobytes())
    out.pad_to(plan.data_bytes)
    told()


def _rope_rows(
    shape: Shape, table: RopeTable, factors: npt.NDArray[np.float32] | None, which: int
) -> Iterator[npt.NDArray[np.float32]]:
    """The rows of the table of cosines (``which`` 0) or sines (1), in pieces."""
    positions, half = table.cosines.shape
    at_once = max(1, _CHUNK_WEIGHTS // half)
    for first in range(0, positions, at_once):
        some = np.arange(first, min(first + at_once, positions))
        yield rope_tables(table.rope, some, shape.rope_length, factors)[which]


def _rope_factors(reader: _Reader, rope: Rope) -> npt.NDArray[np.float32] | None:
    for tensor in reader.header.tensors:
        if tensor.name == rope.factors:
            factors: npt.NDArray[np.float32] = float_rows(next(reader.rows(tensor, None)), tensor.type_name)[0]
            return factors
    return None
