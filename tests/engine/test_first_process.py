"""A machine without measurements: our kernels draft from the first answer on, by the times of similar machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import edgespec.engine.pair.load as assembly_module
from edgespec.calibration.kinds import TIMES
from edgespec.calibration.self_check import PASSES, SelfCheck
from edgespec.engine.engine import Engine
from edgespec.errors import ForwardError
from edgespec.files.home import Home
from edgespec.hardware import neighbours
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.choice.planner import ESTIMATED, NOT_CALIBRATED
from edgespec.planning.cost.widths import WIDEST, WidthProbe
from edgespec.planning.depth.answer import AnswerDepth
from edgespec.runtimes.native.library import PORTABLE
from tests.support.calibrating import fix_plain_ratio, shorten_calibration, stored
from tests.support.command_line import InProcess, run_cli
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import SHAPE, TinyModels, answer, invented_times

STEP_S = 0.001  # of every width, as ``steady_rounds`` reports to the policy
REPEATING = "the people use water and the people use words and the people"
FORWARDS = [width for widths in PASSES for width in widths]


@pytest.fixture(autouse=True)
def _vectorised() -> None:
    if require_native().levels[-1] == PORTABLE:
        pytest.skip("in portable C nothing is drafted before it is measured")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of ten layers, so that the drafter with two gains."""
    folder = tmp_path_factory.mktemp("first")
    return write_tiny_gguf(folder / "large.gguf", seed=5, layers=10, **SHAPE)  # type: ignore[arg-type]


@pytest.fixture
def load(tiny: TinyModels, home: Home, target: Path) -> Callable[..., Engine]:
    def load(**overrides: object) -> Engine:
        return tiny.load(target, **{"store_home": home, "draft": str(tiny.target), **overrides})  # type: ignore[arg-type]

    return load


