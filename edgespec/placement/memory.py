"""What a model takes of each memory, and whether it fits: decided before loading.

Layers are counted as in llama.cpp: from the end, with the output head as one layer more than the model's blocks. One
layer is the head alone, ``block_count`` + 1 layers are the whole model. The token embedding always stays in the
machine's memory. A layer's cache is in the layer's memory.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgespec.errors import MemoryLimitError
from edgespec.files.disk import counted, gib
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import ALL_KEPT, WindowedLayers
from edgespec.runtimes.runtime import Settings
from edgespec.runtimes.table import runtime_of

# Bytes per scored row and vocabulary entry that a forward may hold at a time: the scores and one copy.
_SCRATCH_BYTES_PER_SCORE = 8
_SCORED_ROWS = 64

# Largest allocation seen for a llama.cpp context, without cache and scores, for models of 0.1 to 2 billion weights.
_CONTEXT_OVERHEAD_BYTES = 64 * 2**20

# Tokens of a cache that are counted at a time. A choice: 29 MB of the default target's, and seconds of an answer.
STEP_POSITIONS = 1024


_BLOCK = re.compile(r"blk\.(\d+)\.")

# Tensors that only the first step of a forward reads; llama.cpp never moves that step to a GPU.
_INPUT_TABLES = ("token_embd", "token_types", "position_embd")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes that a model needs: weights, a cache for the whole context, of ``positions``, and working buffers.

    ``grows``: the runtime's caches take memory only where they are filled. ``windowed`` layers keep only the last
    positions.
    """

    weights_bytes: int
    cache_bytes: int
    buffers_bytes: int
    positions: int
    grows: bool
    windowed: WindowedLayers = ALL_KEPT

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.buffers_bytes

    def for_context(self, positions: int) -> MemoryEstimate:
        """The same with a cache for another number of tokens."""
        return replace(self, cache_bytes=self._filled(positions), positions=positions)

    def session_bytes(self, tokens: int) -> int:
        """What a session takes whose cache holds ``tokens``, counted in steps, and its working buffers."""
        filled = self._filled(min(in_steps(tokens), self.positions)) if self.grows else self.cache_bytes
        return filled + self.buffers_bytes

    def _filled(self, positions: int) -> int:
        whole = self.cache_bytes + self.windowed.spared_bytes(self.positions)
        return math.ceil(whole * positions / self.positions) - self.windowed.spared_bytes(positions)


