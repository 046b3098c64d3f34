"""How far to draft, round by round."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from edgespec.decoding.contracts import RoundRecord

# Until a machine is calibrated: time this many plain rounds, then this many speculative ones, keep the faster,
# and try again after so many tokens, each time so many times later. Eight plain rounds give a median that one
# stall cannot move; four speculative ones cost at most about four plain rounds if drafting turns out useless.
PLAIN_ROUNDS = 8
TRIAL_ROUNDS = 4
FIRST_RETRY_TOKENS = 64
RETRY_FACTOR = 4

# Rounds remembered while a source is on; long enough to average over a paragraph, short enough to notice that
# the text has changed its kind.
_WINDOW_ROUNDS = 16

# A round this many times longer than the median of its kind was interrupted (a stall, a suspend) and counts as
# no more than that. A single one counts as the median, so that one bad sample cannot flip a decision.
_STALL_FACTOR = 3.0


# Why nothing is drafted while plain decoding is being timed.
TIMING_PLAIN = "plain speed is being timed first"


class FixedDepth:
    """The same depth in every round, because someone asked for it."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def depth(self, source: str) -> int:
        return self._depth

    def record(self, record: RoundRecord) -> None:
        """Learns nothing."""

    def why_off(self, source: str) -> str | None:
        return "depth 0 was asked for" if self._depth == 0 else None


@dataclass(slots=True)
class _Samples:
    """Recent (emitted tokens, seconds) of rounds of one kind."""

    rounds: deque[tuple[int, float]]

    def add(self, emitted: int, seconds: float) -> None:
        if seconds > 0:
            self.rounds.append((emitted, seconds))

    @property
    def tokens_per_s(self) -> float | None:
        if not self.rounds:
            return None
        times = sorted(seconds for _, seconds in self.rounds)
        typical = statistics.median(times)
        ceiling = _STALL_FACTOR * typical
        if times[-1] > ceiling:
            times[-1] = typical
        return sum(n for n, _ in self.rounds) / sum(min(seconds, ceiling) for seconds in times)


@dataclass(slots=True)
class _Trial:
    """What is known of one source: ``resting_tokens`` are left until it may be tried again."""

    samples: _Samples = field(default_factory=lambda: _Samples(deque(maxlen=_WINDOW_ROUNDS)))
    kept: bool = False
    resting_tokens: int = 0
    rest_tokens: int = FIRST_RETRY_TOKENS
    measured_ratio: float | None = None


class TrialPolicy:
    """Tries each source against plain decoding and keeps it only while it is measured to be faster.

    Safe to share between sessions: what one answer learned spares the next one the trial.
    """

    def __init__(self, depth_cap: int, sources: Iterable[str]) -> None:
        self._depth_cap = depth_cap
        self._lock = threading.Lock()
        self._plain = _Samples(deque(maxlen=_WINDOW_ROUNDS))
        self._plain_before: float | None = None  # what was measured before the timing under way
        self._trials = {source: _Trial() for source in sources}
        # While a source is kept there are no plain rounds, and the machine may have changed its speed: so plain
        # decoding is timed again after so many tokens, each time so many times later.
        self._retime_tokens = FIRST_RETRY_TOKENS
        self._tokens_since_timed = 0

    @property
    def plain_tokens_per_s(self) -> float | None:
        """Measured over the latest plain rounds; None before any."""
        with self._lock:
            return self._plain.tokens_per_s or self._plain_before

    def depth(self, source: str) -> int:
        with self._lock:
            trial = self._trials.get(source)
            if trial is None or len(self._plain.rounds) < PLAIN_ROUNDS or trial.resting_tokens > 0:
                return 0
            return self._depth_cap

    def record(self, record: RoundRecord) -> None:
        with self._lock:
            for trial in self._trials.values():
                trial.resting_tokens = max(0, trial.resting_tokens - record.emitted)
            self._retime_plain(record)
            if record.source is None:
                self._plain.add(record.emitted, record.round_s)
            elif (trial_of := self._trials.get(record.source)) is not None:
                # Catching up with the text is paid once, not every round: it says nothing about the steady state.
                trial_of.samples.add(record.emitted, record.round_s - record.sync_s)
                self._judge(trial_of)

    def _retime_plain(self, record: RoundRecord) -> None:
        if record.source is None or not any(trial.kept for trial in self._trials.values()):
            return
        self._tokens_since_timed += record.emitted
        if self._tokens_since_timed >= self._retime_tokens:
            self._plain_before = self._plain.tokens_per_s or self._plain_before
            self._plain.rounds.clear()
            self._tokens_since_timed = 0
            self._retime_tokens *= RETRY_FACTOR

    def _judge(self, trial: _Trial) -> None:
        speculative, plain = trial.samples.tokens_per_s, self._plain.tokens_per_s
        if len(trial.samples.rounds) < TRIAL_ROUNDS or speculative is None or plain is None:
            return
        trial.measured_ratio = speculative / plain
        if trial.measured_ratio >= 1:
            if not trial.kept:
                trial.kept, trial.rest_tokens = True, FIRST_RETRY_TOKENS
            return
        trial.kept = False
        trial.samples.rounds.clear()
        trial.resting_tokens = trial.rest_tokens
        trial.rest_tokens *= RETRY_FACTOR

    def why_off(self, source: str) -> str | None:
        with self._lock:
            trial = self._trials.get(source)
            if trial is None:
                return None
            if trial.resting_tokens > 0:
                return f"{source} drafting measured {trial.measured_ratio:.2f}x plain"
            return TIMING_PLAIN if len(self._plain.rounds) < PLAIN_ROUNDS else None
