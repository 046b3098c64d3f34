"""A layer that drafts for its model: its numbers, the hidden rows that it reads, and the tokens that it drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import InvalidRequestError, RuntimeUnavailableError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import TensorInfo
from edgespec.interfaces.features import MOST_ROWS, Features, FeatureSequence, FollowingSequence
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.native.following import DraftingSequence
from edgespec.runtimes.native.layout import read_layout
from edgespec.runtimes.native.library import BAD_REQUEST, OK, load
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.sequence import NativeSequence
from edgespec.runtimes.native.tensors import ModelLayout
from edgespec.runtimes.runtime import DraftForm
from edgespec.runtimes.table import runtime_of
from tests.runtimes.contract import equal, logits
from tests.support.kernel_calls import require_native
from tests.support.llama_drafts import llama_draft
from tests.support.loading import load_native, located
from tests.support.native_batches import Work, batch_of
from tests.support.native_models import restored, some_tokens
from tests.support.tiny_gguf import write_tiny_gguf

require_native()

Doubles = NDArray[np.float64]
LENGTH = 200
OWN = ("embed_tokens", "shared_head_norm", "shared_head_head")
KINDS: dict[str, dict[str, Any]] = {
    "lent": {"drafting": ()},
    "own": {"drafting": OWN, "head_length": 32, "layers": 3},
    "tied": {"drafting": OWN[1:2], "tied": True, "head_length": 32, "rope_length": 16},
    "Q8_0": {"drafting": (), "quant": "Q8_0"},
    "mixture": {"drafting": (), "quant": "Q8_0", "architecture": "qwen35moe", "experts": (6, 2), "shared": 96},
}
DENSE = ("lent", "own", "tied")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafting")
    return {
        name: write_tiny_gguf(folder / f"{name}.gguf", **{"architecture": "qwen35"} | kind)
        for name, kind in KINDS.items()
    }


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Path:
    return paths[request.param]


@pytest.fixture
def model(path: Path) -> Iterator[NativeModel]:
    with load_native(path, NativeSettings(threads=2)) as model:
        yield model


# -------------------------------------------------------------------------------- the published computation


def read(path: Path, tensor: TensorInfo) -> Doubles:
    raw = np.fromfile(path, "<f4", tensor.elements, offset=tensor.offset)
    return raw.reshape(tensor.shape[::-1]).astype(np.float64)


class Reference:
    """The layer in double precision: Qwen 3.5's decoder layer with attention, on pairs of token and hidden row."""

    def __init__(self, path: Path) -> None:
        whole = read_layout(read_header(path))
        assert whole.drafting is not None
        self.layout: ModelLayout = whole.drafting
        self.path = path

    def of(self, tensor: Any) -> Doubles:
        return read(self.path, getattr(tensor, "tensor", tensor))

    def normed(self, x: Doubles, weight: TensorInfo | None) -> Doubles:
        scale: Doubles = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.layout.norm_epsilon)
        return x * scale * self.of(weight)

    def turned(self, heads: Doubles) -> Doubles:
        length, half = self.layout.rope_length, self.layout.rope_length // 2
        angles = np.arange(len(heads))[:, None, None] * 1e4 ** (-np.arange(0, length, 2) / length)
        x, y, out = heads[..., :half], heads[..., half:length], heads.copy()
        out[..., :half] = x * np.cos(angles) - y * np.sin(angles)
        out[..., half:length] = x * np.sin(angles) + y * np.cos(angles)
        return out

    def attention(self, x: Doubles) -> Doubles:
        layer, length = self.layout.layers[0], self.layout.head_length
        asked = (x @ self.of(layer.query).T).reshape(len(x), -1, 2, length)
        query, gate = self.turned(self.normed(asked[:, :, 0], layer.query_norm)), asked[:, :, 1]
        key, value = ((x @ self.of(each).T).reshape(len(x), -1, length) for each in (layer.key, layer.value))
        key = self.turned(self.normed(key, layer.key_norm))
        sharing = self.layout.heads // self.layout.kv_heads
        key, value = (np.repeat(each, sharing, axis=1) for each in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(length)
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, value) / (1 + np.exp(-gate))
        out: Doubles = mixed.reshape(len(x), -1) @ self.of(layer.output).T
        return out

    def rows(self, tokens: list[int], hidden: Doubles) -> tuple[Doubles, Doubles]:
        """The scores behind each token, and the layer's own hidden rows."""
        layout, layer = self.layout, self.layout.layers[0]
        assert layout.pair is not None
        assert layer.up is not None
        embedded = self.of(layout.embedding_rows)[tokens]
        pairs = [self.normed(embedded, layout.pair.token_norm), self.normed(hidden, layout.pair.hidden_norm)]
        x = np.concatenate(pairs, axis=1) @ self.of(layout.pair.projection).T
        x = x + self.attention(self.normed(x, layer.attention_norm))
        fed = self.normed(x, layer.feed_forward_norm)
        gate = fed @ self.of(layer.gate).T
        x = x + (gate / (1 + np.exp(-gate)) * (fed @ self.of(layer.up).T)) @ self.of(layer.down).T
        own = self.normed(x, layout.output_norm)
        return own @ self.of(layout.head).T, own

    def draft(self, tokens: list[int], hidden: Doubles, count: int) -> list[int]:
        """The likeliest next tokens, each by the layer's own hidden row of the one before."""
        drafted: list[int] = []
        for _ in range(count):
            scores, own = self.rows(tokens + drafted, hidden)
            drafted.append(int(scores[-1].argmax()))
            hidden = np.concatenate([hidden, own[-1:]])
        return drafted


