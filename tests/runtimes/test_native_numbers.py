"""Numbers of a model that most architectures leave out: scales, long contexts, rotation of a part of each head.

Each changes the scores as a plain computation in double precision says, and all together keep the runtime's promise:
the same bits at every width, on any number of threads, at every level. Neutral numbers change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.architectures.shape import Rope as RopeForm
from edgespec.errors import ForwardError, ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import TensorInfo
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.native.layout import read_layout
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.tensors import LayerTensors, ModelLayout, Rope
from tests.runtimes.contract import equal, logits
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.native_models import reading, some_tokens
from tests.support.tiny_gguf import write_tiny_gguf

LIBRARY = require_native()
Doubles = NDArray[np.float64]
Change = Callable[[ModelLayout], ModelLayout]

QUERY_FACTORS = (1.0, 1.5, 2.0, 2.5)
ORIGINAL = 256  # positions of the original context
LONG = 300
WITHOUT_FACTORS = (Rope(form=RopeForm(base=1e4)),)


def changing(**numbers: Any) -> Change:
    return lambda layout: replace(layout, **numbers)


def with_long_factors(layout: ModelLayout) -> ModelLayout:
    """The file's factors for long contexts, and none for others."""
    ropes = tuple(replace(rope, factors=None, long_factors=rope.factors) for rope in layout.ropes)
    return replace(layout, ropes=ropes, original_context=ORIGINAL)


def with_magnitude(layout: ModelLayout) -> ModelLayout:
    return replace(
        layout, ropes=tuple(replace(rope, form=replace(rope.form, magnitude=1.19)) for rope in layout.ropes)
    )


def turning_a_part(pairs: int) -> Change:
    """24 elements of each head are rotated: neighbours (0), or halves (1)."""

    def changed(layout: ModelLayout) -> ModelLayout:
        layers = tuple(replace(layer, rope_length=24) for layer in layout.layers)
        return replace(layout, rope_length=24, rope_pairs=pairs, ropes=WITHOUT_FACTORS, layers=layers)

    return changed


def without_rotation(layout: ModelLayout) -> ModelLayout:
    """Nothing is rotated in the first layer."""
    first, *others = layout.layers
    return replace(layout, layers=(replace(first, rope_table=None), *others))


def with_everything(layout: ModelLayout) -> ModelLayout:
    return replace(
        with_long_factors(layout),
        embedding_scale=12.0,
        residual_scale=0.22,
        score_scale=0.05,
        logit_scale=1 / 6,
        score_cap=3.0,
        logit_cap=2.0,
        query_factors=QUERY_FACTORS,
        query_span=20,
        ropes=with_magnitude(with_long_factors(layout)).ropes,
    )


NUMBERS: dict[str, Change] = {
    "embedding scale": changing(embedding_scale=12.0),
    "residual scale": changing(residual_scale=0.22),
    "score scale": changing(score_scale=0.05),
    "logit scale": changing(logit_scale=1 / 6),
    "score cap": changing(score_cap=3.0),
    "logit cap": changing(logit_cap=2.0),
    "query factors": changing(query_factors=QUERY_FACTORS, query_span=20),
    "rope magnitude": with_magnitude,
    "no rotation in one layer": without_rotation,
    "a part of each head rotated, in neighbours": turning_a_part(0),
    "a part of each head rotated, in halves": turning_a_part(1),
    "long factors": with_long_factors,
    "everything": with_everything,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("numbers") / "tiny.gguf", width=128, rope_factors=True)


@contextmanager
def loaded(path: Path, change: Change, settings: NativeSettings | None = None) -> Iterator[NativeModel]:
    with reading(change), load_native(path, settings or NativeSettings()) as model:
        yield model


def rows_of(model: NativeModel, tokens: list[int], sizes: list[int], context: int = LONG) -> list[LogitsArray]:
    with model.open(context) as sequence:
        found: list[LogitsArray] = []
        for size in sizes:
            found += logits(sequence.forward(tokens[sequence.length :][:size], size))
        return found


# ------------------------------------------------------------------------------------------ a plain computation


def read(path: Path, tensor: TensorInfo) -> Doubles:
    raw = np.fromfile(path, "<f4", tensor.elements, offset=tensor.offset)
    return raw.reshape(tensor.shape[::-1]).astype(np.float64)


def normalised(x: Doubles, weight: Doubles, epsilon: float) -> Doubles:
    scale: Doubles = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon)
    return x * scale * weight


