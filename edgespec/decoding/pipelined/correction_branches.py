"""Branches: what the drafter writes after its own likeliest corrections while the target still verifies.

A branch starts at a place where the drafter was unsure, with its first alternative there. If the target's correction
is that token, the branch is proposed immediately, so the round after a rejection verifies a full window instead of
waiting for a first token. No published loop does this: PEARL (Liu et al., 2024) and DuoDecoding (Lv et al., 2025)
drop the tokens in flight.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from threading import Event

from edgespec.decoding.pipelined.in_flight import Drafted, PutForward, Submit, UntilDone
from edgespec.decoding.round_base import second_choice, valid_length
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import ChainGate, DraftState, Proposal


@dataclass(frozen=True, slots=True)
class Place:
    """A proposed token that may be corrected, with its drafter's confidence and first alternative."""

    token: int
    confidence: float | None
    alternative: int | None


# Confidence of a drafter that reports none: as likely right as wrong.
_UNSURE = 0.5


def likeliest_corrections(places: Sequence[Place]) -> list[tuple[int, int]]:
    """(index, correction) of the places that can start a branch, the likeliest first correction first.

    A place is corrected first if all tokens before it are accepted and its own token is not. The drafter's
    confidences serve as the probabilities of acceptance (as in OPT-Tree: Wang et al., 2024). Ties keep their order.
    """
    reach, odds = 1.0, list[tuple[float, int, int]]()
    for index, place in enumerate(places):
        sure = _UNSURE if place.confidence is None else place.confidence
        if place.alternative is not None and sure < 1:
            odds.append((-reach * (1 - sure), index, place.alternative))
        reach *= sure
    return [(index, correction) for _, index, correction in sorted(odds)]


@dataclass(frozen=True, slots=True)
class Branch:
    """``proposal`` follows the text that ends in ``tokens``, the last of which is a likely correction.

    ``start``: where ``tokens`` begin in the text. The text before it was committed when the branch was drafted.
    """

    start: int
    tokens: list[int]
    proposal: Proposal

    @property
    def length(self) -> int:
        """Length of the text that the branch follows."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What may be drafted in one request: ``most`` branches of ``depth`` tokens, none past ``end`` of the text."""

    most: int
    depth: int
    end: int
    vocabulary_size: int
    stop_ids: frozenset[int]


@dataclass(slots=True)
class BranchWork:
    """The cost of branches since the last query: drafting time, and the time a round waited for a branch."""

    draft_s: float = 0.0
    sync_s: float = 0.0
    waited_s: float = 0.0
    forwards: int = 0


@dataclass(frozen=True, slots=True)
class _Grown:
    branches: list[Branch]
    seconds: float