def opened(layer: NativeModel) -> DraftingSequence:
    sequence = layer.open(LENGTH)
    assert isinstance(sequence, DraftingSequence)
    return sequence


@contextmanager
def following(
    path: Path, settings: NativeSettings | None = None
) -> Iterator[tuple[NativeSequence, DraftingSequence]]:
    """A target's Sequence and its layer's, which follows it."""
    with load_native(path, settings or NativeSettings(threads=2)) as model, model.drafting_layer() as layer:
        target, drafting = model.open(LENGTH), opened(layer)
        drafting.follow(target.keep_features(), target)
        yield target, drafting


def rows_before(features: Features, count: int) -> Doubles:
    """The hidden row of the token before each token of a text."""
    found = [features.row(position) for position in range(count - 1)]
    return np.stack([np.zeros(features.width), *(row for row in found if row is not None)])


@pytest.mark.parametrize("name", DENSE)
def test_scores_and_drafted_tokens_are_those_of_the_published_computation(paths: dict[str, Path], name: str) -> None:
    tokens, reference = some_tokens(paths[name], 40), Reference(paths[name])
    with following(paths[name]) as (target, drafting):
        features = target.keep_features()
        target.forward(tokens[:39], 1)
        hidden = rows_before(features, 40)
        expected, _ = reference.rows(tokens, hidden)
        drafting.forward(tokens[:-8], 0)
        found = np.array(logits(drafting.forward(tokens[-8:], 8)))
        # Keys and values are halves in the cache.
        assert np.abs(found - expected[-8:]).max() < 0.01 * expected.std()
        drafted = [int(found[-1].argmax())]
        while len(drafted) < 6:
            drafted.append(int(drafting.forward(drafted[-1:], 1).argmax()[0]))
        assert drafted == reference.draft(tokens, hidden, 6)
        assert len(set(drafted)) > 2
        drafting.rewind(drafting.length)
        assert drafting.length == 40, "the first drafted token has a hidden row that the target will replace"


@pytest.mark.parametrize("name", [*DENSE, "mixture"])
def test_the_drafted_tokens_are_those_of_llama_cpp(paths: dict[str, Path], tmp_path: Path, name: str) -> None:
    pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    path = paths[name] if name in DENSE else write_tiny_gguf(tmp_path / "F32.gguf", **KINDS[name] | {"quant": "F32"})
    tokens, different = some_tokens(path, 90), set[int]()
    for length in (2, 40, 90):
        with following(path) as (target, drafting):
            target.forward(tokens[: length - 1], 1)
            rows = [drafting.forward(tokens[:length], 1).logits(0)]
            while len(rows) < 6:
                rows.append(drafting.forward([int(rows[-1].argmax())], 1).logits(0))
        theirs, scores = llama_draft(path, tokens[:length], 6)
        assert [int(row.argmax()) for row in rows] == theirs
        # The same arithmetic but for the order of sums and where halves are used, token after token; scores spread
        # over about 3.
        assert max(np.abs(own - their).max() for own, their in zip(rows, scores, strict=True)) < 0.06
        different |= set(theirs)
    assert len(different) > 6


# ----------------------------------------------------------------------------------------------- hidden rows


