"""Models that the native runtime does not run, and files that contradict themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.architectures.shape import Rope as RopeForm
from edgespec.errors import ModelFileError, RuntimeUnavailableError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader, TensorInfo
from edgespec.runtimes.native.layout import GEGLU, read_layout, unsupported_reason
from edgespec.runtimes.native.tensors import Rope
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> GgufHeader:
    return read_header(write_tiny_gguf(tmp_path_factory.mktemp("layout") / "tiny.gguf", quant="Q4_0"))


def with_metadata(header: GgufHeader, **changes: Any) -> GgufHeader:
    metadata = dict(header.metadata)
    for suffix, value in changes.items():
        key = f"llama.{suffix.replace('__', '.')}"
        if value is None:
            metadata.pop(key)
        else:
            metadata[key] = value
    return replace(header, metadata=metadata)


def with_tensor(header: GgufHeader, name: str, **changes: Any) -> GgufHeader:
    tensors = tuple(replace(t, **changes) if t.name == name else t for t in header.tensors)
    assert tensors != header.tensors
    return replace(header, tensors=tensors)


def test_a_layouts_numbers_come_from_the_files_header(header: GgufHeader) -> None:
    layout = read_layout(header)
    assert (layout.embedding, layout.heads, layout.kv_heads, layout.head_length) == (64, 4, 2, 16)
    assert (layout.feed_forward, layout.vocabulary, len(layout.layers)) == (128, header.vocabulary_size, 2)
    assert (layout.rope_length, layout.rope_pairs) == (16, 0)
    assert layout.ropes == (Rope(form=RopeForm(base=10000.0)),)
    assert layout.norm_epsilon == pytest.approx(1e-5)
    assert layout.head.tensor.name == "output.weight"
    assert (layout.layers[1].down.rows, layout.layers[1].down.columns) == (64, 128)
    assert all(layer.query.bias is None for layer in layout.layers)


def test_linear_rope_scaling_and_a_missing_rope_base_are_read(header: GgufHeader) -> None:
    changed = with_metadata(header, rope__scaling__type="linear", rope__scaling__factor=4.0, rope__freq_base=None)
    layout = read_layout(changed)
    assert layout.ropes == (Rope(form=RopeForm(base=10000.0, scale=4.0)),)


def test_tied_heads_and_biases_are_read_into_the_layout(header: GgufHeader) -> None:
    bias = TensorInfo("blk.0.attn_q.bias", (64,), "F32", 0, 256)
    tensors = (*(t for t in header.tensors if t.name != "output.weight"), bias)
    layout = read_layout(replace(header, tensors=tensors))
    assert layout.head is layout.embedding_rows
    assert layout.layers[0].query.bias == bias


def test_a_sliding_window_as_long_as_the_context_is_accepted(header: GgufHeader) -> None:
    assert {layer.window for layer in read_layout(with_metadata(header, attention__sliding_window=2048)).layers} == {
        0
    }


def test_the_layout_of_qwen3_has_head_norms_and_no_biases(tmp_path: Path) -> None:
    header = read_header(write_tiny_gguf(tmp_path / "tiny.gguf", architecture="qwen3", head_length=32))
    layer = read_layout(header).layers[1]
    assert (layer.query_norm, layer.key_norm) == tuple(
        next(t for t in header.tensors if t.name == f"blk.1.attn_{name}_norm.weight") for name in "qk"
    )
    assert (layer.attention_post_norm, layer.query.rows, read_layout(header).head_length) == (None, 128, 32)
    without = tuple(t for t in header.tensors if t.name != "blk.1.attn_k_norm.weight")
    with pytest.raises(ModelFileError, match="attn_k_norm"):
        read_layout(replace(header, tensors=without))
    bias = TensorInfo("blk.0.attn_q.bias", (128,), "F32", 0, 512)
    reason = unsupported_reason(replace(header, tensors=(*header.tensors, bias)))
    assert reason is not None
    assert "blk.0.attn_q.bias" in reason


def test_the_layout_of_gemma3_has_windows_except_in_every_sixth_layer(tmp_path: Path) -> None:
    header = read_header(write_tiny_gguf(tmp_path / "tiny.gguf", architecture="gemma3", window=30, layers=13))
    layout = read_layout(header)
    assert [layer.window for layer in layout.layers] == [*[30] * 5, 0, *[30] * 5, 0, 30]
    assert [layer.rope_table for layer in layout.layers] == [*[1] * 5, 0, *[1] * 5, 0, 1]
    assert layout.ropes == (Rope(form=RopeForm(base=1e6)), Rope(form=RopeForm(base=10000.0)))
    assert (layout.activation, layout.embedding_scale, layout.score_scale) == (GEGLU, 8.0, 0.25)
    insane = {**header.metadata, "gemma3.attention.sliding_window_pattern": 0}
    with pytest.raises(ModelFileError, match="pattern"):
        read_layout(replace(header, metadata=insane))
    each = {**header.metadata, "gemma3.attention.sliding_window_pattern": (True, False, *[True] * 11)}
    listed = read_layout(replace(header, metadata=each))
    assert [layer.window for layer in listed.layers] == [30, 0, *[30] * 11]
    too_few = {**header.metadata, "gemma3.attention.sliding_window_pattern": (True,) * 12}
    with pytest.raises(ModelFileError, match="lists 12 of 13 layers"):
        read_layout(replace(header, metadata=too_few))


def test_the_largest_gemma3_scales_attention_by_embedding_per_head(tmp_path: Path) -> None:
    for layers, scale in ((61, 32**-0.5), (62, 0.25)):
        path = write_tiny_gguf(tmp_path / "t.gguf", architecture="gemma3", head_length=32, layers=layers, window=9)
        assert read_layout(read_header(path)).score_scale == pytest.approx(scale)


UNSUPPORTED: dict[str, Callable[[GgufHeader], GgufHeader]] = {
    "mamba": lambda h: replace(h, architecture="mamba"),
    "mixture": lambda h: with_metadata(h, expert_count=8),
    "window": lambda h: with_metadata(h, attention__sliding_window=512),
    "causal": lambda h: with_metadata(h, attention__causal=False),
    "scaling": lambda h: with_metadata(h, rope__scaling__type="spiral"),
    "longrope": lambda h: with_metadata(h, rope__scaling__type="longrope"),
    "final_logit_softcapping": lambda h: with_metadata(h, final_logit_softcapping=30.0),
    "Q2_K": lambda h: with_tensor(h, "blk.0.attn_q.weight", type_name="Q2_K"),
    "F16": lambda h: with_tensor(h, "blk.0.attn_norm.weight", type_name="F16"),
    "blk.0.attn_q_norm": lambda h: replace(
        h, tensors=(*h.tensors, TensorInfo("blk.0.attn_q_norm.weight", (16,), "F32", 0, 64))
    ),
    "differ in length": lambda h: with_metadata(h, attention__key_length=16, attention__value_length=32),
    "layers differ": lambda h: with_metadata(h, attention__head_count_kv=(2, 1)),
    "their feed_forward_length": lambda h: with_metadata(h, feed_forward_length=(128, 96)),
}


@pytest.mark.parametrize("word", UNSUPPORTED)
def test_unsupported_models_are_refused_with_the_reason(header: GgufHeader, word: str) -> None:
    changed = UNSUPPORTED[word](header)
    reason = unsupported_reason(changed)
    assert reason is not None
    assert word in reason
    with pytest.raises(RuntimeUnavailableError, match="native runtime does not run") as caught:
        read_layout(changed)
    assert reason in caught.value.message


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"width": 48, "heads": 3, "kv_heads": 1}, "the length 48 of its embedding is not a multiple of 32"),
        ({"kv_heads": 4}, "1 heads of 16 elements share a key"),
        ({"head_length": 24}, "2 heads of 24 elements share a key"),
    ],
)
def test_lengths_that_the_kernels_do_not_divide_are_refused(
    tmp_path: Path, sizes: dict[str, Any], words: str
) -> None:
    assert unsupported_reason(read_header(write_tiny_gguf(tmp_path / "tiny.gguf", **sizes))) == words


CONTRADICTIONS: dict[str, Callable[[GgufHeader], GgufHeader]] = {
    "head_count": lambda h: with_metadata(h, attention__head_count=5),
    "no heads": lambda h: with_metadata(h, attention__head_count_kv=0),
    "query shape": lambda h: with_tensor(h, "blk.0.attn_q.weight", shape=(64, 32)),
    "transposed": lambda h: with_tensor(h, "blk.1.ffn_up.weight", shape=(128, 64)),
    "norm shape": lambda h: with_tensor(h, "output_norm.weight", shape=(32,)),
    "embedding shape": lambda h: with_tensor(h, "token_embd.weight", shape=(64, 5)),
    "half a super-block": lambda h: with_tensor(h, "blk.1.ffn_up.weight", type_name="Q5_K"),
    "half a super-block of indices": lambda h: with_tensor(h, "blk.1.ffn_up.weight", type_name="IQ3_S"),
    "missing tensor": lambda h: replace(h, tensors=h.tensors[:-3]),
    "missing layer": lambda h: with_metadata(h, block_count=3),
    "odd rope": lambda h: with_metadata(h, rope__dimension_count=15),
    "long rope": lambda h: with_metadata(h, rope__dimension_count=32),
    "no epsilon": lambda h: with_metadata(h, attention__layer_norm_rms_epsilon=None),
    "bad epsilon": lambda h: with_metadata(h, attention__layer_norm_rms_epsilon=float("nan")),
    "bad base": lambda h: with_metadata(h, rope__freq_base=-1.0),
    "no factor": lambda h: with_metadata(h, rope__scaling__type="linear"),
    "no feed-forward length": lambda h: with_metadata(h, feed_forward_length=None),
    "a feed-forward length for each of other layers": lambda h: with_metadata(h, feed_forward_length=(128,) * 3),
    "a text for a number": lambda h: with_metadata(h, attention__sliding_window="wide"),
    "more heads than columns": lambda h: with_metadata(h, attention__head_count=66),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_header_that_contradicts_itself_is_refused(header: GgufHeader, what: str) -> None:
    changed = CONTRADICTIONS[what](header)
    for read in (read_layout, unsupported_reason):
        with pytest.raises(ModelFileError):
            read(changed)


def test_a_layout_error_names_the_files_path(header: GgufHeader) -> None:
    changed = replace(header, path=Path("some-model.gguf"), architecture="mamba")
    with pytest.raises(RuntimeUnavailableError, match=r"some-model\.gguf"):
        read_layout(changed)
