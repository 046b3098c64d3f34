"""One text per model and machine: the target's setting does not depend on drafter, depth or noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgespec.calibration.kinds import PLACE, PLAIN, TIMES, WIDTHS
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Notice
from edgespec.errors import PromptTooLongError
from edgespec.export.onnx.export import export_onnx
from edgespec.export.provenance import Provenance
from edgespec.files.home import Home
from edgespec.placement.candidates import Placement, Placements
from edgespec.planning.cost.widths import BORDERS, POSITIONS, WIDEST, ContextProbe, WidthProbe
from edgespec.runtimes.runtime import LoadedModel
from tests.support.calibrating import fix_plain_ratio, on_cores, shorten_calibration
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import FORWARD_S, TinyModels, answer, invent_measurements, invented_times, read_all
from tests.support.trimmed_folder import write_trimmed_folder

NOISE = 0.08
EVERY_WIDTH = WidthProbe(
    widths=tuple(range(1, WIDEST + 1)),
    contexts=(ContextProbe(start=BORDERS[-1], positions=POSITIONS, max_abs_diff={}),),
)
KEPT = [token for token in range(640) if token % 4]
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, seed=4, top_k=40))

Load = Callable[..., Engine]


@pytest.fixture(autouse=True)
def _library() -> None:
    require_native()


@pytest.fixture(scope="module")
def ways(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The options that a user may set for one target, with the load arguments."""
    folder = tmp_path_factory.mktemp("drafters")
    trimmed = write_trimmed_folder(tiny.drafter, folder / "trimmed", KEPT)
    export_onnx(tiny.drafter, folder / "onnx", Provenance(name="onnx"), kept=None)
    return {
        "plain": {"depth": 0},
        "no drafter": {"draft": "none"},
        "neither": {"draft": "none", "lookup": False},
        "depth 2": {"depth": 2},
        "a drafter": {},
        "a trimmed drafter": {"draft": str(trimmed)},
        "an ONNX drafter": {"draft": str(folder / "onnx")},
        "serial": {"mode": "serial"},
    }


@pytest.fixture
def load(tiny: TinyModels, home: Home) -> Load:
    """The tiny pair on a machine without measurements."""
    return lambda **overrides: tiny.load(**{"store_home": home, "context": 300, **overrides})


def setting(engine: Engine) -> tuple[Any, ...]:
    """The settings that decide the target's bits."""
    facts = engine.pair.target.facts
    return facts.runtime, facts.device, facts.threads, facts.kv_type, dict(facts.settings)


def place(engine: Engine, runtime: str) -> Placement:
    (found,) = [each for each in engine.pair.pool.places.targets if each.facts.runtime == runtime]
    return found


