"""Bandwidth: what is read and timed, how it is computed, and which stored records are rejected."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise, repeat

import numpy as np
import pytest

from edgespec.errors import InvalidRequestError, MemoryLimitError
from edgespec.files.checked import read
from edgespec.hardware import bandwidth as module
from edgespec.hardware.bandwidth import (
    BandwidthMeasurement,
    Chunk,
    ThreadBandwidth,
    kernel_bandwidth,
    measure_read_bandwidth,
    utilisation,
)

MIB = 2**20
SMALL = 64 * MIB


class FakeMemory:
    """Memory that takes ``seconds`` for each part read, one after the other, and a matching clock."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self.seconds = iter(seconds)
        self.now = 0.0
        self.reads: list[tuple[int, int]] = []  # address and size of each part
        self.lock = threading.Lock()

    def clock(self) -> float:
        return self.now

    def read(self, chunk: Chunk) -> None:
        with self.lock:
            self.reads.append((chunk.__array_interface__["data"][0], chunk.nbytes))
            self.now += next(self.seconds)


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_bytes", lambda: (2**40, 2**40))


# -------------------------------------------------------------------------------------------------- measuring


def test_best_and_median_leave_out_the_first_pass() -> None:
    memory = FakeMemory([1000.0, 0.5, 0.1, 0.3, 0.2, 0.4])
    measured = measure_read_bandwidth([1], buffer_bytes=SMALL, seconds=1.5, clock=memory.clock, read=memory.read)
    (one,) = measured.by_threads
    assert one.threads == 1
    assert one.best_bytes_per_s == pytest.approx(SMALL / 0.1)
    assert one.median_bytes_per_s == pytest.approx(SMALL / 0.3)
    assert measured.buffer_bytes == SMALL


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_split_the_whole_buffer_between_them(threads: int) -> None:
    memory = FakeMemory(repeat(0.25))
    measure_read_bandwidth([threads], buffer_bytes=SMALL, seconds=0.1, clock=memory.clock, read=memory.read)
    passes = len(memory.reads) / threads
    assert passes == 1 + 3
    for number in range(int(passes)):
        parts = sorted(memory.reads[number * threads : (number + 1) * threads])
        assert sum(size for _, size in parts) == SMALL
        assert all(a + size == b for (a, size), (b, _) in pairwise(parts)), "no gap, no overlap"


def test_threads_read_in_parallel() -> None:
    meeting = threading.Barrier(3, timeout=60)
    ticks = iter(range(10**6))
    measure_read_bandwidth(
        [3], buffer_bytes=SMALL, seconds=0.1, clock=lambda: float(next(ticks)), read=lambda _chunk: meeting.wait()
    )
    assert not meeting.broken


def test_thread_counts_split_the_time_and_are_returned_in_order() -> None:
    memory = FakeMemory(repeat(0.125))
    measured = measure_read_bandwidth(
        [2, 1, 2], buffer_bytes=SMALL, seconds=4.0, clock=memory.clock, read=memory.read
    )
    assert [found.threads for found in measured.by_threads] == [1, 2]
    # Two seconds each: 16 passes of one part, 8 of two, and an untimed first pass each.
    assert len(memory.reads) == (16 + 1) + (8 + 1) * 2


def test_slow_memory_still_gets_three_passes() -> None:
    memory = FakeMemory(repeat(60.0))
    measure_read_bandwidth([1], buffer_bytes=SMALL, seconds=0.01, clock=memory.clock, read=memory.read)
    assert len(memory.reads) == 1 + 3


def test_by_default_it_reads_256_mib_for_under_a_second() -> None:
    memory = FakeMemory(repeat(0.0625))
    measured = measure_read_bandwidth([1], clock=memory.clock, read=memory.read)
    assert measured.buffer_bytes == 256 * MIB
    assert len(memory.reads) == 1 + 13  # 13 passes of 1/16 second: the first sum of at least 0.8


def test_the_default_reader_measures_real_memory() -> None:
    measured = measure_read_bandwidth([1, 2], buffer_bytes=SMALL, seconds=0.001)
    assert [found.threads for found in measured.by_threads] == [1, 2]
    assert all(found.best_bytes_per_s >= found.median_bytes_per_s > 0 for found in measured.by_threads)


def test_the_reader_reads_every_element() -> None:
    chunk = np.ones(1001, dtype=np.int32)
    for position in (0, 500, 1000):
        chunk[position] = 7
        assert module._read(chunk) == 7
        chunk[position] = 1


def test_the_buffer_is_written_so_that_its_pages_are_distinct() -> None:
    seen: list[bool] = []
    ticks = iter(range(100))
    measure_read_bandwidth(
        [1], buffer_bytes=SMALL, clock=lambda: float(next(ticks)), read=lambda chunk: seen.append(bool(chunk.all()))
    )
    assert seen
    assert all(seen)


