"""A machine that was never measured: our kernels draft from the first answer on, by what similar machines took."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import edgespec.engine.assembly as assembly_module
from edgespec.calibration.self_check import PASSES, SelfCheck
from edgespec.engine.engine import Engine
from edgespec.errors import ForwardError
from edgespec.files.home import Home
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.choice.planner import ESTIMATED, NOT_CALIBRATED
from edgespec.planning.cost.widths import WIDEST, WidthProbe
from edgespec.planning.depth.control import AnswerDepth
from edgespec.runtimes.native.library import PORTABLE
from tests.support.calibrating import fix_plain_ratio, shorten_contention, stored
from tests.support.command_line import InProcess, run_cli
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import SHAPE, TinyModels, answer, invented_times
from tests.support.watched_sequences import watch_forwards

STEP_S = 0.001  # of every width, for a policy that is told by ``steady_rounds``
REPEATING = "the people use water and the people use words and the people"
FORWARDS = [width for widths in PASSES for width in widths]


@pytest.fixture(autouse=True)
def _vectorised() -> None:
    if require_native().levels[-1] == PORTABLE:
        pytest.skip("in portable C nothing is drafted before it is measured")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten layers, so that the drafter's two are worth their time."""
    folder = tmp_path_factory.mktemp("first")
    return write_tiny_gguf(folder / "large.gguf", seed=5, layers=10, **SHAPE)  # type: ignore[arg-type]


@pytest.fixture
def load(tiny: TinyModels, home: Home, target: Path) -> Callable[..., Engine]:
    def load(**overrides: object) -> Engine:
        return tiny.load(target, **{"store_home": home, "draft": str(tiny.target), **overrides})  # type: ignore[arg-type]

    return load


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    watch_forwards(monkeypatch, lambda _sequence, tokens, _rows: seen.append(len(tokens)))
    return seen


