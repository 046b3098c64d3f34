"""What a long file operation tells its caller: small frozen events, always delivered on the caller's own thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvent:
    """One step forward. ``done_bytes`` of ``total_bytes`` (None: not known) of what ``stage`` names.

    ``stage`` is a short phrase fit to be shown ("downloading", "waiting for another process"); ``source`` says
    where the bytes come from, and ``note`` carries a sentence where numbers do not say it (why a source failed).
    """

    stage: str
    source: str
    done_bytes: int = 0
    total_bytes: int | None = None
    note: str | None = None


ProgressCallback = Callable[[ProgressEvent], None]
"""Receives events. What it raises ends the operation and reaches the caller."""

Cancelled = Callable[[], bool]
"""Asked every few hundred milliseconds at most; True ends the operation with CancelledError."""
