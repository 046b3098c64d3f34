"""Gemma 4's assistant on the kernels: what it drafts by its target's cache, and files that are refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.architectures.shape import UnsupportedError
from edgespec.architectures.table import find
from edgespec.errors import ClosedError, InvalidRequestError, ModelFileError, RuntimeUnavailableError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader, TensorInfo
from edgespec.interfaces.features import FollowingSequence
from edgespec.runtimes.native.following import BorrowingSequence
from edgespec.runtimes.native.layout import read_layout, unsupported_reason
from edgespec.runtimes.native.library import load
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.sequence import NativeSequence
from edgespec.runtimes.native.tensors import unread_reason
from edgespec.runtimes.table import RUNTIMES
from tests.runtimes.contract import equal, logits
from tests.support.assistants import Assistant, Pair, written_pair
from tests.support.kernel_calls import require_native
from tests.support.llama_drafts import llama_draft
from tests.support.loading import load_native, located
from tests.support.native_models import some_tokens
from tests.support.tiny_gguf import write_tiny_gguf

require_native()

LENGTH = 200  # beyond the window of 40


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return written_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return written_pair(tmp_path_factory.mktemp("rounded"), quant="Q8_0")


def opened(model: NativeModel, target: NativeSequence, context_length: int = LENGTH) -> BorrowingSequence:
    sequence = model.open(context_length)
    assert isinstance(sequence, BorrowingSequence)
    sequence.follow(target.keep_features(), target)
    return sequence


@contextmanager
def following(
    pair: Pair, settings: NativeSettings | None = None
) -> Iterator[tuple[NativeSequence, BorrowingSequence]]:
    """A target's Sequence, and its assistant's, which reads it."""
    own = settings or NativeSettings(threads=2)
    with load_native(pair[0], own) as model, load_native(pair[1], own) as assistant:
        target = model.open(LENGTH)
        target.keep_features()
        yield target, opened(assistant, target)


def drafted(sequence: BorrowingSequence, lag: list[int], count: int) -> tuple[list[int], list[Any]]:
    """A draft behind ``lag``, as a chain, and the scores of its tokens."""
    tokens, found = list[int](), list[Any]()
    while len(tokens) < count:
        row = sequence.forward(tokens[-1:] or lag, 1).logits(0)
        tokens.append(int(row.argmax()))
        found.append(row)
    return tokens, found


def test_scores_and_drafted_tokens_are_those_of_the_published_computation(pair: Pair) -> None:
    """Whatever of the drafts before was kept."""
    tokens, chance, reference = some_tokens(pair[0], LENGTH), random.Random(3), Assistant(*pair)
    different = set[int]()
    with following(pair) as (target, sequence):
        while target.length < 150:
            start = target.length
            target.forward(tokens[start : start + chance.randint(2, 40)], 1)
            target.rewind(known := chance.randint(start + 1, target.length))
            sequence.rewind(min(known, sequence.length))
            own, scores = drafted(sequence, tokens[sequence.length : known + 1], 5)
            expected, exact = reference.draft(target, tokens[known], 5)
            for row, right in zip(scores, exact, strict=True):
                assert np.abs(row - right).max() < 1e-3 * right.std(), known
            assert own == expected
            different |= set(own)
            assert sequence.length == known + 5
            sequence.rewind(sequence.length)
            assert sequence.length == known + 1, "the other tokens have rows that the target will replace"
    assert len(different) > 20


def test_the_drafted_tokens_are_those_of_llama_cpp(pair: Pair) -> None:
    pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    tokens, different = some_tokens(pair[0], 90), set[int]()
    for length in (2, 30, 90):
        with following(pair) as (target, sequence):
            target.forward(tokens[: length - 1], 1)
            own, rows = drafted(sequence, tokens[:length], 6)
        theirs, scores = llama_draft(pair[0], tokens[:length], 6, assistant=pair[1])
        assert own == theirs
        # llama.cpp's GELU is a table of halves, in the target too; scores spread over about 3.
        assert max(np.abs(row - their).max() for row, their in zip(rows, scores, strict=True)) < 0.1
        different |= set(theirs)
    assert len(different) > 6


def test_a_target_that_is_read_keeps_the_rows_of_scored_tokens_alone(pair: Pair) -> None:
    tokens = some_tokens(pair[0], 60)
    with load_native(pair[0], NativeSettings(threads=2)) as model, model.open(LENGTH, keep_hidden=[-1]) as target:
        features = target.keep_features(scored=True)
        target.forward(tokens[:30], 0)
        assert (features.first, features.end, features.row(29)) == (30, 30, None)
        for start, end, rows, first in ((30, 40, 1, 39), (40, 44, 4, 39), (44, 60, 0, 60)):
            target.forward(tokens[start:end], rows)
            assert (features.first, features.end) == (first, end)
            for row in range(rows):
                held = features.row(end - rows + row)
                assert held is not None
                assert np.array_equal(held, target.hidden(-1)[row])
        with target.fork() as other:
            target.keep_features()  # from now on all
            for sequence, first in ((target, 60), (other, 63)):
                sequence.forward(tokens[:4], 1)
                assert sequence.keep_features(scored=True).first == first


@pytest.mark.parametrize("level", load().levels)
def test_every_level_and_thread_count_gives_the_same_bits(rounded: Pair, level: str) -> None:
    tokens, found = some_tokens(rounded[0], 120), []
    for settings in (
        NativeSettings(),
        NativeSettings(threads=3, level=level),
        NativeSettings(threads=7, level=level),
    ):
        with following(rounded, settings) as (target, sequence):
            target.forward(tokens[:-1], 0)
            rows = logits(sequence.forward(tokens, 8))  # as its last tokens would have been drafted
            found.append([*rows, *drafted(sequence, [int(rows[-1].argmax())], 3)[1]])
    assert all(equal(found[0], other) for other in found[1:])


def test_sessions_that_draft_at_a_time_get_what_each_gets_alone(rounded: Pair) -> None:
    texts = [some_tokens(rounded[0], 60 + 7 * number)[number:] for number in range(4)]
    with load_native(rounded[0], NativeSettings()) as model, load_native(rounded[1], NativeSettings()) as assistant:

        def draft(text: list[int]) -> list[Any]:
            with model.open(LENGTH) as target:
                target.keep_features()
                target.forward(text[:-1], 0)
                with opened(assistant, target) as sequence:
                    return drafted(sequence, text, 6)[1]

        alone = list(map(draft, texts))
        with ThreadPoolExecutor(4) as threads:
            assert all(map(equal, threads.map(draft, texts), alone))


def test_an_assistant_drafts_anywhere_in_its_targets_context(rounded: Pair) -> None:
    tokens = some_tokens(rounded[0], LENGTH + 1)
    with (
        load_native(rounded[0], NativeSettings()) as model,
        load_native(rounded[1], NativeSettings()) as assistant,
        model.open(LENGTH) as target,
    ):
        target.keep_features()
        target.forward(tokens[:LENGTH], 0)
        rows = list[Any]()
        for own_length in (LENGTH, 16):
            with opened(assistant, target, own_length) as sequence:
                sequence.begin(LENGTH - 10)
                rows.append(drafted(sequence, tokens[LENGTH - 10 :], 5)[1])
        assert equal(*rows)


def test_an_assistant_has_no_cache_and_computes_nothing_without_its_target(pair: Pair) -> None:
    with load_native(pair[1], NativeSettings()) as model, model.open(LENGTH) as sequence:
        assert isinstance(sequence, FollowingSequence)
        facts = model.facts
        assert (facts.follows, facts.kv_bytes_per_token, facts.windowed.bytes_per_token) == (True, 0, 0)
        assert not any((facts.can_fork, facts.can_branch, facts.bit_equal_by_construction))
        header = read_header(pair[1])
        assert facts.bytes_per_forward == facts.weight_bytes == header.tensor_bytes
        assert (header.kv_bytes_per_token(16), header.hidden_length, header.reads_target) == (0, 128, True)
        # Without a target, to be timed, it reads zeros: the rows of a draft depend on the draft alone.
        rows = logits(sequence.forward([5, 6, 7], 3))
        assert np.isfinite(rows).all()
        assert equal(logits(sequence.forward([6, 7], 2)), rows[:2])
    with pytest.raises(UnsupportedError, match="only drafts, for the model whose caches it reads"):
        find("gemma4-assistant")


def test_a_target_that_is_closed_ends_the_draft_with_an_error(pair: Pair) -> None:
    tokens = some_tokens(pair[0], 20)
    with load_native(pair[0], NativeSettings()) as model, load_native(pair[1], NativeSettings()) as assistant:
        target = model.open(LENGTH)
        sequence = opened(assistant, target)
        target.forward(tokens, 0)
        target.close()
        sequence.forward(tokens[:10], 0)
        with pytest.raises(ClosedError):
            sequence.forward(tokens[10:], 1)
        with pytest.raises(ClosedError):
            opened(assistant, target)


def test_a_target_that_does_not_fit_is_not_followed(pair: Pair, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "llama.gguf", width=128)
    with ExitStack() as stack:
        assistant, llama = (stack.enter_context(load_native(path, NativeSettings())) for path in (pair[1], other))
        words = "its layer 0 reads a layer with a window, and"
        with llama.open(LENGTH) as target, pytest.raises(InvalidRequestError, match=words):
            opened(assistant, target)


# ------------------------------------------------------------------------------------------------------- files


def with_keys(header: GgufHeader, **changes: Any) -> GgufHeader:
    keys = {f"{header.architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return replace(header, metadata={k: v for k, v in (dict(header.metadata) | keys).items() if v is not None})


def without(header: GgufHeader, name: str) -> GgufHeader:
    return replace(header, tensors=tuple(each for each in header.tensors if each.name != name))


def with_tensor(header: GgufHeader, name: str, shape: tuple[int, ...]) -> GgufHeader:
    made = TensorInfo(name=name, shape=shape, type_name="F32", offset=header.tensors[0].offset, byte_count=4)
    return replace(header, tensors=(*without(header, name).tensors, made))


CONTRADICTIONS: dict[str, Callable[[GgufHeader], GgufHeader]] = {
    "it states nextn_predict_layers for 1 of its 4 layers, not for all": lambda h: with_keys(
        h, nextn_predict_layers=1
    ),
    "it states attention.shared_kv_layers for 3 of its 4 layers": lambda h: with_keys(
        h, attention__shared_kv_layers=3
    ),
    "it does not state gemma4-assistant.embedding_length_out": lambda h: with_keys(h, embedding_length_out=None),
    "its embedding_length_out is 0": lambda h: with_keys(h, embedding_length_out=0),
    "tensor nextn.pre_projection.weight has shape (256, 64), not (192, 64)": lambda h: with_keys(
        h, embedding_length_out=96
    ),
    "tensor nextn.post_projection.weight is missing": lambda h: without(h, "nextn.post_projection.weight"),
    "tensor blk.2.attn_q.weight is missing": lambda h: without(h, "blk.2.attn_q.weight"),
}
UNSUPPORTED: dict[str, Callable[[GgufHeader], GgufHeader]] = {
    "its layers have inputs": lambda h: with_keys(h, embedding_length_per_layer_input=32),
    "it is a mixture of experts": lambda h: with_keys(h, expert_count=4),
    "its window of 1 position holds the drafted token alone, which has no key": lambda h: with_keys(
        h, attention__sliding_window=1
    ),
    "it has attn_logit_softcapping": lambda h: with_keys(h, attn_logit_softcapping=50.0),
    "it has a tensor blk.0.attn_sinks.weight": lambda h: with_tensor(h, "blk.0.attn_sinks.weight", (4,)),
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_a_file_that_contradicts_itself_is_refused_in_one_sentence(pair: Pair, words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        unsupported_reason(CONTRADICTIONS[words](read_header(pair[1])))
    assert words in caught.value.message


@pytest.mark.parametrize("words", UNSUPPORTED)
def test_a_property_that_the_kernels_lack_is_refused_by_name(pair: Pair, words: str) -> None:
    assert unsupported_reason(UNSUPPORTED[words](read_header(pair[1]))) == words


def test_what_a_file_may_state_and_is_not_computed(pair: Pair) -> None:
    header = with_keys(
        read_header(pair[1]), final_logit_softcapping=30.0, attention__shared_kv_layers=0, nextn_predict_layers=None
    )
    header = with_tensor(with_tensor(header, "masked_embd_centroids.weight", (64, 8)), "masked_embd_ordering", (673,))
    layout = read_layout(header)
    assert layout.logit_cap == 0.0
    assert all("masked" not in each.tensor.name for each in layout.matrices)


UNREAD: dict[str, dict[str, Any]] = {
    "it reads rows of 128 elements, and those of this target have 256": {"embedding": 256},
    "it drafts 673 tokens, and this target has 700": {"vocabulary": 700},
    "its layer 0 needs 40 positions in a layer with a window, and this target's has 30": {"window": 30},
    "its layer 0 needs 2 key-value heads in a layer with a window, and this target's has 1": {"kv_heads": 1},
    "its layer 0 needs 32 elements a head in a layer with a window, and this target's has 16": {"head_length": 16},
}


@pytest.mark.parametrize("words", UNREAD)
def test_a_target_that_an_assistant_cannot_read_is_refused_in_one_sentence(pair: Pair, words: str) -> None:
    target, drafter = (read_layout(read_header(path)) for path in pair)
    assert unread_reason(drafter, target) is None
    changes, layer = UNREAD[words], target.layers[-2]
    if "layer" in words:
        changes = {"layers": (*target.layers[:-2], replace(layer, **changes), target.layers[-1])}
    assert unread_reason(drafter, replace(target, **changes)) == words


def test_a_target_without_a_layer_of_a_kind_is_refused_in_one_sentence(pair: Pair) -> None:
    target, drafter = (read_layout(read_header(path)) for path in pair)
    windowless = tuple(each for each in target.layers if not each.window)
    assert unread_reason(drafter, replace(target, layers=windowless)) == (
        "its layer 0 reads a layer with a window, and this target has none"
    )


def test_other_runtimes_lend_no_cache(pair: Pair) -> None:
    target, drafter = map(located, pair)
    assert RUNTIMES["native"].why_not_read(drafter, target) is None
    assert RUNTIMES["onnx"].why_not_read(drafter, target) == "it reads its target's cache, and onnx lends none"
    with pytest.raises(RuntimeUnavailableError, match="assistant reads its target's cache, and llama lends none"):
        RUNTIMES["llama"].check(drafter, "cpu")
