"""Pipelined plans: when they are made, their text, and how to override them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from edgespec.calibration.kinds import CONTENTION
from edgespec.engine.engine import Engine
from edgespec.errors import ProfileError
from edgespec.files.home import Home
from edgespec.planning.choice.settled import Answered, Settled
from edgespec.planning.cost.contention import Contention
from edgespec.planning.depth.base import FixedDepth
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.pipeline_budget import MeasuredBudget
from tests.engine.answers import SAMPLED, plain_text
from tests.support.tiny_models import TinyModels, answer, invent_measurements, load_drafter, require_speculation

PROMPTS = ("hello", "the water of the river", "one two three four")

# A drafter that takes half a target's forward: serial drafting gains nothing, pipelined drafting is free.
TARGET_S, DRAFT_S = 0.01, 0.004


def control(engine: Engine) -> DepthControl:
    assert isinstance(engine.pair.policy, DepthControl)
    return engine.pair.policy


def plan_with(engine: Engine, contention: Contention) -> None:
    """Plan as after two answers that gained by running in parallel."""
    engine.pair.measurements.answered = Answered(mode=Settled(chosen="pipelined"))
    drafter = engine.pair.measurements.drafter
    assert drafter is not None
    engine.pair.measurements.store.save(CONTENTION, contention, engine.pair.measurements.target, drafter)
    invent_measurements(engine, TARGET_S, DRAFT_S)


@pytest.fixture
def apart(tiny: TinyModels, home: Home) -> Iterator[Engine]:
    """With a separate home: acceptance from other tests' answers is not known."""
    with tiny.load(lookup=False, store_home=home) as engine:
        plan_with(engine, Contention())
        require_speculation(engine)
        load_drafter(engine)
        yield engine


def test_without_contention_the_plan_is_pipelined_and_keeps_the_text(apart: Engine) -> None:
    assert apart.plan.mode == "pipelined"
    assert control(apart).pipelined == Contention()
    assert "in parallel neither side slows the other down" in apart.plan.reasons
    overlapped, cap = 0, apart.plan.depth_cap
    # Draft in every round: the gain of tiny models is not tested here.
    always = replace(apart.pair.speculation(), policy=FixedDepth(cap + 1))
    with apart.session(_speculation=always) as session:
        for prompt in PROMPTS:
            for sampling in (None, SAMPLED):
                session.clear()
                done = answer(session.generate(prompt, max_tokens=32, sampling=sampling))
                want = plain_text(
                    apart, prompt, max_tokens=32, **({} if sampling is None else {"sampling": sampling})
                )
                assert done.token_ids == want.token_ids
                assert done.plan.mode == "pipelined"
                overlapped += done.stats.proposed
                assert done.stats.target_idle_s is not None
                assert done.stats.drafter_idle_s is not None
    assert overlapped > 0


def test_with_contention_the_plan_is_serial_and_names_the_reason(apart: Engine) -> None:
    plan_with(apart, Contention(target_factor=1.9, drafter_factor=2.2))
    assert apart.plan.mode == "serial"
    assert control(apart).pipelined is None
    assert apart.pair.pipeline_budget() is None
    assert "in parallel the target takes 1.90x and the drafter 2.20x as long as alone" in apart.plan.reasons
    plan_with(apart, Contention())
    assert apart.plan.mode == "pipelined"
    plan_with(apart, Contention(target_factor=1.9, drafter_factor=2.2))
    with apart.session() as session:
        assert answer(session.generate("hello", max_tokens=8)).plan.mode == "serial"


def test_acceptance_learned_in_one_mode_is_used_in_the_other(apart: Engine) -> None:
    assert control(apart).pipelined is not None
    own = apart.pair.policy.answer(prompt_tokens=1)
    for _ in range(50):
        own.learn("model", (), [True, True, True])
    taught = control(apart).priors()["model"]
    plan_with(apart, Contention(target_factor=1.5, drafter_factor=1.5))
    assert control(apart).pipelined is None
    assert control(apart).priors()["model"] == taught


@pytest.mark.parametrize("mode", ["serial", "pipelined"])
def test_the_profile_can_set_serial_or_pipelined_mode(tiny: TinyModels, mode: str) -> None:
    with tiny.load(lookup=False, mode=mode) as engine:
        invent_measurements(engine, TARGET_S, 0.001)
        require_speculation(engine)
        assert engine.plan.mode == mode
        with engine.session() as session:
            done = answer(session.generate("hello", max_tokens=24))
            assert done.token_ids == plain_text(engine, "hello", max_tokens=24).token_ids
            assert done.plan.mode == mode


def test_a_depth_given_to_generate_holds_in_pipelined_mode_too(tiny: TinyModels) -> None:
    with tiny.load(lookup=False, mode="pipelined", depth=1) as engine:
        require_speculation(engine)
        assert (engine.plan.mode, engine.plan.depth_cap) == ("pipelined", 1)
        with engine.session() as session:
            done = answer(session.generate("hello", max_tokens=24))
            assert done.token_ids == plain_text(engine, "hello", max_tokens=24).token_ids
            assert done.stats.proposed > 0
            assert max(done.stats.accepted_lengths) <= 2
            plainly = answer(session.generate("hello", max_tokens=8, depth=0))
            assert plainly.plan.mode == "plain"


def test_an_unknown_mode_is_refused(tiny: TinyModels) -> None:
    with pytest.raises(ProfileError, match='"auto" or "serial" or "pipelined"'):
        tiny.load(mode="twice")


def test_only_a_pipelined_plan_makes_a_budget_for_each_answer(apart: Engine) -> None:
    first, second = apart.pair.pipeline_budget(), apart.pair.pipeline_budget()
    assert isinstance(first, MeasuredBudget)
    assert first is not second
    assert first.overlaps_prefill
