"""Which drafters can pay on this machine, serial or pipelined with the target, and what to expect of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgespec.planning.choice.plan import Mode
from edgespec.planning.cost.acceptance import UNKNOWN
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, Curve, DraftCost, best_possible, by_position, drafting_speedup
from edgespec.planning.cost.margins import DRAFT_MARGIN
from edgespec.planning.cost.round_simulation import SimulatedPair, expected_pipelined

ModeRequest = Literal["auto", "serial", "pipelined"]
_Way = Literal["serial", "pipelined"]

ESTIMATED = "times are estimated from similar machines until measured"
NOT_CALIBRATED = "plain: this machine is not calibrated yet (`edgespec calibrate` takes a minute)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paying:
    """The sources that can be faster than plain decoding, how they run, and the tokens a second to expect.

    ``tokens_per_s`` counts only what acceptance so far promises, and copies of the text nothing: what a source will
    really bring depends on the text, and is followed round by round. None if nothing is calibrated.
    """

    sources: tuple[str, ...] = ()
    mode: Mode = "plain"
    tokens_per_s: float | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """What serial and pipelined drafting come to, as speed-ups over plain decoding. ``pipelined`` None: not known."""

    serial: float
    pipelined: float | None


def weigh_sources(wanted: Sequence[str], costs: Costs, depth_cap: int, mode: ModeRequest = "auto") -> Paying:
    """Decide by measured times which of the ``wanted`` sources draft up to ``depth_cap`` tokens, and how. Pure.

    Target and drafting model are pipelined if that is predicted to be faster than serial by more than the noise,
    what they were measured to cost each other included; or if ``mode`` says so.
    """
    if costs.curves is None:
        return Paying(reasons=(NOT_CALIBRATED,) if wanted else ())
    curve = costs.curves.curves[0]
    ratios = ", ".join(f"{curve.ratio(depth + 1):.2f} with {depth}" for depth in _telling_depths(depth_cap))
    why = [] if costs.measured else [ESTIMATED]
    why += [f"a plain step takes {1000 * curve.plain_s:.1f} ms; with drafted tokens to verify times {ratios}"]
    expected, paying = 1.0, []
    decided: _Way = "pipelined" if mode == "pipelined" else "serial"
    for source in wanted:
        cost = costs.drafts.get(source)
        if cost is None:
            why.append(f"no {source} drafter: what it costs has not been measured")
            continue
        contention, rates = _contention(cost, costs, mode), costs.acceptance.get(source)
        sure = _ways(curve, cost, (1.0,), depth_cap, contention)
        ways = _ways(curve, cost, rates or (UNKNOWN,), depth_cap, contention)
        way: _Way = "serial"
        if cost != FREE:
            way, said = _decide(ways, mode, costs.contention)
        possible = sure.pipelined if way == "pipelined" and sure.pipelined is not None else sure.serial
        if possible <= DRAFT_MARGIN:
            why.append(f"no {source} drafter: {hopeless_words(sure.serial)}{_contended(costs, sure)}")
            continue
        paying.append(source)
        if cost == FREE or way == "serial":
            best = best_possible(curve, cost, depth_cap)
            reach = f"up to {best.speedup:.2f}x plain, at depth {best.depth}, where it is always right"
        else:
            reach = f"up to {possible:.2f}x plain where it is always right"
        why.append(f"{source} drafter: {reach}")
        if cost != FREE:
            decided = way
            why.append(said)
            if rates is not None:
                expected = max(expected, ways.pipelined or 1.0 if way == "pipelined" else ways.serial)
    if not paying:
        why.append("plain: no drafter can be faster here")
    else:
        why.append("each round drafts as far as that is expected to pay, down to nothing")
    return Paying(
        sources=tuple(paying),
        mode=decided if paying else "plain",
        tokens_per_s=expected / curve.plain_s,
        reasons=tuple(why),
    )


def hopeless_words(speedup: float) -> str:
    """Why a drafter is not even tried."""
    return f"even if it were always right it would reach {speedup:.2f}x plain"


def _contention(cost: DraftCost, costs: Costs, mode: ModeRequest) -> Contention | None:
    """What both at once cost each other; nothing where that was asked for and nobody measured it. None: not known."""
    if cost == FREE or mode == "serial":
        return None
    return costs.contention or (Contention() if mode == "pipelined" else None)


def _ways(
    curve: Curve, cost: DraftCost, rates: Sequence[float], depth_cap: int, contention: Contention | None
) -> _Ways:
    rates = by_position(rates, depth_cap)
    serial = drafting_speedup(curve, cost, rates)
    if contention is None:
        return _Ways(serial=serial, pipelined=None)
    pair = SimulatedPair(curve=curve, draft=cost, acceptance=rates, contention=contention)
    return _Ways(serial=serial, pipelined=curve.plain_s * expected_pipelined(pair, depth_cap).tokens_per_s)


def _decide(ways: _Ways, mode: ModeRequest, contention: Contention | None) -> tuple[_Way, str]:
    """Serial or pipelined, and the sentence that says why."""
    if mode != "auto":
        return mode, f"{mode}: asked for"
    if ways.pipelined is None or contention is None:
        return "serial", "serial: what target and drafter cost each other has not been measured"
    pipelined = f"pipelined {_factors(contention)}, which would come to {ways.pipelined:.2f}x plain"
    if ways.pipelined > DRAFT_MARGIN * max(1.0, ways.serial):
        return "pipelined", f"{pipelined}; serial {ways.serial:.2f}x"
    return "serial", f"serial ({ways.serial:.2f}x plain at the acceptance so far): {pipelined}"


def _contended(costs: Costs, sure: _Ways) -> str:
    if sure.pipelined is None or costs.contention is None:
        return ""
    return f", and {sure.pipelined:.2f}x pipelined with the target, as {_factors(costs.contention)}"


def _factors(contention: Contention) -> str:
    return (
        f"the target takes {max(1.0, contention.target_factor):.2f} times and the drafter "
        f"{max(1.0, contention.drafter_factor):.2f} times as long as alone"
    )


def _telling_depths(cap: int) -> list[int]:
    """1, 2, 4, ... and the cap itself."""
    return sorted({cap, *(2**power for power in range(cap.bit_length()))})
