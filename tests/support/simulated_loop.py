"""The requests of tests/support/simulated_clock.py served by the real loop and the real combination of drafters.

The right token at every position is the position itself, so no weights are needed. Several times as slow as
``serve``, which must run the same rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.decoding.round_base import LoopLimits
from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import CombinationState
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import NOTHING, ChainGate, DraftState, Proposal
from edgespec.interfaces.model import ALONE, Company
from edgespec.interfaces.policy import RoundRecord
from edgespec.interfaces.reasons import Reason
from tests.support.drawn_requests import Request, World
from tests.support.simulated_clock import Course, Decider, Drafted, Process
from tests.support.simulated_decoding import WRONG, Truth


class _Target:
    context_length = 10**9

    def __init__(self, course: Course) -> None:
        self._course = course
        self.length = 0

    def forward(self, tokens: Sequence[int], rows: int) -> Truth:
        course, prompt = self._course, self._course.request.prompt_tokens
        if rows:
            course.forward(len(tokens), self.length + 1 - prompt)
        else:
            course.read_chunk(self.length, self.length + len(tokens))
        self.length += len(tokens)
        return Truth(self.length - rows + 1, rows)

    def rewind(self, length: int) -> None:
        self.length = length


class _Drafter(DraftState):
    """A drafter with the course's accuracy."""

    free = False

    def __init__(self, course: Course, *, free: bool) -> None:
        self._course, self.free = course, free
        self._asked_at = 0
        self._kind = "lookup" if free else "model"

    @property
    def ready(self) -> bool:
        return self.free or self._course.process.loaded

    def load(self) -> None:
        self._course.load(self._asked_at)

    def _place(self, context: Context) -> int:
        return len(context) - self._course.request.prompt_tokens

    def lag(self, context: Context) -> int:
        self._asked_at = self._place(context)
        return 0 if self.free else self._course.lag(self._asked_at)

    def unread(self, context: Context) -> int:
        return 0 if self.free else self._course.unread(self._place(context))

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        course, place = self._course, self._place(context)
        drafted: Drafted | None
        if self.free:
            drafted = course.copy(place, depth)
            if drafted is None:
                return NOTHING
        else:
            drafted = course.draft(place, depth, gate, context.window, context.patience_s, context.hindsight)
        tokens = [len(context) + index if hit else WRONG for index, hit in enumerate(drafted.right)]
        return Proposal(
            tokens=tuple(tokens),
            sources=(self._kind,) * len(tokens),
            drafted_by=self._kind,
            sync_s=drafted.sync_s,
            forwards=drafted.forwards,
            confidences=tuple(drafted.sure),
            hindsight=tuple(drafted.hindsight),
        )


class _Answer:
    """The decider as the loop and the combination use it."""

    def __init__(self, decider: Decider, request: Request) -> None:
        self._decider, self._request = decider, request
        self.allow, self.buys_load, self.learn = decider.allow, decider.buys_load, decider.learn
        self.learn_hindsight, self.record, self.end = decider.learn_hindsight, decider.record, decider.end
        self.prefers, self.allow_free = decider.prefers, decider.allow_free

    def began(self, prompt_s: float, first_s: float, company: Company = ALONE) -> None:
        self._decider.begin(self._request, prompt_s, first_s)

    def learn_alternatives(self, source: str, odds: Sequence[float], hits: Sequence[bool]) -> None: ...

    def why_off(self, source: str) -> Reason | None:
        return None


def serve_by_loop(
    world: World, decider: Decider, request: Request, process: Process | None = None
) -> tuple[list[RoundRecord], Course]:
    """Serve one request by the real loop; returns its rounds' records and its course with the clock."""
    course = Course(world, request, process or Process())
    answer: Any = _Answer(decider, request)
    parts: Any = [
        ("lookup", _Drafter(course, free=True)),
        ("model", _Drafter(course, free=False)),
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
        CombinationState(parts, answer),
        answer,
        Chooser(Sampling()),
        history,
        limits,
        clock=course.clock.read,
    )
    records = [step.record for step in loop.steps() if step.record is not None]
    answer.end()
    assert history == list(range(prompt + request.tokens)), "drafting changes no text"
    return records, course
