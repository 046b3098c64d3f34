"""The engine on the native runtime: deep drafts keep the text of plain decoding."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.bench.equality import FullTrees
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Round
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.engine.session import Session
from edgespec.errors import InvalidRequestError, RuntimeUnavailableError
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.widths import WIDEST
from edgespec.planning.depth.base import FixedDepth
from edgespec.runtimes.native.sequence import NativeSequence
from edgespec.runtimes.sequence import MAX_SCORED_ROWS
from tests.decoding.test_grown_trees import Beside
from tests.support.budgets import FixedBudget
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels, answer
from tests.support.wide_trees import Bushy

SAMPLINGS = (
    None,
    Sampling(temperature=1.0, seed=7),
    Sampling(temperature=0.7, top_p=0.95, seed=8),
    Sampling(temperature=1.0, top_k=40, seed=9),
    Sampling(temperature=1.0, min_p=0.05, seed=10),
    Sampling(temperature=0.8, top_p=0.9, repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1, seed=11),
)
PROMPTS = ("hello world", "one two three one two three one", "the people of the world")
DEPTH = 8


@pytest.fixture(autouse=True)
def _library() -> None:
    require_native()


def load(tiny: TinyModels, **settings: object) -> Engine:
    """A native target with a native drafter and lookup drafting."""
    engine = tiny.load_speculating(runtime="native", draft_runtime="native", **settings)
    assert engine.plan.target.runtime == "native"
    assert engine.plan.numeric_class.widths == tuple(range(1, WIDEST + 1))
    return engine


def answers(session: Session, depth: int | None) -> list[tuple[int, ...]]:
    """One answer for each prompt and kind of sampling."""
    found = []
    for prompt in PROMPTS:
        for sampling in SAMPLINGS:
            done = answer(session.generate(prompt, max_tokens=40, depth=depth, sampling=sampling))
            assert (done.stats.accepted > 0) == (depth != 0)
            found.append(done.token_ids)
            session.clear()
    return found


def at_once(engine: Engine) -> Speculation:
    """A pipelined Speculation of depth eight."""
    return Speculation(
        drafters=engine.drafters,
        policy=FixedDepth(DEPTH + 1),
        depth_cap=DEPTH,
        budget=lambda: FixedBudget(most=DEPTH, ahead=DEPTH + 1, patience=10.0),
    )


@pytest.mark.slow
@pytest.mark.parametrize("lookup", [True, False])
def test_depth_eight_on_the_native_runtime_keeps_the_text_of_plain_decoding(tiny: TinyModels, lookup: bool) -> None:
    with load(tiny, lookup=lookup) as engine:
        with engine.session() as session:
            plain = answers(session, 0)
            assert len(set(plain)) == len(plain)
            assert answers(session, DEPTH) == plain
        with engine.session(_speculation=at_once(engine)) as session:
            assert answers(session, None) == plain
        drafter = engine.pair.pool.drafter_model()
        assert isinstance(drafter.open(16), NativeSequence)
        assert drafter.facts == engine.pair.measurements.drafter
    with load(tiny, lookup=lookup, threads=1) as engine, engine.session() as session:
        assert answers(session, 0) == answers(session, DEPTH) == plain


@pytest.mark.parametrize("draft_runtime", ["native", "llama"])
def test_trees_with_alternatives_keep_the_text_of_plain_decoding(tiny: TinyModels, draft_runtime: str) -> None:
    def written(session: Session) -> tuple[list[tuple[int, ...]], list[RoundRecord]]:
        texts, rounds = [], []
        for prompt in PROMPTS:
            for sampling in SAMPLINGS:
                events = list(session.generate(prompt, max_tokens=40, sampling=sampling))
                texts += [event.token_ids for event in events if isinstance(event, Done)]
                rounds += [event.record for event in events if isinstance(event, Round)]
                session.clear()
        return texts, rounds

    with tiny.load_speculating(runtime="native", draft_runtime=draft_runtime, lookup=False) as engine:
        with engine.session() as session:
            plain = answers(session, 0)
        own = Speculation(drafters=engine.drafters, policy=Beside(2, (3, 2)), depth_cap=DEPTH)
        assert own.trees
        with engine.session(_speculation=own) as session:
            texts, rounds = written(session)
        assert texts == plain
        assert max(record.alternative_count for record in rounds) == 5
        assert any(record.alternative_count and record.accepted for record in rounds)
        with engine.session(_speculation=replace(own, trees=False)) as session:
            texts, rounds = written(session)
        assert texts == plain
        assert {record.alternative_count for record in rounds} == {0}


def test_trees_of_up_to_63_nodes_keep_the_text_of_plain_decoding(tiny: TinyModels) -> None:
    with tiny.load_speculating(runtime="native", draft_runtime="native") as engine:
        drafters = (Bushy(), *engine.drafters)
        own = Speculation(drafters=drafters, policy=FullTrees(6, "model"), depth_cap=6)
        with engine.session() as session, engine.session(_speculation=own) as wide:
            for prompt, sampling in itertools.product(PROMPTS, (None, SAMPLINGS[1], SAMPLINGS[-1])):
                plain = answer(session.generate(prompt, max_tokens=40, depth=0, sampling=sampling))
                events = list(wide.generate(prompt, max_tokens=40, sampling=sampling))
                assert [event.token_ids for event in events if isinstance(event, Done)] == [plain.token_ids]
                rounds = [event.record for event in events if isinstance(event, Round)]
                assert max(record.width for record in rounds) == MAX_SCORED_ROWS
                assert len([record for record in rounds if record.proposed >= 40]) > len(rounds) // 2
                assert sum(record.accepted for record in rounds) > 0
                session.clear()
                wide.clear()


@pytest.mark.slow
def test_the_text_is_the_targets_with_a_drafter_of_another_runtime_in_a_process(tiny: TinyModels) -> None:
    with load(tiny, lookup=False) as engine, engine.session() as session:
        plain = answers(session, 0)
    with tiny.load_speculating(
        runtime="native", draft_runtime="llama", draft_isolation="process", lookup=False
    ) as engine:
        model = engine.pair.pool.drafter_model()
        assert model.facts.runtime == "llama"
        assert "process" in model.facts.settings
        assert model.wait(60.0)
        with engine.session() as session:
            assert answers(session, DEPTH) == plain


def test_a_model_that_the_native_runtime_does_not_run_is_refused_with_a_hint(
    tiny: TinyModels, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "narrow.gguf", quant="Q8_0", heads=4, kv_heads=4)  # heads of 16, each alone
    with pytest.raises(RuntimeUnavailableError, match="the native runtime does not run narrow: ") as caught:
        tiny.load(path, runtime="native", draft="none")
    assert caught.value.hint == 'runtime "auto" or "llama" runs it with llama.cpp'
    with tiny.load(path, draft="none") as engine:
        assert engine.plan.target.runtime == "llama", "without a runtime set, llama.cpp runs the model"


def test_the_native_runtime_refuses_other_devices(tiny: TinyModels) -> None:
    with pytest.raises(InvalidRequestError, match="runs on the processor, not on Vulkan0"):
        tiny.load(runtime="native", device="Vulkan0")
    with pytest.raises(InvalidRequestError, match="runs on the processor, not on Vulkan0"):
        tiny.load(draft_runtime="native", draft_device="Vulkan0")


def test_native_is_refused_as_a_device_name(tiny: TinyModels) -> None:
    with pytest.raises(RuntimeUnavailableError, match="no device 'native'"):
        tiny.load(device="native")
