"""The models that draft beside a target: loaded at their first proposal, shared by all sessions of an engine."""

from __future__ import annotations

import threading

from edgespec.decoding.contracts import Model
from edgespec.errors import ClosedError
from edgespec.locate import LocatedModel
from edgespec.opening import drafter_memory, drafter_settings, open_drafter
from edgespec.planning.memory import MemoryEstimate, require_memory
from edgespec.profiles.profile import Profile
from edgespec.runtimes.restarting import WorkerSettings


class DrafterModels:
    """Loads each model once, as long as all of them together leave the target its memory. Thread-safe."""

    def __init__(self, profile: Profile, context_length: int, worker: WorkerSettings) -> None:
        self._profile = profile
        self._context_length = context_length
        self._worker = worker
        self._lock = threading.Lock()
        self._loaded: dict[str, tuple[Model, MemoryEstimate]] = {}  # by identity
        self._closed = False

    def get(self, located: LocatedModel, threads: int, allowed_bytes: int) -> Model:
        """The model, loaded for so many threads unless it is already; one in a process of its own may still load.

        ``allowed_bytes`` may be used by all drafters together. Raises ClosedError, MemoryLimitError if it does not
        fit, and what loading raises.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("this engine is closed")
            if located.identity not in self._loaded:
                settings = drafter_settings(self._profile, threads, located)
                estimate = drafter_memory(self._profile, located, self._context_length, settings)
                taken = sum(own.total_bytes for _, own in self._loaded.values())
                require_memory(located.name, estimate, allowed_bytes - taken)
                model = open_drafter(self._profile, located, settings, self._worker)
                self._loaded[located.identity] = model, estimate
            return self._loaded[located.identity][0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models that are loaded now, or about to be."""
        with self._lock:
            return tuple(model.facts.name for model, _ in self._loaded.values())

    def unload(self) -> None:
        """Close what is loaded; it is loaded again, perhaps otherwise, when it is wanted."""
        with self._lock:
            loaded, self._loaded = self._loaded, {}
        for model, _ in loaded.values():
            model.close()

    def close(self) -> None:
        """Close what is loaded, for ever. Idempotent."""
        with self._lock:
            self._closed = True
        self.unload()
