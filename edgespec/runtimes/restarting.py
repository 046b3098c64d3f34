"""One second chance for a model whose process was lost, then none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from edgespec.decoding.contracts import ModelFacts, Sequence
from edgespec.errors import ClosedError, EdgespecError, WorkerLostError

__all__ = ["RESTART_AFTER_S", "LosableModel", "RestartingModel"]

# A device that was reset is back after one to a few seconds, and drivers themselves wait about two before they reset
# one that hangs: a restart within that time would be lost the same way.
RESTART_AFTER_S = 5.0


class LosableModel(Protocol):
    """A Model that can be lost, and then says why."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def lost(self) -> str | None:
        """Why it cannot be used any more; None while it can."""

    def open(self, context_length: int) -> Sequence: ...

    def close(self) -> None: ...


class RestartingModel:
    """Opens Sequences on a model, and starts the model again once after it was lost. Implements the Model contract.

    Sequences of the lost model stay lost: their owner opens others here, at once or when ``restart_due``.
    """

    def __init__(
        self,
        start: Callable[[], LosableModel],
        *,
        restart_after_s: float = RESTART_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the model. Raises what ``start`` raises."""
        self._start = start
        self._restart_after_s = restart_after_s
        self._clock = clock
        self._lock = threading.Lock()
        self._model = start()
        self._facts = self._model.facts
        self._noticed_at: float | None = None
        self._restarts_left = 1
        self._off_because: str | None = None
        self._closed = False

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def lost(self) -> str | None:
        """Why no Sequence can be opened right now; None if one can."""
        with self._lock:
            self._notice()
            if self._off_because is None and self._is_due():
                return None
            return self._off_because or self._model.lost

    @property
    def off_because(self) -> str | None:
        """Why it is given up for good; None while it is not."""
        with self._lock:
            self._notice()
            return self._off_because

    def open(self, context_length: int) -> Sequence:
        """A fresh Sequence, of a new process where the last one was lost and its back-off is over.

        Raises what opening raises; WorkerLostError before the back-off is over, and for good after a second loss or
        a restart that failed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"model {self._facts.name} is closed")
            self._notice()
            if self._off_because is not None:
                raise WorkerLostError(self._off_because)
            if not self._is_due():
                raise WorkerLostError(f"{self._facts.name} waits before its worker process is started again")
            if self._noticed_at is not None:
                self._restart()
            model = self._model
        return model.open(context_length)

    def _notice(self) -> None:
        reason = self._model.lost
        if reason is None or self._noticed_at is not None or self._off_because is not None:
            return
        if self._restarts_left:
            self._noticed_at = self._clock()
        else:
            self._off_because = f"{self._facts.name} is off: its worker process was lost twice, now since {reason}"

    def _is_due(self) -> bool:
        return self._noticed_at is None or self._clock() - self._noticed_at >= self._restart_after_s

    def _restart(self) -> None:
        self._restarts_left -= 1
        self._model.close()
        try:
            self._model = self._start()
        except EdgespecError as error:
            self._off_because = f"{self._facts.name} is off: its worker process did not start again: {error}"
            raise WorkerLostError(self._off_because, hint=error.hint) from error
        self._noticed_at = None

    def close(self) -> None:
        """Close the model there is, for ever. Idempotent."""
        with self._lock:
            self._closed = True
            model = self._model
        model.close()
