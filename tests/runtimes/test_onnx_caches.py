"""ONNX Runtime held to the contract with each form of cache: one buffer, rows of fixed shapes, the whole cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import get_args

import numpy as np
import psutil
import pytest

from edgespec.errors import (
    CancelledError,
    ClosedError,
    ContextFullError,
    ForwardError,
    InvalidRequestError,
    MemoryLimitError,
)
from edgespec.export.onnx.export import LEAST_STATIC_CACHE
from edgespec.interfaces.model import Model
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.onnx.model import OnnxModel, OnnxSequence
from edgespec.runtimes.onnx.session import OnnxSettings
from tests.runtimes.contract import Runtime, SequenceContract, equal, ids, logits, near
from tests.runtimes.thread_contract import ThreadContract
from tests.support.onnx_folders import LONG, SHORT, Folders, Form, load_folder, some_ids, unwatch, watch

LENGTHS = {"shared": SHORT, "rows": LEAST_STATIC_CACHE, "whole": SHORT}
CONTEXT = 600


def held(folders: Folders, form: str, quant: str, settings: OnnxSettings) -> Runtime:
    folder = folders.shared(quant) if form == "shared" else folders.whole()
    return Runtime(
        open_model=lambda: load_folder(folder, settings),
        prefill_tokens=20_000 if form == "shared" else 12_000,
        context_overhead_bytes=12 * 2**20,
    )


class TestContract(SequenceContract):
    @pytest.fixture(
        scope="class",
        params=[
            pytest.param(("shared", "F32", OnnxSettings()), id="F32"),
            pytest.param(("shared", "Q8_0", OnnxSettings(threads=2)), id="Q8_0 on two threads"),
            pytest.param(("shared", "Q4_0", OnnxSettings()), id="Q4_0"),
            pytest.param(("shared", "Q4_0", OnnxSettings(pad_to=2)), id="Q4_0 padded"),
            pytest.param(("whole", "F32", OnnxSettings()), id="whole"),
            pytest.param(("whole", "F32", OnnxSettings(threads=2, pad_to=2)), id="whole, padded, on two threads"),
        ],
    )
    @classmethod
    def runtime(cls, request: pytest.FixtureRequest, folders: Folders) -> Runtime:
        return held(folders, *request.param)


class TestThreads(ThreadContract):
    """What other threads do to a sequence depends on the form of its cache, not on the type of its weights."""

    @pytest.fixture(scope="class", params=["shared", "whole"])
    @classmethod
    def runtime(cls, request: pytest.FixtureRequest, folders: Folders) -> Runtime:
        return held(folders, request.param, "Q4_0", OnnxSettings(pad_to=2))


class TestContractOfFixedShapes(SequenceContract, ThreadContract):
    """On two threads, with padding requested."""

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, folders: Folders) -> Runtime:
        return Runtime(
            open_model=lambda: load_folder(
                folders.rows(quant="Q4_0", static_cache=LONG), OnnxSettings(threads=2, pad_to=2)
            ),
            prefill_tokens=3000,
            context_overhead_bytes=12 * 2**20,
        )

    def test_a_sequence_takes_little_more_memory_than_its_cache(self, model: Model, runtime: Runtime) -> None:
        """The cache is as long as the graph's, whatever context length is requested."""
        process = psutil.Process()
        with closing(model.open(600)) as first:
            first.forward(ids(600, model), 1)
            before = process.memory_info().rss
            with closing(model.open(600)) as second:
                second.forward(ids(600, model), 1)
                grown = process.memory_info().rss - before
        assert grown < model.facts.kv_bytes_per_token * LONG + runtime.context_overhead_bytes


# ------------------------------------------------------------------------------------------------------- each form


@pytest.fixture(scope="module", params=get_args(Form))
def form(request: pytest.FixtureRequest) -> Form:
    found: Form = request.param
    return found


@pytest.fixture(scope="module")
def model(form: Form, folders: Folders) -> Iterator[OnnxModel]:
    with load_folder(folders.of(form)) as model:
        yield model


@pytest.fixture
def sequence(model: OnnxModel) -> Iterator[OnnxSequence]:
    with model.open(CONTEXT) as sequence:
        yield sequence


@pytest.mark.parametrize("pad_to", [1, 2])
def test_the_last_position_of_a_context_can_be_used(form: Form, folders: Folders, pad_to: int) -> None:
    length = LENGTHS[form]
    with load_folder(folders.of(form, short=True), OnnxSettings(pad_to=pad_to)) as model:
        assert model.facts.trained_context_length == length
        tokens = ids(length, model)
        with model.open(length) as sequence:
            sequence.forward(tokens[:-1], 0)
            last = sequence.forward(tokens[-1:], 1).logits(0)
            assert sequence.length == sequence.context_length == length
            with pytest.raises(ContextFullError):
                sequence.forward([1], 0)
            for kept in (length - 6, 0):  # fixed shapes are padded beyond the end
                sequence.rewind(kept)
                assert near(sequence.forward(tokens[kept:], 1).logits(0), last)


def test_a_context_longer_than_the_graphs_positions_is_refused(form: Form, folders: Folders) -> None:
    with load_folder(folders.of(form, short=True)) as model:
        with pytest.raises(InvalidRequestError, match=str(LENGTHS[form])) as raised:
            model.open(LENGTHS[form] + 1)
        assert raised.value.hint
        with pytest.raises(InvalidRequestError, match="0 tokens"):
            model.open(0)


