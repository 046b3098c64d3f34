"""The exactness check passes on a correct engine and detects broken verification."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import edgespec.decoding.round_base as rounds_module
import edgespec.decoding.serial as loop_module
from edgespec.bench.equality import SAMPLED, FullTrees, check_equality, checks_trees, depths_to_check, spread
from edgespec.bench.suite import Prompt
from edgespec.decoding.pipelined.loop import PipelinedLoop
from edgespec.decoding.sampling import Sampling
from edgespec.decoding.verify import TreeVerdict, Verdict
from edgespec.drafters.model import ModelDraftState
from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.errors import CancelledError
from edgespec.files.home import Home
from edgespec.interfaces.drafting import DraftTree, values_trees
from tests.support.kernel_calls import require_native
from tests.support.processor import first_runtime
from tests.support.tiny_models import TinyModels, require_speculation

PROMPTS = [
    Prompt(id="greeting", category="chat", prompt="hello world"),
    Prompt(id="water", category="qa", prompt="what is water"),
]


@pytest.fixture
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load(lookup=False, depth=3) as engine:
        require_speculation(engine, 2)
        yield engine


def accept_everything(draft: Sequence[int], choose: Callable[[int], int], *, bonus: bool) -> Verdict:
    assert bonus
    return Verdict(len(draft), choose(len(draft)), "bonus")


def test_speculation_on_a_correct_engine_equals_plain_decoding(engine: Engine) -> None:
    told = []
    report = check_equality(engine, PROMPTS, max_tokens=60, on_result=told.append)
    assert report.kept
    assert report.divergences == ()
    assert report.identical == 2
    assert tuple(told) == report.results
    depths = tuple(range(1, engine.plan.depth_cap + 1))
    assert report.depths == depths == depths_to_check(engine)
    for result, prompt in zip(report.results, PROMPTS, strict=True):
        assert (result.prompt_id, result.category) == (prompt.id, prompt.category)
        assert result.comparisons == 2 * len(depths)
        assert result.emitted_tokens == 2 * 60
        assert 0 < result.accepted < result.proposed


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_the_equality_check_detects_a_verification_that_accepts_everything(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    monkeypatch.setattr(rounds_module, "verify_matching", accept_everything)
    report = check_equality(engine, PROMPTS, max_tokens=120, samplings=[sampling])
    assert not report.kept
    assert report.identical < 2
    assert report.divergences
    for divergence in report.divergences:
        assert 0 < divergence.position < 120
        assert divergence.depth in report.depths
        assert divergence.sampled is not sampling.greedy
        # The greedy gap is the distance of the target's two best tokens there.
        assert divergence.gap >= 0
    found = report.as_json()
    assert [each["id"] for each in found["divergences"]] == [each.prompt_id for each in report.divergences]


def test_the_equality_check_detects_a_kept_rejected_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept draft token instead of its correction: one wrong token a round, the same counts."""

    def keep_the_rejected(draft: Sequence[int], choose: Callable[[int], int], *, bonus: bool) -> Verdict:
        verdict = real(draft, choose, bonus=bonus)
        if verdict.kind == "correction":
            return Verdict(verdict.accepted, draft[verdict.accepted], "correction")
        return verdict

    real = rounds_module.verify_matching
    monkeypatch.setattr(rounds_module, "verify_matching", keep_the_rejected)
    report = check_equality(engine, PROMPTS, max_tokens=120)
    assert not report.kept


def test_the_verify_json_has_every_documented_key(engine: Engine) -> None:
    report = check_equality(engine, PROMPTS[:1], max_tokens=10)
    found = json.loads(json.dumps(report.as_json()))
    assert found["level"] == "W"
    assert found["prompts"] == found["identical"] == 1
    assert found["divergences"] == []
    assert found["plan"] == json.loads(json.dumps(engine.plan.as_json()))
    (widths,) = found["width_classes"]
    assert widths["model"] == "target"
    assert widths["runtime"] == engine.plan.target.runtime == first_runtime()
    assert widths["widths"][0] == list(engine.plan.numeric_class.widths)
    assert widths["context"][0] < widths["context"][1]
    assert isinstance(widths["max_abs_diff"], float)
    assert widths["settings"]["kv_type"] == engine.plan.numeric_class.kv_type


def test_trees_are_compared_only_if_the_plan_may_use_them(tiny: TinyModels, home: Home) -> None:
    require_native()
    native = {"runtime": "native", "draft_runtime": "native", "store_home": home}  # measurements stay in this home
    with tiny.load_speculating(**native, lookup=False) as engine:
        assert checks_trees(engine, (5,))
        assert not checks_trees(engine, ())
        report = check_equality(engine, PROMPTS, max_tokens=60, depths=(5,))
        assert report.kept
        assert report.trees
        assert report.as_json()["trees"] is True
        assert {result.comparisons for result in report.results} == {4}, "chains and trees, greedy and sampled"
        alone = check_equality(engine, PROMPTS[:1], max_tokens=20, depths=(1,))
        assert (alone.trees, alone.results[0].comparisons) == (False, 2), "a single token has no alternatives"
    with tiny.load_speculating(**native, depth=3) as engine:
        assert not checks_trees(engine, (3,)), "a requested depth means chains only"
        assert not check_equality(engine, PROMPTS[:1], max_tokens=10).trees
    with tiny.load(**{**native, "draft": "none"}, lookup=True) as engine:
        assert not checks_trees(engine, (5,)), "copies have no alternatives"
    with tiny.load_speculating(**native, mode="pipelined") as engine:
        assert not checks_trees(engine, (5,))
    with tiny.load_speculating(runtime="llama", draft_runtime="llama", store_home=home) as engine:
        assert not checks_trees(engine, (5,))


