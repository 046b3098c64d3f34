"""The threads and buffers that a model's Sequences share, and their forwards."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence

from edgespec.errors import MemoryLimitError
from edgespec.hardware.machine import processor_limit
from edgespec.runtimes.native.library import LEVELS, OTHER_PROCESS, EntryStruct, Threads
from edgespec.runtimes.native.scheduler import BatchScheduler, Hidden, Member, Request, Share
from edgespec.runtimes.native.weights import ModelPart
from edgespec.runtimes.thread import OwnProcess


class NativeBatch:
    """One model's threads and buffers. They exist while a cache uses them. For any thread."""

    def __init__(self, part: ModelPart, *, threads: int, level: str, weight: float) -> None:
        """``weight``: bytes that a forward reads at least."""
        self._api = part.library.api
        self._threads, self._level = threads, LEVELS[level]
        self._mixture = part.struct.experts > 0
        self._lock = threading.Lock()
        self._pointer: int | None = None
        self._process = OwnProcess()  # that opened it
        self._users = 0
        self._given: deque[Member] = deque()  # of caches that are freed and still count as users
        self.turns = part.library.turns
        self._scheduler = BatchScheduler(self._compute, turns=self.turns, weight=weight)

    def take(self, part: ModelPart) -> int:
        """The address for one more cache of ``part``, which the caller keeps alive. Raises MemoryLimitError."""
        try:
            return self._take(part)
        finally:
            self._settle()

    def _take(self, part: ModelPart) -> int:
        with self._lock:
            if self._pointer is None:
                wanted = Threads(count=self._threads, most_busy=processor_limit() or 0)
                opened = self._api.es_batch_open(ctypes.byref(part.struct), ctypes.byref(wanted), self._level)
                if not opened:
                    raise MemoryLimitError(
                        f"no memory for {self._threads} threads and their buffers",
                        needed_bytes=None,
                        available_bytes=None,
                        hint="use fewer threads, or close other programs",
                    )
                self._pointer, self._process = int(opened), OwnProcess()
            self._users += 1
            return self._pointer

    def give(self, member: Member) -> None:
        """One cache less, which is freed already. Never waits for a lock.

        Garbage collection, on a thread that holds a lock, may free a cache and wait for this call. That thread then
        settles what was given.
        """
        self._scheduler.forget(member)
        self._given.append(member)
        self._settle()

    def _settle(self) -> None:
        """Count what was given, and close the threads without users, unless another thread is about to do so."""
        while self._given and self._lock.acquire(blocking=False):
            try:
                while self._given:
                    self._given.popleft()
                    self._users -= 1
                if not self._users and self._pointer is not None:
                    pointer, self._pointer = self._pointer, None
                    self._api.es_batch_close(pointer)
            finally:
                self._lock.release()

    def forward(self, request: Request) -> int:
        """Compute a cache's request, with those of others that wait. Returns its es_status."""
        if self._process.left:  # a step that ran in the parent would be waited for without an end
            return OTHER_PROCESS
        return self._scheduler.run(request)

    def _compute(self, shares: Sequence[Share]) -> Sequence[int]:
        entries = (EntryStruct * len(shares))()
        for entry, share in zip(entries, shares, strict=True):
            request = share.request
            entry.sequence = request.address
            entry.tokens = request.tokens.ctypes.data + request.done * request.tokens.itemsize
            entry.start = request.position + request.done
            entry.count, entry.scored = share.count, share.scored
            entry.keeps_all = request.kept is not None and len(request.kept) > request.scored
            entry.pairs = _from(request.pairs, request.done)
            entry.kept = _from(request.kept, request.done if entry.keeps_all else 0)
            if request.parents is not None:
                entry.start, entry.parents = request.position, request.parents.ctypes.data
                entry.first = len(request.parents) - share.count
        code = self._api.es_batch_forward(self._pointer, entries, len(shares))
        if self._mixture:
            read = int(self._api.es_experts_read(self._pointer))
            for share in shares:
                share.request.experts = read
        return [int(code or entry.status) for entry in entries]


def _from(rows: Hidden | None, first: int) -> int | None:
    """The address of a row; None without any."""
    return None if rows is None else rows.ctypes.data + first * rows.strides[0]
