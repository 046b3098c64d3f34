"""Changing the power source: times measured on the other source are not used."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import edgespec.engine.pair.loaded_pair as module
from edgespec.calibration.timing import QUICK
from edgespec.engine.engine import Engine
from edgespec.engine.events import Notice
from edgespec.engine.pair.calibration_run import BackgroundCalibration
from edgespec.files.home import Home
from tests.support.tiny_models import TinyModels, invent_measurements, require_speculation


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The simulated power sources, in order; the last one stays."""
    said: list[str | None] = ["mains"]
    monkeypatch.setattr(module, "power_source", lambda: said[-1])
    return said


@pytest.fixture
def engine(tiny: TinyModels, home: Home, source: list[str | None]) -> Iterator[Engine]:
    with tiny.load(store_home=home, context=300, runtime="llama", draft_runtime="llama") as engine:
        engine.pair.follow_power()
        engine.pair.take_notices()
        invent_measurements(engine)
        require_speculation(engine)
        yield engine


def test_an_answer_on_another_power_source_gets_a_new_plan(engine: Engine, source: list[str | None]) -> None:
    assert engine.plan.mode == "serial"
    source.append("battery")
    with engine.session() as session:
        events = list(session.generate("hello", max_tokens=4))
        notices = [event.text for event in events if isinstance(event, Notice)]
        assert notices == ["the machine runs on battery now: planned again"]
        assert engine.pair.machine.power_source == "battery"
        assert engine.plan.mode == "plain"
        assert engine.pair.request.not_calibrated in engine.plan.why
        assert engine.unmeasured
        source.append("mains")
        list(session.generate("hello", max_tokens=4))
        assert engine.plan.mode == "serial"


def test_an_unknown_power_source_keeps_the_plan(engine: Engine, source: list[str | None]) -> None:
    plan = engine.plan
    source.append(None)
    assert not engine.pair.follow_power()
    assert engine.plan is plan
    source.append("mains")
    assert not engine.pair.follow_power()


def test_a_change_of_power_source_gives_up_a_running_calibration(engine: Engine, source: list[str | None]) -> None:
    engine._calibration = learning = BackgroundCalibration(engine.pair, QUICK, afresh=True)
    assert not learning.run_for(0.01, threading.Event())
    source.append("battery")
    assert engine.pair.follow_power()
    assert engine._calibration is None
    assert not learning.run_for(1e9, threading.Event()), "the calibration has ended"
    assert engine.pair.measurements.target_times() is None


def test_widths_in_memory_survive_a_power_change_if_the_folder_is_read_only(
    tiny: TinyModels, source: list[str | None]
) -> None:
    file = tiny.folder / "a-file"
    file.write_text("")
    with tiny.load(store_home=Home(file / "home"), context=300) as engine:
        engine.pair.follow_power()
        invent_measurements(engine)
        source.append("battery")
        assert engine.pair.follow_power()
        assert engine.pair.measurements.target_times() is None
        assert engine.pair.measurements.widths() is not None, "widths do not depend on the power source"
        source.append("mains")
        assert engine.pair.follow_power()
        assert engine.pair.measurements.target_times() is not None


def test_a_calibration_is_of_the_power_source_that_it_runs_on(
    engine: Engine, source: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackgroundCalibration, "run", lambda *_given, **_named: None)
    source.append("battery")
    engine.calibrate()
    assert engine.pair.machine.power_source == engine.pair.measurements.store.power_source == "battery"
    monkeypatch.setattr(BackgroundCalibration, "run_for", lambda *_given: False)
    source.append("mains")
    assert engine.calibrate_for() == ()
    assert engine.pair.machine.power_source == "mains"
