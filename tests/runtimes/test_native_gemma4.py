"""Gemma 4 on the kernels: caches that layers share, layers that differ, and files that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.runtimes.native.layout import read_layout, unsupported_reason
from edgespec.runtimes.native.library import Layer, Threads
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from tests.runtimes.contract import equal, logits
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.native_batches import part_of
from tests.support.native_models import SHARING, reading, some_tokens
from tests.support.tiny_gguf import write_tiny_gguf

require_native()


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gemma4") / "sharing.gguf", quant="Q8_0", **SHARING)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma4") / "mixture.gguf"
    return write_tiny_gguf(path, **{**SHARING, "settings": {}, "layers": 3, "experts": (6, 2)})


def layers_of(model: NativeModel) -> list[Layer]:
    struct = part_of(model).struct
    return [struct.layer[number] for number in range(struct.layers)]


def test_a_layer_that_shares_a_cache_reads_that_of_the_last_layer_of_its_kind_with_one(sharing: Path) -> None:
    layout = read_layout(read_header(sharing))
    assert [layer.cache for layer in layout.layers] == [0, 1, 2, 1, 1, 2]
    assert [layer.key is None for layer in layout.layers] == [False] * 3 + [True] * 3
    assert [layer.value is None for layer in layout.layers] == [False, False, True, True, True, True]
    assert [(layer.kv_heads, layer.head_length, layer.window) for layer in layout.layers] == [
        (2, 32, 40),
        (2, 32, 40),
        (1, 64, 0),
    ] * 2


def test_a_shared_cache_takes_memory_once(sharing: Path) -> None:
    header = read_header(sharing)
    windowed, whole = 2 * 2 * 32 * 2, 2 * 1 * 64 * 2
    with load_native(sharing, NativeSettings()) as model:
        assert model.facts.kv_bytes_per_token == 2 * windowed + whole == header.kv_bytes_per_token(16)
        assert model.facts.windowed.bytes_per_token == 2 * windowed


def test_rows_that_are_not_scored_leave_behind_the_last_layer_with_keys(sharing: Path) -> None:
    """The same rows, whether the others are computed to the end or not."""
    tokens = some_tokens(sharing, 60)
    with load_native(sharing, NativeSettings(threads=2)) as model, model.open(64) as sequence:
        whole = logits(sequence.forward(tokens, 60))
        for scored in (1, 7, 30):
            sequence.rewind(0)
            assert equal(logits(sequence.forward(tokens, scored)), whole[-scored:])


def test_every_expert_layer_reads_its_dense_half_and_the_experts_of_a_row(mixture: Path) -> None:
    header = read_header(mixture)
    experts = sum(tensor.byte_count for tensor in header.tensors if "_exps.weight" in tensor.name)
    scales = 3 * 6 * 4
    with load_native(mixture, NativeSettings()) as model:
        assert model.facts.bytes_per_forward == header.tensor_bytes - (experts + scales) * 4 // 6
        assert model.facts.mixture is not None
        assert (model.facts.mixture.used, model.facts.mixture.count) == (6, 18)


def test_a_layer_without_a_router_beside_shorter_experts_is_dense(mixture: Path) -> None:
    """Its feed-forward, twice as long as an expert's, has room."""
    tensors = tuple(
        each
        for each in read_header(mixture).tensors
        if not each.name.startswith("blk.1.")
        or not any(word in each.name for word in ("_exps", "ffn_gate_inp", "norm_1", "norm_2"))
    )
    header = replace(read_header(mixture), tensors=tensors)
    assert unsupported_reason(header) is None
    with reading(read_layout(header)), load_native(mixture, NativeSettings()) as model, model.open(300) as sequence:
        assert [bool(layer.router.tiles) for layer in layers_of(model)] == [True, False, True]
        rows = logits(sequence.forward(some_tokens(mixture, 256), 64))
        sequence.rewind(200)
        assert equal(logits(sequence.forward(some_tokens(mixture, 256)[200:], 8)), rows[-8:])


# ------------------------------------------------------------------------------------------------- files


def with_keys(header: GgufHeader, **changes: Any) -> GgufHeader:
    keys = {f"gemma4.{key.replace('__', '.')}": value for key, value in changes.items()}
    return replace(header, metadata={k: v for k, v in (dict(header.metadata) | keys).items() if v is not None})


def with_tensor(header: GgufHeader, name: str, shape: tuple[int, ...]) -> GgufHeader:
    tensors = tuple(replace(each, shape=shape) if each.name == name else each for each in header.tensors)
    assert tensors != header.tensors
    return replace(header, tensors=tensors)


