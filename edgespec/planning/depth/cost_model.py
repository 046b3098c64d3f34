"""The default depth policy: draft what earns the most tokens a second, by measured times and observed acceptance.

Depth 0 always competes. Times come from calibration and are corrected by every round; acceptance is learned by
position and by confidence. A drafter that does not pay is parked, and looked at again out of a small budget of time
and a part of what drafting has saved.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgespec.interfaces.drafting import ChainGate
from edgespec.interfaces.policy import Allowance, RoundRecord
from edgespec.planning.cost.acceptance import (
    DECAY,
    NO_PRIOR,
    PRIOR_STRENGTH,
    Acceptance,
    AcceptancePrior,
    SiblingOdds,
    choose_siblings,
)
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, Curve, DraftCost, best_possible, drafting_speedup
from edgespec.planning.cost.live_curve import IMPLAUSIBLE_FACTOR
from edgespec.planning.cost.margins import DRAFT_MARGIN
from edgespec.planning.depth.base import OFF, TimedPolicy

# Share of the decoding time that may be spent on looking again at drafters believed not to pay; beside it stands the
# promise of at least 0.97 of plain speed.
PROBE_SHARE = 0.01

# Share of the time that drafting has saved which may go the same way, and the most that is kept of it, in plain
# forwards. A drafter at 0.4 of the target's size reads a token in 0.03 of the target's step: more than PROBE_SHARE of
# the time, so that one that is parked falls behind faster than that budget grows: one that never saved anything comes
# back only to a prompt that is short. Sixteen steps, the most that is kept of either budget, read 500 tokens.
SAVED_SHARE = 0.5
MOST_SAVED_STEPS = 16

# Depth of such a look: one token is the cheapest question.
PROBE_DEPTH = 1

# Rounds of one such look, as long as the budget lasts: a single token says next to nothing, and once the drafter has
# caught up with the text the next ones are cheap.
LOOK_ROUNDS = 8

# What the text before a look still counts for: no more than the look itself, or eight tokens that are right would not
# outweigh thirty that were not.
FADED = LOOK_ROUNDS

# Tokens before a parked drafter is looked at again; twice as many after each look that found nothing.
FIRST_REST_TOKENS = 64
LONGEST_REST_TOKENS = 8192

# Tokens over which turning a drafter on has to repay reading the text it missed: an ordinary chat answer.
HORIZON_TOKENS = 256

# While every round drafts, plain decoding is timed in one round of so many, so that "faster" stays measured.
PLAIN_EVERY_ROUNDS = 64

# If the rounds in between became so much slower or faster than when it was timed, nobody knows whether plain decoding
# did too: it is timed sooner then, as often as it takes to be believed over its calibration. Where the pace never
# rests, those four of 36 rounds cost a drafter that brings 1.3x 3 % of that.
CHANGED_SPEED = 1.25
PLAIN_SOONER_ROUNDS = 32
PLAIN_AGAIN_ROUNDS = 4

# Rounds over which the going rate (tokens a second that time is worth) is averaged.
_RATE_DECAY = 0.95

# Drafts whose median tells how fast a drafter is now, and how many of them its calibration counts for: the first
# three of a model that was just opened may wait for its file. At a look two drafts should do.
_RECENT_DRAFTS = 9
_CALIBRATED_DRAFTS = 4
_CALIBRATED_DRAFTS_AT_LOOK = 1


class CostGate:
    """Ends a chain where the next token costs more time than it is likely to save.

    The same weighs what may be put forward beside it, with odds that are worth ``odds_factor`` times what they say.
    """

    needs_entropy = False

    def __init__(
        self,
        curve: Curve,
        token_s: float,
        acceptance: Acceptance,
        depth_cap: int,
        tokens_per_s: float,
        odds_factor: float = 1.0,
    ) -> None:
        self._curve, self._token_s, self._acceptance = curve, token_s, acceptance
        self._depth_cap, self._tokens_per_s = depth_cap, tokens_per_s
        self._odds_factor = odds_factor
        self._survives = 1.0
        self._reach: list[float] = []  # how likely each token of the chain is to be compared at all
        self._rates = acceptance.by_position(depth_cap)

    def admits(self, confidence: float, entropy: float | None) -> bool:
        probability = self._acceptance.given(confidence)
        # The forward that told the confidence is paid already.
        if not self._worth(probability, 0.0):
            return False
        self._reach.append(self._survives)
        self._survives *= probability
        return True

    def siblings(self, odds: Sequence[Sequence[float]], most: int) -> list[tuple[int, int]]:
        believed = [[min(1.0, self._odds_factor * own) for own in place] for place in odds]
        return choose_siblings(self._curve, self._reach, believed, most, self._tokens_per_s, DRAFT_MARGIN - 1.0)

    def goes_on(self) -> bool:
        probability = self._rates[min(len(self._reach), self._depth_cap - 1)]
        return self._worth(probability, self._token_s)

    def _worth(self, probability: float, drafted_s: float) -> bool:
        """Whether the chain should grow by a token of that probability, ``drafted_s`` of drafting away.

        The rule is that of fractional programming (Dinkelbach, 1967): add what brings more tokens than its time would
        bring elsewhere. It looks ahead, because a curve may rise in steps; those further tokens are taken to be
        accepted as often as such tokens are, however sure this one is.
        """
        before_s, survives, gained = self._curve.seconds(len(self._reach) + 1), self._survives * probability, 0.0
        for depth in range(len(self._reach) + 1, self._depth_cap + 1):
            gained += survives
            price_s = self._curve.seconds(depth + 1) - before_s + drafted_s
            if gained > self._tokens_per_s * price_s + DRAFT_MARGIN - 1.0:
                return True
            survives *= self._rates[min(depth, self._depth_cap - 1)]
            drafted_s += self._token_s
        return False


class ProbeGate:
    """Lets the first token through, and notes whether it would have been put forward otherwise."""

    needs_entropy = False

    def __init__(self, usual: CostGate) -> None:
        self._usual = usual
        self.wanted: bool | None = None

    def admits(self, confidence: float, entropy: float | None) -> bool:
        self.wanted = self._usual.admits(confidence, entropy)
        return True

    def goes_on(self) -> bool:
        return False


@dataclass(slots=True)
class SourceState:
    """What a policy knows of one source of drafts."""

    acceptance: Acceptance
    siblings: SiblingOdds = field(default_factory=SiblingOdds)
    cost: DraftCost | None = None
    slowness: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_DRAFTS))
    calibrated_drafts: int = _CALIBRATED_DRAFTS
    on: bool = False
    rest_tokens: int = FIRST_REST_TOKENS
    waited_tokens: int = 0  # since it was parked or looked at
    on_tokens: int = 0  # since it was turned on
    look_rounds: int = 0  # left of a look that has begun
    look: ProbeGate | None = None
    look_s: float = 0.0  # what drafting was expected to take in it
    offered: float = PRIOR_STRENGTH  # decayed rounds in which something was put forward, of those ``asked``
    asked: float = PRIOR_STRENGTH
    expected: float = 1.0  # speed-up over plain at the latest decision
    possible: float = 1.0  # the same if everything were accepted

    def add_offer(self, offered: bool) -> None:
        """Learn how often the gate lets anything through: what it stops is never verified, yet was paid for."""
        self.offered = DECAY * self.offered + offered
        self.asked = DECAY * self.asked + 1

    def fade(self, worth: float) -> None:
        """Let what was seen of the text before count for at most ``worth`` tokens, or rounds."""
        self.acceptance.fade(worth)
        if self.asked > worth:
            self.offered, self.asked = self.offered * worth / self.asked, worth

    def cost_now(self, factor: float) -> DraftCost | None:
        """What drafting costs now: as calibrated times the target's ``factor``, until drafts say otherwise."""
        if self.cost is None or self.cost == FREE:
            return self.cost
        return self.cost.scaled(statistics.median((*(factor,) * self.calibrated_drafts, *self.slowness)))

    def go_on(self) -> None:
        """Draft because that pays."""
        if not self.on:
            self.on_tokens = 0
        self.on, self.look_rounds, self.look = True, 0, None

    def park(self) -> None:
        """Rest from now on, the shorter the longer it was on: a look that misled it should not come again soon."""
        self.rest_tokens = max(FIRST_REST_TOKENS, self.rest_tokens - self.on_tokens)
        self.on, self.waited_tokens = False, 0


