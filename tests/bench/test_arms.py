"""Arms: their names, the drafters in each, and that a failed opening leaves no session open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.bench import arms as module
from edgespec.bench.arms import ARM_NAMES, ARMS_HELP, DEFAULT_ARMS, open_arm, open_arms, parse_arms, with_fastest
from edgespec.bench.controls import Script
from edgespec.engine.engine import Engine
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.engine.session import Session
from edgespec.errors import ClosedError, InvalidRequestError, MemoryLimitError
from edgespec.files.home import Home
from edgespec.interfaces.policy import AnswerPolicy
from edgespec.planning.depth.base import POLICY_NAMES, FixedDepth
from edgespec.planning.depth.control import DepthControl
from tests.support.bench_answers import require_depth
from tests.support.calibrating import time_other
from tests.support.tiny_models import TinyModels, answer, invent_measurements

CAP = 3


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load_speculating() as engine:
        require_depth(engine, CAP)
        yield engine


def speculation(engine: Engine, name: str, cap: int = CAP) -> Speculation:
    found = module._speculation(engine, name, cap, Script())
    assert found is not None
    return found


def sessions_open(engine: Engine) -> int:
    return sum(not session.closed for session in engine.pair.sessions)


# ------------------------------------------------------------------------------------------------- names


def test_the_default_arms_are_plain_again_and_planned() -> None:
    assert parse_arms(None) == DEFAULT_ARMS == ("plain", "again", "planned")
    assert parse_arms("") == DEFAULT_ARMS


@pytest.mark.parametrize(
    ("given", "arms"),
    [
        ("planned", ("plain", "planned")),
        ("planned,plain", ("plain", "planned")),
        ("plain", ("plain",)),
        (" oracle , worst ", ("plain", "oracle", "worst")),
        ("depth-2,depth-2,planned,depth-2", ("plain", "depth-2", "planned")),
        ("planned,,again,", ("plain", "planned", "again")),
        (",", ("plain",)),
        ("bandit,fixed", ("plain", "cost", "fixed")),
        ("depth-0,oracle-depth-12,lookup-depth-1,model-depth-2,pipelined-depth-2",
         ("plain", "depth-0", "oracle-depth-12", "lookup-depth-1", "model-depth-2", "pipelined-depth-2")),
    ],
)  # fmt: skip
def test_requested_arms_keep_their_order_after_plain(given: str, arms: tuple[str, ...]) -> None:
    assert parse_arms(given) == arms


def test_every_listed_arm_name_can_be_parsed_and_is_in_the_help() -> None:
    assert parse_arms(",".join(ARM_NAMES)) == ARM_NAMES
    assert set(POLICY_NAMES) < set(ARM_NAMES)
    for name in ARM_NAMES:
        assert name in ARMS_HELP


@pytest.mark.parametrize(
    "name",
    ["planed", "Plain", "depth", "depth-", "depth--1", "depth-100", "depth-2x", "xdepth-2", "worst-depth-2",
     "depth-1.5", "oracle-depth-", "a b", "\x1b[31m", "draft-depth-2"],
)  # fmt: skip
def test_an_unknown_arm_is_refused_with_the_list_of_arms(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="there is no arm") as caught:
        parse_arms(f"plain,{name}")
    shown = name.replace("\x1b", "\\x1b")  # no terminal obeys what an error shows
    assert f'"{shown}"' in caught.value.message
    assert caught.value.hint is not None
    assert "oracle" in caught.value.hint
    assert "depth-N" in caught.value.hint


# ------------------------------------------------------------------------------------------- who drafts


def begun(found: Speculation) -> AnswerPolicy:
    """The policy's state for an answer after a long prompt, with time to lose."""
    own = found.policy.answer(prompt_tokens=1000)
    own.began(100.0, 0.01)
    return own


@pytest.mark.parametrize(
    "name", ["plain", "again", "fastest", "loaded", "depth-0", "oracle-depth-0", "model-depth-0"]
)
def test_plain_arms_never_draft(engine: Engine, name: str) -> None:
    found = speculation(engine, name)
    assert found.depth_cap == 0
    assert isinstance(found.policy, FixedDepth)
    assert found.policy.depth == 0


def test_the_planned_arm_uses_the_engines_own_plan(engine: Engine) -> None:
    assert module._speculation(engine, "planned", CAP, Script()) is None


