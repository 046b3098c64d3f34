"""Mixtures of experts on the kernels: which experts a row uses, what a forward reads, and files that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.calibration.timing import Scope, measure_target
from edgespec.decoding.sampling import Sampling
from edgespec.errors import ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.interfaces.model import Mixture
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.native.layout import read_layout, unsupported_reason
from edgespec.runtimes.native.library import OK
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.tensors import TYPES
from edgespec.runtimes.runtime import mixture_of
from tests.runtimes.contract import equal, logits
from tests.support.command_line import run_cli
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.native_batches import Work, batch_of, part_of
from tests.support.native_models import some_tokens
from tests.support.rewritten_gguf import rewrite_gguf
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels, answer

require_native()

SHAPE: dict[str, Any] = {"architecture": "qwen3moe", "experts": (6, 2), "quant": "Q8_0"}
ROUTERS, GATES = ".ffn_gate_inp.weight", ".ffn_gate_exps.weight"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("experts") / "mixture.gguf", **SHAPE)


def changed(path: Path, to: Path, suffix: str, change: Callable[[np.ndarray], None]) -> Path:
    """A copy whose tensors of that name have changed bytes."""
    to.write_bytes(path.read_bytes())
    data = np.memmap(to, mode="r+")
    for tensor in gguf.GGUFReader(str(path)).tensors:
        if tensor.name.endswith(suffix):
            start = int(tensor.data_offset)
            change(data[start : start + int(tensor.n_bytes)])
    data.flush()
    return to


def rows_of(path: Path, count: int = 8) -> list[LogitsArray]:
    with load_native(path, NativeSettings()) as model, model.open(64) as sequence:
        return logits(sequence.forward(some_tokens(path, count), count))


def with_gates_and_inputs_together(path: Path, to: Path) -> Path:
    """The same model with each expert's gate and input in one matrix, as --fuse-gate-up-exps writes it."""
    tensors = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(str(path)).tensors}
    together = {
        name.replace("_gate_exps", "_gate_up_exps"): np.concatenate(
            [gates, tensors[name.replace("gate", "up")]], axis=1
        )
        for name, gates in tensors.items()
        if name.endswith(GATES)
    }
    return rewrite_gguf(path, to, tensors=together, keep=lambda key: not key.endswith((GATES, ".ffn_up_exps.weight")))


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen35moe"])
def test_gates_and_inputs_of_experts_may_be_in_one_tensor(tmp_path: Path, architecture: str) -> None:
    more: dict[str, Any] = {} if architecture == "qwen3moe" else {"shared": 32, "layers": 4, "drafting": ()}
    plain = write_tiny_gguf(tmp_path / "a.gguf", architecture=architecture, experts=(6, 2), quant="F32", **more)
    joined = with_gates_and_inputs_together(plain, tmp_path / "b.gguf")
    for ours, theirs in zip(rows_of(joined), rows_of(plain), strict=True):
        assert equal(ours, theirs)
    layout = read_layout(read_header(joined))
    assert (layout.drafting is None, layout.no_drafting) == (not more, None)


# ------------------------------------------------------------------------------------------------- which experts


def test_of_equal_scores_the_lower_experts_are_used(mixture: Path, tmp_path: Path) -> None:
    """Where all scores are 0, experts 0 and 1 of 6 are used: changes of the others change nothing."""

    def clear(data: np.ndarray) -> None:
        data[:] = 0

    def clear_from(expert: int) -> Callable[[np.ndarray], None]:
        return lambda data: data.reshape(6, -1)[expert:].fill(0)

    even = changed(mixture, tmp_path / "even.gguf", ROUTERS, clear)
    expected = rows_of(even)
    assert equal(rows_of(changed(even, tmp_path / "unused.gguf", GATES, clear_from(2))), expected)
    assert not equal(rows_of(changed(even, tmp_path / "used.gguf", GATES, clear_from(1))), expected)


def test_a_router_without_numbers_gives_scores_without_numbers(mixture: Path, tmp_path: Path) -> None:
    def spoil(data: np.ndarray) -> None:
        data.view("<f4")[:] = np.nan

    rows = rows_of(changed(mixture, tmp_path / "nan.gguf", ROUTERS, spoil))
    assert all(np.isnan(row).all() for row in rows)


# ------------------------------------------------------------------------------------------------- what is read


