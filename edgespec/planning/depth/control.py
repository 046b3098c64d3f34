"""One place for depth: whether a round drafts, how far, after how much reading, and what that may cost.

``DepthControl`` is what an engine knows: T(w) now, the drafter's price, how often each source is right, whether
drafting paid in recent answers and how long they were. ``AnswerDepth`` decides for one answer, round by round. Three
rules, each with one number:

- The ledger. An answer that ended now would have taken at most 1 + RISK times as long as plain decoding: whatever is
  done may lose no more than what that leaves.
- The purchase. Loading the drafter and reading the text are bought together, when they are expected to be earned
  back (planning/depth/purchase.py).
- Trust. Each drafted round adds what it saved, in plain steps, and takes away what it lost. Below zero drafting
  rests; it never rises above MOST_TRUST, so that a text that changes costs at most that (CUSUM: Page, 1954).
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgespec.interfaces.policy import Allowance, RoundRecord
from edgespec.planning.cost.acceptance import NO_PRIOR, Acceptance, AcceptancePrior
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, DraftCost, best_possible, drafting_speedup
from edgespec.planning.cost.live_times import LiveTimes
from edgespec.planning.cost.margins import DRAFT_MARGIN
from edgespec.planning.depth.base import OFF
from edgespec.planning.depth.chain_gate import PricedGate
from edgespec.planning.depth.purchase import Ledger, Lengths, Offer, worth_buying

# Plain steps that a trial may lose before drafting rests; the same where drafting has hardly paid of late; and the
# most that a change of text may cost. Simulated: with the long trial alone 2 of 16 texts of code after twenty
# translations were drafted late or never, with the short one alone code brought 2.5 tokens a round in place of 2.9.
# Between 4 and 10 steps of trust nothing changes.
TRIAL, SHORT_TRIAL = 2.0, 0.6
MOST_TRUST = 6.0

# Plain tokens before another trial in the same answer, doubled by each one that failed, and the chance that it finds
# another text than the last: one passage in five or so.
FIRST_REST = 48
CHANGED = 0.2

# Before anything is known of a pair: drafting pays in three answers of five, and there as much as at an acceptance of
# 0.75 (shared/research: coding 0.91, translation 0.45).
PAYS = 0.6
GOOD_RATE = 0.75

# What older answers count for beside the next: twenty or so. Untried ones fade half as fast, so that it is tried
# again. What is known before any answer counts for one.
_ANSWER_DECAY = 0.95
_UNTRIED_DECAY = 0.975
_BROAD = 1.0

# An answer says all that it can about whether drafting pays after so many drafted rounds.
_ENOUGH_ROUNDS = 6

# Tokens of earlier answers that count at the start of one: how often the drafter is right depends on the text. What
# its confidences are worth is its own, and stays.
FADED = 2.0

# The least and the most tokens read before drafting begins. The rest is read when it takes no more than this share of
# what was saved in this answer, and is taken to bring so much more.
LEAST_READ, MOST_READ = 16, 256
READ_REST_SHARE = 0.25
READ_REST_GAIN = 0.05

# Loading takes longer than last time where its file has to come from the disk again.
LOAD_MARGIN = 1.25

# Reading that takes so much longer than it was bought for is left off: somebody else has begun to compute.
PATIENCE = 1.25

# Plain decoding is timed in one round of so many, and when the pace has changed by so much.
PLAIN_EVERY = 64
PLAIN_AGAIN, MOVED = 4, 1.25

_RATE_DECAY = 0.95
_RECENT_DRAFTS = 5


@dataclass(slots=True)
class Experience:
    """What recent answers taught, for one way of sampling. Everything is in plain steps.

    ``usual`` is what drafting saves of each token where it pays. Faded sums over answers: how many, their tokens
    after drafting was bought, what was saved where it paid and lost where it did not.
    """

    usual: float
    answers: float = 0.0
    tokens: float = 0.0
    saved: float = 0.0
    lost: float = 0.0
    sources: dict[str, Acceptance] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """What drafting is expected to save of each token of the next answer; where it does not pay it stops."""
        broad = _BROAD * (self.tokens / self.answers if self.answers else 1.0)
        return (self.saved + broad * PAYS * self.usual) / (self.tokens + broad)

    @property
    def trial(self) -> float:
        """What finding out that it does not pay is expected to lose."""
        return (self.lost + _BROAD * (1.0 - PAYS) * TRIAL) / (self.answers + _BROAD)

    def learn(self, saved: float, tokens: int, rounds: int) -> None:
        """An answer ended: its drafted ``rounds`` saved so many steps, in ``tokens`` since drafting was bought."""
        decay = _ANSWER_DECAY if rounds else _UNTRIED_DECAY
        weight = min(1.0, rounds / _ENOUGH_ROUNDS)
        self.answers = decay * self.answers + weight
        self.tokens = decay * self.tokens + weight * max(1, tokens)
        self.saved = decay * self.saved + max(0.0, saved)
        self.lost = decay * self.lost + max(0.0, -saved)


class DepthControl:
    """What the answers of one engine share. Thread-safe where ``AnswerDepth`` holds ``lock``."""

    def __init__(
        self, costs: Costs, depth_cap: int, priors: Mapping[str, AcceptancePrior] | None = None, load_s: float = 0.0
    ) -> None:
        assert costs.curves is not None  # an uncalibrated machine gets priors (data with their source)
        self.lock = threading.RLock()
        self.depth_cap = depth_cap
        self.times = LiveTimes(costs.curves, depth_cap + 1)
        self.costs = costs.drafts
        self.load_s = load_s
        self.missed_s = 0.0  # what a drafter that was not loaded would have saved so far
        self.lengths = Lengths()
        self._slow: deque[float] = deque(maxlen=_RECENT_DRAFTS)
        self._slow_reading: deque[float] = deque(maxlen=_RECENT_DRAFTS)
        self._priors = dict(priors or {})
        self._modes: dict[str, Experience] = {}
        curve, model = costs.curves.curves[0], self.costs.get("model")
        cap = depth_cap
        hopeless = model is None or best_possible(curve, model, cap).speedup <= DRAFT_MARGIN
        self.hopeless = hopeless or cap < 1
        usual = 1.0 if model is None or not cap else drafting_speedup(curve, model, (GOOD_RATE,) * cap)
        self._usual_gain = max(0.0, 1.0 - 1.0 / usual)

    def experience(self, mode: str) -> Experience:
        if mode not in self._modes:
            sources = {name: Acceptance(self._priors.get(name, NO_PRIOR)) for name in self.costs}
            self._modes[mode] = Experience(usual=self._usual_gain, sources=sources)
        return self._modes[mode]

    def price(self, source: str) -> DraftCost | None:
        """What drafting costs now."""
        cost = self.costs.get(source)
        if cost is None or cost == FREE:
            return cost
        pace = max(self.times.factor, self.times.latest)
        token = pace * (statistics.median(self._slow) if self._slow else 1.0)
        reading = pace * statistics.median(self._slow_reading) if self._slow_reading else token
        return DraftCost(token_s=token * cost.token_s, lag_token_s=reading * cost.lag_token_s)

    def learn_price(self, record: RoundRecord, load_s: float, read: int) -> None:
        """How many times longer drafting takes than it was calibrated to, at the pace of the target's own forward."""
        cost, pace = self.costs.get("model"), self.times.latest
        if cost is None or not record.draft_forwards:  # reading that was left off says how much it read to nobody
            return
        forwards = record.draft_forwards - (record.sync_s > 0)
        if forwards > 0:
            drafted_s = record.draft_s - record.sync_s - load_s
            self._slow.append(_plausible(drafted_s / (pace * forwards * cost.token_s)))
        if record.sync_s > 0 and read >= LEAST_READ and cost.lag_token_s > 0:
            usual_s = pace * (cost.token_s + read * cost.lag_token_s)
            self._slow_reading.append(_plausible(record.sync_s / usual_s))

    def answer(
        self, *, prompt_tokens: int, most: int | None, prompt_s: float, first_s: float, mode: str = "greedy"
    ) -> AnswerDepth:
        """An answer whose prompt took ``prompt_s`` and whose first token came with a plain forward of ``first_s``."""
        return AnswerDepth(self, prompt_tokens, most, prompt_s, first_s, mode)


