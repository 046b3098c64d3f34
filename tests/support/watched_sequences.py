"""Watch and replace the forwards of both runtimes that a model may have on the processor."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from edgespec.runtimes.llama.model import LlamaSequence
from edgespec.runtimes.native.sequence import NativeSequence

ProcessorSequence = LlamaSequence | NativeSequence
KINDS: tuple[type[ProcessorSequence], ...] = (LlamaSequence, NativeSequence)

# Called instead of a forward with the forward itself, the sequence, the tokens and the number of rows.
Forwarding = Callable[[Callable[[list[int], int], Any], ProcessorSequence, list[int], int], Any]


def replace_forwards(patch: pytest.MonkeyPatch, forwarding: Forwarding) -> None:
    """Let ``forwarding`` replace every forward of every sequence."""
    for kind in KINDS:

        def forward(self: Any, tokens: list[int], rows: int, real: Callable[..., Any] = kind.forward) -> Any:
            return forwarding(partial(real, self), self, tokens, rows)

        patch.setattr(kind, "forward", forward)


def watch_forwards(patch: pytest.MonkeyPatch, told: Callable[[ProcessorSequence, list[int], int], object]) -> None:
    """Call ``told`` before every forward with the sequence, the tokens and the number of rows."""

    def watched(
        real: Callable[[list[int], int], Any], sequence: ProcessorSequence, tokens: list[int], rows: int
    ) -> Any:
        told(sequence, tokens, rows)
        return real(tokens, rows)

    replace_forwards(patch, watched)


class HeldAnswer:
    """The next answer: at its tenth token it has ``come``, and waits for ``release``."""

    def __init__(self, patch: pytest.MonkeyPatch, wait_s: float = 60.0) -> None:
        self.come, self.release = threading.Event(), threading.Event()
        self._steps, self._wait_s = itertools.count(1), wait_s
        watch_forwards(patch, self._hold)

    def _hold(self, _sequence: object, tokens: list[int], _rows: int) -> None:
        if len(tokens) == 1 and next(self._steps) == 10:
            self.come.set()
            assert self.release.wait(self._wait_s)


def is_closed(sequence: ProcessorSequence) -> bool:
    """Whether the sequence's thread and cache are gone."""
    return not sequence._worker._thread.is_alive()
