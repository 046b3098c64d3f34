"""Whole requests on a simulated clock: a real depth policy decides, everything else only takes time.

``serve`` stands in for the loop: the order of decoding/serial.py and drafters/combination.py without their tokens.
``tests/support/simulated_loop.py`` serves the same requests with the real modules; both must run the same rounds
(tests/planning/test_simulated_clock.py). A request's time is split by cause, and the parts add up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from edgespec.drafters.lookup import match_confidence
from edgespec.files.checked import read, to_json
from edgespec.interfaces.drafting import ChainGate, DraftTree, values_trees
from edgespec.interfaces.model import PREFILL_CHUNK_TOKENS
from edgespec.interfaces.policy import Allowance, AnswerPolicy, RoundRecord
from edgespec.planning.cost.acceptance import AcceptancePrior
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.experience import History
from tests.support.drawn_requests import Request, Scenario, World

# Tokens of lag that every round leaves (drafters/model.py): more is catching up.
_ORDINARY_LAG = 2

_WATCHED = 16

# Fewest and most tokens that the drafter reads between two checks of the clock (drafters/model.py).
_SLICES = 16, 64

# Causes of a request's time beyond plain decoding's.
CAUSES = ("load", "reading", "drafting", "widening", "noise")


@dataclass(slots=True)
class Clock:
    """``now_s``: total seconds; ``spent``: seconds by cause."""

    now_s: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prompt", "plain", *CAUSES), 0.0))

    def spend(self, cause: str, seconds: float) -> None:
        self.now_s += seconds
        self.spent[cause] += seconds

    def read(self) -> float:
        return self.now_s


@dataclass(slots=True)
class Process:
    """A process's state besides its policy: whether the drafter is in memory."""

    loaded: bool = False


