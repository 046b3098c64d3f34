"""The places that an engine's target and drafter are not in, and loading them there to be timed."""

from __future__ import annotations

import threading

from edgespec.engine.assembly import Parts
from edgespec.errors import ClosedError
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import Model
from edgespec.placement.candidates import Placement
from edgespec.placement.memory import MemoryEstimate, require_memory
from edgespec.placement.settings import (
    LoadedModel,
    drafter_memory,
    drafter_settings,
    memory_needed,
    open_drafter,
    open_model,
)
from edgespec.profiles.profile import Profile
from edgespec.runtimes.process.restarting import WorkerSettings


class Elsewhere:
    """Loads what an engine has a second time, somewhere else. ``places`` are all there are, those in use included."""

    def __init__(self, parts: Parts) -> None:
        self.places = parts.places
        self._profile = parts.profile
        self._target, self._drafter = parts.located, parts.drafter
        self._context_length = parts.wish.context_length
        self._left_bytes = parts.memory_left_bytes
        self._worker = parts.worker

    def open_target(self, place: Placement) -> LoadedModel:
        """The target in another place, to be timed there and closed.

        Raises MemoryLimitError if the machine's own memory has no room for it, and what loading raises.
        """
        target, settings = self._target, place.settings
        needed = memory_needed(target.header, target.weight_bytes, self._context_length, settings)
        require_memory(place.name, needed, self._left_bytes)
        return open_model(target, settings)

    def open_drafter(self, place: Placement) -> Model:
        """The drafter in another place, to be timed there and closed; it may still be loading.

        Raises ClosedError if there is none, MemoryLimitError, and what loading raises.
        """
        drafter = self._drafter
        if drafter is None:
            raise ClosedError("there is no drafter to be loaded elsewhere")
        needed = drafter_memory(self._profile, drafter, self._context_length, place.settings)
        require_memory(place.name, needed, self._left_bytes)
        return open_drafter(self._profile, drafter, place.settings, self._worker)


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
