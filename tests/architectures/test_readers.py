"""The native runtime and the ONNX export see the same model in a file, or refuse it for the same reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import EdgespecError, ModelFileError
from edgespec.export.onnx.model import describe_model
from edgespec.export.onnx.tables import plan_tables
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.runtimes.native.layout import read_layout
from tests.support.rewritten_gguf import rewrite_gguf
from tests.support.tiny_gguf import write_tiny_gguf


def native(header: GgufHeader) -> Any:
    layout = read_layout(header)
    ropes = [(rope.form.base, rope.form.scale, rope.factors is not None) for rope in layout.ropes]
    return [(layer.window, *ropes[layer.rope_table or 0]) for layer in layout.layers]


def onnx(header: GgufHeader) -> Any:
    shape = describe_model(header)
    plan_tables(header, shape, "keep", None)
    ropes = [(rope.base, rope.scale, rope.factors is not None) for rope in shape.ropes]
    return [(layer.window, *ropes[layer.rope]) for layer in shape.layers]


def answer(reader: Callable[[GgufHeader], Any], header: GgufHeader) -> Any:
    """What the reader finds, or its error's type and the reason at the end of the sentence."""
    try:
        return reader(header)
    except ModelFileError as error:
        return error.reason
    except EdgespecError as error:
        return error.message.split(": ", 1)[1]


def both(header: GgufHeader) -> Any:
    found, exported = answer(native, header), answer(onnx, header)
    assert found == exported
    return found


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("readers") / "qwen2.gguf", architecture="qwen2")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("readers") / "gemma3.gguf"
    return write_tiny_gguf(path, architecture="gemma3", window=64, layers=6)


def changed(source: Path, folder: Path, key: str, value: Any) -> GgufHeader:
    return read_header(rewrite_gguf(source, folder / "changed.gguf", keys={key: value}))


def test_every_reader_refuses_a_window_that_the_architecture_lacks(tmp_path: Path) -> None:
    header = read_header(write_tiny_gguf(tmp_path / "tiny.gguf", architecture="qwen2", window=128))
    assert both(header) == "its attention has a sliding window of 128, and its context is 2048"


def test_every_reader_refuses_attention_that_is_not_causal(qwen: Path, tmp_path: Path) -> None:
    assert both(changed(qwen, tmp_path, "qwen2.attention.causal", False)) == "its attention is not causal"


def test_every_reader_refuses_linear_scaling_without_a_factor(qwen: Path, tmp_path: Path) -> None:
    reason = both(changed(qwen, tmp_path, "qwen2.rope.scaling.type", "linear"))
    assert reason == "it does not state qwen2.rope.scaling.factor"


def test_every_reader_refuses_rope_factors_that_the_architecture_lacks(tmp_path: Path) -> None:
    header = read_header(write_tiny_gguf(tmp_path / "tiny.gguf", architecture="qwen2", rope_factors=True))
    assert both(header) == "it has a tensor rope_freqs.weight"
    llama = read_header(write_tiny_gguf(tmp_path / "llama.gguf", rope_factors=True))
    assert both(llama) == [(0, 10000.0, 1.0, True)] * 2


def test_every_reader_takes_a_window_for_each_layer(gemma: Path, tmp_path: Path) -> None:
    key, narrow, wide = "gemma3.attention.sliding_window_pattern", (64, 1e4, 1.0, False), (0, 1e6, 1.0, False)
    assert both(read_header(gemma)) == [narrow] * 5 + [wide]
    assert both(changed(gemma, tmp_path, key, [True] * 5 + [False])) == [narrow] * 5 + [wide]
    assert both(changed(gemma, tmp_path, key, [True, False] * 3)) == [narrow, wide] * 3


def test_every_reader_refuses_a_window_pattern_of_period_0(gemma: Path, tmp_path: Path) -> None:
    reason = both(changed(gemma, tmp_path, "gemma3.attention.sliding_window_pattern", 0))
    assert "sliding_window_pattern is 0: a whole number of at least 1" in reason


def test_every_reader_refuses_a_granite_without_positions(tmp_path: Path) -> None:
    settings = {"logit_scale": 2.0}
    source = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="granite", settings=settings)
    assert both(read_header(source)) == [(0, 10000.0, 1.0, False)] * 2
    assert both(changed(source, tmp_path, "granite.rope.scaling.finetuned", False)) == "it rotates no positions"


def test_every_reader_sees_a_window_of_phi3_in_all_layers(tmp_path: Path) -> None:
    header = read_header(write_tiny_gguf(tmp_path / "tiny.gguf", architecture="phi3", window=128))
    assert both(header) == [(128, 10000.0, 1.0, False)] * 2
    longer = read_header(write_tiny_gguf(tmp_path / "longer.gguf", architecture="phi3", window=4096))
    assert both(longer) == [(0, 10000.0, 1.0, False)] * 2


def test_the_onnx_export_refuses_a_partly_rotated_head_that_the_kernels_run(tmp_path: Path) -> None:
    header = read_header(write_tiny_gguf(tmp_path / "tiny.gguf", architecture="phi3", rope_length=12))
    assert answer(native, header) == [(0, 10000.0, 1.0, False)] * 2
    assert answer(onnx, header) == "it rotates 12 of the 16 elements of a head"


def test_every_reader_takes_a_scale_of_0_for_no_scaling(qwen: Path, tmp_path: Path) -> None:
    """llama.cpp writes it so."""
    assert both(changed(qwen, tmp_path, "qwen2.rope.scaling.factor", 0.0)) == [(0, 10000.0, 1.0, False)] * 2
    assert both(changed(qwen, tmp_path, "qwen2.rope.scaling.factor", 4.0)) == [(0, 10000.0, 4.0, False)] * 2