def in_steps(tokens: int) -> int:
    """The tokens that are counted for a cache of ``tokens``: whole steps, at least one."""
    return max(1, math.ceil(tokens / STEP_POSITIONS)) * STEP_POSITIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What the models and caches of one engine take of the machine's own memory, in bytes.

    ``target`` and ``drafters`` (by name) are those loaded or loading, each with one session's cache. Every session
    has a cache of each, and ``sessions`` are the tokens that each session's caches may hold. One session is always
    reserved. ``others`` are models to be timed or compared.
    """

    allowed_bytes: int
    target: MemoryEstimate
    sessions: tuple[int, ...]
    drafters: Mapping[str, MemoryEstimate]
    others: Mapping[str, int]

    def session_bytes(self, tokens: int) -> int:
        """What a session takes whose caches hold ``tokens``."""
        return self.target.session_bytes(tokens) + self._drafting_bytes(tokens)

    def _drafting_bytes(self, tokens: int) -> int:
        return sum(each.session_bytes(tokens) for each in self.drafters.values())

    @property
    def caches_bytes(self) -> int:
        """What the sessions take."""
        return sum(map(self.session_bytes, self.sessions or (0,)))

    @property
    def taken_bytes(self) -> int:
        weights = sum(each.weights_bytes for each in (self.target, *self.drafters.values()))
        return weights + self.caches_bytes + sum(self.others.values())

    @property
    def reserved_bytes(self) -> int:
        """What is taken, and what one conversation may still take that fills the context."""
        return self.taken_bytes + max(0, self.session_bytes(self.target.positions) - self.caches_bytes)

    @property
    def left_bytes(self) -> int:
        """What may still be used; negative if less is free than was expected."""
        return self.allowed_bytes - self.taken_bytes

    def require_drafter(self, name: str, drafter: MemoryEstimate) -> None:
        """Raise MemoryLimitError if another drafter, with a cache for each session, does not fit."""
        require_memory(name, self._for_each_session(drafter), self.left_bytes)

    def drafter_bytes(self, drafter: MemoryEstimate) -> int:
        """What another drafter takes: weights, and a cache for each session."""
        return self._for_each_session(drafter).total_bytes

    def _for_each_session(self, drafter: MemoryEstimate) -> MemoryEstimate:
        many = self.sessions or (0,)
        buffers_bytes = len(many) * drafter.buffers_bytes
        cache_bytes = sum(map(drafter.session_bytes, many)) - buffers_bytes
        return replace(drafter, cache_bytes=cache_bytes, buffers_bytes=buffers_bytes)

    def require_session(self, tokens: int, *, spare: bool = False) -> None:
        """Raise MemoryLimitError, with the numbers, if another session does not fit, whose caches hold ``tokens``.

        With ``spare`` a further one that fills the context must fit, too.
        """
        if self.sessions:
            needed, drafting = self.session_bytes(tokens), self._drafting_bytes(tokens)
            if spare:
                whole = self.target.positions
                needed, drafting = needed + self.session_bytes(whole), drafting + self._drafting_bytes(whole)
            self._require(
                "another session needs", needed, drafting, "close a session, or load with a smaller context"
            )

    def require_growth(self, held: int, tokens: int) -> None:
        """Raise MemoryLimitError, with the numbers, if a session's caches of ``held`` cannot grow to ``tokens``.

        The only session always can: it was checked when the models were loaded.
        """
        if len(self.sessions) > 1:
            needed = self.session_bytes(tokens) - self.session_bytes(held)
            drafting = self._drafting_bytes(tokens) - self._drafting_bytes(held)
            asked = f"a conversation of {tokens} tokens needs"
            self._require(asked, needed, drafting, "close another session, or begin a new conversation")

    def _require(self, asked: str, needed: int, drafting: int, hint: str) -> None:
        if needed <= self.left_bytes:
            return
        share = f", of which the drafter's cache takes {gib(drafting)}" if drafting else ""
        sessions = counted(len(self.sessions), "open session")
        raise MemoryLimitError(
            f"{asked} about {gib(needed)} more{share}, and {gib(self.left_bytes)} of {gib(self.allowed_bytes)} are "
            f"left: the models and {sessions} take {gib(self.taken_bytes)}",
            needed_bytes=needed,
            available_bytes=max(0, self.left_bytes),
            hint=hint,
        )

    def as_json(self) -> dict[str, Any]:
        """The numbers by name, for programs."""
        return {
            "allowed_bytes": self.allowed_bytes,
            "taken_bytes": self.taken_bytes,
            "left_bytes": self.left_bytes,
            "sessions": len(self.sessions),
            "session_bytes": self.session_bytes(0),
            "caches_bytes": self.caches_bytes,
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

    @property
    def taken_bytes(self) -> int:
        """What all engines take."""
        return self.allowed_bytes - self.left_bytes

    def require(self, name: str, estimates: Iterable[MemoryEstimate], allowed_bytes: int) -> None:
        """Make room for an engine with these models.

        ``allowed_bytes`` is what all may take now: other programs may have come. Raises MemoryLimitError, and what
        making room raises.
        """
        models = list(estimates)
        whole = MemoryEstimate(
            weights_bytes=sum(each.weights_bytes for each in models),
            cache_bytes=sum(each.cache_bytes for each in models),
            buffers_bytes=sum(each.buffers_bytes for each in models),
            positions=max(each.positions for each in models),
            grows=False,
        )
        missing = max(0, self.allowed_bytes - allowed_bytes)
        self._make_room(whole.total_bytes + missing)
        require_memory(name, whole, self.left_bytes - missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The bytes of a placed model: on the device, and in the machine's memory."""

    device_weights: int
    device_cache: int
    host_weights: int
    host_cache: int

    @property
    def device_bytes(self) -> int:
        return self.device_weights + self.device_cache

    @property
    def host_bytes(self) -> int:
        return self.host_weights + self.host_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of a model's weights and of one token's cache, block by block; the cache may be fractional.

    ``shared_weights`` of the head are the input's embedding: only a device needs a second copy.
    """

    input_weights: int
    head_weights: int
    shared_weights: int
    block_weights: tuple[int, ...]
    block_cache: tuple[float, ...]

    @property
    def layers(self) -> int:
        """The largest number of layers on a device: the blocks and the head."""
        return len(self.block_weights) + 1

    def split(self, gpu_layers: int | None, context_length: int) -> Split:
        """The bytes with ``gpu_layers`` layers on a device (None: all) and a cache for ``context_length`` tokens."""
        moved = self.layers if gpu_layers is None else max(0, min(gpu_layers, self.layers))
        first = self.layers - moved  # the first block on the device
        host_head = 0 if moved else self.head_weights - self.shared_weights
        return Split(
            device_weights=sum(self.block_weights[first:]) + (self.head_weights if moved else 0),
            device_cache=math.ceil(sum(self.block_cache[first:]) * context_length),
            host_weights=self.input_weights + sum(self.block_weights[:first]) + host_head,
            host_cache=math.ceil(sum(self.block_cache[:first]) * context_length),
        )


def layer_bytes(header: GgufHeader, kv_bits_per_element: float) -> LayerBytes:
    """Bytes of each layer of a model. Raises ModelFileError if the header has no blocks or heads."""
    blocks = header.block_count
    weights = [0] * blocks
    entrance = head = shared = 0
    own_head = any(tensor.name == "output.weight" for tensor in header.tensors)
    for tensor in header.tensors:
        block = _BLOCK.match(tensor.name)
        if block is not None:
            weights[min(int(block[1]), blocks - 1)] += tensor.byte_count
        elif tensor.name.startswith(_INPUT_TABLES):
            entrance += tensor.byte_count
            if tensor.name == "token_embd.weight" and not own_head:
                shared = tensor.byte_count
        else:
            head += tensor.byte_count
    heads = header.head_count_kv
    by_block = (heads,) * blocks if isinstance(heads, int) else (*heads, *heads[-1:] * blocks)[:blocks]
    # Some layers have no cache, or share one: which of them, the whole does not tell.
    cache_bytes = header.kv_bytes_per_token(kv_bits_per_element) / sum(by_block) if any(by_block) else 0.0
    return LayerBytes(
        input_weights=entrance,
        head_weights=head + shared,
        shared_weights=shared,
        block_weights=tuple(weights),
        block_cache=tuple(count * cache_bytes for count in by_block),
    )


def layers_that_fit(model: LayerBytes, context_length: int, free_bytes: int, *, headroom_bytes: int) -> int:
    """How many layers fit in ``free_bytes`` of a device's memory, 0 to ``model.layers``.

    ``headroom_bytes`` are kept free for working buffers.
    """
    room = free_bytes - headroom_bytes
    fitting = 0
    while fitting < model.layers and model.split(fitting + 1, context_length).device_bytes <= room:
        fitting += 1
    return fitting


def estimate_memory(header: GgufHeader, context_length: int, kv_bits_per_element: float) -> MemoryEstimate:
    """What a model with this header takes with a cache of ``context_length`` tokens."""
    return MemoryEstimate(
        weights_bytes=header.tensor_bytes,
        cache_bytes=header.kv_bytes_per_token(kv_bits_per_element) * context_length,
        buffers_bytes=_CONTEXT_OVERHEAD_BYTES + _SCRATCH_BYTES_PER_SCORE * _SCORED_ROWS * header.vocabulary_size,
        positions=context_length,
        grows=False,
    )


def memory_needed(file: LocatedModel, settings: Settings, context_length: int) -> MemoryEstimate:
    """What a model takes of the machine's own memory: weights, cache for ``context_length`` tokens, working buffers.

    The part in a GPU's memory is excluded; the part that stays on the host is included.
    """
    runtime = runtime_of(settings)
    bits = runtime.cache_bits(settings)
    estimate = estimate_memory(file.header, context_length, bits)
    windowed = runtime.windowed_layers(file)
    whole = replace(
        estimate,
        weights_bytes=file.weight_bytes,
        cache_bytes=runtime.cache_copies(file) * (estimate.cache_bytes - windowed.spared_bytes(context_length)),
        grows=runtime.cache_grows,
        windowed=windowed,
    )
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
        hint="close other programs, use a smaller context (--context), or a smaller model",
    )


def too_large_words(name: str, needed_bytes: int, left_bytes: int) -> str:
    """Why a drafter is left out: it does not fit in addition to the target."""
    return f"{name} needs about {gib(needed_bytes)} and {gib(left_bytes)} may be used with the target loaded"
