"""Progress events of long file operations, always delivered on the caller's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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


ProgressCallback = Callable[[ProgressEvent], None]
"""Receives events. An exception of the callback ends the operation and reaches the caller."""

Cancelled = Callable[[], bool]
"""Called at least every few hundred milliseconds; True ends the operation with CancelledError."""
