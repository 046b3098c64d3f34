"""Long operations on files: what they tell, always on the caller's thread, and how they are ended."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from edgespec.errors import CancelledError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvent:
    """Progress of ``stage``: ``done_bytes`` of ``total_bytes`` (None: not known).

    ``stage`` is a short phrase for the screen ("downloading", "waiting for another process"), ``source`` is where
    the bytes come from, and ``note`` is a sentence that numbers cannot express (why a source failed).
    """

    stage: str
    source: str
    done_bytes: int = 0
    total_bytes: int | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Loading:
    """A step of loading; ``fraction`` (0 to 1) is None if it is not known."""

    stage: str
    fraction: float | None = None


ProgressCallback = Callable[[ProgressEvent], object]
"""Receives events. An exception of the callback ends the operation and reaches the caller."""

LoadProgress: TypeAlias = Callable[[Loading | ProgressEvent], None]

Cancelled = Callable[[], bool]
"""Called at least every few hundred milliseconds; True ends the operation with CancelledError."""


def _untold(_event: ProgressEvent) -> None:
    """No progress is shown."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Job:
    """Who follows a long operation and may end it."""

    progress: ProgressCallback = _untold
    cancelled: Cancelled = _never

    @classmethod
    def of(cls, progress: ProgressCallback | None, cancelled: Cancelled | None) -> Job:
        """From the arguments of a public function, which may be None."""
        return cls(progress or _untold, cancelled or _never)

    def tell(
        self,
        stage: str,
        source: str,
        *,
        done_bytes: int = 0,
        total_bytes: int | None = None,
        note: str | None = None,
    ) -> None:
        """Report a ProgressEvent of these fields."""
        event = ProgressEvent(stage=stage, source=source, done_bytes=done_bytes, total_bytes=total_bytes, note=note)
        self.progress(event)

    def check(self, message: str) -> None:
        """Raise CancelledError with this message if the operation was cancelled."""
        if self.cancelled():
            raise CancelledError(message)


def follow(
    steps: Generator[float, None, T],
    label: str,
    progress: LoadProgress,
    around: AbstractContextManager[object] | None = None,
) -> T:
    """Run ``steps``, which yield the finished fraction, each inside ``around``, and return their result."""
    with closing(steps):
        while True:
            try:
                with around or nullcontext():
                    fraction = next(steps)
            except StopIteration as done:
                result: T = done.value
                return result
            progress(Loading(label, fraction))


QUIET = Job()
"""A job without progress that is never cancelled."""
