"""A model that loads in the background, and is loaded again after its worker process was lost."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edgespec.errors import (
    ClosedError,
    EdgespecError,
    MemoryLimitError,
    RuntimeUnavailableError,
    WorkerLostError,
)
from edgespec.files.progress import Job
from edgespec.interfaces.model import Model, ModelFacts, Sequence
from edgespec.runtimes.thread import start_thread

# A device that was reset is usable after one to a few seconds, and a driver waits about two before it resets a hung
# device: a restart within that time would fail the same way.
RESTART_AFTER_S = 5.0

# How long the end of the process waits for a cancelled load. Our loads end after the current piece, within tens of
# milliseconds; a slower driver does not block the exit.
EXIT_S = 2.0


class StartingModel(Protocol):
    """A model that is being loaded."""

    def wait(self) -> Model:
        """The model, once it is loaded. Raises what loading raises, ClosedError or CancelledError after ``close``.

        A model that can be lost has an attribute ``lost``: the reason, or None while the model can be used.
        """

    def close(self) -> None:
        """Cancel the load from any thread, without waiting for its end."""


class LoadingHere:
    """A model that ``load`` loads in this process. ``load`` ends early once its job is cancelled."""

    def __init__(self, load: Callable[[Job], Model]) -> None:
        self._load = load
        self._stop = threading.Event()

    def wait(self) -> Model:
        return self._load(Job(cancelled=self._stop.is_set))

    def close(self) -> None:
        self._stop.set()


@dataclass(slots=True)
class _UnderWay:
    """The load in progress, as the interpreter exit hook finds it."""

    thread: threading.Thread | None = None
    starting: StartingModel | None = None
    closed: bool = False


class BackgroundModel:
    """Loads a model on a separate thread. After a loss, loads it again after a back-off, up to ``restarts`` times.

    Implements the contracts of Model and of LoadsInBackground. A cancelled load ends by itself, without a waiter, and
    closes what it loaded. Sequences of a lost model stay lost: their owner opens new ones after the restart.
    """

    def __init__(
        self,
        facts: ModelFacts,
        start: Callable[[], StartingModel],
        *,
        restarts: int = 0,
        restart_after_s: float = RESTART_AFTER_S,
        where: str = "",
    ) -> None:
        """Loading starts with ``load``. The model will have those ``facts``. What ``start`` raises is raised by
        ``open``. ``where`` ends the message that the model is still loading.
        """
        self._facts = facts
        self._start = start
        self._restart_after_s = restart_after_s
        self._changed = threading.Condition()
        self._under_way = _UnderWay()
        self._model: Model | None = None
        self._lost: list[Model] = []
        self._restarts_left = self._restarts = restarts
        self._begun = self._refused = False
        self._began_at = 0.0
        self._load_s: float | None = None
        self._loading_words = f"{facts.name} is still loading{where}"
        self._waits_because: str | None = f"{facts.name} is not loaded"
        self._off: EdgespecError | None = None
        self._closed = False
        # At interpreter exit. A loading thread holds this model, so garbage collection never meets a load in
        # progress.
        self._finalizer = weakref.finalize(self, _end, self._under_way)

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def begun(self) -> bool:
        """Whether a load has begun, in progress or ended."""
        return self._begun

    @property
    def closed(self) -> bool:
        """Whether the model was closed."""
        return self._closed

    @property
    def refused(self) -> bool:
        """Whether memory had no room when the load was to begin, which may pass."""
        return self._refused

    @property
    def load_s(self) -> float | None:
        """Seconds that the latest load took; None before the first load ended."""
        return self._load_s

    @property
    def loading_for_s(self) -> float:
        """Seconds since the load in progress began; 0.0 if there is none."""
        with self._changed:
            loading = self._begun and self._waits_because is not None
            return time.monotonic() - self._began_at if loading else 0.0

    def load(self) -> None:
        """Begin to load, unless a load has begun or this model is closed. Returns immediately."""
        with self._changed:
            if not self._begun and not self._closed:
                self._begun, self._waits_because = True, self._loading_words
                self._begin(0.0)

    @property
    def waits_because(self) -> str | None:
        """Why no Sequence can be opened yet; None if one can be opened now, or never again."""
        with self._changed:
            self._notice()
            return self._waits_because

    def wait(self, timeout_s: float | None = None) -> bool:
        """Load and wait, ``timeout_s`` seconds at most. Returns whether the load has ended.

        Raises what loading raised, if no further attempt follows.
        """
        self.load()
        with self._changed:
            self._notice()
            if not self._changed.wait_for(lambda: self._waits_because is None, timeout_s):
                return False
            self._check()
            return True

    def open(self, context_length: int) -> Sequence:
        """A fresh Sequence. Does not wait for the model.

        Raises what starting and opening raise; WorkerLostError also while the model loads, and permanently after a
        second loss.
        """
        with self._changed:
            self._notice()
            self._check()
            model = self._model
        assert model is not None  # otherwise the model is loading, or off
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
            raise self._off.with_traceback(None)  # without the frames of earlier callers
        if self._waits_because is not None:
            raise WorkerLostError(self._waits_because)

    def _notice(self) -> None:
        """Detect that the model was lost. The caller holds the lock, as in ``_lose``.

        A forked process has no threads of its parent: a load in progress there begins from scratch here.
        """
        thread = self._under_way.thread
        if self._begun and self._waits_because is not None and thread is not None and not thread.is_alive():
            self._begin(0.0)
        model = self._model
        reason: str | None = getattr(model, "lost", None)
        if model is None or reason is None or self._closed:
            return
        self._model = None
        # Closed at the end only: open sessions hold its Sequences, which report the loss more precisely than closed
        # ones.
        self._lost.append(model)
        if self._lose(f"the worker process of {self._facts.name} is lost: {reason}"):
            self._begin(self._restart_after_s)
        else:
            self._give_up(f"its worker process was lost twice, the last time because {reason}", hint=None)

    def _lose(self, words: str) -> bool:
        """Record a loss. Returns whether a restart follows."""
        if not self._restarts_left:
            return False
        self._restarts_left -= 1
        self._waits_because = f"{words}; it is being started again"
        return True

    def _give_up(self, reason: str, *, hint: str | None) -> None:
        self._off = WorkerLostError(f"{self._facts.name} is off: {reason}", hint=hint)

    # ------------------------------------------------------------------------------------ on the loading thread

    def _begin(self, after_s: float) -> None:
        """Start the loading thread. The caller holds the lock."""
        self._began_at = time.monotonic()
        thread = threading.Thread(target=self._bring_up, args=(after_s,), name="edgespec-load-model", daemon=True)
        try:
            start_thread(thread)
        except MemoryLimitError as error:
            self._failed(error)
        else:
            self._under_way.thread = thread

    def _bring_up(self, after_s: float) -> None:
        again = True
        while again:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, after_s):
                    return
            again = self._try_once()
            after_s = self._restart_after_s

    def _try_once(self) -> bool:
        """Load the model. Returns whether to try again."""
        self._began_at = time.monotonic()
        under_way = self._under_way
        try:
            under_way.starting = starting = self._start()
            if self._closed or under_way.closed:
                starting.close()
            model = starting.wait()
        except Exception as error:
            own = error if isinstance(error, EdgespecError) else None
            with self._changed:
                self._refused = isinstance(error, MemoryLimitError) and under_way.starting is None
                return self._failed(own or RuntimeUnavailableError(f"{self._facts.name} cannot be loaded: {error}"))
        finally:
            under_way.starting = None
        with self._changed:
            if not self._closed:
                self._load_s = time.monotonic() - self._began_at
                self._model, self._waits_because = model, None
                self._changed.notify_all()
                return False
        model.close()
        return False

    def _failed(self, error: EdgespecError) -> bool:
        if self._closed:
            return False
        if isinstance(error, WorkerLostError) and self._lose(error.message):
            return True
        self._waits_because = None
        if self._restarts_left == self._restarts:
            self._off = error.with_traceback(None)
        else:
            self._give_up(f"its worker process did not start again: {error.message}", hint=error.hint)
        self._changed.notify_all()
        return False

    def close(self) -> None:
        """Close the model, or cancel its load, permanently. Idempotent; does not wait for a load."""
        with self._changed:
            self._closed = True
            self._waits_because = None
            self._changed.notify_all()
            starting = self._under_way.starting
            models = [*self._lost, *([] if self._model is None else [self._model])]
        if starting is not None:
            starting.close()
        for model in models:
            model.close()

    def wait_until_ended(self, timeout_s: float | None = None) -> bool:
        """Wait ``timeout_s`` seconds at most for every load to end, cancelled ones too. Returns whether none runs."""
        thread = self._under_way.thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()


def _end(under_way: _UnderWay) -> None:
    """Cancel a load before the interpreter exits: native code must not use what the interpreter frees."""
    under_way.closed = True
    starting, thread = under_way.starting, under_way.thread
    if starting is not None:
        starting.close()
    if thread is not None and thread is not threading.current_thread():
        thread.join(EXIT_S)
