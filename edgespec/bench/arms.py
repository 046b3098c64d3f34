"""The arms of a benchmark: plain decoding, the plan, and controls to compare them with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.bench.controls import ReplayDrafter, Script
from edgespec.engine.engine import Engine
from edgespec.engine.pair.load import fastest_plain
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.engine.session import Session
from edgespec.errors import InvalidRequestError
from edgespec.interfaces.drafting import MODEL, Drafter
from edgespec.interfaces.model import Model
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE
from edgespec.planning.depth.base import POLICY_NAMES, FixedDepth
from edgespec.planning.depth.control import DepthControl, make_policy
from edgespec.planning.depth.pipeline_budget import MeasuredBudget
from edgespec.profiles.layers import OLD_POLICY_NAMES

PLAIN, AGAIN, FASTEST, PLANNED = "plain", "again", "fastest", "planned"
DEFAULT_ARMS = (PLAIN, AGAIN, PLANNED)

# The arms that can be requested besides "depth-N".
ARM_NAMES = (PLAIN, AGAIN, FASTEST, PLANNED, "chains", "oracle", "worst", "lookup", "loaded", *POLICY_NAMES)

# Calibration must have found another setting faster by more than this, the usual difference between two runs, for
# plain decoding in that setting to get a separate arm.
_FASTER = 1.01

_DEPTH = re.compile(r"(?:(oracle|lookup|model|pipelined)-)?depth-(\d{1,2})")

ARMS_HELP = (
    "plain, again (plain once more: the noise), fastest (plain in its fastest setting), planned, chains (serial "
    "drafting without trees), oracle (always right), worst (always wrong), lookup, loaded (plain with the drafter "
    "in memory), depth-N, oracle-depth-N, lookup-depth-N, model-depth-N, pipelined-depth-N (drafting "
    "while the target verifies), or a depth policy: " + ", ".join(POLICY_NAMES)
)


@dataclass(slots=True)
class Arm:
    """One way to decode, with a separate session. ``script``: the tokens that the arm's replay drafter proposes.

    ``drafts_with_model``: whether the drafting model may propose for the arm, so that it must be loaded. ``forks``:
    whether further sessions like this one take memory for their text only.
    """

    name: str
    session: Session
    script: Script
    drafts_with_model: bool = False
    forks: bool = False


def parse_arms(names: str | None) -> tuple[str, ...]:
    """Parse a comma-separated list of arms; plain decoding always comes first. Raises InvalidRequestError."""
    given = [name.strip() for name in (names or ",".join(DEFAULT_ARMS)).split(",") if name.strip()]
    wanted = [OLD_POLICY_NAMES.get(name, name) for name in given]
    for name in wanted:
        if name not in ARM_NAMES and not _DEPTH.fullmatch(name):
            raise InvalidRequestError(f'there is no arm "{name}"', hint=f"arms: {ARMS_HELP}")
    return tuple(dict.fromkeys((PLAIN, *wanted)))


def with_fastest(engine: Engine, names: Sequence[str]) -> tuple[str, ...]:
    """The arms; if the plan is compared with plain decoding, also plain decoding in a setting known to be faster."""
    faster = fastest_plain(engine.pair.target, engine.pair.measurements.store)
    if PLANNED not in names or FASTEST in names or faster is None or faster[1] <= _FASTER:
        return tuple(names)
    return (PLAIN, FASTEST, *(name for name in names if name != PLAIN))


def open_arm(engine: Engine, name: str, depth_cap: int, compared: Mapping[str, Model] | None = None) -> Arm:
    """A session that decodes as the arm says, up to ``depth_cap`` tokens deep.

    An arm named after one of the models ``compared`` decodes plainly with that model. Raises InvalidRequestError for
    a missing drafter, and what opening a session raises.
    """
    script = Script()
    other = (compared or {}).get(name)
    speculation = _speculation(engine, name, depth_cap, script) if other is None else _plain(other)
    drafting = engine.pair.speculation() if speculation is None else speculation
    return Arm(
        name=name,
        session=engine.session(_speculation=speculation),
        script=script,
        drafts_with_model=drafting.depth_cap > 0 and any(drafter.kind == MODEL for drafter in drafting.drafters),
        forks=(drafting.target or engine.pair.target).facts.can_fork,
    )


def _plain(target: Model | None = None) -> Speculation:
    return Speculation(drafters=(), policy=FixedDepth(0), depth_cap=0, target=target)


def _speculation(engine: Engine, name: str, cap: int, script: Script) -> Speculation | None:
    if name == PLANNED:
        return None
    if name in (PLAIN, AGAIN, "loaded"):
        if name == "loaded":
            engine.load_drafter()
        return _plain()
    if name == FASTEST:
        faster = fastest_plain(engine.pair.target, engine.pair.measurements.store)
        return _plain(
            None if faster is None else engine.pair.pool.keep(engine.pair.target.with_settings(**faster[0]))
        )
    if name in ("oracle", "worst"):
        return _free(engine, ReplayDrafter(script, wrong=name == "worst"), cap)
    if name == "lookup":
        own = next((drafter for drafter in engine.drafters if drafter.kind == "lookup"), None)
        if own is None:
            raise InvalidRequestError("the arm lookup needs lookup = true in the profile")
        return _free(engine, own, cap)
    forced = _DEPTH.fullmatch(name)
    if forced is not None:
        who, depth = forced.group(1), min(cap, int(forced.group(2)))
        if who == "oracle":
            return Speculation(drafters=(ReplayDrafter(script),), policy=FixedDepth(depth), depth_cap=depth)
        drafters = tuple(d for d in engine.drafters if who in (None, "pipelined") or d.kind == who)
        if depth and not drafters:
            raise InvalidRequestError(f"the arm {name} needs a drafter", hint="see --draft and `edgespec plan`")
        if who == "pipelined":
            costs = Costs(curves=engine.pair.measurements.costs().curves)
            return Speculation(
                drafters=drafters,
                # One more than a serial round: a window's forward also scores the first token of the next window.
                policy=FixedDepth(depth + 1 if depth else 0),
                depth_cap=depth,
                budget=lambda: MeasuredBudget(depth, costs),
            )
        return Speculation(drafters=drafters, policy=FixedDepth(depth), depth_cap=depth)
    known, like = engine.pair.measurements, "cost" if name == "chains" else name
    policy = make_policy(next(p for p in POLICY_NAMES if p == like), cap, known.costs(), known.priors, known.history)
    return Speculation(drafters=engine.drafters, policy=policy, depth_cap=cap, trees=name != "chains")


def _free(engine: Engine, drafter: Drafter, cap: int) -> Speculation:
    """A single drafter whose proposals are free, as deep as is faster than plain decoding."""
    costs = Costs(curves=engine.pair.measurements.costs().curves, drafts={drafter.kind: FREE})
    return Speculation(drafters=(drafter,), policy=DepthControl(costs, cap), depth_cap=cap)


def open_arms(
    engine: Engine, names: Sequence[str], depth_cap: int, compared: Mapping[str, Model] | None = None
) -> list[Arm]:
    """Open all arms, then one for each model ``compared``.

    Raises what ``open_arm`` raises, after closing the sessions already open.
    """
    arms: list[Arm] = []
    try:
        for name in (*names, *(compared or {})):
            arms.append(open_arm(engine, name, depth_cap, compared))
    except BaseException:
        for arm in arms:
            arm.session.close()
        raise
    return arms
