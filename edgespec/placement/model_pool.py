"""The models of an engine beside its target: drafters, loaded once when they are wanted, and models to be timed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from edgespec.errors import ClosedError
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import HOST
from edgespec.placement.candidates import Placement, Placements
from edgespec.placement.memory import memory_needed, require_memory
from edgespec.placement.prepared import Preparation, PreparedModel, prepare_drafter, prepare_model
from edgespec.runtimes.background import BackgroundModel
from edgespec.runtimes.process.settings import WorkerSettings
from edgespec.runtimes.runtime import LoadedModel

# Bytes of a model's file that a load takes in within a second: mapped from what an earlier load prepared, and laid
# out anew. The slower of two machines with two cores each: 1.12 GB in 0.3 s, and 0.49 GB in 1.6 s
# (docs/results/native.md). For other runtimes it is a guess, until they were loaded once.
_MAPPED_BYTES_PER_S, _PREPARED_BYTES_PER_S = 3.7e9, 0.3e9


class ModelPool:
    """Loads models as long as all of them together leave the target its memory. Thread-safe.

    ``target`` is the target's file and ``drafter`` the model that drafts for it; ``whole_drafter`` is the file that a
    drafter with a trimmed head was made from. ``places`` are all that target and drafter could be in, those in use
    included. ``left_bytes`` may be used beyond the target and one session.
    """

    def __init__(
        self,
        prepare: Preparation,
        target: LocatedModel,
        drafter: PreparedModel | None,
        whole_drafter: LocatedModel | None,
        places: Placements,
        left_bytes: int,
        worker: WorkerSettings,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.whole_drafter = whole_drafter
        self.places = places
        self.left_bytes = left_bytes
        self._prepare = prepare
        self._worker = worker
        self._lock = threading.Lock()
        self._drafting: dict[str, tuple[BackgroundModel, PreparedModel]] = {}  # by identity
        self._took_s: dict[str, float] = {}  # what loading them took the last time
        self._others: list[LoadedModel] = []
        self._closed = False

    # -------------------------------------------------------------------------------------- drafters

    def drafter_model(self) -> BackgroundModel:
        """The drafter, shared by all sessions. Nothing is loaded before its ``load``.

        Loading it fails with MemoryLimitError, before it begins, if it does not fit beside the target. Raises
        ClosedError if there is none.
        """
        return self._drafter(self.drafter)

    def whole_drafter_model(self) -> BackgroundModel:
        """The model that a trimmed drafter was made from, for texts that are not what the head was cut for.

        As ``drafter_model``. Raises what describing it raises as well.
        """
        whole = self.whole_drafter
        return self._drafter(None if whole is None else self._prepare.drafter(whole))

    def _drafter(self, drafter: PreparedModel | None) -> BackgroundModel:
        with self._lock:
            if self._closed or drafter is None:
                raise ClosedError("this engine is closed")
            identity = drafter.file.identity
            if identity not in self._drafting:
                # Weakly: a pool that is forgotten must not live on through its own models.
                check = partial(_check_memory, weakref.ref(self), drafter)
                self._drafting[identity] = drafter.in_background(self._worker, check), drafter
            return self._drafting[identity][0]

    def load_prepared(self) -> None:
        """Begin to load the drafter where that only maps what an earlier load prepared. Returns at once."""
        if self.drafter is not None and self.drafter.is_prepared:
            self.drafter_model().load()

    @property
    def load_s(self) -> float:
        """Seconds that loading the drafter is expected to take from an answer under way; 0.0 once it is loaded, where
        there is none, and on a device of its own, where an answer goes on beside it.

        As long as the last time, or by its size.
        """
        own = self.drafter
        if own is None or own.settings.device != HOST:
            return 0.0
        try:
            model = self.drafter_model()
        except ClosedError:
            return 0.0
        if model.waits_because is None:
            return 0.0
        took_s = self._took_s.get(own.file.identity) or _expected_s(own)
        return max(0.0, took_s - model.loading_for_s)

    def _taken_bytes(self, drafter: PreparedModel) -> int:
        """What drafters other than that one take, those included that are being loaded."""
        with self._lock:
            others = [own for model, own in self._drafting.values() if model.begun and own is not drafter]
        return sum(own.memory.total_bytes for own in others)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the drafters that are loaded now, or about to be."""
        with self._lock:
            return tuple(model.facts.name for model, _ in self._drafting.values() if model.begun)

    def use_threads(self, threads: int) -> None:
        """Close the drafters; they are loaded again, on so many threads, when they are wanted."""
        own = self._prepare
        if threads != own.threads:
            self._prepare = Preparation(own.profile, threads, own.context_length)
            if self.drafter is not None:
                self.drafter = self._prepare.drafter(self.drafter.file)
        for model in self._unload():
            model.wait_until_ended()  # two in memory at once are one too many

    def _unload(self) -> list[BackgroundModel]:
        """Close the drafters; one that is being loaded ends by itself."""
        with self._lock:
            loaded, self._drafting = self._drafting, {}
        models = [model for model, _ in loaded.values()]
        for identity, (model, _) in loaded.items():
            if model.load_s is not None:
                self._took_s[identity] = model.load_s
        for model in models:
            model.close()
        return models

    # ------------------------------------------------------------------------------ models to be timed

    def open_target(self, place: Placement) -> BackgroundModel:
        """The target in another place, to be loaded, timed there and closed.

        Raises MemoryLimitError if the machine's own memory has no room for it, and what describing it raises.
        """
        model = prepare_model(self.target, place.settings, self._prepare.context_length)
        require_memory(place.name, model.memory, self.left_bytes)
        return model.in_background(self._worker)

    def open_drafter(self, place: Placement) -> BackgroundModel:
        """The drafter in another place, to be loaded, timed there and closed.

        Raises ClosedError if there is none, MemoryLimitError, and what describing it raises.
        """
        if self.drafter is None:
            raise ClosedError("there is no drafter to be loaded in another place")
        own = self._prepare
        drafter = prepare_drafter(own.profile, self.drafter.file, place.settings, own.context_length)
        require_memory(place.name, drafter.memory, self.left_bytes)
        return drafter.in_background(self._worker)

    def load_comparable(
        self, files: Sequence[LocatedModel], context_length: int, *, for_prompts: bool = False
    ) -> tuple[LoadedModel, ...]:
        """Other models, each in the setting that is known to decode fastest; closed with the pool.

        ``for_prompts``: after them those that can decode, each in the setting that reads prompts fastest, where that
        is another one.

        Raises MemoryLimitError, before anything is loaded, if they do not all fit beside the drafter with two caches
        each (a session's, and one to be timed in), and what loading raises.
        """
        models = [self._prepare.target(file) for file in files]
        if for_prompts:
            models += [other for model in models if (other := self._prepare.for_prompts(model)) is not None]
        with self._lock:
            if self._closed:
                raise ClosedError("this engine is closed")
            left = self.left_bytes - (0 if self.drafter is None else self.drafter.memory.total_bytes)
            taken = 0
            for model in models:
                once = memory_needed(model.file, model.settings, context_length)
                twice = replace(once, cache_bytes=2 * once.cache_bytes, buffers_bytes=2 * once.buffers_bytes)
                require_memory(model.file.name, twice, left - taken)
                taken += twice.total_bytes
            self.left_bytes -= taken
        return tuple(self.keep(model.load()) for model in models)

    def keep(self, model: LoadedModel) -> LoadedModel:
        """That model, which is closed with the pool from now on."""
        with self._lock:
            self._others.append(model)
        return model

    def close(self) -> None:
        """Close what is loaded, for ever. Idempotent."""
        with self._lock:
            self._closed = True
            others, self._others = self._others, []
        self._unload()
        for other in others:
            other.close()


def _expected_s(drafter: PreparedModel) -> float:
    """Seconds to load it, by its size."""
    rate = _MAPPED_BYTES_PER_S if drafter.is_prepared else _PREPARED_BYTES_PER_S
    return drafter.file.weight_bytes / rate


def _check_memory(reference: weakref.ref[ModelPool], drafter: PreparedModel) -> None:
    """Raises MemoryLimitError if the drafter does not fit beside what is loaded, ClosedError without a pool."""
    pool = reference()
    if pool is None:
        raise ClosedError("this engine is gone")
    require_memory(drafter.file.name, drafter.memory, pool.left_bytes - pool._taken_bytes(drafter))
