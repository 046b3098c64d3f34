"""Continuous batching: the requests that wait for one model are computed together in one step.

The thread that finds the model free leads: it takes what waits, computes it, and hands the lead over when its own
request is done. With a single Sequence in use a request is computed immediately, on the thread that makes it.

Prompts ride along with the answers' rows, cut so that answers keep most of their speed. They arrive in requests of at
most PREFILL_CHUNK_TOKENS. The one with the fewest tokens left goes first, unless another has waited for MOST_WAIT_S.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.interfaces.model import ALONE, PREFILL_CHUNK_TOKENS, Company
from edgespec.runtimes.native.library import CANCELLED, MOST_ENTRIES, OK
from edgespec.runtimes.native.turns import Caller, Turns
from edgespec.runtimes.sequence import MAX_SCORED_ROWS, CancelFlag

Ids = NDArray[np.int32]
Hidden = NDArray[np.float32]

# A thread between two forwards, for each that is or was between two while the step waits: one that compares and draws
# takes 0.3 to 2 ms until its next request, and threads do so one after another. If it takes longer, its answer has
# ended or does something else.
BETWEEN_S = 0.005
# A step waits this many of its times for answers that draft or are between two forwards: their rows alone would take
# a step.
PATIENCE = 2.0
# An answer without a request for this long, or for ACTIVE_ROUNDS of its rounds or of its steps, no longer holds
# prompts back: a round takes 30 to 150 ms, and with a large model a second.
ACTIVE_S = 0.25
ACTIVE_ROUNDS = 2.0
# Nor after this long, whatever its last step took: a process that was stopped and continued has steps of hours.
MOST_ACTIVE_S = 10.0
# An answer may be silent for longer while its drafter reads: until then no step of prompts alone exceeds STEP_S.
# 70 tokens took the 0.5B drafter 0.5 s, next to a prompt of the 1.5B on two cores without AVX-512.
RECENT_S = 2.0
# Requests with fewer tokens left no longer overtake one that has waited this long: two clients with prompts of 100
# tokens kept one of 256 waiting for ever. About what a prompt of 300 tokens takes on two cores.
MOST_WAIT_S = 1.0
# A prompt waits this long for an answer's rows to ride along with: about a round.
RIDE_S = 0.05
# The share of an answer's round that others' prompts may take, so that it keeps 0.7 of its speed. It kept 0.71 to
# 0.76, and with a share of 0.3 only 0.63 to 0.74 (docs/results/server.md).
PROMPT_SHARE = 0.25
# No step that holds a prompt while others answer is to take longer, so that a gap in an answer stays below 0.25 s. If
# the answers' rows alone take longer, the prompt adds PROMPT_SHARE of their time.
STEP_S = 0.15
# A time beyond this multiple of the smoothed one is limited to it, and one below the inverse replaces it: rows of one
# class, up to twice as many, take up to twice as long.
_UNUSUAL = 2.0
# Rows of a step with prompts while no times are known.
FIRST_ROWS = 32
# Requests up to this many rows are not cut: drafts, and the tokens of a rejected draft.
WHOLE_ROWS = 16
_CANCEL_SEEN_S = 0.02  # as in runtimes/thread.py


@dataclass(eq=False, slots=True)
class Member:
    """One Sequence, as the scheduler sees it. Times are in seconds, on the scheduler's clock."""

    cancel: CancelFlag
    ended_at: float = -math.inf  # its last step
    answers: bool = False  # its last request was an answer's
    round_s: float | None = None  # smoothed time from step to step
    step_s: float = 0.0  # what its last step took
    missed: bool = False  # since its last step a prompt has waited for it, and it did not come
    gap_s: float = math.inf  # from its last step to its next request
    caller: Caller = field(default_factory=Caller)  # the thread of its last request

    def arrived(self, now: float) -> None:
        self.gap_s = now - self.ended_at

    def ended(self, now: float, *, answers: bool, step_s: float) -> None:
        took = now - self.ended_at
        self.step_s = step_s
        if answers and self.answers and self.gap_s < self.active_s:
            self.round_s = took if self.round_s is None else 0.75 * self.round_s + 0.25 * took
        self.ended_at, self.answers, self.missed = now, answers, False

    @property
    def active_s(self) -> float:
        """After this long without a request its answer is over."""
        return min(max(ACTIVE_S, ACTIVE_ROUNDS * max(self.step_s, self.round_s or 0.0)), MOST_ACTIVE_S)

    def is_recent(self, now: float) -> bool:
        """Whether its answer may continue, also after its drafter has read."""
        return now - self.ended_at < max(RECENT_S, self.active_s)

    def may_return(self, now: float) -> bool:
        """Whether it answers and is not silent for long."""
        return self.answers and not self.cancel.raised and self.is_recent(now)

    def is_answering(self, now: float) -> bool:
        return self.may_return(now) and now - self.ended_at < self.active_s

    def expected_s(self, now: float) -> float:
        """How long its next request is worth waiting for, so that a prompt rides along; 0.0 after its answer.

        A round takes no longer than twice the usual time, and what did not come is not waited for again.
        """
        if self.missed or not self.is_answering(now):
            return 0.0
        return RIDE_S if self.round_s is None else self.ended_at + ACTIVE_ROUNDS * self.round_s - now