def test_the_equality_check_detects_following_a_wrong_branch(
    tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_the_first_child(tokens: object, parents: object, choose: Callable[[int], int]) -> TreeVerdict:
        return TreeVerdict((0,), choose(0), "bonus")

    require_native()
    monkeypatch.setattr(loop_module, "verify_tree", to_the_first_child)
    with tiny.load_speculating(runtime="native", draft_runtime="native", lookup=False, store_home=home) as engine:
        report = check_equality(engine, PROMPTS, max_tokens=120, depths=(5,))
    assert not report.kept
    assert report.divergences
    assert {(divergence.tree, divergence.depth) for divergence in report.divergences} == {(True, 5)}
    assert all(divergence["tree"] for divergence in report.as_json()["divergences"])


def test_the_equality_check_without_speculation_compares_nothing(tiny: TinyModels) -> None:
    with tiny.load(depth=0) as engine:
        assert depths_to_check(engine) == ()


def test_near_exactness_checks_only_the_requested_depth(tiny: TinyModels) -> None:
    with tiny.load(exactness="near", depth=3) as engine:
        if engine.plan.exactness == "N":
            assert depths_to_check(engine) == (3,)
        else:
            assert depths_to_check(engine) == (1, 2, 3)


@pytest.mark.parametrize("cut", [1, 2])
def test_an_answer_that_is_cancelled_is_not_called_a_divergence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    generate, asked = Session.generate, []

    def cancelled(self: Session, *given: Any, **fields: Any) -> Generation:
        answer = generate(self, *given, **fields)
        asked.append(answer)
        if len(asked) == cut:
            self.cancel()
        return answer

    monkeypatch.setattr(Session, "generate", cancelled)
    with pytest.raises(CancelledError, match="before it was complete"):
        check_equality(engine, PROMPTS, max_tokens=8)
    assert len(asked) == cut


@pytest.mark.parametrize("count", [1, 2, 7, 39, 40, 100])
def test_spread_picks_evenly_spaced_prompts(count: int) -> None:
    prompts = [Prompt(id=str(number), category="c", prompt="p") for number in range(40)]
    chosen = spread(prompts, count)
    assert len(chosen) == min(count, 40)
    numbers = [int(prompt.id) for prompt in chosen]
    assert numbers == sorted(set(numbers))
    gaps = {right - left for left, right in itertools.pairwise(numbers)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_equality_check_runs_pipelined_if_the_profile_asks_for_it(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[object] = []
    real = PipelinedLoop._round

    def counted(self: PipelinedLoop) -> object:
        rounds.append(self)
        return real(self)

    monkeypatch.setattr(PipelinedLoop, "_round", counted)
    for mode in ("pipelined", "serial"):
        rounds.clear()
        with tiny.load(lookup=False, depth=3, mode=mode) as engine:
            require_speculation(engine, 2)
            report = check_equality(engine, PROMPTS[:1], max_tokens=24, depths=(2,))
        assert report.depths == (2,)
        assert (report.identical, report.kept) == (1, True)
        assert bool(rounds) is (mode == "pipelined")


@pytest.mark.parametrize("mode", ["serial", "pipelined"])
def test_the_equality_check_waits_for_a_slow_drafter(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    def slowly(self: ModelDraftState, cache: object, lag: list[int], *others: object) -> object:
        if len(lag) > 2:
            time.sleep(0.3)
        return real(self, cache, lag, *others)  # type: ignore[arg-type]

    real = ModelDraftState._read
    monkeypatch.setattr(ModelDraftState, "_read", slowly)
    with tiny.load(lookup=False, depth=3, mode=mode) as engine:
        require_speculation(engine, 2)
        report = check_equality(engine, PROMPTS[:1], max_tokens=4, depths=(1, 2))
    assert report.kept
    assert report.results[0].proposed >= report.results[0].comparisons == 4


@pytest.mark.parametrize(("cap", "length"), [(1, 1), (2, 1), (5, 3), (8, 4)])
def test_half_of_a_full_tree_is_a_chain(cap: int, length: int) -> None:
    assert FullTrees(cap, "model").allow("lookup").depth == 0, "copies alone are chains"
    allowance = FullTrees(cap, "model").allow("model")
    gate = allowance.gate
    assert values_trees(gate)
    assert (allowance.depth, allowance.nodes, gate.needs_entropy) == (cap, 63, False)
    for place in range(length):
        assert gate.admits(0.0, None)
        assert gate.goes_on() == (place + 1 < length)
    assert not gate.admits(1.0, None)
    assert gate.believed == [0.5] * length
    tree = DraftTree()
    for parent, odds in (
        (-1, gate.believes(0.5)),
        (0, 0.5),
        (-1, gate.believes_alternative(0.3)),
        (-1, 0.01),
        (0, 0.9),
    ):
        tree.add(parent, len(tree), odds, "model")
    assert gate.choose(tree, 4).nodes == (0, 1, 2, 4)
    assert gate.choose(tree, 9).nodes == (0, 1, 2, 3, 4)
    assert gate.choose(tree, -1).nodes == ()