@pytest.fixture
def steady_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is told invented times: a stall of the machine is longer than so fast an answer may lose."""
    began, record = AnswerDepth.began, AnswerDepth.record

    def steady_record(self: AnswerDepth, told: RoundRecord) -> None:
        draft_s = 0.1 * STEP_S * told.draft_forwards
        record(self, replace(told, verify_s=STEP_S, draft_s=draft_s, sync_s=0.0, round_s=STEP_S + draft_s))

    monkeypatch.setattr(AnswerDepth, "began", lambda self, _prompt_s, _first_s: began(self, 10 * STEP_S, STEP_S))
    monkeypatch.setattr(AnswerDepth, "record", steady_record)


@pytest.mark.usefixtures("steady_rounds")
def test_the_first_answer_drafts_and_is_exact(load: Callable[..., Engine]) -> None:
    with load() as engine, engine.session() as session:
        assert engine.plan.mode == "serial"
        assert engine.plan.drafter is not None
        assert engine.plan.drafter.kind == "lookup+model"
        assert engine.plan.depth_cap == WIDEST - 1
        assert ESTIMATED.text in engine.plan.reasons
        assert NOT_CALIBRATED.text not in engine.plan.reasons
        assert engine.unmeasured, "calibrating makes it better"
        first = answer(session.generate(REPEATING, max_tokens=150))
        assert first.stats.proposed > 0
        session.clear()
        assert answer(session.generate(REPEATING, max_tokens=150, depth=0)).token_ids == first.token_ids


@pytest.mark.usefixtures("steady_rounds")
def test_a_command_drafts_in_its_only_answer(
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
    assert found.json["stats"]["rounds_by_source"], "whether so small a drafter pays is another matter"
    assert found.json["token_ids"] == plain.json["token_ids"]


def test_the_self_check_is_made_once_per_file_build_and_level(
    load: Callable[..., Engine], home: Home, forwards: list[int]
) -> None:
    with load() as engine:
        assert forwards == FORWARDS
        assert engine.plan.numeric_class.widths == tuple(range(1, WIDEST + 1))
    assert stored(home) == {"widths": 1}
    forwards.clear()
    for settings in ({}, {"threads": 2}, {"context": 300}, {"draft": "none"}, {"depth": 3}):
        with load(**settings):
            assert forwards == []
    assert stored(home) == {"widths": 1}


def test_nothing_is_checked_where_nothing_is_drafted(load: Callable[..., Engine], forwards: list[int]) -> None:
    with load(depth=0) as engine:
        assert engine.plan.mode == "plain"
    with load(draft="none", lookup=False):
        pass
    assert forwards == []


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SelfCheck.result

    def result(self: SelfCheck) -> WidthProbe:
        found = real(self)
        different = replace(found.contexts[0], max_abs_diff={0: float("inf")})
        return replace(found, widths=(1,), complete=False, contexts=(different,))

    monkeypatch.setattr(SelfCheck, "result", result)


def test_a_failing_self_check_is_plain_with_one_sentence(load: Callable[..., Engine], forwards: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        failing(patch)
        with load():
            pass
    forwards.clear()
    with load() as engine, engine.session() as session:  # what was found is stored
        assert forwards == []
        assert engine.plan.mode == "plain"
        said = [reason for reason in engine.plan.reasons if "bit-equal" in reason]
        assert said == ["plain: no width beyond 1 is bit-equal to plain decoding with this model and build"]
        assert answer(session.generate(REPEATING, max_tokens=30)).stats.proposed == 0


def test_a_self_check_that_breaks_off_is_raised_and_made_again(load: Callable[..., Engine], home: Home) -> None:
    def result(_self: SelfCheck) -> WidthProbe:
        raise ForwardError("the device went away", code=-3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly_module.SelfCheck, "result", result)
        with pytest.raises(ForwardError, match="the device went away"):
            load()
    assert stored(home) == {}
    with load() as engine:
        assert engine.plan.mode == "serial"


def test_measured_values_win_each_by_itself(load: Callable[..., Engine]) -> None:
    with load() as engine:
        known = engine.measurements
        expected = known.costs()
        assert not expected.measured
        assert expected.curves is not None
        known.store.save_times(known.target, invented_times(0.5))
        timed = known.costs()
        assert not timed.measured, "the drafter is not"
        assert timed.curves is not None
        assert timed.curves.at(100).plain_s == timed.plain_s == 0.5
        ratio = known.drafter.bytes_per_forward / known.target.bytes_per_forward  # type: ignore[union-attr]
        assert timed.drafts["model"].token_s == pytest.approx(0.5 * 1.25 * ratio)
        assert known.drafter is not None
        known.store.save_times(known.drafter, invented_times(0.01))
        whole = known.costs()
        assert whole.measured
        assert whole.drafts["model"].token_s == 0.01
        assert not whole.acceptance
        engine.pair.replan()
        assert ESTIMATED.text not in engine.plan.reasons


def test_a_drafter_that_was_measured_alone_keeps_its_price(load: Callable[..., Engine]) -> None:
    with load() as engine:
        known = engine.measurements
        assert known.drafter is not None
        known.store.save_times(known.drafter, invented_times(0.01))
        costs = known.costs()
        assert not costs.measured
        assert costs.drafts["model"].token_s == 0.01
        assert costs.curves is not None


def test_what_the_self_check_saw_is_the_first_t1(load: Callable[..., Engine]) -> None:
    with load() as engine:
        probe, costs = engine.pair.probe, engine.measurements.costs()
        assert probe is not None
        assert costs.curves is not None
        assert costs.plain_s is None, "a single forward is no measurement"
        assert costs.curves.at(0).plain_s == probe.plain_forward_s


def test_other_runtimes_wait_for_their_probe(tiny: TinyModels, home: Home, forwards: list[int]) -> None:
    with tiny.load(store_home=home, runtime="llama", draft_runtime="llama") as engine:
        assert engine.plan.mode == "plain"
        assert NOT_CALIBRATED.text in engine.plan.reasons
        assert engine.measurements.costs().curves is None
    assert forwards == []


def test_calibrating_times_and_checks_again_and_probes_no_width(
    load: Callable[..., Engine], forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_contention(monkeypatch)
    fix_plain_ratio(monkeypatch, 100.0)
    with load(context=300) as engine:
        forwards.clear()
        engine.calibrate()
        assert not engine.measurements.missing
        assert engine.measurements.costs().measured
        assert forwards[: len(FORWARDS)] == FORWARDS
        narrow = [width for width in forwards if width == 2]
        # The self-check's, and two contexts of six turns for the target, one for the drafter.
        assert len(narrow) == 1 + 2 * 6 + 6


def test_what_was_learned_serves_the_second_process(load: Callable[..., Engine], home: Home) -> None:
    with load() as engine, engine.session() as session:
        answer(session.generate(REPEATING, max_tokens=150))
        learned = {source: prior for source, prior in engine.policy.priors().items() if prior.tokens}  # type: ignore[attr-defined]
        assert "lookup" in learned
    for path in home.measurements.glob("acceptance-*.json"):
        assert json.loads(path.read_text())["acceptance"]["tokens"] > 0
    with load() as engine:
        assert engine.measurements.priors["lookup"] == learned["lookup"]
        assert engine.measurements.costs().acceptance["lookup"] != (0.6,)
