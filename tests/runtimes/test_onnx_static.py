"""Graphs of fixed shapes held to the contract, and their specifics: two widths, masks, a full cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters.model import ModelDrafter
from edgespec.errors import CancelledError, ClosedError, ForwardError, InvalidRequestError, MemoryLimitError
from edgespec.export.onnx.export import LEAST_STATIC_CACHE, export_onnx
from edgespec.files.onnx.folder import read_onnx_folder
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftRequest
from edgespec.interfaces.model import Model
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.onnx import session as onnx_session, static as onnx_static
from edgespec.runtimes.onnx.model import OnnxModel, OnnxSequence, load_onnx
from edgespec.runtimes.onnx.providers import load
from edgespec.runtimes.onnx.session import WIDE_TOKENS, OnnxSettings
from edgespec.runtimes.onnx.static import HIDDEN, new_mask, past_mask
from tests.runtimes.contract import Runtime, SequenceContract, equal, ids, logits, near
from tests.runtimes.thread_contract import ThreadContract
from tests.support.tiny_onnx import ARCHITECTURES, VOCABULARY_SIZE, llama_logits, write_tiny_model

LONG = 8192  # the longest context the contract opens


@dataclass(frozen=True)
class Folders:
    """Exported tiny models, written on first use; without ``static_cache`` those of ordinary graphs."""

    place: Path

    def __call__(
        self,
        architecture: str = "qwen2",
        quant: str = "Q4_0",
        static_cache: int | None = LEAST_STATIC_CACHE,
        kept: int | None = None,
    ) -> Path:
        source = self.source(architecture, quant)
        folder = self.place / f"{architecture}-{quant}-{static_cache}-{kept}"
        if not folder.exists():
            rows = None if kept is None else np.arange(0, VOCABULARY_SIZE, kept, dtype=np.int32)
            export_onnx(source, folder, name="tiny", sha256=None, static_cache=static_cache, kept=rows)
        return folder

    def source(self, architecture: str, quant: str) -> Path:
        path = self.place / f"{architecture}-{quant}.gguf"
        return path if path.exists() else write_tiny_model(path, architecture, quant=quant, context_length=LONG)


def load_folder(folder: Path, settings: OnnxSettings | None = None) -> OnnxModel:
    return load_onnx(read_onnx_folder(folder), settings or OnnxSettings())


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("static"))


@pytest.fixture(scope="module")
def model(folders: Folders) -> Iterator[OnnxModel]:
    with load_folder(folders()) as model:
        yield model


@pytest.fixture
def sequence(model: OnnxModel) -> Iterator[OnnxSequence]:
    with model.open(LEAST_STATIC_CACHE) as sequence:
        yield sequence


class TestContract(SequenceContract, ThreadContract):
    @pytest.fixture(
        scope="class",
        params=[("F32", OnnxSettings()), ("Q4_0", OnnxSettings(threads=2)), ("Q8_0", OnnxSettings(pad_to=2))],
        ids=["F32", "Q4_0 on two threads", "Q8_0 with padding requested"],
    )
    @classmethod
    def runtime(cls, request: pytest.FixtureRequest, folders: Folders) -> Runtime:
        quant, settings = request.param
        return Runtime(
            open_model=lambda: load_folder(folders(quant=quant, static_cache=LONG), settings),
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


# ------------------------------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fixed_shape_graphs_score_like_llama_cpp(folders: Folders, architecture: str) -> None:
    text = np.random.default_rng(4).integers(3, VOCABULARY_SIZE, 60).tolist()
    wanted = llama_logits(folders.source(architecture, "F32"), text)
    with load_folder(folders(architecture, "F32")) as model, model.open(100) as sequence:
        for prompt in (0, 1, 3, 31, 32, 33, 50):  # fed one by one, padded, whole, and mixed
            sequence.rewind(0)
            sequence.forward(text[:prompt], 0)
            found = sequence.forward(text[prompt:], 10)
            atol = 2e-2 if architecture == "gemma3" else 1e-3  # llama.cpp's table of GELU
            np.testing.assert_allclose(np.stack(logits(found)), wanted[-10:], atol=atol)


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0"])
def test_fixed_shape_graphs_score_like_the_ordinary_graph(folders: Folders, quant: str) -> None:
    with (
        load_folder(folders(quant=quant)) as static,
        load_folder(folders(quant=quant, static_cache=None)) as usual,
        static.open(200) as left,
        usual.open(200) as right,
    ):
        for count, rows in ((70, 1), (1, 1), (3, 3), (5, 1), (40, 9)):
            tokens = ids(count, static, count)
            found, wanted = logits(left.forward(tokens, rows)), logits(right.forward(tokens, rows))
            assert all(near(own, other) for own, other in zip(found, wanted, strict=True))


def test_a_fixed_shape_graph_with_a_trimmed_head_scores_kept_tokens(folders: Folders) -> None:
    with load_folder(folders(quant="Q8_0")) as whole, load_folder(folders(quant="Q8_0", kept=3)) as trimmed:
        tokens = ids(40, whole)
        with whole.open(64) as left, trimmed.open(64) as right:
            expected, found = left.forward(tokens, 3), right.forward(tokens, 3)
            for index in range(3):
                row = found.logits(index)
                assert np.abs(row[::3] - expected.logits(index)[::3]).max() < 1e-4
                assert np.isneginf(np.delete(row, np.s_[::3])).all()


def fixed(model: OnnxModel) -> OnnxModel:
    """The model as another provider runs it: a separate session for each width."""
    weights = model._weights
    assert weights is not None
    sessions = [
        weights.api.InferenceSession(
            str(weights.artefact.graph_path), onnx_session._session_options(weights.api, model.settings, width)
        )
        for width in (1, WIDE_TOKENS)
    ]
    one, many = sessions
    own = replace(weights, session=one, wide=many, on_cpu=False, turn=threading.Lock())
    return OnnxModel(own, model.settings, model.facts)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_separate_sessions_per_width_are_bit_equal_to_one_session(folders: Folders, architecture: str) -> None:
    with load_folder(folders(architecture)) as model, fixed(model) as other:
        weights = other._weights
        assert weights is not None
        assert weights.session.get_inputs()[0].shape == [1, 1]
        assert weights.wide.get_inputs()[0].shape == [1, WIDE_TOKENS]
        with model.open(200) as left, other.open(200) as right:
            for count in (70, 1, 3, 5, 40):
                tokens = ids(count, model, count)
                assert equal(logits(left.forward(tokens, 1)), logits(right.forward(tokens, 1)))


# ------------------------------------------------------------------------------------------------- runs and failures


class WatchedSession:
    """A session that lets a test act before each run; otherwise the real session."""

    def __init__(self, session: Any, before: Callable[[], None]) -> None:
        self._session, self._before = session, before
        self.runs = 0

    def run_with_iobinding(self, *arguments: Any) -> None:
        self.runs += 1
        self._before()
        self._session.run_with_iobinding(*arguments)


def watch(sequence: OnnxSequence, before: Callable[[], None] = lambda: None) -> tuple[WatchedSession, WatchedSession]:
    """The sessions of one token and of many."""
    native: Any = sequence._native
    watched = [WatchedSession(forward._session, before) for forward in (native._step, native._piece)]
    native._step._session, native._piece._session = watched
    return watched[0], watched[1]


def unwatch(sequence: OnnxSequence) -> None:
    native: Any = sequence._native
    for forward in (native._step, native._piece):
        forward._session = forward._session._session


@pytest.mark.parametrize(
    ("count", "rows", "one", "many"),
    [
        (1, 1, 1, 0),
        (4, 1, 4, 0),
        (5, 1, 0, 1),
        (32, 0, 0, 1),
        (33, 1, 1, 1),
        (38, 1, 0, 2),
        (38, 2, 6, 1),
        (39, 2, 2, 2),
        (40, 40, 40, 0),
    ],
)
def test_tokens_are_divided_between_single_and_wide_runs(
    sequence: OnnxSequence, count: int, rows: int, one: int, many: int
) -> None:
    step, piece = watch(sequence)
    sequence.forward([5] * count, rows)
    assert (step.runs, piece.runs) == (one, many)


def test_a_fixed_shape_forward_writes_only_the_new_cache_rows(model: OnnxModel, sequence: OnnxSequence) -> None:
    native: Any = sequence._native
    sequence.forward(ids(40, model), 0)
    before = native._cache.copy()
    sequence.forward(ids(7, model), 1)
    changed = np.flatnonzero((native._cache != before).any(axis=(0, 1, 3)))
    assert changed.tolist() == list(range(40, 47))


def test_a_cancel_ends_a_fixed_shape_run_in_progress(model: OnnxModel, sequence: OnnxSequence) -> None:
    tokens = ids(30, model)
    sequence.forward(tokens[:10], 0)
    _, piece = watch(sequence, sequence.cancel)  # after Python's check of the flag
    with pytest.raises(CancelledError):
        sequence.forward(tokens[10:], 1)
    assert (piece.runs, sequence.length) == (1, 10)
    unwatch(sequence)
    sequence.reset_cancel()
    after = sequence.forward(tokens[10:], 1).logits(0)
    with model.open(200) as fresh:
        fresh.forward(tokens[:10], 0)
        assert np.array_equal(fresh.forward(tokens[10:], 1).logits(0), after)


@pytest.mark.parametrize("failing_run", [1, 2, 3])
def test_a_failed_fixed_shape_run_leaves_the_sequence_unchanged(model: OnnxModel, failing_run: int) -> None:
    tokens, runs = ids(120, model), iter(range(1, 100))

    def fail() -> None:
        if next(runs) == failing_run:
            raise RuntimeError("Error in execution:\n the device was lost")

    with model.open(200) as sequence, model.open(200) as fresh:
        sequence.forward(tokens[:37], 0)
        watch(sequence, fail)
        with pytest.raises(ForwardError, match="Error in execution: the device was lost"):
            sequence.forward(tokens[37:], 1)
        assert sequence.length == 37
        unwatch(sequence)
        fresh.forward(tokens[:37], 0)
        assert np.array_equal(fresh.forward([9], 1).logits(0), sequence.forward([9], 1).logits(0))


def test_two_fixed_shape_sequences_in_parallel_score_like_each_alone(model: OnnxModel) -> None:
    def decode(seed: int) -> list[LogitsArray]:
        found: list[LogitsArray] = []
        with model.open(200) as sequence:
            sequence.forward(ids(70, model, seed), 0)
            for step in range(40):
                found += logits(sequence.forward(ids(1 + step % 4, model, seed + step), 1))
                sequence.rewind(sequence.length - step % 2)
        return found

    alone = [decode(seed) for seed in (10, 20)]
    together: list[list[LogitsArray]] = [[], []]

    def run(place: int, seed: int) -> None:
        together[place] = decode(seed)

    threads = [threading.Thread(target=run, args=each) for each in ((0, 10), (1, 20))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert equal(together[0], alone[0])
    assert equal(together[1], alone[1])


# ----------------------------------------------------------------------------------------------------- a full cache


@pytest.mark.parametrize("pad_to", [1, 2])
def test_every_position_of_a_fixed_length_cache_can_be_used(folders: Folders, pad_to: int) -> None:
    with load_folder(folders(), OnnxSettings(pad_to=pad_to)) as model:
        assert model.facts.trained_context_length == LEAST_STATIC_CACHE
        tokens = ids(LEAST_STATIC_CACHE, model)
        with model.open(LEAST_STATIC_CACHE) as sequence:
            sequence.forward(tokens[:-1], 0)
            last = sequence.forward(tokens[-1:], 1).logits(0)
            sequence.rewind(LEAST_STATIC_CACHE - 6)
            assert near(sequence.forward(tokens[-6:], 1).logits(0), last)  # padded beyond the end
            assert sequence.length == sequence.context_length


def test_a_context_longer_than_the_fixed_cache_is_refused(model: OnnxModel) -> None:
    with pytest.raises(InvalidRequestError, match=str(LEAST_STATIC_CACHE)) as raised:
        model.open(LEAST_STATIC_CACHE + 1)
    assert raised.value.hint


def test_a_drafter_with_a_full_fixed_cache_proposes_nothing(model: OnnxModel) -> None:
    request = DraftRequest(
        chooser=Chooser(Sampling()),
        vocabulary_size=VOCABULARY_SIZE,
        context_length=10 * LEAST_STATIC_CACHE,
        stop_ids=frozenset(),
    )
    drafter = ModelDrafter(lambda: model).start(request)
    text = ids(LEAST_STATIC_CACHE + 1, model)
    assert len(drafter.propose(Context(text[:100]), 4).tokens) == 4
    assert len(drafter.propose(Context(text[:-3]), 4).tokens) == 3
    assert len(drafter.propose(Context(text[:-1]), 4).tokens) == 1
    assert drafter.propose(Context(text), 4).tokens == ()
    assert len(drafter.propose(Context(text[:50]), 4).tokens) == 4  # a shorter text fits again
    drafter.close()


def test_a_fixed_length_cache_that_does_not_fit_raises_a_readable_error(
    model: OnnxModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_keywords: object) -> None:
        raise MemoryError

    monkeypatch.setattr(onnx_static.np, "zeros", refuse)
    with pytest.raises(MemoryLimitError) as raised:
        model.open(100)
    assert raised.value.needed_bytes == LEAST_STATIC_CACHE * model.facts.kv_bytes_per_token
    assert "--static-cache" in (raised.value.hint or "")


def test_a_closed_fixed_shape_sequence_refuses_to_decode(model: OnnxModel) -> None:
    with model.open(64) as sequence:
        sequence.forward([1, 2], 0)
    with pytest.raises(ClosedError):
        sequence._native.decode(np.array([1]), 0, 0)
    sequence._native.free()


# ---------------------------------------------------------------------------------------------------------- masks


def test_the_past_mask_hides_positions_beyond_length_and_window() -> None:
    found = past_mask(3, 2, 5, None)
    assert (found.dtype, found.shape) == (np.dtype(np.float32), (2, 5))
    assert (found == 0).tolist() == [[True, True, True, False, False]] * 2
    assert set(found.ravel().tolist()) == {0.0, HIDDEN}
    windowed = past_mask(3, 3, 5, 3)  # positions 3, 4 and 5 see themselves and two more
    assert (windowed == 0).tolist() == [
        [False, True, True, False, False],
        [False, False, True, False, False],
        [False, False, False, False, False],
    ]
    assert (past_mask(0, 1, 4, None) == HIDDEN).all()


def test_the_new_mask_hides_later_tokens_and_those_before_the_window() -> None:
    assert (new_mask(3, None) == 0).tolist() == np.tril(np.ones((3, 3), dtype=bool)).tolist()
    assert (new_mask(3, 2) == 0).tolist() == [[True, False, False], [True, True, False], [False, True, True]]
    assert new_mask(2, None).dtype == np.float32
    assert set(new_mask(3, 1).ravel().tolist()) == {0.0, HIDDEN}


def test_the_masks_hidden_value_is_finite_in_float16() -> None:
    assert np.isfinite(np.float16(HIDDEN))
    assert np.exp(np.float32(HIDDEN)) == 0


def test_fixed_shape_graphs_share_one_session_on_the_cpu(model: OnnxModel) -> None:
    weights = model._weights
    assert weights is not None
    assert weights.api is load().api
    assert weights.wide is weights.session  # on the CPU