@pytest.fixture
def steady_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy gets constant times: a stall of the machine would stop drafting in so fast an answer."""
    began, record = AnswerDepth.began, AnswerDepth.record

    def steady_record(self: AnswerDepth, told: RoundRecord) -> None:
        draft_s = 0.1 * STEP_S * told.draft_forwards
        record(self, replace(told, verify_s=STEP_S, draft_s=draft_s, sync_s=0.0, round_s=STEP_S + draft_s))

    monkeypatch.setattr(AnswerDepth, "began", lambda self, *_: began(self, 10 * STEP_S, STEP_S))
    monkeypatch.setattr(AnswerDepth, "record", steady_record)


@pytest.mark.usefixtures("steady_rounds")
def test_without_measurements_the_first_answer_drafts_and_is_exact(load: Callable[..., Engine]) -> None:
    with load() as engine, engine.session() as session:
        assert engine.plan.mode == "serial"
        assert engine.plan.drafter is not None
        assert engine.plan.drafter.kind == "lookup+model"
        assert engine.plan.depth_cap == WIDEST - 1
        assert ESTIMATED.text in engine.plan.reasons
        assert NOT_CALIBRATED.text not in engine.plan.reasons
        assert engine.unmeasured, "calibration still improves the plan"
        first = answer(session.generate(REPEATING, max_tokens=150))
        assert first.stats.proposed > 0
        session.clear()
        assert answer(session.generate(REPEATING, max_tokens=150, depth=0)).token_ids == first.token_ids


@pytest.mark.usefixtures("steady_rounds")
def test_a_generate_command_drafts_in_its_only_answer_on_a_new_machine(
    target: Path,
    tiny: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("generate", REPEATING, "--target", target, "--draft", tiny.target, "--max-tokens", "150", "--json")
    found = InProcess(tmp_path / "home", monkeypatch, capsys)(*arguments)
    assert found.code == 0, found.err
    plain = run_cli(*arguments, "--plain", home=tmp_path / "other")
    assert found.json["plan"]["mode"] == "serial"
    assert found.json["stats"]["rounds_by_source"], "gain of a tiny drafter is not tested here"
    assert found.json["token_ids"] == plain.json["token_ids"]


def test_the_self_check_runs_once_per_file_build_and_instruction_level(
    load: Callable[..., Engine], home: Home, widths: list[int]
) -> None:
    with load() as engine:
        assert widths == FORWARDS
        assert engine.plan.numeric_class.widths == tuple(range(1, WIDEST + 1))
    assert stored(home) == {"widths": 1}
    widths.clear()
    for settings in ({}, {"threads": 2}, {"context": 300}, {"draft": "none"}, {"depth": 3}):
        with load(**settings):
            assert widths == []
    assert stored(home) == {"widths": 1}


def test_without_drafting_no_self_check_runs(load: Callable[..., Engine], widths: list[int]) -> None:
    with load(depth=0) as engine:
        assert engine.plan.mode == "plain"
    with load(draft="none", lookup=False):
        pass
    assert widths == []


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SelfCheck.result

    def result(self: SelfCheck) -> WidthProbe:
        found = real(self)
        different = replace(found.contexts[0], max_abs_diff={0: float("inf")})
        return replace(found, widths=(1,), complete=False, contexts=(different,))

    monkeypatch.setattr(SelfCheck, "result", result)


def test_after_a_failed_self_check_the_plan_is_plain_with_one_reason(
    load: Callable[..., Engine], widths: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        failing(patch)
        with load():
            pass
    widths.clear()
    with load() as engine, engine.session() as session:  # the result is stored
        assert widths == []
        assert engine.plan.mode == "plain"
        said = [reason for reason in engine.plan.reasons if "bit-equal" in reason]
        assert said == ["plain: no width beyond 1 is bit-equal to plain decoding with this model and build"]
        assert answer(session.generate(REPEATING, max_tokens=30)).stats.proposed == 0


def test_an_error_in_the_self_check_is_raised_and_the_next_load_repeats_it(
    load: Callable[..., Engine], home: Home
) -> None:
    def result(_self: SelfCheck) -> WidthProbe:
        raise ForwardError("the device went away", code=-3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly_module.SelfCheck, "result", result)
        with pytest.raises(ForwardError, match="the device went away"):
            load()
    assert stored(home) == {}
    with load() as engine:
        assert engine.plan.mode == "serial"


def test_each_measured_value_replaces_its_estimate_separately(load: Callable[..., Engine]) -> None:
    with load() as engine:
        known = engine.pair.measurements
        expected = known.costs()
        assert not expected.measured
        assert expected.curves is not None
        known.store.save(TIMES, invented_times(0.5), known.target)
        timed = known.costs()
        assert not timed.measured, "the drafter is not measured"
        assert timed.curves is not None
        assert timed.curves.at(100).plain_s == timed.plain_s == 0.5
        ratio = known.drafter.bytes_per_forward / known.target.bytes_per_forward  # type: ignore[union-attr]
        assert timed.drafts["model"].token_s == pytest.approx(0.5 * 1.25 * ratio)
        assert known.drafter is not None
        known.store.save(TIMES, invented_times(0.01), known.drafter)
        whole = known.costs()
        assert whole.measured
        assert whole.drafts["model"].token_s == 0.01
        assert not whole.acceptance
        engine.pair.replan()
        assert ESTIMATED.text not in engine.plan.reasons


def test_a_drafters_measured_cost_is_used_with_the_targets_times_only(load: Callable[..., Engine]) -> None:
    with load() as engine:
        known = engine.pair.measurements
        assert known.drafter is not None
        expected = known.costs().drafts["model"]
        known.store.save(TIMES, invented_times(0.01), known.drafter)
        costs = known.costs()
        assert not costs.measured
        assert costs.drafts["model"] == expected, "the plan rests on the ratio of both"
        known.store.save(TIMES, invented_times(0.1), known.target)
        assert known.costs().drafts["model"].token_s == 0.01


def test_the_self_checks_forward_time_is_the_first_estimate_of_t1(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "processor_seconds", lambda: None)  # no other program counts
    with load() as engine:
        probe, costs = engine.pair.probe, engine.pair.measurements.costs()
        assert probe is not None
        assert costs.curves is not None
        assert costs.plain_s is None, "a single forward does not count as a measurement"
        assert costs.curves.at(0).plain_s == probe.plain_forward_s


def test_other_runtimes_decode_plainly_until_widths_are_probed(
    tiny: TinyModels, home: Home, widths: list[int]
) -> None:
    with tiny.load(store_home=home, runtime="llama", draft_runtime="llama") as engine:
        assert engine.plan.mode == "plain"
        assert NOT_CALIBRATED.text in engine.plan.reasons
        assert engine.pair.measurements.costs().curves is None
    assert widths == []


def test_calibrating_our_kernels_repeats_the_self_check_and_probes_no_widths(
    load: Callable[..., Engine], widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_calibration(monkeypatch)
    fix_plain_ratio(monkeypatch, 100.0)
    with load(context=300) as engine:
        widths.clear()
        engine.calibrate()
        assert not engine.pair.measurements.missing
        assert engine.pair.measurements.costs().measured
        assert widths[: len(FORWARDS)] == FORWARDS
        narrow = [width for width in widths if width == 2]
        # Forwards: the self-check's; for the target and for the drafter two contexts, once to warm up and once timed.
        assert len(narrow) == 1 + 2 * 2 + 2 * 2


def test_acceptance_learned_in_one_process_is_used_in_the_next(load: Callable[..., Engine], home: Home) -> None:
    with load() as engine, engine.session() as session:
        answer(session.generate(REPEATING, max_tokens=150))
        priors = engine.pair.policy.priors()  # type: ignore[attr-defined]
        learned = {source: prior for source, prior in priors.items() if any(prior.position_tokens)}
        assert "lookup" in learned
    for path in home.measurements.glob("acceptance-*.json"):
        assert json.loads(path.read_text())["acceptance"]["position_tokens"][0] > 0
    with load() as engine:
        assert engine.pair.measurements.priors["lookup"] == learned["lookup"]
        assert engine.pair.measurements.costs().acceptance["lookup"] != (0.6,)
