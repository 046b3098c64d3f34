"""Several sequences in one forward: each gets the bits that it gets alone, whatever the others compute."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgespec.runtimes.native.library import BAD_REQUEST, CANCELLED, MOST_ENTRIES, OK, Matrix
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.weights import HeadRows
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.native_batches import Batch, Cache, Work, batch_of, part_of
from tests.support.native_models import SHARING
from tests.support.tiny_gguf import write_tiny_gguf

LEVELS = require_native().levels
CONTEXT = 1300  # more than four blocks of attention, from which on they are divided
KINDS: dict[str, dict[str, Any]] = {
    "llama Q4_0": {"quant": "Q4_0", "layers": 2},
    "gemma3 Q8_0": {"quant": "Q8_0", "architecture": "gemma3", "window": 100, "kv_heads": 1, "layers": 6},
    "qwen3 F32": {"quant": "F32", "architecture": "qwen3", "head_length": 48, "layers": 2},
    "gpt-oss Q8_0": {"quant": "Q8_0", "architecture": "gpt-oss", "layers": 2, "window": 100},
    "gemma4 Q8_0": {"quant": "Q8_0", **SHARING},
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeModel]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("batch") / "tiny.gguf", width=64, **KINDS[request.param])
    with load_native(path, NativeSettings(threads=1)) as model:
        yield model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeModel]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("batch") / "tiny.gguf", width=64, quant="Q4_0")
    with load_native(path, NativeSettings(threads=1)) as model:
        yield model


class Script:
    """One sequence's forwards: chunks of a prompt, scored rows, trees and their growth."""

    def __init__(self, source: random.Random, vocabulary: int, heads: int) -> None:
        self.head = source.randrange(heads)
        self.steps: list[tuple[list[int], int, list[int] | None]] = []  # tokens, scored, parents of all nodes
        nodes: list[int] = []
        for _ in range(source.randint(2, 5)):
            kind = source.choice(["prompt", "rows", "tree", "growth"])
            count = source.choice([17, 40, 120, 256]) if kind == "prompt" else source.randint(1, 9)
            tokens = ids(source, vocabulary, count)
            if kind == "prompt" or kind == "rows":
                self.steps.append((tokens, source.choice([0, 1, min(count, 9)]), None))
                nodes = []
                continue
            nodes = nodes if kind == "growth" else []
            nodes = [*nodes, *(source.randint(-1, len(nodes) + i - 1) for i in range(count))]
            self.steps.append((tokens, count, nodes))


def ids(source: random.Random, vocabulary: int, count: int) -> list[int]:
    return [source.randrange(vocabulary) for _ in range(count)]


def work_of(script: Script, cache: Cache, at: int) -> Work:
    start = sum(len(tokens) for tokens, _, parents in script.steps[:at] if parents is None)
    tokens, scored, parents = script.steps[at]
    return Work(cache, tokens, start, scored, parents)


def rows_of(work: Work, embedding: int) -> bytes:
    hidden = work.cache.hidden(-1, work.scored, embedding), work.cache.hidden(0, work.scored, embedding)
    return work.cache.scores(work.scored).tobytes() + b"".join(each.tobytes() for each in hidden)


def opened(batch: Batch, script: Script, heads: Heads) -> Cache:
    cache = batch.open(CONTEXT, keep_hidden=(-1, 0))
    cache.use_heads(heads.all[script.head])
    return cache


class Heads:
    """The whole head, some that share their first or their second matrix, and one whose matrices are its own."""

    def __init__(self, model: NativeModel) -> None:
        weights = part_of(model).weights
        short = HeadRows(weights, np.arange(64, dtype=np.int64))
        longer = short.and_also([70, 75])
        own = HeadRows(weights, np.arange(5, 200, 3, dtype=np.int64))
        first, second = longer.matrices
        shorter = Matrix(tiles=first.tiles, bias=None, rows=32, columns=first.columns, type=first.type)
        self.kept_alive = short, longer, own
        self.all = [(weights.struct.head,), short.matrices, longer.matrices, (shorter, second), own.matrices]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_rows_of_random_mixtures_equal_those_alone(model: NativeModel, level: str, threads: int) -> None:
    source = random.Random(100 * threads + LEVELS.index(level))
    struct, heads = part_of(model).struct, Heads(model)
    embedding, vocabulary = int(struct.embedding), int(struct.vocabulary)
    scripts = [Script(source, vocabulary, len(heads.all)) for _ in range(9)]
    expected: list[list[bytes]] = []
    with batch_of(model, 1, LEVELS[-1]) as batch:
        for script in scripts:
            cache, rows = opened(batch, script, heads), list[bytes]()
            for at in range(len(script.steps)):
                work = work_of(script, cache, at)
                assert batch.forward([work]) == [OK]
                rows.append(rows_of(work, embedding))
            expected.append(rows)
            batch.close(cache)
    shared = 0
    with batch_of(model, threads, level) as batch:
        waiting = [(script, rows) for script, rows in zip(scripts, expected, strict=True)]
        running: list[tuple[Script, list[bytes], Cache, int]] = []
        while waiting or running:
            if waiting and (len(running) < 2 or source.random() < 0.5):  # a late arrival
                script, rows = waiting.pop()
                running.append((script, rows, opened(batch, script, heads), 0))
            chosen, tokens, scored = list[int](), 0, 0
            for number in source.sample(range(len(running)), len(running)):
                script, _, _, at = running[number]
                tokens, scored = tokens + len(script.steps[at][0]), scored + script.steps[at][1]
                if tokens > 256 or scored > 64 or (chosen and source.random() < 0.2):
                    break
                chosen.append(number)
            work = [work_of(running[number][0], running[number][2], running[number][3]) for number in chosen]
            assert batch.forward(work) == [OK] * len(work)
            shared += len(work) > 1
            for number, each in zip(chosen, work, strict=True):
                script, rows, cache, at = running[number]
                assert rows_of(each, embedding) == rows[at], (script.steps[at], number)
                running[number] = script, rows, cache, at + 1
            for script, rows, cache, at in list(running):
                if at == len(script.steps):
                    running.remove((script, rows, cache, at))
                    batch.close(cache)
    assert shared > 5