def test_the_fastest_arm_is_added_only_for_a_clearly_faster_setting(tiny: TinyModels, home: Home) -> None:
    names = ("plain", "again", "planned")
    with tiny.load_speculating(store_home=home, runtime="llama") as engine:
        assert speculation(engine, "fastest").target is None, "the plan's own setting is the fastest known"
        assert with_fastest(engine, names) == names
        time_other(engine, 1.005)
        assert with_fastest(engine, names) == names, "0.5 % is within the noise"
        time_other(engine, 1.02)
        assert with_fastest(engine, names) == ("plain", "fastest", "again", "planned")
        assert with_fastest(engine, ("plain", "oracle")) == ("plain", "oracle"), (
            "no arm is compared with plain decoding"
        )
        assert with_fastest(engine, ("plain", "planned", "fastest")) == ("plain", "planned", "fastest")
        other = speculation(engine, "fastest").target
        assert other is not None
        assert other.facts.kv_type == "f16"
        arm = open_arm(engine, "fastest", CAP)
        assert answer(arm.session.generate("hello", max_tokens=5)).stats.emitted_tokens == 5
        assert speculation(engine, "plain").target is None
    with pytest.raises(ClosedError):
        other.open(16)


@pytest.mark.parametrize("name", ["oracle", "worst"])
def test_control_arms_draft_with_one_free_drafter_at_full_depth(engine: Engine, name: str) -> None:
    found = speculation(engine, name)
    (drafter,) = found.drafters
    assert drafter.kind == name
    assert isinstance(found.policy, DepthControl)
    assert found.depth_cap == CAP
    assert begun(found).allow_free(name).depth == CAP, "free, so only its gate may stop it"
    assert begun(found).allow("model").depth == 0


def test_the_lookup_arm_has_no_drafting_model(engine: Engine) -> None:
    found = speculation(engine, "lookup")
    assert [drafter.kind for drafter in found.drafters] == ["lookup"]
    assert begun(found).allow_free("lookup").depth == CAP
    assert begun(found).allow("model").depth == 0


@pytest.mark.parametrize(
    ("name", "kinds", "depth"),
    [
        ("depth-2", ["lookup", "model"], 2),
        ("lookup-depth-2", ["lookup"], 2),
        ("model-depth-1", ["model"], 1),
        ("oracle-depth-2", ["oracle"], 2),
        ("depth-99", ["lookup", "model"], CAP),
        ("oracle-depth-99", ["oracle"], CAP),
        ("model-depth-99", ["model"], CAP),
    ],
)
def test_a_forced_depth_is_limited_to_the_numeric_class(
    engine: Engine, name: str, kinds: list[str], depth: int
) -> None:
    found = speculation(engine, name)
    assert [drafter.kind for drafter in found.drafters] == kinds
    assert found.depth_cap == depth
    allowance = begun(found).allow("model")
    assert (allowance.depth, allowance.gate) == (depth, None)


def test_each_answer_of_a_pipelined_arm_has_its_own_budget(engine: Engine) -> None:
    found = speculation(engine, "pipelined-depth-2")
    assert [drafter.kind for drafter in found.drafters] == ["lookup", "model"]
    assert (found.depth_cap, begun(found).allow("model").depth) == (2, 3)
    assert found.budget is not None
    one, other = found.budget(), found.budget()
    assert one is not other
    assert (one.window(9), one.draft_tokens(0)) == (2, 3)
    plain = speculation(engine, "pipelined-depth-0")
    assert (plain.depth_cap, begun(plain).allow("model").depth) == (0, 0)
    assert speculation(engine, "model-depth-2").budget is None, "the other arms are serial"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cost", DepthControl),
        ("chains", DepthControl),
        ("fixed", FixedDepth),
        ("entropy", FixedDepth),
        ("confidence", FixedDepth),
    ],
)
def test_a_policy_arm_uses_all_drafters_of_the_engine(engine: Engine, name: str, kind: type) -> None:
    found = speculation(engine, name)
    assert type(found.policy) is kind
    assert found.policy is not engine.pair.policy, "each arm learns separately"
    assert found.drafters == engine.drafters
    assert found.depth_cap == CAP
    assert found.trees is (name != "chains")