def test_all_experts_take_memory_and_a_forward_reads_those_that_a_row_uses(mixture: Path) -> None:
    header = read_header(mixture)
    experts = sum(tensor.byte_count for tensor in header.tensors if "_exps." in tensor.name)
    embedding = next(tensor.byte_count for tensor in header.tensors if tensor.name == "token_embd.weight")
    with load_native(mixture, NativeSettings()) as whole:
        assert whole.facts.weight_bytes == header.tensor_bytes
        assert whole.facts.bytes_per_forward == header.tensor_bytes - embedding - experts * 4 // 6


def test_requantised_experts_are_smaller_and_their_router_stays(mixture: Path) -> None:
    with (
        load_native(mixture, NativeSettings()) as whole,
        load_native(mixture, NativeSettings(), requantized=True) as small,
    ):
        assert small.facts.weight_bytes < whole.facts.weight_bytes
        ratio = small.facts.bytes_per_forward / whole.facts.bytes_per_forward
        assert 18 / 34 < ratio < 0.7
        layer = part_of(small).weights.struct.layer[0]
        assert (layer.router.type, layer.gate.type) == (TYPES["F32"], TYPES["Q4_0"])


def read_by(model: NativeModel, path: Path, count: int, scored: int) -> int:
    with model.open(64) as sequence:
        sequence.forward(some_tokens(path, count), scored)
        return sequence.experts_read


def test_a_forward_counts_the_different_experts_that_it_read(mixture: Path, tmp_path: Path) -> None:
    """Two layers, in each of which a row uses two of six experts."""

    def clear(data: np.ndarray) -> None:
        data[:] = 0

    even = changed(mixture, tmp_path / "even.gguf", ROUTERS, clear)
    with load_native(mixture, NativeSettings(threads=2)) as model, load_native(even, NativeSettings()) as same:
        found = [read_by(model, mixture, count, count) for count in (1, 2, 4, 8, 30)]
        assert found[0] == 4 < found[2] <= found[3] <= found[4] == 12
        assert {read_by(same, even, count, count) for count in (1, 8, 30)} == {4}, "all rows use the same two"
        assert read_by(model, mixture, 30, 1) == 6 + 2, "the last layer computes the scored row alone"
        with model.open(64) as sequence:
            sequence.forward([5], 1)
            sequence.forward_tree([7] * 3, [-1, -1, 0])
            assert 4 <= sequence.experts_read <= 8, "two siblings are the same row"


def test_sequences_that_share_a_forward_share_its_experts(mixture: Path) -> None:
    with load_native(mixture, NativeSettings()) as model, batch_of(model, 1, "portable") as batch:
        alone, one, other = batch.open(64), batch.open(64), batch.open(64)
        tokens = some_tokens(mixture, 2)
        counts = []
        for caches in ((alone,), (one, other)):
            assert set(
                batch.forward([Work(cache, tokens[at : at + 1], 0, 1) for at, cache in enumerate(caches)])
            ) == {OK}
            counts.append(batch.api.es_experts_read(batch.pointer))
        assert counts[0] == 4 <= counts[1] <= 8


def test_a_mixture_is_timed_with_the_experts_that_it_reads(mixture: Path) -> None:
    scope = Scope(widths=(1, 2, 8), repetitions=2)
    with load_native(mixture, NativeSettings()) as model:
        steps = measure_target(model, 200, scope, text=some_tokens(mixture, 60))
        while True:
            try:
                next(steps)
            except StopIteration as done:
                times, _ = done.value
                break
    assert times.experts[0] == 4 < times.experts[1] < times.experts[2] <= 12
    assert times.curves.experts is not None
    assert 0 <= times.expert_s * 4 <= times.forward_s[0][0] * 1.01


def test_a_models_facts_name_its_experts(mixture: Path) -> None:
    header = read_header(mixture)
    read = sum(tensor.byte_count for tensor in header.tensors if "_exps." in tensor.name) * 2 // 6
    with load_native(mixture, NativeSettings()) as model:
        facts = model.facts
        assert facts.mixture == Mixture(used=4, count=12, share=read / facts.bytes_per_forward)
    assert mixture_of(with_keys(header, expert_used_count=6)) is None, "every row uses all"


# ------------------------------------------------------------------------------------------------- files


def with_keys(header: GgufHeader, **changes: Any) -> GgufHeader:
    keys = {f"qwen3moe.{key}": value for key, value in changes.items()}
    return replace(header, metadata={k: v for k, v in (dict(header.metadata) | keys).items() if v is not None})


def with_tensor(header: GgufHeader, name: str, **changes: Any) -> GgufHeader:
    tensors = tuple(replace(each, **changes) if each.name == name else each for each in header.tensors)
    assert tensors != header.tensors
    return replace(header, tensors=tensors)


