"""Where the setting with bit-equal widths slows plain decoding down: who leaves it, when, and who stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edgespec.engine.assembly import exact_setting_too_slow, fastest_plain
from edgespec.engine.engine import Engine
from edgespec.files.home import Home
from edgespec.planning.choice.planner import EXACT_SETTING_TOO_SLOW
from edgespec.planning.cost.acceptance import Acceptance
from edgespec.runtimes.llama.context import LlamaSettings
from tests.support.calibrating import find_other_faster, time_other
from tests.support.tiny_models import FORWARD_S, TinyModels, answer, invent_measurements, require_speculation

F16 = {"kv_type": "f16"}


@pytest.fixture
def load(tiny: TinyModels, home: Home) -> Callable[..., Engine]:
    def load(**overrides: object) -> Engine:
        settings = {"store_home": home, "context": 400, "runtime": "llama", **overrides}
        return tiny.load(**settings)  # type: ignore[arg-type]

    return load


def test_a_dear_class_is_left_at_the_next_load(load: Callable[..., Engine]) -> None:
    find_other_faster(load, 1.5)
    with load(draft="none") as engine, engine.session() as session:
        assert engine.target_model.settings.kv_type == "f16"
        assert (engine.plan.mode, engine.plan.depth_cap) == ("plain", 0)
        assert engine.plan.numeric_class.widths == (1,)
        assert engine.plan.reasons[-1] == f"plain: {EXACT_SETTING_TOO_SLOW}"
        assert not engine.unmeasured, "nothing is drafted in this setting, so nothing else has to be measured"
        done = answer(session.generate("hello", max_tokens=5))
        assert (done.stats.proposed, done.speculation_off) == (0, EXACT_SETTING_TOO_SLOW)


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.03])
def test_three_percent_are_no_reason(load: Callable[..., Engine], factor: float) -> None:
    find_other_faster(load, factor)
    with load(draft="none") as engine:
        assert engine.target_model.settings.kv_type == LlamaSettings().kv_type
        assert engine.plan.mode == "serial"


def test_a_drafter_that_repays_it_stays(load: Callable[..., Engine]) -> None:
    find_other_faster(load, 1.5)
    with load(stay_exact=True) as engine:
        sure = Acceptance()
        for _ in range(50):
            sure.learn((0.9,), (True,))
        engine.measurements.learn_prior("model", sure)
        gain = engine.measurements.expected_gain(engine.pair.depth_cap_allowed)
        assert gain > 1.5
        assert exact_setting_too_slow(engine.target_model, engine.measurements, engine.pair.depth_cap_allowed) is None
        assert exact_setting_too_slow(engine.target_model, engine.measurements, 0) == F16, (
            "nothing is gained at depth 0"
        )
    with load() as engine:
        assert engine.plan.mode == "serial"


@pytest.mark.parametrize("wish", [{"stay_exact": True}, {"depth": 2}, {"exactness": "near"}])
def test_who_asks_for_the_class_stays_in_it(load: Callable[..., Engine], wish: dict[str, Any]) -> None:
    find_other_faster(load, 1.5)
    with load(draft="none", **wish) as engine:
        assert engine.target_model.settings.kv_type == LlamaSettings().kv_type
        assert engine.plan.mode == "serial"


def test_fewer_threads_may_draft_as_well(load: Callable[..., Engine]) -> None:
    with load(threads=2, stay_exact=True) as engine:
        invent_measurements(engine)
    with load(threads=1, stay_exact=True) as engine:
        invent_measurements(engine, forward_s=FORWARD_S / 1.5)
        require_speculation(engine)
    with load(threads=2, draft="none") as engine:
        assert engine.target_model.settings.threads == 1
        assert engine.plan.target.threads == 1
        assert engine.plan.mode == "serial"


def test_an_open_session_keeps_its_class(load: Callable[..., Engine]) -> None:
    with load(draft="none") as engine:
        invent_measurements(engine)
        time_other(engine, 1.5)
        with engine.session():
            assert not engine.leave_slow_exact_setting()
        assert engine.leave_slow_exact_setting()
        assert not engine.leave_slow_exact_setting(), "it is in the fastest setting now"
        assert engine.plan.reasons[-1] == f"plain: {EXACT_SETTING_TOO_SLOW}"


def test_the_fastest_of_several_settings(load: Callable[..., Engine]) -> None:
    with load(stay_exact=True) as engine:
        model, store = engine.target_model, engine.measurements.store
        assert fastest_plain(model, store) is None, "nothing was timed"
        invent_measurements(engine)
        time_other(engine, 0.5)
        assert fastest_plain(model, store) is None, "its own setting is the fastest"
        time_other(engine, 1.2, {"kv_type": "f16", "flash_attention": False})
        time_other(engine, 1.1)
        found = fastest_plain(model, store)
        assert found is not None
        assert found[0] == {"kv_type": "f16", "flash_attention": False}
        assert found[1] == pytest.approx(1.2)


def test_old_files_of_the_other_setting_change_nothing(load: Callable[..., Engine], home: Home) -> None:
    """Its widths are of no use to a plan that drafts nothing: nobody would make a damaged probe again."""
    find_other_faster(load, 1.5)
    with load(draft="none") as engine:
        plan = engine.plan
        facts = engine.target_model.facts
        assert engine.pair.probe is None
        with load(draft="none", stay_exact=True) as other:
            assert other.pair.probe is not None
            engine.measurements.store.save_widths(facts, other.pair.probe)
    newest = max(home.measurements.glob("widths-*"), key=lambda path: path.stat().st_mtime_ns)
    newest.write_text("{")
    with load(draft="none") as engine:
        engine.pair.replan()
        assert engine.plan == plan
