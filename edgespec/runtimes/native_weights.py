"""Weights for the native runtime: the file's matrices laid out anew, one by one, and the rest read where it is."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.contracts import IdArray
from edgespec.errors import CancelledError, MemoryLimitError, ModelFileError
from edgespec.files.gguf import GgufHeader, TensorInfo
from edgespec.runtimes.native_layout import ModelLayout, Rope, WeightTensor
from edgespec.runtimes.native_library import Layer, Matrix, NativeLibrary, NativeModelStruct
from edgespec.runtimes.worker_thread import WorkerThread

__all__ = ["NativeWeights", "load_weights"]

_LINE_BYTES = 64  # matrices start on cache lines of their own

_MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
_OPTIONAL_NORMS = ("attention_post_norm", "feed_forward_post_norm", "query_norm", "key_norm")

# Rows laid out at a time, whole tiles of 16: a few megabytes, so that a large head is shared among the threads, and
# little of the file is in memory beside its copy.
_STRIP_ROWS = 4096


@dataclass(frozen=True, slots=True)
class _Strip:
    weight: WeightTensor
    first: int
    rows: int


class NativeWeights:
    """A loaded model as the kernels see it. Freed when the model and every cache made from it have let go."""

    def __init__(self, library: NativeLibrary, layout: ModelLayout, file: mmap.mmap) -> None:
        self.library = library
        self._file = file  # the embedding's rows stay in it
        self._base = np.frombuffer(file, dtype=np.uint8).ctypes.data
        self._kept: list[Any] = []  # arrays whose addresses the struct holds
        sizes = {weight.tensor.name: _relaid_bytes(library, weight) for weight in _weights(layout)}
        total = sum(sizes.values())
        address = library.api.es_memory_take(total, 1)
        if not address:
            raise MemoryLimitError(
                f"no memory for {total / 2**30:.2f} GiB of weights",
                needed_bytes=total,
                available_bytes=None,
                hint="try a smaller model, or close what else runs here",
            )
        finalizer = weakref.finalize(self, library.api.es_memory_give, address, total)
        finalizer.atexit = False  # the process is going: its memory goes with it
        self._addresses: dict[str, int] = {}
        for name, size in sizes.items():
            self._addresses[name] = address
            address += size
        self.struct = self._describe(layout)

    def _describe(self, layout: ModelLayout) -> NativeModelStruct:
        layers = (Layer * len(layout.layers))()
        for layer, tensors in zip(layers, layout.layers, strict=True):
            layer.attention_norm = self._floats(tensors.attention_norm)
            layer.feed_forward_norm = self._floats(tensors.feed_forward_norm)
            for name in _MATRICES:
                setattr(layer, name, self._matrix(getattr(tensors, name)))
            for name in _OPTIONAL_NORMS:
                norm = getattr(tensors, name)
                setattr(layer, name, None if norm is None else self._floats(norm))
            layer.window, layer.rope_table = tensors.window, tensors.rope_table
        return NativeModelStruct(
            layers=len(layout.layers),
            embedding=layout.embedding,
            heads=layout.heads,
            kv_heads=layout.kv_heads,
            head_length=layout.head_length,
            feed_forward=layout.feed_forward,
            vocabulary=layout.vocabulary,
            activation=layout.activation,
            rope_length=layout.rope_length,
            rope=layout.rope_pairs,
            norm_epsilon=layout.norm_epsilon,
            embedding_scale=layout.embedding_scale,
            attention_scale=layout.attention_scale,
            rope_tables=len(layout.ropes),
            rope_frequencies=self._keep(np.stack([self._frequencies(layout, rope) for rope in layout.ropes])),
            layer=ctypes.cast(layers, ctypes.POINTER(Layer)),  # which keeps the array alive
            output_norm=self._floats(layout.output_norm),
            head=self._matrix(layout.head),
            embedding_rows=self._base + layout.embedding_rows.tensor.offset,
            embedding_type=layout.embedding_rows.type_number,
        )

    def _keep(self, array: NDArray[Any]) -> int:
        self._kept.append(array)
        return array.ctypes.data

    def _floats(self, tensor: TensorInfo) -> int:
        return self._keep(_read_floats(self._file, tensor))

    def _matrix(self, weight: WeightTensor) -> Matrix:
        return Matrix(
            tiles=self._addresses[weight.tensor.name],
            bias=None if weight.bias is None else self._floats(weight.bias),
            rows=weight.rows,
            columns=weight.columns,
            type=weight.type_number,
        )

    def _frequencies(self, layout: ModelLayout, rope: Rope) -> NDArray[np.float64]:
        """Radians per position of each pair: float64 of shape (rope_length / 2,)."""
        exponents = np.arange(0, layout.rope_length, 2, dtype=np.float64) / layout.rope_length
        frequencies = np.array([rope.base**-exponent for exponent in exponents.tolist()]) / rope.scale
        if rope.factors is not None:
            factors = _read_floats(self._file, rope.factors).astype(np.float64)
            if not (np.isfinite(factors).all() and (factors > 0).all()):
                raise ValueError("rope factors must be finite and positive")
            frequencies /= factors
        return frequencies

    def rows(self, weight: WeightTensor, ids: IdArray) -> NDArray[np.uint8]:
        """Some rows of a matrix as the file holds them: uint8 of shape (len(ids), bytes of a row)."""
        tensor = weight.tensor
        whole = np.frombuffer(self._file, dtype=np.uint8, count=tensor.byte_count, offset=tensor.offset)
        return np.ascontiguousarray(whole.reshape(weight.rows, -1)[ids])

    def relay(self, strip: _Strip) -> int:
        """Lay some rows of a matrix out; returns the first that is not finite, or -1. The file's pages are let go."""
        weight, tensor = strip.weight, strip.weight.tensor
        row_bytes = tensor.byte_count // weight.rows
        offset, byte_count = tensor.offset + strip.first * row_bytes, strip.rows * row_bytes
        bad = self.library.api.es_relay(
            weight.type_number,
            self._base + offset,
            strip.rows,
            weight.columns,
            self._addresses[tensor.name] + _relaid_bytes(self.library, weight, strip.first),
        )
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + byte_count - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._file.madvise(mmap.MADV_DONTNEED, first, length)
        return strip.first + int(bad) if bad >= 0 else -1


