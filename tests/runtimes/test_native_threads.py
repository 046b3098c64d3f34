"""Threads of the native runtime as its users see them: places, quotas, side by side, cancelled, and idle."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from edgespec.errors import CancelledError, InvalidRequestError
from edgespec.runtimes.native import threads as native_threads
from edgespec.runtimes.native.native import NativeModel, NativeSequence, NativeSettings, load_native
from edgespec.runtimes.native.threads import MOST_THREADS, check_threads, make_threads
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import write_tiny_gguf

WATCHDOG_S = 120.0

linux = pytest.mark.skipif(sys.platform != "linux", reason="processors are chosen on Linux only")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_native()
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "model.gguf", quant="Q4_0", width=128, layers=8)


@pytest.fixture
def model(path: Path) -> Iterator[NativeModel]:
    with load_native(path, NativeSettings(threads=2)) as model:
        yield model


@linux
@pytest.mark.parametrize("threads", [1, 2])
def test_chosen_processors_change_no_bit_and_are_told(path: Path, model: NativeModel, threads: int) -> None:
    processors = tuple(sorted(os.sched_getaffinity(0), reverse=True))[:2]
    if len(processors) < 2:
        pytest.skip("there is one processor")
    with model.open(20) as sequence:
        expected = sequence.forward([1, 2, 3], 1).logits(0)
    with load_native(path, NativeSettings(threads=threads, processors=processors)) as bound:
        said = ",".join(map(str, processors[:threads]))
        assert bound.facts.settings == {**model.facts.settings, "processors": said}
        with bound.open(20) as sequence:
            before = sequence.run(lambda: os.sched_getaffinity(0))
            assert sequence.forward([1, 2, 3], 1).logits(0).tobytes() == expected.tobytes()
            assert sequence.run(lambda: os.sched_getaffinity(0)) == before
        with pytest.raises(InvalidRequestError, match="3 threads cannot share 2 processors"):
            bound.with_settings(threads=3)


@linux
def test_processors_that_cannot_be_had_are_refused() -> None:
    here = sorted(os.sched_getaffinity(0))
    check_threads(1, (here[0],))
    check_threads(1, tuple(here))
    check_threads(MOST_THREADS, None)
    for threads, processors, reason in (
        (0, None, "at least 1"),
        (MOST_THREADS + 1, None, "at most 8192"),
        (2, (here[0],), "2 threads cannot share 1 processors"),
        (2, (here[0], here[0]), "named twice"),
        (1, (100_000,), "may not run on processor 100000"),
        (1, (-1,), "may not run on processor -1"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            check_threads(threads, processors)


def test_other_systems_refuse_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    check_threads(2, None)
    with pytest.raises(InvalidRequestError, match="on this system"):
        check_threads(1, (0,))


def test_the_kernels_are_told_of_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (None, 3):
        monkeypatch.setattr(native_threads, "processor_limit", lambda limit=limit: limit)
        made = make_threads(2, (5, 4, 3))
        assert (made.count, made.most_busy, made.processors[:2]) == (2, limit or 0, [5, 4])
        assert not make_threads(2, None).processors


def test_two_models_side_by_side_compute_what_each_computes_alone(path: Path, model: NativeModel) -> None:
    tokens = [list(range(start, start + 3)) for start in range(1, 200)]
    with model.open(len(tokens) * 3) as alone:
        expected = [alone.forward(each, 1).logits(0).tobytes() for each in tokens]
    other = load_native(path, NativeSettings(threads=2))
    with other, model.open(len(tokens) * 3) as first, other.open(len(tokens) * 3) as second:

        def compute(sequence: NativeSequence) -> list[bytes]:
            return [sequence.forward(each, 1).logits(0).tobytes() for each in tokens]

        running = [each.submit(functools.partial(compute, each)) for each in (first, second)]
        assert not wait(running, WATCHDOG_S).not_done
        assert [each.result() for each in running] == [expected, expected]


def test_a_cancel_in_a_long_prefill_ends_it_and_the_sequence_goes_on(model: NativeModel) -> None:
    tokens = [1 + index % 300 for index in range(200)]
    with model.open(2000) as sequence, model.open(2000) as fresh:
        expected = fresh.forward(tokens, 1).logits(0).tobytes()
        started, cancelled = threading.Event(), 0
        decode = sequence._native.decode

        def decode_and_tell(*arguments: object) -> None:
            started.set()
            decode(*arguments)  # type: ignore[arg-type]

        sequence._native.decode = decode_and_tell  # type: ignore[method-assign, assignment]
        for _ in range(20):
            started.clear()
            running = sequence.submit(lambda: sequence.forward(tokens * 9, 1))
            assert started.wait(WATCHDOG_S)
            sequence.cancel()
            error = running.exception(WATCHDOG_S)
            cancelled += isinstance(error, CancelledError)
            sequence.reset_cancel()
            sequence.rewind(0)
        assert cancelled > 0, "a prefill that always ends before it is cancelled shows nothing"
        assert sequence.forward(tokens, 1).logits(0).tobytes() == expected
