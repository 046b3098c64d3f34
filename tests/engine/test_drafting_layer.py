"""A file whose last layer drafts for the model: it drafts by default, and no text depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from edgespec.calibration.timing import AGREEMENT_TOKENS, QUICK, measure_agreement, measure_drafter
from edgespec.engine.engine import Engine
from edgespec.engine.events import Notice
from edgespec.errors import ForwardError
from edgespec.files.gguf.header import read_header
from edgespec.interfaces.rows import IdArray
from edgespec.planning.choice.ranking import explain
from edgespec.runtimes.native.cache import NativeCache
from edgespec.runtimes.native.following import DraftingSequence
from tests.support.calibrating import result_of
from tests.support.kernel_calls import require_native
from tests.support.same_texts import KeepsTexts, plain_texts, said, same_text_at_random
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels, invent_measurements, load_drafter, read_all

require_native()


def agreeing(path: Path) -> Path:
    """A model whose next token depends mostly on the last one, with a layer that sees nothing else."""
    write_tiny_gguf(path, architecture="qwen35", drafting=())
    with path.open("r+b") as file:
        for tensor in read_header(path).tensors:
            weights = np.fromfile(path, "<f4", tensor.elements, offset=tensor.offset)
            if tensor.name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
                weights *= 0.05
            elif tensor.name.endswith("eh_proj.weight"):
                weights[:] = np.eye(*tensor.shape[::-1], dtype="<f4").ravel()
            elif tensor.name.endswith("enorm.weight"):
                weights[:] = 1.0
            file.seek(tensor.offset)
            file.write(weights.tobytes())
    return path


def load(tiny: TinyModels, path: Path, **overrides: Any) -> Engine:
    own = {"draft": "auto", "runtime": "native", "draft_runtime": "native", "threads": 2, "lookup": False}
    return tiny.load_speculating(path, **(own | overrides))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agreeing(tmp_path_factory.mktemp("layer") / "drafts.gguf")


@pytest.fixture(scope="module")
def engine(tiny: TinyModels, path: Path) -> Iterator[Engine]:
    with load(tiny, path) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[str, tuple[int, ...]]:
    return plain_texts(engine)


def test_the_layer_drafts_and_the_plan_names_it(engine: Engine) -> None:
    plan, pool = engine.plan, engine.pair.pool
    assert plan.drafter is not None
    assert plan.drafter.model == "drafts's drafting layer"
    assert any(reason.code == "drafter_layer" for reason in plan.why)
    assert engine.pair.ranking is not None
    told = explain(engine.pair.ranking)
    assert any("drafts's drafting layer" in line and "serial" in line for line in told)
    assert pool.drafter is not None
    assert pool.drafter.memory.weights_bytes == 0
    assert 0 < pool.drafter.memory.cache_bytes < pool.target_memory.cache_bytes
    assert pool.drafter_model().facts == pool.drafter.facts
    assert (pool.drafter.is_prepared, pool.drafter.will_prepare) == (True, False)


class TestTexts(KeepsTexts):
    least = 20


def test_a_layer_with_random_weights_keeps_the_text(tiny: TinyModels, tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "random.gguf",
        architecture="qwen35moe",
        quant="Q8_0",
        shared=64,
        drafting=("shared_head_norm", "shared_head_head"),
    )
    with load(tiny, path) as engine:
        assert same_text_at_random(engine)


def test_a_layer_that_fails_costs_its_guesses_alone(engine: Engine, plain: dict[str, tuple[int, ...]]) -> None:
    decode, calls = DraftingSequence._decode, []

    def failing(sequence: DraftingSequence, *own: Any) -> None:
        calls.append(own)
        if len(calls) > 4:
            raise ForwardError("the layer is broken", code=1)
        decode(sequence, *own)

    with patch.object(DraftingSequence, "_decode", failing), engine.session() as session:
        done = said(session, 4)
        assert "the layer is broken" in str(session.speculation_off)
    assert len(calls) == 5
    assert done.token_ids == plain["greedy"]


def test_without_a_drafter_the_layer_is_off(tiny: TinyModels, path: Path) -> None:
    with load(tiny, path, draft="none") as engine, engine.session() as session:
        assert engine.pair.pool.drafter is None
        events, _ = read_all(session.generate("the people", max_tokens=3))
        assert not [event for event in events if isinstance(event, Notice) and "layer" in event.text]


def test_the_layer_is_timed_far_into_a_text_and_judged_with_its_targets_rows(engine: Engine) -> None:
    seen, decode = list[tuple[int, int, bool]](), NativeCache.decode

    def watched(cache: NativeCache, ids: IdArray, position: int, rows: int, **more: Any) -> Any:
        if (pairs := more.get("pairs")) is not None:
            seen.append((position, len(ids), bool(np.any(pairs[-1]))))
        return decode(cache, ids, position, rows, **more)

    drafter, quickly = engine.pair.pool.drafter_model(), replace(QUICK, repetitions=1)
    with patch.object(NativeCache, "decode", watched):
        times = result_of(measure_drafter(drafter, 512, quickly))
        assert times.contexts[-1] == 508
        assert sum(position >= 508 for position, _, _ in seen) >= len(times.widths), "in a cache of that length"
        seen.clear()
        judged = result_of(measure_agreement(engine.pair.target, drafter, [list(range(3, 23))]))
    assert len(seen) >= 4 * (AGREEMENT_TOKENS - 1)
    assert all(any_row for position, count, any_row in seen if position + count > 1)
    assert judged.seen > AGREEMENT_TOKENS
    assert judged.overall > 0.7


def test_threads_change_and_the_layer_stays(tiny: TinyModels, path: Path, plain: dict[str, tuple[int, ...]]) -> None:
    with load(tiny, path) as engine:
        assert engine.pair.adopt(threads=1)
        assert engine.pair.pool.drafter is not None
        assert engine.pair.pool.drafter.facts.threads == 1
        invent_measurements(engine)  # with the other number of threads
        load_drafter(engine)
        with engine.session() as session:
            done = said(session, 3)
        assert done.token_ids == plain["greedy"]
        assert done.stats.accepted > 20
