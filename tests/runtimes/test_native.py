"""The native runtime held to the contract, and to its additional promise: the same bits at every width."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import sys
import threading
import time
import weakref
from collections import abc
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.calibration.width_probe import probe_widths
from edgespec.errors import (
    CancelledError,
    ClosedError,
    EdgespecError,
    ForwardError,
    InvalidRequestError,
    MemoryLimitError,
    ModelFileError,
    NonFiniteLogitsError,
    RuntimeUnavailableError,
    StaleRowsError,
)
from edgespec.files.gguf.header import read_header
from edgespec.files.model_file import read_model_file
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.rows import LogitsArray
from edgespec.planning.cost.widths import WIDEST
from edgespec.runtimes.native import weights as native_weights
from edgespec.runtimes.native.cache import NativeCache, NativeCancel
from edgespec.runtimes.native.layout import unsupported_reason
from edgespec.runtimes.native.library import load
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.scheduler import Share
from edgespec.runtimes.native.sequence import NativeSequence
from tests.runtimes.contract import Runtime, SequenceContract, equal, ids, logits
from tests.runtimes.thread_contract import ThreadContract
from tests.support.loading import load_native
from tests.support.native_models import KINDS, Files, some_tokens

try:
    LEVELS = load().levels
except RuntimeUnavailableError as error:
    pytest.skip(error.message, allow_module_level=True)

WAIT_S = 60.0


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def model(files: Files) -> Iterator[NativeModel]:
    with load_native(files("llama Q4_0"), NativeSettings()) as model:
        yield model


@pytest.fixture
def sequence(model: NativeModel) -> Iterator[NativeSequence]:
    with model.open(600) as sequence:
        yield sequence


# ------------------------------------------------------------------------------------------------ the contract


def held(files: Files, kind: str, settings: NativeSettings) -> Runtime:
    return Runtime(
        open_model=lambda: load_native(files(kind), settings),
        # The portable level is for correctness, and slow.
        prefill_tokens=20_000 if LEVELS[-1] != "portable" else 2000,
        context_overhead_bytes=12 * 2**20,
    )


class TestContract(SequenceContract):
    @pytest.fixture(
        scope="class",
        params=[
            ("llama F32", NativeSettings()),
            ("llama Q8_0", NativeSettings(threads=2)),
            ("llama Q4_0", NativeSettings()),
            ("qwen2 Q4_0", NativeSettings(threads=3)),
        ],
        ids=lambda param: f"{param[0]} on {param[1].threads}",
    )
    @classmethod
    def runtime(cls, request: pytest.FixtureRequest, files: Files) -> Runtime:
        return held(files, *request.param)


class TestThreads(ThreadContract):
    """What other threads do to a sequence does not depend on the type of its weights."""

    @pytest.fixture(scope="class", params=[1, 2], ids=lambda threads: f"on {threads}")
    @classmethod
    def runtime(cls, request: pytest.FixtureRequest, files: Files) -> Runtime:
        return held(files, "llama Q4_0", NativeSettings(threads=request.param))


class TestPortable(SequenceContract):
    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, files: Files) -> Runtime:
        return Runtime(open_model=lambda: load_native(files("llama Q4_0"), NativeSettings(level="portable")))


# -------------------------------------------------------------------------------------------- cancel by a destructor


class CollectingLock:
    """A lock that runs the garbage collector on the thread that has just taken the lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire()
        gc.collect()

    def __exit__(self, *_exception: object) -> None:
        self._lock.release()


class Forgotten:
    """Cancels when it is collected, as a Generation does."""

    def __init__(self, sequence: NativeSequence) -> None:
        self._sequence, self._itself = sequence, self

    def __del__(self) -> None:
        self._sequence.cancel()
        self._sequence.reset_cancel()
        self._sequence.cancel()