@pytest.mark.parametrize("rewound", [37, 20])
@pytest.mark.parametrize(
    ("says", "error", "message"),
    [
        ("Error in execution:\n the device was lost", ForwardError, "Error in execution: the device was lost"),
        (None, CancelledError, "cancelled"),
    ],
)
def test_a_failed_or_cancelled_run_leaves_the_sequence_unchanged(
    model: OnnxModel, sequence: OnnxSequence, rewound: int, says: str | None, error: type[Exception], message: str
) -> None:
    tokens = ids(80, model)
    sequence.forward(tokens[:37], 0)
    sequence.rewind(rewound)

    def before() -> None:
        if says is not None:
            raise RuntimeError(says)
        sequence.cancel()  # after Python's check of the flag

    watched = watch(sequence, before)
    with pytest.raises(error, match=message):
        sequence.forward(tokens[rewound:], 1)
    assert (sum(each.runs for each in watched), sequence.length) == (1, rewound)
    unwatch(sequence)
    sequence.reset_cancel()
    after = sequence.forward(tokens[rewound:], 1).logits(0)
    with model.open(CONTEXT) as fresh:
        fresh.forward(tokens[:37], 0)
        fresh.rewind(rewound)
        assert np.array_equal(fresh.forward(tokens[rewound:], 1).logits(0), after)


@pytest.mark.parametrize("failing_run", [2, 3])
def test_a_failure_in_a_later_run_of_a_forward_leaves_the_sequence_unchanged(
    form: Form, model: OnnxModel, sequence: OnnxSequence, failing_run: int
) -> None:
    runs = iter(range(1, 100))

    def fail() -> None:
        if next(runs) == failing_run:
            raise RuntimeError("the device was lost")

    tokens = ids(590, model)
    sequence.forward(tokens[:37], 0)
    watch(sequence, fail)
    with pytest.raises(ForwardError, match="the device was lost"):
        sequence.forward(tokens[37:], 1)
    assert sequence.length == 37
    unwatch(sequence)
    with model.open(CONTEXT) as fresh:
        fresh.forward(tokens[:37], 0)
        assert np.array_equal(fresh.forward([9], 1).logits(0), sequence.forward([9], 1).logits(0))


def test_two_sequences_in_parallel_score_like_each_alone(model: OnnxModel) -> None:
    def decode(seed: int) -> list[LogitsArray]:
        found: list[LogitsArray] = []
        with model.open(CONTEXT) as sequence:
            sequence.forward(ids(300, model, seed), 0)
            for step in range(50):
                found += logits(sequence.forward(ids(1 + step % 4, model, seed + step), 1))
                sequence.rewind(sequence.length - step % 2)
        return found

    seeds = (10, 20)
    alone = {seed: decode(seed) for seed in seeds}
    together: dict[int, list[LogitsArray]] = {}
    threads = [threading.Thread(target=lambda seed=seed: together.update({seed: decode(seed)})) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(equal(together[seed], alone[seed]) for seed in seeds)


def test_a_cache_that_does_not_fit_raises_a_readable_error(
    form: Form, model: OnnxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zeros", "empty"):
        usual = getattr(np, name)

        def refuse(shape: object, usual: object = usual, **keywords: object) -> object:
            if isinstance(shape, tuple) and len(shape) > 1:  # a cache or scores
                raise MemoryError
            return usual(shape, **keywords)  # type: ignore[operator]

        monkeypatch.setattr(np, name, refuse)
    threads = threading.active_count()
    with pytest.raises(MemoryLimitError) as raised:
        model.open(1000)
    needed = {"shared": 1000, "rows": LONG, "whole": 2 * 1000}[form]
    assert raised.value.needed_bytes == needed * model.facts.kv_bytes_per_token
    assert ("--static-cache" in (raised.value.hint or "")) is (form == "rows")
    assert threading.active_count() == threads


def test_a_closed_sequence_refuses_to_decode(model: OnnxModel) -> None:
    with model.open(64) as sequence:
        sequence.forward([1, 2], 0)
    with pytest.raises(ClosedError):
        sequence.rewind(1)
    with pytest.raises(ClosedError):
        sequence._native.decode(np.array([1]), 0, 0)
    sequence._native.free()


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("form", ["shared", "rows"], indirect=True)
def test_a_trimmed_head_scores_kept_tokens_in_source_ids(form: Form, folders: Folders, quant: str) -> None:
    make, count = (folders.shared, 400) if form == "shared" else (folders.rows, 3)
    with (
        load_folder(make(quant=quant)) as whole,  # type: ignore[operator]
        load_folder(make(quant=quant, kept=count)) as trimmed,  # type: ignore[operator]
    ):
        size = whole.facts.vocabulary_size
        kept = some_ids(count) if form == "shared" else list(range(0, size, count))
        assert trimmed.facts.vocabulary_size == size
        assert trimmed.facts.bytes_per_forward < whole.facts.bytes_per_forward
        tokens = ids(40, whole)  # includes tokens without a score
        with whole.open(64) as left, trimmed.open(64) as right:
            expected, found = left.forward(tokens, 3), right.forward(tokens, 3)
            for index in range(3):
                row = found.logits(index)
                assert (row.dtype, row.shape) == (np.dtype(np.float32), (size,))
                assert np.abs(row[kept] - expected.logits(index)[kept]).max() < 1e-4
                assert np.isneginf(np.delete(row, kept)).all()
                assert found.argmax_row(index) == int(np.argmax(row))
            assert set(found.top_k(5)[0].ravel().tolist()) <= set(kept)
