"""The scheduler of shared forwards with a fake computation: cancels, errors, and many threads."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from edgespec.runtimes.native.scheduler import BatchScheduler, Member, Request, Share
from edgespec.runtimes.native.turns import Turns
from tests.fuzz.findings import Findings

THREADS = 6
WAIT_S = 30.0
START = 10  # the position of each request
MOST_ROWS, MOST_SCORED = 256, 64
OK, FAILED = 0, 2


class Flag:
    raised = False

    def set(self, raised: bool) -> None:
        self.raised = raised


class Computation:
    """Notes what was computed of each member's request, and that one step runs at a time."""

    def __init__(self, seed: float, findings: Findings) -> None:
        self.computed: dict[Member, list[tuple[int, int]]] = {}
        self._chance, self._findings = random.Random(seed), findings
        self._running = threading.Lock()

    def __call__(self, shares: Sequence[Share]) -> Sequence[int]:
        self._findings.unless(self._running.acquire(blocking=False), "two steps ran at the same time")
        try:
            if self._chance.random() < 0.01:
                raise MemoryError("no memory")
            time.sleep(self._chance.choice((0, 0, 0.0002, 0.001)))
            rows, scored = sum(each.count for each in shares), sum(each.scored for each in shares)
            self._findings.unless(
                rows <= MOST_ROWS and scored <= MOST_SCORED, f"a step has {rows} rows, {scored} scored"
            )
            members = {each.request.member for each in shares}
            self._findings.unless(len(members) == len(shares), "a member is in a step twice")
            for each in shares:
                first = each.request.position + each.request.done
                self.computed[each.request.member].append((first, first + each.count))
            self._findings.counts[f"steps of {min(len(shares), 4)}"] += 1
            return [OK if self._chance.random() > 0.01 else FAILED for _ in shares]
        finally:
            self._running.release()


def request(member: Member, chance: random.Random) -> Request:
    """A round, a tree, or a prompt."""
    kind = chance.random()
    count = chance.randint(1, 9) if kind < 0.6 else chance.randint(1, 20) if kind < 0.8 else chance.randint(17, 256)
    tokens = np.zeros(count, np.int32)
    if kind < 0.8:
        return Request(member, 0, tokens, START, count, parents=tokens if kind >= 0.6 else None)
    return Request(member, 0, tokens, START, chance.choice((0, 0, 1, 5)))


def client(chance: random.Random, rounds: Iterable[int], scheduler: BatchScheduler, work: Computation) -> None:
    findings = work._findings
    for _ in rounds:
        member = Member(Flag())  # type: ignore[arg-type]
        for _ in range(chance.randint(1, 20)):
            wanted = request(member, chance)
            work.computed[member], member.cancel.raised = [], False  # type: ignore[misc]
            if chance.random() < 0.1:
                threading.Timer(chance.random() * 0.003, member.cancel.set, (True,)).start()
            try:
                code = scheduler.run(wanted)
            except MemoryError:
                code = FAILED
            findings.counts["requests"] += 1
            if code == OK:
                at = START
                for first, end in sorted(work.computed[member]):
                    findings.unless(first <= at, "tokens were left out")
                    at = max(at, end)
                findings.unless(at == START + len(wanted.tokens), "a request ended too early")
        scheduler.forget(member)
        del work.computed[member]


def fuzz(chance: random.Random, rounds: Iterable[int], findings: Findings) -> None:
    before, turns, shared = sys.getswitchinterval(), Turns(), iter(rounds)
    taking = threading.Lock()

    def taken() -> Iterable[int]:
        while True:
            with taking:
                number = next(shared, None)
            if number is None:
                return
            yield number

    clients = list[threading.Thread]()
    for _ in range(2):  # two models share the turns
        work = Computation(chance.random(), findings)
        scheduler = BatchScheduler(work, turns=turns, weight=chance.random())
        for _ in range(THREADS // 2):
            arguments = (random.Random(chance.random()), taken(), scheduler, work)
            clients.append(threading.Thread(target=client, args=arguments, daemon=True))
    sys.setswitchinterval(1e-5)
    try:
        for each in clients:
            each.start()
        for each in clients:
            while each.is_alive():
                seen = findings.counts["requests"]
                each.join(WAIT_S)
                if each.is_alive() and findings.counts["requests"] == seen:
                    findings.unless(False, "a request did not end")
                    return
    finally:
        sys.setswitchinterval(before)