def test_scores_stay_valid_while_others_compute(plain: NativeModel) -> None:
    with batch_of(plain, 2, LEVELS[-1]) as batch:
        first, second = batch.open(50), batch.open(50)
        batch.forward([Work(first, [1, 2, 3], 0, 2), Work(second, [4], 0, 1)])
        before = first.scores(2).tobytes()
        for position in range(1, 5):
            batch.forward([Work(second, [5], position, 1)])
        assert first.scores(2).tobytes() == before


def test_a_faulty_entry_is_refused_and_the_others_are_computed(plain: NativeModel) -> None:
    with batch_of(plain, 2, LEVELS[-1]) as batch:
        good, bad, other = batch.open(20), batch.open(20), batch.open(20)
        assert batch.forward([Work(good, [1, 2], 0, 1)]) == [OK]
        expected = good.scores(1).tobytes()
        faults = [
            Work(bad, [-1], 0, 1),
            Work(bad, [1, 2**30], 0, 1),
            Work(bad, [1], 20, 1),
            Work(bad, [1], -1, 1),
            Work(bad, [1], 2**62, 1),
            Work(bad, [1, 2], 0, 3),
            Work(bad, [1, 2], 0, -1),
            Work(bad, [], 0, 0),
            Work(bad, [1, 2], 0, 1, [-1, 0]),
            Work(bad, [1, 2], 0, 2, [-1, 1]),
            Work(bad, [1, 2], 0, 2, [-2, 0]),
            Work(good, [1], 2, 1),  # twice in one forward
        ]
        for fault in faults:
            work = [Work(good, [1, 2], 0, 1), fault, Work(other, [7], 0, 1)]
            assert batch.forward(work) == [OK, BAD_REQUEST, OK], fault
            assert good.scores(1).tobytes() == expected
            assert batch.forward([fault])[0] == (OK if fault.cache is good else BAD_REQUEST)


def test_a_sequence_of_another_batch_is_refused(plain: NativeModel) -> None:
    with batch_of(plain, 1, LEVELS[-1]) as batch, batch_of(plain, 1, LEVELS[-1]) as other:
        assert batch.forward([Work(other.open(20), [1], 0, 1)]) == [BAD_REQUEST]


def test_a_forward_with_too_much_is_refused_as_a_whole(plain: NativeModel) -> None:
    with batch_of(plain, 1, LEVELS[-1]) as batch:
        many = [batch.open(300) for _ in range(MOST_ENTRIES + 1)]
        for work in (
            [Work(cache, [1], 0, 0) for cache in many],
            [],
            [Work(cache, [1] * 129, 0, 0) for cache in many[:2]],
            [Work(cache, [1] * 33, 0, 33) for cache in many[:2]],
        ):
            with pytest.raises(ValueError, match=str(BAD_REQUEST)):
                batch.forward(work)
        assert batch.forward([Work(cache, [1], 0, 1) for cache in many[:-1]]) == [OK] * MOST_ENTRIES


def test_a_cancelled_sequence_does_not_end_a_shared_forward(plain: NativeModel) -> None:
    with batch_of(plain, 3, LEVELS[-1]) as batch:
        cancelled, other = batch.open(20), batch.open(20)
        cancelled.flag.value = 1
        assert batch.forward([Work(cancelled, [1], 0, 1), Work(other, [1], 0, 1)]) == [OK, OK]
        assert cancelled.scores(1).tobytes() == other.scores(1).tobytes()
        assert batch.forward([Work(cancelled, [1], 1, 1)]) == [CANCELLED]
        assert batch.forward([Work(other, [1], 1, 1)]) == [OK]
