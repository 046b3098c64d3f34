"""Threads of the native runtime: quotas, models in parallel, cancels, and idle threads."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import CancelledError, ClosedError, InvalidRequestError
from edgespec.runtimes.native import batch as native_batch
from edgespec.runtimes.native.library import MOST_THREADS, Threads
from edgespec.runtimes.native.model import NativeModel, NativeSettings, describe_native
from edgespec.runtimes.native.sequence import NativeSequence
from tests.support.command_line import run_python
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native, located
from tests.support.tiny_gguf import write_tiny_gguf

WATCHDOG_S = 120.0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_native()
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "model.gguf", quant="Q4_0", width=128, layers=8)


@pytest.fixture
def model(path: Path) -> Iterator[NativeModel]:
    with load_native(path, NativeSettings(threads=2)) as model:
        yield model


def test_too_few_or_too_many_threads_are_refused(path: Path) -> None:
    file = located(path)
    assert describe_native(file, NativeSettings(threads=MOST_THREADS)).threads == MOST_THREADS
    for threads, reason in ((0, "at least 1"), (MOST_THREADS + 1, "at most 8192")):
        with pytest.raises(InvalidRequestError, match=reason):
            describe_native(file, NativeSettings(threads=threads))


def test_the_kernels_receive_the_cpu_quota(model: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Threads] = []
    monkeypatch.setattr(native_batch, "Threads", lambda **given: made.append(Threads(**given)) or made[-1])
    for limit in (None, 3):
        monkeypatch.setattr(native_batch, "processor_limit", lambda limit=limit: limit)
        model.open(20).close()
        assert (made[-1].count, made[-1].most_busy) == (2, limit or 0)


def test_two_models_in_parallel_score_like_each_alone(path: Path, model: NativeModel) -> None:
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


def test_a_cancelled_long_prefill_ends_and_the_sequence_stays_usable(model: NativeModel) -> None:
    tokens = [1 + index % 300 for index in range(200)]
    with model.open(2000) as sequence, model.open(2000) as fresh:
        expected = fresh.forward(tokens, 1).logits(0).tobytes()
        started, cancelled = threading.Event(), 0
        decode = sequence._native.decode

        def decode_and_tell(*arguments: Any, **more: Any) -> object:
            started.set()
            return decode(*arguments, **more)

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


def test_a_model_closes_while_forwards_of_its_sequences_run_and_wait(path: Path) -> None:
    tokens = [1 + index % 300 for index in range(1800)]
    model = load_native(path, NativeSettings(threads=2))
    sequences = [model.open(2000) for _ in range(5)]
    running = [each.submit(functools.partial(each.forward, tokens, 1)) for each in sequences]
    model.close()
    assert not wait(running, WATCHDOG_S).not_done
    for each in running:
        assert isinstance(each.exception(), CancelledError | ClosedError | None)
    for sequence in sequences:
        with pytest.raises(ClosedError):
            sequence.forward([1], 1)


def test_sequences_that_open_cancel_and_close_leave_the_others_rows_alone(model: NativeModel) -> None:
    tokens = [list(range(start, start + 2)) for start in range(1, 120)]
    with model.open(len(tokens) * 2) as alone:
        expected = [alone.forward(each, 1).logits(0).tobytes() for each in tokens]
    ended = threading.Event()

    def come_and_go(seed: int) -> int:
        rounds = 0
        while not ended.is_set():
            with model.open(600) as sequence:
                sequence.forward(list(range(1, 40 + seed)), 1)
                reading = sequence.submit(lambda sequence=sequence: sequence.forward([5] * 500, 1))
                sequence.cancel()
                assert isinstance(reading.exception(WATCHDOG_S), CancelledError | None)
                sequence.reset_cancel()
                with sequence.fork() as other:
                    other.forward_tree([3, 4, 5], [-1, -1, 1])
                    other.keep([1, 2])
            rounds += 1
        return rounds

    with model.open(len(tokens) * 2) as sequence, ThreadPoolExecutor(3) as pool:
        others = [pool.submit(come_and_go, seed) for seed in range(3)]
        try:
            found = [sequence.forward(each, 1).logits(0).tobytes() for each in tokens]
        finally:
            ended.set()
        assert found == expected
        assert all(other.result(WATCHDOG_S) > 0 for other in others)


SMALL_STACKS = """
import ctypes, sys
from pathlib import Path
from typing import Any
libc = ctypes.CDLL(None)
libc.pthread_self.restype = ctypes.c_void_p
libc.pthread_getattr_np.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
attributes, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
libc.pthread_attr_init(attributes)
assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(128 * 1024)) == 0
assert libc.pthread_setattr_default_np(attributes) == 0
from edgespec.files.model_file import read_model_file
from edgespec.runtimes.native.model import NativeSettings, load_native

def own_stack():
    own = ctypes.create_string_buffer(256)
    assert libc.pthread_getattr_np(libc.pthread_self(), own) == 0
    assert libc.pthread_attr_getstacksize(own, ctypes.byref(size)) == 0
    return size.value

with load_native(read_model_file(Path(sys.argv[1])), NativeSettings()) as model, model.open(400) as sequence:
    print(sequence.forward(list(range(1, 300)), 8).argmax_row(7), sequence.run(own_stack) >= 512 * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc lets the default be set")
def test_a_forward_gets_enough_stack_if_the_default_stack_is_small(path: Path, tmp_path: Path) -> None:
    with load_native(path, NativeSettings()) as model, model.open(400) as sequence:
        expected = sequence.forward(list(range(1, 300)), 8).argmax_row(7)
    done = run_python(SMALL_STACKS, path, home=tmp_path)
    assert (done.code, done.out.strip()) == (0, f"{expected} True"), done.err
