"""The contract of a runtime that computes on separate threads, as tests: a subclass adds ``SequenceContract``."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np
import psutil
import pytest

from edgespec.errors import CancelledError, ClosedError, InvalidRequestError
from edgespec.interfaces.model import Model, Sequence
from tests.runtimes.contract import CHUNK, CONTEXT, OneModel, Runtime, equal, ids, logits
from tests.support.started_threads import started_threads

# Growths in a row that count as a leak: the allocator may take arenas once in two hundred forwards.
LEAK_WINDOWS = 4


def once_under_way(sequence: Sequence, act: Callable[[], object]) -> threading.Thread:
    """Call ``act`` on another thread once the sequence has grown by a first chunk."""
    before = sequence.length

    def watch() -> None:
        while sequence.length == before:
            time.sleep(0.001)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def leaks(cycles: Callable[[], object], allowed_bytes: float) -> bool:
    """Whether the process grows by more than ``allowed_bytes`` repeatedly: an allocator that takes one more arena
    grows once, a leak grows each time.
    """
    process = psutil.Process()
    for _ in range(LEAK_WINDOWS):
        gc.collect()
        before = process.memory_info().rss
        cycles()
        gc.collect()
        if process.memory_info().rss - before < allowed_bytes:
            return False
    return True


def steps_during(long: Sequence, tokens: list[int], short: Sequence) -> int:
    """How many forwards of one token ``short`` completes while ``long`` reads ``tokens``."""
    ended = threading.Event()
    steps = 0

    def prefill() -> None:
        try:
            long.forward(tokens, 0)
        finally:
            ended.set()

    def decode() -> None:
        nonlocal steps
        while not ended.is_set():
            short.forward([1], 1)
            steps += not ended.is_set()
            short.rewind(0)

    running = long.submit(prefill)
    while not long.length and not running.done():
        time.sleep(0.001)  # the prefill runs
    short.run(decode)
    running.result(60)
    return steps


class ThreadContract(OneModel):
    """For runtimes whose sequences have a worker thread each and whose forwards take time."""

    @pytest.mark.slow
    def test_forwards_run_on_another_thread(self, model: Model) -> None:
        with closing(model.open(CONTEXT)) as sequence:
            threads = {sequence.run(threading.get_ident) for _ in range(3)}
            assert len(threads) == 1
            assert threading.get_ident() not in threads
            assert sequence.run(lambda: sequence.run(threading.get_ident)) in threads

    def test_any_exception_of_a_job_reaches_the_caller(self, model: Model) -> None:
        class OwnError(BaseException):
            pass

        def fail() -> None:
            raise OwnError("on purpose")

        with closing(model.open(CONTEXT)) as sequence:
            with pytest.raises(OwnError):
                sequence.run(fail)
            assert isinstance(sequence.submit(fail).exception(60), OwnError)
            assert sequence.run(lambda: 5) == 5

    @pytest.mark.slow
    def test_cancel_from_another_thread_ends_a_long_prefill(self, model: Model, runtime: Runtime) -> None:
        tokens = ids(runtime.prefill_tokens, model)
        with closing(model.open(len(tokens) + 8)) as sequence:
            sequence.forward(ids(5, model, 1), 0)
            for _ in range(20):  # on a busy machine the cancel may come after the end
                watcher = once_under_way(sequence, sequence.cancel)
                try:
                    sequence.forward(tokens, 0)
                except CancelledError:
                    break
                finally:
                    watcher.join()
                sequence.reset_cancel()
                sequence.rewind(5)
            else:
                pytest.fail("no forward was cancelled in the middle")
            assert sequence.length == 5

            with pytest.raises(CancelledError):  # sticky
                sequence.forward([1], 1)
            sequence.reset_cancel()
            after = logits(sequence.forward(tokens[:300], 3))
        with closing(model.open(len(tokens) + 8)) as fresh:
            fresh.forward(ids(5, model, 1), 0)
            assert equal(after, logits(fresh.forward(tokens[:300], 3)))

    def test_close_during_a_forward_ends_the_forward(self, model: Model, runtime: Runtime) -> None:
        tokens = ids(runtime.prefill_tokens, model)
        sequence = model.open(len(tokens))
        worker = sequence.run(threading.current_thread)
        started = threading.Event()

        def prefill() -> None:
            started.set()
            while True:
                sequence.forward(tokens, 0)
                sequence.rewind(0)

        running = sequence.submit(prefill)
        assert started.wait(60)
        time.sleep(0.02)
        alive_after_close: list[bool] = []

        def close() -> None:
            sequence.close()
            alive_after_close.append(worker.is_alive())

        closers = [threading.Thread(target=close) for _ in range(3)]
        for closer in closers:
            closer.start()
        assert isinstance(running.exception(60), CancelledError | ClosedError)
        for closer in closers:
            closer.join(60)
        assert alive_after_close == [False] * 3  # every close() returned after the thread had ended
        with pytest.raises(ClosedError):
            sequence.forward([1], 1)

    def test_a_job_can_close_its_sequence(self, model: Model) -> None:
        sequence = model.open(CONTEXT)

        def job() -> None:
            sequence.forward([1, 2], 1)
            sequence.close()
            sequence.forward([3], 1)

        with pytest.raises(ClosedError):
            sequence.run(job)
        sequence.close()

    @pytest.mark.slow
    def test_closing_a_model_ends_the_forwards_in_flight(self, runtime: Runtime) -> None:
        model = runtime.open_model()
        tokens = ids(runtime.prefill_tokens, model)
        sequences = [model.open(len(tokens)) for _ in range(2)]

        def prefill(own: Sequence) -> None:
            while True:
                own.forward(tokens, 0)
                own.rewind(0)

        running = [sequence.submit(partial(prefill, sequence)) for sequence in sequences]
        time.sleep(0.02)
        closer = threading.Thread(target=sequences[0].close)  # another caller closes one of them already
        closer.start()
        model.close()
        closer.join(60)
        for future in running:
            assert isinstance(future.exception(60), CancelledError | ClosedError)

    @pytest.mark.slow
    def test_two_models_run_in_parallel(self, runtime: Runtime) -> None:
        with closing(runtime.open_model()) as large, closing(runtime.open_model()) as small:
            tokens = ids(min(runtime.prefill_tokens, 20 * CHUNK), large)
            with closing(large.open(len(tokens))) as long, closing(small.open(CONTEXT)) as short:
                for _ in range(20):  # on a busy machine the short forwards may have to wait for a core
                    steps = steps_during(long, tokens, short)
                    # One after the other, chunk by chunk, there would be as many short forwards as chunks of the long
                    # one.
                    if steps > 1.2 * (len(tokens) // CHUNK):
                        break
                    long.rewind(0)
                else:
                    raise AssertionError(f"{steps} short forwards during a prefill, twenty times in a row")

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform == "win32", reason="a thread cannot be sent SIGINT on Windows")
    def test_interrupting_the_caller_ends_its_forward(self, model: Model, runtime: Runtime) -> None:
        tokens = ids(runtime.prefill_tokens, model)
        with closing(model.open(len(tokens))) as sequence:
            main = threading.main_thread().ident
            assert main is not None
            for _ in range(20):  # on a busy machine the interrupt may come after the end
                watcher = once_under_way(sequence, lambda: signal.pthread_kill(main, signal.SIGINT))
                with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (it may come after the forward)
                    sequence.forward(tokens, 0)
                    watcher.join()
                watcher.join()
                sequence.reset_cancel()
                if sequence.length == 0:
                    break
                sequence.rewind(0)
            else:
                raise AssertionError("no forward ended in the middle, cleaned up before its caller resumed")
            assert sequence.forward(tokens[:3], 1).count == 1

    @pytest.mark.slow
    def test_an_unreferenced_sequence_ends_its_thread(self, model: Model) -> None:
        sequence = model.open(CONTEXT)
        thread = sequence.run(threading.current_thread)
        sequence.forward([1, 2, 3], 1).argmax()
        with pytest.raises(InvalidRequestError):
            sequence.forward([-1], 1)
        forgotten = weakref.ref(sequence)
        del sequence
        gc.collect()
        assert forgotten() is None
        thread.join(60)
        assert not thread.is_alive()

    @pytest.mark.slow
    def test_a_failed_forward_does_not_keep_its_sequence_alive(self, model: Model) -> None:
        sequence = model.open(CONTEXT)
        forgotten = weakref.ref(sequence)
        gc.collect()
        gc.disable()  # without cycles nothing needs the collector
        try:
            try:
                sequence.forward([-1], 1)
            except InvalidRequestError:
                pass
            else:
                pytest.fail("an invalid id was taken")
            del sequence
            assert forgotten() is None
        finally:
            gc.enable()

    @pytest.mark.slow
    def test_rows_keep_an_unreferenced_sequence_alive(self, model: Model) -> None:
        rows = model.open(CONTEXT).forward(ids(4, model), 2)
        gc.collect()
        assert np.isfinite(rows.logits(1)).all()

    @pytest.mark.slow
    def test_a_sequence_takes_little_more_memory_than_its_cache(self, model: Model, runtime: Runtime) -> None:
        process = psutil.Process()
        length = 32_768
        with closing(model.open(length)) as first:
            first.forward(ids(600, model), 1)
            before = process.memory_info().rss
            with closing(model.open(length)) as second:
                second.forward(ids(600, model), 1)
                grown = process.memory_info().rss - before
        assert grown < model.facts.kv_bytes_per_token * length + runtime.context_overhead_bytes

    @pytest.mark.slow
    def test_forwards_and_rewinds_do_not_leak(self, model: Model) -> None:
        tokens = ids(16, model)
        with closing(model.open(CONTEXT)) as sequence:

            def cycles(count: int) -> None:
                for _ in range(count):
                    sequence.forward(tokens, 16).copy()
                    sequence.rewind(0)

            cycles(50)
            # One forward's scores leaked each time would be this much.
            leak = 200 * 16 * model.facts.vocabulary_size * 4
            assert not leaks(lambda: cycles(200), max(leak / 4, 2 * 2**20))

    @pytest.mark.slow
    def test_opening_and_closing_does_not_leak(self, model: Model) -> None:
        length = 8192

        def cycles(count: int) -> None:
            for _ in range(count):
                with closing(model.open(length)) as sequence:
                    sequence.forward([1, 2], 1)

        cycles(5)
        threads = len(started_threads())
        assert not leaks(lambda: cycles(20), 20 * length * model.facts.kv_bytes_per_token / 4)
        assert len(started_threads()) == threads