def test_rows_of_all_tokens_are_kept_and_change_no_score(model: NativeModel, path: Path) -> None:
    tokens, chance = some_tokens(path, LENGTH), random.Random(5)
    with model.open(LENGTH, keep_hidden=[-1]) as plain, model.open(LENGTH) as sequence:
        scores: list[LogitsArray] = []
        rows = []
        for token in tokens:
            scores.append(plain.forward([token], 1).logits(0))
            rows.append(plain.hidden(-1)[0])
        features = sequence.keep_features()
        assert sequence.keep_features() is features
        while sequence.length < LENGTH:
            start = sequence.length
            more = tokens[start : start + chance.choice((1, 5, 40, 90))]
            scored = chance.randint(0, min(6, len(more)))
            found = logits(sequence.forward(more, scored))
            assert equal(found, scores[start + len(more) - scored : start + len(more)])
            held = [features.row(position) for position in range(sequence.length)]
            assert all(np.array_equal(own, row) for own, row in zip(held, rows, strict=False))
            assert features.end == sequence.length
            if chance.random() < 0.4:
                sequence.rewind(sequence.length - chance.randint(0, min(10, len(more))))
                assert (features.end, features.row(sequence.length)) == (sequence.length, None)
        with sequence.fork() as other:
            copied = other.keep_features()
            sequence.rewind(LENGTH - 5)
            assert (copied.end, features.end) == (LENGTH, LENGTH - 5)
        again = restored(model, sequence, LENGTH - 5, LENGTH)
        assert (again.keep_features().first, again.keep_features().begins) == (LENGTH - 5, LENGTH - 4)
        again.close()


def test_sequences_that_share_a_forward_keep_the_rows_of_those_that_ask(model: NativeModel, path: Path) -> None:
    tokens, width = some_tokens(path, 60), int(model._loaded().struct.embedding)
    with model.open(LENGTH) as sequence:
        features = sequence.keep_features()
        expected = sequence.forward(tokens, 3)
        with batch_of(model, 2, load().levels[-1]) as batch:
            caches = [batch.open(LENGTH) for _ in range(3)]
            rows = [np.zeros((60, width), np.float32) for _ in caches]
            scored = (3, 0, 3)
            work = [
                Work(cache, tokens, 0, count, kept=kept)
                for cache, count, kept in zip(caches, scored, (rows[0], rows[1], None), strict=True)
            ]
            assert batch.forward(work) == [OK] * 3
            for index in range(60):
                assert all(np.array_equal(kept[index], features.row(index)) for kept in rows[:2])
            for cache in (caches[0], caches[2]):
                assert equal(list(cache.scores(3)), logits(expected))
    with model.drafting_layer() as layer, batch_of(layer, 2, load().levels[-1]) as batch:
        cache = batch.open(LENGTH)
        assert batch.forward([Work(cache, tokens, 0, 1)]) == [BAD_REQUEST]
        assert batch.forward([Work(cache, tokens, 0, 1, pairs=rows[0])]) == [OK]


def test_a_saved_cache_leaves_no_rows(model: NativeModel, path: Path) -> None:
    tokens = some_tokens(path, 60)
    with model.open(LENGTH) as sequence, model.open(LENGTH) as other:
        sequence.forward(tokens, 0)
        features = other.keep_features()
        count, _ = sequence.part_sizes(60)
        other.restore([sequence.read_part(part, 60) for part in range(count)], 60)
        assert (features.first, features.end) == (60, 60)
        other.forward(tokens[:3], 1)
        assert (features.first, features.end, features.begins) == (60, 63, 61)


def test_rows_that_are_held() -> None:
    features = Features(2)
    assert (features.first, features.end, features.begins, features.row(0)) == (0, 0, 0, None)
    every = np.arange(20_000, dtype=np.float32).reshape(-1, 2)
    for start in range(0, 6000, 250):
        features.put(start, every[start : start + 250])
    assert (features.first, features.end) == (6000 - MOST_ROWS, 6000)
    for position in (6000 - MOST_ROWS, 5000, 5999):
        assert np.array_equal(features.row(position), every[position])
    assert features.row(6000 - MOST_ROWS - 1) is None
    features.put(5990, every[:3])
    assert (features.end, list(features.row(5992))) == (5993, [4.0, 5.0])
    other = features.copy()
    features.cut(100)
    assert (features.first, features.end) == (100, 100)
    features.put(100, every[:1])
    features.put(300, every[:2])  # a gap
    assert (features.first, features.end, other.end) == (300, 302, 5993)


# ------------------------------------------------------------------------------------------------- following


def test_a_layer_follows_its_target(model: NativeModel, path: Path) -> None:
    """However the target's rows came, and whatever was drafted before, the scores are those of a new layer."""
    tokens, chance = some_tokens(path, LENGTH), random.Random(6)
    with model.drafting_layer() as layer, model.open(LENGTH) as target, opened(layer) as drafting:
        assert isinstance(target, FeatureSequence)
        assert isinstance(drafting, FollowingSequence)
        drafting.follow(features := target.keep_features(), target)
        for _ in range(12):
            start = target.length
            target.forward(tokens[start : start + chance.randint(2, 12)], 1)
            target.rewind(known := chance.randint(start + 1, target.length))
            drafting.rewind(min(known, drafting.length))
            row = drafting.forward(tokens[drafting.length : known + 1], 1).logits(0)
            for token in chance.choices(range(100), k=3):  # guesses
                drafting.forward([token], 1)
            with opened(layer) as fresh:
                fresh.follow(features, target)
                assert np.array_equal(row, fresh.forward(tokens[: known + 1], 1).logits(0))
            drafting.rewind(drafting.length)
            assert drafting.length == known + 1
        drafting.begin(30)
        assert drafting.length == 0
        with layer.open(LENGTH) as fresh:
            assert not np.array_equal(
                drafting.forward(tokens[30:40], 1).logits(0), fresh.forward(tokens[30:40], 1).logits(0)
            )
        with pytest.raises(InvalidRequestError):
            layer.drafting_layer()


