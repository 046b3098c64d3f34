"""Read bandwidth of the memory by number of threads, and the share of it that a model's kernels use."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import InvalidRequestError, MemoryLimitError
from edgespec.hardware.machine import memory_bytes

Chunk = npt.NDArray[np.int32]

# Eight times a last-level cache of 32 MiB. That cache still raised the best pass over 64 MiB by a third; 512 MiB gave
# the same figure as 256.
BUFFER_BYTES = 256 * 2**20

# A smaller buffer would measure the cache of a common desktop processor.
SMALLEST_BUFFER_BYTES = 64 * 2**20

# Leaves three quarters to other programs; below 256 MiB available, too little is left to measure with.
_SHARE_OF_AVAILABLE = 0.25

# About 60 passes at 20 GB/s, whose median is robust; filling the buffer included, 1 to 1.5 seconds.
SECONDS = 0.8

# Timed passes of each thread count on slow memory, so that best and median mean something.
FEWEST_PASSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadBandwidth:
    """Bytes a second that ``threads`` threads read together: in the best pass, and in the median pass."""

    threads: int
    best_bytes_per_s: float
    median_bytes_per_s: float

    def __post_init__(self) -> None:
        if self.threads < 1 or not 0 < self.median_bytes_per_s <= self.best_bytes_per_s < math.inf:
            raise ValueError("some threads read at positive rates, and the best pass is the fastest")


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthMeasurement:
    """Read bandwidth by number of threads, ascending, over a buffer of ``buffer_bytes``."""

    by_threads: tuple[ThreadBandwidth, ...]
    buffer_bytes: int

    def __post_init__(self) -> None:
        counts = [measured.threads for measured in self.by_threads]
        if not counts or counts != sorted(set(counts)) or self.buffer_bytes < 1:
            raise ValueError("a buffer is read by ascending numbers of threads")

    @property
    def fastest(self) -> ThreadBandwidth:
        """The fewest threads with the highest median."""
        return max(self.by_threads, key=lambda measured: (measured.median_bytes_per_s, -measured.threads))

    @property
    def read_bytes_per_s(self) -> float:
        """The bandwidth available to memory-bound work: the highest median of all thread counts."""
        return self.fastest.median_bytes_per_s

    def as_json(self) -> dict[str, Any]:
        """Every field, and ``read_bytes_per_s`` as the one number."""
        return {
            "read_bytes_per_s": self.read_bytes_per_s,
            "buffer_bytes": self.buffer_bytes,
            "by_threads": [
                {
                    "threads": measured.threads,
                    "best_bytes_per_s": measured.best_bytes_per_s,
                    "median_bytes_per_s": measured.median_bytes_per_s,
                }
                for measured in self.by_threads
            ],
        }


def measure_read_bandwidth(
    threads: Sequence[int],
    *,
    buffer_bytes: int = BUFFER_BYTES,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    read: Callable[[Chunk], object] | None = None,
) -> BandwidthMeasurement:
    """Read a buffer repeatedly with each number of threads; takes about ``seconds`` plus filling the buffer.

    The buffer has ``buffer_bytes``, or a quarter of the available memory if that is less. A cache larger than a
    quarter of the buffer (large servers) makes the result too high. Each thread reads its own part. ``read`` reads
    one part, ``clock`` is in seconds; tests replace both. Raises InvalidRequestError for arguments out of range and
    MemoryLimitError if there is too little memory.
    """
    counts = sorted(set(threads))
    if not counts or counts[0] < 1:
        raise InvalidRequestError(f"bandwidth is measured with one thread or more, not {list(threads)}")
    if not 0 < seconds < math.inf:
        raise InvalidRequestError(f"seconds must be positive and finite, not {seconds}")
    if buffer_bytes < SMALLEST_BUFFER_BYTES:
        raise InvalidRequestError(
            f"a buffer of {buffer_bytes} bytes may fit in a cache; it needs {SMALLEST_BUFFER_BYTES} or more"
        )
    buffer = _filled_buffer(buffer_bytes)
    measured = []
    for count in counts:
        passes = _time_passes(np.array_split(buffer, count), seconds / len(counts), clock, read or _read)
        measured.append(
            ThreadBandwidth(
                threads=count,
                best_bytes_per_s=buffer.nbytes / min(passes),
                median_bytes_per_s=buffer.nbytes / statistics.median(passes),
            )
        )
    return BandwidthMeasurement(by_threads=tuple(measured), buffer_bytes=buffer.nbytes)


def kernel_bandwidth(bytes_per_token: int, plain_tokens_per_s: float) -> float:
    """Bytes a second that plain decoding reads: each token reads every weight and the cache once.

    Raises InvalidRequestError unless both are positive and finite.
    """
    _require_positive(bytes_per_token=bytes_per_token, plain_tokens_per_s=plain_tokens_per_s)
    return bytes_per_token * plain_tokens_per_s


def utilisation(kernel_bytes_per_s: float, read_bytes_per_s: float) -> float:
    """The share of the measured read bandwidth that decoding uses.

    Well above 1 means that one measurement is wrong. Raises InvalidRequestError unless both are positive and finite.
    """
    _require_positive(kernel_bytes_per_s=kernel_bytes_per_s, read_bytes_per_s=read_bytes_per_s)
    return kernel_bytes_per_s / read_bytes_per_s


def _filled_buffer(wanted_bytes: int) -> Chunk:
    _, available = memory_bytes()
    size = min(wanted_bytes, int(available * _SHARE_OF_AVAILABLE))
    if size < SMALLEST_BUFFER_BYTES:
        raise MemoryLimitError(
            f"measuring bandwidth needs {SMALLEST_BUFFER_BYTES // 2**20} MiB, too much of the "
            f"{available // 2**20} MiB that are available",
            needed_bytes=int(SMALLEST_BUFFER_BYTES / _SHARE_OF_AVAILABLE),
            available_bytes=available,
            hint="close other programs",
        )
    # Written, not zeroed: pages that were never written share one page, which the cache would hold.
    return np.full(size // np.dtype(np.int32).itemsize, 1, dtype=np.int32)


def _read(chunk: Chunk) -> object:
    # The reduction with the least work per byte; numpy releases the interpreter lock. From a cache one thread reaches
    # 100 GB/s (bitwise_or 60; float32 sum 28, already a bottleneck). 32 bits: every common vector unit has that
    # maximum.
    return np.maximum.reduce(chunk)


def _time_passes(
    chunks: Sequence[Chunk], seconds: float, clock: Callable[[], float], read: Callable[[Chunk], object]
) -> list[float]:
    """Seconds of each pass over all chunks, one thread each, until ``seconds`` are over."""
    passes: list[float] = []
    with ThreadPoolExecutor(len(chunks), thread_name_prefix="edgespec-bandwidth") as pool:
        list(pool.map(read, chunks))  # starts the threads and wakes the processor; not timed
        started = clock()
        while True:
            before = clock()
            list(pool.map(read, chunks))
            after = clock()
            passes.append(after - before)
            if len(passes) >= FEWEST_PASSES and after - started >= seconds:
                return passes


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise InvalidRequestError(f"{name} must be positive and finite, not {value}")