class AnswerDepth:
    """Decides for one answer. ``window``: how many of the text's last tokens the drafter has to have read (None: all
    of them). ``patience_s``: how long reading may take for the latest allowance, before it is left off and nothing is
    drafted. ``probing``: whether that is a trial."""

    def __init__(
        self,
        control: DepthControl,
        prompt_tokens: int,
        most: int | None,
        prompt_s: float,
        first_s: float,
        mode: str,
    ) -> None:
        self._control = control
        self._experience = control.experience(mode)
        self._most = most
        self._done = 1
        self._context = prompt_tokens + 1
        self._on = False
        self._trust = 0.0
        self._tries = 0
        self._next_look = 0
        self._rest = FIRST_REST
        self._drafted_rounds = 0
        self._saved = 0.0  # by drafted rounds, in plain steps
        self._bought_at = 0
        self._rate_tokens = self._rate_s = 0.0
        self._load_s = 0.0  # of the round under way
        self._read = 0
        self.window: int | None = None
        self.patience_s = 0.0
        self._windowed = False
        control.times.record(1, prompt_tokens, first_s)
        self.ledger = Ledger(prompt_s + first_s, prompt_s + first_s)
        self._now = control.times.all_now(self._context)
        for acceptance in self._experience.sources.values():
            acceptance.fade(FADED)

    @property
    def probing(self) -> bool:
        return self._on and self._trust < TRIAL and self._tries > 1

    # ---------------------------------------------------------------------------------------- deciding

    def allow(self, source: str, lag: int = 0) -> Allowance:
        control = self._control
        with control.lock:
            cost, known = control.price(source), self._experience.sources.get(source)
            if cost is None or known is None or (cost != FREE and control.hopeless):
                return OFF
            since = control.times.since_plain
            if since >= PLAIN_EVERY or (since >= PLAIN_AGAIN and control.times.moved > MOVED):
                return OFF
            if cost != FREE and not self._on and not self._buys(cost, lag):
                return OFF
            if cost != FREE and self._windowed and self.window is not None:
                self._read_rest(cost)
            read = lag if self.window is None else min(lag, self.window)
            depth = self._affordable(cost, read)
            if depth < 1:
                return OFF
            self._read, self.patience_s = read, PATIENCE * read * cost.lag_token_s
            return Allowance(depth, PricedGate(self._now, cost.token_s, known, depth, self._going_rate()))

    def _affordable(self, cost: DraftCost, read: int) -> int:
        """The deepest draft whose every token may be wrong without the answer losing more than it may."""
        room_s, now = self.ledger.room_s - read * cost.lag_token_s, self._now
        depth = self._control.depth_cap
        while depth and depth * cost.token_s + now[depth] - now[0] > room_s:
            depth -= 1
        return depth

    def _buys(self, cost: DraftCost, lag: int) -> bool:
        """Whether drafting begins now, or again. Sets the window to read."""
        if self._done < self._next_look:
            return False
        control, known, step_s = self._control, self._experience, self._now[0]
        gain = known.gain if not self._tries else min(known.gain, CHANGED * PAYS * known.usual)
        trust = TRIAL if gain > 0.5 * PAYS * known.usual else SHORT_TRIAL
        trial = min(trust, known.trial) if not self._tries else trust
        load_s = LOAD_MARGIN * control.load_s * max(1.0, control.times.factor, control.times.latest)
        longer = control.lengths.longer_than(self._done, self._most)
        before = self.ledger.plain_s / step_s - self._done
        for read in _readings(lag):
            reading_s = read * cost.lag_token_s
            if load_s + reading_s + cost.token_s + self._now[1] - step_s > self.ledger.room_s:
                continue
            price_s = max(0.0, load_s - control.missed_s) + reading_s
            offer = Offer(price_s=price_s, gain_s=gain * step_s, trial_s=trial * step_s)
            if worth_buying(offer, self._done, self._most, longer, before):
                self._begin(read, lag, trust)
                return True
        self._next_look = self._done + max(2, self._done // 16)
        return False

    def _begin(self, read: int, lag: int, trust: float) -> None:
        self._on, self._tries, self._trust = True, self._tries + 1, trust
        if self._tries == 1:
            self._bought_at = self._done
        if read < lag:
            self.window, self._windowed = read, True

    def _read_rest(self, cost: DraftCost) -> None:
        """Read the whole text where what was saved pays for it several times over."""
        price_s, saved_s = self._context * cost.lag_token_s, self.ledger.saved_s
        if price_s > READ_REST_SHARE * saved_s:
            return
        longer = self._control.lengths.longer_than(self._done, self._most)
        rest = statistics.fmean(longer) - self._done if longer else self._done
        if self._most is not None:
            rest = min(rest, self._most - self._done)
        if rest * READ_REST_GAIN * self._now[0] > price_s:
            self.window, self._windowed = None, False

    def _going_rate(self) -> float:
        plain = 1.0 / self._now[0]
        return max(plain, self._rate_tokens / self._rate_s) if self._rate_s else plain

    # ---------------------------------------------------------------------------------------- learning

    def learn(self, source: str, confidences: Sequence[float], hits: Sequence[bool]) -> None:
        with self._control.lock:
            self._experience.sources[source].learn(confidences, hits)

    def loaded(self, seconds: float) -> None:
        """The drafter was loaded in the round under way, which took so long."""
        self._load_s = seconds
        self._control.load_s = self._control.missed_s = 0.0

    def record(self, record: RoundRecord) -> None:
        control = self._control
        with control.lock:
            shown = control.times.record(record.width, record.context_length, record.verify_s)
            if shown is None:
                return
            usual_s = control.times.usual_s(1, record.context_length)
            # A stall is nothing that plain decoding would have been spared.
            plain_s = record.emitted * usual_s * min(shown, MOVED * control.times.factor)
            self.ledger.plain_s += plain_s
            self.ledger.spent_s += record.round_s
            self._done += record.emitted
            self._context += record.emitted
            self._now = control.times.all_now(self._context)
            # What was read was bought; the forward that read it drafted the first token as well.
            drafter = control.price("model")
            read_s = 0.0 if drafter is None else max(0.0, record.sync_s - drafter.token_s)
            working_s = record.round_s - read_s - self._load_s
            self._rate_tokens = _RATE_DECAY * self._rate_tokens + record.emitted
            self._rate_s = _RATE_DECAY * self._rate_s + working_s
            if record.source == "model":
                control.learn_price(record, self._load_s, self._read)
                self._judge(plain_s, working_s, record.emitted)
            elif control.load_s and not control.hopeless:
                control.missed_s += self._experience.gain * plain_s
            self._load_s = 0.0

    def _judge(self, plain_s: float, working_s: float, emitted: int) -> None:
        """What a drafted round came to."""
        self._drafted_rounds += 1
        saved = (plain_s - working_s) * emitted / plain_s
        self._saved += saved
        self._trust = min(MOST_TRUST, self._trust + saved)
        if self._trust >= MOST_TRUST:
            self._rest = FIRST_REST
        if self._trust < 0.0:
            self._on = False
            self._next_look = self._done + self._rest
            self._rest *= 2

    def end(self) -> None:
        """The answer is complete."""
        with self._control.lock:
            self._control.lengths.add(self._done)
            self._experience.learn(self._saved, self._done - self._bought_at, self._drafted_rounds)


def _readings(lag: int) -> list[int]:
    """How many tokens may be read before drafting begins, most first."""
    sizes = [MOST_READ]
    while sizes[-1] > LEAST_READ:
        sizes.append(sizes[-1] // 2)
    return sorted({min(lag, size) for size in sizes}, reverse=True)


def _plausible(slowness: float) -> float:
    """Of one draft: within what a drafter can be wrong by, whatever a clock says."""
    return min(50.0, max(0.02, slowness))