class CostDepth(TimedPolicy):
    """Maximises expected committed tokens over expected seconds. Without calibration it decodes plainly."""

    def __init__(
        self,
        depth_cap: int,
        sources: Sequence[str],
        costs: Costs | None = None,
        priors: Mapping[str, AcceptancePrior] | None = None,
    ) -> None:
        super().__init__()
        self._depth_cap = depth_cap
        priors = priors or {}
        self._sources = {
            source: SourceState(acceptance=Acceptance(priors.get(source, NO_PRIOR))) for source in sources
        }
        self._credit_s = self._saved_s = 0.0
        self._rate_tokens = self._rate_s = 0.0
        self._rounds_since_plain = self._plain_due = 0
        self._plain_factor = 1.0  # the factor of all widths when plain decoding was timed
        self.calibrate(costs or Costs(), depth_cap)

    def calibrate(self, costs: Costs, depth_cap: int, priors: Mapping[str, AcceptancePrior] | None = None) -> None:
        """Take over new measurements; what was learned about acceptance stays, ``priors`` are for what was not."""
        with self._lock:
            for name, prior in (priors or {}).items():
                if name in self._sources and not self._sources[name].acceptance.proven:
                    self._sources[name].acceptance = Acceptance(prior)
            self._depth_cap = depth_cap
            self._live_curve.curves = costs.curves
            self._plain_factor, self._plain_due = 1.0, 0
            for name, source in self._sources.items():
                source.cost = costs.drafts.get(name)
                source.slowness.clear()
                source.calibrated_drafts = _CALIBRATED_DRAFTS
                source.look, source.look_rounds = None, 0

    def priors(self) -> dict[str, AcceptancePrior]:
        """What was learned about each source's acceptance."""
        with self._lock:
            return {name: source.acceptance.as_prior() for name, source in self._sources.items()}

    # ---------------------------------------------------------------------------------------- deciding

    def allow(self, source: str, lag: int = 0) -> Allowance:
        with self._lock:
            known, curve = self._sources.get(source), self._live_curve.curve()
            cost = None if known is None else known.cost_now(self._live_curve.factor)
            if known is None or known.cost is None or cost is None or curve is None or self._depth_cap < 1:
                return OFF
            if self._plain_due or self._rounds_since_plain >= PLAIN_EVERY_ROUNDS:
                return OFF
            rate, factor = self._going_rate(curve), known.siblings.worth
            gate = CostGate(curve, cost.token_s, known.acceptance, self._depth_cap, rate, factor)
            if cost == FREE:  # its gate alone decides: asking it is free, and so is knowing how often it is right
                return Allowance(self._depth_cap, gate)
            if self._pays(known, cost, curve, lag):
                known.go_on()
                return self._granted(gate)
            if known.on:
                known.park()
            return self._look_again(known, known.cost, curve, lag, gate)

    def _granted(self, gate: ChainGate) -> Allowance:
        """What a source that pays may do."""
        return Allowance(self._depth_cap, gate)

    def _pays(self, source: SourceState, cost: DraftCost, curve: Curve, lag: int) -> bool:
        rates = source.acceptance.by_position(self._depth_cap)
        source.expected = drafting_speedup(curve, cost, rates, source.offered / source.asked)
        source.possible = drafting_speedup(curve, cost, (1.0,) * self._depth_cap)
        if source.expected <= (1.0 if source.on else DRAFT_MARGIN):
            return False
        lag_s = lag * cost.lag_token_s
        if not source.acceptance.proven:
            # Nobody knows yet whether this drafter is any good for this target: finding out comes out of the budget.
            return lag_s <= self._credit_s
        return lag_s <= HORIZON_TOKENS * curve.plain_s * (1.0 - 1.0 / source.expected)

    def _look_again(
        self, source: SourceState, calibrated: DraftCost, curve: Curve, lag: int, gate: CostGate
    ) -> Allowance:
        begins = source.look_rounds == 0
        if begins and source.waited_tokens < source.rest_tokens:
            return OFF
        # What drafts took before it was parked says nothing of now: they may have waited for its file to be read.
        cost = calibrated.scaled(self._live_curve.factor)
        if best_possible(curve, cost, self._depth_cap).speedup <= DRAFT_MARGIN:
            return OFF  # not even full acceptance would pay, so there is nothing to find out
        expected = 1.0 + source.acceptance.by_position(1)[0]
        spent_s = cost.seconds(PROBE_DEPTH, lag) + curve.seconds(PROBE_DEPTH + 1)
        price_s = max(0.0, spent_s - expected * curve.plain_s)
        if price_s > self._credit_s + self._saved_s:
            source.look_rounds = 0
            return OFF
        if begins:
            source.rest_tokens = min(LONGEST_REST_TOKENS, 2 * source.rest_tokens)
            source.look_rounds = LOOK_ROUNDS
            source.fade(FADED)
            source.slowness.clear()
            source.calibrated_drafts = _CALIBRATED_DRAFTS_AT_LOOK
        from_saved_s = min(self._saved_s, price_s)
        self._saved_s -= from_saved_s
        self._credit_s -= price_s - from_saved_s
        source.look_rounds -= 1
        source.waited_tokens = 0
        source.look, source.look_s = ProbeGate(gate), cost.seconds(PROBE_DEPTH, lag)
        return Allowance(PROBE_DEPTH, source.look)

    def _going_rate(self, curve: Curve) -> float:
        """Tokens a second that a second is worth now: what recent rounds earned, never less than plain decoding."""
        plain = 1.0 / curve.plain_s
        return max(plain, self._rate_tokens / self._rate_s) if self._rate_s > 0 else plain

    # ---------------------------------------------------------------------------------------- learning

    def learn(self, source: str, confidences: Sequence[float], hits: Sequence[bool]) -> None:
        with self._lock:
            if source in self._sources:
                self._sources[source].acceptance.learn(confidences, hits)

    def learn_siblings(self, source: str, odds: Sequence[float], hits: Sequence[bool]) -> None:
        with self._lock:
            if source in self._sources:
                self._sources[source].siblings.learn(odds, hits)

    def record(self, record: RoundRecord) -> None:
        with self._lock:
            # Beside a drafter at work the target is slower, which says nothing about its own pace.
            alone = not record.overlapped
            if alone:
                plausible = self._live_curve.record(record.width, record.context_length, record.verify_s)
            else:
                plausible = True
                self._live_curve.move_to(record.context_length)
            self._note_plain(record.width == 1 and alone)
            for source in self._sources.values():
                source.waited_tokens += record.emitted
                source.on_tokens += record.emitted
            drafting = self._sources.get(record.source) if record.source is not None else None
            curve = self._live_curve.curve()
            looked = drafting is not None and drafting.look is not None
            if drafting is not None and drafting.cost is not None and drafting.cost != FREE and record.draft_forwards:
                self._learn_drafting(drafting, drafting.cost, record, curve)
            if curve is None or not plausible:
                return
            cost = None if drafting is None else drafting.cost_now(self._live_curve.factor)
            drafted_s = 0.0 if cost is None or record.overlapped else cost.seconds(record.draft_forwards)
            usual_s = curve.seconds(record.width) + drafted_s
            most_s = MOST_SAVED_STEPS * curve.plain_s
            self._credit_s = min(most_s, self._credit_s + PROBE_SHARE * usual_s)
            if drafted_s and not looked:  # a look was paid for when it was granted
                saved_s = record.emitted * curve.plain_s - usual_s
                if record.sync_s > 0:
                    saved_s -= min(most_s, record.sync_s)
                self._saved_s = min(most_s, max(0.0, self._saved_s + SAVED_SHARE * saved_s))
            self._rate_tokens = _RATE_DECAY * self._rate_tokens + record.emitted
            self._rate_s = _RATE_DECAY * self._rate_s + usual_s

    def _note_plain(self, timed: bool) -> None:
        """Whether that round timed plain decoding, and whether the next ones should."""
        if timed:
            self._rounds_since_plain, self._plain_due = 0, max(0, self._plain_due - 1)
            self._plain_factor = self._live_curve.factor
            return
        self._rounds_since_plain += 1
        changed = abs(math.log(self._live_curve.factor / self._plain_factor)) > math.log(CHANGED_SPEED)
        if changed and self._rounds_since_plain >= PLAIN_SOONER_ROUNDS:
            self._plain_due = PLAIN_AGAIN_ROUNDS

    def _learn_drafting(self, source: SourceState, cost: DraftCost, record: RoundRecord, curve: Curve | None) -> None:
        """Learn from a round how long drafts take, and whether anything came of this one."""
        look, source.look = source.look, None
        if look is not None and curve is not None and record.draft_s <= IMPLAUSIBLE_FACTOR * source.look_s:
            # What a look took longer than expected is paid for too, but not for ever.
            left_s = self._credit_s - max(0.0, record.draft_s - source.look_s)
            self._credit_s = max(left_s, -MOST_SAVED_STEPS * curve.plain_s)
        offered = record.proposed > 0 if look is None else look.wanted
        if offered is not None:
            source.add_offer(offered)
        # Catching up takes the first forward with it, so there is one fewer to compare with the usual.
        forwards = record.draft_forwards - (record.sync_s > 0)
        drafted_s = record.draft_s - record.sync_s
        if forwards > 0 and math.isfinite(drafted_s) and drafted_s > 0:
            # Hardly a draft, if so slow, and yet slow: it counts, for no more than this.
            source.slowness.append(min(IMPLAUSIBLE_FACTOR, drafted_s / cost.seconds(forwards)))

    def why_off(self, source: str) -> str | None:
        with self._lock:
            known, curve = self._sources.get(source), self._live_curve.curve()
            if known is None or self._depth_cap < 1:
                return None
            cost = known.cost_now(self._live_curve.factor)
            if curve is None or cost is None:
                return "this machine is not calibrated yet"
            if cost == FREE or known.on:
                return None
            self._pays(known, cost, curve, 0)
            if known.possible <= DRAFT_MARGIN:
                return f"{source} drafting would reach {known.possible:.2f}x plain even if every token were accepted"
            return (
                f"{source} drafting would come to {known.expected:.2f}x plain at the acceptance seen "
                f"({known.acceptance.overall:.2f})"
            )
