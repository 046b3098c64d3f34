"""Layers with a window give back positions that no row sees any more, and no bit of a row changes."""

from __future__ import annotations

import mmap
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from edgespec.errors import CancelledError, InvalidRequestError
from edgespec.interfaces.model import ALL_KEPT, PREFILL_CHUNK_TOKENS, WindowedLayers
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.native import rewinds
from edgespec.runtimes.native.cache import NativeCache
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.rewinds import SavedParts, windowed_layers
from edgespec.runtimes.native.sequence import NativeSequence
from tests.runtimes.tree_contract import path_to
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.native_models import SHARING, restored, some_tokens
from tests.support.tiny_gguf import write_tiny_gguf

require_native()

# As the documentation names them.
REAL = (rewinds.KEPT_BACK, rewinds.SAVED_BACK, windowed_layers(1, 0).positions)

LENGTH, KEPT, SAVED = 900, 96, 64

# With whole heads and pairs of heads, with all layers windowed, with caps, with sinks, and with few windowed layers.
KINDS: dict[str, Mapping[str, Any]] = {
    "gemma3": {"architecture": "gemma3", "window": 50, "layers": 6, "head_length": 64, "quant": "Q8_0"},
    "gemma2": {"architecture": "gemma2", "window": 100, "layers": 3, "quant": "Q4_0"},
    "olmo2": {"architecture": "olmo2", "window": 17, "layers": 5, "head_length": 32},
    "gpt-oss": {"architecture": "gpt-oss", "window": 30, "layers": 3, "head_length": 48, "quant": "MXFP4"},
    "gemma4": {**SHARING, "quant": "Q8_0"},
    "phi3": {"architecture": "phi3", "window": 64, "layers": 2, "head_length": 64},
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewinds, "KEPT_BACK", KEPT)
    monkeypatch.setattr(rewinds, "SAVED_BACK", SAVED)
    monkeypatch.setattr(rewinds, "_STEP", 32)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("windows")
    return {name: write_tiny_gguf(folder / f"{name}.gguf", **kind) for name, kind in KINDS.items()}


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Path:
    return paths[request.param]


@pytest.fixture
def model(path: Path) -> Iterator[NativeModel]:
    with load_native(path, NativeSettings(threads=3)) as model:
        yield model


def rows_of_whole_cache(model: NativeModel, tokens: list[int]) -> list[LogitsArray]:
    """The scores after each token, from a cache that keeps everything."""
    found: list[LogitsArray] = []
    with patch.object(rewinds, "KEPT_BACK", len(tokens)), model.open(len(tokens)) as sequence:
        for start in range(0, len(tokens), 64):
            rows = sequence.forward(tokens[start : start + 64], len(tokens[start : start + 64]))
            found += [rows.logits(index) for index in range(rows.count)]
        assert sequence._native._held == 0
    return found


class Walk:
    """Random operations on a cache of one text, each row compared with that of a cache that keeps everything."""

    def __init__(self, model: NativeModel, tokens: list[int], expected: list[LogitsArray]) -> None:
        self.model, self.tokens, self.expected = model, tokens, expected
        self.sequence = model.open(len(tokens))
        self.source = random.Random(3)
        self.done: dict[str, int] = {}
        self.begun = 0  # where the last forward began, at most

    def step(self) -> None:
        kinds = ("read", "read", "score", "score", "tree", "tree", "back", "far", "fork", "save")
        kind = self.source.choice(kinds) if self.sequence.length else "read"
        if len(self.tokens) - self.sequence.length < 64:
            kind = "far"
        getattr(self, kind)()
        self.done[kind] = self.done.get(kind, 0) + 1

    def following(self, most: int) -> list[int]:
        self.begun = start = self.sequence.length
        return self.tokens[start : start + self.source.randint(1, most)]

    def read(self) -> None:
        more = self.following(400)
        self.begun += (len(more) - 1) // PREFILL_CHUNK_TOKENS * PREFILL_CHUNK_TOKENS
        self.sequence.forward(more, 0)

    def score(self) -> None:
        start, more = self.sequence.length, self.following(self.source.choice((1, 8, 64)))
        rows = self.sequence.forward(more, len(more))
        for index in range(len(more)):
            assert np.array_equal(rows.logits(index), self.expected[start + index]), (start, index, self.done)

    def tree(self) -> None:
        """The text as one path of a tree of wrong guesses, and some of it kept."""
        start, more = self.sequence.length, self.following(30)
        tokens, parents, own = list[int](), list[int](), -1
        for token in more:
            tokens += [token, (token + 1) % self.model.facts.vocabulary_size]
            parents += [own, own]
            own = len(tokens) - 2
        rows = self.sequence.forward_tree(tokens, parents)
        for index in range(len(more)):
            assert np.array_equal(rows.logits(2 * index), self.expected[start + index]), (start, index, self.done)
        self.sequence.keep(path_to(parents, 2 * self.source.randrange(len(more))))

    def back(self) -> None:
        """What the last forward appended can always be dropped."""
        least = min(self.begun, self.sequence.length)
        asked = self.source.randint(least, self.sequence.length)
        self.sequence.rewind(asked)
        assert self.sequence.length == asked, self.done

    def far(self) -> None:
        asked = self.source.randrange(self.sequence.length)
        self.sequence.rewind(asked)
        assert self.sequence.length in (0, asked)

    def fork(self) -> None:
        other = self.sequence.fork()
        self.sequence.close()
        self.sequence = other

    def save(self) -> None:
        length = self.sequence.length - self.source.randint(0, min(self.sequence.length - 1, 20))
        if not self.sequence.holds(length):
            with pytest.raises(InvalidRequestError, match="there is no part"):
                self.sequence.read_part(0, length)
            return
        self.sequence, self.begun = restored(self.model, self.sequence, length, len(self.tokens)), length


