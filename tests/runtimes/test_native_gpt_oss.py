"""gpt-oss on the kernels: its layout, files that are refused, and a conversation on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.architectures.shape import Rope as RopeForm, Yarn
from edgespec.errors import ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.runtimes.native.layout import CLIPPED_SWIGLU, read_layout, unsupported_reason
from tests.support.command_line import run_here
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import write_tiny_gguf

require_native()

SETTINGS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 64}
# As gpt-oss's own template writes channels and ends of messages.
HARMONY = (
    "{% for message in messages %}{{ '<|start|>' + message.role }}"
    "{% if message.role == 'assistant' %}"
    "{% if message.thinking %}{{ '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}"
    "{% endif %}<|channel|>final{% endif %}{{ '<|message|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(
        tmp_path_factory.mktemp("gpt-oss") / "tiny.gguf",
        architecture="gpt-oss",
        quant="MXFP4",
        layers=4,
        window=30,
        experts=(6, 4),
        settings=SETTINGS,
        chat_template=HARMONY,
    )


def stating(header: GgufHeader, **changes: Any) -> GgufHeader:
    keys = {f"gpt-oss.{key.replace('__', '.')}": value for key, value in changes.items()}
    return replace(header, metadata={k: v for k, v in (dict(header.metadata) | keys).items() if v is not None})


def without(header: GgufHeader, name: str) -> GgufHeader:
    assert any(tensor.name == name for tensor in header.tensors)
    return replace(header, tensors=tuple(tensor for tensor in header.tensors if tensor.name != name))


def shaped(header: GgufHeader, name: str, *shape: int, **changes: Any) -> GgufHeader:
    tensors = tuple(
        replace(tensor, shape=shape, **changes) if tensor.name == name else tensor for tensor in header.tensors
    )
    assert tensors != header.tensors
    return replace(header, tensors=tensors)


def test_every_other_layer_has_a_window_and_all_have_sinks_and_biases(path: Path) -> None:
    header = read_header(path)
    layout = read_layout(header)
    assert [layer.window for layer in layout.layers] == [30, 0, 30, 0]
    assert header.expert_layers == 4, "a bias of experts is not counted"
    assert layout.activation == CLIPPED_SWIGLU
    yarn = Yarn(original_context=64)
    (rope,) = (each.form for each in layout.ropes)
    assert replace(rope, magnitude=1.0) == RopeForm(base=10000.0, scale=32.0, yarn=yarn)
    for number, layer in enumerate(layout.layers):
        assert layer.sinks is not None
        assert layer.sinks.name == f"blk.{number}.attn_sinks.weight"
        assert all(matrix.bias is not None for matrix in layer.matrices.values())
    listed = read_layout(stating(header, attention__sliding_window_pattern=(False, True, True, False)))
    assert [layer.window for layer in listed.layers] == [0, 30, 30, 0]
    other = read_layout(stating(header, rope__freq_base_swa=500.0))
    assert [each.form.base for each in other.ropes] == [10000.0, 500.0]
    assert [layer.rope_table for layer in other.layers] == [1, 0, 1, 0]


CONTRADICTIONS: dict[str, Callable[[GgufHeader], GgufHeader]] = {
    "tensor blk.1.attn_sinks.weight is missing": lambda h: without(h, "blk.1.attn_sinks.weight"),
    "tensor blk.0.attn_sinks.weight has shape (3,), not (4,)": lambda h: shaped(h, "blk.0.attn_sinks.weight", 3),
    "tensor blk.2.attn_q.bias is missing": lambda h: without(h, "blk.2.attn_q.bias"),
    "tensor blk.0.ffn_gate_inp.bias is missing": lambda h: without(h, "blk.0.ffn_gate_inp.bias"),
    "tensor blk.3.ffn_up_exps.bias has shape (64, 5), not (64, 6)": lambda h: shaped(
        h, "blk.3.ffn_up_exps.bias", 64, 5
    ),
    "tensor blk.3.ffn_down_exps.bias has shape (6, 64), not (64, 6)": lambda h: shaped(
        h, "blk.3.ffn_down_exps.bias", 6, 64
    ),
    "does not state gpt-oss.attention.sliding_window": lambda h: stating(h, attention__sliding_window=None),
    "its attention.sliding_window is 0": lambda h: stating(h, attention__sliding_window=0),
    "its rope.freq_base_swa is -1.0": lambda h: stating(h, rope__freq_base_swa=-1.0),
}
UNSUPPORTED: dict[str, Callable[[GgufHeader], GgufHeader]] = {
    "blk.0.attn_sinks.weight is F16, not F32": lambda h: shaped(h, "blk.0.attn_sinks.weight", 4, type_name="F16"),
    "its expert_weights_scale is 2.0": lambda h: stating(h, expert_weights_scale=2.0),
    "it has a tensor blk.0.post_ffw_norm.weight": lambda h: replace(
        h, tensors=(*h.tensors, replace(h.tensors[-1], name="blk.0.post_ffw_norm.weight"))
    ),
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_a_file_that_contradicts_itself_is_refused_in_one_sentence(path: Path, words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        unsupported_reason(CONTRADICTIONS[words](read_header(path)))
    assert words in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("words", UNSUPPORTED)
def test_what_the_kernels_lack_is_refused_by_name(path: Path, words: str) -> None:
    assert unsupported_reason(UNSUPPORTED[words](read_header(path))) == words


def test_a_conversation_in_gpt_osss_format_runs_on_the_kernels(path: Path, tmp_path: Path) -> None:
    options = ("--target", str(path), "--draft", "none", "--max-tokens", "12", "--json")
    single = run_here("generate", "the people", *options, home=tmp_path).json
    assert single["plan"]["target"]["runtime"] == "native"
    assert single["stats"]["emitted_tokens"] == 12
    done = run_here("chat", *options, home=tmp_path, stdin="the people\nand the water\n")
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [each["stats"]["emitted_tokens"] for each in answers] == [12, 12]
    assert answers[1]["stats"]["cached_tokens"] > 10
