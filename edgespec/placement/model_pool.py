"""The models of an engine other than its target: drafters, loaded on demand, and models to be timed."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from edgespec.errors import ClosedError
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import HOST, Model
from edgespec.placement.cache_rooms import CacheRooms
from edgespec.placement.candidates import Placement, Placements
from edgespec.placement.memory import MemoryLedger, MemoryUse, memory_needed, require_memory
from edgespec.placement.prepared import Preparation, PreparedModel, prepare_drafter, prepare_model
from edgespec.runtimes.background import BackgroundModel
from edgespec.runtimes.process.settings import WorkerSettings
from edgespec.runtimes.runtime import LoadedModel
from edgespec.runtimes.translated import TranslatedModel


class ModelPool:
    """Loads models while all of them together leave the target its memory. Thread-safe.

    ``drafter`` is the target's drafting model; ``whole_drafter`` is the file from which a drafter with a trimmed head
    was made. ``places`` are all placements of target and drafter, those in use included. ``left_bytes`` may be
    used beyond the target and one session.
    """

    def __init__(
        self,
        prepare: Preparation,
        target: PreparedModel,
        drafter: PreparedModel | None,
        whole_drafter: LocatedModel | None,
        places: Placements,
        left_bytes: int,
        worker: WorkerSettings,
        ledger: MemoryLedger | None = None,
    ) -> None:
        """``ledger`` counts what other engines take; None for the only engine."""
        self.target = target.file
        self.target_memory = target.memory  # with one session
        self.drafter = drafter
        self.whole_drafter = whole_drafter
        self.places = places
        self.left_bytes = left_bytes
        self.rooms = CacheRooms(_use_of(weakref.ref(self)))
        self._timed: weakref.WeakKeyDictionary[BackgroundModel, PreparedModel] = weakref.WeakKeyDictionary()
        self._compared = Counter[str]()  # bytes by name
        self._prepare = prepare
        self._worker = worker
        self._lock = threading.Lock()
        self._drafting: dict[str, tuple[BackgroundModel, PreparedModel]] = {}  # by identity
        self._took_s: dict[str, float] = {}  # seconds that their last load took
        self._others: list[LoadedModel] = []
        self._lent: LoadedModel | None = None
        self._closed = False
        self._ledger = ledger
        if ledger is not None:
            own = weakref.ref(self)
            ledger.join(self, lambda: 0 if (pool := own()) is None else pool._reserved_bytes)

    # ---------------------------------------------------------------------------------------- memory

    @property
    def allowed_bytes(self) -> int:
        """The most that all models and sessions may take of the machine's own memory."""
        own = self.left_bytes + self.target_memory.total_bytes
        return own if self._ledger is None else min(own, self._ledger.left_beside(self))

    @property
    def _reserved_bytes(self) -> int:
        """What the engine takes and keeps for a conversation, its drafter included before it is loaded."""
        used = self._used(allowed_bytes=0)
        return used.reserved_bytes + self._expected_bytes(used)

    def _expected_bytes(self, used: MemoryUse) -> int:
        """What the drafter will take in addition to what is ``used``."""
        if self.drafter is None or self.drafter.file.name in used.drafters:
            return 0
        return max(used.drafter_bytes(self.drafter.memory), self.drafter.memory.total_bytes)

    @property
    def memory(self) -> MemoryUse:
        """What the engine takes now: every model loaded or loading, and every open session."""
        return self._used(self.allowed_bytes)

    def _used(self, allowed_bytes: int) -> MemoryUse:
        with self._lock:
            drafters = [own for model, own in self._drafting.values() if model.begun and not model.refused]
            timed = [own for model, own in self._timed.items() if model.begun and not model.closed]
            compared = dict(self._compared)
        return MemoryUse(
            allowed_bytes=allowed_bytes,
            target=self.target_memory,
            sessions=self.rooms.positions,
            drafters={own.file.name: own.memory for own in drafters},
            others=compared | {f"{own.file.name} on {own.settings.device}": own.memory.total_bytes for own in timed},
        )

    # -------------------------------------------------------------------------------------- drafters

    def lend(self, target: LoadedModel) -> None:
        """Give a layer of the target that drafts its weights, before the layer is loaded. The caller closes it."""
        self._lent = target

    def drafter_model(self) -> BackgroundModel:
        """The drafter, shared by all sessions. Nothing is loaded before its ``load``.

        Its load fails early with MemoryLimitError if the drafter does not fit in addition to the target. Raises
        ClosedError if there is no drafter.
        """
        return self._drafter(self.drafter)

    def drafter_in_targets_tokens(self) -> Model:
        """``drafter_model`` as the target's drafter: with another vocabulary its tokens are translated."""
        drafter, model = self.drafter, self.drafter_model()
        tokens = None if drafter is None else drafter.file.token_map
        return model if tokens is None else TranslatedModel(model, tokens)

    def whole_drafter_model(self) -> BackgroundModel:
        """The model from which a trimmed drafter was made, for texts that the trimmed head does not cover.

        Behaves as ``drafter_model``; also raises what describing the model raises.
        """
        whole = self.whole_drafter
        return self._drafter(None if whole is None else self._prepare.drafter(whole))

    def _drafter(self, drafter: PreparedModel | None) -> BackgroundModel:
        with self._lock:
            if self._closed or drafter is None:
                raise ClosedError("this engine is closed")
            identity = drafter.file.identity
            known = self._drafting.get(identity)
            if known is None or known[0].refused:  # later sessions try again
                # Weak, so that the models do not keep an unused pool alive.
                check = partial(_check_memory, weakref.ref(self), drafter)
                self._drafting[identity] = drafter.in_background(self._worker, check, self._lent), drafter
            return self._drafting[identity][0]

    def load_prepared(self) -> None:
        """Start loading the drafter if that only maps an earlier load's result. Returns immediately."""
        if self.drafter is not None and self.drafter.is_prepared:
            self.drafter_model().load()

    @property
    def load_s(self) -> float:
        """Expected seconds that loading the drafter takes from the current answer: as last time, or by size.

        0.0 if it is loaded, if there is none, and on another device than the host, where an answer continues in
        parallel.
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
        took_s = self._took_s.get(own.file.identity) or own.expected_load_s
        return max(0.0, took_s - model.loading_for_s)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the drafters that are loaded or loading."""
        with self._lock:
            return tuple(model.facts.name for model, _ in self._drafting.values() if model.begun)

    def use_threads(self, threads: int) -> None:
        """Close the drafters; the next use loads them again with ``threads`` threads."""
        own = self._prepare
        if threads != own.threads:
            self._prepare = Preparation(own.profile, threads, own.context_length)
            if self.drafter is not None:
                self.drafter = self.drafter.drafting_in(self._prepare)
        for model in self._unload():
            model.wait_until_ended()  # avoids two in memory at the same time

    def _unload(self) -> list[BackgroundModel]:
        """Close the drafters; a drafter that is loading ends by itself."""
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
        """The target in another placement, to be loaded, timed there and closed.

        Raises MemoryLimitError if the machine's own memory has no room for it, and what describing it raises.
        """
        return self._to_time(place, prepare_model(self.target, place.settings, self._prepare.context_length))

    def open_drafter(self, place: Placement) -> BackgroundModel:
        """The drafter in another placement, to be loaded, timed there and closed.

        Raises ClosedError if there is none, MemoryLimitError, and what describing it raises.
        """
        if self.drafter is None:
            raise ClosedError("there is no drafter to load on another device")
        own = self._prepare
        drafter = prepare_drafter(own.profile, self.drafter.file, place.settings, own.context_length)
        return self._to_time(place, drafter)

    def _to_time(self, place: Placement, model: PreparedModel) -> BackgroundModel:
        used = self.memory
        require_memory(place.name, model.memory, used.left_bytes - self._expected_bytes(used))
        timed = model.in_background(self._worker)
        with self._lock:
            self._timed[timed] = model
        return timed

    def load_comparable(
        self, files: Sequence[LocatedModel], context_length: int, *, for_prompts: bool = False
    ) -> tuple[LoadedModel, ...]:
        """Load other models, each in the setting known to decode fastest; closed with the pool.

        With ``for_prompts``, models that can decode follow again in the setting that reads prompts fastest, if that
        differs. Raises MemoryLimitError, before loading, unless all fit in addition to the drafter with two caches
        each (a session's and one for timing), and what loading raises.
        """
        models = [self._prepare.target(file) for file in files]
        if for_prompts:
            models += [other for model in models if (other := self._prepare.for_prompts(model)) is not None]
        used = self.memory
        with self._lock:
            if self._closed:
                raise ClosedError("this engine is closed")
            left = used.left_bytes - self._expected_bytes(used)
            needed = Counter[str]()
            for model in models:
                once = memory_needed(model.file, model.settings, context_length)
                twice = replace(once, cache_bytes=2 * once.cache_bytes, buffers_bytes=2 * once.buffers_bytes)
                require_memory(model.file.name, twice, left - needed.total())
                needed[model.file.name] += twice.total_bytes
            self._compared += needed
        with ExitStack() as failed:
            failed.callback(self._count_no_longer, needed)
            loaded = [failed.enter_context(model.load()) for model in models]
            with self._lock:
                if self._closed:
                    raise ClosedError("this engine is closed")
                self._others += loaded
            failed.pop_all()
        return tuple(loaded)

    def _count_no_longer(self, compared: Counter[str]) -> None:
        with self._lock:
            self._compared -= compared

    def keep(self, model: LoadedModel) -> LoadedModel:
        """Return ``model``, which the pool now closes."""
        with self._lock:
            self._others.append(model)
        return model

    def close(self) -> None:
        """Close all models permanently. Idempotent."""
        with self._lock:
            self._closed = True
            others, self._others = self._others, []
        self._unload()
        for other in others:
            other.close()
        if self._ledger is not None:
            self._ledger.leave(self)


def _check_memory(reference: weakref.ref[ModelPool], drafter: PreparedModel) -> None:
    """Raises MemoryLimitError if the drafter does not fit with the loaded models, ClosedError without a pool."""
    pool = reference()
    if pool is None:
        raise ClosedError("this engine is closed")
    used = pool.memory
    others = {name: memory for name, memory in used.drafters.items() if name != drafter.file.name}
    replace(used, drafters=others).require_drafter(drafter.file.name, drafter.memory)


def _use_of(reference: weakref.ref[ModelPool]) -> Callable[[], MemoryUse]:
    """What the pool counts, without keeping it alive. Raises ClosedError without a pool."""

    def use() -> MemoryUse:
        pool = reference()
        if pool is None:
            raise ClosedError("this engine is closed")
        return pool.memory

    return use