@pytest.mark.parametrize("level", load().levels)
def test_every_level_and_thread_count_gives_the_same_bits(path: Path, level: str) -> None:
    tokens, found = some_tokens(path, 60), []
    for settings in (NativeSettings(), NativeSettings(threads=3, level=level)):
        with following(path, settings) as (target, drafting):
            target.forward(tokens, 0)
            drafting.forward(tokens[:-4], 0)
            found.append(logits(drafting.forward(tokens[-4:], 4)))
    assert equal(*found)


def test_a_layer_shares_its_models_weights_and_counts_what_it_adds(path: Path) -> None:
    header, file = read_header(path), located(path)
    with load_native(path, NativeSettings()) as model, model.drafting_layer() as layer:
        facts, own = model.facts, layer.facts
        assert facts.weight_bytes == header.tensor_bytes
        assert (own.weight_bytes, own.follows, facts.follows) == (0, True, False)
        assert own.name == f"{file.name}'s drafting layer"
        assert own.bytes_per_forward < facts.bytes_per_forward
        assert own.kv_bytes_per_token == facts.kv_bytes_per_token
        runtime, settings = runtime_of(model.settings), model.settings
        assert runtime.describe(file, settings, DraftForm(layer=True)) == own
        with layer.with_head_rows(np.arange(5, 90)) as short, short.open(LENGTH) as sequence:
            assert isinstance(sequence, DraftingSequence)
            assert np.isneginf(sequence.forward([7], 1).logits(0)[:5]).all()
            assert short.facts.bytes_per_forward < own.bytes_per_forward
            assert short.facts.follows
        with layer.with_settings(threads=2) as other:
            assert other.facts == replace(own, threads=2) == layer.facts_with(threads=2)
        with runtime.load(file, settings, DraftForm(layer=True, head_rows=None)) as alone, alone.open(9) as sequence:
            assert sequence.forward([5], 1).count == 1
            assert alone.facts == own


# ----------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nextn_predict_layers": 2, "block_count": 4}, "it has 2 such layers, of which each drafts another token"),
        ({"rename": "nextn.eh_proj"}, "tensor blk.2.nextn.eh_proj.weight is missing"),
        ({"rename": "attn_q.weight"}, "tensor blk.2.attn_q.weight is missing"),
        ({"shape": "nextn.enorm"}, "tensor blk.2.nextn.enorm.weight has shape (32,), not (64,)"),
        ({"shape": "nextn.eh_proj"}, "tensor blk.2.nextn.eh_proj.weight has shape (32,), not (128, 64)"),
        ({"add": "nextn.other"}, "it has a tensor blk.2.nextn.other.weight"),
    ],
)
def test_a_layer_that_is_not_computed_is_left_out_with_a_reason(
    paths: dict[str, Path], change: dict[str, Any], words: str
) -> None:
    header = read_header(paths["lent"])
    keys = {f"qwen35.{key}": value for key, value in change.items() if isinstance(value, int)}

    def changed(tensor: TensorInfo) -> TensorInfo:
        own = tensor.name.startswith("blk.2.")
        if own and change.get("rename", "-") in tensor.name:
            return replace(tensor, name="blk.2.strange.weight")
        return replace(tensor, shape=(32,)) if own and change.get("shape", "-") in tensor.name else tensor

    tensors = tuple(map(changed, header.tensors))
    if "add" in change:
        tensors += (replace(tensors[-1], name=f"blk.2.{change['add']}.weight"),)
    found = read_layout(replace(header, metadata=dict(header.metadata) | keys, tensors=tensors))
    assert (found.drafting, found.no_drafting) == (None, words)
    assert len(found.layers) == 2


def test_a_model_without_the_layer_has_none(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "plain.gguf", architecture="qwen35")
    layout = read_layout(read_header(path))
    assert (layout.drafting, layout.no_drafting) == (None, None)
    with load_native(path, NativeSettings()) as model:
        with pytest.raises(RuntimeUnavailableError, match="no layer drafts for plain: the file holds none"):
            model.drafting_layer()
        with pytest.raises(InvalidRequestError, match="no layer that drafts"):
            model._loaded().weights.drafting_layer()