def test_opening_the_loaded_arm_loads_the_drafter_other_arms_do_not(tiny: TinyModels) -> None:
    with tiny.load(native_sidecar=False) as fresh:  # with a sidecar the drafter may be loaded early
        invent_measurements(fresh)
        for name in ("plain", "again", "planned", "depth-1"):
            open_arm(fresh, name, 1)
        assert fresh.pair.pool.names == ()
        open_arm(fresh, "loaded", 1)
        assert fresh.pair.pool.names == ("drafter",)


def test_an_arm_keeps_its_name_and_its_drafters_script(engine: Engine) -> None:
    arm = open_arm(engine, "oracle", CAP)
    try:
        assert arm.name == "oracle"
        assert isinstance(arm.session, Session)
        own = arm.session._speculating
        assert own.drafters[0]._script is arm.script  # type: ignore[attr-defined]
        assert arm.script.tokens == ()
    finally:
        arm.session.close()


# ------------------------------------------------------------------------------------------- compared models


def test_compared_models_get_plain_arms_after_all_other_arms(engine: Engine) -> None:
    other = engine.pair.pool.keep(engine.pair.target.with_settings(threads=2))
    opened = open_arms(engine, ("plain", "planned"), CAP, {"llama:other": other})
    try:
        assert [arm.name for arm in opened] == ["plain", "planned", "llama:other"]
        own = opened[2].session._speculating
        assert (own.target, own.drafters, own.depth_cap) == (other, (), 0)
        assert begun(own).allow("model").depth == 0
        assert opened[0].session._speculating.target is None
        done = answer(opened[2].session.generate("hello", max_tokens=5))
        assert (done.stats.emitted_tokens, done.stats.proposed) == (5, 0)
    finally:
        for arm in opened:
            arm.session.close()


# --------------------------------------------------------------------------------------- what is missing


def test_an_arm_that_needs_a_missing_drafter_is_an_error(tiny: TinyModels) -> None:
    with tiny.load(draft="none") as engine:
        with pytest.raises(InvalidRequestError, match="the arm model-depth-2 needs a drafter") as caught:
            speculation(engine, "model-depth-2")
        assert caught.value.hint is not None
        assert "--draft" in caught.value.hint
        assert [d.kind for d in speculation(engine, "depth-2").drafters] == ["lookup"]
        assert speculation(engine, "loaded").depth_cap == 0, "without a drafter to load the arm is plain"
    with tiny.load(lookup=False, draft="none") as engine:
        for name in ("depth-2", "lookup-depth-1"):
            with pytest.raises(InvalidRequestError, match=f"the arm {name} needs a drafter"):
                speculation(engine, name)
        with pytest.raises(InvalidRequestError, match="lookup = true"):
            speculation(engine, "lookup")
        # The oracle needs only its own drafter.
        assert speculation(engine, "oracle-depth-2").depth_cap == 2


def test_open_arms_opens_all_arms_in_order(engine: Engine) -> None:
    before = sessions_open(engine)
    opened = open_arms(engine, ("plain", "planned", "worst"), CAP)
    try:
        assert [arm.name for arm in opened] == ["plain", "planned", "worst"]
        assert sessions_open(engine) == before + 3
        assert len({id(arm.script) for arm in opened}) == 3
    finally:
        for arm in opened:
            arm.session.close()


@pytest.mark.parametrize(
    "error", [MemoryLimitError("no room", needed_bytes=2, available_bytes=1), KeyboardInterrupt()]
)
def test_open_arms_closes_opened_sessions_if_one_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    opened: list[Session] = []
    real = engine.session

    def session(*, _speculation: Speculation | None = None) -> Session:
        if len(opened) == 2:
            raise error
        opened.append(real(_speculation=_speculation))
        return opened[-1]

    monkeypatch.setattr(engine, "session", session)
    with pytest.raises(type(error)):
        open_arms(engine, ("plain", "planned", "oracle"), CAP)
    assert [session.closed for session in opened] == [True, True]


def test_open_arms_closes_opened_sessions_if_the_drafter_is_missing(tiny: TinyModels) -> None:
    with tiny.load(draft="none") as engine:
        with pytest.raises(InvalidRequestError, match="needs a drafter"):
            open_arms(engine, ("plain", "again", "model-depth-1"), CAP)
        assert sessions_open(engine) == 0
