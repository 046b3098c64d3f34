"""Bytes of a model on device and host, and how many of its layers fit on a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from edgespec.errors import ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader, TensorInfo
from edgespec.placement.memory import LayerBytes, layer_bytes, layers_that_fit
from tests.support.tiny_gguf import write_tiny_gguf

F16 = 16.0


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> GgufHeader:
    return read_header(write_tiny_gguf(tmp_path_factory.mktemp("offload") / "tiny.gguf", layers=3, quant="Q8_0"))


def without(header: GgufHeader, *names: str) -> GgufHeader:
    return replace(header, tensors=tuple(tensor for tensor in header.tensors if tensor.name not in names))


def stating(header: GgufHeader, **values: Any) -> GgufHeader:
    return replace(header, metadata={**header.metadata, **{f"llama.{key}": value for key, value in values.items()}})


def size(header: GgufHeader, prefix: str) -> int:
    return sum(tensor.byte_count for tensor in header.tensors if tensor.name.startswith(prefix))


def test_the_layers_together_hold_each_byte_of_the_file_once(header: GgufHeader) -> None:
    model = layer_bytes(header, F16)
    assert model.layers == 4  # three blocks and the head
    assert model.input_weights == size(header, "token_embd")
    assert model.head_weights == size(header, "output")
    assert model.block_weights == tuple(size(header, f"blk.{index}.") for index in range(3))
    assert model.shared_weights == 0
    assert model.input_weights + model.head_weights + sum(model.block_weights) == header.tensor_bytes


def test_the_layers_caches_add_up_to_the_models_cache(header: GgufHeader) -> None:
    for bits in (F16, 12.25, 8.5, 4.5, 32.0):
        model = layer_bytes(header, bits)
        assert sum(model.block_cache) == pytest.approx(header.kv_bytes_per_token(bits), abs=1)
        assert len(set(model.block_cache)) == 1


@pytest.mark.parametrize("layers", range(5))
def test_layers_are_moved_to_the_device_from_the_end(header: GgufHeader, layers: int) -> None:
    model = layer_bytes(header, F16)
    split = model.split(layers, 100)
    blocks = max(0, layers - 1)  # the head goes first
    assert split.device_weights == sum(model.block_weights[3 - blocks :]) + (model.head_weights if layers else 0)
    assert split.device_cache == blocks * 100 * model.block_cache[0]
    assert split.device_weights + split.host_weights == header.tensor_bytes
    assert split.device_cache + split.host_cache == 100 * header.kv_bytes_per_token(F16)
    assert split.host_weights >= model.input_weights, "the token embedding stays on the host"
    assert split.device_bytes == split.device_weights + split.device_cache
    assert split.host_bytes == split.host_weights + split.host_cache


def test_a_layer_count_beyond_the_model_moves_the_whole_model(header: GgufHeader) -> None:
    model = layer_bytes(header, F16)
    assert model.split(None, 10) == model.split(4, 10) == model.split(99, 10)
    assert model.split(-3, 10) == model.split(0, 10)
    assert model.split(None, 10).host_bytes == model.input_weights


def test_a_tied_embedding_is_stored_twice_once_the_head_is_moved(header: GgufHeader) -> None:
    tied = without(header, "output.weight")
    model = layer_bytes(tied, F16)
    table = size(tied, "token_embd")
    assert model.shared_weights == table
    assert model.split(0, 10).host_weights == tied.tensor_bytes
    moved = model.split(1, 10)
    assert moved.device_weights == table + size(tied, "output_norm")
    assert moved.device_weights + moved.host_weights == tied.tensor_bytes + table


def test_layers_with_different_head_counts_have_different_caches(header: GgufHeader) -> None:
    """Some architectures give each layer another number of heads, or none."""
    listed = stating(header, **{"attention.head_count_kv": (4, 0, 2)})
    cache = layer_bytes(listed, F16).block_cache
    assert cache[1] == 0
    assert cache[0] == 2 * cache[2] > 0
    short = stating(header, **{"attention.head_count_kv": (4, 2)})
    assert layer_bytes(short, F16).block_cache[2] == layer_bytes(short, F16).block_cache[1]
    without_cache = stating(header, **{"attention.head_count_kv": 0})
    assert layer_bytes(without_cache, F16).block_cache == (0, 0, 0)


def test_tensors_with_unusual_names_are_counted(header: GgufHeader) -> None:
    last = max(tensor.offset + tensor.byte_count for tensor in header.tensors)
    odd = tuple(
        TensorInfo(name, (32,), "F32", last + 128 * index, 128)
        for index, name in enumerate(("blk.77.ffn_up.weight", "rope_freqs.weight", "cls.weight"))
    )
    more = replace(header, tensors=(*header.tensors, *odd))
    before, after = layer_bytes(header, F16), layer_bytes(more, F16)
    assert after.block_weights[-1] == before.block_weights[-1] + 128
    assert after.head_weights == before.head_weights + 256
    assert after.split(0, 1).host_weights == more.tensor_bytes


def test_a_header_without_blocks_is_refused(header: GgufHeader) -> None:
    bare = replace(header, metadata={k: v for k, v in header.metadata.items() if k != "llama.block_count"})
    with pytest.raises(ModelFileError, match="block_count"):
        layer_bytes(bare, F16)


# ------------------------------------------------------------------------------------------- what fits

MODEL = LayerBytes(
    input_weights=1000,
    head_weights=300,
    shared_weights=0,
    block_weights=(100, 100, 100, 100),
    block_cache=(0.5, 0.5, 0.5, 0.5),
)


@pytest.mark.parametrize(
    ("free", "fitting"),
    [
        (-5, 0),
        (0, 0),
        (349, 0),
        (350, 1),  # the head, and 50 of headroom
        (499, 1),
        (500, 2),  # a block is 100 and its cache 50
        (799, 3),
        (800, 4),
        (949, 4),
        (950, 5),
        (10**9, 5),
    ],
)
def test_layers_fit_up_to_the_exact_byte(free: int, fitting: int) -> None:
    assert layers_that_fit(MODEL, 100, free, headroom_bytes=50) == fitting


def test_a_longer_context_leaves_room_for_fewer_layers() -> None:
    fitting = [layers_that_fit(MODEL, context, 800, headroom_bytes=0) for context in (0, 100, 400, 4000)]
    assert fitting == [5, 4, 2, 1]


@given(
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    cache=st.floats(0, 8),
    head=st.integers(0, 1000),
    context=st.integers(1, 500),
    free=st.integers(-100, 20_000),
    headroom=st.integers(0, 500),
)
def test_the_layers_that_fit_are_the_most_that_fit(
    weights: list[int], cache: float, head: int, context: int, free: int, headroom: int
) -> None:
    model = LayerBytes(
        input_weights=7,
        head_weights=head,
        shared_weights=0,
        block_weights=tuple(weights),
        block_cache=(cache,) * len(weights),
    )
    count = layers_that_fit(model, context, free, headroom_bytes=headroom)
    assert 0 <= count <= model.layers
    if count:
        assert model.split(count, context).device_bytes + headroom <= free
    if count < model.layers:
        assert model.split(count + 1, context).device_bytes + headroom > free
