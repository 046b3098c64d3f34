"""The planner's cost model on a machine described in a file: what would run where, with nothing measured.

T(w) is a first-order roofline, max(bytes / bandwidth, w x operations / rate) + overhead, or the ratios that the
description gives where an engine's kernels are known to do worse. It says which placement to expect, not how fast
your machine is.
"""

from __future__ import annotations

import itertools

from edgespec.decoding.contracts import NumericClass
from edgespec.planning.cost import FREE, Curve, DraftCost
from edgespec.planning.described import DescribedDevice, DescribedMachine, DescribedModel
from edgespec.planning.options import Contention, DrafterOption, Ranking, TargetOption
from edgespec.planning.plan import Plan, PlannedDrafter, PlannedModel
from edgespec.planning.ranking import MARGIN, rank, reasons
from edgespec.planning.widths import WIDEST

__all__ = ["contention", "described_curve", "plan_of", "simulate"]

# A token reads the cache up to itself; over an answer that fills the context that is half of it on average.
_FILLED = 0.5


def described_curve(model: DescribedModel, device: DescribedDevice, context_length: int) -> Curve:
    """T(w) of a model on a device, in seconds, for widths 1 to WIDEST."""
    cache_bytes = _FILLED * context_length * model.kv_bytes_per_token
    read_s = (model.bytes_per_token + cache_bytes) / device.read_bytes_per_s
    row_s = model.operations_per_token / device.operations_per_s
    if device.verify_curve:
        plain_s = max(read_s, row_s) + device.launch_s
        widths = tuple(width for width, _ in device.verify_curve)
        return Curve(widths=widths, forward_s=tuple(plain_s * ratio for _, ratio in device.verify_curve))
    widths = tuple(range(1, WIDEST + 1))
    return Curve(widths=widths, forward_s=tuple(max(read_s, w * row_s) + device.launch_s for w in widths))


def contention(machine: DescribedMachine) -> dict[tuple[str, str], Contention]:
    """What each pair of devices costs each other, by (target's device, drafter's device).

    Devices of one ``shared_bandwidth`` group share it in proportion to what they ask for. A pair that uses one
    memory without such a group is left out: its contention is not known.
    """
    found = {}
    for one, other in itertools.permutations(machine.devices, 2):
        shared = [total for members, total in machine.shared_bandwidth if {one.name, other.name} <= members]
        if one.memory == other.memory and not shared:
            continue
        asked = one.read_bytes_per_s + other.read_bytes_per_s
        factor = max([1.0, *(asked / total for total in shared)])
        found[one.name, other.name] = Contention(target_factor=factor, drafter_factor=factor)
    return found


def simulate(machine: DescribedMachine, *, margin: float = MARGIN) -> Ranking:
    """Rank what could run on a described machine. Raises MemoryLimitError if its target fits nowhere."""
    targets = [_target(machine, device) for device in _allowed(machine, machine.target)]
    drafters = []
    for drafter in machine.drafters:
        if drafter.model is None:
            drafters.append(DrafterOption(kind="lookup", cost=FREE, acceptance=drafter.acceptance))
            continue
        for device in _allowed(machine, drafter.model):
            drafters.append(_drafter(machine, drafter.model, device, drafter.acceptance))
    hand_over_s = {
        (one.name, other.name): seconds
        for one, other in itertools.permutations(machine.devices, 2)
        for ends, seconds in machine.links
        if ends == {one.name, other.name}
    }
    return rank(
        targets,
        drafters,
        {device.name: device.memory_bytes for device in machine.devices if device.memory == device.name},
        contention=contention(machine),
        hand_over_s=hand_over_s,
        exactness="any",
        margin=margin,
    )


def plan_of(machine: DescribedMachine, ranking: Ranking) -> Plan:
    """The best candidate as a plan. Its numeric class has no widths: nothing was probed."""
    best = ranking.best
    target, drafter = best.target, best.drafter
    return Plan(
        mode=best.mode,
        exactness=best.exactness,
        numeric_class=NumericClass(
            runtime=target.runtime,
            build="described",
            device=target.device,
            threads=target.threads,
            kv_type="f16",
            settings=dict(target.settings),
            widths=(),
        ),
        target=PlannedModel(model=target.model, runtime=target.runtime, device=target.device, threads=target.threads),
        drafter=None
        if drafter is None
        else PlannedDrafter(kind=drafter.kind, model=drafter.model, runtime=drafter.runtime, device=drafter.device),
        depth_cap=best.depth,
        context_length=machine.context_length,
        predicted_tokens_per_s=best.tokens_per_s,
        reasons=reasons(ranking),
    )


def _allowed(machine: DescribedMachine, model: DescribedModel) -> list[DescribedDevice]:
    return [device for device in machine.devices if not model.devices or device.name in model.devices]


def _target(machine: DescribedMachine, device: DescribedDevice) -> TargetOption:
    model = machine.target
    return TargetOption(
        model=model.name,
        runtime=device.runtime,
        device=device.name,
        threads=device.threads,
        curve=described_curve(model, device, machine.context_length),
        weights_bytes=model.weights_bytes,
        cache_bytes=model.kv_bytes_per_token * machine.context_length,
        depth_cap_stable=None,
        memory=device.memory,
    )


def _drafter(
    machine: DescribedMachine, model: DescribedModel, device: DescribedDevice, acceptance: tuple[float, ...]
) -> DrafterOption:
    curve = described_curve(model, device, machine.context_length)
    return DrafterOption(
        kind="model",
        model=model.name,
        runtime=device.runtime,
        device=device.name,
        threads=device.threads,
        cost=DraftCost(token_s=curve.plain_s, lag_token_s=model.operations_per_token / device.operations_per_s),
        acceptance=acceptance,
        weights_bytes=model.weights_bytes,
        cache_bytes=model.kv_bytes_per_token * machine.context_length,
        bytes_per_forward=model.bytes_per_token,
        memory=device.memory,
    )
