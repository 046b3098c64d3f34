"""The default depth policy in one answer: whether a round drafts, how deep, how much text the drafter reads first.

Round by round. Three rules, each with one number:

- The ledger. An answer that ended now would have taken at most 1 + RISK times as long as plain decoding. No action
  may lose more than the ledger still allows.
- The purchase. Loading the drafter and reading the text are done when they are expected to be earned back
  (planning/depth/price.py).
- Trust. A drafted round adds what it saved, in plain steps, and subtracts what it lost. Below zero drafting pauses.
  Trust is capped, so that a change of text costs at most the cap (CUSUM: Page, 1954).

Until answers have confirmed the measured times, one look an answer times the drafter, within the ledger.

If target and drafter run in parallel, reading and drafting cost only the mutual slowdown, no chain ends early, and a
chain has one token more: a window's forward also scores the first token of the next window.

While other answers are computed in the same steps, what drafting has to be worth counts their time too
(planning/depth/load.py). The ledger and the pauses count the answer's own time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgespec.interfaces.drafting import COPIES
from edgespec.interfaces.model import ALONE, Company
from edgespec.interfaces.policy import Allowance, RoundRecord
from edgespec.interfaces.reasons import Reason
from edgespec.planning.cost.acceptance import Acceptance
from edgespec.planning.cost.curve import FREE, DraftCost
from edgespec.planning.cost.live_times import IMPLAUSIBLE_FACTOR, SLOW, LiveTimes
from edgespec.planning.cost.margins import DRAFT_MARGIN, TREES_GAIN
from edgespec.planning.depth.base import NOT_CALIBRATED, OFF
from edgespec.planning.depth.experience import GOOD_RATE, PAYS
from edgespec.planning.depth.load import MET, SHARED_MARGIN, Load, charged, drafting_price
from edgespec.planning.depth.outcome import DEARER, LEAST_STEP_S, NEAR, ModeVerdict, Outcome, Seen
from edgespec.planning.depth.price import (
    FIRST_REST,
    HINDSIGHT,
    LEAST_READ,
    LEAST_RIGHT,
    LOOK,
    PLACES_JUDGED,
    TRIAL,
    Ledger,
    PricedGate,
    Rivals,
    Trust,
    chain_at_once,
    rate_in_hindsight,
    readings,
    worth_buying,
    worth_of,
)
from edgespec.planning.depth.state import DepthState, Running

# A round may risk this share of the ledger's room: other programs may start to compute during the round.
AT_ONCE = 0.85

# Loading takes longer than last time if the file has to be read from disk again.
LOAD_MARGIN = 1.25

# Reading stops after this factor times its expected time plus a plain step: another program has started to compute.
# The plain step covers opening the drafter's cache (up to 30 ms).
PATIENCE = 1.25

# Plain decoding is timed in one of PLAIN_EVERY rounds, or after PLAIN_AGAIN rounds once the speed changed by MOVED.
PLAIN_EVERY = 64
PLAIN_AGAIN, MOVED = 4, 1.25

# Tokens of earlier answers that count at the start of an answer: how often the drafter is right depends on the text.
# What confidences are worth depends on the drafter, and is kept.
FADED = 2.0

_RATE_DECAY = 0.95


@dataclass(frozen=True, slots=True)
class Price:
    """What drafting costs the answer itself, and with the delay of the others that share its steps."""

    own: DraftCost
    charged: DraftCost


FREE_PRICE = Price(FREE, FREE)


class AnswerDepth:
    """Decides the depth of each round of one answer."""

    def __init__(
        self,
        control: DepthState,
        times: LiveTimes,
        prompt_tokens: int,
        most: int | None,
        *,
        sampled: bool,
        hindsight: bool,
    ) -> None:
        self._control, self._times, self._sampled = control, times, sampled
        self._experience = control.modes[sampled]
        self._cap, self._pipelined, self._most = control.depth_cap, control.pipelined, most
        self._done, self._context, self._trust, self._next_look = 0, prompt_tokens, Trust(), 0
        self._rate: float | None = None  # how often the drafter would have been right recently, in hindsight
        self._hindsight = HINDSIGHT if hindsight else 0  # tokens guessed in hindsight
        self._guessed: tuple[bool, ...] = ()
        self._seen_gain = 0.0  # saved share of each token, from the hindsight guesses
        self._skipped = 0  # tokens of the text that the drafter had not read then
        self._timed = False  # whether a draft was timed since the latest purchase
        self._gain, self._drafted_rounds = 0.0, 0
        self._saved = 0.0  # by drafted rounds, in plain steps
        self._rate_tokens = self._rate_s = 0.0
        self._bought_at: int | None = None
        self._rivals = Rivals()
        self._wild = 0  # the last rounds in a row that took far longer than is plausible
        self._places = self._right = 0  # guesses of the drafting model that the text has judged, and the right ones
        self._unsuited = False
        self._load = Load()
        self._loading, self._read, self._asked = False, 0, 0
        self._would_pause = False  # whether the drafter would have read for too long beside others
        self._costs, self._seen = control.costs, Seen()
        self._tried = Seen()  # all rounds in parallel, those in which the drafter read among them
        self._planned_s = 0.0  # what these should have taken
        self.ledger = Ledger(0.0, 0.0)
        self._own = self._now = times.all_now(prompt_tokens)  # without and with the delay of other answers

    def began(self, prompt_s: float, first_s: float, company: Company = ALONE) -> None:
        with self._control.lock:
            for known in self._experience.sources.values():
                known.fade(FADED)
            if self._control.running:  # this answer will share the steps of those
                self._load = replace(self._control.load, seen=False)
            self._control.running.add(self)
            self._load.see(company)
            self._times.record(1, self._context, first_s, company)
            if company == ALONE:
                self._control.plain.record(first_s, self._context)
            self.ledger = Ledger(prompt_s + first_s, prompt_s + first_s)
            self._count(1)

    def _count(self, emitted: int) -> None:
        self._done += emitted
        self._context += emitted
        self._own = self._now = self._times.all_now(self._context, round(self._load.others))
        if self._load.others:
            drafting = self._drafting
            rows = (self._load.rows(width, drafting) for width in range(1, len(self._own) + 1))
            self._now = self._load.charge([self._times.between_s(each, self._context) for each in rows], drafting)

    # ---------------------------------------------------------------------------------------- deciding

    def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
        control = self._control
        with control.lock:
            cost = self._price(source)
            if cost is None or control.hopeless or self._times_plain() or self._unsuited:
                return OFF
            return self._allow_model(source, cost, lag, unread)

    def _price(self, source: str) -> Price | None:
        own = self._control.price(source, self._times, self._context)
        if own is None:
            return None
        return Price(own, drafting_price(own, self._load.others, self._drafting) if self._load.others else own)

    @property
    def _drafting(self) -> float:
        """How many of the other answers in the same steps draft too, or will: each shares the drafter's forwards."""
        return self._met(lambda other: other.may_draft)

    def _met(self, is_willing: Callable[[Running], bool]) -> float:
        willing = sum(is_willing(other) for other in self._control.running if other is not self)
        return MET * min(self._load.others, willing)

    @property
    def may_draft(self) -> bool:
        return not self._unsuited and (self._trust.on or not self._trust.failed)

    @property
    def drafts_soon(self) -> bool:
        """Whether it drafts, or is young: some that may draft never do, as where a drafter would read for long."""
        return self.may_draft and (self._trust.on or self._done < FIRST_REST)

    def allow_free(self, source: str) -> Allowance:
        with self._control.lock:
            depth = 0 if self._times_plain() else self._affordable(FREE_PRICE, 0)
            return Allowance(depth, self._gate(source, FREE_PRICE, depth)) if depth else OFF

    def _times_plain(self) -> bool:
        """Whether the next round is plain, to time it."""
        times = self._times
        return times.since_plain >= PLAIN_EVERY or (times.since_plain >= PLAIN_AGAIN and times.moved > MOVED)

    def _allow_model(self, source: str, cost: Price, lag: int, unread: int) -> Allowance:
        self._loading, self._control.load_s = False, 0.0  # a drafter that is asked is loaded
        both = self._pipelined is not None
        if both and not self._done:
            return Allowance(self._cap + 1)  # both sides read the prompt in parallel, where that delays neither
        read, window, checking = lag, None, False
        if self._delays_others():
            return OFF
        if self._trust.on:
            if unread and self._repays_all(cost, unread):
                read = window = self._context
                self._skipped = 0
        elif (bought := self._buys(cost, lag, unread, 0.0)) is not None:
            self._begin()
            read, window = bought, bought if bought != lag else None
        elif (looked := self._looks(cost, lag, unread)) is not None:
            self._control.forget_slowness()
            read, window = looked, looked if looked != lag else None
            self._timed, self._skipped = False, unread if window is None else self._context - looked
            checking = not self._costs.checked
        else:
            return OFF
        if both:
            return Allowance(self._cap + 1)
        depth = 0 if self._pauses(read * cost.own.lag_token_s) else self._affordable(cost, read)
        if depth < 1:
            if lag >= LEAST_READ:
                self._trust.on = False  # the drafter fell behind: reading more is another purchase
            return OFF
        if not self._timed:
            depth = 1  # the drafter's current speed is unknown
        hindsight = 0 if self._timed else min(self._hindsight, self._done)
        patience_s = PATIENCE * read * cost.own.lag_token_s + self._now[0]
        rates = self._known(source).by_position(depth)
        chain = chain_at_once(self._now, cost.charged, read, rates, self._going_rate())
        self._read, self._asked = read, chain or 0
        # A check proposes its token whatever it seems worth: the wider forward is to be timed too.
        gate = None if checking else self._gate(source, cost, depth)
        return Allowance(depth, gate, window, patience_s, hindsight, chain=chain)

    def _delays_others(self) -> bool:
        """Whether drafting costs other answers more than it brings this one."""
        return self._load.others > 0.0 and self._usual(0) <= DRAFT_MARGIN - 1.0 + SHARED_MARGIN * self._load.others

    def _is_unsuited(self) -> bool:
        """Whether the answer has shown that a drafting model with another vocabulary does not know its text."""
        if self._control.model not in self._costs.translated or self._places < PLACES_JUDGED:
            return False
        share = self._right / self._places
        return share < LEAST_RIGHT and self._control.speedup(share) <= DRAFT_MARGIN

    def _pauses(self, reading_s: float) -> bool:
        """Whether the answer would pause for too long beside others while its drafter reads."""
        self._would_pause = self._load.forbids(reading_s)
        return self._would_pause

    def _known(self, source: str) -> Acceptance:
        """What is known of a source's acceptance; a plan may have got the source since this answer began."""
        return self._control.known(source, sampled=self._sampled)

    def _gate(self, source: str, cost: Price, depth: int) -> PricedGate:
        known = self._known(source)
        return PricedGate(
            self._now, cost.charged.token_s, known, depth, self._going_rate(), self._experience.odds.worth
        )

    def prefers(self, source: str, free_gain: float) -> bool:
        with self._control.lock:
            return self._rivals.see(free_gain)

    def buys_load(self, source: str, lag: int = 0) -> bool:
        control = self._control
        with control.lock:
            cost = self._price(source)
            if cost is None or control.hopeless or self._loading or not self._done or self._unsuited:
                return False
            load_s = LOAD_MARGIN * control.load_s * max(1.0, self._times.factor, self._times.latest)
            if self._buys(cost, lag, 0, load_s) is None and not self._checks(cost, min(lag, LOOK), load_s):
                return False
            self._loading, control.load_s, control.missed_s = True, 0.0, 0.0
            return True

    def _affordable(self, cost: Price, read: int) -> int:
        """The deepest draft that the answer can afford if every token is wrong."""
        room_s = AT_ONCE * self.ledger.room_s
        times = self._times
        most = self._load.most_depth(self._cap, lambda rows: times.pace * times.usual_s(rows, self._context))
        return next((depth for depth in range(most, 0, -1) if self._lost_s(cost, depth, read) <= room_s), 0)

    def _lost_s(self, cost: Price, depth: int, read: int = 0) -> float:
        """The answer's own loss in seconds if ``depth`` tokens, drafted after reading ``read``, are all wrong."""
        return cost.own.seconds(depth, read) + self._own[depth] - self._own[0]

    def _buys(self, cost: Price, lag: int, unread: int, load_s: float) -> int | None:
        """How many tokens to read so that drafting starts or resumes now; None if drafting does not start."""
        control, known, step_s = self._control, self._experience, self._now[0]
        if self._done < self._next_look:
            return None
        usual, both = self._usual(0), self._pipelined
        # Each failed trial in this answer halves the expected gain.
        self._gain = (known.gain(usual) if self._rate is None else usual) / 2**self._trust.failed
        trial_s = TRIAL * step_s * (max(0.0, 1.0 - self._gain / usual) if usual else 1.0)
        # While the drafter reads what it missed, the target continues at a slower pace.
        share = 1.0 if both is None else 1.0 - 1.0 / max(1.0, both.target_factor)
        for read in [lag] if both is not None else readings(lag, unread, self._context):
            skipped = unread if read == lag else self._context - read
            gain = self._gain * self._usual(skipped) / usual if usual else 0.0
            reading_s = share * read * cost.own.lag_token_s
            if self._pauses(reading_s):
                continue
            first_s = self._lost_s(cost, 1) if both is None else 0.0
            price_s = max(0.0, load_s - control.missed_s) + share * read * cost.charged.lag_token_s + trial_s
            if self._earns(price_s, gain, load_s + reading_s + first_s):
                self._skipped = skipped
                return read
        if self._rate is not None and self._gain <= DRAFT_MARGIN - 1.0:
            self._stop()  # the drafter would hardly be right
        else:
            self._next_look = self._done + max(2, self._done // 16)
        return None

    def _looks(self, cost: Price, lag: int, unread: int) -> int | None:
        """How many tokens to read only to see which of them the drafter would have guessed; None: not now.

        A few, or all that it lacks where it has read more than that: a few alone would drop what it has read.
        """
        rests = self._done < max(HINDSIGHT, self._trust.rests_until)
        if rests or self._rate is not None or self._pipelined or lag <= LOOK or not self._hindsight:
            return None
        read = lag if self._context - lag - unread >= lag else LOOK
        lost_s = read * cost.own.lag_token_s + self._lost_s(cost, 1)
        if self._pauses(read * cost.own.lag_token_s):
            return None
        price_s = read * cost.charged.lag_token_s + cost.charged.seconds(1) + self._now[1] - self._now[0]
        good = self._usual(0) if self._load.others else self._control.good_gain
        gain = self._experience.gain(good) / 2**self._trust.failed
        return read if self._checks(cost, read, 0.0) or self._earns(price_s, gain, lost_s) else None

    def _checks(self, cost: Price, read: int, load_s: float) -> bool:
        """Whether to look only to time the drafter.

        Until answers have confirmed the measured times, it might be better than they say.
        """
        if self._costs.checked or self._pipelined or self._rate is not None or self._done < HINDSIGHT:
            return False
        if self._load.seen or not self._hindsight:  # then nothing is judged, or there is no look
            return False
        price_s = load_s + read * cost.own.lag_token_s + self._lost_s(cost, 1)
        return price_s <= AT_ONCE * self.ledger.room_s

    def _earns(self, price_s: float, gain: float, lost_s: float) -> bool:
        """Whether to spend ``price_s`` on a ``gain`` in plain steps a token; ``lost_s`` is the most it can lose."""
        step_s = self._now[0]
        longer = self._control.lengths.longer_than(self._done, self._most)
        before = self.ledger.plain_s / step_s - self._done
        affordable = lost_s <= AT_ONCE * self.ledger.room_s
        return affordable and worth_buying(price_s, gain * step_s, self._done, self._most, longer, before)

    def _begin(self) -> None:
        self._trust.begin()
        self._timed = False
        if self._bought_at is None:
            self._bought_at = self._done

    def _usual(self, skipped: int) -> float:
        """Share of a token's time that drafting saves when useful, with ``skipped`` tokens of the text unread."""
        rate = self._rate
        if rate is None:
            rate = max(GOOD_RATE, self._known(self._control.model).overall)
        rate *= worth_of(skipped, self._context)
        calibrated_s = [seconds / self._times.factor for seconds in self._now]  # as the drafter's cost
        speedup = self._control.speedup(rate, calibrated_s, self._load.others, self._drafting, self._context)
        return max(0.0, 1.0 - 1.0 / speedup) if speedup else 0.0

    def _repays_all(self, cost: Price, unread: int) -> bool:
        """Whether to read all of the text, ``unread`` tokens of which the drafter skipped."""
        reading_s, price_s = self._context * cost.own.lag_token_s, self._context * cost.charged.lag_token_s
        if self._pauses(reading_s):
            return False
        return self._earns(price_s, self._usual(0) - self._usual(unread), reading_s + self._lost_s(cost, 1))

    def _going_rate(self) -> float:
        plain = 1.0 / self._now[0]
        return max(plain, self._rate_tokens / self._rate_s) if self._rate_s else plain

    # ---------------------------------------------------------------------------------------- learning

    def learn(self, source: str, confidences: Sequence[float], hits: Sequence[bool]) -> None:
        with self._control.lock:
            if source in self._experience.sources:
                self._experience.sources[source].learn(confidences, hits)
            if source == self._control.model:
                self._judge_places(hits)
            if source == self._control.model and self._rate is not None:
                self._rate = rate_in_hindsight(hits, worth_of(self._skipped, self._context), self._rate, HINDSIGHT)

    def learn_hindsight(self, source: str, hits: Sequence[bool]) -> None:
        with self._control.lock:
            known = self._known(source).overall
            self._judge_places(hits)
            self._rate = rate_in_hindsight(hits, worth_of(self._skipped, self._context), known)
            self._guessed, self._seen_gain = tuple(hits), self._usual(0)
            self._next_look = 0

    def _judge_places(self, hits: Sequence[bool]) -> None:
        self._places += len(hits)
        self._right += sum(hits)
        self._unsuited = self._is_unsuited()

    def learn_alternatives(self, source: str, odds: Sequence[float], hits: Sequence[bool]) -> None:
        with self._control.lock:
            if source in self._experience.sources:
                self._experience.odds.learn(odds, hits)

    def record(self, record: RoundRecord) -> None:
        control, times = self._control, self._times
        with control.lock:
            self._load.see(record.company)
            others = record.company.answers
            drafting = min(others, max(record.draft_companions, self._met(lambda other: other.drafts_soon)))
            draft_s = record.draft_s if record.source == control.model and not record.overlapped else 0.0
            control.load = self._load
            usual_s = times.usual_s(1 + record.company.rows, record.context_length)
            undrafted_s = times.usual_s(1 + others, record.context_length)  # of the same step if none drafted
            further = record.width - 1 + record.company.rows - others
            part = (record.width - 1) / further if further else 1.0
            if record.overlapped or self._loading:
                # While a drafter computes, the target is slower, which says nothing about its own speed.
                times.since_plain = 0 if record.width == 1 and self._loading else times.since_plain + 1
                shown = times.factor
            else:
                seen = times.record(
                    record.width, record.context_length, record.verify_s, record.company, record.experts
                )
                if times.off is not None:
                    self._seen.widths.append(times.off)
                if record.width == 1 and record.company == ALONE:
                    control.plain.record(record.verify_s, record.context_length)
                cost = control.price(record.source or "", times, self._context) or FREE
                forwards = max(1, self._asked or record.draft_forwards)
                expected_s = self._now[0] * record.width + cost.seconds(forwards, self._read)
                self._wild = 0 if 0.0 < record.own_s < IMPLAUSIBLE_FACTOR * expected_s else self._wild + 1
                # A stall alone says nothing; SLOW in a row are the drafter's speed now.
                if seen is None or 0 < self._wild < SLOW or not 0.0 < record.own_s < math.inf:
                    self._count(record.emitted)
                    return
                # Plain decoding would have stalled as well, so a stall does not count as drafting's loss.
                shown = min(seen, MOVED * times.factor)
            plain_s = record.emitted * usual_s * shown
            self.ledger.plain_s += plain_s
            # A round that only asked drafters counts without the asking: 0.1 ms, which matters for a tiny model.
            asked_only = record.source is None and not record.overlapped and not self._loading
            spent_s = record.verify_s if asked_only else record.own_s
            self.ledger.spent_s += spent_s
            # Reading was paid for by the purchase; the forward that read the text also drafted the first token.
            drafter = control.price(control.model, times, self._context)
            first_s = 0.0 if drafter is None else drafter.seconds(max(1, self._asked))
            read_s = 0.0 if drafter is None or record.overlapped else max(0.0, record.sync_s - first_s)
            working_s, draft_s = record.own_s - read_s, max(0.0, draft_s - read_s)
            if not self._loading:
                self._rate_tokens = _RATE_DECAY * self._rate_tokens + record.emitted
                self._rate_s = _RATE_DECAY * self._rate_s + charged(
                    working_s, undrafted_s * shown, others, draft_s, drafting, part
                )
            self._count(record.emitted)
            self._see(record)
            if record.source == control.model or record.overlapped:
                if not record.overlapped:
                    # In a shared step, drafting may have waited for others.
                    shared = record.company != ALONE
                    slow = None if shared else control.learn_price(record, times.latest, self._read, self._asked)
                    self._timed |= shared or slow is not None
                    if slow is not None and record.context_length <= NEAR:
                        self._seen.drafting.append(slow)
                    # One slow forward says nothing about drafting; three are the machine's pace (LiveTimes).
                    now_s = times.now_s(record.width + record.company.rows, record.context_length)
                    working_s += min(max(record.verify_s, now_s / MOVED), MOVED * now_s) - record.verify_s
                    plain_s = max(plain_s, record.emitted * usual_s * times.factor / MOVED)
                step_s = plain_s / record.emitted * (undrafted_s / usual_s)
                self._judge(step_s, charged(working_s, step_s, others, draft_s, drafting, part), record.emitted)
            elif control.load_s and not control.hopeless:
                control.missed_s += self._gain * plain_s

    def _see(self, record: RoundRecord) -> None:
        """Note what a round got; of a pipelined answer, those in parallel from the first compared guess on."""
        seen = self._seen
        if self._pipelined is not None and record.overlapped:
            self._tried.add(record.emitted, record.round_s)
            alone_s = self._now[min(record.width, len(self._now)) - 1]
            self._planned_s += max(1.0, self._pipelined.target_factor) * alone_s
            seen.compared += record.evaluated
            seen.right += record.accepted
        if not self._loading and (self._pipelined is None or (record.overlapped and seen.compared)):
            seen.add(record.emitted, record.round_s)

    def outcome(self) -> Outcome | None:
        """What the answer got, and what it says of the plan; None after too few rounds, or beside other answers."""
        with self._control.lock:
            costs, shown = self._costs, self._seen if self._seen.rounds > 1 else self._tried
            if shown.rounds < 2 or self._load.seen:
                return None
            both, told = self._pipelined is not None, self._now[0] >= LEAST_STEP_S
            judged = told and not both and costs.measured and costs.model is not None
            return Outcome(
                rounds=shown.rounds,
                tokens_per_round=shown.tokens_per_round,
                token_s=shown.token_s,
                times=self._seen.times() if judged else None,
                mode=self._mode() if told and both else None,
            )

    def _mode(self) -> ModeVerdict | None:
        """The faster mode, by the rounds that compared guesses, or by what rounds cost that made drafting pause."""
        lost = self._trust.failed and self._saved < 0.0 and self._tried.seconds > DEARER * self._planned_s
        return self._seen.mode(self._serial_token_s) or ("serial" if lost else None)

    def _serial_token_s(self, rate: float) -> float:
        """Seconds of a token in the serial mode, now, with that share of right guesses."""
        trees = TREES_GAIN if COPIES in self._costs.drafts else 1.0
        return self._now[0] / max(1.0, trees * self._control.serial_speedup(rate))

    def _judge(self, step_s: float, working_s: float, emitted: int) -> None:
        """Add the savings of a drafted round to trust, and pause drafting once trust is lost."""
        self._drafted_rounds += 1
        steps = working_s / step_s
        self._rivals.learn(emitted - 1.0 - self._going_rate() * step_s * (steps - 1.0))
        saved = self._rivals.steps_without(emitted) - steps
        self._saved += saved
        if not self._trust.add(saved):
            self._stop()

    def _stop(self) -> None:
        self._rate = None
        self._next_look = self._trust.end(self._done)

    def end(self) -> None:
        with self._control.lock:
            if self not in self._control.running:
                return  # it never began, or has ended before
            self._control.running.discard(self)
            self._control.lengths.known.append(self._done)
            if self._load.seen:
                return  # whether drafting pays for one answer alone is not known
            if self._bought_at is not None:
                self._experience.learn(self._saved, self._done - self._bought_at, self._drafted_rounds)
            else:  # never drafted: only the hindsight guesses are known
                self._experience.learn(self._seen_gain * self._done, self._done, len(self._guessed) // 2)

    @property
    def plain_tokens_per_s(self) -> float | None:
        with self._control.lock:
            own_s = self._times.usual_s(1, self._context - self._done // 2)
            return self._control.plain.tokens_per_s(lambda context: self._times.usual_s(1, context) / own_s)

    def why_off(self, source: str) -> Reason | None:
        control = self._control
        with control.lock:
            cost = control.costs.drafts.get(source)
            if cost is None:
                return NOT_CALIBRATED
            if cost == FREE:
                return None  # each free guess is priced by itself
            if self._delays_others():
                said = "other answers are computed in the same steps, which drafting would delay"
                return Reason("not_paying_now", said)
            if self._unsuited:
                some = f"{self._right} of {self._places}"
                said = f"the drafting model guessed {some} tokens of this answer, too few to pay: off until the next"
                return Reason("not_paying_now", said)
            if self._trust.on or not self._done:
                return None
            if self._would_pause:
                said = "other requests are computed in the same steps, and the drafting model would read for too long"
                return Reason("not_paying_now", said)
            if control.hopeless:
                most = f"{control.possible:.2f}x at best"
                return Reason("no_drafter_pays", f"the drafting model cannot speed this up here ({most}): off")
            if self._trust.failed and self._bought_at is not None:
                said = "the drafting model's guesses did not pay in this answer; it may guess again in the next"
                return Reason("not_paying_now", said)
            usual = self._usual(0)
            if self._guessed and self._seen_gain <= 0.5 * PAYS * usual:
                some = f"the drafting model would have guessed {sum(self._guessed)} of {len(self._guessed)} tokens"
                return Reason("not_paying_now", f"{some} of this answer, too few to pay")
            if not self._guessed and self._experience.gain(usual) <= 0.5 * PAYS * usual:
                said = "the drafting model's guesses hardly paid in recent answers; later answers try it again"
                return Reason("not_paying_now", said)
            said = "this answer was too short to repay the drafting model's reading; longer answers get guesses"
            return Reason("answer_too_short", said)
