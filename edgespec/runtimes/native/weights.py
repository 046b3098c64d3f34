"""Weights for the native runtime: matrices laid out one by one, everything else read from the mapped file.

The laid out matrices are kept in a sidecar if the caller names one, and the next load maps it. A ModelPart is what a
model computes with: the weights, with the whole head or some of its rows.
"""

from __future__ import annotations

import contextlib
import ctypes
import decimal
import functools
import hashlib
import json
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgespec.architectures.shape import OTHERS_CACHE
from edgespec.errors import CancelledError, InvalidRequestError, MemoryLimitError, ModelFileError
from edgespec.files.checked import ascending, cannot_map
from edgespec.files.gguf.records import FilePart, GgufHeader, TensorInfo
from edgespec.files.progress import QUIET, Job
from edgespec.interfaces.rows import IdArray
from edgespec.runtimes.native.library import LEVELS, Delta, Layer, Matrix, NativeLibrary, NativeModelStruct
from edgespec.runtimes.native.sidecar import MappedTiles, Sidecar
from edgespec.runtimes.native.tensors import DeltaTensors, ModelLayout, Rope, WeightTensor
from edgespec.runtimes.thread import WorkerThread, map_on_threads

_TILE_ROWS = 16
_LINE_BYTES = 64  # alignment of matrices

_VECTORS = (
    "attention_norm",
    "feed_forward_norm",
    "attention_post_norm",
    "feed_forward_post_norm",
    "query_norm",
    "key_norm",
    "sinks",
    "input_post_norm",
    "dense_post_norm",
    "experts_norm",
    "experts_post_norm",
    "expert_scales",
)

_NO_ROPE = -1  # in place of a table's number

# Rows laid out at a time, in tiles of 16: a few megabytes, so that a large head is divided among threads, and
# little of the file is in memory together with its copy.
_STRIP_ROWS = 4096