def test_every_row_is_that_of_a_cache_that_keeps_everything(model: NativeModel, path: Path) -> None:
    tokens = some_tokens(path, LENGTH)
    walk = Walk(model, tokens, rows_of_whole_cache(model, tokens))
    for _ in range(110):
        walk.step()
    assert min(walk.done.values()) > 2, walk.done
    walk.sequence.close()


def values_of(sequence: NativeSequence, layer: int) -> np.ndarray[Any, Any]:
    """The values of a layer's first head: int16 (positions in whole tiles, head length)."""
    native, length = sequence._native, sequence.length
    layers = native.part.struct.layer[: native.part.struct.layers]
    heads = [own.kv_heads if own.cache_layer == number else 0 for number, own in enumerate(layers)]
    number = sum(heads) + sum(heads[: layers[layer].cache_layer])
    size = native._api.es_part_bytes(native._open(), number, 0, length)
    return native._read_head(number, 0, length, size).view(np.int16).reshape(-1, layers[layer].head_length)


def test_a_cache_that_grows_holds_the_last_positions_of_layers_with_a_window(model: NativeModel, path: Path) -> None:
    tokens = some_tokens(path, LENGTH)
    with model.open(LENGTH) as sequence:
        sequence.forward(tokens[:-1], 0)
        length, native = sequence.length, sequence._native
        assert native.can_continue(length - KEPT)
        assert native.holds_saved(length)
        windowed, held = native._windows, native._held
        assert length - held <= windowed_layers(1, windowed.widest).positions
        for layer in range(native.part.struct.layers):
            filled = values_of(sequence, layer)[:length].any(axis=1)
            assert filled[held if layer in windowed.layers else 0 :].all()
            if layer in windowed.layers and sys.platform == "linux":
                in_page = mmap.PAGESIZE // (2 * native.part.struct.layer[layer].head_length)
                assert filled[:held].sum() <= 2 * in_page < held, "all but the pages at both ends hold zeros"
        with sequence.fork() as other:
            assert (other.length, other._native._held) == (length, held)


def test_a_rewind_to_what_was_given_back_drops_everything(model: NativeModel, path: Path) -> None:
    tokens = some_tokens(path, LENGTH)
    with model.open(LENGTH) as sequence, model.open(LENGTH) as fresh:
        sequence.forward(tokens[:-1], 0)
        sequence.rewind(sequence._native._held)
        assert sequence.length == 0
        rows, expected = sequence.forward(tokens[:200], 1), fresh.forward(tokens[:200], 1)
        assert np.array_equal(rows.logits(0), expected.logits(0))


def test_a_cancelled_forward_that_gave_positions_back_drops_everything(model: NativeModel, path: Path) -> None:
    tokens, decode = some_tokens(path, LENGTH), NativeCache.decode

    def cancelled_later(self: NativeCache, ids: Any, position: int, rows: int, **named: Any) -> None:
        if position >= 640:
            raise CancelledError("later")
        decode(self, ids, position, rows, **named)

    with model.open(LENGTH) as sequence, patch.object(NativeCache, "decode", cancelled_later):
        sequence.forward(tokens[:100], 0)
        with pytest.raises(CancelledError):
            sequence.forward(tokens[100:], 0)
        assert (sequence.length, sequence._native._held) == (0, 0)
        sequence.forward(tokens[:500], 0)
        sequence.forward(tokens[500:650], 0)
        with pytest.raises(CancelledError):
            sequence.forward(tokens[650:], 0)
        assert sequence.length == 650, "one that gave none back ends as always"


def test_the_numbers_are_those_that_the_documentation_names() -> None:
    assert REAL == (2048, 1024, 2560)


def test_facts_count_what_windowed_layers_keep() -> None:
    own = windowed_layers(29 * 4096, 1024)  # 4B of Gemma 3: 34 layers, five of them without a window
    assert own == WindowedLayers(bytes_per_token=29 * 4096, positions=1024 + KEPT + 32 + 256)
    assert 34 * 4096 - own.bytes_per_token == 20_480
    assert windowed_layers(0, 0) == ALL_KEPT


def test_a_models_facts_have_the_layers_it_computes(paths: dict[str, Path]) -> None:
    with load_native(paths["gemma3"], NativeSettings()) as model:
        layer_bytes = 2 * 2 * 64 * 2
        assert model.facts.kv_bytes_per_token == 6 * layer_bytes
        assert model.facts.windowed.bytes_per_token == 5 * layer_bytes
        positions = model.facts.windowed.positions
        assert model.facts.cache_bytes(positions) == positions * 6 * layer_bytes
        assert model.facts.cache_bytes(positions + 10) == (positions * 6 + 10) * layer_bytes


@pytest.mark.parametrize(("size", "piece"), [(100, 100), (100, 30), (100, 1), (64, 48)])
def test_every_byte_of_a_windowed_head_is_in_one_part(size: int, piece: int) -> None:
    parts = SavedParts(whole=(5, 7), windowed=(1, 2, 3, 4), size=size, piece=piece)
    found = [
        (number, at)
        for part in range(2, parts.count)
        for number, own in parts.pieces(part)
        for at in range(piece)[own]
    ]
    assert found == [(number, at) for number in (1, 2, 3, 4) for at in range(piece)]
    for part in range(2, parts.count):
        assert sum(own.stop - own.start for _, own in parts.pieces(part)) <= size
