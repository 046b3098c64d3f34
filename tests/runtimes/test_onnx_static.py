"""Graphs of fixed shapes: two widths, masks, a full cache. The contract: test_onnx_caches.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters.model import ModelDrafter
from edgespec.export.onnx.export import LEAST_STATIC_CACHE
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftRequest
from edgespec.runtimes.onnx import session as onnx_session
from edgespec.runtimes.onnx.model import OnnxModel, OnnxSequence
from edgespec.runtimes.onnx.providers import load
from edgespec.runtimes.onnx.session import WIDE_TOKENS
from edgespec.runtimes.onnx.static import HIDDEN, new_mask, past_mask
from tests.runtimes.contract import equal, ids, logits, near
from tests.support.onnx_folders import Folders, load_folder, watch
from tests.support.tiny_onnx import ARCHITECTURES, VOCABULARY_SIZE, llama_logits


@pytest.fixture(scope="module")
def model(folders: Folders) -> Iterator[OnnxModel]:
    with load_folder(folders.rows()) as model:
        yield model


@pytest.fixture
def sequence(model: OnnxModel) -> Iterator[OnnxSequence]:
    with model.open(LEAST_STATIC_CACHE) as sequence:
        yield sequence


# ------------------------------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fixed_shape_graphs_score_like_llama_cpp(folders: Folders, architecture: str) -> None:
    text = np.random.default_rng(4).integers(3, VOCABULARY_SIZE, 60).tolist()
    wanted = llama_logits(folders.rows_source(architecture, "F32"), text)
    with load_folder(folders.rows(architecture, "F32")) as model, model.open(100) as sequence:
        for prompt in (0, 1, 3, 31, 32, 33, 50):  # fed one by one, padded, whole, and mixed
            sequence.rewind(0)
            sequence.forward(text[:prompt], 0)
            found = sequence.forward(text[prompt:], 10)
            atol = 2e-2 if architecture == "gemma3" else 1e-3  # llama.cpp's table of GELU
            np.testing.assert_allclose(np.stack(logits(found)), wanted[-10:], atol=atol)


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0"])
def test_fixed_shape_graphs_score_like_the_ordinary_graph(folders: Folders, quant: str) -> None:
    with (
        load_folder(folders.rows(quant=quant)) as static,
        load_folder(folders.rows(quant=quant, static_cache=None)) as usual,
        static.open(200) as left,
        usual.open(200) as right,
    ):
        for count, rows in ((70, 1), (1, 1), (3, 3), (5, 1), (40, 9)):
            tokens = ids(count, static, count)
            found, wanted = logits(left.forward(tokens, rows)), logits(right.forward(tokens, rows))
            assert all(near(own, other) for own, other in zip(found, wanted, strict=True))


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
    return OnnxModel(own, model._file, model.settings, model.facts)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_separate_sessions_per_width_are_bit_equal_to_one_session(folders: Folders, architecture: str) -> None:
    with load_folder(folders.rows(architecture)) as model, fixed(model) as other:
        weights = other._weights
        assert weights is not None
        assert weights.session.get_inputs()[0].shape == [1, 1]
        assert weights.wide.get_inputs()[0].shape == [1, WIDE_TOKENS]
        with model.open(200) as left, other.open(200) as right:
            for count in (70, 1, 3, 5, 40):
                tokens = ids(count, model, count)
                assert equal(logits(left.forward(tokens, 1)), logits(right.forward(tokens, 1)))


# ------------------------------------------------------------------------------------------------- runs and failures


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


# ----------------------------------------------------------------------------------------------------- a full cache


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
