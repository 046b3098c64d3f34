"""What an engine knows for the depths of all its answers.

Current T(w), the drafter's cost, how often each source is right, whether drafting paid in recent answers, and answer
lengths.
"""

from __future__ import annotations

import statistics
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from edgespec.interfaces.drafting import MODEL
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.acceptance import NO_PRIOR, Acceptance, AcceptancePrior
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, Curve, DraftCost
from edgespec.planning.cost.live_times import LiveTimes, PlainTimes
from edgespec.planning.cost.margins import DRAFT_MARGIN
from edgespec.planning.depth.experience import GOOD_RATE, NO_HISTORY, SAMPLED, Experience, History, Lengths
from edgespec.planning.depth.load import Load, drafting_price
from edgespec.planning.depth.price import LEAST_READ, drafting_slowness, pair_speedup

Priors = Mapping[str, AcceptancePrior]

_RECENT_DRAFTS = 5

# Until answers have confirmed the measured times, a drafter may be this many times as fast as they say.
_DOUBTED = 2.0


class Running(Protocol):
    """An answer, as the others see it."""

    @property
    def may_draft(self) -> bool:
        """Whether its drafting model drafts, or has not been found to be useless for it."""

    @property
    def drafts_soon(self) -> bool:
        """The same of an answer that drafts, or has only begun."""


class DepthState:
    """State shared by the answers of one engine. ``priors`` are keyed by source (if sampled: source + SAMPLED)."""

    def __init__(
        self,
        costs: Costs,
        depth_cap: int,
        priors: Priors | None = None,
        history: History | None = None,
        *,
        pipelined: bool = False,
    ) -> None:
        history = history or NO_HISTORY
        self.lock = threading.RLock()
        self.plain = PlainTimes()
        self.lengths = Lengths(history.lengths)
        self.load = Load()  # of the latest round
        self.running = weakref.WeakSet[Running]()  # the answers that have begun and not ended
        self.missed_s = 0.0  # what a drafter that was not loaded would have saved so far
        self.modes = {False: Experience(*history.greedy), True: Experience(*history.sampled)}  # keyed by ``sampled``
        self._priors: dict[str, AcceptancePrior] = {}
        self.replan(costs, depth_cap, priors, pipelined=pipelined)

    def replan(self, costs: Costs, depth_cap: int, priors: Priors | None = None, *, pipelined: bool = False) -> None:
        """Use new measurements for later answers. What was learned stays; ``priors`` fill in where nothing was."""
        with self.lock:
            self.costs, self.depth_cap, self.load_s = costs, depth_cap, costs.load_s
            self.model = costs.model or MODEL  # the drafting model's source
            self.pipelined = (costs.contention or Contention()) if pipelined else None
            self.times = None if costs.curves is None else LiveTimes(costs.curves, depth_cap + 1)
            for name, prior in (priors or {}).items():
                known, source = self.modes[name.endswith(SAMPLED)].sources, name.removesuffix(SAMPLED)
                if source not in known or not known[source].seen:
                    known.pop(source, None)
                    self._priors[name] = prior
            self._slow: deque[float] = deque(maxlen=_RECENT_DRAFTS)
            self._slow_reading: deque[float] = deque(maxlen=_RECENT_DRAFTS)
            self.possible = self.speedup(1.0)
            # The share of a token's time that drafting saves while it is useful, from measured times.
            self.good_gain = max(0.0, 1.0 - 1.0 / (self.speedup(GOOD_RATE) or 1.0))
            best = self._speedup(1.0, self.pipelined, faster=1.0 if costs.checked else _DOUBTED)
            self.hopeless = best <= DRAFT_MARGIN

    def speedup(
        self,
        rate: float,
        forward_s: Sequence[float] = (),
        others: float = 0.0,
        drafting: float = 0.0,
        context_length: int = 0,
    ) -> float:
        """Speed-up over plain if each token of the drafting model is accepted with probability ``rate``.

        ``forward_s``: T(1), T(2), ... at the pace of calibration after that context, if not as calibrated. Drafting
        delays ``others`` more answers, of which ``drafting`` draft as well.
        """
        return self._speedup(rate, self.pipelined, forward_s, others, drafting, context_length)

    def serial_speedup(self, rate: float) -> float:
        """The same in the serial mode, whatever the plan's mode."""
        return self._speedup(rate, None)

    def _speedup(
        self,
        rate: float,
        both: Contention | None,
        forward_s: Sequence[float] = (),
        others: float = 0.0,
        drafting: float = 0.0,
        context_length: int = 0,
        faster: float = 1.0,
    ) -> float:
        model, cap = self.costs.model_cost, self.depth_cap
        if model is None or self.costs.curves is None or cap < 1:
            return 0.0
        curve = self.costs.curves.curves[0]
        if forward_s:
            curve = Curve(widths=tuple(range(1, len(forward_s) + 1)), forward_s=tuple(forward_s))
        slow = statistics.median(self._slow) if self._slow else 1.0
        model = drafting_price(model.at(context_length).scaled(slow / faster), others, drafting)
        return pair_speedup(curve, model, rate, cap, both)

    def known(self, source: str, *, sampled: bool) -> Acceptance:
        """What is known of a source's acceptance, in sampled or in greedy answers."""
        return self.modes[sampled].acceptance(source, self._priors, sampled=sampled)

    def priors(self) -> dict[str, AcceptancePrior]:
        """What was learned about each source's acceptance, for the next process."""
        with self.lock:
            learned = dict(self._priors)
            for sampled, experience in self.modes.items():
                for source, acceptance in experience.sources.items():
                    if acceptance.seen and acceptance.as_prior() != NO_PRIOR:
                        learned[source + SAMPLED if sampled else source] = acceptance.as_prior()
            return learned

    def history(self) -> History:
        """What was learned about answer lengths and savings, for the next process."""
        with self.lock:
            lengths = tuple(self.lengths.known)
            return History(lengths=lengths, greedy=self.modes[False].sums, sampled=self.modes[True].sums)

    def price(self, source: str, times: LiveTimes, context_length: int) -> DraftCost | None:
        """Current cost of drafting with ``source`` after that many tokens; None if it was not measured."""
        cost = self.costs.drafts.get(source)
        if cost is None or cost == FREE:
            return cost
        cost = cost.at(context_length)
        slower = max(times.factor, times.latest)
        token = slower * statistics.median((1.0, *self._slow))
        reading = slower * statistics.median(self._slow_reading) if self._slow_reading else token
        return replace(cost.scaled(token), round_s=0.0, lag_token_s=reading * cost.lag_token_s)

    def forget_slowness(self) -> None:
        """Drop measured drafter slowness: its cause may be over, and the next draft measures it again."""
        self._slow.clear()
        self._slow_reading.clear()

    def learn_price(self, record: RoundRecord, slower: float, read: int, asked: int = 0) -> float | None:
        """Learn how many times longer drafting takes than calibrated while the target takes ``slower`` times as long.

        ``asked`` is how many tokens a one-pass drafter drafted. Returns None for a round without a timed draft.
        """
        cost = self.costs.model_cost
        if cost is None or cost == FREE or not record.draft_forwards:
            return None  # a read that was stopped early does not report how many tokens it read
        reading, drafting = drafting_slowness(cost.at(record.context_length), record, slower, read, asked)
        if reading is not None and read >= LEAST_READ:
            self._slow_reading.append(reading)
        self._slow.append(drafting)
        return drafting
