"""How many tokens a context holds where the profile leaves that open: what the model and the free memory allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from edgespec.architectures.shape import LONG_FACTORS
from edgespec.files.disk import gib
from edgespec.files.gguf.records import GgufHeader
from edgespec.interfaces.model import HOST
from edgespec.interfaces.reasons import Reason
from edgespec.placement.candidates import Placements
from edgespec.placement.memory import layer_bytes
from edgespec.placement.prepared import PreparedModel
from edgespec.planning.choice.options import HEADROOM_BYTES
from edgespec.runtimes.table import runtime_of

# Coding agents begin with 7 000 to 19 000 tokens, and 32 768 leave room for their work. A chat fits in 4 096, which
# also was the default for long: a machine on which a model ran before still runs it.
MOST_TOKENS, LEAST_TOKENS, STEP_TOKENS = 32_768, 4_096, 4_096

# One conversation may take this share of what the weights leave free: others need room too.
SHARE = 1 / 4

_UNCHANGED = (
    "the context holds {} tokens: in a longer one the model reads all positions otherwise; `--context N` sets it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLength:
    """Tokens that a context holds, and why if no profile or option says so."""

    tokens: int
    why: Reason | None = None


def least_context(asked: int | None, trained: int) -> ContextLength:
    """``asked`` tokens; None: the least that is chosen. No more than the model was ``trained`` for; 0: not known."""
    tokens = asked or LEAST_TOKENS
    if not 0 < trained < tokens:
        return ContextLength(tokens=tokens)
    why = f"the context holds {trained} tokens, all that the model was trained for"
    why += "" if asked is None else f": {asked} were asked for"
    return ContextLength(tokens=trained, why=Reason("context_chosen", why))


def unchanged_context(header: GgufHeader) -> int | None:
    """The longest context in which the model rotates positions as in a short one; None if there is no limit.

    A model with long factors rotates all positions otherwise in a longer context: texts change, also short ones.
    """
    if all(tensor.name != LONG_FACTORS for tensor in header.tensors):
        return None
    stated = header.metadata.get(f"{header.architecture}.rope.scaling.original_context_length")
    return stated if isinstance(stated, int) and stated > 0 else None


def choose_context(
    trained: int,
    models: Sequence[PreparedModel],
    places: Placements,
    allowed_bytes: int,
    unchanged: int | None = None,
) -> ContextLength:
    """The longest context whose caches, of one conversation, take at most a quarter of what the weights leave.

    In steps, up to what the target was ``trained`` for and to ``MOST_TOKENS``; at least ``LEAST_TOKENS``, or all that
    a smaller model was trained for. ``models`` are the target and its drafter, ``unchanged`` is the target's
    ``unchanged_context``, which is not exceeded. Each memory is looked at by itself,
    and no place of the target that has room for the least context loses it.
    """
    least = least_context(None, trained).tokens
    most = max(least, min(trained or least, MOST_TOKENS, unchanged or MOST_TOKENS))
    free = {HOST: allowed_bytes} | {name: size - HEADROOM_BYTES for name, size in places.memory_bytes.items()}
    for model in models:
        for memory, weights_bytes, _ in _needs(model, 0):
            free[memory] = free.get(memory, 0) - weights_bytes
    rooms = [each for each in places.targets if places.room(each)]
    for tokens in (most, *range(most // STEP_TOKENS * STEP_TOKENS, least, -STEP_TOKENS), least):
        taken = Counter[str]()
        for model in models:
            for memory, _, cache_bytes in _needs(model, tokens):
                taken[memory] += cache_bytes
        fits = all(count <= SHARE * free[memory] for memory, count in taken.items())
        if fits and all(places.room(each.longer(tokens - least)) for each in rooms):
            break
    if tokens == unchanged != trained:
        return ContextLength(tokens=tokens, why=Reason("context_chosen", _UNCHANGED.format(tokens)))
    return ContextLength(tokens=tokens, why=_reason(tokens, most, trained, taken, free))


def _needs(model: PreparedModel, tokens: int) -> Iterator[tuple[str, int, int]]:
    """A memory, and the bytes of it that weights and buffers take, and the cache of ``tokens``."""
    own = min(tokens, model.facts.trained_context_length or tokens)
    here = model.for_context(own).memory
    yield HOST, here.weights_bytes + here.buffers_bytes, here.cache_bytes
    runtime, settings = runtime_of(model.settings), model.settings
    if runtime.has_own_memory(settings.device):
        layers = layer_bytes(model.file.header, runtime.cache_bits(settings))
        there = layers.split(settings.gpu_layers, own)
        yield settings.device, there.device_weights, there.device_cache


def _reason(tokens: int, most: int, trained: int, taken: Counter[str], free: Mapping[str, int]) -> Reason:
    """Why the context is that long."""
    said = f"the context holds {tokens} tokens"
    if tokens == trained:
        said += ", all that the model was trained for"
    elif tokens == most:
        said += ", the most that is chosen" + (f" of the {trained} that the model was trained for" if trained else "")
    else:
        memory = min(free, key=lambda name: SHARE * free[name] - taken[name])
        where = "" if memory == HOST else f" of {memory}"
        said += ", the least that is chosen" if tokens == LEAST_TOKENS else ""
        said += f": their cache takes {gib(taken[memory])} of the {gib(free[memory])}{where} that the weights leave"
        said += "" if tokens == LEAST_TOKENS else ", of which a conversation may take a quarter"
    return Reason("context_chosen", f"{said}; `--context N` sets another length")
