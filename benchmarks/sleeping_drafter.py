"""Does the pipelined loop reach the speed that the times of its parts allow?

A real target, and a drafter that sleeps until each token is due, like a drafter on a separate device, since it uses
no CPU. For each latency ratio (a plain step of the target over a token of the drafter) the same answers are decoded
plainly, serially at the best fixed depth, and pipelined, one after the other; the target's T(w) is timed in between.
Reported: tokens a second of the pipelined loop against the bound from T(w), the drafter's time and the measured
acceptance; and its gain over serial decoding against the simulator's.

    python benchmarks/sleeping_drafter.py [--target MODEL] [--ratios 2,5,10] [--acceptance 0.8] [--passes 3]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from edgespec import Done, Engine, Session
from edgespec.bench.controls import Script
from edgespec.bench.suite import builtin_suite
from edgespec.calibration.width_probe import probe_tokens
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.errors import CancelledError
from edgespec.hardware.machine import describe_machine
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, ChainGate, DraftRequest, DraftState, Proposal
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import (
    ContextCurves,
    Curve,
    DraftCost,
    choose_depth,
    choose_window,
    expected_tokens,
    round_seconds,
)
from edgespec.planning.cost.round_simulation import SimulatedPair, expected_pipelined
from edgespec.planning.depth.base import FixedDepth
from edgespec.planning.depth.pipeline_budget import MeasuredBudget

TOKENS = 96
PROMPTS = 3
# Where T(w) is timed: about the middle of these answers.
CONTEXT = 128
MOST_DEPTH = 7


class SleepingDrafter:
    """Knows the answer, has a given accuracy, and takes time without using the CPU.

    Like a drafter on a separate device: each token is ready ``token_s`` seconds after the one before, by the
    ``clock``, without any computation. Whether a guess is right depends only on its position and the ``seed``: with
    probability ``acceptance``.
    """

    kind = "sleeping"

    def __init__(
        self,
        script: Script,
        *,
        token_s: float,
        acceptance: float = 1.0,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._script, self._token_s, self._acceptance = script, token_s, acceptance
        self._seed, self._clock = seed, clock

    def is_right(self, place: int) -> bool:
        """Whether the guess at that position is right."""
        return random.Random(f"{self._seed} {place}").random() < self._acceptance

    def start(self, request: DraftRequest) -> SleepingState:
        return SleepingState(self, self._script, request.vocabulary_size, self._token_s, self._clock)

    def close(self) -> None:
        """Holds nothing."""


class SleepingState(DraftState):
    """One session's state of the sleeping drafter."""

    def __init__(
        self,
        drafter: SleepingDrafter,
        script: Script,
        vocabulary_size: int,
        token_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._drafter, self._script, self._vocabulary_size = drafter, script, vocabulary_size
        self._token_s, self._clock = token_s, clock
        self._cancelled = threading.Event()

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        tokens: list[int] = []
        ready = self._clock()
        while len(tokens) < depth and len(context) + len(tokens) < len(self._script.tokens):
            ready += self._token_s  # a deadline, so that one late wake-up does not delay later tokens
            if self._cancelled.wait(max(0.0, ready - self._clock())):
                raise CancelledError("the drafting was cancelled")
            place = len(context) + len(tokens)
            token = self._script.tokens[place]
            tokens.append(token if self._drafter.is_right(place) else (token + 1) % self._vocabulary_size)
            if gate is not None and not gate.goes_on():
                break
        if not tokens:
            return NOTHING
        return Proposal(
            tokens=tuple(tokens),
            sources=(self._drafter.kind,) * len(tokens),
            drafted_by=self._drafter.kind,
            forwards=len(tokens),
        )

    def cancel(self) -> None:
        self._cancelled.set()

    def reset_cancel(self) -> None:
        self._cancelled.clear()


@dataclass
class Samples:
    """Tokens a second of each answer, and the counts of proposed and accepted tokens."""

    tokens_per_s: list[float] = field(default_factory=list)
    accepted: int = 0
    evaluated: int = 0
    identical: bool = True

    def add(self, done: Done, plain: Done | None) -> None:
        assert done.stats.decode_tokens_per_s is not None
        self.tokens_per_s.append(done.stats.decode_tokens_per_s)
        self.accepted += done.stats.accepted
        self.evaluated += done.stats.evaluated
        self.identical &= plain is None or plain.token_ids == done.token_ids

    @property
    def rate(self) -> float:
        return statistics.median(self.tokens_per_s)


def write(session: Session, prompt: str) -> Done:
    """Answer a prompt that is not cached."""
    session.clear(keep_cache=False)
    *_, done = session.generate(prompt, max_tokens=TOKENS)
    assert isinstance(done, Done)
    return done


def time_widths(engine: Engine, samples: dict[int, list[float]]) -> None:
    """Time one forward of every width."""
    tokens = probe_tokens(CONTEXT + max(samples), engine.pair.vocabulary_size)
    with closing(engine.pair.target.open(engine.plan.context_length)) as sequence:
        sequence.forward(tokens[:CONTEXT], 0)
        for turn in range(4):
            for width, seconds in samples.items():
                sequence.rewind(CONTEXT)
                started = time.perf_counter()
                sequence.forward(tokens[CONTEXT : CONTEXT + width], width).argmax()
                if turn:
                    seconds.append(time.perf_counter() - started)


def curve_of(samples: dict[int, list[float]]) -> Curve:
    return Curve(widths=tuple(samples), forward_s=tuple(statistics.median(own) for own in samples.values()))


def measure(engine: Engine, ratio: float, acceptance: float, passes: int, depth_cap: int) -> dict[str, object]:
    """All figures of one latency ratio."""
    widths: dict[int, list[float]] = {width: [] for width in range(1, depth_cap + 2)}
    for _ in range(3):
        time_widths(engine, widths)
    curve = curve_of(widths)
    cost = DraftCost(token_s=curve.plain_s / ratio)
    depth = max(1, choose_depth(curve, cost, (acceptance,), depth_cap).depth)
    script = Script()
    drafter = SleepingDrafter(script, token_s=cost.token_s, acceptance=acceptance, seed=1)
    costs = Costs(curves=ContextCurves(contexts=(0,), curves=(curve,)))
    arms = {
        "plain": Speculation(drafters=(), policy=FixedDepth(0), depth_cap=0),
        "serial": Speculation(drafters=(drafter,), policy=FixedDepth(depth), depth_cap=depth),
        "pipelined": Speculation(
            drafters=(drafter,),
            policy=FixedDepth(depth_cap + 1),
            depth_cap=depth_cap,
            budget=lambda: MeasuredBudget(depth_cap, costs),
        ),
    }
    samples = {name: Samples() for name in arms}
    prompts = [prompt.prompt for prompt in builtin_suite("quick")[:PROMPTS]]
    sessions = {name: engine.session(_speculation=speculation) for name, speculation in arms.items()}
    try:
        for turn in range(passes):
            for prompt in prompts:
                plain = write(sessions["plain"], prompt)
                script.tokens = [*engine.pair.prompts.request_tokens(prompt), *plain.token_ids]
                samples["plain"].add(plain, None)
                for name in ("serial", "pipelined") if turn % 2 else ("pipelined", "serial"):
                    samples[name].add(write(sessions[name], prompt), plain)
                time_widths(engine, widths)
    finally:
        for session in sessions.values():
            session.close()
    curve = curve_of(widths)
    both = [samples["serial"], samples["pipelined"]]
    seen = sum(own.accepted for own in both) / max(1, sum(own.evaluated for own in both))
    bound = choose_window(curve, cost, (seen,), depth_cap)
    pair = SimulatedPair(curve=curve, draft=cost, acceptance=(seen,))
    serial_tokens_per_s = expected_tokens([seen] * depth) / round_seconds(curve, cost, depth)
    simulated_gain = expected_pipelined(pair, depth_cap).tokens_per_s / serial_tokens_per_s
    rates = {name: own.rate for name, own in samples.items()}
    gain = rates["pipelined"] / rates["serial"]
    return {
        "ratio": ratio,
        "forward_ms": {width: 1000 * curve.seconds(width) for width in curve.widths},
        "draft_token_ms": 1000 * cost.token_s,
        "acceptance": seen,
        "serial_depth": depth,
        "bound_window": bound.window,
        "tokens_per_s": rates,
        "bound_tokens_per_s": bound.tokens_per_s,
        "of_bound": rates["pipelined"] / bound.tokens_per_s,
        "gain_over_serial": gain,
        "simulated_gain": simulated_gain,
        "gain_of_simulated": gain / simulated_gain,
        "identical": all(own.identical for own in both),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="the model that verifies")
    parser.add_argument("--ratios", default="2,5,10", help="plain step over draft token, comma-separated")
    parser.add_argument("--acceptance", type=float, default=0.8, help="how often the drafter is right")
    parser.add_argument("--passes", type=int, default=3, help="times that every answer is decoded in every way")
    arguments = parser.parse_args()
    ratios = [float(ratio) for ratio in arguments.ratios.split(",")]
    machine = describe_machine()
    # One thread fewer than there are cores: the sleeper must not compete for a core when it wakes.
    threads = max(1, machine.physical_cores - 1)
    with Engine.load(
        arguments.target, draft="none", lookup=False, context=1024, depth=MOST_DEPTH, threads=threads
    ) as engine:
        depth_cap = engine.pair.depth_cap_allowed or MOST_DEPTH
        report = {
            "machine": machine.as_json(),
            "threads": threads,
            "target": engine.pair.target.facts.name,
            "depth_cap": min(depth_cap, MOST_DEPTH),
            "ratios": [
                measure(engine, ratio, arguments.acceptance, arguments.passes, min(depth_cap, MOST_DEPTH))
                for ratio in ratios
            ],
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
