"""The planner's cost model on a machine described in a file: what would run where, without measurements.

T(w) is a first-order roofline, max(bytes / bandwidth, w x operations / rate) + overhead, or the given ratios where an
engine's kernels are known to be slower. It predicts the placement, not the speed. Pipelined rounds are simulated by
planning/cost/round_simulation.py, as for a measured machine.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from edgespec.interfaces.drafting import COPIES, MODEL
from edgespec.interfaces.model import HOST, ModelFacts, NumericClass
from edgespec.planning.choice.options import HEADROOM_BYTES, DrafterOption, Footprint, Ranking, TargetOption
from edgespec.planning.choice.plan import Plan, PlannedDrafter, PlannedModel
from edgespec.planning.choice.ranking import rank, reasons
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import FREE, Curve, DraftCost
from edgespec.planning.cost.widths import WIDEST
from edgespec.planning.simulated.machine_file import (
    DescribedDevice,
    DescribedMachine,
    DescribedModel,
    DescribedTarget,
)

# A token reads the cache up to itself: on average half of it, over an answer that fills the context.
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


def split_curve(model: DescribedTarget, gpu: Curve, host: Curve, layers: int, link_s: float) -> Curve:
    """T(w), in seconds, of a target with ``layers`` on a GPU and the rest on the processor, run alternately.

    ``gpu`` and ``host`` are T(w) of the whole model on either; ``link_s`` is the round trip of the activations. Every
    layer is assumed to cost the same, and each side to add its overhead. Raises ValueError unless both sides have
    layers.
    """
    if model.layers is None or not 0 < layers < model.layers:
        raise ValueError("a split target has layers on both sides")
    share = layers / model.layers
    widths = tuple(sorted({*gpu.widths, *host.widths}))
    seconds = (share * gpu.seconds(width) + (1 - share) * host.seconds(width) + link_s for width in widths)
    return Curve(widths=widths, forward_s=tuple(seconds))


def contention(machine: DescribedMachine) -> dict[tuple[str, str], Contention]:
    """Contention of each pair of devices, by (target's device, drafter's device).

    Devices of one ``shared_bandwidth`` group share it in proportion to their demand. A pair that uses one memory
    without such a group is left out: its contention is unknown.
    """
    found = {}
    for one, other in itertools.permutations(machine.devices, 2):
        shared = [group.bytes_per_s for group in machine.shared_bandwidth if {one.name, other.name} <= group.devices]
        if one.memory == other.memory and not shared:
            continue
        asked = one.read_bytes_per_s + other.read_bytes_per_s
        factor = max([1.0, *(asked / total for total in shared)])
        found[one.name, other.name] = Contention(target_factor=factor, drafter_factor=factor)
    return found


def simulate(machine: DescribedMachine) -> Ranking:
    """Rank what could run on a described machine. Raises MemoryLimitError if its target fits nowhere."""
    targets = [_target(machine, device) for device in _allowed(machine, machine.target)]
    targets += _splits(machine)
    drafters = []
    for drafter in machine.drafters:
        if drafter.model is None:
            drafters.append(DrafterOption(source=COPIES, cost=FREE, acceptance=drafter.acceptance))
            continue
        for device in _allowed(machine, drafter.model):
            drafters.append(_drafter(machine, drafter.model, device, drafter.acceptance))
    return rank(
        targets,
        drafters,
        {device.name: device.memory_bytes for device in machine.devices if device.memory == device.name},
        contention=contention(machine),
        hand_over_s=_hand_overs(machine),
        exactness="any",
    )


def plan_of(machine: DescribedMachine, ranking: Ranking) -> Plan:
    """The best candidate as a plan. Its numeric class has no widths: none were probed."""
    best = ranking.best
    target, drafter = best.target, best.drafter
    return Plan(
        mode=best.mode,
        exactness=best.exactness,
        numeric_class=NumericClass.of(target.facts, ()),
        target=PlannedModel(target.facts),
        drafter=None if drafter is None else PlannedDrafter(kind=drafter.source, facts=drafter.facts),
        depth_cap=best.depth or best.possible_depth,
        context_length=machine.context_length,
        predicted_tokens_per_s=best.tokens_per_s,
        why=reasons(ranking),
    )


def _allowed(machine: DescribedMachine, model: DescribedModel) -> list[DescribedDevice]:
    return [device for device in machine.devices if not model.devices or device.name in model.devices]


def _hand_overs(machine: DescribedMachine) -> dict[tuple[str, str], float]:
    """Seconds of a hand-over by (target's device, drafter's device); for a split target from its farther side."""
    found = {}
    for drafter in machine.devices:
        for one, other in itertools.permutations(machine.devices, 2):
            link_s = _link_s(machine, one, drafter)
            found[one.name, drafter.name] = link_s
            found[_both(one, other), drafter.name] = max(link_s, _link_s(machine, other, drafter))
    return found


def _link_s(machine: DescribedMachine, one: DescribedDevice, other: DescribedDevice) -> float:
    """Seconds of a hand-over between two devices; 0 without a described link."""
    return next((link.hand_over_s for link in machine.links if link.between == {one.name, other.name}), 0.0)


def _both(gpu: DescribedDevice, host: DescribedDevice) -> str:
    """The device name of a split target. No contention is known for it, so nothing is run in parallel with it."""
    return f"{gpu.name}+{host.name}"


def _splits(machine: DescribedMachine) -> list[TargetOption]:
    """The target split between the processor and a GPU too small for it, against a drafter on that GPU.

    With as many layers on the GPU as fit, and with as many as leave room for each drafter. Only llama.cpp splits a
    model.
    """
    target = machine.target
    if target.layers is None:
        return []
    allowed = [device for device in _allowed(machine, target) if device.splits_layers]
    gpus = [device for device in allowed if device.kind == "gpu" and device.memory == device.name]
    hosts = [device for device in allowed if device.kind == "cpu" and device.memory == device.name == HOST]
    total_bytes = target.weights_bytes + target.kv_bytes_per_token * machine.context_length
    found = []
    for gpu, host in itertools.product(gpus, hosts):
        room = gpu.memory_bytes - HEADROOM_BYTES
        if total_bytes <= room:
            continue
        sharing = [0, *(_drafter_bytes(machine, one.model, gpu) for one in machine.drafters if one.model is not None)]
        fitting = {(room - taken) * target.layers // total_bytes for taken in sharing}
        found += [_split(machine, gpu, host, layers) for layers in sorted(fitting, reverse=True) if layers > 0]
    return found


def _drafter_bytes(machine: DescribedMachine, model: DescribedModel, device: DescribedDevice) -> int:
    """Bytes that a drafter takes of a device's memory; 0 if it may not run there."""
    if model.devices and device.name not in model.devices:
        return 0
    return model.weights_bytes + model.kv_bytes_per_token * machine.context_length + HEADROOM_BYTES