@dataclass(eq=False, slots=True)
class Request:
    """A forward that a Sequence wants. ``parents`` covers all nodes of a tree; None: a chain.

    ``pairs``: the tokens' hidden rows, for a model that needs them. ``kept``: where what follows the head's norm
    goes, of every row or of the scored ones.
    """

    member: Member
    address: int  # of the es_sequence
    tokens: Ids
    position: int
    scored: int
    parents: Ids | None = None
    pairs: Hidden | None = None
    kept: Hidden | None = None
    since: float = math.inf  # when it began to wait
    waited_s: float = 0.0  # for its first step
    done: int = 0  # tokens that earlier steps computed
    company: Company = ALONE  # of its last step
    experts: int = 0  # that its last step read
    code: int | None = None  # the es_status; None until the request has ended
    gate: threading.Lock = field(default_factory=threading.Lock)  # held until it leads or has ended

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    @property
    def is_whole(self) -> bool:
        """Whether it is computed in one step: a round, and of a prompt only scored rows."""
        return self.parents is not None or self.left <= self.scored or len(self.tokens) <= WHOLE_ROWS

    @property
    def is_answer(self) -> bool:
        """Whether it is a round of an answer, before its step; the end of a prompt is none."""
        return self.is_whole and self.scored > 0 and not self.done


@dataclass(frozen=True, slots=True)
class Share:
    """The next ``count`` tokens of a request, of which the last ``scored`` are scored."""

    request: Request
    count: int
    scored: int


def _all_of(request: Request) -> Share:
    return Share(request, request.left, request.scored)


def companies_of(shares: Sequence[Share]) -> list[Company]:
    """For each share of a step the other requests in it."""
    if len(shares) == 1:
        return [ALONE]
    rows = [share.count for share in shares if share.request.is_answer]
    inside = Company(answers=len(rows) - 1, rows=sum(rows), reading=len(shares) > len(rows))
    outside = Company(answers=len(rows), rows=sum(rows), reading=len(shares) > len(rows) + 1)
    return [
        replace(inside, rows=inside.rows - share.count) if share.request.is_answer else outside for share in shares
    ]


