"""Published results about two devices, described from data sheets, and the simulator's predictions.

Nothing here is fitted. A device achieves three quarters of its nominal bandwidth and two fifths of its arithmetic, as
in edgespec's machine files, and a forward has a millisecond of overhead. Acceptance is the source's, or that of a
named other source. Model sizes follow from their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgespec.planning.cost.curve import Curve, DraftCost, expected_tokens
from edgespec.planning.cost.round_simulation import SimulatedPair, expected_pipelined
from edgespec.planning.simulated.machine_file import DescribedDevice, DescribedTarget
from edgespec.planning.simulated.simulate import described_curve, split_curve
from tests.support.drawn_rounds import expected_serial

READ_SHARE, ARITHMETIC_SHARE, LAUNCH_S = 0.75, 0.40, 0.001

# A prediction within this share of the published value counts as right.
TOLERANCE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A published speed-up over the same target's plain decoding, and the predicted one.

    ``counts``: the published setting itself, predicted from data sheets alone; other comparisons only explain it.
    """

    setting: str
    what: str
    published: float
    predicted: float
    counts: bool = True

    @property
    def error(self) -> float:
        """The relative error of the prediction; positive if it is too high."""
        return self.predicted / self.published - 1

    @property
    def right_direction(self) -> bool:
        return (self.predicted > 1) == (self.published > 1)

    @property
    def met(self) -> bool:
        return abs(self.error) <= TOLERANCE


def device(
    name: str,
    kind: Literal["cpu", "gpu", "npu"],
    paper_bytes_per_s: float,
    paper_operations_per_s: float,
    arithmetic_share: float = ARITHMETIC_SHARE,
) -> DescribedDevice:
    return DescribedDevice(
        name=name,
        kind=kind,
        runtime="llama",
        threads=1,
        memory_bytes=1,
        read_bytes_per_s=READ_SHARE * paper_bytes_per_s,
        operations_per_s=arithmetic_share * paper_operations_per_s,
        launch_s=LAUNCH_S,
        verify_curve=(),
    )


def model(name: str, parameters: float, bits: float, kv_bytes_per_token: int, layers: int) -> DescribedTarget:
    """A model with ``parameters`` read per forward (without the embedding table), at ``bits`` each."""
    read_bytes = int(parameters * bits / 8)
    return DescribedTarget(
        name=name,
        weights_bytes=read_bytes,
        bytes_per_token=read_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        operations_per_token=2 * parameters,
        layers=layers,
    )