def test_measuring_bandwidth_leaves_no_threads_running() -> None:
    memory = FakeMemory(repeat(1.0))
    measure_read_bandwidth([4], buffer_bytes=SMALL, clock=memory.clock, read=memory.read)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgespec-bandwidth")]


# --------------------------------------------------------------------------------------------- memory, requests


def test_little_memory_makes_a_small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_bytes", lambda: (2**40, 400 * MIB))
    memory = FakeMemory(repeat(1.0))
    assert measure_read_bandwidth([1], clock=memory.clock, read=memory.read).buffer_bytes == 100 * MIB


def test_too_little_memory_for_the_buffer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_bytes", lambda: (2**40, 255 * MIB))
    with pytest.raises(MemoryLimitError, match="255 MiB") as caught:
        measure_read_bandwidth([1])
    assert caught.value.available_bytes == 255 * MIB
    assert caught.value.needed_bytes == 256 * MIB
    assert caught.value.hint


@pytest.mark.parametrize(
    "call",
    [
        lambda: measure_read_bandwidth([]),
        lambda: measure_read_bandwidth([0, 1]),
        lambda: measure_read_bandwidth([-1]),
        lambda: measure_read_bandwidth([1], seconds=0.0),
        lambda: measure_read_bandwidth([1], seconds=math.nan),
        lambda: measure_read_bandwidth([1], seconds=math.inf),
        lambda: measure_read_bandwidth([1], buffer_bytes=SMALL - 1),
        lambda: kernel_bandwidth(0, 1.0),
        lambda: kernel_bandwidth(1, -1.0),
        lambda: kernel_bandwidth(1, math.nan),
        lambda: utilisation(0.0, 1.0),
        lambda: utilisation(1.0, 0.0),
        lambda: utilisation(1.0, math.inf),
    ],
)
def test_bandwidth_arguments_out_of_range_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    assert "\n" not in caught.value.message


def test_utilisation_is_kernel_bandwidth_over_read_bandwidth() -> None:
    assert kernel_bandwidth(1_000_000_000, 12.5) == 12.5e9
    assert utilisation(12.5e9, 25e9) == 0.5


# ------------------------------------------------------------------------------------------------------ records

MEASURED = BandwidthMeasurement(
    by_threads=(
        ThreadBandwidth(threads=1, best_bytes_per_s=12e9, median_bytes_per_s=10e9),
        ThreadBandwidth(threads=2, best_bytes_per_s=21e9, median_bytes_per_s=20e9),
        ThreadBandwidth(threads=4, best_bytes_per_s=30e9, median_bytes_per_s=20e9),
    ),
    buffer_bytes=256 * MIB,
)


def test_the_fewest_threads_with_the_highest_median_are_the_fastest() -> None:
    assert MEASURED.read_bytes_per_s == 20e9
    assert MEASURED.fastest.threads == 2


def test_a_bandwidth_measurement_as_json() -> None:
    assert replace(MEASURED, by_threads=MEASURED.by_threads[:1]).as_json() == {
        "read_bytes_per_s": 10e9,
        "buffer_bytes": 256 * MIB,
        "by_threads": [{"threads": 1, "best_bytes_per_s": 12e9, "median_bytes_per_s": 10e9}],
    }


def test_a_bandwidth_measurement_survives_json() -> None:
    stored = json.loads(json.dumps(MEASURED.as_json()))
    assert read(BandwidthMeasurement, stored, ignore_unknown=True) == MEASURED
    stored["by_threads"][0]["best_bytes_per_s"] = 12_000_000_000
    assert read(BandwidthMeasurement, stored, ignore_unknown=True) == MEASURED


ONE = {"threads": 1, "best_bytes_per_s": 12e9, "median_bytes_per_s": 10e9}


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 0},
        {"threads": True},
        *({"median_bytes_per_s": value} for value in (0, -1.0, math.nan, math.inf, "10e9", None, True, 13e9, [1.0])),
        {"best_bytes_per_s": 10**400},
    ],
    ids=str,
)
def test_an_implausible_bandwidth_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|rates"):
        read(ThreadBandwidth, {**ONE, **change})


@pytest.mark.parametrize("change", [{"by_threads": []}, {"by_threads": [ONE, ONE]}, {"buffer_bytes": 0}], ids=str)
def test_a_bandwidth_without_ascending_threads_or_a_buffer_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="ascending numbers of threads"):
        read(BandwidthMeasurement, {"by_threads": [ONE], "buffer_bytes": 1, **change})
