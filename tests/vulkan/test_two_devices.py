"""Target and drafter on two devices, either way: the text is the target's, whichever device drafts."""

from __future__ import annotations

import logging
from typing import Any

import psutil
import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.files.home import Home
from edgespec.runtimes.background import BackgroundModel
from tests.support.tiny_models import TinyModels, answer, invent_measurements
from tests.support.vulkan import (
    NATIVE_LOG,
    buffers,
    driver_threads,
    needs_vulkan,
    on_device,
    second_device,
    shows_threads,
)

pytestmark = needs_vulkan

PROMPTS = ("hello", "the water of the river", "one two three four")
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=7)
WAIT_S = 120.0


def pair(tiny: TinyModels, home: Home, **wanted: Any) -> Engine:
    engine = tiny.load(lookup=False, context=256, store_home=home, **wanted)
    invent_measurements(engine)
    return engine


def text(session: Session, prompt: str, sampling: Sampling, **how: Any) -> Any:
    session.clear()
    return answer(session.generate(prompt, max_tokens=24, sampling=sampling, **how))


def check(engine: Engine) -> None:
    """Check that drafting does not change the text, and that something was drafted."""
    accepted = 0
    with engine.session() as session:
        for prompt in PROMPTS:
            for sampling in (Sampling(), SAMPLED):
                done = text(session, prompt, sampling)
                assert done.token_ids == text(session, prompt, sampling, depth=0).token_ids
                assert len(done.token_ids) == 24
                accepted += done.stats.accepted
    assert accepted > 0


def loaded_drafter(engine: Engine) -> Any:
    """The drafter, once it is loaded: before that nothing is drafted."""
    model = engine.pair.pool.drafter_model()
    if isinstance(model, BackgroundModel):
        assert model.wait(WAIT_S)
    return model


@pytest.fixture(params=["serial", "pipelined"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_cpu_target_with_a_drafter_on_a_device_gives_the_targets_text(
    tiny: TinyModels, home: Home, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Dovetail's placement. The drafter has a separate process, so this process keeps no byte on the device."""
    caplog.set_level(logging.DEBUG, logger=NATIVE_LOG)
    device = second_device()
    name = device.name
    with pair(tiny, home, device="cpu", draft_device=name, depth=3, mode=mode) as engine:
        drafter = loaded_drafter(engine)
        assert isinstance(drafter, BackgroundModel)
        assert drafter.facts.device == name
        if shows_threads(device):
            (worker,) = psutil.Process().children()
            assert driver_threads(worker.pid) > 0, "the drafter is really there"
        assert (engine.plan.mode, engine.plan.target.device) == (mode, "cpu")
        assert engine.plan.drafter is not None
        assert engine.plan.drafter.device == name
        check(engine)
    assert on_device(buffers(caplog.records), name) == 0


def test_a_drafter_on_a_device_in_this_process_gives_the_targets_text(
    tiny: TinyModels, home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=NATIVE_LOG)
    name = second_device().name
    with pair(tiny, home, device="cpu", draft_device=name, depth=3, draft_isolation="thread") as engine:
        assert not isinstance(loaded_drafter(engine), BackgroundModel)
        check(engine)
    assert on_device(buffers(caplog.records), name) > 0


def test_a_target_on_a_device_with_a_cpu_drafter_gives_the_targets_text(
    tiny: TinyModels, home: Home, mode: str
) -> None:
    """DuoDecoding's placement."""
    name = second_device().name
    with pair(tiny, home, device=name, draft_device="cpu", depth=3, mode=mode) as engine:
        assert engine.plan.target.device == name
        if engine.plan.depth_cap == 0:
            pytest.skip(f"only widths {engine.plan.numeric_class.widths} are bit-equal on {name}")
        assert engine.plan.mode == mode
        assert engine.plan.drafter is not None
        assert engine.plan.drafter.device == "cpu"
        check(engine)


def test_a_target_partly_on_a_device_gives_the_targets_text(tiny: TinyModels, home: Home) -> None:
    name = second_device().name
    with pair(tiny, home, device=name, draft_device="cpu", depth=3, gpu_layers=2) as engine:
        assert engine.plan.numeric_class.settings["gpu_layers"] == 2
        if engine.plan.depth_cap == 0:
            pytest.skip(f"only widths {engine.plan.numeric_class.widths} are bit-equal with two layers on {name}")
        check(engine)


def test_every_placement_is_calibrated_and_ranked(tiny: TinyModels, home: Home) -> None:
    name = second_device().name
    with tiny.load(context=256, store_home=home, device="cpu", draft_device="auto") as engine:
        assert {place.facts.device for place in engine.pair.pool.places.drafters} == {"cpu", name}
    with tiny.load(context=256, store_home=home, device="auto", draft_device="cpu", gpu_layers="auto") as engine:
        own = engine.plan.target.device
        engine.calibrate(alternatives=True)
        ranking = engine.pair.ranking
        assert ranking is not None
        timed = {candidate.target.facts.device for candidate in ranking.candidates}
        assert {own, "cpu", name} == timed
    with tiny.load(context=256, store_home=home, device="auto", draft_device="cpu", gpu_layers="auto") as engine:
        assert engine.plan.target.device == ranking.best.target.facts.device, "the next start uses what was found"