def _facts(machine: DescribedMachine, model: DescribedModel, device: DescribedDevice) -> ModelFacts:
    """A described model on a device. What only its file could tell is empty."""
    return ModelFacts(
        name=model.name,
        sha256=None,
        architecture="",
        runtime=device.runtime,
        build="described",
        device=device.name,
        threads=device.threads,
        vocabulary_size=0,
        trained_context_length=machine.context_length,
        weight_bytes=model.weights_bytes,
        bytes_per_forward=model.bytes_per_token,
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_type="f16",
    )


def _footprint(facts: ModelFacts, machine: DescribedMachine, device: DescribedDevice) -> Footprint:
    return replace(Footprint.whole(facts, machine.context_length), memory=device.memory)


def _split(machine: DescribedMachine, gpu: DescribedDevice, host: DescribedDevice, layers: int) -> TargetOption:
    model = machine.target
    assert model.layers is not None  # only such a target is split
    facts = replace(_facts(machine, model, host), device=_both(gpu, host), settings={"gpu_layers": layers})
    whole = _footprint(facts, machine, gpu)
    host_bytes = whole.device_bytes * (model.layers - layers) // model.layers
    gpu_curve, host_curve = (described_curve(model, device, machine.context_length) for device in (gpu, host))
    return TargetOption(
        facts=facts,
        footprint=replace(
            whole,
            device_bytes=whole.device_bytes - host_bytes,
            host_bytes=host_bytes,
            layers=(layers, model.layers),
        ),
        curve=split_curve(model, gpu_curve, host_curve, layers, _link_s(machine, gpu, host)),
        depth_cap_stable=None,
    )


def _target(machine: DescribedMachine, device: DescribedDevice) -> TargetOption:
    facts = _facts(machine, machine.target, device)
    return TargetOption(
        facts=facts,
        footprint=_footprint(facts, machine, device),
        curve=described_curve(machine.target, device, machine.context_length),
        depth_cap_stable=None,
    )


def _drafter(
    machine: DescribedMachine, model: DescribedModel, device: DescribedDevice, acceptance: tuple[float, ...]
) -> DrafterOption:
    facts = _facts(machine, model, device)
    plain_s = described_curve(model, device, machine.context_length).plain_s
    return DrafterOption(
        source=MODEL,
        cost=DraftCost(token_s=plain_s, lag_token_s=model.operations_per_token / device.operations_per_s),
        acceptance=acceptance,
        facts=facts,
        footprint=_footprint(facts, machine, device),
    )
