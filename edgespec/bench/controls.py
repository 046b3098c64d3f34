"""Drafters that know the answer: the oracle says it, the worst never does, and one takes its time.

They bound what any drafter can do.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

from edgespec.errors import CancelledError
from edgespec.interfaces.drafting import NOTHING, ChainGate, Context, DraftRequest, Outcome, Proposal


class Script:
    """The tokens of a prompt and its plain answer, exchanged from prompt to prompt."""

    def __init__(self) -> None:
        self.tokens: Sequence[int] = ()


class ReplayDrafter:
    """Proposes what the script says next; with ``wrong``, always something else. It costs nothing to ask."""

    def __init__(self, script: Script, *, wrong: bool = False) -> None:
        self._script = script
        self._wrong = wrong

    @property
    def kind(self) -> str:
        return "worst" if self._wrong else "oracle"

    def start(self, request: DraftRequest) -> ReplayState:
        return ReplayState(self._script, request.vocabulary_size, self.kind, wrong=self._wrong)

    def close(self) -> None:
        """Holds nothing."""


class ReplayState:
    """One session's replay."""

    free = True

    def __init__(self, script: Script, vocabulary_size: int, kind: str, *, wrong: bool) -> None:
        self._script, self._vocabulary_size, self._kind, self._wrong = script, vocabulary_size, kind, wrong

    def lag(self, context: Context) -> int:
        return 0

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        tokens = list(self._script.tokens[len(context) : len(context) + depth])
        if self._wrong:
            # Past the end of the answer there is something wrong to say as well.
            tokens += [0] * (depth - len(tokens))
            tokens = [(token + 1) % self._vocabulary_size for token in tokens]
        if not tokens:
            return NOTHING
        return Proposal(tokens=tuple(tokens), sources=(self._kind,) * len(tokens), drafted_by=self._kind)

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""

    def cancel(self) -> None:
        """A proposal takes microseconds."""

    def reset_cancel(self) -> None:
        """See ``cancel``."""

    def close(self) -> None:
        """Holds nothing."""


class SleepingDrafter:
    """Knows the answer, is right as often as told, and takes its time without using the machine.

    It stands for a drafter on a device of its own: each token is ready ``token_s`` seconds after the one before, by
    the ``clock``, and nothing is computed meanwhile. Whether it is right at a place depends on the place and the
    ``seed`` alone: with probability ``acceptance``.
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
        """Whether it says the right token at that place of the text."""
        return random.Random(f"{self._seed} {place}").random() < self._acceptance

    def start(self, request: DraftRequest) -> SleepingState:
        return SleepingState(self, self._script, request.vocabulary_size, self._token_s, self._clock)

    def close(self) -> None:
        """Holds nothing."""


class SleepingState:
    """One session's."""

    free = False

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

    def lag(self, context: Context) -> int:
        return 0

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        tokens: list[int] = []
        ready = self._clock()
        while len(tokens) < depth and len(context) + len(tokens) < len(self._script.tokens):
            ready += self._token_s  # a deadline, so that waking late once does not make the rest later
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

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""

    def cancel(self) -> None:
        self._cancelled.set()

    def reset_cancel(self) -> None:
        self._cancelled.clear()

    def close(self) -> None:
        """Holds nothing."""