CONTRADICTIONS: dict[str, Callable[[GgufHeader], GgufHeader]] = {
    "its expert_count is 0: a whole number of at least 1": lambda h: with_keys(h, expert_count=0),
    "does not state qwen3moe.expert_count": lambda h: with_keys(h, expert_count=None),
    "its expert_used_count is 0": lambda h: with_keys(h, expert_used_count=0),
    "its expert_used_count is True": lambda h: with_keys(h, expert_used_count=True),
    "a row cannot use 7 of 6 experts": lambda h: with_keys(h, expert_used_count=7),
    "tensor blk.0.ffn_gate_inp.weight has shape (64, 6), not (64, 1000000000)": lambda h: with_keys(
        h, expert_count=10**9
    ),
    "tensor blk.0.ffn_gate_exps.weight has shape (64, 64, 6), not (64, 96, 6)": lambda h: with_keys(
        h, expert_feed_forward_length=96
    ),
    "tensor blk.1.ffn_down_exps.weight has shape (64, 384), not (64, 64, 6)": lambda h: with_tensor(
        h, "blk.1.ffn_down_exps.weight", shape=(64, 384)
    ),
    "tensor blk.1.ffn_gate_inp.weight is missing": lambda h: replace(
        h, tensors=tuple(each for each in h.tensors if each.name != "blk.1.ffn_gate_inp.weight")
    ),
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_a_mixture_that_contradicts_itself_is_refused_in_one_sentence(mixture: Path, words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        unsupported_reason(CONTRADICTIONS[words](read_header(mixture)))
    assert words in caught.value.message


UNSUPPORTED: dict[str, Any] = {
    "its expert_weights_scale is 2.5": {"expert_weights_scale": 2.5},
    "its expert_weights_norm is False": {"expert_weights_norm": False},
    "its expert_gating_func is 2": {"expert_gating_func": 2},
    "its expert_shared_count is 1": {"expert_shared_count": 1},
}


@pytest.mark.parametrize("words", UNSUPPORTED)
def test_a_property_of_experts_that_the_kernels_lack_is_refused_by_name(mixture: Path, words: str) -> None:
    assert unsupported_reason(with_keys(read_header(mixture), **UNSUPPORTED[words])) == words


def test_more_experts_than_the_kernels_take_are_refused(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"architecture": "qwen3moe", "width": 32, "heads": 2, "kv_heads": 1, "layers": 1}
    for experts in ((1025, 1), (65, 65)):
        path = write_tiny_gguf(tmp_path / "many.gguf", experts=experts, **shape)
        assert unsupported_reason(read_header(path)) == (
            f"a row uses {experts[1]} of its {experts[0]} experts, and the kernels take at most 64 of 1024"
        )
    path = write_tiny_gguf(tmp_path / "most.gguf", experts=(1024, 64), **shape)
    assert all(np.isfinite(row).all() for row in rows_of(path))


def test_a_file_without_the_length_of_an_expert_shares_the_feed_forwards(mixture: Path) -> None:
    """llama.cpp's default: the feed-forward length divided by the experts that a row uses."""
    header = with_keys(read_header(mixture), expert_feed_forward_length=None)
    assert header.metadata["qwen3moe.feed_forward_length"] == 128
    assert unsupported_reason(header) is None


# ------------------------------------------------------------------------------------------------- drafts


def test_drafts_keep_the_text_of_a_mixture(tiny: TinyModels, mixture: Path) -> None:
    with tiny.load_speculating(mixture, runtime="native", draft_runtime="native", threads=2) as engine:
        assert engine.plan.target.runtime == "native"
        for sampling in (None, Sampling(temperature=1.0, seed=5)):
            found = []
            for depth in (0, 8):
                with engine.session() as session:
                    done = answer(session.generate("the people", max_tokens=200, depth=depth, sampling=sampling))
                assert (done.stats.proposed > 0) == (depth > 0)
                found.append(done.token_ids)
            assert found[0] == found[1]
            assert len(found[0]) == 200


def test_verify_passes_on_a_mixture(tiny: TinyModels, mixture: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite.jsonl"
    suite.write_text('{"id": "p", "category": "chat", "prompt": "one two three one two three one"}\n')
    options = ("--target", str(mixture), "--draft", str(tiny.drafter), "--depth", "4", "--max-tokens", "40")
    found = run_cli("verify", *options, "--suite", str(suite), home=tmp_path)
    assert found.code == 0, found.err
    assert found.out.splitlines()[-1] == "the promise holds"
