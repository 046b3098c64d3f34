"""What is spent on the chance of a gain: whether to buy drafting for an answer, and where a chain ends.

Buying is the ski-rental problem (Karlin et al., 1988): buy when the rent paid equals the price, which never costs
more than twice the optimum. Here the rent is the time that drafting would have saved. The bound on the loss itself
follows conservative bandits (Wu et al., 2016): try only what the answer so far could lose while it stays above a
share of plain decoding's speed.

A drafter that reads tokens of the target also tells which of them it would have guessed. So one short forward
measures whether the drafter knows this text, without proposing a token.

A chain and its tree grow by fractional programming (Dinkelbach, 1967): add what brings more tokens than its time
would bring elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.interfaces.drafting import Choice, DraftTree
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.acceptance import Acceptance
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import Curve, DraftCost, choose_window, drafting_speedup
from edgespec.planning.cost.margins import DRAFT_MARGIN

# The largest loss of a request, as a share of plain decoding's time: 1 / (1 + RISK) is 0.91 of plain speed, and
# errors of measurement may make it 0.89.
RISK = 0.10

# Plain steps that a trial may lose before drafting pauses, and the most that a change of text may cost. Simulated:
# any value from 4 to 10 steps of trust gives the same result.
TRIAL = 2.0
MOST_TRUST = 6.0

# Plain tokens before another trial in the same answer, doubled by each failed trial until one earns full trust.
FIRST_REST = 48

# The share of the text that was read, to this power, approximates how much less often the drafter is right. The 0.5B
# for the 1.5B, at 168 positions of Spec-Bench answers: 0.81 right with all of the text, 0.80 with four fifths, 0.68
# with two fifths, 0.62 with half of long prompts, 0.33 to 0.54 with a tenth or less.
_POWER = 0.25

# The fewest tokens of a longer text that drafting starts with: one slice (drafters/model.py).
LEAST_READ = 16

# Tokens of the answer that are guessed in hindsight, and tokens read when reading serves only that. Fourteen separate
# a text with three in four tokens guessed from one with one in three. Simulated: 12 to 16, and 20 to 24, give the
# same.
HINDSIGHT = 14
LOOK = 20

# A drafter with another vocabulary is off for an answer in which, of PLACES_JUDGED guesses and more, a smaller share
# than LEAST_RIGHT was right, unless that share pays. Some languages it does not know: 0.38 right in translations,
# 0.62 to 0.80 in English (docs/results/other-vocabularies.md), which 24 places tell apart.
PLACES_JUDGED, LEAST_RIGHT = 24, 0.55

# Weight of the earlier estimate, in tokens guessed in hindsight.
KNOWN_BEFORE = 4.0

# The least that a round with the drafting model is taken to gain over a plain step, in tokens: 3 in 1.75 steps, where
# a step is worth 1.7 tokens (the default pair, docs/results/promises.md). An answer's rounds gain what its rate says,
# but the rate is low until the drafter has begun.
USUAL_GAIN = 0.7

# Weight of that usual gain, in rounds with the drafting model, and of a first round without free guesses.
_USUAL_ROUNDS = 4.0
_PLAIN_ROUNDS = 1.0

# Weight that earlier rounds keep with each further one. Simulated: 0.5 to 0.95 give the same.
_FADING = 0.95

_LEAST_GAIN = DRAFT_MARGIN - 1.0


@dataclass(slots=True)
class Ledger:
    """One answer's seconds: time taken so far, and the time plain decoding would have taken for the same tokens."""

    spent_s: float
    plain_s: float

    @property
    def saved_s(self) -> float:
        return self.plain_s - self.spent_s

    @property
    def room_s(self) -> float:
        """Seconds that the answer may still lose."""
        return RISK * self.plain_s + self.saved_s


@dataclass(slots=True)
class Trust:
    """What an answer's drafted rounds have earned, in plain steps, and how long drafting pauses once that is lost."""

    on: bool = False
    failed: int = 0  # trials since trust was last full
    rests_until: int = 0  # in tokens of the answer
    _left: float = 0.0

    def begin(self) -> None:
        """Start drafting, with the steps of a trial to lose."""
        self.on, self._left = True, TRIAL

    def add(self, saved: float) -> bool:
        """Add what a round saved; return False if drafting has to pause."""
        self._left = min(MOST_TRUST, self._left + saved)
        if self.on and self._left >= MOST_TRUST:
            self.failed = 0
        return not self.on or self._left >= 0.0

    def end(self, done: int) -> int:
        """Pause drafting after ``done`` tokens; return the token count at which the pause ends."""
        self.on, self.rests_until = False, done + FIRST_REST * 2**self.failed
        self.failed += 1
        return self.rests_until