def turned(path: Path, layout: ModelLayout, heads: Doubles, context: int) -> Doubles:
    """heads (positions, heads, length) by their positions."""
    (rope,), length = layout.ropes, layout.rope_length
    frequencies = rope.form.base ** (-np.arange(0, length, 2) / length) / rope.form.scale
    factors = rope.long_factors if rope.long_factors and context > layout.original_context else rope.factors
    if factors is not None:
        frequencies = frequencies / read(path, factors)
    angles = np.arange(len(heads))[:, None, None] * frequencies
    cosine, sine = np.cos(angles) * rope.form.magnitude, np.sin(angles) * rope.form.magnitude
    pairs = np.arange(length).reshape((2, -1) if layout.rope_pairs else (-1, 2))
    first, second = pairs if layout.rope_pairs else pairs.T
    x, y, out = heads[..., first], heads[..., second], heads.copy()
    out[..., first], out[..., second] = x * cosine - y * sine, x * sine + y * cosine
    return out


def capped(scores: Doubles, cap: float) -> Doubles:
    return cap * np.tanh(scores / cap) if cap else scores


def attention(path: Path, layout: ModelLayout, layer: LayerTensors, x: Doubles, context: int) -> Doubles:
    shape = (len(x), -1, layout.head_length)
    query, key, value = (
        (x @ read(path, weight.tensor).T).reshape(shape) for weight in (layer.query, layer.key, layer.value)
    )
    if layer.rope_table is not None:
        query, key = (turned(path, layout, heads, context) for heads in (query, key))
    if layout.query_factors:
        query = query * np.array(layout.query_factors)[np.arange(len(x)) // layout.query_span][:, None, None]
    key, value = (np.repeat(heads, layout.heads // layout.kv_heads, axis=1) for heads in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) * layout.score_scale
    scores = capped(scores, layout.score_cap)
    scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Doubles = np.einsum("hqk,khd->qhd", weights, value).reshape(len(x), -1)
    return mixed @ read(path, layer.output.tensor).T


def plain_scores(path: Path, layout: ModelLayout, tokens: list[int], context: int) -> Doubles:
    x = read(path, layout.embedding_rows.tensor)[tokens] * layout.embedding_scale
    for layer in layout.layers:
        normed = normalised(x, read(path, layer.attention_norm), layout.norm_epsilon)
        x = x + layout.residual_scale * attention(path, layout, layer, normed, context)
        normed = normalised(x, read(path, layer.feed_forward_norm), layout.norm_epsilon)
        gate, up = (normed @ read(path, weight.tensor).T for weight in (layer.gate, layer.up))
        x = x + layout.residual_scale * (gate / (1 + np.exp(-gate)) * up) @ read(path, layer.down.tensor).T
    normed = normalised(x, read(path, layout.output_norm), layout.norm_epsilon)
    return capped(normed @ read(path, layout.head.tensor).T * layout.logit_scale, layout.logit_cap)


@pytest.mark.parametrize("context", [ORIGINAL, LONG])
@pytest.mark.parametrize("what", NUMBERS)
def test_scores_equal_a_plain_computation(file: Path, what: str, context: int) -> None:
    tokens = some_tokens(file, 60)
    layout = NUMBERS[what](read_layout(read_header(file)))
    with loaded(file, NUMBERS[what]) as model:
        found = np.array(rows_of(model, tokens, [60], context))
    expected = plain_scores(file, layout, tokens, context)
    # Keys and values are halves in the cache; without that the difference is below 1e-4.
    assert np.abs(found - expected).max() < 0.01 * expected.std()
    plain = plain_scores(file, read_layout(read_header(file)), tokens, context)
    assert np.abs(found - plain).max() > 0.1 * expected.std() or (what, context) == ("long factors", LONG)


# ------------------------------------------------------------------------------------------------------- bits


def test_neutral_numbers_change_no_bit(file: Path) -> None:
    tokens = some_tokens(file, 60)
    neutral = changing(residual_scale=1.0, logit_scale=1.0, query_factors=(1.0,), original_context=ORIGINAL)
    with load_native(file, NativeSettings()) as plain, loaded(file, neutral) as same:
        with same.open(LONG) as sequence:
            assert sequence.angles == ""
        assert equal(rows_of(same, tokens, [60]), rows_of(plain, tokens, [60]))


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0"])
def test_rows_with_scales_are_bit_equal_at_every_width_thread_count_and_level(tmp_path: Path, quant: Any) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", width=128, rope_factors=True, quant=quant)
    tokens = some_tokens(path, 290)
    start = [64, 64, 64, 34]  # across the border of an attention block
    with loaded(path, with_everything) as model:
        expected = rows_of(model, tokens, [*start, *[1] * 64])
        for width in (2, 3, 8, 31, 64):
            sizes = [*start, *[width] * (64 // width), *[1] * (64 % width)]
            assert equal(rows_of(model, tokens, sizes), expected), width
        for threads in (2, 3, 7):
            with model.with_settings(threads=threads) as other:
                assert equal(rows_of(other, tokens, [*start, 40, 1, 23]), expected), threads
    for level in LIBRARY.levels:
        with loaded(path, with_everything, NativeSettings(level=level)) as model:
            assert equal(rows_of(model, tokens, [*start, 5, 59]), expected), level


def test_rows_with_scales_are_bit_equal_where_the_last_layer_computes_scored_rows_only(file: Path) -> None:
    tokens = some_tokens(file, 40)
    with loaded(file, with_everything) as model, model.open(LONG, keep_hidden=(0, 1, -1)) as sequence:
        all_rows = logits(sequence.forward(tokens, 40))
        hidden = {layer: sequence.hidden(layer)[-3:] for layer in (0, 1, -1)}
        sequence.rewind(0)
        assert equal(logits(sequence.forward(tokens, 3)), all_rows[-3:])
        for layer, kept in hidden.items():
            assert np.array_equal(sequence.hidden(layer), kept)


def test_hidden_states_after_the_heads_norm_do_not_have_the_scores_scale(file: Path) -> None:
    tokens = some_tokens(file, 5)
    found = []
    for scale in (1.0, 0.5):
        with loaded(file, changing(logit_scale=scale)) as model, model.open(LONG, keep_hidden=(-1,)) as sequence:
            found.append((sequence.forward(tokens, 1).logits(0), sequence.hidden(-1)))
    assert np.array_equal(found[0][0] / 2, found[1][0])
    assert np.array_equal(found[0][1], found[1][1])


def test_short_heads_have_the_whole_heads_scaled_scores(file: Path) -> None:
    tokens, kept = some_tokens(file, 20), np.array([1, 2, 3, 90, 200])
    with loaded(file, with_everything) as model, model.with_head_rows(kept) as part:
        for short, whole in zip(rows_of(part, tokens, [20]), rows_of(model, tokens, [20]), strict=True):
            assert np.array_equal(short[kept], whole[kept])


# ---------------------------------------------------------------------------------------------- long contexts


def test_sequences_of_short_and_long_contexts_share_a_model(file: Path) -> None:
    tokens = some_tokens(file, 40)
    with loaded(file, with_long_factors, NativeSettings(threads=2)) as model:
        short, long = (rows_of(model, tokens, [40], context) for context in (ORIGINAL, ORIGINAL + 1))
        with model.open(ORIGINAL) as one, model.open(ORIGINAL + 1) as other:
            assert (one.angles, other.angles) == ("short", "long")
    assert np.array_equal(short[0], long[0]), "nothing is turned at position 0"
    assert not np.array_equal(short[-1], long[-1])
    with loaded(file, lambda layout: replace(with_long_factors(layout), original_context=LONG)) as model:
        assert equal(rows_of(model, tokens, [40], LONG), short)


def test_a_tree_in_a_long_context_scores_like_the_chain(file: Path) -> None:
    tokens = some_tokens(file, 40)
    with loaded(file, with_everything) as model, model.open(LONG) as sequence:
        chain = logits(sequence.forward(tokens, 40))
        sequence.rewind(36)
        assert equal(logits(sequence.forward_tree(tokens[-4:], [-1, 0, 1, 2])), chain[-4:])


def test_a_cache_is_not_copied_between_short_and_long_contexts(file: Path) -> None:
    with loaded(file, with_long_factors) as model, model.open(ORIGINAL) as short, model.open(LONG) as long:
        short.forward([1, 2, 3], 0)
        with short.fork() as fork:
            assert fork.length == 3
        with pytest.raises(ForwardError, match="copying 3 positions"):
            long._native.copy_from(short._native, 3)  # no caller of ours asks for this


@pytest.mark.parametrize("spoilt", [0.0, -1.0, np.nan, np.inf])
def test_long_factors_that_are_not_finite_and_positive_are_refused(file: Path, tmp_path: Path, spoilt: float) -> None:
    path = tmp_path / "spoilt.gguf"
    path.write_bytes(file.read_bytes())
    factors = next(each for each in read_header(path).tensors if each.name == "rope_freqs.weight")
    with path.open("r+b") as content:
        content.seek(factors.offset + 4)
        content.write(np.float32(spoilt).tobytes())
    with pytest.raises(ModelFileError, match="rope factors must be finite and positive"):
        loaded(path, with_long_factors).__enter__()