class StepTimes:
    """Seconds of a step by its number of rows, measured while it is used."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}  # smoothed rows and seconds, by the bits of the rows

    def add(self, rows: int, seconds: float) -> None:
        """A sample. One that took unusually long, for example the first one, which reads weights from a disk, counts
        little.
        """
        key = (rows - 1).bit_length()
        old = self._known.get(key)
        if old is None or seconds < old[1] / _UNUSUAL:
            self._known[key] = (float(rows), seconds)
        else:
            seconds = min(seconds, old[1] * _UNUSUAL)
            self._known[key] = (0.75 * old[0] + 0.25 * rows, 0.75 * old[1] + 0.25 * seconds)

    def _points(self) -> tuple[list[float], list[float]]:
        """Rows, ascending, and their seconds. More rows never take less, and at most in proportion more."""
        points = sorted(self._known.values())
        rows, times = [point[0] for point in points], [point[1] for point in points]
        for i in reversed(range(len(rows) - 1)):
            times[i] = min(times[i], times[i + 1])
        for i in range(1, len(rows)):
            times[i] = min(times[i], times[i - 1] * rows[i] / rows[i - 1])
        return rows, times

    def seconds(self, rows: float) -> float | None:
        """The expected time: between two known numbers of rows on a line, above in proportion, below the least."""
        if not self._known:
            return None
        known, times = self._points()
        if rows >= known[-1]:
            return times[-1] * rows / known[-1]
        return float(np.interp(rows, known, times))

    def most_rows(self, limit_s: float) -> int:
        """The most rows that are expected to take ``limit_s``; 0 if even one takes longer."""
        if not self._known:
            return FIRST_ROWS
        low, high = 0, PREFILL_CHUNK_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if (self.seconds(middle) or 0.0) <= limit_s else (low, middle - 1)
        return low


def prompt_rows(
    times: StepTimes,
    answer_rows: int,
    rounds_s: Collection[float],
    *,
    answering: bool,
    may_return: bool = False,
    saved_s: float = 0.0,
) -> tuple[int, float]:
    """How many rows of prompts a step takes besides ``answer_rows``, with running answers of these round times.

    ``answering``: there are running answers. ``may_return``: there are silent ones. If there are none, and no
    ``answer_rows``, no answer is delayed. ``saved_s``: time for prompts that earlier steps had and did not use,
    negative if they used more; also returned, after this step. Without AVX-512 or Arm's dot products a row more may
    take longer than one step's share.
    """
    if not answering and not answer_rows:
        return max(1, times.most_rows(STEP_S)) if may_return else PREFILL_CHUNK_TOKENS, saved_s
    least_s = times.seconds(max(answer_rows, 1)) or 0.0  # what any step takes
    share_s = PROMPT_SHARE * min(rounds_s, default=math.inf)
    if not answer_rows:
        return max(1, times.most_rows(max(min(STEP_S, share_s), least_s * (1.0 + PROMPT_SHARE)))), saved_s
    fair_s = least_s + max(min(share_s, STEP_S - least_s), PROMPT_SHARE * least_s)
    most_s = min(fair_s + saved_s, max(fair_s, STEP_S, times.seconds(answer_rows + 1) or 0.0))
    rows = max(times.most_rows(most_s) - answer_rows, int(saved_s >= STEP_S))  # at last a row that takes long
    left_s = fair_s + saved_s - (times.seconds(answer_rows + rows) or 0.0)
    return max(rows, 0), min(max(left_s, -STEP_S), STEP_S)


def shares_of(waiting: Sequence[Request], room: Callable[[int], int], now: float, *, alone: bool) -> list[Share]:
    """What the next step computes: whole requests in order, then prompts.

    Prompts that have waited for MOST_WAIT_S go first, in order, then those with the fewest tokens left.
    ``room(rows)`` is how many rows prompts may take besides ``rows`` of whole requests. ``alone``: no other answer is
    running, so that a request that waits alone is not cut.
    """
    if alone and len(waiting) == 1:
        return [_all_of(waiting[0])]
    shares: list[Share] = []
    rows = scored = 0
    for request in (each for each in waiting if each.is_whole):
        if (
            len(shares) < MOST_ENTRIES
            and rows + request.left <= PREFILL_CHUNK_TOKENS
            and scored + request.scored <= MAX_SCORED_ROWS
        ):
            shares.append(Share(request, request.left, request.scored))
            rows, scored = rows + request.left, scored + request.scored

    def order(each: Request) -> tuple[bool, float]:
        waited = now - each.since >= MOST_WAIT_S
        return not waited, each.since if waited else each.left

    prompts = sorted((each for each in waiting if not each.is_whole), key=order)
    left = min(room(rows), PREFILL_CHUNK_TOKENS - rows) if prompts else 0
    for request in prompts:
        if not left or len(shares) == MOST_ENTRIES:
            break
        if request.left <= left and scored + request.scored <= MAX_SCORED_ROWS:
            shares.append(Share(request, request.left, request.scored))
            left, scored = left - request.left, scored + request.scored
        else:  # no scored row may be cut off
            count = min(left, request.left - max(request.scored, 1))
            shares.append(Share(request, count, 0))
            left -= count
    return shares


class BatchScheduler:
    """Computes the requests of one model's Sequences, one step at a time. For any thread.

    ``compute(shares)`` runs a step and returns each share's es_status.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Share]], Sequence[int]],
        *,
        turns: Turns,
        weight: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``weight``: bytes that a step reads at least. Answers that a lighter model computes draft."""
        self._compute = compute
        self._turns, self._weight = turns, weight
        self._clock = clock
        self._lock = threading.Lock()
        self._leader: Request | None = None
        self._waiting: list[Request] = []  # not those of the running step
        self._members: set[Member] = set()  # that wait, or had a step recently
        self._gone: deque[Member] = deque()  # closed, and perhaps still in ``_members``
        self._times = StepTimes()
        self._saved_s = 0.0  # for prompts, see prompt_rows

    def forget(self, member: Member) -> None:
        """The Sequence is closed: it is not waited for. Never waits.

        Garbage collection, on a thread that holds the lock, may close a Sequence and wait for this call.
        """
        self._gone.append(member)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_gone()
            finally:
                self._lock.release()

    def _drop_gone(self) -> None:
        while self._gone:
            self._members.discard(self._gone.popleft())

    def run(self, request: Request) -> int:
        """Compute the request, and return its es_status. On a thread that may wait."""
        member = request.member
        with self._lock:
            request.gate.acquire()  # never waits: the request is new
            request.since = self._clock()
            member.arrived(request.since)
            self._members.add(member)
            self._drop_gone()
            self._waiting.append(request)
            waits = self._leader is not None
            self._leader = self._leader or request
        try:
            return self._run(request, waits)
        finally:
            self._turns.went(member.caller)

    def _run(self, request: Request, waits: bool) -> int:
        try:
            self._turns.came(request.member.caller, self._weight if request.is_answer else math.inf)
            if waits:
                self._turns.crowd()
                self._wait(request)
        except BaseException:
            self._withdraw(request)
            raise
        if request.code is None:
            self._lead(request)
        assert request.code is not None
        return request.code

    def _wait(self, request: Request) -> None:
        """Until the request has ended or leads."""
        while not request.gate.acquire(timeout=_CANCEL_SEEN_S):
            if request.member.cancel.raised:
                with self._lock:
                    if request in self._waiting and request is not self._leader:
                        self._waiting.remove(request)
                        request.code = CANCELLED
                        return

    def _withdraw(self, request: Request) -> None:
        """After an error in the thread that waits: no step is to compute the request, or computes it still."""
        while True:
            with self._lock:
                if request in self._waiting:
                    self._waiting.remove(request)
                    if request is self._leader:
                        self._pass_on()
                    return
                if request.code is not None:
                    return
            request.gate.acquire(timeout=_CANCEL_SEEN_S)  # a step uses its tokens and cache

    def _pass_on(self) -> None:
        """The next request that waits leads."""
        self._leader = self._waiting[0] if self._waiting else None
        if self._leader is not None:
            self._leader.gate.release()

    def _lead(self, request: Request) -> None:
        try:
            while request.code is None:
                entered = self._enter()
                try:
                    self._step()
                finally:
                    if entered:
                        self._turns.leave()
        finally:
            with self._lock:
                if request in self._waiting:  # an error in this thread: the others are computed
                    self._waiting.remove(request)
                self._pass_on()

    # ------------------------------------------------------------------------------------------- a step

    def _enter(self) -> bool:
        """Collect a step and wait for its turn. Returns whether ``leave`` is to follow."""
        if len(self._members) == 1 and not self._turns.is_crowded:
            return False
        begun = self._clock()
        return self._turns.enter(lambda now, free_at: self._wait_s(max(begun, free_at), now))

    def _only_prompts(self) -> bool:
        return not any(each.is_whole for each in self._waiting)

    def _away(self, now: float) -> list[Member]:
        """The members that have no request now. With the lock held.

        Those that are silent for long are no longer members, so that a Sequence without others is computed
        immediately.
        """
        here = {each.member for each in self._waiting}
        self._members = {member for member in self._members if member in here or member.is_recent(now)}
        return [member for member in self._members if member not in here]

    def _wait_s(self, begun: float, now: float) -> float:
        """How long a step that is collected since ``begun`` waits for more requests; 0.0: it is complete."""
        with self._lock:
            self._drop_gone()
            away = self._away(now)
            if self._leader is not None and self._leader.member.cancel.raised:
                return 0.0
            if self._only_prompts():
                return self._ride_s(away, begun, now)
            most_s = begun + PATIENCE * (self._times.seconds(1) or 0.0) - now
            if most_s <= 0.0:
                return 0.0
            callers = {member.caller: member for member in away if member.is_answering(now)}
            for each in self._waiting:  # a thread with two Sequences of the model is here
                callers.pop(each.member.caller, None)
            if any(each.weight is not None and each.weight < self._weight for each in callers):
                return most_s
            between = [(each, member) for each, member in callers.items() if each.weight in (None, self._weight)]
            # Those that have come since then were between two forwards as well, and went first.
            came = sum(begun < each.since < math.inf for each in self._waiting)
            longest_s = (len(between) + came) * BETWEEN_S
            # A thread whose request has just ended here may not have noticed.
            left_at = [each.left_at if each.weight is None else member.ended_at for each, member in between]
            return min(most_s, max((at + longest_s - now for at in left_at), default=0.0))

    @staticmethod
    def _ride_s(away: Sequence[Member], begun: float, now: float) -> float:
        """How long prompts wait for rows of answers. Those that did not come are not awaited again before their next
        step.
        """
        expected = [member for member in away if member.expected_s(now) > 0.0]
        left_s = min(begun + RIDE_S - now, max((member.expected_s(now) for member in expected), default=0.0))
        if left_s <= 0.0:
            for member in expected:
                member.missed = True
        return left_s

    def _step(self) -> None:
        now = self._clock()
        with self._lock:
            for request in [each for each in self._waiting if each.member.cancel.raised]:
                self._end(request, CANCELLED)
            if not self._waiting or (self._leader is not None and self._leader.code is not None):
                return  # a cancelled leader does not wait for a step of others
            shares = self._choose(now)
            taken = [share.request for share in shares]
            for request in taken:
                if not request.done:
                    request.waited_s = now - request.since
            self._waiting = [each for each in self._waiting if each not in taken]
        try:
            if len(shares) > 1:
                self._turns.crowd()
            codes = list(self._compute(shares))
            after = self._clock()
            with self._lock:
                self._settle(shares, codes, after, after - now)
        except BaseException:  # an error of this thread alone: the others' requests are computed again
            with self._lock:
                self._waiting[:0] = [each for each in taken if each.code is None and each not in self._waiting]
            raise

    def _choose(self, now: float) -> list[Share]:
        """What the next step computes. With the lock held."""
        if len(self._members) == 1 == len(self._waiting):  # in a hurry: caches are cold after a forward
            return [_all_of(self._waiting[0])]
        reading = {each.member for each in self._waiting if not each.is_whole}
        begun = [member for member in self._members if member not in reading and member.may_return(now)]
        if not reading:
            self._saved_s = 0.0  # not for later prompts
        answering = [member for member in begun if member.is_answering(now)]
        rounds_s = [member.round_s for member in answering if member.round_s is not None]
        others = any(member is not self._waiting[0].member for member in begun)

        def room(rows: int) -> int:
            count, self._saved_s = prompt_rows(
                self._times,
                rows,
                rounds_s,
                answering=bool(answering),
                may_return=bool(begun),
                saved_s=self._saved_s,
            )
            return count

        return shares_of(self._waiting, room, now, alone=not others)

    def _settle(self, shares: Sequence[Share], codes: Sequence[int], now: float, took_s: float) -> None:
        if all(code == OK for code in codes):
            self._times.add(sum(share.count for share in shares), took_s)
        unfinished = []
        for share, own, company in zip(shares, codes, companies_of(shares), strict=True):
            request, code = share.request, own
            is_answer, request.company = request.is_answer, company
            if code == OK and len(shares) > 1 and request.member.cancel.raised:
                code = CANCELLED  # a shared step does not end early; alone, the forward would have
            request.member.ended(now, answers=is_answer, step_s=took_s)
            request.done += share.count
            if code == OK and request.left:
                unfinished.append(request)
            else:
                self._end(request, code)
        self._waiting[:0] = unfinished

    def _end(self, request: Request, code: int) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        request.code = code
        request.gate.release()
