"""Files of real shapes are timed in both runtimes, with what states and drafters cost."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks.real_shapes as module
from benchmarks.shape_files import SHAPES, RealShape, bytes_of, keys_of, write_shape
from benchmarks.shape_tables import NATIVE
from edgespec.files.gguf.header import read_header
from edgespec.runtimes.native.runtime import FREQUENT_HEAD_ROWS
from tests.support.kernel_calls import require_native

require_native()

SMALL = replace(SHAPES["small"].sizes, layers=4, context=1024, experts=0)


def small_shapes() -> Mapping[str, RealShape]:
    """A hybrid, one of experts, and Gemma 4 with shared caches and its assistant, all with small matrices."""
    deltas = {"ssm.time_step_rank": 4, "ssm.group_count": 2, "ssm.state_size": 64, "ssm.inner_size": 256}
    turned = {"rope.dimension_count": 32, "rope.dimension_sections": (6, 5, 5, 0)}
    hybrid, experts = SHAPES["Qwen3.5-4B"], SHAPES["Qwen3.5-35B-A3B"]
    gemma, assistant = SHAPES["Gemma-4-E4B"], SHAPES["Gemma-4-E4B-assistant"]
    of_windows = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
    lengths = dict.fromkeys(of_windows, 64)
    of_gemma = dict(gemma.settings) | lengths | {"embedding_length_per_layer_input": 256}
    kinds = {"attention.sliding_window_pattern": (True, False)}
    own = replace(SMALL, head=128)
    return {
        "hybrid": replace(hybrid, sizes=SMALL, vocabulary=50_000, settings=dict(hybrid.settings) | deltas | turned),
        "experts": replace(
            experts,
            sizes=replace(SMALL, experts=16, shared=256),
            vocabulary=1000,
            used=4,
            settings=dict(experts.settings) | deltas | turned,
        ),
        "gemma": replace(
            gemma, sizes=own, vocabulary=1000, settings=of_gemma, periods=kinds, caches=2, drafter="assistant"
        ),
        "assistant": replace(
            assistant,
            sizes=replace(own, width=128),
            vocabulary=1000,
            settings=dict(assistant.settings) | lengths | {"embedding_length_out": 256},
            periods=kinds | {"attention.head_count_kv": (2, 2)},
        ),
    }


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, RealShape]:
    found = small_shapes()
    for name, shape in found.items():
        monkeypatch.setitem(SHAPES, name, shape)
    monkeypatch.setattr(module, "REPLAYS", 1)
    return found


def both(name: str, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What our kernels and llama.cpp, with weights as in the file, give of a shape's file in one pass."""
    own, theirs = (module.PROCESSES[of](name, path, 1, 1) for of in (NATIVE, "as in the file"))
    return own, theirs


def test_a_file_of_a_shape_has_its_types_and_runs_in_both_runtimes(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = tmp_path / "small.gguf"
    write_shape(SHAPES["small"], path)
    header = read_header(path)
    types = Counter(tensor.type_name for tensor in header.tensors if len(tensor.shape) > 1)
    assert types == {"F32": 2, "Q4_K": 2 * 5 + 1 + 2, "Q6_K": 2 + 1}
    assert header.tensor_bytes == bytes_of(SHAPES["small"])
    own, theirs = both("small", path)
    assert set(own["forward_s"]) == set(theirs["forward_s"]) == set(module.WIDTHS)
    assert {width: len(ratios) for width, ratios in own["predicted"].items()} == dict.fromkeys((2, 4, 8), 3)
    assert "replay_s" not in own
    assert "drafter_s" not in own


@pytest.mark.parametrize("name", ["hybrid", "experts"])
def test_a_hybrid_is_timed_with_its_states_and_its_layer_that_drafts(
    name: str, small: Mapping[str, RealShape], tmp_path: Path
) -> None:
    pytest.importorskip("llama_cpp")
    path = tmp_path / f"{name}.gguf"
    write_shape(small[name], path)
    own, theirs = both(name, path)
    assert set(own["replay_s"]) == set(module.REPLAYED[1:])
    assert own["drafter"] == "layer"
    assert set(own["drafter_s"]) == set(module.WIDTHS)
    assert set(theirs["forward_s"]) == set(module.WIDTHS)
    assert ("predicted" in own) == (name == "experts")


@pytest.mark.parametrize(("name", "rows"), [("hybrid", FREQUENT_HEAD_ROWS), ("experts", None)])
def test_a_layer_drafts_with_a_short_head_where_the_vocabulary_is_larger(
    name: str, rows: int | None, small: Mapping[str, RealShape], tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.gguf"
    write_shape(small[name], path)
    with (
        module.load_native(module.read_model_file(path), module.NativeSettings()) as model,
        module.drafter_of(model, name, None, 1) as (_words, drafter),
    ):
        assert drafter.facts.settings.get("head_rows") == rows


def test_an_assistant_is_timed_beside_its_model(small: Mapping[str, RealShape], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = tmp_path / "gemma.gguf"
    write_shape(small["gemma"], path)
    write_shape(small["assistant"], tmp_path / "assistant.gguf")
    assert keys_of(small["gemma"])["attention.shared_kv_layers"] == 2
    own, theirs = both("gemma", path)
    assert own["drafter"] == "assistant"
    assert set(own["drafter_s"]) == set(module.WIDTHS)
    assert own["beside_drafter_s"] > 0
    assert "replay_s" not in own
    assert set(theirs["forward_s"]) == set(module.WIDTHS)


def test_a_process_that_a_signal_ends_says_so_and_has_no_times(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(module.sys, "executable", write_killed(tmp_path / "killed"))
    assert module.in_its_process("repacked", "small", tmp_path / "x.gguf", 1, 1) is None
    assert "small, llama.cpp, weights repacked: ended by signal 4" in capfd.readouterr().err
    with pytest.raises(subprocess.CalledProcessError):
        module.in_its_process(NATIVE, "small", tmp_path / "x.gguf", 1, 1)


def write_killed(path: Path) -> str:
    """A program that ends as one with an instruction that the processor lacks."""
    path.write_text("#!/bin/sh\nkill -ILL $$\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


class LongPrompts:
    """A model and its Sequence, of which each forward takes a second of ``clock``."""

    facts = SimpleNamespace(vocabulary_size=1000)

    def __init__(self) -> None:
        self.clock = 0.0

    def open(self, _context_length: int) -> LongPrompts:
        return self

    def rewind(self, _length: int) -> None: ...

    def close(self) -> None: ...

    def forward(self, _tokens: list[int], _rows: int) -> SimpleNamespace:
        self.clock += 1.0
        return SimpleNamespace(argmax=lambda: [0])


def test_a_long_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for long_s, forwards in ((1.5, 3), (0.5, 1)):
        model: Any = LongPrompts()
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda model=model: model.clock))
        monkeypatch.setattr(module, "_LONG_S", long_s)
        assert module.time_prompt(model, 3) == 1.0
        assert model.clock == forwards