def settings(load: Load, ways: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    found = {}
    for name, way in ways.items():
        with load(**way) as engine:
            found[name] = setting(engine)
    return found


def calibrated(load: Load, draw: random.Random, llama_s: float, *, widths: bool = True, **way: Any) -> None:
    """A calibration with times off by up to 8 %: llama.cpp's step takes ``llama_s``, ours ``FORWARD_S``.

    With ``widths``, llama.cpp verifies as cheaply as our kernels do.
    """
    with load(**way) as engine:
        invent_measurements(engine)
        store = engine.pair.measurements.store
        noisy = [seconds * draw.uniform(1 - NOISE, 1 + NOISE) for seconds in (FORWARD_S, llama_s)]
        runtimes = ("native", "llama")
        for runtime, seconds in zip(runtimes, noisy, strict=True):
            store.save(TIMES, invented_times(seconds), place(engine, runtime).facts)
            if widths:
                store.save(WIDTHS, EVERY_WIDTH, place(engine, runtime).facts)
        engine.pair.measurements.settle_place(engine.pair.pool.places)


@pytest.mark.slow
def test_neither_drafter_nor_depth_nor_one_calibration_moves_the_target(
    load: Load, ways: dict[str, dict[str, Any]]
) -> None:
    """llama.cpp is 4 % faster here, as on a machine where texts differed from the eighth token on."""
    before = settings(load, ways)
    assert len(set(map(str, before.values()))) == 1, before
    assert before["plain"][0] == "native"
    draw = random.Random(21)
    for way in ({}, {"draft": "none"}, {}):
        calibrated(load, draw, FORWARD_S / 1.04, **way)
        assert settings(load, ways) == before


def test_the_text_is_the_same_for_every_drafter_and_depth(load: Load, ways: dict[str, dict[str, Any]]) -> None:
    texts: dict[Sampling, set[tuple[int, ...]]] = {sampling: set() for sampling in SAMPLINGS}
    for round_of_calibrations in range(2):
        for way in ways.values():
            with load(**way) as engine, engine.session() as session:
                for sampling in SAMPLINGS:
                    session.clear()
                    texts[sampling].add(answer(session.generate("hello", max_tokens=12, sampling=sampling)).token_ids)
        if not round_of_calibrations:
            calibrated(load, random.Random(1), FORWARD_S / 1.04)
    assert all(len(each) == 1 for each in texts.values())


def test_the_target_moves_to_a_place_that_two_calibrations_find_faster(load: Load) -> None:
    with load() as engine:
        before = setting(engine)
    for count in range(2):
        calibrated(load, random.Random(count), FORWARD_S / 1.5)
        with load(draft="none") as engine:
            assert (setting(engine) == before) is (count == 0), "one calibration may be wrong"
    assert setting(engine)[0] == "llama"
    with load() as engine, engine.session() as session:
        assert "calibrations agree that llama on cpu is fastest" in " ".join(engine.plan.reasons)
        assert [reason.code for reason in engine.plan.why][1] == "target_taken_over"
        with pytest.raises(PromptTooLongError):
            session.generate("a" * 5000)
        assert len(_notices(session)) == 1, "no reader has seen the notice before"
    with load() as engine, engine.session() as session:
        assert not _notices(session)
    with load(runtime="native") as engine:
        assert setting(engine) == before, "the caller set the place"


def _notices(session: Any) -> list[str]:
    return [event.text for event in read_all(session.generate("a", max_tokens=2))[0] if isinstance(event, Notice)]


def test_the_first_answer_in_a_new_place_has_a_notice(load: Load) -> None:
    for count in range(2):
        calibrated(load, random.Random(count), FORWARD_S / 1.5)
    with load() as engine, engine.session() as session:
        (said,) = _notices(session)
        assert said.startswith("target on cpu (llama) from now on, which 2 calibrations found faster: ")
        assert _notices(session) == []
    with load() as engine, engine.session() as session:
        assert _notices(session) == []


def test_calibrations_that_disagree_do_not_move_the_target(load: Load) -> None:
    with load() as engine:
        before = setting(engine)
    for llama_s in (FORWARD_S / 1.5, FORWARD_S, FORWARD_S / 1.5, FORWARD_S):
        calibrated(load, random.Random(7), llama_s)
        with load() as engine:
            assert setting(engine) == before
    calibrated(load, random.Random(7), FORWARD_S / 1.5)
    calibrated(load, random.Random(7), FORWARD_S / 1.5)
    calibrated(load, random.Random(7), FORWARD_S * 1.5)
    with load() as engine:
        assert setting(engine)[0] == "llama", "the target does not move back either"
    calibrated(load, random.Random(7), FORWARD_S * 1.5)
    with load() as engine:
        assert setting(engine) == before


def test_a_place_without_room_is_not_used(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in range(2):
        calibrated(load, random.Random(count), FORWARD_S / 1.5)
    monkeypatch.setattr(Placements, "room", lambda _self, at: at.facts.runtime != "llama")
    with load() as engine:
        assert setting(engine)[0] == "native"


# ------------------------------------------------------------------------------------------ which calibrations count


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    shorten_calibration(monkeypatch)
    return monkeypatch


@pytest.mark.slow
def test_only_an_undisturbed_calibration_that_compared_places_counts(load: Load, quick: pytest.MonkeyPatch) -> None:
    fix_plain_ratio(quick, 0.01)
    with load(draft="none", lookup=True) as engine:
        store, facts = engine.pair.measurements.store, engine.pair.target.facts
        engine.calibrate()
        assert store.settled(PLACE, facts).count == 1
        engine.calibrate()
        assert store.settled(PLACE, facts).count == 1, "no place was timed again"
        quick.setattr("edgespec.hardware.neighbours.Neighbours.share", property(lambda _self: 0.5))
        engine.calibrate(afresh=True)
        assert store.settled(PLACE, facts).count == 1, "another program may have slowed one place"
        quick.undo()
    with load(draft="none", runtime="native") as engine:
        assert engine.pair.measurements.store.settled(PLACE, facts).count == 1


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "needed"), [("native", 1), ("llama", 2)])
def test_fewer_threads_need_one_calibration_in_our_kernels_and_two_in_llama_cpp(
    load: Load, quick: pytest.MonkeyPatch, runtime: str, needed: int
) -> None:
    on_cores(quick, 2)
    fix_plain_ratio(quick, 0.5)
    with load(draft="none", threads="auto", runtime=runtime, calibrate=False) as engine:
        assert engine.pair.target.settings.threads == 2
    for count in range(1, 3):
        with load(draft="none", threads="auto", runtime=runtime) as engine:
            engine.calibrate(afresh=True, alternatives=True)
            assert engine.pair.target.settings.threads == (1 if count >= needed else 2)
        with load(draft="none", depth=0, threads="auto", runtime=runtime) as engine:
            assert engine.pair.target.settings.threads == (1 if count >= needed else 2)
    with load(draft="none", threads=2, runtime=runtime) as engine:
        assert engine.pair.target.settings.threads == 2, "the caller set the threads"
    fix_plain_ratio(quick, 1.5)  # another program caused the first result
    for count in range(1, 3):
        with load(threads="auto", runtime=runtime) as engine:
            engine.calibrate(afresh=True, alternatives=True)
        with load(threads="auto", runtime=runtime) as engine:
            assert engine.pair.target.settings.threads == (2 if count >= needed else 1)


