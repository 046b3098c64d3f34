"""The requests of tests/support/simulated_clock.py served by the real loop and the real combination of drafters.

The right token at every position is the position itself, so nothing needs weights. Several times as slow as
``serve``, which must come to the same rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import CombinationState
from edgespec.interfaces.drafting import NOTHING, ChainGate, Context, Outcome, Proposal
from edgespec.interfaces.policy import Allowance, RoundRecord
from tests.support.drawn_requests import Request, World
from tests.support.simulated_clock import Course, Decider, Drafted, Process
from tests.support.simulated_decoding import WRONG, Truth


class _Target:
    context_length = 10**9

    def __init__(self, course: Course) -> None:
        self._course = course
        self.length = 0
        self.prompt_s = 0.0  # the clock before the forward that brings the answer's first token

    def forward(self, tokens: Sequence[int], rows: int) -> Truth:
        course, prompt = self._course, self._course.request.prompt_tokens
        if self.length < prompt and rows:
            self.prompt_s = course.clock.now_s
        if rows:
            course.forward(len(tokens), self.length + 1 - prompt)
        else:
            course.clock.spend("prompt", course._slower(0, 1) * course.world.prompt_s(len(tokens)))
        self.length += len(tokens)
        return Truth(self.length - rows + 1, rows)

    def rewind(self, length: int) -> None:
        self.length = length


class _Drafter:
    """A DraftState that is as right as the course says."""

    def __init__(self, course: Course, decider: Decider, *, free: bool) -> None:
        self._course, self._decider, self.free = course, decider, free
        self._kind = "lookup" if free else "model"

    def _place(self, context: Context) -> int:
        return len(context) - self._course.request.prompt_tokens

    def lag(self, context: Context) -> int:
        return 0 if self.free else self._course.lag(self._place(context))

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        course, place = self._course, self._place(context)
        drafted: Drafted | None
        if self.free:
            drafted = course.copy(place, depth)
            if drafted is None:
                return NOTHING
        else:
            if not course.process.loaded:
                self._decider.loaded(course.load(place))
            drafted = course.draft(place, depth, gate, self._decider.window, self._decider.patience_s)
        tokens = [len(context) + index if hit else WRONG for index, hit in enumerate(drafted.right)]
        return Proposal(
            tokens=tuple(tokens),
            sources=(self._kind,) * len(tokens),
            drafted_by=self._kind,
            sync_s=drafted.sync_s,
            forwards=drafted.forwards,
            confidences=tuple(drafted.sure),
        )

    def observe(self, outcome: Outcome) -> None: ...

    def cancel(self) -> None: ...

    def reset_cancel(self) -> None: ...

    def close(self) -> None: ...


class _Policy:
    """The decider as the loop and the combination know it."""

    plain_tokens_per_s = None

    def __init__(self, decider: Decider, course: Course) -> None:
        self._decider, self._course = decider, course
        self.learn, self.record_it = decider.learn, decider.record

    def allow(self, source: str, lag: int = 0) -> Allowance:
        allowance = self._decider.allow(source, lag)
        self._course.probing = source == "model" and allowance.depth > 0 and self._decider.probing
        return allowance

    def learn_siblings(self, source: str, odds: Sequence[float], hits: Sequence[bool]) -> None: ...

    def record(self, record: RoundRecord) -> None:
        self._course.probing = False
        self.record_it(record)

    def why_off(self, source: str) -> str | None:
        return None


def serve_by_loop(
    world: World, decider: Decider, request: Request, process: Process | None = None
) -> tuple[list[RoundRecord], Course]:
    """One request by the real loop: the records of its rounds, and its course with the clock."""
    course = Course(world, request, process or Process())
    policy: Any = _Policy(decider, course)
    parts: Any = [
        ("lookup", _Drafter(course, decider, free=True)),
        ("model", _Drafter(course, decider, free=False)),
    ]
    target: Any = _Target(course)
    prompt = request.prompt_tokens
    history = list(range(prompt))
    stop = prompt + request.tokens - 1
    limits = LoopLimits(
        max_tokens=request.tokens if request.cut else request.max_tokens,
        depth_cap=world.depth_cap,
        vocabulary_size=2 * WRONG,
        stop_ids=frozenset() if request.cut else frozenset([stop]),
    )
    loop = DecodeLoop(
        target,
        CombinationState(parts, policy),
        policy,
        Chooser(Sampling()),
        history,
        limits,
        clock=course.clock.read,
    )
    steps = loop.steps()
    next(steps)
    first_s = course.clock.now_s - target.prompt_s
    decider.begin(request, course.clock.now_s - first_s, first_s, course.process.loaded)
    records = [step.record for step in steps if step.record is not None]
    decider.end(request.tokens)
    assert history == list(range(prompt + request.tokens)), "drafting changes no text"
    return records, course