@dataclass(slots=True)
class Rivals:
    """What rounds of an answer gain over a plain step, in tokens: by free guesses alone, and with the drafting model.

    The model is judged by what it adds. Where free guesses are right, a round with the model is fast too, but it
    would have been fast without the model.
    """

    free_gain: float = 0.0  # of this round's free guesses
    _free: float = 0.0
    _free_rounds: float = _PLAIN_ROUNDS
    _model: float = _USUAL_ROUNDS * USUAL_GAIN
    _model_rounds: float = _USUAL_ROUNDS

    def see(self, free_gain: float) -> bool:
        """Note a round's free guesses; return whether a round with the model usually gains more."""
        self.free_gain = free_gain
        self._free = _FADING * self._free + free_gain
        self._free_rounds = _FADING * self._free_rounds + 1.0
        return not free_gain or free_gain < self.model_gain

    @property
    def model_gain(self) -> float:
        """The usual gain of a round with the model."""
        return self._model / self._model_rounds

    def learn(self, gain: float) -> None:
        """Learn the gain of a round with the model."""
        self._model = _FADING * self._model + gain
        self._model_rounds = _FADING * self._model_rounds + 1.0

    def steps_without(self, emitted: int) -> float:
        """Plain steps in which free guesses alone would have brought ``emitted`` tokens, from this round on."""
        return 1.0 + (emitted - 1.0 - self.free_gain) / (1.0 + self._free / self._free_rounds)


def worth_buying(
    price_s: float, gain_s: float, done: int, most: int | None, longer: Sequence[int] | None, before: float
) -> bool:
    """Whether to spend ``price_s`` after ``done`` tokens on an expected ``gain_s`` for each token still to come.

    If lengths are known: whether spending now is expected to win, and to win more than waiting until some answers
    have ended. Every answer has the same weight, so a gain counts as a share of the answer's plain time, in which
    reading the prompt is worth ``before`` tokens. If no lengths are known, the answer is assumed to double.
    """
    if not longer:
        return (done if most is None else min(done, most - done)) * gain_s > price_s

    def share(after: int, first: int) -> float:
        return sum(((length - after) * gain_s - price_s) / (before + length) for length in longer[first:])

    now = share(done, 0)
    if now <= 0.0:
        return False
    return all(share(length, index + 1) <= now for index, length in enumerate(longer) if length > done)


def worth_of(skipped: int, context: int) -> float:
    """Share of its usual hits that a drafter keeps after skipping ``skipped`` tokens of the text."""
    return math.pow(1.0 - min(skipped, context) / context, _POWER)


