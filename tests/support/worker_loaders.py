"""Loaders for worker processes in tests, named on the command line as ``module:function``."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import abc
from concurrent.futures import Future
from typing import TypeVar

from edgespec.errors import MemoryLimitError
from edgespec.interfaces.model import Model
from edgespec.interfaces.rows import Rows
from edgespec.runtimes.process.frames import LoadRequest
from tests.support.fake_runtime import FakeModel, FakeSequence, Faults

T = TypeVar("T")


def command(loader: str) -> list[str]:
    """The command of a worker that loads with this function of this module."""
    return [sys.executable, "-m", "edgespec.runtimes.process.worker", "--loader", f"{__name__}:{loader}"]


def fake(_request: LoadRequest) -> Model:
    return FakeModel(50, seed=3)


def with_nan(_request: LoadRequest) -> Model:
    """Its second forward gives one token the score NaN."""
    return FakeModel(50, seed=3, faults=Faults(nan_at=2))


def with_little_memory(_request: LoadRequest) -> Model:
    """Opens sequences of at most 16 tokens."""
    return _Changed(room=16)


def printing(_request: LoadRequest) -> Model:
    """Prints at every forward, as native code or careless Python may."""
    return _Changed(before_forward=_print_everywhere)


def buggy(_request: LoadRequest) -> Model:
    """Fails in a way outside every contract."""
    return _Changed(before_forward=lambda: [].pop())


def aborting(_request: LoadRequest) -> Model:
    """Aborts like a native assertion, with a last line on stderr."""
    return _Changed(before_forward=_abort)


def unresponsive(_request: LoadRequest) -> Model:
    """Never returns from a forward."""
    return _Changed(before_forward=lambda: time.sleep(600))


def slow(_request: LoadRequest) -> Model:
    """Does not finish loading."""
    time.sleep(600)
    return FakeModel()


def wrong_about_itself(_request: LoadRequest) -> Model:
    """Feeds one token more than requested."""
    return _Changed(more=1)


def _print_everywhere() -> None:
    print("python says hello", flush=True)
    os.write(1, b"\xff\xff\xff\xff native says hello\n")
    library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
    library.puts(b"and C says hello")
    library.fflush(None)


def _abort() -> None:
    os.write(2, b"GGML_ASSERT(device lost) failed\n")
    os.abort()


class _Changed(FakeModel):
    def __init__(
        self, before_forward: abc.Callable[[], object] = lambda: None, *, more: int = 0, room: int = 1000
    ) -> None:
        super().__init__(50, seed=3)
        self.room = room
        self.before_forward = before_forward
        self.more = more

    def open(self, context_length: int) -> FakeSequence:
        if context_length > self.room:
            words = f"there is no memory for {context_length} tokens"
            raise MemoryLimitError(words, needed_bytes=context_length, available_bytes=None, hint=f"try {self.room}")
        return _ChangedSequence(self, context_length)


class _ChangedSequence(FakeSequence):
    def submit(self, job: abc.Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        threading.Thread(target=lambda: future.set_result(job()), daemon=True).start()  # the caller reads on
        return future

    def forward(self, tokens: abc.Sequence[int], rows: int) -> Rows:
        assert isinstance(self.model, _Changed)
        self.model.before_forward()
        return super().forward([*tokens, *[1] * self.model.more], rows)