@pytest.mark.parametrize("use", ["argmax", "logits", "top_k", "hidden"])
def test_a_destructor_can_cancel_on_the_thread_that_holds_the_caches_lock(model: NativeModel, use: str) -> None:
    sequence = model.open(600, keep_hidden=(-1,))
    rows = sequence.forward([1, 2, 3], 1)
    uses: dict[str, Callable[[], object]] = {
        "argmax": lambda: rows.argmax_row(0),
        "logits": lambda: rows.logits(0),
        "top_k": lambda: rows.top_k(2),
        "hidden": lambda: sequence.hidden(-1),
    }
    cache = sequence._native
    cache._lock = CollectingLock(cache._lock)  # type: ignore[assignment]  # nothing else runs the collector in there
    Forgotten(sequence)
    using = threading.Thread(target=uses[use], daemon=True)
    using.start()
    using.join(WAIT_S)
    assert not using.is_alive(), "it waits for itself"
    with pytest.raises(CancelledError):
        sequence.forward([4], 1)
    sequence.reset_cancel()
    assert sequence.forward([4], 1).count == 1
    sequence.close()


# ----------------------------------------------------------------------------------------- bits at every width


def rows_of(
    path: Path, settings: NativeSettings, tokens: list[int], sizes: list[int], start: int
) -> list[LogitsArray]:
    """Every row after the first ``start`` tokens, fed in forwards of these sizes."""
    with load_native(path, settings) as model, model.open(len(tokens)) as sequence:
        sequence.forward(tokens[:start], 0)
        return rest_of(sequence, tokens, sizes)