class Course:
    """The physics of one request: which tokens are right, and all times. Both ways of serving share it."""

    def __init__(self, world: World, request: Request, process: Process) -> None:
        self.world, self.request, self.process = world, request, process
        self.clock = Clock()
        self._noises = 0
        self._known = self._from = 0  # the drafter's cache holds the tokens ``_from`` to ``_known``

    def _slower(self, place: int, width: int) -> float:
        neighbour = self.request.neighbour
        return 1.0 if neighbour is None else neighbour.slower(place, width)

    def _noise(self) -> float:
        own = self.request.noise
        self._noises += 1
        return own[self._noises % len(own)]

    def read_prompt(self) -> float:
        """Read the prompt and decode the first token; returns the seconds of that token's forward."""
        tokens, before_s = self.request.prompt_tokens, self.clock.now_s
        for start in range(0, tokens - 1, PREFILL_CHUNK_TOKENS):
            self.read_chunk(start, min(start + PREFILL_CHUNK_TOKENS, tokens - 1))
        read_s = self.clock.now_s
        self.forward(1, 0)
        assert read_s >= before_s
        return self.clock.now_s - read_s

    def read_chunk(self, start: int, end: int) -> None:
        """The target reads the prompt's tokens ``start`` to ``end`` - 1."""
        self.clock.spend("prompt", self._slower(0, 1) * (self.world.prompt_s(end) - self.world.prompt_s(start)))

    def forward(self, width: int, place: int) -> None:
        """The target scores ``width`` rows, the first of which scores the answer's token ``place``."""
        clock, context = self.clock, self.request.prompt_tokens + place - 1
        plain_s = self.world.forward_s(1, context) * self._slower(place, 1)
        clock.spend("plain", plain_s)
        wide_s = plain_s
        if width > 1:
            wide_s = self.world.forward_s(width, context) * self._slower(place, width)
            clock.spend("widening", wide_s - plain_s)
        noise = self._noise()
        if noise != 1.0:
            clock.spend("noise", wide_s * (noise - 1.0))

    def lag(self, place: int) -> int:
        return max(0, self.request.prompt_tokens + place - 1 - self._known)

    def unread(self, place: int) -> int:
        return min(self._from, self.request.prompt_tokens + place - 1)

    def load(self, place: int) -> None:
        """Load the drafter while the answer waits."""
        self.process.loaded = True
        self.clock.spend("load", self.world.load_s * self._slower(place, 1))

    def draft(
        self,
        place: int,
        depth: int,
        gate: ChainGate | None,
        window: int | None,
        patience_s: float = math.inf,
        hindsight: int = 0,
    ) -> Drafted:
        """Draft a chain after the answer's first ``place`` tokens.

        The cache has at least the last ``window`` tokens (None: the cache stays as is). If reading takes longer than
        ``patience_s``, reading stops and nothing is drafted.
        """
        clock, world, request = self.clock, self.world, self.request
        context = request.prompt_tokens + place
        begins = 0 if window is None else max(0, context - 1 - window)
        if not self._known or (window is not None and not self._from <= begins <= self._known):
            self._from = self._known = begins
        lag = max(0, context - 1 - self._known)
        slower, before_s, noise = self._slower(place, 1), clock.now_s, self._noise()
        token_s = slower * noise * world.lag_token_s
        size = min(_SLICES[1], max(_SLICES[0], (lag + 1) // 16)) if patience_s < math.inf else lag + 1
        read = 0
        while lag + 1 - read > size:
            clock.spend("reading", size * token_s)
            read += size
            if clock.now_s - before_s > patience_s:
                self._known += read
                return Drafted([], [], 0, clock.now_s - before_s)
        clock.spend("reading", (lag - read) * token_s)
        clock.spend("drafting", slower * world.draft_token_s * noise)
        sync_s = clock.now_s - before_s if lag + 1 > _ORDINARY_LAG else 0.0
        seen = [at for at in range(place - min(hindsight, lag), place) if at >= 0]
        hits = [self._guesses(at, request.prompt_tokens + at - self._from) for at in seen]
        missed = world.missed(context - self._from, context)
        sure: list[float] = []
        right: list[bool] = []
        forwards, at = 1, place
        while True:
            confidence = request.sure[at]
            if gate is not None and not gate.admits(confidence, None):
                break
            hit = request.right[at] and request.unread[at] >= missed
            sure.append(confidence)
            right.append(hit)
            ended = len(sure) == depth or (hit and at == request.tokens - 1 and not request.cut)
            if ended or (gate is not None and not gate.goes_on()):
                break
            clock.spend("drafting", slower * world.draft_token_s * self._noise())
            forwards += 1
            at += 1
        self._known = context + min(leading(right), forwards - 1)
        return Drafted(sure, right, forwards, sync_s, hits)

    def _guesses(self, place: int, read: int) -> bool:
        """Whether a drafter that has ``read`` tokens before ``place`` guesses the answer's token there."""
        request = self.request
        return request.right[place] and request.unread[place] >= self.world.missed(
            read, request.prompt_tokens + place
        )

    def copy(self, place: int, depth: int) -> Drafted | None:
        """Up to ``depth`` tokens that followed the matching tokens earlier in the text; None without a match."""
        request = self.request
        matched = request.matched[place]
        if not matched:
            return None
        right: list[bool] = []
        for at in range(place, min(place + depth, len(request.copied))):
            right.append(request.copied[at])
            if request.copied[at] and at == request.tokens - 1 and not request.cut:
                break
        return Drafted([match_confidence(matched + index) for index in range(len(right))], right, 0, 0.0)


@dataclass(slots=True)
class Drafted:
    """A chain: the drafter's confidence in each token, and whether each is right if the tokens before it are."""

    sure: list[float]
    right: list[bool]
    forwards: int
    sync_s: float
    hindsight: list[bool] = field(default_factory=list)

    def cut(self, length: int) -> Drafted:
        return Drafted(self.sure[:length], self.right[:length], self.forwards, self.sync_s)


def leading(right: Sequence[bool]) -> int:
    """Right tokens before the first wrong one."""
    for index, hit in enumerate(right):
        if not hit:
            return index
    return len(right)


# ------------------------------------------------------------------------------------------------------- deciders


class Decider(Protocol):
    """A depth policy in a simulation, with the information it may have."""

    def begin(self, request: Request, prompt_s: float, first_s: float) -> None:
        """Begin an answer with its request and the times of reading its prompt and its first token."""

    def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance: ...

    def buys_load(self, source: str, lag: int = 0) -> bool: ...

    def learn(self, source: str, confidences: Sequence[float], hits: Sequence[bool]) -> None: ...

    def learn_hindsight(self, source: str, hits: Sequence[bool]) -> None: ...

    def allow_free(self, source: str) -> Allowance: ...

    def prefers(self, source: str, free_gain: float) -> bool: ...

    def record(self, record: RoundRecord) -> None: ...

    def end(self) -> None: ...

    def restart(self) -> None:
        """Start the next process: stored state stays."""


class Plain:
    """Never drafts."""

    def begin(self, request: Request, prompt_s: float, first_s: float) -> None: ...

    def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
        return Allowance(0)

    def buys_load(self, source: str, lag: int = 0) -> bool:
        return self.allow(source, lag).depth > 0

    def learn(self, source: str, confidences: Sequence[float], hits: Sequence[bool]) -> None: ...

    def learn_hindsight(self, source: str, hits: Sequence[bool]) -> None: ...

    def allow_free(self, source: str) -> Allowance:
        return self.allow(source)

    def prefers(self, source: str, free_gain: float) -> bool:
        return not free_gain

    def record(self, record: RoundRecord) -> None: ...

    def end(self) -> None: ...

    def restart(self) -> None: ...


class Always(Plain):
    """Drafts to the same depth in every round, whatever the cost."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
        return Allowance(self.depth)


class Controlled(Plain):
    """The product's default policy, used as an engine and its sessions use it."""

    def __init__(self, scenario: Scenario) -> None:
        self._cap = scenario.world.depth_cap
        self._costs = replace(scenario.costs, load_s=scenario.believed_load_s)
        priors = {} if scenario.prior is None else {"model": scenario.prior}
        self.control = DepthControl(self._costs, self._cap, priors)
        self.answer: AnswerPolicy = self.control.answer(prompt_tokens=0)

    def begin(self, request: Request, prompt_s: float, first_s: float) -> None:
        self.answer = self.control.answer(prompt_tokens=request.prompt_tokens, most=request.max_tokens)
        self.answer.began(prompt_s, first_s)

    def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
        return self.answer.allow(source, lag, unread)

    def buys_load(self, source: str, lag: int = 0) -> bool:
        return self.answer.buys_load(source, lag)

    def learn(self, source: str, confidences: Sequence[float], hits: Sequence[bool]) -> None:
        self.answer.learn(source, confidences, hits)

    def learn_hindsight(self, source: str, hits: Sequence[bool]) -> None:
        self.answer.learn_hindsight(source, hits)

    def allow_free(self, source: str) -> Allowance:
        return self.answer.allow_free(source)

    def prefers(self, source: str, free_gain: float) -> bool:
        return self.answer.prefers(source, free_gain)

    def record(self, record: RoundRecord) -> None:
        self.answer.record(record)

    def end(self) -> None:
        self.answer.end()

    def restart(self) -> None:
        """Write the stored state in its file format and read it again."""
        priors = {name: read(AcceptancePrior, to_json(own)) for name, own in self.control.priors().items()}
        history = read(History, to_json(self.control.history()))
        self.control = DepthControl(self._costs, self._cap, priors, history)


# ------------------------------------------------------------------------------------------------------- serving


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One served request. ``plain_s``: plain decoding's time for all of it; ``seconds``: the actual time.

    ``spent`` splits ``seconds`` by cause. ``saved_s``: plain forwards that were not needed. Conservation:
    seconds = plain_s - saved_s + the time of all causes. ``depths``: the rounds' depths; ``tokens_at``: the answer's
    tokens before each round.
    """

    request: Request
    plain_s: float
    seconds: float
    saved_s: float
    spent: dict[str, float]
    depths: list[int]
    tokens_at: list[int]
    records: list[RoundRecord]

    @property
    def ratio(self) -> float:
        """The request's speed as a multiple of plain decoding's: below 1 it was slower."""
        return self.plain_s / self.seconds

    @property
    def rounds(self) -> int:
        return len(self.depths)

    @property
    def tokens_per_round(self) -> float:
        return (self.request.tokens - 1) / self.rounds if self.rounds else 1.0

    @property
    def cause(self) -> str:
        """The cause of most of the loss; all rounds that drafted are judged together."""
        rounds_s = self.spent["drafting"] + self.spent["widening"] - self.saved_s
        lost = {cause: self.spent[cause] for cause in ("load", "reading", "noise")}
        return max((*lost, "rounds"), key=lambda cause: lost.get(cause, rounds_s))


def plain_seconds(world: World, request: Request) -> float:
    """Plain decoding's time, without noise."""
    course = Course(world, request, Process())
    slower = request.neighbour.slower if request.neighbour is not None else lambda place, width: 1.0
    prompt = request.prompt_tokens
    seconds = course.world.prompt_s(prompt - 1) * slower(0, 1)
    if request.neighbour is None:
        # The sum of an arithmetic series: each forward adds one token of context.
        first, last = world.forward_s(1, prompt - 1), world.forward_s(1, prompt + request.tokens - 2)
        return seconds + request.tokens * (first + last) / 2
    return seconds + sum(world.forward_s(1, prompt + place - 1) * slower(place, 1) for place in range(request.tokens))


def serve(
    world: World, decider: Decider, request: Request, process: Process | None = None, *, keep: bool = False
) -> Served:
    """Serve one request in a new conversation. ``keep``: keep its records."""
    course = Course(world, request, process or Process())
    clock, tokens = course.clock, request.tokens
    cap, most = world.depth_cap, request.max_tokens
    watched: deque[tuple[int, Drafted]] = deque(maxlen=_WATCHED)
    depths: list[int] = []
    tokens_at: list[int] = []
    records: list[RoundRecord] = []
    first_s = course.read_prompt()
    decider.begin(request, clock.now_s - first_s, first_s)
    emitted = 1
    while emitted < tokens:
        limit = cap if most is None else min(cap, most - emitted - 1)
        started = clock.now_s
        source, chain, own = None, None, True
        if limit > 0:
            if watched:
                _judge(watched, emitted, decider)
            copied, gain, first = _copied(course, decider, emitted, limit, watched)
            if decider.prefers("model", gain) and not first:
                source, chain = _drafted(course, decider, emitted, limit)
            own = chain is None or bool(chain.right)
            if copied is not None and source is None:
                source, chain = "lookup", copied
            elif copied is not None and chain is not None and not own:  # drafting took time and guessed nothing
                chain = replace(copied, forwards=chain.forwards, sync_s=chain.sync_s)
        drafted = clock.now_s
        proposed = 0 if chain is None else len(chain.right)
        course.forward(proposed + 1, emitted)
        verified = clock.now_s
        kept = 0 if chain is None else leading(chain.right)
        brought = min(kept + 1, tokens - emitted)
        evaluated = min(kept + (kept < proposed), brought)
        record = RoundRecord(
            width=proposed + 1,
            context_length=request.prompt_tokens + emitted,
            proposed=proposed,
            evaluated=evaluated,
            accepted=min(kept, brought),
            invalid=0,
            emitted=brought,
            source=source,
            draft_s=drafted - started,
            sync_s=0.0 if chain is None else chain.sync_s,
            verify_s=verified - drafted,
            round_s=verified - started,
            draft_forwards=0 if chain is None else chain.forwards,
        )
        decider.record(record)
        if chain is not None and proposed and source == "model" and own:
            decider.learn("model", chain.sure[:evaluated], [index < kept for index in range(evaluated)])
        depths.append(proposed)
        tokens_at.append(emitted)
        if keep:
            records.append(record)
        emitted += brought
    decider.end()
    plain_s = plain_seconds(world, request)
    return Served(
        request=request,
        plain_s=plain_s,
        seconds=clock.now_s,
        saved_s=plain_s - clock.spent["prompt"] - clock.spent["plain"],
        spent=clock.spent,
        depths=depths,
        tokens_at=tokens_at,
        records=records,
    )


def _copied(
    course: Course, decider: Decider, place: int, limit: int, watched: deque[tuple[int, Drafted]]
) -> tuple[Drafted | None, float, bool]:
    """As ``CombinationState._copy``: the copy (None: nothing is proposed), its gain, whether it goes first."""
    idea = course.copy(place, limit)
    if idea is None:
        return None, 0.0, False
    watched.append((place, idea))
    allowance = decider.allow_free("lookup")
    most, gate = min(limit, allowance.depth), allowance.gate
    if most < 1:
        return None, 0.0, False
    if not values_trees(gate):
        kept = most if idea.sure[0] >= 0.5 else 0
        return (idea.cut(kept), 0.0, True) if kept else (None, 0.0, False)
    tree = DraftTree()
    for index, sure in enumerate(idea.sure[:most]):
        tree.add(index - 1, index, gate.believes(sure), "lookup")
    choice = gate.choose(tree, most)
    kept = len(choice.nodes)
    return (idea.cut(kept), choice.gain, tree.odds[0] >= 0.5) if kept else (None, 0.0, False)


def _drafted(course: Course, decider: Decider, place: int, limit: int) -> tuple[str | None, Drafted | None]:
    """The same for the drafting model, loaded if the policy decides so; returns the drafter and its chain."""
    lag = course.lag(place)
    if not course.process.loaded:
        if decider.buys_load("model", lag):
            course.load(place)
        return None, None
    allowance = decider.allow("model", lag, course.unread(place))
    allowed = min(limit, allowance.depth)
    if allowed < 1:
        return None, None
    drafted = course.draft(
        place, allowed, allowance.gate, allowance.window, allowance.patience_s, allowance.hindsight
    )
    if drafted.hindsight:
        decider.learn_hindsight("model", drafted.hindsight)
    return "model", drafted


def _judge(watched: deque[tuple[int, Drafted]], emitted: int, decider: Decider) -> None:
    for _ in range(len(watched)):
        place, idea = watched.popleft()
        seen = idea.right[: max(0, emitted - place)]
        kept = leading(seen)
        hits = seen[: kept + 1]
        if len(hits) == len(idea.right) or kept < len(hits):
            decider.learn("lookup", idea.sure[: len(hits)], hits)
        else:
            watched.append((place, idea))


def serve_all(scenario: Scenario, decider: Decider, count: int, *, keep: bool = False) -> list[Served]:
    """Serve the scenario's first ``count`` requests in its number of processes."""
    return serve_each(scenario, decider, scenario.requests(count), keep=keep)


def serve_each(
    scenario: Scenario, decider: Decider, requests: Iterable[Request], *, keep: bool = False
) -> list[Served]:
    process = Process()
    served = []
    for place, request in enumerate(requests):
        if place and place % scenario.process_requests == 0:
            process = Process()
            decider.restart()
        served.append(serve(scenario.world, decider, request, process, keep=keep))
    return served