PATTERN, KV = "attention__sliding_window_pattern", "attention__head_count_kv"
CONTRADICTIONS: dict[str, Callable[[GgufHeader], GgufHeader]] = {
    "5 of its 6 layers share caches, and those before have none of their kinds": lambda h: with_keys(
        h, attention__shared_kv_layers=5
    ),
    "6 of its 6 layers share caches": lambda h: with_keys(h, attention__shared_kv_layers=6),
    "7 of its 6 layers share caches": lambda h: with_keys(h, attention__shared_kv_layers=7),
    "2 of its 6 layers share caches": lambda h: with_keys(h, attention__shared_kv_layers=2),
    "layers that share a cache differ in their attention.head_count_kv": lambda h: with_keys(
        h, **{KV: (2, 2, 1, 2, 1, 1)}
    ),
    "it does not state for each of its 6 layers whether it has a window": lambda h: with_keys(h, **{PATTERN: 3}),
    "each of its 6 layers whether": lambda h: with_keys(h, **{PATTERN: (True,) * 5}),
    "for each of its 6 layers": lambda h: with_keys(h, **{PATTERN: None}),
    "it states attention.head_count_kv for 5 layers": lambda h: with_keys(h, **{KV: (2,) * 5}),
    "its attention.head_count_kv is 0: a whole number of at least 1": lambda h: with_keys(h, **{KV: (2, 0, 1) * 2}),
    "4 attention heads cannot share 3 key-value heads": lambda h: with_keys(h, **{KV: (3, 2, 1) * 2}),
    "its attention.sliding_window is 0": lambda h: with_keys(h, attention__sliding_window=0),
    "does not state gemma4.attention.key_length_swa": lambda h: with_keys(h, attention__key_length_swa=None),
    "tensor blk.0.attn_q.weight has shape (64, 128), not (64, 64)": lambda h: with_keys(
        h, attention__key_length_swa=16, attention__value_length_swa=16, rope__dimension_count_swa=16
    ),
    "48 of 32 elements of a head cannot be rotated": lambda h: with_keys(h, rope__dimension_count_swa=48),
    "tensor blk.0.inp_gate.weight has shape (64, 32), not (64, 64)": lambda h: with_keys(
        h, embedding_length_per_layer_input=64
    ),
    "tensor per_layer_token_embd.weight has shape (192, 7), not (192, 673)": lambda h: with_tensor(
        h, "per_layer_token_embd.weight", (192, 7)
    ),
    "tensor per_layer_token_embd.weight has shape (192, 1), not (192, 673)": lambda h: with_tensor(
        with_tensor(h, "token_embd.weight", (64, 673, 1)), "per_layer_token_embd.weight", (192, 1)
    ),
    "tensor blk.5.layer_output_scale.weight has shape (2,), not (1,)": lambda h: with_tensor(
        h, "blk.5.layer_output_scale.weight", (2,)
    ),
    "it states 4 experts, and none of its 6 layers has a router": lambda h: with_keys(
        h, expert_count=4, expert_used_count=2, expert_feed_forward_length=64
    ),
    "tensor rope_freqs.weight is missing": lambda h: replace(
        h, tensors=tuple(each for each in h.tensors if each.name != "rope_freqs.weight")
    ),
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_a_file_that_contradicts_itself_is_refused_in_one_sentence(sharing: Path, words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        unsupported_reason(CONTRADICTIONS[words](read_header(sharing)))
    assert words in caught.value.message


def test_a_tensor_with_too_few_rows_is_refused_even_where_its_shape_was_believed(
    sharing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.architectures.shape.check_shapes", lambda *_: None)
    for name, shape, rows in (("per_layer_token_embd", (192, 7), 673), ("blk.0.attn_q", (64, 1), 128)):
        with pytest.raises(ModelFileError, match=f"tensor {name}.weight is not {rows} rows of {shape[0]}"):
            unsupported_reason(with_tensor(read_header(sharing), f"{name}.weight", shape))


def test_a_shape_may_end_with_ones(sharing: Path) -> None:
    assert unsupported_reason(with_tensor(read_header(sharing), "token_embd.weight", (64, 673, 1, 1))) is None


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "its attention keys and values differ in length": {"attention__value_length_swa": 16},
    "its heads are longer in layers with a window": {"attention__key_length": 16, "attention__value_length": 16},
    "its layers with a window rotate more elements of a head than the others": {"rope__dimension_count": 16},
    "it has attn_logit_softcapping": {"attn_logit_softcapping": 50.0},
    "its rope scaling is 'yarn'": {"rope__scaling__type": "yarn"},
}


@pytest.mark.parametrize("words", UNSUPPORTED)
def test_a_property_that_the_kernels_lack_is_refused_by_name(sharing: Path, words: str) -> None:
    assert unsupported_reason(with_keys(read_header(sharing), **UNSUPPORTED[words])) == words


def test_inputs_that_their_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    settings = {"embedding_length_per_layer_input": 48}
    path = write_tiny_gguf(tmp_path / "odd.gguf", **{**SHARING, "settings": settings})
    assert unsupported_reason(read_header(path)) == (
        "a layer's part of per_layer_token_embd.weight, 48, is not a multiple of its blocks"
    )


def test_the_library_refuses_layers_whose_heads_do_not_fit(sharing: Path) -> None:
    """Python checks them too; a mistake there must not become a read outside of the cache."""
    with load_native(sharing, NativeSettings()) as model:
        part, api = part_of(model), part_of(model).library.api
        for number, name, value in (
            *((3, "cache_layer", bad) for bad in (-1, 2, 4, 5, 2**40)),
            *((3, "kv_heads", bad) for bad in (0, 1, 3)),
            *((3, "head_length", bad) for bad in (0, 64, 128)),
            *((0, "rope_length", bad) for bad in (33, 2**40)),
            (4, "window", 0),
        ):
            kept = getattr(part.struct.layer[number], name)
            setattr(part.struct.layer[number], name, value)
            try:
                assert not api.es_batch_open(part.struct, Threads(count=1), 0), (number, name, value)
            finally:
                setattr(part.struct.layer[number], name, kept)
