"""Described machines, ranked: which placement wins on which kind of machine, and the roofline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.errors import MemoryLimitError
from edgespec.planning.choice.options import HEADROOM_BYTES
from edgespec.planning.choice.ranking import explain, reasons
from edgespec.planning.cost.curve import Curve
from edgespec.planning.cost.round_simulation import SimulatedPair
from edgespec.planning.cost.widths import WIDEST
from edgespec.planning.simulated.machine_file import DescribedMachine, Link, SharedBandwidth, machine_from_table
from edgespec.planning.simulated.simulate import contention, described_curve, plan_of, simulate, split_curve
from edgespec.profiles.machines import machine_names, read_machine
from tests.support.drawn_rounds import simulate_pipelined

# Mode, the target's device, drafter and its device, as expected of each description.
WINNERS = {
    "board-4gb": ("plain", "cpu", None, None),
    "desktop-12gb-gpu": ("serial", "CUDA0+cpu", "qwen2.5-3b", "CUDA0"),
    "desktop-full-gpu": ("pipelined", "CUDA0", "qwen2.5-0.5b", "cpu"),
    "desktop-big-gpu": ("serial", "CUDA0", "llama-3.2-1b", "CUDA0"),
    "laptop-igpu": ("serial", "cpu", "llama-3.2-1b", "cpu"),
    "laptop-small-gpu": ("serial", "CUDA0+cpu", "llama-3.2-1b", "CUDA0"),
    "mini-pc": ("serial", "cpu", "qwen2.5-coder-0.5b", "cpu"),
    "phone-npu": ("serial", "cpu", "llama-3.2-1b", "QNN"),
    "ultrabook-8gb": ("serial", "cpu", "qwen2.5-coder-0.5b", "cpu"),
    "ultrabook-8gb-flat": ("serial", "cpu", "qwen2.5-coder-0.5b", "cpu"),
}


def machine_called(name: str) -> DescribedMachine:
    origin, _, table = read_machine(name, cwd=Path())
    return machine_from_table(table, origin)


def with_memory(machine: DescribedMachine, device: str, memory_bytes: int) -> DescribedMachine:
    devices = tuple(replace(d, memory_bytes=memory_bytes) if d.memory == device else d for d in machine.devices)
    return replace(machine, devices=devices)


def test_every_built_in_machine_has_an_expected_winner() -> None:
    assert tuple(sorted(WINNERS)) == machine_names()


@pytest.mark.parametrize("name", sorted(WINNERS))
def test_the_expected_placement_wins_on_each_machine(name: str) -> None:
    machine = machine_called(name)
    ranking = simulate(machine)
    plan = plan_of(machine, ranking)
    drafter = (plan.drafter.model, plan.drafter.device) if plan.drafter else (None, None)
    assert (plan.mode, plan.target.device, *drafter) == WINNERS[name]
    assert plan.predicted_tokens_per_s == ranking.best.tokens_per_s
    assert plan.numeric_class.widths == ()
    assert plan.exactness == ("W" if plan.mode == "plain" else "D")
    assert plan.depth_cap == (ranking.best.depth or ranking.best.possible_depth)
    assert plan.context_length == machine.context_length
    assert plan.why == reasons(ranking)


def test_a_drafter_that_could_pay_is_planned_without_a_predicted_gain() -> None:
    """If verifying is expensive, every token would have to be right: rounds draft only if the text allows it."""
    machine = machine_called("ultrabook-8gb")
    best = simulate(machine).best
    assert (best.verdict.code, best.speedup, best.depth) == ("possible_gain", 1.0, 0)
    assert 1.02 < best.possible_speedup < 1.1
    assert plan_of(machine, simulate(machine)).predicted_tokens_per_s == pytest.approx(1 / best.target.curve.plain_s)


def test_a_drafter_without_room_is_rejected_with_sizes_until_memory_is_added() -> None:
    board = machine_called("board-4gb")
    plan = plan_of(board, simulate(board))
    assert any(
        "needs 0.69 GiB on cpu and 0.25 GiB are free with the target loaded" in reason for reason in plan.reasons
    )
    more = with_memory(board, "cpu", 4_000_000_000)
    assert plan_of(more, simulate(more)).mode == "serial"


def test_with_more_gpu_memory_the_laptop_runs_everything_on_its_gpu() -> None:
    laptop = with_memory(machine_called("laptop-small-gpu"), "CUDA0", 24_000_000_000)
    best = simulate(laptop).best
    assert (best.target.facts.device, best.drafter and best.drafter.device) == ("CUDA0", "CUDA0")


def test_a_described_target_that_fits_nowhere_raises_one_sentence() -> None:
    with pytest.raises(MemoryLimitError, match="fits nowhere: on cpu it needs"):
        simulate(with_memory(machine_called("board-4gb"), "cpu", 1_000_000_000))


def test_the_roofline_is_flat_while_memory_bound_and_then_rises_with_width() -> None:
    laptop = machine_called("laptop-small-gpu")
    cpu, _ = laptop.devices
    curve = described_curve(laptop.target, cpu, laptop.context_length)
    read_s = (4_366_000_000 + 4096 * 131_072) / 67e9
    row_s = 1.5e10 / 1.6e12
    kink = int(read_s / row_s)
    assert curve.widths == tuple(range(1, WIDEST + 1))
    assert curve.seconds(1) == curve.seconds(kink) == pytest.approx(read_s + 0.001)
    assert curve.seconds(kink + 1) == pytest.approx((kink + 1) * row_s + 0.001)
    assert curve.seconds(WIDEST) == pytest.approx(WIDEST * row_s + 0.001)


def test_given_verify_ratios_replace_the_roofline() -> None:
    ultrabook = machine_called("ultrabook-8gb")
    curve = described_curve(ultrabook.target, ultrabook.devices[0], 4096)
    assert curve.plain_s == pytest.approx((985_000_000 + 2048 * 28_672) / 45e9 + 0.001)
    assert curve.ratio(4) == pytest.approx(2.63)
    assert curve.ratio(6) == pytest.approx(3.25 + (6.10 - 3.25) / 3)


def test_only_devices_with_shared_bandwidth_slow_each_other_down() -> None:
    phone = machine_called("phone-npu")
    factor = (35e9 + 52e9) / 65e9
    for pair in (("cpu", "QNN"), ("QNN", "cpu")):
        both = contention(phone)[pair]
        assert both.target_factor == both.drafter_factor == pytest.approx(factor)
    roomy = replace(phone, shared_bandwidth=(SharedBandwidth(devices=frozenset({"cpu", "QNN"}), bytes_per_s=200e9),))
    assert contention(roomy)["cpu", "QNN"].target_factor == 1.0
    laptop = contention(machine_called("laptop-small-gpu"))
    assert laptop["cpu", "CUDA0"].drafter_factor == 1.0


def test_contention_of_one_memory_without_a_group_is_unknown() -> None:
    phone = replace(machine_called("phone-npu"), shared_bandwidth=())
    assert contention(phone) == {}
    ranking = simulate(phone)
    assert "pipelined" not in {candidate.mode for candidate in ranking.candidates}
    assert any("slow each other down" in refusal.verdict.text for refusal in ranking.rejected)


def test_a_slower_link_slows_a_drafter_on_another_device() -> None:
    phone = machine_called("phone-npu")
    slow = replace(phone, links=(Link(between=frozenset({"cpu", "QNN"}), hand_over_s=1.0),))
    assert simulate(slow).best.tokens_per_s < simulate(phone).best.tokens_per_s
    assert simulate(slow).best.drafter is not None
    assert simulate(slow).best.drafter.device == "cpu"


def test_a_model_stays_on_its_allowed_devices() -> None:
    assert {candidate.target.facts.device for candidate in simulate(machine_called("phone-npu")).candidates} == {
        "cpu"
    }


# --------------------------------------------------------------------------------------------- a split target


def test_a_target_too_large_for_the_gpu_is_split_with_the_layers_that_fit() -> None:
    laptop = machine_called("laptop-small-gpu")
    plain = [c for c in simulate(laptop).candidates if c.mode == "plain" and c.target.facts.device == "CUDA0+cpu"]
    layers = [c.target.footprint.layers[0] for c in plain if c.target.footprint.layers is not None]
    whole = 4_661_000_000 + 8192 * 131_072
    small, large = (w + 8192 * kv + HEADROOM_BYTES for w, kv in ((773_000_000, 32_768), (1_917_000_000, 114_688)))
    room = 5_600_000_000 - HEADROOM_BYTES
    assert layers == [32 * (room - taken) // whole for taken in (0, small, large)]
    for candidate in plain:
        assert candidate.memory_bytes["CUDA0"] <= 5_600_000_000
        assert sum(candidate.memory_bytes.values()) == pytest.approx(whole + HEADROOM_BYTES, abs=1)
        assert f"{candidate.target.footprint.layers[0]} of 32 layers on CUDA0+cpu" in candidate.what  # type: ignore[index]


def test_a_split_forward_takes_the_sum_of_both_parts() -> None:
    laptop = machine_called("laptop-small-gpu")
    cpu, gpu = (described_curve(laptop.target, device, laptop.context_length) for device in laptop.devices)
    split = split_curve(laptop.target, gpu, cpu, 24, 0.0001)
    assert split.plain_s == pytest.approx(0.75 * gpu.plain_s + 0.25 * cpu.plain_s + 0.0001)
    assert split.seconds(WIDEST) == pytest.approx(0.75 * gpu.seconds(WIDEST) + 0.25 * cpu.seconds(WIDEST) + 0.0001)
    few, many = Curve(widths=(1, 4), forward_s=(1.0, 2.0)), Curve(widths=(1, 8), forward_s=(1.0, 1.0))
    assert split_curve(laptop.target, few, many, 16, 0.0).widths == (1, 4, 8)
    for layers in (0, 32):
        with pytest.raises(ValueError, match="on both sides"):
            split_curve(laptop.target, gpu, cpu, layers, 0.0)
    with pytest.raises(ValueError, match="on both sides"):
        split_curve(replace(laptop.target, layers=None), gpu, cpu, 1, 0.0)


def test_targets_that_fit_or_cannot_be_split_are_not_split() -> None:
    laptop = machine_called("laptop-small-gpu")
    for machine in (
        replace(laptop, target=replace(laptop.target, layers=None)),
        replace(laptop, target=replace(laptop.target, devices=("cpu",))),
        replace(laptop, devices=tuple(replace(device, runtime="onnx") for device in laptop.devices)),
        with_memory(laptop, "CUDA0", 24_000_000_000),
        with_memory(laptop, "CUDA0", 300_000_000),
        machine_called("laptop-igpu"),
    ):
        assert not any("layers" in line for line in explain(simulate(machine)))


def test_a_split_target_is_drafted_for_serially_only() -> None:
    ranking = simulate(machine_called("laptop-small-gpu"))
    split = [one for one in ranking.candidates if one.target.footprint.layers is not None]
    assert {one.mode for one in split} == {"plain", "serial"}
    assert "how much CUDA0+cpu and cpu slow each other down is not known" in {
        refusal.verdict.text for refusal in ranking.rejected
    }


def test_the_hand_over_of_a_split_target_is_that_of_its_farther_part() -> None:
    laptop = machine_called("laptop-small-gpu")
    near = max(
        c.tokens_per_s for c in simulate(laptop).candidates if c.mode == "serial" and c.target.footprint.layers
    )
    slow = replace(laptop, links=(Link(between=frozenset({"cpu", "CUDA0"}), hand_over_s=0.02),))
    far = [c for c in simulate(slow).candidates if c.mode == "serial" and c.target.footprint.layers]
    assert max(c.tokens_per_s for c in far) < near
    curve = far[0].target.curve
    assert curve.plain_s > 0.02


# ------------------------------------------------------------------------------------------------- pipelined rounds


def test_the_pipelined_rate_equals_the_simulated_rounds() -> None:
    machine = machine_called("desktop-full-gpu")
    found = next(one for one in simulate(machine).candidates if one.mode == "pipelined")
    assert found.drafter is not None
    pair = SimulatedPair(
        curve=found.target.curve,
        draft=found.drafter.cost,
        acceptance=found.drafter.acceptance,
        hand_over_s=0.0001,
        contention=contention(machine)["CUDA0", "cpu"],
    )
    assert found.tokens_per_s == pytest.approx(simulate_pipelined(pair, found.depth).tokens_per_s, rel=0.01)