def acceptance_for(tokens_per_round: float, depth: int) -> float:
    """The constant acceptance at which rounds of ``depth`` draft tokens give ``tokens_per_round``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens([middle] * depth) < tokens_per_round else (low, middle)
    return low


def serial_speedup(curve: Curve, token_s: float, depth: int, tokens_per_round: float) -> float:
    pair = SimulatedPair(
        curve=curve, draft=DraftCost(token_s=token_s), acceptance=(acceptance_for(tokens_per_round, depth),)
    )
    return expected_serial(pair, depth).tokens_per_s * curve.plain_s


# --------------------------------------------------------------------------------------------------- Dovetail


def dovetail(arithmetic_share: float = ARITHMETIC_SHARE) -> Comparison:
    """Zhang et al., 2024 (arXiv 2412.18934): the drafter on the GPU, the target on the CPU, serially.

    HumanEval at temperature 0: 2.77 times CPU only. Their machine has a Xeon Silver 4214R (six channels of DDR4-2400;
    12 cores of 2.4 GHz with one 512-bit multiply-add unit) and an RTX 2080 SUPER (256 bits of GDDR6 at 15.5 Gb/s;
    89e12 operations in 16 bits). The target computes in 32 bits. The drafter has six blocks of the target's shape, a
    fusion layer and its head in 16 bits, and drafts a tree of depth 7 of which 16 tokens are verified: with the
    text's last token a forward of 17. Acceptance is the paper's: 5.90 tokens a round. Machine, tree and acceptance
    come from a summary of its second version (uni042/llm-paper-summary); only the abstract was read.
    """
    xeon = device("cpu", "cpu", 6 * 2400e6 * 8, 12 * 2.4e9 * 32, arithmetic_share)
    turing = device("CUDA0", "gpu", 256 / 8 * 15.5e9, 89e12)
    block = 4 * 4096**2 + 3 * 4096 * 11008
    head = 32000 * 4096
    target = model("llama-2-7b", 32 * block + head, 32, 2 * 32 * 4096 * 4, 32)
    drafter = model("dgf-5", 6 * block + 3 * 4096**2 + head, 16, 2 * 6 * 4096 * 2, 6)
    whole = described_curve(target, xeon, 512)
    tree = Curve(widths=(1, 8), forward_s=(whole.plain_s, whole.seconds(17)))
    token_s = described_curve(drafter, turing, 512).plain_s
    return Comparison(
        setting="Dovetail",
        what="Llama-2-7B on the CPU, its drafter on the GPU",
        published=2.77,
        predicted=serial_speedup(tree, token_s, 7, 5.90),
    )


# ------------------------------------------------------------------------------------------- llama.cpp, PR 3063


def llama_cpp() -> list[Comparison]:
    """llama.cpp pull request 3063 (2023): wall times of 256 tokens, CodeLlama-34B in Q8_0 and CodeLlama-7B in Q4_K_M.

    192.19 s on the CPU alone, 134.21 s with the drafter on the GPU, 140.71 s with 16 of the target's 48 layers there.
    A Radeon RX 6850M XT (192 bits of GDDR6 at 18 Gb/s; 26.4e12 operations in 16 bits); the processor is not named.
    Laptops with that GPU had a Ryzen 6000 H: two channels of DDR5-4800, and the four threads used at 3.3 GHz with 64
    int8 operations a cycle. Acceptance is that of pull request 3006, a few days apart, with the same prompt, seed,
    drafter and settings and the target in Q4_K_M: 254 drafted, 223 accepted, 266 tokens, so 43 rounds of about 6
    drafted tokens.
    """
    ryzen = device("cpu", "cpu", 2 * 4800e6 * 8, 4 * 3.3e9 * 64)
    radeon = device("ROCm0", "gpu", 192 / 8 * 18e9, 26.4e12)
    target = model("codellama-34b", 33.74e9, 8.5, 2 * 48 * 1024 * 2, 48)
    drafter = model("codellama-7b", 6.61e9, 4.85, 2 * 32 * 4096 * 2, 32)
    on_cpu, on_gpu = (described_curve(target, each, 256) for each in (ryzen, radeon))
    token_s = described_curve(drafter, radeon, 256).plain_s
    return [
        Comparison(
            setting="llama.cpp #3063",
            what="CodeLlama-34B on the CPU, CodeLlama-7B on the GPU",
            published=192.19 / 134.21,
            predicted=serial_speedup(on_cpu, token_s, 6, 266 / (266 - 223)),
        ),
        Comparison(
            setting="llama.cpp #3063",
            what="its rival: 16 of 48 layers on the GPU, no drafter",
            published=192.19 / 140.71,
            predicted=on_cpu.plain_s / split_curve(target, on_gpu, on_cpu, 16, 0.0).plain_s,
            counts=False,
        ),
    ]


# ------------------------------------------------------------------------------------------------ DuoDecoding


def duo_decoding(faster_drafter: float = 1.0) -> Comparison:
    """Lv et al., 2025 (arXiv 2503.00784): Vicuna-68M on the CPU, a target of 7B in 16 bits on the GPU, in parallel.

    Up to 2.61 times plain decoding, on the best of seven tasks, with up to 24 drafted tokens. The abstract and the
    scripts name no machine: assumed are an RTX 3090 (936 GB/s, 71e12 operations in 16 bits) and 16 cores on eight
    channels of DDR4-3200; both hardly matter, as the drafter fills any window long before the target is done. Nor do
    they state an acceptance: Spec-Bench has 2.28 tokens a forward for the same drafter with Vicuna-7B, over all tasks
    and with an adaptive draft length.
    """
    ampere = device("CUDA0", "gpu", 936e9, 71e12)
    server = device("cpu", "cpu", 8 * 3200e6 * 8 * faster_drafter, 16 * 2.5e9 * 32 * faster_drafter)
    block = 4 * 4096**2 + 3 * 4096 * 11008
    target = model("vicuna-7b", 32 * block + 32000 * 4096, 16, 2 * 32 * 4096 * 2, 32)
    drafter = model("vicuna-68m", 2 * (4 * 768**2 + 3 * 768 * 3072) + 32000 * 768, 5.5, 2 * 2 * 768 * 2, 2)
    curve = described_curve(target, ampere, 512)
    pair = SimulatedPair(
        curve=curve,
        draft=DraftCost(token_s=described_curve(drafter, server, 512).plain_s),
        acceptance=(1 - 1 / 2.28,),
    )
    return Comparison(
        setting="DuoDecoding",
        what="a 7B target on the GPU, Vicuna-68M on the CPU",
        published=2.61,
        predicted=expected_pipelined(pair, 24).tokens_per_s * curve.plain_s,
    )


# ------------------------------------------------------------------------------------- OpenVINO on Lunar Lake


def lunar_lake() -> list[Comparison]:
    """OpenVINO discussion 36484, quoted in nibor1896/Crow#183 (2026): Qwen3-14B on the GPU with drafter Qwen3-0.6B.

    12.2 tokens/s without a drafter. With the drafter on the CPU, 3 tokens a round, 1.35 times that (0.40 accepted);
    on the NPU 0.74 times with 1 (0.60), 0.58 with 3 (0.35), 0.55 with 5 (0.32); all serial. A Core Ultra 7 258V: 128
    bits of LPDDR5X-8533 for all three, and 67e12, 5e12 and 48e12 int8 operations for GPU, CPU and NPU. Weights in 4
    bits with a scale per 128, the head in 8 bits. A draft token on the NPU took 48 to 61 ms inside the loop, and 34.3
    ms outside.
    """
    memory = 128 / 8 * 8533e6
    gpu, cpu = device("GPU", "gpu", memory, 67e12), device("CPU", "cpu", memory, 5e12)
    npu = device("NPU", "npu", memory, 48e12)
    target = model("qwen3-14b", 13.2e9 + 2 * 0.778e9, 4.125, 2 * 40 * 1024 * 2, 40)
    drafter = model("qwen3-0.6b", 0.44e9 + 2 * 0.156e9, 4.125, 2 * 28 * 1024 * 2, 28)
    curve = described_curve(target, gpu, 256)
    on_cpu, on_npu = (described_curve(drafter, each, 256).plain_s for each in (cpu, npu))
    runs = ((1, 0.60, 0.74), (3, 0.35, 0.58), (5, 0.32, 0.55))
    found = [
        Comparison(
            setting="OpenVINO, Lunar Lake",
            what="Qwen3-0.6B on the CPU, 3 at a time",
            published=1.35,
            predicted=serial_speedup(curve, on_cpu, 3, 1 + 3 * 0.40),
            counts=False,
        )
    ]
    for token_s, how, counts in (
        (on_npu, "", True),
        (0.0343, ", at the source's 34.3 ms a token", False),
        (0.0545, ", at the source's 48 to 61 ms in its loop", False),
    ):
        found += [
            Comparison(
                setting="OpenVINO, Lunar Lake",
                what=f"on the NPU, {depth} at a time{how}",
                published=published,
                predicted=serial_speedup(curve, token_s, depth, 1 + depth * accepted),
                counts=counts,
            )
            for depth, accepted, published in runs
        ]
    return found


def comparisons() -> list[Comparison]:
    """All comparisons, in the order of docs/simulation.md."""
    return [dovetail(), *llama_cpp(), duo_decoding(), *lunar_lake()]