class Branches:
    """The branches of one answer: requests their drafting and finds the branch that the text has taken.

    Everything except the drafting runs on the loop's thread.
    """

    def __init__(self, drafter: DraftState, submit: Submit, clock: Callable[[], float] = time.perf_counter) -> None:
        self._drafter = drafter
        self._submit = submit
        self._clock = clock
        self._known: list[Branch] = []
        self._jobs: list[tuple[Future[_Grown], Event]] = []
        self._work = BranchWork()

    @property
    def possible(self) -> bool:
        """Whether the drafter can draft branches."""
        return self._drafter.drafts_branches

    @property
    def forks(self) -> bool:
        """Whether the drafter's own chain stays cached during a branch."""
        return self._drafter.forks

    @property
    def at_work(self) -> bool:
        """Whether the drafter may be drafting a branch."""
        return any(not job.done() for job, _ in self._jobs)

    @property
    def coming(self) -> bool:
        """Whether some drafted branches may not have been collected yet."""
        return bool(self._jobs)

    @property
    def present(self) -> bool:
        """Whether there are branches, drafted or being drafted."""
        return bool(self._known or self._jobs)

    def grow(
        self,
        history: list[int],
        pending: Sequence[PutForward],
        main: Future[Drafted] | None,
        target_done: Event,
        growth: Growth,
    ) -> None:
        """Draft branches after ``main``, the proposal that continues the pending tokens, until the target is done.

        Branches start at pending tokens and, if time remains, at tokens of ``main``.
        """
        drafter, clock, known = self._drafter, self._clock, tuple(self._known)
        if growth.most < 1:
            return
        start, text = len(history), list(history)
        places = [_place(each.piece.proposal, each.place, growth.vocabulary_size) for each in pending]
        gate = UntilDone(target_done)

        def draft() -> _Grown:
            started, grown = clock(), list[Branch]()
            everything = [*places, *_places_of(main, growth.vocabulary_size)]
            for index, correction in likeliest_corrections(everything):
                if len(grown) == growth.most or not gate.goes_on():
                    break
                tokens = [*(place.token for place in everything[:index]), correction]
                length = start + len(tokens)
                if correction in growth.stop_ids or length >= growth.end or _has(known, start, tokens):
                    continue
                depth = min(growth.depth, growth.end - length)
                grown.append(Branch(start, tokens, _drafted(drafter, text, tokens, depth, gate, growth)))
            return _Grown(grown, clock() - started)

        self._jobs.append((self._submit(draft), target_done))

    def gather(self) -> None:
        """Collect the finished branches. Raises what the drafter raised."""
        waiting, self._jobs = self._jobs, []
        for position, (job, _) in enumerate(waiting):
            if not job.done():
                self._jobs.append(waiting[position])
                continue
            try:
                grown = job.result()
            except BaseException:
                self._jobs += waiting[position + 1 :]
                raise
            self._work.draft_s += grown.seconds
            for branch in grown.branches:
                self._work.sync_s += branch.proposal.sync_s
                self._work.forwards += branch.proposal.forwards - (branch.proposal.sync_s > 0)
                if branch.proposal.tokens:
                    self._known.append(branch)

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the branch being drafted, and collect the finished ones."""
        started = self._clock()
        wait([job for job, _ in self._jobs], seconds)
        self.gather()
        self._work.waited_s += self._clock() - started

    def follow(self, history: list[int], committed: list[int]) -> Proposal | None:
        """The branch that continues ``history`` and ``committed``; forgets branches that no longer fit."""
        length = len(history) + len(committed)
        taken = None
        alive = []
        for branch in self._known:
            since = [*history[branch.start :], *committed]
            if branch.tokens[: len(since)] != since:
                continue
            if branch.length == length:
                taken = branch.proposal if taken is None else taken
            elif branch.length > length:
                alive.append(branch)
        self._known = alive
        return taken

    def end(self) -> None:
        """Tell the drafter to stop, because the target is done."""
        for _, target_done in self._jobs:
            target_done.set()

    def take_work(self) -> BranchWork:
        """The cost of branches since the last call."""
        work, self._work = self._work, BranchWork()
        return work

    def drop(self) -> list[Future[_Grown]]:
        """Forget all branches; returns the jobs that may still run, which have been told to end."""
        self.end()
        jobs, self._jobs, self._known = self._jobs, [], []
        return [job for job, _ in jobs]


def _place(proposal: Proposal, place: int, vocabulary_size: int) -> Place:
    sure = proposal.confidences[place] if place < len(proposal.confidences) else None
    return Place(int(proposal.tokens[place]), sure, second_choice(proposal, place, vocabulary_size))


def _places_of(main: Future[Drafted] | None, vocabulary_size: int) -> list[Place]:
    """Places of a proposal that the same thread has finished; none if it failed, which ``_land`` reports."""
    if main is None:
        return []
    with contextlib.suppress(BaseException):
        proposal = main.result().proposal
        return [_place(proposal, place, vocabulary_size) for place in range(len(proposal.tokens))]
    return []


def _has(known: Sequence[Branch], start: int, tokens: list[int]) -> bool:
    """Whether ``known`` has the branch of the text from ``start`` on that ends in ``tokens``."""
    length = start + len(tokens)
    return any(branch.length == length and branch.tokens[start - branch.start :] == tokens for branch in known)


def _drafted(
    drafter: DraftState, text: list[int], tokens: list[int], depth: int, gate: ChainGate, growth: Growth
) -> Proposal:
    """The valid part of a branch. None of its tokens counts as drawn at random."""
    context = Context([*text, *tokens], len(text), wants_alternatives=1)
    proposal = replace(drafter.branch(context, depth, gate).cut(depth), draft_probs=None)
    usable = valid_length(proposal, growth.vocabulary_size, needs_probs=False)
    stops = (place for place, token in enumerate(proposal.tokens[:usable]) if token in growth.stop_ids)
    return proposal.cut(next((place + 1 for place in stops), usable))