# What is compared of files whose date has changed: another model differs in each block of weights. The blocks of a
# model in many parts are shared out, as each is a seek where files come over a network.
_SAMPLES, _LEAST_SAMPLES, _SAMPLE_BYTES = 64, 4, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarFile:
    """Where a model's laid out matrices may be kept. ``sha256`` identifies the model's content."""

    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class _Strip:
    weight: WeightTensor
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """Which file it is, and what changes when it is written to. Not ctime: a new name or link changes that too."""

    device: int
    inode: int
    bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Seen:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _sample(file: BinaryIO, size: int, samples: int) -> bytes:
    """The hash of some of a file's blocks, from its first to its last. Raises OSError."""
    found = hashlib.sha256()
    for number in range(samples):
        file.seek(max(0, size - _SAMPLE_BYTES) * number // (samples - 1))
        found.update(file.read(_SAMPLE_BYTES))
    return found.digest()


class WeightFiles:
    """The mapped files of the weights, and the file with the embedding's rows if that is separate.

    Offsets are a header's: into all ``parts`` joined in order. Raises ModelFileError, MemoryLimitError.
    """

    def __init__(self, parts: Sequence[FilePart], table: FilePart | None = None) -> None:
        self._samples = max(_LEAST_SAMPLES, _SAMPLES // max(1, len(parts)))
        self._seen = dict[Path, tuple[_Seen, bytes]]()
        self._parts = [(part, self._mapped(part.path, part.byte_count)) for part in parts]
        self._table = None if table is None else self._mapped(table.path, table.byte_count)

    def check(self) -> None:
        """Raise ModelFileError if a file was written to since it was mapped. Another file in its place is none, and
        another date alone, as behind a copy of the same bytes, changes nothing.
        """
        for path, (seen, sample) in self._seen.items():
            with contextlib.suppress(OSError, ValueError):  # removed: what is mapped stays as it is
                now = _Seen.of(path.stat())
                if now == seen or (now.device, now.inode) != (seen.device, seen.inode):
                    continue
                with path.open("rb") as file:  # the map of a file that becomes shorter may end the process
                    same = now.bytes == seen.bytes and _sample(file, now.bytes, self._samples) == sample
                if not same:
                    raise ModelFileError(
                        path,
                        "the file was written to while the model is loaded",
                        hint="load the model again; a server does that for the next request",
                    )
                self._seen[path] = now, sample

    def bytes_of(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """The tensor's bytes in the file: uint8 (byte_count,)."""
        mapped, offset = self._find(tensor.offset)
        return np.frombuffer(mapped, dtype=np.uint8, count=tensor.byte_count, offset=offset)

    def embedding_address(self, tensor: TensorInfo) -> int:
        """The address of the embedding's rows."""
        if self._table is None:
            return self.bytes_of(tensor).ctypes.data
        return np.frombuffer(self._table, dtype=np.uint8).ctypes.data + tensor.offset

    def let_go(self, offset: int = 0, byte_count: int | None = None) -> None:
        """Release the memory of a range of one file, by default of all files, until it is read again."""
        if byte_count is None:
            for part, mapped in self._parts:
                _let_go(mapped, 0, part.byte_count)
        else:
            mapped, first = self._find(offset)
            _let_go(mapped, first, first + byte_count)

    def _mapped(self, path: Path, size: int) -> mmap.mmap:
        try:
            with path.open("rb") as file:
                seen = _Seen.of(os.fstat(file.fileno()))
                self._seen[path] = seen, _sample(file, seen.bytes, self._samples)
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise cannot_map(path, error, "the file cannot be read") from error
        if len(mapped) != size:
            raise ModelFileError(path, "the file changed after its header was read")
        return mapped

    def _find(self, offset: int) -> tuple[mmap.mmap, int]:
        """The file that an offset lies in, and the offset within that file."""
        part, mapped = next(each for each in reversed(self._parts) if each[0].start <= offset)
        return mapped, offset - part.start


def _let_go(mapped: mmap.mmap, start: int, end: int) -> None:
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (end - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, first, length)


class NativeWeights:
    """A loaded model in the kernels' structs. Freed when the model and every cache made from it are closed or
    collected.

    Without ``tiles`` memory for the matrices is only allocated; ``relay`` fills it.
    """

    def __init__(
        self,
        library: NativeLibrary,
        layout: ModelLayout,
        files: WeightFiles,
        tiles: MappedTiles | None = None,
        lender: NativeWeights | None = None,
    ) -> None:
        """``lender`` holds all of the layout's matrices already, and is kept alive."""
        self.library = library
        self.layout = layout
        self._level = LEVELS[library.levels[-1]]  # every level computes the same bits
        self.files = files  # the embedding's rows stay there
        self._kept: list[Any] = [tiles, lender]  # also holds the arrays that the struct points to
        self._addresses: dict[str, int] = {}
        if lender is None:
            self.tiles = address = self._take(tile_bytes(library, layout)) if tiles is None else tiles.address
            for name, size in _sizes(library, layout).items():
                self._addresses[name] = address
                address += size
        else:
            self.tiles, self._addresses = lender.tiles, lender._addresses
        self.struct = self._describe(layout)

    def drafting_layer(self) -> NativeWeights:
        """The layer that drafts for the model, over these weights. Raises InvalidRequestError if there is none."""
        if self.layout.drafting is None:
            raise InvalidRequestError("this model has no layer that drafts")
        return NativeWeights(self.library, self.layout.drafting, self.files, lender=self)

    def _take(self, total: int) -> int:
        address = self.library.api.es_memory_take(total, 1)
        if not address:
            raise MemoryLimitError(
                f"no memory for {total / 2**30:.2f} GiB of weights",
                needed_bytes=total,
                available_bytes=None,
                hint="try a smaller model, or close what else runs here",
            )
        finalizer = weakref.finalize(self, self.library.api.es_memory_give, address, total)
        finalizer.atexit = False  # the process is exiting, and frees its memory
        return int(address)

    def _describe(self, layout: ModelLayout) -> NativeModelStruct:
        long_ropes, experts = tuple(rope.at_length for rope in layout.ropes), layout.experts
        layers = (Layer * len(layout.layers))()
        ones = self._keep(np.ones(layout.head_length, np.float32)) if layout.norms_values else None
        for number, (layer, tensors) in enumerate(zip(layers, layout.layers, strict=True)):
            for name, weight in tensors.matrices.items():
                setattr(layer, name, self._matrix(weight))
            for name in _VECTORS:
                setattr(layer, name, self._optional(getattr(tensors, name)))
            if tensors.delta is not None:
                self._describe_delta(layer.delta, tensors.delta)
            if tensors.shared is not None:
                for name, weight in tensors.shared.matrices.items():
                    setattr(layer.shared, name, self._matrix(weight))
            layer.window, layer.joins_heads = tensors.window, layout.joins_heads
            layer.rope_table = _NO_ROPE if tensors.rope_table is None else tensors.rope_table
            layer.kv_heads, layer.head_length = tensors.kv_heads, tensors.head_length
            layer.rope_length, layer.cache_layer = tensors.rope_length, _cache_layer(layout, number)
            layer.value_norm, layer.output_scale = ones, 1.0
            if tensors.output_scale is not None:
                layer.output_scale = float(_read_floats(self.files, tensors.output_scale)[0])
            if tensors.router_norm is not None:
                root = np.float32(np.sqrt(layout.embedding))
                layer.router_norm = self._keep(_read_floats(self.files, tensors.router_norm) / root)
            if layout.inputs is not None:
                layer.input_at = number * layout.inputs.length
        return NativeModelStruct(
            layers=len(layout.layers),
            embedding=layout.embedding,
            heads=layout.heads,
            kv_heads=layout.kv_heads,
            head_length=layout.head_length,
            feed_forward=layout.feed_forward,
            vocabulary=layout.vocabulary,
            experts=0 if experts is None else experts.count,
            experts_used=0 if experts is None else experts.used,
            shared_length=0 if experts is None else experts.shared,
            experts_normed=experts is not None and experts.normed,
            expert_scale=1.0 if experts is None else experts.scale,
            gates_heads=layout.gates_heads,
            delta_heads=0 if layout.deltas is None else layout.deltas.heads,
            delta_key_heads=0 if layout.deltas is None else layout.deltas.key_heads,
            delta_length=0 if layout.deltas is None else layout.deltas.length,
            delta_kernel=0 if layout.deltas is None else layout.deltas.kernel,
            activation=layout.activation,
            rope_length=layout.rope_length,
            rope=layout.rope_pairs,
            norm_epsilon=layout.norm_epsilon,
            embedding_scale=layout.embedding_scale,
            residual_scale=layout.residual_scale,
            score_scale=layout.score_scale,
            logit_scale=layout.logit_scale,
            score_cap=layout.score_cap,
            logit_cap=layout.logit_cap,
            query_factors=self._keep(np.array(layout.query_factors, np.float32)) if layout.query_factors else None,
            query_factor_count=len(layout.query_factors),
            query_span=layout.query_span,
            rope_magnitudes=self._keep(np.array([rope.form.magnitude for rope in layout.ropes])),
            rope_tables=len(layout.ropes),
            rope_frequencies=self._frequencies(layout, layout.ropes),
            long_frequencies=None if long_ropes == layout.ropes else self._frequencies(layout, long_ropes),
            original_context=layout.original_context,
            layer=ctypes.cast(layers, ctypes.POINTER(Layer)),  # the cast keeps the array alive
            output_norm=self._floats(layout.output_norm),
            head=self._matrix(layout.head),
            embedding_rows=None if layout.borrows else self.files.embedding_address(layout.embedding_rows.tensor),
            embedding_type=layout.embedding_rows.type_number,
            **self._inputs(layout),
            **self._pair(layout),
        )

    def _describe_delta(self, to: Delta, tensors: DeltaTensors) -> None:
        for name, weight in tensors.matrices.items():
            setattr(to, name, self._matrix(weight))
        kernel = _read_floats(self.files, tensors.kernel).reshape(tensors.mixed.rows, -1)
        to.kernel = self._keep(np.ascontiguousarray(kernel.T))
        to.rates, to.norm = self._floats(tensors.rates), self._floats(tensors.norm)

    def _inputs(self, layout: ModelLayout) -> dict[str, Any]:
        inputs = layout.inputs
        if inputs is None:
            return {}
        return {
            "inputs": inputs.length * len(layout.layers),
            "input_length": inputs.length,
            "input_projection": self._matrix(inputs.projection),
            "input_norm": self._floats(inputs.norm),
            "input_rows": self.files.bytes_of(inputs.rows.tensor).ctypes.data,
            "input_type": inputs.rows.type_number,
            "input_row_scale": math.sqrt(inputs.length),
            "input_projection_scale": 1.0 / math.sqrt(layout.embedding),
            "input_scale": math.sqrt(0.5),
        }

    def _pair(self, layout: ModelLayout) -> dict[str, Any]:
        pair = layout.pair
        if pair is None:
            return {}
        return {
            "pair_length": pair.length,
            "pair_projection": self._matrix(pair.projection),
            "pair_token_norm": self._optional(pair.token_norm),
            "pair_hidden_norm": self._optional(pair.hidden_norm),
            **({} if pair.passed_on is None else {"passed_on": self._matrix(pair.passed_on)}),
            "borrows": layout.borrows,
        }

    def _keep(self, array: NDArray[Any]) -> int:
        self._kept.append(array)
        return array.ctypes.data

    def _optional(self, tensor: TensorInfo | None) -> int | None:
        return None if tensor is None else self._floats(tensor)

    def _floats(self, tensor: TensorInfo) -> int:
        return self._keep(_read_floats(self.files, tensor))

    def _matrix(self, weight: WeightTensor) -> Matrix:
        return Matrix(
            tiles=self._addresses[weight.tensor.name],
            bias=None if weight.bias is None else self._floats(weight.bias),
            rows=weight.rows,
            columns=weight.columns,
            type=weight.type_number,
        )

    def _frequencies(self, layout: ModelLayout, ropes: Sequence[Rope]) -> int:
        """The address of radians per position of each pair: float64 of shape (ropes, rope_length / 2)."""
        most = layout.rope_length // 2
        rows = [self._frequencies_of(rope.form.length or layout.rope_length, rope) for rope in ropes]
        return self._keep(np.stack([np.pad(row, (0, most - len(row))) for row in rows]))

    def _frequencies_of(self, rope_length: int, rope: Rope) -> NDArray[np.float64]:
        factors = None if rope.factors is None else _read_floats(self.files, rope.factors).astype(np.float64)
        if factors is not None and not (np.isfinite(factors).all() and (factors > 0).all()):
            raise ValueError("rope factors must be finite and positive")
        frequencies = np.array([_power(rope.form.base, -pair, rope_length) for pair in range(0, rope_length, 2)])
        with np.errstate(over="ignore", divide="ignore"):
            frequencies /= rope.form.divisors(rope_length)
            if factors is not None:
                frequencies /= factors
        if not np.isfinite(frequencies).all():
            raise ValueError(
                f"a rope base of {rope.form.base} scaled by {rope.form.scale} gives no finite frequencies"
            )
        return frequencies

    def lay_rows_out(self, weight: WeightTensor, ids: IdArray, tiles: int) -> None:
        """Lay some rows of a matrix out at ``tiles``. Their scales were checked with the whole matrix."""
        tensor = weight.tensor
        rows = np.ascontiguousarray(self.files.bytes_of(tensor).reshape(weight.rows, -1)[ids])
        self._relay(weight, rows.ctypes.data, len(ids), tiles)

    def relay(self, strip: _Strip) -> int:
        """Lay some rows of a matrix out, and release the file's pages; returns the first row that is not finite, or
        -1.
        """
        weight, tensor = strip.weight, strip.weight.tensor
        start = _relaid_bytes(self.library, weight, strip.first)
        bad = self._relay_to(strip, self._addresses[tensor.name] + start)
        self.files.let_go(tensor.offset + strip.first * weight.row_bytes, strip.rows * weight.row_bytes)
        return strip.first + bad if bad >= 0 else -1

    def _relay_to(self, strip: _Strip, tiles: int) -> int:
        weight = strip.weight
        source = self.files.bytes_of(weight.tensor).ctypes.data + strip.first * weight.row_bytes
        return self._relay(weight, source, strip.rows, tiles)

    def _relay(self, weight: WeightTensor, source: int, rows: int, tiles: int) -> int:
        """Lay out ``rows`` rows from ``source`` in the file; returns the first row that is not finite, or -1."""
        api, columns = self.library.api, weight.columns
        if weight.kept_as is None:
            return int(api.es_relay(weight.type_number, source, rows, columns, tiles))
        kept = np.empty(rows * weight.kept_row_bytes, dtype=np.uint8)
        bad = int(api.es_coarsen(weight.file_type_number, source, rows, columns, kept.ctypes.data, self._level))
        unfit = int(api.es_relay(weight.type_number, kept.ctypes.data, rows, columns, tiles))
        return bad if bad >= 0 else unfit

    def agrees_with_file(self, weight: WeightTensor) -> bool:
        """Whether the first and the last tile of a matrix equal what the file's rows give.

        Detects tiles that other kernels laid out differently.
        """
        last = (weight.rows - 1) // _TILE_ROWS * _TILE_ROWS
        for strip in (_Strip(weight, 0, min(_TILE_ROWS, weight.rows)), _Strip(weight, last, weight.rows - last)):
            # Tiles have no gaps between them, and may be partial cache lines: no rounding here.
            start, size = (
                int(self.library.api.es_relaid_bytes(weight.type_number, rows, weight.columns))
                for rows in (strip.first, strip.rows)
            )
            tile = np.zeros(size, dtype=np.uint8)
            self._relay_to(strip, tile.ctypes.data)
            address = self._addresses[weight.tensor.name] + start
            if ctypes.string_at(address, tile.size) != tile.tobytes():
                return False
        return True


def _cache_layer(layout: ModelLayout, number: int) -> int:
    """The layer whose cache a layer reads; of a model that borrows one the first layer of its kind."""
    own = layout.layers[number]
    if own.cache != OTHERS_CACHE:
        return own.cache
    kinds = [(each.window, each.kv_heads, each.head_length) for each in layout.layers]
    return kinds.index(kinds[number])


def load_weights(
    library: NativeLibrary,
    header: GgufHeader,
    layout: ModelLayout,
    threads: int,
    sidecar: SidecarFile | None = None,
    *,
    embedding: Path | None = None,
    job: Job = QUIET,
) -> NativeWeights:
    """Lay the file's matrices out in memory on ``threads`` threads, or map them from the sidecar.

    ``embedding`` is the file with the embedding's rows, if that is separate. A sidecar that is missing or unusable is
    written. Raises ModelFileError (the file changed, or holds scales that are not finite), MemoryLimitError,
    CancelledError once the job is cancelled.
    """
    interrupted = threading.Event()
    loader = WorkerThread("edgespec-load", interrupted.set)
    try:
        return loader.run(
            lambda: _load(
                library, header, layout, threads, sidecar, interrupted.is_set, _open_files(header, layout, embedding)
            ),
            job.cancelled,
        )
    finally:
        loader.close()


def _open_files(header: GgufHeader, layout: ModelLayout, embedding: Path | None) -> WeightFiles:
    if embedding is None:
        return WeightFiles(header.parts)
    return WeightFiles(header.parts, FilePart(embedding, 0, layout.embedding_rows.tensor.byte_count))


def _load(
    library: NativeLibrary,
    header: GgufHeader,
    layout: ModelLayout,
    threads: int,
    sidecar_file: SidecarFile | None,
    interrupted: Callable[[], bool],
    files: WeightFiles,
) -> NativeWeights:
    sidecar = None if sidecar_file is None else sidecar_of(library, layout, sidecar_file, threads, interrupted)
    try:
        kept = None if sidecar is None else _map_kept(library, layout, files, sidecar)
        if kept is not None:
            return kept
        weights = NativeWeights(library, layout, files)
    except ValueError as error:
        raise ModelFileError(header.path, str(error)) from error

    def relay(strip: _Strip) -> None:
        if interrupted():
            raise CancelledError("loading was cancelled")
        bad = weights.relay(strip)
        if bad >= 0:
            what = (
                "a scale that is not finite" if strip.weight.kept_as is None else "values that four bits cannot hold"
            )
            raise ModelFileError(header.path, f"row {bad} of tensor {strip.weight.tensor.name} has {what}")

    map_on_threads(relay, _strips(layout), threads, "edgespec-relay")
    weights.files.let_go()
    if sidecar is not None:
        sidecar.write(weights.tiles)
    return weights


def sidecar_of(
    library: NativeLibrary,
    layout: ModelLayout,
    sidecar_file: SidecarFile,
    threads: int,
    interrupted: Callable[[], bool],
) -> Sidecar:
    """The file for a model's laid out matrices, whether or not it exists."""
    return Sidecar(
        path=sidecar_file.path,
        key=_sidecar_key(library, layout, sidecar_file.sha256),
        tile_bytes=tile_bytes(library, layout),
        library=library,
        threads=threads,
        cancelled=interrupted,
    )


def _map_kept(
    library: NativeLibrary, layout: ModelLayout, files: WeightFiles, sidecar: Sidecar
) -> NativeWeights | None:
    """The sidecar's tiles, or None if it cannot be used."""
    tiles = sidecar.read()
    if tiles is None:
        return None
    weights = NativeWeights(library, layout, files, tiles)
    if not all(weights.agrees_with_file(weight) for weight in layout.matrices):
        return None
    weights.files.let_go()
    if tiles.as_fast_as_memory:
        return weights
    copied = NativeWeights(library, layout, files)
    sidecar.copy(tiles, copied.tiles)
    return copied


def tile_bytes(library: NativeLibrary, layout: ModelLayout) -> int:
    """Bytes of all matrices in tiles."""
    return sum(_sizes(library, layout).values())


def _sizes(library: NativeLibrary, layout: ModelLayout) -> dict[str, int]:
    """Bytes of each matrix in tiles, in memory order."""
    return {weight.tensor.name: _relaid_bytes(library, weight) for weight in layout.matrices}


def _sidecar_key(library: NativeLibrary, layout: ModelLayout, sha256: str) -> bytes:
    """The key of a sidecar: the model's content, and each matrix's type, shape and position."""
    sizes = _sizes(library, layout)
    matrices = [
        (weight.tensor.name, weight.type_number, weight.rows, weight.columns, sizes[weight.tensor.name])
        for weight in layout.matrices
    ]
    return hashlib.sha256(json.dumps([sha256, matrices]).encode()).digest()


def _strips(layout: ModelLayout) -> Iterator[_Strip]:
    for weight in layout.matrices:
        for first in range(0, weight.rows, _STRIP_ROWS):
            yield _Strip(weight, first, min(_STRIP_ROWS, weight.rows - first))


def _relaid_bytes(library: NativeLibrary, weight: WeightTensor, rows: int | None = None) -> int:
    """Bytes of a matrix in tiles, or of its first ``rows``."""
    count = weight.rows if rows is None else rows
    needed = int(library.api.es_relaid_bytes(weight.type_number, count, weight.columns))
    assert needed > 0 or count == 0, weight  # the layout accepts only types and shapes with a size
    return -(-needed // _LINE_BYTES) * _LINE_BYTES


# More than twice the digits of a double, so that rounding to a double gives the nearest. A separate context: the
# calling thread's may differ.
_DECIMAL = decimal.Context(prec=40, rounding=decimal.ROUND_HALF_EVEN, traps=[])


def _power(base: float, over: int, under: int) -> float:
    """``base ** (over / under)`` as the nearest double, or infinity.

    Computed in decimal, with the same digits on every system: powers of C libraries differ in the last bit.
    """
    context = _DECIMAL.copy()
    return float(context.power(decimal.Decimal(base), context.divide(decimal.Decimal(over), decimal.Decimal(under))))


def _read_floats(files: WeightFiles, tensor: TensorInfo) -> NDArray[np.float32]:
    return files.bytes_of(tensor).view("<f4").astype(np.float32)


class HeadRows:
    """Some rows of a head: it scores ``ids`` (int64, ascending) only.

    Ids from 0 without a gap use the head's tiles; the rest are laid out again. ``matrices`` holds both parts in that
    order. Raises InvalidRequestError, MemoryLimitError.
    """

    def __init__(self, weights: NativeWeights, ids: IdArray) -> None:
        head = weights.layout.head
        wanted = np.asarray(ids)
        if wanted.ndim != 1 or not len(wanted) or wanted.dtype.kind not in "iu":
            raise InvalidRequestError("the rows of a head are a list of token ids, at least one")
        wanted = wanted.astype(np.int64)
        if wanted[0] < 0 or wanted[-1] >= head.rows or not ascending(wanted):
            raise InvalidRequestError(f"the rows of a head are ascending token ids in 0..{head.rows - 1}")
        self.ids: IdArray = wanted
        self._weights = weights
        self._in_place = int(np.searchsorted(wanted - np.arange(len(wanted)), 0, side="right"))
        whole = weights.struct.head
        columns, number = int(whole.columns), int(whole.type)
        others = wanted[self._in_place :]
        self.matrices = tuple(
            Matrix(tiles=tiles, bias=None, rows=rows, columns=columns, type=number)
            for tiles, rows in ((whole.tiles, self._in_place), (self._lay_out(others), len(others)))
            if rows
        )

    def _lay_out(self, ids: IdArray) -> int | None:
        """Lay those rows out. Returns their address, valid as long as this object lives."""
        if not len(ids):
            return None
        api, head = self._weights.library.api, self._weights.layout.head
        size = int(api.es_relaid_bytes(head.type_number, len(ids), head.columns))
        address = api.es_memory_take(size, 1)
        if not address:
            raise MemoryLimitError(
                f"no memory for {len(ids)} rows of the head", needed_bytes=size, available_bytes=None
            )
        finalizer = weakref.finalize(self, api.es_memory_give, address, size)
        finalizer.atexit = False  # the process is exiting, and frees its memory
        self._weights.lay_rows_out(head, ids, address)
        return int(address)

    @functools.cached_property
    def known(self) -> frozenset[int]:
        """``ids`` as a set, for lookups."""
        return frozenset(self.ids.tolist())

    def and_also(self, tokens: Collection[int]) -> HeadRows:
        """A head that scores these tokens as well. Raises InvalidRequestError, MemoryLimitError."""
        more = np.array(list(set(tokens) - self.known), dtype=np.int64)
        if not len(more):
            return self
        behind = np.sort(np.concatenate((self.ids[self._in_place :], more)))
        return HeadRows(self._weights, np.concatenate((self.ids[: self._in_place], behind)))


@dataclass(frozen=True, eq=False)
class ModelPart:
    """Weights, and which rows of the head a cache scores with at first. Keeps the weights alive.

    Caches may switch from ``head`` to the whole head. ``head_ids`` (int64, ascending): the tokens that a trimmed head
    scores, which has no shorter one.
    """

    weights: NativeWeights
    head: HeadRows | None = None
    head_ids: IdArray | None = None

    @property
    def library(self) -> NativeLibrary:
        return self.weights.library

    @property
    def struct(self) -> NativeModelStruct:
        return self.weights.struct

    @property
    def head_rows(self) -> int | None:
        """How many rows of the head are scored at first, if not all."""
        return None if self.head is None else len(self.head.ids)
