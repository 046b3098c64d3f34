"""Q4_K_M files of real models on the native runtime: scores close to llama.cpp's, bit-equal at every width."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec import Engine
from edgespec.bench.suite import builtin_suite
from edgespec.files.gguf.header import read_header
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.runtime import FREQUENT_HEAD_ROWS, frequent_head_ids, frequent_head_rows
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer
from tests.models.test_native import Text, divergence, run, scores
from tests.support.kernel_calls import require_native
from tests.support.loading import load_model, load_native

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

TOKENS = 96

# Q4_K and Q6_K; and Q5_0, Q8_0, Q6_K and Q4_K, since rows of 896 do not divide into super-blocks.
MODELS = ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b")


@pytest.fixture(scope="module", params=MODELS)
def text(request: pytest.FixtureRequest) -> Text:
    require_native()
    with Engine.load(request.param, draft="none", lookup=False, depth=0, download=True) as engine:
        path = engine.pair.target.header.path
    words = "\n\n".join(each.prompt for each in builtin_suite("verify"))
    return Text(path, LlamaTokenizer(path).encode(words)[:TOKENS])


@pytest.fixture(scope="module")
def native(text: Text) -> Iterator[NativeModel]:
    with load_native(text.path, NativeSettings(threads=2)) as model:
        yield model


@pytest.fixture(scope="module")
def own(text: Text, native: NativeModel) -> NDArray[np.float32]:
    """The scores of the whole text, eight rows at a time."""
    return run(native, text.tokens, 8)


def test_native_k_quant_scores_agree_with_llama_cpp(text: Text, own: NDArray[np.float32]) -> None:
    settings = LlamaSettings(kv_type="f16", flash_attention=False, repack=False)
    with load_model(text.path, settings) as model:
        narrow = run(model, text.tokens, 1)
    # Without the first row: there llama.cpp's activation scales (one per 256) lose the 1.5B's very uneven
    # activations: it is 6.1 nats from 16-bit weights, ours 0.2. Measured on the other rows: 0.0028 and 0.0017.
    assert divergence(narrow[1:], own[1:]) < 0.006
    assert (narrow.argmax(-1) == own.argmax(-1)).mean() > 0.9  # measured: 0.96 and 0.96


def test_native_k_quant_rows_are_bit_equal_at_every_width(text: Text, native: NativeModel) -> None:
    context = TOKENS - 32
    with native.open(TOKENS) as sequence:
        sequence.forward(text.tokens[:context], 0)
        plain = scores(sequence, text.tokens[context:], 1)
        for width in (2, 3, 4, 5, 6, 7, 8, 13, 16, 32):
            sequence.rewind(context)
            assert np.array_equal(scores(sequence, text.tokens[context:], width), plain), width


def test_four_bit_requantisation_reads_fewer_bytes_and_stays_close(
    text: Text, native: NativeModel, own: NDArray[np.float32]
) -> None:
    with load_native(text.path, NativeSettings(threads=2), requantized=True) as model:
        # Most of the 1.5B's file is in four bits already.
        assert model.facts.bytes_per_forward < 0.9 * native.facts.bytes_per_forward
        found = run(model, text.tokens, 8)
        assert np.array_equal(run(model, text.tokens[:32], 1), found[:32])
    assert divergence(own, found) < 0.15  # measured: 0.031 and 0.085
    assert (own.argmax(-1) == found.argmax(-1)).mean() > 0.7  # measured: 0.86 and 0.78


def test_a_short_head_gives_the_whole_heads_scores(text: Text, native: NativeModel) -> None:
    header = read_header(text.path)
    short = frequent_head_ids(header)
    assert len(short) == frequent_head_rows(header) == FREQUENT_HEAD_ROWS
    rare = [int(token) for token in range(FREQUENT_HEAD_ROWS, header.vocabulary_size, 997)]
    few, some = (np.zeros(header.vocabulary_size, dtype=bool) for _ in range(2))
    few[short] = some[short] = some[rare] = True
    whole = run(native, text.tokens[:32], 4)
    with native.with_head_rows(short) as model, model.open(32) as sequence:
        assert model.facts.bytes_per_forward < native.facts.bytes_per_forward
        for choose, scored in (
            (None, few),
            (lambda: sequence.score_frequent(rare), some),
            (sequence.score_all, None),
        ):
            if choose is not None:
                choose()
            sequence.rewind(0)
            found = scores(sequence, text.tokens[:32], 4)
            assert np.array_equal(found, whole if scored is None else np.where(scored, whole, -np.inf))
