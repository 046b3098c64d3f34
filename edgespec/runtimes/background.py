"""A model that is started beside whoever uses it, and once more after it was lost; then it is off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from edgespec.errors import ClosedError, EdgespecError, RuntimeUnavailableError, WorkerLostError
from edgespec.interfaces.model import ModelFacts, Sequence

# A device that was reset is back after one to a few seconds, and drivers themselves wait about two before they reset
# one that hangs: a restart within that time would be lost the same way.
RESTART_AFTER_S = 5.0


class LosableModel(Protocol):
    """A Model that can be lost, and then says why."""

    @property
    def lost(self) -> str | None:
        """Why it cannot be used any more; None while it can."""

    def open(self, context_length: int) -> Sequence: ...

    def close(self) -> None: ...


class StartingModel(Protocol):
    """A model that is being loaded."""

    def wait(self) -> LosableModel:
        """The model, once it is loaded. Raises what loading raises, ClosedError after ``close``."""

    def close(self) -> None:
        """Give it up, from any thread."""


class BackgroundModel:
    """Starts a model on a thread of its own, and starts it again once after it was lost, a back-off later.

    Implements the contracts of Model and of LoadsInBackground. Sequences of a lost model stay lost: their owner opens
    others when it need not wait any more.
    """

    def __init__(
        self, facts: ModelFacts, start: Callable[[], StartingModel], *, restart_after_s: float = RESTART_AFTER_S
    ) -> None:
        """Begin to start the model, which will have those facts; what that raises is raised by ``open``."""
        self._facts = facts
        self._start = start
        self._restart_after_s = restart_after_s
        self._changed = threading.Condition()
        self._starting: StartingModel | None = None
        self._model: LosableModel | None = None
        self._lost: list[LosableModel] = []
        self._restarts_left = 1
        self._waits_because: str | None = f"{facts.name} is still loading in a process of its own"
        self._off: EdgespecError | None = None
        self._closed = False
        self._begin(0.0)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def waits_because(self) -> str | None:
        """Why no Sequence can be opened now, though one can later; None if one can, or if none ever can again."""
        with self._changed:
            self._notice()
            return self._waits_because

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until there is nothing to wait for, for so many seconds at most; whether there is not.

        Raises what starting raised, if the model is given up.
        """
        with self._changed:
            self._notice()
            if not self._changed.wait_for(lambda: self._waits_because is None, timeout_s):
                return False
            self._check()
            return True

    def open(self, context_length: int) -> Sequence:
        """A fresh Sequence. Does not wait for the model.

        Raises what starting and opening raise; WorkerLostError also while there is something to wait for, and for
        good after a second loss.
        """
        with self._changed:
            self._notice()
            self._check()
            model = self._model
        assert model is not None  # else there is something to wait for, or it is off
        try:
            return model.open(context_length)
        except WorkerLostError:
            with self._changed:
                self._notice()
                self._check()
            raise

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"model {self._facts.name} is closed")
        if self._off is not None:
            raise self._off.with_traceback(None)  # of those who were told before
        if self._waits_because is not None:
            raise WorkerLostError(self._waits_because)

    def _notice(self) -> None:
        """Look whether the model was lost meanwhile. The lock is held, as in ``_lose``."""
        model = self._model
        reason = None if model is None else model.lost
        if model is None or reason is None or self._closed:
            return
        self._model = None
        # Closed at the end only: sessions still hold its Sequences, which say better than closed ones what happened.
        self._lost.append(model)
        if self._lose(f"the worker process of {self._facts.name} is lost: {reason}"):
            self._begin(self._restart_after_s)
        else:
            self._give_up(f"its worker process was lost twice, now since {reason}", hint=None)

    def _lose(self, words: str) -> bool:
        """Whether there is another chance; then it is waited for."""
        if not self._restarts_left:
            return False
        self._restarts_left -= 1
        self._waits_because = f"{words}; it is being started again"
        return True

    def _give_up(self, reason: str, *, hint: str | None) -> None:
        self._off = WorkerLostError(f"{self._facts.name} is off: {reason}", hint=hint)

    # ------------------------------------------------------------------------------- on a thread of its own

    def _begin(self, after_s: float) -> None:
        self._thread = threading.Thread(
            target=self._bring_up, args=(after_s,), name="edgespec-worker-start", daemon=True
        )
        self._thread.start()

    def _bring_up(self, after_s: float) -> None:
        again = True
        while again:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, after_s):
                    return
            again = self._try_once()
            after_s = self._restart_after_s

    def _try_once(self) -> bool:
        """Start the model; whether that is to be tried again."""
        try:
            starting = self._start()
            with self._changed:
                self._starting, closed = starting, self._closed
            if closed:
                starting.close()
            model = starting.wait()
        except Exception as error:
            own = error if isinstance(error, EdgespecError) else None
            with self._changed:
                return self._failed(own or RuntimeUnavailableError(f"a worker process cannot be started: {error}"))
        with self._changed:
            self._starting = None
            if not self._closed:
                self._model, self._waits_because = model, None
                self._changed.notify_all()
                return False
        model.close()
        return False

    def _failed(self, error: EdgespecError) -> bool:
        self._starting = None
        if self._closed:
            return False
        if isinstance(error, WorkerLostError) and self._lose(error.message):
            return True
        self._waits_because = None
        if self._restarts_left:
            self._off = error.with_traceback(None)
        else:
            self._give_up(f"its worker process did not start again: {error.message}", hint=error.hint)
        self._changed.notify_all()
        return False

    def close(self) -> None:
        """Close the model there is, or give up the one that is starting, for ever. Idempotent."""
        with self._changed:
            self._closed = True
            self._waits_because = None
            self._changed.notify_all()
            starting, self._starting = self._starting, None
            models = [*self._lost, *([] if self._model is None else [self._model])]
            thread = self._thread
        if starting is not None:
            starting.close()
        thread.join()
        for model in models:
            model.close()
