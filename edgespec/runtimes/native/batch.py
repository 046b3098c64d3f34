"""The threads and buffers that a model's Sequences share."""

from __future__ import annotations

import ctypes
import threading

from edgespec.errors import MemoryLimitError
from edgespec.hardware.machine import processor_limit
from edgespec.runtimes.native.library import LEVELS, Threads
from edgespec.runtimes.native.weights import ModelPart


class NativeBatch:
    """One model's threads and buffers. They exist while a cache uses them. For any thread."""

    def __init__(self, *, threads: int, level: str) -> None:
        self._threads, self._level = threads, LEVELS[level]
        self.turn = threading.Lock()  # held during a forward
        self._lock = threading.Lock()
        self._pointer: int | None = None
        self._users = 0

    def take(self, part: ModelPart) -> int:
        """The address for one more cache of ``part``, which the caller keeps alive. Raises MemoryLimitError."""
        with self._lock:
            if self._pointer is None:
                wanted = Threads(count=self._threads, most_busy=processor_limit() or 0)
                opened = part.library.api.es_batch_open(ctypes.byref(part.struct), ctypes.byref(wanted), self._level)
                if not opened:
                    raise MemoryLimitError(
                        f"no memory for {self._threads} threads and their buffers",
                        needed_bytes=None,
                        available_bytes=None,
                        hint="use fewer threads, or close other programs",
                    )
                self._pointer = int(opened)
            self._users += 1
            return self._pointer

    def give(self, part: ModelPart) -> None:
        """One cache less, which is freed already."""
        with self._lock:
            self._users -= 1
            if not self._users and self._pointer is not None:
                pointer, self._pointer = self._pointer, None
                part.library.api.es_batch_close(pointer)