def rest_of(sequence: NativeSequence, tokens: list[int], sizes: list[int]) -> list[LogitsArray]:
    """Every row of the tokens that are not in the cache yet, fed in forwards of these sizes."""
    found: list[LogitsArray] = []
    for size in sizes:
        done = sequence.length
        found += logits(sequence.forward(tokens[done : done + size], size))
    assert sequence.length == len(tokens)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_native_rows_are_bit_equal_at_every_width(files: Files, kind: str) -> None:
    path = files(kind)
    start, count = 230, 64  # across the border of an attention block
    tokens = some_tokens(path, start + count)
    with load_native(path, NativeSettings()) as model, model.open(len(tokens)) as sequence:
        sequence.forward(tokens[:start], 0)
        plain = rest_of(sequence, tokens, [1] * count)
        for width in range(2, 33):
            sequence.rewind(start)
            sizes = [width] * (count // width) + [1] * (count % width)
            assert equal(rest_of(sequence, tokens, sizes), plain), width


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_bit_equal_on_any_number_of_threads_at_any_mixture_of_widths(files: Files, kind: str) -> None:
    path = files(kind)
    start, count = 500, 60
    tokens = some_tokens(path, start + count)
    plain = rows_of(path, NativeSettings(), tokens, [1] * count, start)
    random_ = random.Random(3)
    for threads in (1, 2, 3, 7):
        sizes = []
        while sum(sizes) < count:
            sizes.append(min(random_.randint(1, 32), count - sum(sizes)))
        assert equal(rows_of(path, NativeSettings(threads=threads), tokens, sizes, start), plain), (threads, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set_level_computes_the_same_bits(files: Files, kind: str) -> None:
    path = files(kind)
    tokens = some_tokens(path, 300)
    expected = rows_of(path, NativeSettings(level="portable"), tokens, [5] * 8, 260)
    for level in LEVELS[1:]:
        assert equal(rows_of(path, NativeSettings(level=level), tokens, [5] * 8, 260), expected), level


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_chunks_of_any_size_gives_the_same_cache(files: Files, kind: str) -> None:
    path = files(kind)
    tokens = some_tokens(path, 600)

    def last_row(threads: int, sizes: list[int]) -> LogitsArray:
        with load_native(path, NativeSettings(threads=threads)) as model, model.open(600) as sequence:
            for size in sizes:
                sequence.forward(tokens[sequence.length : sequence.length + size], 0)
            assert sequence.length == 599
            return sequence.forward(tokens[599:], 1).logits(0)

    plain = last_row(1, [1] * 599)
    # 256 tokens are computed together: two threads take half the rows each, three a third of the outputs.
    for threads, sizes in (
        (1, [599]),
        (2, [599]),
        (3, [599]),
        (2, [255, 257, 87]),
        (2, [7] * 85 + [4]),
        (2, [64] * 9 + [23]),
    ):
        assert np.array_equal(last_row(threads, sizes), plain), (threads, sizes)


def test_the_width_probe_finds_all_widths_bit_equal(model: NativeModel) -> None:
    probe = probe_widths(model)
    assert probe.widths == tuple(range(1, WIDEST + 1))
    assert probe.max_abs_diff == 0


def test_forked_and_rewound_sequences_score_like_a_fresh_sequence(model: NativeModel) -> None:
    random_ = random.Random(5)
    tokens: list[int] = []
    sequence = model.open(600)
    with model.open(600) as fresh:
        for step in range(60):
            if len(tokens) > 500 or random_.random() < 0.3:
                tokens = tokens[: random_.randrange(len(tokens) + 1)]
                sequence.rewind(len(tokens))
            if random_.random() < 0.3:
                other = sequence.fork()
                assert other.length == len(tokens)
                sequence.close()
                sequence = other
            more = random_.choices(range(300), k=random_.randint(1, 40))
            tokens = tokens + more
            found = sequence.forward(more, 1).logits(0)
            fresh.rewind(0)
            assert np.array_equal(fresh.forward(tokens, 1).logits(0), found), step
    sequence.close()


# --------------------------------------------------------------------------------------------------- facts


def test_native_facts_come_from_the_file_and_the_machine(files: Files, model: NativeModel) -> None:
    header = read_header(files("llama Q4_0"))
    facts = model.facts
    assert facts == ModelFacts(
        name="llama Q4_0",
        sha256=read_model_file(files("llama Q4_0")).identity,
        architecture="llama",
        runtime="native",
        build=load().build,
        device="cpu",
        threads=1,
        vocabulary_size=header.vocabulary_size,
        trained_context_length=2048,
        weight_bytes=header.tensor_bytes,
        bytes_per_forward=header.bytes_per_forward,
        kv_bytes_per_token=2 * 2 * 2 * 32 * 2,
        kv_type="f16",
        can_rewind=True,
        can_fork=True,
        can_branch=True,
        bit_equal_by_construction=True,
        settings={"level": LEVELS[-1]},
    )


def test_a_model_with_another_thread_count_shares_the_weights(model: NativeModel, sequence: NativeSequence) -> None:
    expected = sequence.forward([1, 2, 3], 1).logits(0)
    with model.with_settings(threads=2) as other, other.open(600) as beside:
        assert other.facts == model.facts_with(threads=2)
        assert (other.facts.threads, other.settings.threads) == (2, 2)
        assert np.array_equal(beside.forward([1, 2, 3], 1).logits(0), expected)
    assert sequence.forward([4], 1).count == 1  # closing one leaves the other
    with model.with_settings() as same:
        assert same.facts == model.facts


def test_a_cache_is_freed_if_its_worker_thread_cannot_be_started(
    model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    freed: list[NativeCache] = []
    monkeypatch.setattr("edgespec.runtimes.sequence.WorkerThread", no_thread)
    monkeypatch.setattr(NativeCache, "free", lambda self, free=NativeCache.free: (freed.append(self), free(self)))
    with pytest.raises(RuntimeError, match="thread"):
        model.open(20)
    assert len(freed) == 1


def test_a_closed_native_model_refuses_open_with_settings_and_fork(files: Files) -> None:
    model = load_native(files("llama Q4_0"), NativeSettings(), name="given", sha256="ab")
    assert (model.facts.name, model.facts.sha256) == ("given", "ab")
    sequence = model.open(20)
    sequence.forward([1], 0)
    model.close()
    for use in (lambda: model.open(20), lambda: model.with_settings(threads=2), sequence.fork):
        with pytest.raises(ClosedError):
            use()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (NativeSettings(threads=0), InvalidRequestError),
        (NativeSettings(level="abacus"), InvalidRequestError),
    ],
)
def test_invalid_native_settings_are_refused(files: Files, settings: NativeSettings, error: type[Exception]) -> None:
    with pytest.raises(error):
        load_native(files("llama Q4_0"), settings)


def test_a_context_that_exceeds_memory_is_refused(model: NativeModel) -> None:
    with pytest.raises(InvalidRequestError):
        model.open(0)
    for length in (2**40, 2**61):
        with pytest.raises(MemoryLimitError) as caught:
            model.open(length)
        assert caught.value.needed_bytes == length * model.facts.kv_bytes_per_token


@pytest.mark.parametrize("short_head", [False, True])
def test_a_reference_to_a_closed_sequence_does_not_keep_the_weights_alive(files: Files, short_head: bool) -> None:
    """As with a name that outlives a ``with`` block, e.g. in a notebook."""
    model = load_native(files("llama Q4_0"), NativeSettings())
    weights = weakref.ref(model._loaded().weights)  # only the weights show whether their memory is free
    used = model.with_head_rows(np.arange(0, 40, 2)) if short_head else model
    with used.open(20) as sequence:
        rows = sequence.forward([1, 2], 1)
    used.close()
    model.close()
    gc.collect()
    assert weights() is None
    for use in (lambda: sequence.frequent_ids, sequence.score_frequent, lambda: rows.logits(0)):
        with pytest.raises((ClosedError, StaleRowsError)):
            use()


def test_weights_are_freed_with_their_last_model_or_sequence(files: Files) -> None:
    model = load_native(files("llama Q4_0"), NativeSettings())
    sequence = model.open(20)
    model.close()
    del model
    gc.collect()
    with pytest.raises(ClosedError):
        sequence.forward([1], 1)
    del sequence
    gc.collect()


@pytest.mark.parametrize("lock", ["scheduler", "batch"])
def test_garbage_collection_while_a_lock_of_the_batch_is_held_frees_a_sequence(files: Files, lock: str) -> None:
    """Any allocation may collect garbage, and a Sequence's finalizer waits for its thread to free the cache."""
    with load_native(files("llama Q4_0"), NativeSettings()) as model:
        sequence = model.open(20)
        sequence.forward([1], 1)
        native, batch = sequence._native, sequence._native._batch
        held, found = batch._lock if lock == "batch" else batch._scheduler._lock, [sequence]
        del sequence

        def collect() -> None:
            with held:
                found.clear()

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert not native.is_open
        with model.open(20) as another:
            assert another.forward([1], 1).count == 1
            assert (batch._users, len(batch._scheduler._members)) == (1, 1)
        assert (batch._users, batch._pointer) == (0, None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="forking a process with threads warns from 3.12 on")
def test_a_sequence_used_in_a_forked_process_raises_instead_of_hanging(model: NativeModel) -> None:
    with model.with_settings(threads=2) as two, two.open(20) as sequence:
        sequence.forward([1], 1)
        native = sequence._native
        child = os.fork()
        if child == 0:  # the child has only this thread, so the runtime's worker is left out
            try:
                native.decode(np.array([1]), 1, 1)
            except ForwardError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert sequence.forward([1], 1).count == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="forking a process with threads warns from 3.12 on")
