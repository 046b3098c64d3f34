"""300 random machines: the plan is the first candidate, and no two verdicts contradict each other."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from edgespec.files.disk import gib
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.reasons import CODES
from edgespec.planning.choice.options import Candidate, DrafterOption, Ranking, Rejected, TargetOption
from edgespec.planning.choice.plan import Plan
from edgespec.planning.choice.planner import (
    PlanRequest,
    contention_of,
    decide,
    depth_cap,
    drafter_options,
    make_plan,
)
from edgespec.planning.choice.ranking import explain
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost, best_possible
from edgespec.planning.cost.margins import DRAFT_MARGIN
from edgespec.planning.cost.widths import WidthProbe
from tests.support.planning import GIB, drafter_option, model_facts, request, target_option

MACHINES = 300
DEVICES = ("cpu", "Vulkan0")

# "1.23x", and every other number of a sentence with its unit.
FACTORS = re.compile(r"(\d+\.\d+)x")
GIBS = re.compile(r"(-?\d+\.\d+) GiB")


@dataclass(frozen=True)
class Machine:
    """A machine's measurements, its user's request, and the result."""

    seed: int
    request: PlanRequest
    costs: Costs
    cap: int | None
    ranking: Ranking
    plan: Plan

    @property
    def asked(self) -> bool:
        """A requested depth."""
        return self.request.depth != "auto"


def facts(device: str) -> ModelFacts:
    runtime = "native" if device == "cpu" else "llama"
    return model_facts(
        device=device, runtime=runtime, weight_bytes=4 * GIB, bytes_per_forward=4 * GIB, kv_bytes_per_token=2**17
    )


def drawn_curve(draw: random.Random, plain_s: float) -> Curve:
    widths = (1, 2, 3, 4, 8, 16)
    seconds, step = [plain_s], draw.choice([0.02, 0.2, 0.5, 1.0]) * plain_s
    for before, width in itertools.pairwise(widths):
        seconds.append(seconds[-1] + draw.uniform(0.5, 1.5) * step * (width - before))
    return Curve(widths=widths, forward_s=tuple(seconds))


def drawn_drafter(draw: random.Random, device: str, plain_s: float, *, eligible: bool) -> DrafterOption:
    rates = tuple(draw.uniform(0.0, 1.0) for _ in range(draw.randint(1, 4))) if draw.random() < 0.7 else ()
    cost = DraftCost(token_s=plain_s * draw.choice([0.02, 0.2, 0.5, 1.2]), round_s=plain_s * draw.uniform(0, 0.05))
    small = model_facts("small", runtime="native", device=device, weight_bytes=GIB, bytes_per_forward=GIB)
    return drafter_option(small, cost, acceptance=rates, eligible=eligible)


def drawn_machine(seed: int) -> Machine | None:
    """None if a depth is requested and its speed is unknown."""
    draw = random.Random(seed)
    here = draw.choice(DEVICES)
    target, plain_s = facts(here), draw.uniform(0.005, 0.3)
    probe = None if draw.random() < 0.05 else WidthProbe(widths=tuple(range(1, 2 + draw.choice([0, 1, 2, 3, 7, 11]))))
    cap = depth_cap(target, probe)
    own = target_option(target, drawn_curve(draw, plain_s), depth_cap_stable=cap)
    targets: list[TargetOption] = [own]
    for device in DEVICES:
        if device != here and draw.random() < 0.7:
            curve = drawn_curve(draw, draw.uniform(0.005, 0.3))
            targets.append(target_option(facts(device), curve, depth_cap_stable=cap, eligible=False))
    at = draw.choice(DEVICES)
    loaded = drawn_drafter(draw, at, plain_s, eligible=True) if draw.random() < 0.9 else None
    sources = draw.choice([("lookup", "model"), ("model",), ("lookup",), ()])
    wanted = request(
        *sources,
        depth=draw.choice(["auto"] * 9 + [0, 2]),
        exactness=draw.choice(["stable", "stable", "near"]),
        mode=draw.choice(["auto", "auto", "auto", "serial", "pipelined"]),
    )
    contention = None
    if draw.random() < 0.7:
        contention = Contention(target_factor=draw.uniform(1, 2.5), drafter_factor=draw.uniform(1, 2.5))
    costs = Costs(
        curves=ContextCurves(contexts=(96,), curves=(own.curve,)),
        drafts={"lookup": FREE, **({} if loaded is None else {"model": loaded.cost})},
        acceptance={} if loaded is None or not loaded.acceptance else {"model": loaded.acceptance},
        contention=contention,
    )
    models = [loaded]
    if draw.random() < 0.5:
        models.append(drawn_drafter(draw, DEVICES[1 - DEVICES.index(at)], plain_s, eligible=False))
    drafters = drafter_options(wanted, [model for model in models if model is not None])
    memory = dict.fromkeys(DEVICES, 32 * GIB)
    if wanted.depth == "auto" and draw.random() < 0.2:
        memory[DEVICES[1 - DEVICES.index(here)]] = GIB
    both = contention_of(wanted, costs)
    pairs = {} if both is None else {(here, at): both}
    ranking = decide(wanted, targets, drafters, memory, pairs)
    if ranking is None:
        assert wanted.asked_depth
        return None
    return Machine(seed, wanted, costs, cap, ranking, make_plan(wanted, target, probe, (), costs, ranking))


@pytest.fixture(scope="module")
def machines() -> tuple[Machine, ...]:
    drawn = (drawn_machine(seed) for seed in itertools.count())
    return tuple(itertools.islice((each for each in drawn if each is not None), MACHINES))


def verdicts(machines: tuple[Machine, ...]) -> Iterator[tuple[Machine, Candidate | Rejected]]:
    for machine in machines:
        for verdict in (*machine.ranking.candidates, *machine.ranking.rejected):
            yield machine, verdict


def test_the_random_machines_cover_different_outcomes(machines: tuple[Machine, ...]) -> None:
    """Otherwise the tests below say little."""
    assert {each.plan.mode for each in machines} == {"plain", "serial", "pipelined"}
    codes = {verdict.verdict.code for _, verdict in verdicts(machines)}
    assert codes >= {
        "plain_speed",
        "expected_gain",
        "possible_gain",
        "gain_not_known",
        "cannot_pay",
        "in_turns",
        "no_room",
        "target_stays",
        "drafter_stays",
        "no_equal_width",
    }


def test_the_plan_is_the_first_candidate_of_the_ranking(machines: tuple[Machine, ...]) -> None:
    for machine in machines:
        best, plan = machine.ranking.best, machine.plan
        assert plan.mode == best.mode, machine.seed
        if machine.request.depth == "auto" or plan.mode == "plain":
            assert plan.predicted_tokens_per_s == best.tokens_per_s, machine.seed
        assert ("" if plan.drafter is None else plan.drafter.kind) == "+".join(best.sources), machine.seed
        assert best.target.eligible
        assert explain(machine.ranking)[0] == f"{best.what}: {best.verdict.text}"
        if plan.mode != "plain":
            assert machine.asked or f"{best.what}: {best.verdict.text}" in plan.reasons, machine.seed
            assert best.possible_depth <= plan.depth_cap
            assert plan.exactness == best.exactness


def test_every_way_to_run_has_exactly_one_verdict(machines: tuple[Machine, ...]) -> None:
    for machine in machines:
        ways = [verdict.what for verdict in (*machine.ranking.candidates, *machine.ranking.rejected)]
        assert len(ways) == len(set(ways)), (machine.seed, ways)
        assert len(explain(machine.ranking)) == len(ways)
        rates = [one.tokens_per_s for one in machine.ranking.candidates if machine.request.depth == "auto"] or [1.0]
        assert rates == sorted(rates, reverse=True) or max(rates) - min(rates) < 1e-6 * max(rates)


def test_every_number_in_a_verdict_equals_a_field(machines: tuple[Machine, ...]) -> None:
    named = 0
    for machine, verdict in verdicts(machines):
        text = verdict.verdict.text
        held = [verdict.speedup, verdict.possible_speedup]
        plain_s = machine.ranking.best.target.curve.plain_s
        if isinstance(verdict, Candidate):
            held.append(verdict.drafted_tokens_per_s * plain_s)
            (rate, *_) = re.findall(r"([\d.]+) tokens/s", text) or [None]
            assert rate is None or float(rate) == pytest.approx(verdict.tokens_per_s, rel=0.01), machine.seed
            assert machine.request.depth == "auto" or verdict.verdict.code in ("depth_asked", "plain_speed")
            depths = re.findall(r"(\d+) (right )?guess", text)
            for depth, right in depths:
                assert int(depth) == (verdict.possible_depth if right else verdict.depth), machine.seed
        else:
            turns = verdict.what.removesuffix("pipelined") + "serial"
            held += [one.drafted_tokens_per_s * plain_s for one in machine.ranking.candidates if one.what == turns]
            sizes = [size for size in (verdict.needed_bytes, verdict.available_bytes) if size is not None]
            assert [f"{size} GiB" for size in GIBS.findall(text)] == list(map(gib, sizes)), machine.seed
        for factor in FACTORS.findall(text):
            known = [value for value in held if value is not None]
            assert any(float(factor) == pytest.approx(value, abs=0.00501) for value in known), (machine.seed, text)
            named += 1
    assert named > MACHINES


def test_plan_candidates_and_rejections_do_not_contradict_each_other(machines: tuple[Machine, ...]) -> None:
    for machine in machines:
        ranking, plan = machine.ranking, machine.plan
        for candidate in ranking.candidates:
            if candidate.drafter is not None:
                assert machine.asked or candidate.possible_speedup > DRAFT_MARGIN, machine.seed
                assert machine.asked or candidate.speedup >= 1 - 1e-9, "a round may decode plainly"
        for refusal in ranking.rejected:
            if refusal.verdict.code == "cannot_pay":
                assert refusal.possible_speedup is not None
                assert refusal.possible_speedup <= DRAFT_MARGIN, machine.seed
        planned = {candidate.what for candidate in ranking.candidates}
        assert not planned & {refusal.what for refusal in ranking.rejected}
        assert (plan.mode == "plain") == (plan.plain_because is not None), machine.seed
        if plan.mode != "plain":
            said = {reason.code for reason in plan.why}
            assert not said & {"no_drafter_pays", "not_calibrated", "depth_zero"}, machine.seed
        assert all(reason.code in CODES for reason in plan.why)


def test_the_depth_policy_calls_hopeless_exactly_what_the_plan_leaves_out(machines: tuple[Machine, ...]) -> None:
    """planning/depth uses ``best_possible`` as well."""
    for machine in machines:
        cost, request = machine.costs.drafts.get("model"), machine.request
        if cost is None or "model" not in request.sources or request.mode != "serial" or request.depth != "auto":
            continue
        if not machine.plan.depth_cap:
            continue
        curve = machine.ranking.best.target.curve
        could = best_possible(curve, cost, machine.plan.depth_cap).speedup > DRAFT_MARGIN
        fits = not any(refusal.verdict.code == "no_room" for refusal in machine.ranking.rejected)
        assert not fits or ("model" in machine.ranking.best.sources) == could, machine.seed
