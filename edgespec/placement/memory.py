"""Whether a model fits, decided before loading."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgespec.errors import MemoryLimitError
from edgespec.files.disk import gib
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.model_file import LocatedModel
from edgespec.placement.layer_split import layer_bytes
from edgespec.runtimes.runtime import Settings
from edgespec.runtimes.table import runtime_of

# Bytes per scored row and vocabulary entry that a forward may hold at a time: the scores and one copy.
_SCRATCH_BYTES_PER_SCORE = 8
_SCORED_ROWS = 64

# Largest allocation seen for a llama.cpp context, without cache and scores, for models of 0.1 to 2 billion weights.
_CONTEXT_OVERHEAD_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes that a model needs: weights, a cache for the whole context, of ``positions``, and working buffers."""

    weights_bytes: int
    cache_bytes: int
    buffers_bytes: int
    positions: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.buffers_bytes

    def for_context(self, positions: int) -> MemoryEstimate:
        """The same with a cache for another number of tokens."""
        cache_bytes = math.ceil(self.cache_bytes * positions / self.positions)
        return replace(self, cache_bytes=cache_bytes, positions=positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What the models and caches of one engine take of the machine's own memory, in bytes.

    ``target`` and ``drafters`` (by name) are those loaded or loading, each with one session's cache. Every one of the
    ``sessions`` has a cache of each, counted at the whole context's size: it is reserved, and filled as the
    conversation grows. One session is always reserved. ``others`` are models to be timed or compared.
    """

    allowed_bytes: int
    target: MemoryEstimate
    sessions: int
    drafters: Mapping[str, MemoryEstimate]
    others: Mapping[str, int]

    @property
    def session_bytes(self) -> int:
        """What each session takes."""
        return sum(_of_session(each) for each in (self.target, *self.drafters.values()))

    @property
    def taken_bytes(self) -> int:
        weights = sum(each.weights_bytes for each in (self.target, *self.drafters.values()))
        return weights + max(1, self.sessions) * self.session_bytes + sum(self.others.values())

    @property
    def left_bytes(self) -> int:
        """What may still be used; negative if less is free than was expected."""
        return self.allowed_bytes - self.taken_bytes

    def with_drafter(self, drafter: MemoryEstimate) -> MemoryEstimate:
        """What another drafter takes: weights, and a cache for each session."""
        many = max(1, self.sessions)
        return replace(drafter, cache_bytes=many * drafter.cache_bytes, buffers_bytes=many * drafter.buffers_bytes)

    def require_session(self) -> None:
        """Raise MemoryLimitError, with the numbers, if another session does not fit."""
        if not self.sessions or self.session_bytes <= self.left_bytes:
            return
        drafting = sum(_of_session(each) for each in self.drafters.values())
        share = f", of which the drafter's cache takes {gib(drafting)}" if drafting else ""
        raise MemoryLimitError(
            f"another session needs about {gib(self.session_bytes)}{share}, and {gib(self.left_bytes)} of "
            f"{gib(self.allowed_bytes)} are left: the models and {self.sessions} open "
            f"session{'' if self.sessions == 1 else 's'} take {gib(self.taken_bytes)}",
            needed_bytes=self.session_bytes,
            available_bytes=max(0, self.left_bytes),
            hint="close a session, or load with a smaller context",
        )

    def as_json(self) -> dict[str, Any]:
        """The numbers by name, for programs."""
        return {
            "allowed_bytes": self.allowed_bytes,
            "taken_bytes": self.taken_bytes,
            "left_bytes": self.left_bytes,
            "sessions": self.sessions,
            "session_bytes": self.session_bytes,
            "target_weights_bytes": self.target.weights_bytes,
            "drafters": {name: each.weights_bytes for name, each in self.drafters.items()},
            "others": dict(self.others),
        }


class MemoryLedger:
    """The memory that the engines of one program share: each may take what the others leave. Thread-safe."""

    def __init__(self, allowed_bytes: int, make_room: Callable[[int], None] = lambda needed_bytes: None) -> None:
        """``make_room`` frees engines until that number of bytes is left, where it can, on the thread that loads."""
        self.allowed_bytes = allowed_bytes
        self._make_room = make_room
        self._lock = threading.Lock()
        self._taken: dict[int, Callable[[], int]] = {}

    def join(self, engine: object, taken_bytes: Callable[[], int]) -> None:
        """Count an engine until it leaves: its bytes, with those of its drafter before that is loaded."""
        with self._lock:
            self._taken[id(engine)] = taken_bytes

    def leave(self, engine: object) -> None:
        """An engine has freed its memory. Idempotent."""
        with self._lock:
            self._taken.pop(id(engine), None)

    def left_beside(self, engine: object) -> int:
        """What an engine may take: all that the others do not."""
        with self._lock:
            others = [taken for number, taken in self._taken.items() if number != id(engine)]
        return self.allowed_bytes - sum(taken() for taken in others)

    @property
    def left_bytes(self) -> int:
        """What no engine takes."""
        return self.left_beside(None)

    def require(self, name: str, estimates: Iterable[MemoryEstimate]) -> None:
        """Make room for an engine with these models. Raises MemoryLimitError, and what making room raises."""
        models = list(estimates)
        whole = MemoryEstimate(
            weights_bytes=sum(each.weights_bytes for each in models),
            cache_bytes=sum(each.cache_bytes for each in models),
            buffers_bytes=sum(each.buffers_bytes for each in models),
            positions=max(each.positions for each in models),
        )
        self._make_room(whole.total_bytes)
        require_memory(name, whole, self.left_bytes)


def _of_session(estimate: MemoryEstimate) -> int:
    return estimate.cache_bytes + estimate.buffers_bytes


def estimate_memory(header: GgufHeader, context_length: int, kv_bits_per_element: float) -> MemoryEstimate:
    """What a model with this header takes with a cache of ``context_length`` tokens."""
    return MemoryEstimate(
        weights_bytes=header.tensor_bytes,
        cache_bytes=header.kv_bytes_per_token(kv_bits_per_element) * context_length,
        buffers_bytes=_CONTEXT_OVERHEAD_BYTES + _SCRATCH_BYTES_PER_SCORE * _SCORED_ROWS * header.vocabulary_size,
        positions=context_length,
    )


def memory_needed(file: LocatedModel, settings: Settings, context_length: int) -> MemoryEstimate:
    """What a model takes of the machine's own memory: weights, cache for ``context_length`` tokens, working buffers.

    The part in a GPU's memory is excluded; the part that stays on the host is included.
    """
    runtime = runtime_of(settings)
    bits = runtime.cache_bits(settings)
    whole = replace(estimate_memory(file.header, context_length, bits), weights_bytes=file.weight_bytes)
    if not runtime.has_own_memory(settings.device):
        return whole
    split = layer_bytes(file.header, bits).split(settings.gpu_layers, context_length)
    return replace(whole, weights_bytes=split.host_weights, cache_bytes=split.host_cache)


def require_memory(name: str, estimate: MemoryEstimate, allowed_bytes: int) -> None:
    """Raise MemoryLimitError, with the sum, if the estimate does not fit in ``allowed_bytes``."""
    if estimate.total_bytes <= allowed_bytes:
        return
    raise MemoryLimitError(
        f"{name} needs about {gib(estimate.total_bytes)} (weights {gib(estimate.weights_bytes)}, cache "
        f"{gib(estimate.cache_bytes)}) and {gib(allowed_bytes)} may be used",
        needed_bytes=estimate.total_bytes,
        available_bytes=allowed_bytes,
        hint="close other programs, use a smaller --context, or a smaller model",
    )


def too_large_words(name: str, needed_bytes: int, left_bytes: int) -> str:
    """Why a drafter is left out: it does not fit in addition to the target."""
    return f"{name} needs about {gib(needed_bytes)} and {gib(left_bytes)} may be used with the target loaded"
