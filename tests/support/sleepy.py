"""Drafting that takes real time, on a separate thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from edgespec.errors import CancelledError
from edgespec.interfaces.drafting import ChainGate, Proposal


class Sleepy:
    """Wraps a DraftState: sleeps before each token, ends at its gate, and stops when cancelled.

    ``pace``: the seconds of each token; the other arguments are the state's.
    """

    def __init__(self, *state: Any, pace: Callable[[], float]) -> None:
        super().__init__(*state)
        self._live_curve = pace
        self._stop = threading.Event()
        self.busy = 0

    def slowly(self, ask: Callable[[], Proposal], gate: ChainGate | None) -> Proposal:
        """The tokens that ``ask`` proposes before it is cancelled."""
        self.busy += 1
        assert self.busy == 1, "two proposals in parallel"
        try:
            whole = ask()
            for count in range(1, len(whole.tokens) + 1):
                if self._stop.wait(self._live_curve()):
                    raise CancelledError("the drafter was cancelled")
                if gate is not None and not gate.goes_on():
                    return whole.cut(count)
            return whole
        finally:
            self.busy -= 1

    def observe(self, outcome: Any) -> None:
        assert self.busy == 0, "observed while drafting"
        super().observe(outcome)  # type: ignore[misc]

    def cancel(self) -> None:
        super().cancel()  # type: ignore[misc]
        self._stop.set()

    def reset_cancel(self) -> None:
        super().reset_cancel()  # type: ignore[misc]
        self._stop.clear()