def load_weights(library: NativeLibrary, header: GgufHeader, layout: ModelLayout, threads: int) -> NativeWeights:
    """Lay the file's matrices out in memory of our own, on so many threads.

    Raises ModelFileError (the file changed, or holds scales that are not finite), MemoryLimitError, CancelledError if
    the wait is interrupted.
    """
    interrupted = threading.Event()
    loader = WorkerThread("edgespec-load", interrupted.set)
    try:
        return loader.run(lambda: _load(library, header, layout, threads, interrupted))
    finally:
        loader.close()


def _load(
    library: NativeLibrary, header: GgufHeader, layout: ModelLayout, threads: int, interrupted: threading.Event
) -> NativeWeights:
    try:
        with header.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelFileError(header.path, f"the file cannot be read: {error}") from error
    if len(mapped) != header.file_bytes:
        raise ModelFileError(header.path, "the file changed after its header was read")
    try:
        weights = NativeWeights(library, layout, mapped)
    except ValueError as error:
        raise ModelFileError(header.path, str(error)) from error

    def relay(strip: _Strip) -> None:
        if interrupted.is_set():
            raise CancelledError("loading was cancelled")
        bad = weights.relay(strip)
        if bad >= 0:
            raise ModelFileError(
                header.path, f"row {bad} of tensor {strip.weight.tensor.name} has a scale that is not finite"
            )

    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="edgespec-relay") as pool:
        for _ in pool.map(relay, _strips(layout)):
            pass
    return weights


def _strips(layout: ModelLayout) -> Iterator[_Strip]:
    for weight in _weights(layout):
        for first in range(0, weight.rows, _STRIP_ROWS):
            yield _Strip(weight, first, min(_STRIP_ROWS, weight.rows - first))


def _weights(layout: ModelLayout) -> Iterator[WeightTensor]:
    for layer in layout.layers:
        for name in _MATRICES:
            yield getattr(layer, name)
    yield layout.head


def _relaid_bytes(library: NativeLibrary, weight: WeightTensor, rows: int | None = None) -> int:
    """Bytes of a matrix in tiles, or of its first ``rows``."""
    count = weight.rows if rows is None else rows
    needed = int(library.api.es_relaid_bytes(weight.type_number, count, weight.columns))
    assert needed > 0 or count == 0, weight  # the layout let only types and shapes through that have one
    return -(-needed // _LINE_BYTES) * _LINE_BYTES


def _read_floats(file: mmap.mmap, tensor: TensorInfo) -> NDArray[np.float32]:
    return np.frombuffer(file, dtype="<f4", count=tensor.elements, offset=tensor.offset).astype(np.float32)
