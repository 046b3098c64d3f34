"""The contract of every runtime, as tests: subclass the suite with a ``runtime`` fixture.

Numeric checks compare results of one runtime on one machine, so equality is to the bit unless a test says otherwise.
``thread_contract`` has further tests for runtimes that compute on separate threads.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from edgespec.errors import (
    CancelledError,
    ClosedError,
    ContextFullError,
    EdgespecError,
    InvalidRequestError,
    RewindError,
    StaleRowsError,
)
from edgespec.interfaces.drawing import DrawRequest, Measure, draw_from, noise_key
from edgespec.interfaces.model import Model, Sequence
from edgespec.interfaces.rows import LogitsArray, Rows

CONTEXT = 1100

# Every runtime divides a prefill into chunks of at most this many tokens; lengths next to its multiples are where
# bookkeeping fails.
CHUNK = 256


@dataclass(frozen=True)
class Runtime:
    """``open_model`` loads the model again at each call; ``prefill_tokens`` are a prompt of many chunks.

    ``context_overhead_bytes`` bounds the memory of a Sequence of 32768 tokens besides its cache.
    """

    open_model: Callable[[], Model]
    prefill_tokens: int = 0
    context_overhead_bytes: int = 0


def ids(count: int, model: Model, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(model.facts.vocabulary_size), k=count)


def logits(rows: Rows) -> list[LogitsArray]:
    return [rows.logits(index) for index in range(rows.count)]


def equal(left: list[LogitsArray], right: list[LogitsArray]) -> bool:
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


# A tenth of the spread of the tiny models' scores. Kernels that round activations to 8 bits may turn a difference in
# the last bit into one rounding step: up to 0.2 was measured with ONNX Runtime, 0.03 on average.
ROUNDING = 0.25


def near(left: LogitsArray, right: LogitsArray) -> bool:
    """The same scores up to rounding, and the same best token unless the second best is within rounding."""
    first, second = np.sort(left)[[-1, -2]]
    agree = np.argmax(left) == np.argmax(right) or first - second < ROUNDING
    return bool(agree and np.abs(left - right).max() < ROUNDING)


def last_row(sequence: Sequence, tokens: list[int], chunks: list[int]) -> LogitsArray:
    """Scores after ``tokens`` fed to an empty sequence in forwards of these sizes."""
    sequence.rewind(0)
    done = 0
    rows: Rows | None = None
    for size in chunks:
        rows = sequence.forward(tokens[done : done + size], 1)
        done += size
    assert done == len(tokens)
    assert rows is not None
    return rows.logits(0)


class OneModel:
    """A model of the runtime for all tests of a class."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, runtime: Runtime) -> Any:
        with closing(runtime.open_model()) as model:
            yield model