def test_places_are_compared_by_usual_drafting_if_widths_are_known(load: Load) -> None:
    """Our kernels verify for free here: a usual drafter gives 1.4x, which plain decoding elsewhere must exceed."""
    for lead, runtime in ((1.5, "native"), (1.7, "llama")):
        for _ in range(2):
            with load() as engine:
                invent_measurements(engine)
                engine.pair.measurements.store.save(PLAIN, FORWARD_S / lead, place(engine, "llama").facts)
                engine.pair.measurements.settle_place(engine.pair.pool.places)
        with load(draft="none", lookup=False) as engine:
            assert setting(engine)[0] == runtime


def test_settled_places_are_kept_separately_for_each_model(load: Load, tiny: TinyModels) -> None:
    for count in range(2):
        calibrated(load, random.Random(count), FORWARD_S / 1.5)
    with load() as engine:
        assert setting(engine)[0] == "llama"
    with load(target=tiny.ending) as engine:
        model: LoadedModel = engine.pair.target
        assert model.facts.runtime == "native"


def test_a_damaged_settled_place_is_reported_and_made_again(load: Load, home: Home) -> None:
    for count in range(2):
        calibrated(load, random.Random(count), FORWARD_S / 1.5)
    (path,) = home.measurements.glob("settled-*.json")
    path.write_text(path.read_text().replace('"count": 0', '"count": -1'))
    with load() as engine:
        assert setting(engine)[0] == "native"
        assert any(path.name in reason for reason in engine.plan.reasons)
