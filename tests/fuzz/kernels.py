"""The kernels' batch interface with valid and invalid calls, and draws at every level; best with the sanitizers."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.interfaces.drawing import are_allowed
from edgespec.runtimes.native.library import LEVELS, DrawnStruct, DrawRequestStruct, EntryStruct, load
from edgespec.runtimes.native.model import NativeSettings, load_native
from edgespec.runtimes.native.weights import HeadRows
from tests.fuzz.findings import Findings
from tests.support.loading import located
from tests.support.native_batches import Batch, Cache, batch_of, part_of
from tests.support.native_models import SHARING
from tests.support.tiny_gguf import write_tiny_gguf

KINDS: tuple[dict[str, Any], ...] = (
    {"quant": "Q4_0", "layers": 2},
    {"quant": "Q8_0", "architecture": "gemma3", "window": 30, "kv_heads": 1, "layers": 6},
    {"quant": "MXFP4", "architecture": "gpt-oss", "window": 30, "experts": (9, 4), "layers": 2},
    {"quant": "F32", "architecture": "qwen3", "head_length": 48, "layers": 2},
    {"quant": "Q4_0", "architecture": "qwen3moe", "experts": (40, 5), "layers": 2},
    {"quant": "Q8_0", **SHARING},
    {"quant": "Q8_0", "heads": 8, "kv_heads": 2, "architecture": "qwen2", "width": 128},
)
CALLS = 60  # of each model
BEYOND = (-1, 2**40, 2**62)  # positions and counts that no cache has


def fuzz(chance: random.Random, rounds: Iterable[int], findings: Findings) -> None:
    library = load()
    with tempfile.TemporaryDirectory() as place:
        for number in rounds:
            path = write_tiny_gguf(Path(place) / f"{number}.gguf", **{"width": 64, **chance.choice(KINDS)})
            with (
                load_native(located(path), NativeSettings(threads=1)) as model,
                batch_of(model, chance.randint(1, 2), chance.choice(library.levels)) as batch,
            ):
                _use(batch, part_of(model), chance, findings)
            path.unlink()
            for _ in range(CALLS):
                _draw(library, chance, findings)


def _use(batch: Batch, part: Any, chance: random.Random, findings: Findings) -> None:
    """Random calls on a few sequences of one model."""
    context = chance.choice((1, 15, 16, 17, 100, 1300))
    short = HeadRows(part.weights, np.arange(64, dtype=np.int64))
    longer = short.and_also([70, 75])  # both own the memory of their matrices
    heads = [(part.weights.struct.head,), short.matrices, longer.matrices]
    caches = [batch.open(context) for _ in range(chance.randint(1, 4))]
    lengths = {cache.pointer: 0 for cache in caches}
    for _ in range(CALLS):
        own, kind, api = chance.choice(caches), chance.random(), batch.api
        if kind < 0.6:
            _forward(batch, caches, lengths, context, chance, findings)
        elif kind < 0.7:
            nodes = np.array([chance.randint(-1, 64) for _ in range(chance.randint(1, 4))], dtype=np.int32)
            start = chance.choice((lengths[own.pointer], context, *BEYOND))
            findings.counts[f"keep {api.es_keep(own.pointer, nodes.ctypes.data, len(nodes), start)}"] += 1
        elif kind < 0.8:
            other, count = chance.choice(caches), chance.choice((0, 1, context, context + 1, -1))
            if other is not own:
                findings.counts[f"copy {api.es_copy(own.pointer, other.pointer, 0, count)}"] += 1
        elif kind < 0.9:
            count = chance.choice((0, 1, 16, 17, context, context + 1, -1))
            first = chance.choice((0, 0, 16, 17, -16, context))
            number = chance.choice((0, 1, 3, 10**6, -1))
            size = api.es_part_bytes(own.pointer, number, first, count)
            part_bytes = np.zeros(max(1, size), dtype=np.uint8)
            code = api.es_read_part(own.pointer, number, first, count, part_bytes.ctypes.data, size)
            findings.counts[f"read {code}"] += 1
            code = api.es_write_part(own.pointer, number, first, count, part_bytes.ctypes.data, size)
            findings.counts[f"write {code}"] += 1
        elif kind < 0.92:
            first, end = (chance.choice((0, 16, context // 2, context, context + 16, -1)) for _ in range(2))
            findings.counts[f"forget {api.es_forget(own.pointer, first, end)}"] += 1
        else:
            own.use_heads(chance.choice(heads))


def _forward(
    batch: Batch,
    caches: list[Cache],
    lengths: dict[int, int],
    context: int,
    chance: random.Random,
    findings: Findings,
) -> None:
    """A shared forward of a few entries, some of them out of range. Sequences that are in it twice are refused."""
    vocabulary = int(batch.part.weights.struct.vocabulary)
    chosen, entries, kept = chance.choices(caches, k=chance.randint(1, 4)), [], []
    for cache in chosen:
        count = chance.choice((1, 1, 2, 5, 16, 64, 65, 256, 257, 0, -1))
        tokens = np.array([chance.randrange(vocabulary) for _ in range(max(count, 1))], dtype=np.int32)
        if chance.random() < 0.05:
            tokens[chance.randrange(len(tokens))] = chance.choice((-1, vocabulary, 2**31 - 1))
        parents = None
        if chance.random() < 0.3:
            parents = np.array([chance.randint(-1, max(-1, at - 1)) for at in range(len(tokens))], dtype=np.int32)
        length = lengths[cache.pointer]
        scored = count if parents is not None else chance.choice((0, 1, count, 65, -1))
        start = chance.choice((length, length, length, 0, context, *BEYOND))
        kept += [tokens, parents]
        entries.append(
            EntryStruct(
                sequence=cache.pointer,
                tokens=tokens.ctypes.data,
                parents=None if parents is None else parents.ctypes.data,
                start=start,
                count=count,
                scored=scored,
                first=0,
            )
        )
    together = (EntryStruct * len(entries))(*entries)
    code = batch.api.es_batch_forward(batch.pointer, together, len(entries))
    findings.counts[f"forward {code}"] += 1
    for cache, entry, done in zip(chosen, entries, together, strict=True):
        if code == 0 and done.status == 0:
            findings.counts["entries"] += 1
            lengths[cache.pointer] = lengths[cache.pointer] if entry.parents else entry.start + entry.count
            if entry.scored > 0:
                findings.unless(bool(np.isfinite(cache.scores(entry.scored)).all()), "a score is not finite")


def _draw(library: Any, chance: random.Random, findings: Findings) -> None:
    """One draw at every level: the same code and the same result, whatever the scores and the request.

    Drawn tokens are allowed ones.
    """
    count = chance.choice((1, 2, 3, 15, 16, 17, 64, 65, 200, 5000))
    scores = np.random.default_rng(chance.getrandbits(32)).standard_normal(count).astype(np.float32)
    with np.errstate(over="ignore"):
        scores *= np.float32(chance.choice((0, 1e-30, 1, 30, 1e30, 3e38)))
    for _ in range(chance.randint(0, 3)):
        scores[chance.randrange(count)] = chance.choice((np.nan, np.inf, -np.inf, 3.4e38, -0.0, 1e-45))
    asked, drawn = DrawRequestStruct(), DrawnStruct()
    asked.repeat_penalty, asked.presence_penalty, asked.frequency_penalty = 1.0, 0.0, 0.0
    asked.top_k = chance.choice((0, 0, 1, 7, count, count + 1, -1))
    asked.top_p = chance.choice((1.0, 0.9, 1e-9, 1e-320, 0.0, float("nan")))
    asked.min_p = chance.choice((0.0, 0.05, 1.0, 1.5, float("nan")))
    asked.scale = chance.choice((1.0, 1.44, 1e-38, 2.0**60, 0.0, float("nan")))
    asked.key[:] = [chance.getrandbits(32) for _ in range(4)]
    asked.noisy, asked.wanted, asked.measures = (
        chance.randint(0, 1),
        chance.choice((1, 2, 8, 0, 9)),
        chance.randint(0, 2),
    )
    mask = _mask(chance, count)
    if mask is not None:
        asked.mask, asked.mask_words = mask.ctypes.data, len(mask)
    scratch = np.empty(max(1, library.api.es_draw_scratch(count)), dtype=np.uint8)
    found = set()
    for level in library.levels:
        own = scores.copy()
        code = library.api.es_draw(own.ctypes.data, count, asked, scratch.ctypes.data, drawn, LEVELS[level])
        ids = tuple(drawn.ids[: drawn.count]) if code == 0 else ()
        found.add((code, ids, repr(drawn.mass) if code == 0 else ""))
        findings.unless(code != 0 or drawn.count <= asked.wanted, "more tokens than were asked for")
        allowed = mask is None or bool(are_allowed(mask, np.array(ids, dtype=np.int64)).all())
        findings.unless(allowed, "a token that the mask forbids")
    findings.unless(len(found) == 1, f"levels differ: {found}")
    findings.counts["draws"] += 1


def _mask(chance: random.Random, count: int) -> np.ndarray[Any, np.dtype[np.uint32]] | None:
    """None, or a mask that allows none, few, half or all tokens, and may be too short or too long."""
    kind = chance.randrange(6)
    if not kind:
        return None
    words = max(0, (count + 31) // 32 + chance.choice((0, 0, -1, 1, 3)))
    few = [chance.choice((0, 0, 0, 1 << chance.randrange(32))) for _ in range(words)]
    own = {1: [0] * words, 2: few, 3: [2**32 - 1] * words}.get(kind, [chance.getrandbits(32) for _ in range(words)])
    return np.array(own, dtype=np.uint32)
