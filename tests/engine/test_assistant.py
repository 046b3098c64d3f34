"""Gemma 4's assistant, a file for itself, drafts for its target, and no text depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration.timing import AGREEMENT_TOKENS, QUICK, measure_agreement, measure_drafter
from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequestError
from tests.support.assistants import Pair, agreeing_pair, written_pair
from tests.support.calibrating import result_of
from tests.support.kernel_calls import require_native
from tests.support.same_texts import KeepsTexts, plain_texts, said, same_text_at_random
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels

require_native()


def load(tiny: TinyModels, pair: Pair, **overrides: Any) -> Engine:
    own = {"draft": str(pair[1]), "runtime": "native", "draft_runtime": "auto", "threads": 2, "lookup": False}
    return tiny.load_speculating(pair[0], **(own | overrides))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return agreeing_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def engine(tiny: TinyModels, pair: Pair) -> Iterator[Engine]:
    with load(tiny, pair) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[str, tuple[int, ...]]:
    return plain_texts(engine)


class TestTexts(KeepsTexts):
    pass


def test_an_assistant_with_random_weights_keeps_the_text(tiny: TinyModels, tmp_path: Path) -> None:
    with load(tiny, written_pair(tmp_path, quant="Q8_0")) as engine:
        assert engine.plan.drafter is not None
        assert engine.plan.mode != "pipelined"
        assert same_text_at_random(engine)


def test_an_assistant_drafts_beyond_the_context_that_its_file_states(tiny: TinyModels, tmp_path: Path) -> None:
    with load(tiny, agreeing_pair(tmp_path, drafter_context=48)) as engine, engine.session() as session:
        assert all(said(session, 4, prompt).stats.accepted > 50 for prompt in ("the people", "some water"))


def test_an_assistant_counts_its_targets_rows_and_no_cache(engine: Engine) -> None:
    drafter = engine.pair.pool.drafter
    assert drafter is not None
    assert drafter.memory.cache_bytes == 0
    assert drafter.memory.buffers_bytes > 2 * 2048 * 128 * 4
    assert not drafter.in_process


# ------------------------------------------------------------------------------------------------- refusals


def test_a_named_assistant_of_another_target_is_an_error(tiny: TinyModels, pair: Pair, tmp_path: Path) -> None:
    wider = write_tiny_gguf(tmp_path / "wider.gguf", architecture="llama", width=256)
    words = "its-assistant is not for this target: it reads rows of 128 elements, and those of this target have 256"
    with pytest.raises(InvalidRequestError, match=words):
        tiny.load(wider, draft=str(pair[1]), runtime="native")


def test_a_target_that_llama_cpp_runs_lends_nothing(tiny: TinyModels, pair: Pair) -> None:
    with pytest.raises(InvalidRequestError, match="it reads its target's cache, and llama lends none"):
        tiny.load(pair[0], draft=str(pair[1]), runtime="llama")


def test_an_assistant_as_the_target_is_refused(tiny: TinyModels, pair: Pair) -> None:
    with pytest.raises(InvalidRequestError, match="reads the cache of the model that it drafts for, so it can only"):
        tiny.load(pair[1], draft="none")


def test_an_assistant_is_timed_and_judged_as_it_drafts(engine: Engine) -> None:
    drafter = engine.pair.pool.drafter_model()
    times = result_of(measure_drafter(drafter, 512, replace(QUICK, repetitions=1)))
    assert times.contexts[-1] == 508
    judged = result_of(measure_agreement(engine.pair.target, drafter, [list(range(3, 23))]))
    assert judged.seen > AGREEMENT_TOKENS
    assert judged.overall > 0.5