class SequenceContract(OneModel):
    @pytest.fixture
    def sequence(self, model: Model) -> Any:
        with closing(model.open(CONTEXT)) as sequence:
            yield sequence

    # ------------------------------------------------------------------------------------ bookkeeping

    def test_a_fresh_sequence_has_length_zero_and_the_requested_context_length(self, sequence: Sequence) -> None:
        assert (sequence.length, sequence.context_length) == (0, CONTEXT)

    @pytest.mark.slow
    def test_a_sequences_length_follows_every_forward_and_rewind(self, model: Model, sequence: Sequence) -> None:
        expected = 0
        for step, count in enumerate((1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 1)):
            sequence.forward(ids(count, model, step), min(1, step))
            expected += count
            assert sequence.length == expected
        for length in (expected, expected - 1, CHUNK, 3, 0):
            sequence.rewind(length)
            assert sequence.length == length

    def test_a_forward_of_no_tokens_changes_nothing(self, model: Model, sequence: Sequence) -> None:
        sequence.forward(ids(3, model), 0)
        assert sequence.forward([], 0).count == 0
        assert sequence.length == 3

    def test_a_forward_does_not_change_the_callers_token_list(self, model: Model, sequence: Sequence) -> None:
        tokens = ids(300, model)
        kept = list(tokens)
        sequence.forward(tokens, 1)
        assert tokens == kept

    def test_a_forward_accepts_any_sequence_of_integers(self, model: Model, sequence: Sequence) -> None:
        tokens = ids(9, model)
        expected = sequence.forward(tokens, 1).logits(0)
        for spelled in (tuple(tokens), np.array(tokens, dtype=np.int64), np.array(tokens, dtype=np.uint16)):
            sequence.rewind(0)
            assert np.array_equal(sequence.forward(spelled, 1).logits(0), expected)  # type: ignore[arg-type]

    # -------------------------------------------------------------------------------- scores of a forward

    @pytest.mark.parametrize(
        "chunks",
        [[1] * 40, [13, 27], [39, 1]],
        ids=["one by one", "two", "all but one"],
    )
    def test_a_prompt_in_chunks_gives_nearly_the_same_scores(
        self, model: Model, sequence: Sequence, chunks: list[int]
    ) -> None:
        tokens = ids(40, model)
        whole = last_row(sequence, tokens, [40])
        assert near(whole, last_row(sequence, tokens, chunks))

    @pytest.mark.slow
    @pytest.mark.parametrize("count", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3, 3 * CHUNK - 2])
    def test_scored_rows_at_the_borders_of_prefill_chunks_are_correct(
        self, model: Model, sequence: Sequence, count: int
    ) -> None:
        tokens = ids(count, model)
        found = dict[int, list[LogitsArray]]()
        for rows in (1, 2, 7, 64):
            sequence.rewind(0)
            scored = sequence.forward(tokens, rows)
            assert (scored.count, sequence.length) == (rows, count)
            found[rows] = logits(scored)
        sequence.rewind(count - 64)
        for place in range(count - 64, count):  # with single-token chunks there is no border
            alone = sequence.forward([tokens[place]], 1).logits(0)
            for rows, scores in found.items():
                if place >= count - rows:
                    assert near(alone, scores[place - count]), (rows, place)

    def test_each_row_of_a_forward_scores_its_position(self, model: Model, sequence: Sequence) -> None:
        tokens = ids(12, model)
        together = logits(sequence.forward(tokens, 12))
        for end in (1, 2, 7, 12):
            assert near(last_row(sequence, tokens[:end], [end]), together[end - 1]), end
        assert not near(together[3], together[4])  # otherwise the loop above proves nothing

    @pytest.mark.parametrize("rows", [0, 1, 6])
    def test_a_forward_returns_as_many_rows_as_requested(self, model: Model, sequence: Sequence, rows: int) -> None:
        scored = sequence.forward(ids(6, model), rows)
        assert scored.count == rows
        assert scored.argmax().shape == (rows,)
        assert scored.argmax().dtype == np.int64
        assert scored.top_k(3)[0].shape == (rows, 3)

    @pytest.mark.parametrize("rows", [-1, 7])
    def test_a_forward_refuses_more_rows_than_tokens(self, model: Model, sequence: Sequence, rows: int) -> None:
        sequence.forward(ids(4, model), 0)
        with pytest.raises(InvalidRequestError):
            sequence.forward(ids(6, model), rows)
        assert sequence.length == 4

    @pytest.mark.parametrize("index", [-1, 2])
    def test_a_row_that_was_not_scored_cannot_be_read(self, model: Model, sequence: Sequence, index: int) -> None:
        rows = sequence.forward(ids(5, model), 2)
        with pytest.raises(IndexError):
            rows.logits(index)
        with pytest.raises(IndexError):
            rows.argmax_row(index)
        with pytest.raises(IndexError):
            rows.draw(index, DrawRequest())

    # ----------------------------------------------------------------------------------------------- rows

    def test_logits_are_finite_float32_of_vocabulary_size(self, model: Model, sequence: Sequence) -> None:
        row = sequence.forward(ids(5, model), 1).logits(0)
        assert (row.dtype, row.shape) == (np.dtype(np.float32), (model.facts.vocabulary_size,))
        assert np.isfinite(row).all()

    def test_rows_can_be_read_again_until_the_next_forward(self, model: Model, sequence: Sequence) -> None:
        rows = sequence.forward(ids(5, model), 3)
        first = logits(rows)
        rows.argmax()
        rows.top_k(4)
        assert equal(logits(rows), first)

    @pytest.mark.parametrize("what", ["forward", "rewind", "close"])
    def test_rows_are_stale_after_the_sequence_changes(self, model: Model, sequence: Sequence, what: str) -> None:
        rows = sequence.forward(ids(5, model), 2)
        if what == "forward":
            sequence.forward(ids(1, model), 0)
        elif what == "rewind":
            sequence.rewind(4)
        else:
            sequence.close()
        for use in (
            rows.argmax,
            lambda: rows.argmax_row(0),
            lambda: rows.top_k(1),
            lambda: rows.logits(0),
            lambda: rows.draw(0, DrawRequest()),
            rows.copy,
        ):
            with pytest.raises(StaleRowsError):
                use()

    def test_copied_rows_survive_forward_rewind_and_close(self, model: Model, sequence: Sequence) -> None:
        rows = sequence.forward(ids(5, model), 3)
        expected, best = logits(rows), rows.argmax()
        kept = rows.copy()
        for change in (lambda: sequence.forward(ids(4, model, 1), 4), lambda: sequence.rewind(0), sequence.close):
            change()
            assert equal(logits(kept), expected)
            assert np.array_equal(kept.argmax(), best)

    def test_the_caller_may_overwrite_the_logits_it_read(self, model: Model, sequence: Sequence) -> None:
        rows = sequence.forward(ids(5, model), 2)
        row = rows.logits(0)
        before = row.copy()
        row[:] = 7  # the caller's copy
        assert np.array_equal(rows.logits(0), before)
        row = rows.logits(0)
        sequence.forward(ids(5, model, 1), 5)
        assert np.array_equal(row, before)

    def test_reductions_agree_with_numpy_on_the_logits(self, model: Model, sequence: Sequence) -> None:
        rows = sequence.forward(ids(40, model), 40)
        found_ids, found_scores = rows.top_k(5)
        for index, row in enumerate(logits(rows)):
            by_score_then_id = np.lexsort((np.arange(len(row)), -row))[:5]
            assert rows.argmax()[index] == rows.argmax_row(index) == by_score_then_id[0]
            assert np.array_equal(found_ids[index], by_score_then_id)
            assert np.array_equal(found_scores[index], row[by_score_then_id])

    def test_draws_from_rows_equal_draws_from_their_logits(self, model: Model, sequence: Sequence) -> None:
        tokens = ids(40, model)
        rows = sequence.forward(tokens, 20)
        before = logits(rows)
        for index, row in enumerate(before):
            for request in (
                DrawRequest(measure=Measure.MASS, wanted=4),
                DrawRequest(key=noise_key(1, index, 0), measure=Measure.ENTROPY, wanted=4),
                DrawRequest(key=noise_key(1, index, 0), temperature=0.7, top_p=0.9, min_p=0.01, wanted=2),
                DrawRequest(key=noise_key(1, index, 0), top_k=7, seen=Counter(tokens), repeat_penalty=1.3),
                DrawRequest(bias=((tokens[0], 30.0), (tokens[1], -math.inf))),
                DrawRequest(bias=((int(row.argmax()), -math.inf),), measure=Measure.MASS, wanted=4),
                DrawRequest(key=noise_key(1, index, 0), bias=((int(row.argmax()), -math.inf),), top_k=7, wanted=4),
                DrawRequest(
                    key=noise_key(1, index, 0), bias=((tokens[0], 3.0),), seen={tokens[0]: 2}, repeat_penalty=2
                ),
            ):
                assert rows.draw(index, request) == draw_from(row, request)
        assert equal(logits(rows), before)

    def test_rows_cut_to_a_shorter_vocabulary_ignore_the_other_scores(self, model: Model, sequence: Sequence) -> None:
        rows = sequence.forward(ids(40, model), 20)
        scored = np.flatnonzero(np.isfinite(rows.logits(0)))
        size = int(scored[len(scored) // 2])
        first, whole = rows.first(size), rows.argmax()
        assert first.count == 20
        for index, row in enumerate(logits(rows)):
            best = int(np.argmax(row[:size]))
            assert np.array_equal(first.logits(index), row[:size])
            assert first.argmax_row(index) == first.top_k(2)[0][index, 0] == best
            for request in (
                DrawRequest(measure=Measure.MASS, wanted=4),
                DrawRequest(key=noise_key(1, index, 0), measure=Measure.ENTROPY, wanted=4),
                DrawRequest(key=noise_key(1, index, 0), top_p=0.9, seen={size: 2, best: 1}, presence_penalty=2.0),
            ):
                assert first.draw(index, request) == draw_from(row[:size], request)
        assert (whole >= size).any(), "it makes a difference"
        sequence.rewind(0)
        for use in (lambda: first.argmax_row(0), lambda: first.draw(0, DrawRequest()), lambda: first.logits(0)):
            with pytest.raises(StaleRowsError):
                use()

    # --------------------------------------------------------------------------------------------- rewind

    @pytest.mark.slow
    def test_after_a_rewind_to_any_length_scores_equal_those_of_a_fresh_sequence(
        self, model: Model, sequence: Sequence
    ) -> None:
        tokens, other, more = ids(24, model), ids(24, model, 1), ids(3, model, 2)
        with closing(model.open(CONTEXT)) as fresh:
            for length in range(1, 25):
                sequence.rewind(0)
                sequence.forward(tokens[:length], 0)
                sequence.forward(other[: 25 - length], 1)
                sequence.rewind(length)
                fresh.rewind(0)
                fresh.forward(tokens[:length], 0)
                assert equal(logits(sequence.forward(more, 3)), logits(fresh.forward(more, 3))), length
                assert sequence.length == length + 3

    @pytest.mark.slow
    def test_after_a_rewind_across_chunks_scores_equal_those_of_a_fresh_sequence(
        self, model: Model, sequence: Sequence
    ) -> None:
        tokens, more = ids(700, model), ids(4, model, 2)
        lengths = (1, CHUNK - 1, CHUNK, CHUNK + 1, 511, 512, 513, 700)
        sequence.forward(tokens, 0)
        rewound = dict[int, list[LogitsArray]]()
        for length in reversed(lengths):
            sequence.rewind(length)
            rewound[length] = logits(sequence.forward(more, 4))
        with closing(model.open(CONTEXT)) as fresh:
            # The same chunks: the cache after a forward may depend on how many rows were computed together.
            fresh.forward(tokens, 0)
            for length in (700, 512, 1):
                fresh.rewind(length)
                assert equal(rewound[length], logits(fresh.forward(more, 4))), length
            for length in lengths:
                fresh.rewind(0)
                fresh.forward(tokens[:length], 0)
                for own, others in zip(logits(fresh.forward(more, 4)), rewound[length], strict=True):
                    assert near(own, others), length

    def test_a_rewound_draft_does_not_change_later_scores(self, model: Model, sequence: Sequence) -> None:
        prompt, text = ids(30, model), ids(20, model, 1)
        with closing(model.open(CONTEXT)) as plain:
            plain.forward(prompt, 0)
            sequence.forward(prompt, 0)
            for step, token in enumerate(text):
                expected = plain.forward([token], 1).logits(0)
                assert np.array_equal(sequence.forward([token], 1).logits(0), expected), step
                sequence.forward(ids(1 + step % 5, model, step), 1)
                sequence.rewind(plain.length)

    @pytest.mark.parametrize("length", [-1, 6, CONTEXT + 1])
    def test_rewind_beyond_the_length_raises_and_changes_nothing(
        self, model: Model, sequence: Sequence, length: int
    ) -> None:
        sequence.forward(ids(5, model), 0)
        with pytest.raises(RewindError):
            sequence.rewind(length)
        assert sequence.length == 5

    # ------------------------------------------------------------------------------------- invalid requests

    def test_a_full_context_raises_and_leaves_the_sequence_usable(self, model: Model) -> None:
        tokens, more = ids(18, model), ids(2, model, 1)
        with closing(model.open(20)) as sequence, closing(model.open(20)) as fresh:
            sequence.forward(tokens, 0)
            for count in (3, 300):
                with pytest.raises(ContextFullError):
                    sequence.forward(ids(count, model), 1)
                assert sequence.length == 18
            fresh.forward(tokens, 0)
            assert equal(logits(sequence.forward(more, 2)), logits(fresh.forward(more, 2)))
            assert sequence.length == sequence.context_length == 20
            with pytest.raises(ContextFullError):
                sequence.forward(ids(1, model), 0)

    def test_token_ids_outside_the_vocabulary_raise_and_keep_the_length(
        self, model: Model, sequence: Sequence
    ) -> None:
        sequence.forward(ids(7, model), 0)
        for bad in (-1, model.facts.vocabulary_size, 2**31, 2**32, -(2**32), 2**63, 2**70):
            for position in (0, 4):
                tokens = ids(5, model)
                tokens[position] = bad
                with pytest.raises(InvalidRequestError):
                    sequence.forward(tokens, 1)
                assert sequence.length == 7

    def test_64_bit_token_ids_do_not_wrap_into_the_vocabulary(self, model: Model, sequence: Sequence) -> None:
        with pytest.raises(InvalidRequestError):
            sequence.forward(np.array([1, 2**32 + 1], dtype=np.int64), 1)  # type: ignore[arg-type]
        assert sequence.length == 0

    # -------------------------------------------------------------------------------------- cancel and close

    def test_a_cancel_refuses_forwards_until_it_is_reset(self, model: Model, sequence: Sequence) -> None:
        tokens = ids(6, model)
        sequence.forward(tokens[:4], 0)
        sequence.cancel()
        for _ in range(3):
            with pytest.raises(CancelledError):
                sequence.forward(tokens[4:], 1)
            assert sequence.length == 4
        sequence.reset_cancel()
        after = sequence.forward(tokens[4:], 2)
        with closing(model.open(CONTEXT)) as fresh:
            fresh.forward(tokens[:4], 0)
            assert equal(logits(after), logits(fresh.forward(tokens[4:], 2)))

    def test_a_cancelled_sequence_can_still_be_rewound_and_closed(self, model: Model) -> None:
        sequence = model.open(CONTEXT)
        sequence.forward(ids(6, model), 0)
        sequence.cancel()
        sequence.rewind(2)
        assert sequence.length == 2
        sequence.close()

    def test_a_closed_sequence_refuses_every_call(self, model: Model) -> None:
        sequence = model.open(CONTEXT)
        sequence.forward(ids(6, model), 0)
        sequence.close()
        sequence.close()
        for use in (
            lambda: sequence.forward(ids(1, model), 1),
            lambda: sequence.run(lambda: 1),
            lambda: sequence.submit(lambda: 1).result(10),
        ):
            with pytest.raises(ClosedError):
                use()
        sequence.cancel()
        sequence.reset_cancel()

    def test_closing_one_sequence_does_not_affect_another(self, model: Model, sequence: Sequence) -> None:
        expected = sequence.forward(ids(6, model), 1).logits(0)
        model.open(CONTEXT).close()
        sequence.rewind(0)
        assert np.array_equal(sequence.forward(ids(6, model), 1).logits(0), expected)

    @pytest.mark.slow
    def test_closing_a_model_closes_its_sequences(self, runtime: Runtime) -> None:
        model = runtime.open_model()
        sequences = [model.open(64) for _ in range(3)]
        for sequence in sequences:
            sequence.forward(ids(4, model), 1)
        sequences[0].close()
        model.close()
        model.close()
        for sequence in sequences:
            with pytest.raises(ClosedError):
                sequence.forward([1], 1)
        with pytest.raises(ClosedError):
            model.open(64)

    # ------------------------------------------------------------------------------------ several sequences

    @pytest.mark.slow
    def test_interleaved_sequences_score_as_if_each_ran_alone(self, model: Model) -> None:
        def steps(seed: int) -> list[list[int]]:
            return [ids(count, model, seed + step) for step, count in enumerate((9, 1, 4, 1, 300, 1, 2))]

        def take(sequence: Sequence, tokens: list[int]) -> list[LogitsArray]:
            found = logits(sequence.forward(tokens, min(len(tokens), 4)))
            sequence.rewind(sequence.length - len(tokens) // 2)
            return found

        alone = []
        for seed in (10, 20):
            with closing(model.open(CONTEXT)) as sequence:
                alone.append([take(sequence, tokens) for tokens in steps(seed)])
        with closing(model.open(CONTEXT)) as one, closing(model.open(CONTEXT)) as two:
            for step, (left, right) in enumerate(zip(steps(10), steps(20), strict=True)):
                assert equal(take(one, left), alone[0][step]), step
                assert equal(take(two, right), alone[1][step]), step

    def test_a_fork_copies_the_cache_or_is_refused(self, model: Model, sequence: Sequence) -> None:
        sequence.forward(ids(8, model), 0)
        if not model.facts.can_fork:
            with pytest.raises(EdgespecError):
                sequence.fork()
            return
        with closing(sequence.fork()) as other:
            sequence.rewind(2)
            assert other.length == 8
            with closing(model.open(CONTEXT)) as fresh:
                fresh.forward(ids(8, model), 0)
                assert equal(logits(other.forward([1, 2], 2)), logits(fresh.forward([1, 2], 2)))

    # ------------------------------------------------------------------------------------------- run, submit

    def test_run_returns_the_jobs_result_and_can_be_nested(self, model: Model, sequence: Sequence) -> None:
        def job() -> tuple[int, int]:
            first = int(sequence.forward(ids(5, model), 1).argmax_row(0))
            return first, sequence.run(lambda: int(sequence.forward([first], 1).argmax_row(0)))

        first, second = sequence.run(job)
        assert sequence.length == 6
        sequence.rewind(0)
        assert sequence.forward(ids(5, model), 1).argmax_row(0) == first
        assert sequence.forward([first], 1).argmax_row(0) == second

    def test_submit_returns_a_future_of_the_jobs_result(self, model: Model, sequence: Sequence) -> None:
        future = sequence.submit(lambda: int(sequence.forward(ids(5, model), 1).argmax_row(0)))
        best = future.result(60)
        sequence.rewind(0)
        assert sequence.forward(ids(5, model), 1).argmax_row(0) == best

    def test_exceptions_of_jobs_reach_the_caller(self, model: Model, sequence: Sequence) -> None:
        def fail() -> None:
            raise ContextFullError("on purpose")

        with pytest.raises(ContextFullError, match="on purpose"):
            sequence.run(fail)
        assert isinstance(sequence.submit(fail).exception(60), ContextFullError)
        sequence.forward(ids(2, model), 1)