def readings(lag: int, unread: int, context: int) -> list[int]:
    """How many tokens may be read before drafting starts: all that the drafter lacks, half of it or a quarter.

    A drafter that skipped ``unread`` tokens of the ``context`` starts from scratch, unless it reads only its ``lag``.
    """
    if not unread:
        return [lag, *(part for part in (lag // 2, lag // 4) if part >= LEAST_READ)]
    return [context, *(part for part in (context // 2, context // 4) if part > context - unread), lag]


def rate_in_hindsight(hits: Sequence[bool], worth: float, before: float, known: float = KNOWN_BEFORE) -> float:
    """How often a drafter that had read all of the text would have been right.

    ``before`` is the earlier estimate, which weighs as much as ``known`` tokens.
    """
    return min(1.0, (sum(hits) / worth + known * before) / (len(hits) + known))


def pair_speedup(curve: Curve, model: DraftCost, rate: float, cap: int, both: Contention | None) -> float:
    """Speed-up over plain decoding if each token of ``model`` is right with probability ``rate``.

    At the best depth up to ``cap``. ``both``: target and drafter run in parallel, and slow each other by this much.
    """
    if both is None:
        return drafting_speedup(curve, model, (rate,) * cap)
    slower, drafting = curve.scaled(max(1.0, both.target_factor)), model.scaled(max(1.0, both.drafter_factor))
    return curve.plain_s * choose_window(slower, drafting, (rate,), cap).tokens_per_s


def plausible(slowness: float) -> float:
    """Limit one draft's slowness to the range in which a clock can be believed."""
    return min(50.0, max(0.02, slowness))


def drafting_slowness(
    cost: DraftCost, record: RoundRecord, slower: float, read: int, asked: int
) -> tuple[float | None, float]:
    """How many times longer than ``slower`` times ``cost`` reading took (None: none was timed), and drafting.

    The round read ``read`` tokens of text; ``asked`` is the length of a one-pass drafter's chain, whose one forward
    reads and drafts.
    """
    if cost.one_pass is not None:
        slow = plausible(record.draft_s / (slower * cost.seconds(max(1, asked), read)))
        return slow, slow
    reading = None
    if record.sync_s > 0:
        reading = plausible(record.sync_s / (slower * cost.seconds(1, read)))
    forwards = record.forwards_after_reading
    if forwards < 1:
        assert reading is not None  # the one forward was the reading
        return reading, reading
    return reading, plausible((record.draft_s - record.sync_s) / (slower * cost.seconds(forwards)))


def chain_at_once(
    forward_s: Sequence[float], cost: DraftCost, read: int, acceptance: Sequence[float], tokens_per_s: float
) -> int | None:
    """How many tokens, at least 1, a one-pass drafter drafts; None for a drafter that drafts token by token.

    The forward is paid before any confidence is known. ``forward_s[d]`` is the time of a target forward with d
    drafted tokens, ``read`` the number of tokens that the drafter reads first, ``acceptance[i]`` the probability that
    token i is accepted if all before it were. The length gains the most tokens over those that its time is worth at
    ``tokens_per_s`` (Dinkelbach, 1967).
    """
    if cost.one_pass is None:
        return None
    best, most, gained, survives = 1, -math.inf, 0.0, 1.0
    for depth, probability in enumerate(acceptance, start=1):
        survives *= probability
        gained += survives
        gain = gained - tokens_per_s * (cost.seconds(depth, read) + forward_s[depth])
        if gain > most:
            best, most = depth, gain
    return best


class PricedGate:
    """A gate for one chain of at most ``most`` tokens, and for trees of as many nodes.

    ``forward_s[d]`` is the time of a target forward with d drafted tokens, ``token_s`` that of a drafted token, in
    seconds. Time is worth ``tokens_per_s``. The odds of alternatives are multiplied by ``odds_factor``.
    """

    needs_entropy = False

    def __init__(
        self,
        forward_s: Sequence[float],
        token_s: float,
        acceptance: Acceptance,
        most: int,
        tokens_per_s: float,
        odds_factor: float = 1.0,
    ) -> None:
        self._forward_s, self._token_s, self._acceptance = forward_s, token_s, acceptance
        self._most, self._tokens_per_s, self._odds_factor = most, tokens_per_s, odds_factor
        self._survives = 1.0
        self.believed: list[float] = []
        self._next = acceptance.overall

    def admits(self, confidence: float, entropy: float | None) -> bool:
        probability = self._acceptance.given(confidence)
        if not self._worth(probability, 0.0):  # the forward that gave the confidence is already paid
            return False
        self.believed.append(probability)
        self._survives *= probability
        return True

    def goes_on(self) -> bool:
        return self._worth(self._next, self._token_s)

    def believes(self, confidence: float) -> float:
        return self._acceptance.given(confidence)

    def believes_alternative(self, odds: float) -> float:
        return min(1.0, self._odds_factor * odds)

    def choose(self, tree: DraftTree, most: int) -> Choice:
        return choose_nodes(self._forward_s, tree, min(most, self._most), self._tokens_per_s, _LEAST_GAIN)

    def _worth(self, probability: float, drafted_s: float) -> bool:
        """Whether the chain should grow by a token of that probability, ``drafted_s`` of drafting away.

        Looks ahead, because T(w) may rise in steps; further tokens are assumed to be accepted at the overall rate.
        """
        length = len(self.believed)
        before_s, survives, gained = self._forward_s[length], self._survives * probability, 0.0
        for depth in range(length + 1, self._most + 1):
            gained += survives
            if gained > self._tokens_per_s * (self._forward_s[depth] - before_s + drafted_s) + _LEAST_GAIN:
                return True
            survives *= self._next
            drafted_s += self._token_s
        return False


def choose_nodes(
    forward_s: Sequence[float], tree: DraftTree, most: int, tokens_per_s: float, least_gain: float = 0.0
) -> Choice:
    """Choose the at most ``most`` nodes of a tree that are worth their rows.

    A node brings one token if it and all nodes above it are the target's tokens, and lengthens the forward:
    ``forward_s[n]`` with n nodes. The likeliest nodes are the best tree of any size (OPT-Tree, Wang et al., 2024).
    They are added while they bring more than that time is worth at ``tokens_per_s``, by ``least_gain`` tokens
    (Dinkelbach, 1967); where T(w) rises in steps, several together.
    """
    # A node is never likelier than the nodes above it, and comes after them, so a prefix of this order is a tree.
    likeliest = sorted((-reach, node) for node, reach in enumerate(tree.reach()))[: max(0, most)]
    taken, gained, gain, before_s = 0, 0.0, 0.0, forward_s[0]
    for count, (loss, _) in enumerate(likeliest, start=1):
        gained -= loss
        costs = tokens_per_s * (forward_s[count] - before_s)
        if gained > costs + least_gain:
            gain += gained - costs
            taken, gained, before_s = count, 0.0, forward_s[count]
    return Choice(tuple(sorted(node for _, node in likeliest[:taken])), gain)