def test_a_sequence_opened_in_a_process_that_was_forked_in_mid_forward_raises(
    model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, forked = threading.Event(), threading.Event()
    with model.with_settings(threads=2) as two, two.open(20) as sequence:
        scheduler = sequence._native._batch._scheduler
        compute = scheduler._compute

        def held(shares: abc.Sequence[Share]) -> abc.Sequence[int]:
            begun.set()
            assert forked.wait(WAIT_S)
            return compute(shares)

        monkeypatch.setattr(scheduler, "_compute", held)
        forward = sequence.submit(lambda: sequence.forward([1], 1).count)
        assert begun.wait(WAIT_S)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            with contextlib.suppress(BaseException):  # or the child would run the other tests
                with pytest.raises(ForwardError):
                    two.open(20).forward([1], 1)
                os._exit(0)
            os._exit(1)
        status = os.waitpid(child, 0)[1]
        forked.set()
        assert (forward.result(WAIT_S), status) == (1, 0)


def test_a_cancel_ends_a_running_forward(model: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with model.open(4000) as sequence:
        tokens = ids(3000, model)
        sequence.cancel()
        with monkeypatch.context() as patched:
            patched.setattr(NativeCancel, "raised", False)  # as if another thread had raised it after Python looked
            with pytest.raises(CancelledError):
                sequence.forward(tokens, 1)
        assert sequence.length == 0
        sequence.reset_cancel()
        assert sequence.forward(tokens[:4], 1).count == 1


@pytest.mark.parametrize("tree", [False, True])
def test_a_forward_that_is_cancelled_in_a_shared_step_changes_nothing(
    model: NativeModel, monkeypatch: pytest.MonkeyPatch, tree: bool
) -> None:
    with model.open(20) as first, model.open(20) as cancelled, model.open(20) as other:
        cancelled.forward([1, 2, 3], 1)
        expected = logits(cancelled.forward([4, 5], 2))
        cancelled.rewind(3)
        stale = cancelled.forward([6], 1)
        cancelled.rewind(3)
        scheduler = first._native._batch._scheduler
        compute, begun, go, sizes = scheduler._compute, threading.Event(), threading.Event(), list[int]()

        def watched(shares: abc.Sequence[Share]) -> abc.Sequence[int]:
            begun.set()
            assert go.wait(WAIT_S)
            codes = compute(shares)
            sizes.append(len(shares))
            if len(shares) > 1:
                cancelled.cancel()
            return codes

        monkeypatch.setattr(scheduler, "_compute", watched)
        futures = [first.submit(lambda: first.forward([1], 1))]
        assert begun.wait(WAIT_S)
        futures += [
            cancelled.submit(
                lambda: cancelled.forward_tree([7, 8], [-1, 0]) if tree else cancelled.forward([7, 8], 2)
            ),
            other.submit(lambda: other.forward([9], 1)),
        ]
        deadline = time.monotonic() + WAIT_S
        while len(scheduler._waiting) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        go.set()
        assert isinstance(futures[1].exception(WAIT_S), CancelledError)
        assert (futures[0].result(WAIT_S).count, futures[2].result(WAIT_S).count) == (1, 1)
        assert sizes == [1, 2]
        assert (cancelled.length, other.length) == (3, 1)
        with pytest.raises(InvalidRequestError):
            cancelled.keep([0])
        with pytest.raises(StaleRowsError):
            stale.argmax_row(0)
        cancelled.reset_cancel()
        assert equal(logits(cancelled.forward([4, 5], 2)), expected)


# ---------------------------------------------------------------------------------------------- rows of scores


def test_top_k_of_any_size_agrees_with_numpy(model: NativeModel, sequence: NativeSequence) -> None:
    rows = sequence.forward([5, 6, 7], 3)
    size = model.facts.vocabulary_size
    for k in (0, 1, 7, size):
        found_ids, found_scores = rows.top_k(k)
        for index, row in enumerate(logits(rows)):
            expected = np.lexsort((np.arange(size), -row))[:k]
            assert np.array_equal(found_ids[index], expected)
            assert np.array_equal(found_scores[index], row[expected])
    with pytest.raises(ValueError, match="no best"):
        rows.top_k(size + 1)


def with_floats(source: Path, target: Path, tensor: str, change: Callable[[np.ndarray], None]) -> Path:
    """A copy of a model with one of its F32 tensors changed in place."""
    shutil.copyfile(source, target)
    (found,) = (each for each in gguf.GGUFReader(str(source)).tensors if each.name == tensor)
    values = np.array(found.data, dtype=np.float32)
    change(values)
    with target.open("r+b") as file:
        file.seek(int(found.data_offset))
        file.write(values.tobytes())
    return target


def test_equal_scores_choose_the_lowest_token_id(files: Files, tmp_path: Path) -> None:
    path = with_floats(files("llama F32"), tmp_path / "flat.gguf", "output_norm.weight", lambda norm: norm.fill(0))
    with load_native(path, NativeSettings()) as model, model.open(20) as sequence:
        rows = sequence.forward([7], 1)
        assert rows.argmax_row(0) == 0
        assert rows.top_k(5)[0].tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_with_scores_that_are_not_finite_raise(files: Files, tmp_path: Path, bad: float) -> None:
    def spoil(norm: np.ndarray) -> None:
        norm[5] = bad

    path = with_floats(files("llama F32"), tmp_path / "bad.gguf", "output_norm.weight", spoil)
    with load_native(path, NativeSettings()) as model, model.open(20) as sequence:
        rows = sequence.forward([7], 1)
        with pytest.raises(NonFiniteLogitsError, match="token id"):
            rows.argmax()


def test_a_rewind_removes_a_token_that_made_the_cache_not_finite(files: Files, tmp_path: Path) -> None:
    def spoil(embedding: np.ndarray) -> None:
        embedding[300] = np.nan

    path = with_floats(files("llama F32"), tmp_path / "bad.gguf", "token_embd.weight", spoil)
    with load_native(path, NativeSettings()) as model, model.open(20) as sequence:
        sequence.forward([7, 8, 9], 0)
        expected = sequence.forward([10], 1).logits(0)
        sequence.rewind(3)
        assert np.isnan(sequence.forward([300, 11], 1).logits(0)).all()
        sequence.rewind(3)
        assert np.array_equal(sequence.forward([10], 1).logits(0), expected)


# ----------------------------------------------------------------------------------------------- files refused


def test_a_scale_that_is_not_finite_is_an_error_that_names_the_tensor(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    shutil.copyfile(files("llama Q4_0"), path)
    tensor = next(t for t in read_header(path).tensors if t.name == "blk.1.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(tensor.offset + 3 * tensor.byte_count // tensor.shape[1])
        file.write(np.array([np.nan], dtype=np.float16).tobytes())
    with pytest.raises(ModelFileError, match=r"row 3 of tensor blk\.1\.ffn_up\.weight"):
        load_native(path, NativeSettings(threads=2))


def test_laying_weights_out_in_strips_gives_the_same_model(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files("qwen2 Q4_0")
    tokens = some_tokens(path, 20)
    expected = rows_of(path, NativeSettings(), tokens, [5], 15)
    monkeypatch.setattr(native_weights, "_STRIP_ROWS", 48)
    assert equal(rows_of(path, NativeSettings(threads=3), tokens, [5], 15), expected)
    damaged = tmp_path / "bad.gguf"
    shutil.copyfile(path, damaged)
    head = next(t for t in read_header(path).tensors if t.name == "token_embd.weight")
    with damaged.open("r+b") as file:
        file.seek(head.offset + 100 * head.byte_count // head.shape[1])
        file.write(np.array([np.inf], dtype=np.float16).tobytes())
    with pytest.raises(ModelFileError, match=r"row 100 of tensor token_embd"):
        load_native(damaged, NativeSettings())


def test_a_model_file_that_changed_after_its_check_is_refused(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "changing.gguf"
    shutil.copyfile(files("llama Q4_0"), path)
    header = read_header(path)
    with path.open("r+b") as file:
        file.truncate(header.file_bytes - 4096)
    with pytest.raises(ModelFileError, match="changed"):
        load_native(header, NativeSettings())
    path.unlink()
    with pytest.raises(ModelFileError, match="cannot be read"):
        load_native(header, NativeSettings())


def test_unsupported_reason_is_none_for_models_that_run(files: Files) -> None:
    for kind in KINDS:
        assert unsupported_reason(read_header(files(kind))) is None


@pytest.mark.slow
def test_a_damaged_header_is_refused_or_harmless(files: Files, tmp_path: Path) -> None:
    """Whatever the header says, no byte outside the file and the buffers is touched, or this process crashes."""
    source = files("llama Q4_0")
    data, end = source.read_bytes(), read_header(source).data_offset
    path = tmp_path / "damaged.gguf"
    # The numbers and names of the model: not the vocabulary, which is most of the header.
    start = data.index(b"tokenizer.ggml.model")
    tensors = data.index(b"token_embd.weight")
    refused = 0
    for seed in range(400):
        random_ = random.Random(seed)
        damaged = bytearray(data)
        for _ in range(random_.randint(1, 3)):
            at = random_.choice((random_.randrange(24, start), random_.randrange(tensors, end)))
            damaged[at] = random_.choice((0, 1, 2, 8, 16, 32, 64, 127, 128, 255, damaged[at] ^ 1))
        path.write_bytes(damaged)
        try:
            with load_native(path, NativeSettings()) as model, model.open(40) as sequence:
                sequence.forward([1, 2, 3], 3).argmax()
        except EdgespecError:
            refused += 1
    assert 100 < refused < 400
