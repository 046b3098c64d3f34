"""llama.cpp only: settings, hostile files, return codes, reductions."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.errors import (
    CancelledError,
    ClosedError,
    ForwardError,
    InvalidRequestError,
    ModelFileError,
    NonFiniteLogitsError,
    RewindError,
    RuntimeUnavailableError,
)
from edgespec.files.gguf.header import read_header
from edgespec.runtimes.llama.context import KV_TYPES, LlamaSettings
from edgespec.runtimes.llama.library import load
from edgespec.runtimes.llama.model import LlamaModel, LlamaSequence
from edgespec.runtimes.sequence import MAX_SCORED_ROWS
from tests.support.kernel_calls import require_native
from tests.support.loading import load_model
from tests.support.tiny_gguf import Quant, write_tiny_gguf


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Iterator[LlamaModel]:
    with load_model(tiny_gguf, LlamaSettings()) as model:
        yield model


@pytest.fixture
def sequence(model: LlamaModel) -> Iterator[LlamaSequence]:
    with model.open(600) as sequence:
        yield sequence


@pytest.fixture
def no_native_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        pytest.fail("native code was given this file")

    monkeypatch.setattr(load().api, "llama_model_load_from_file", refuse)


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.usefixtures("no_native_load")
@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        (LlamaSettings(threads=0), InvalidRequestError, "threads"),
        (LlamaSettings(threads=-4), InvalidRequestError, "threads"),
        (LlamaSettings(kv_type="q5_9"), InvalidRequestError, "q5_9"),
        (LlamaSettings(kv_type=""), InvalidRequestError, "cache type"),
        (LlamaSettings(kv_type="q8_0", flash_attention=False), InvalidRequestError, "flash attention"),
        (LlamaSettings(device="cuda7"), RuntimeUnavailableError, "cuda7"),
    ],
)
def test_bad_settings_are_refused_before_loading(
    tiny_gguf: Path, settings: LlamaSettings, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        load_model(tiny_gguf, settings)
    if "threads" not in says:
        assert getattr(raised.value, "hint", None)


def test_an_unknown_device_names_the_known_ones(tiny_gguf: Path) -> None:
    with pytest.raises(RuntimeUnavailableError) as raised:
        load_model(tiny_gguf, LlamaSettings(device="npu0"))
    assert "cpu" in (raised.value.hint or "")


@pytest.mark.parametrize("kv_type", sorted(KV_TYPES))
def test_every_cache_type_works_and_is_in_the_facts(tiny_gguf: Path, kv_type: str) -> None:
    with load_model(tiny_gguf, LlamaSettings(kv_type=kv_type)) as model:
        assert model.facts.kv_type == kv_type
        elements = 2 * 2 * 32 * 2  # layers, heads, head length, keys and values
        assert model.facts.kv_bytes_per_token == elements * KV_TYPES[kv_type][1] / 8
        with model.open(64) as sequence:
            sequence.forward([5, 6, 7], 0)
            assert np.isfinite(sequence.forward([8], 1).logits(0)).all()


@pytest.mark.parametrize("wanted", ["q8_0", "q4_0"])
def test_narrow_heads_fall_back_to_a_half_precision_cache(tmp_path: Path, wanted: str) -> None:
    path = write_tiny_gguf(tmp_path / "narrow.gguf", width=64)  # heads of 16
    with load_model(path, LlamaSettings(kv_type=wanted)) as model:
        assert (model.facts.kv_type, model.settings.kv_type) == ("f16", "f16")
        assert model.facts.kv_bytes_per_token == 2 * 2 * 16 * 2 * 2
        with model.open(64) as sequence:
            assert sequence.forward([1, 2, 3], 1).count == 1


def test_both_head_lengths_must_fit_a_quantized_cache(tiny_gguf: Path) -> None:
    header = read_header(tiny_gguf)
    odd = replace(header, metadata={**header.metadata, "llama.attention.value_length": 48})
    assert (odd.key_length, odd.value_length) == (32, 48)
    with load_model(odd, LlamaSettings()) as model:
        assert model.facts.kv_type == "f16"


@pytest.mark.parametrize("length", [0, -1])
def test_an_invalid_context_length_is_refused(model: LlamaModel, length: int) -> None:
    with pytest.raises(InvalidRequestError):
        model.open(length)


def test_a_context_has_the_requested_length_not_llama_cpps_rounded_one(model: LlamaModel) -> None:
    with model.open(1) as sequence:
        assert sequence.context_length == 1
        assert sequence.forward([4], 1).count == 1


def test_a_forward_refuses_more_rows_than_the_maximum(sequence: LlamaSequence) -> None:
    assert sequence.forward([3] * 70, MAX_SCORED_ROWS).count == MAX_SCORED_ROWS
    with pytest.raises(InvalidRequestError, match=str(MAX_SCORED_ROWS)):
        sequence.forward([3] * 70, MAX_SCORED_ROWS + 1)


# --------------------------------------------------------------------------------------------------- facts


def test_model_facts_come_from_the_file_and_the_settings(tiny_gguf: Path) -> None:
    header = read_header(tiny_gguf)
    with load_model(tiny_gguf, LlamaSettings(threads=2, repack=False), sha256="ab") as model:
        facts = model.facts
    assert (facts.name, facts.sha256, facts.architecture) == ("tiny-Q8_0", "ab", "llama")
    assert (facts.runtime, facts.build, facts.device, facts.threads) == ("llama", load().build, "cpu", 2)
    assert facts.vocabulary_size == header.vocabulary_size
    assert facts.trained_context_length == 2048
    assert facts.weight_bytes == header.tensor_bytes
    assert 0 < facts.bytes_per_forward <= facts.weight_bytes
    assert facts.settings == {"flash_attention": True, "repack": False}
    assert facts.can_rewind
    assert not facts.can_fork


def test_a_model_can_be_given_another_name(tiny_gguf: Path) -> None:
    with load_model(tiny_gguf, LlamaSettings(), name="other") as model:
        assert model.facts.name == "other"


def test_a_model_loads_from_a_file_with_unusual_characters_in_its_name(tiny_gguf: Path, tmp_path: Path) -> None:
    names = ["模型 🙂.gguf", "a b'\"$.gguf"]
    if sys.platform.startswith("linux"):
        names.append(b"\xff\xfe.gguf".decode("utf-8", "surrogateescape"))
    for name in names:
        path = tmp_path / name
        path.write_bytes(tiny_gguf.read_bytes())
        with load_model(path, LlamaSettings()) as model:
            assert model.facts.name == path.stem


def write_recurrent(path: Path) -> Path:
    """The smallest model with a recurrent state: Mamba, one layer."""
    width, inner, states, rank, kernel, vocabulary = 32, 64, 16, 2, 4, 3 + 256
    kind = gguf.TokenType
    writer = gguf.GGUFWriter(str(path), "mamba")
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(1)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(states)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types([kind.UNKNOWN, kind.CONTROL, kind.CONTROL] + [kind.BYTE] * 256)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (vocabulary, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ssm_in.weight": (2 * inner, width),
        "blk.0.ssm_conv1d.weight": (inner, kernel),
        "blk.0.ssm_conv1d.bias": (inner,),
        "blk.0.ssm_x.weight": (rank + 2 * states, inner),
        "blk.0.ssm_dt.weight": (inner, rank),
        "blk.0.ssm_dt.bias": (inner,),
        "blk.0.ssm_a": (inner, states),
        "blk.0.ssm_d": (inner,),
        "blk.0.ssm_out.weight": (width, inner),
    }
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32) * np.float32(0.1)
        writer.add_tensor(name, -np.abs(values) if name.endswith("ssm_a") else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_facts_of_a_recurrent_model_say_that_it_cannot_rewind(tmp_path: Path) -> None:
    with load_model(write_recurrent(tmp_path / "mamba.gguf"), LlamaSettings(kv_type="f16")) as model:
        assert model.facts.architecture == "mamba"
        assert not model.facts.can_rewind
        with model.open(64) as sequence:
            sequence.forward([5, 6], 0)
            assert np.isfinite(sequence.forward([7], 1).logits(0)).all()
            assert sequence.length == 3


# ------------------------------------------------------------------------------------------- hostile files


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def wrong_magic(data: bytes) -> bytes:
    return b"GGUX" + data[4:]


def too_many_tensors(data: bytes) -> bytes:
    return data[:8] + (2**62).to_bytes(8, "little") + data[16:]


def empty(_data: bytes) -> bytes:
    return b""


@pytest.mark.usefixtures("no_native_load")
@pytest.mark.parametrize("damage", [truncated, wrong_magic, too_many_tensors, empty])
def test_a_corrupt_file_never_reaches_native_code(
    tiny_gguf: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage(tiny_gguf.read_bytes()))
    with pytest.raises(ModelFileError):
        load_model(path, LlamaSettings())


@pytest.mark.usefixtures("no_native_load")
def test_a_missing_file_and_a_folder_raise_a_readable_error(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelFileError):
            load_model(path, LlamaSettings())


def test_a_valid_header_before_a_model_llama_cpp_refuses_raises_an_error(tmp_path: Path, tiny_gguf: Path) -> None:
    data = tiny_gguf.read_bytes()
    assert data.count(b"blk.1.ffn_up.weight") == 1
    path = tmp_path / "incomplete.gguf"
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_no.weight"))
    with pytest.raises(ModelFileError, match="could not load") as raised:
        load_model(path, LlamaSettings())
    assert "edgespec.native" in (raised.value.hint or "")
    assert not any(thread.name == "edgespec-load" for thread in threading.enumerate())


# ------------------------------------------------------------------------------------------- return codes


@pytest.mark.parametrize("code", [-1, -2, -3, 3])
def test_a_failed_forward_leaves_the_sequence_unchanged(
    model: LlamaModel, sequence: LlamaSequence, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    api = load().api
    decode, calls = api.llama_decode, list[int]()

    def fail_second(*arguments: Any) -> int:
        calls.append(1)
        return code if len(calls) == 2 else int(decode(*arguments))

    sequence.forward(list(range(3, 40)), 0)
    with monkeypatch.context() as patch:
        patch.setattr(api, "llama_decode", fail_second)
        with pytest.raises(ForwardError) as raised:
            sequence.forward([5] * 500, 1)
        assert raised.value.code == code
    assert sequence.length == 37
    after = sequence.forward([9], 1).logits(0)
    with model.open(600) as fresh:
        fresh.forward(list(range(3, 40)), 0)
        assert np.array_equal(fresh.forward([9], 1).logits(0), after)


def test_a_forward_is_waited_for_where_it_returns_before_it_has_computed(
    sequence: LlamaSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[object]()
    monkeypatch.setattr(load().api, "llama_synchronize", calls.append)
    sequence.forward([5, 6], 1)
    assert calls == [], "the processor's forwards return once they have"
    monkeypatch.setattr(sequence._native, "_waits", True)  # on a GPU
    sequence.forward([5, 6], 1)
    assert len(calls) == 1


@pytest.mark.parametrize("answer", [True, False], ids=["reports success without rewinding", "reports failure"])
def test_a_cache_that_fails_to_rewind_is_detected_and_never_used_again(
    sequence: LlamaSequence, monkeypatch: pytest.MonkeyPatch, answer: bool
) -> None:
    sequence.forward([5] * 10, 0)
    with monkeypatch.context() as patch:
        patch.setattr(load().api, "llama_memory_seq_rm", lambda *_: answer)
        with pytest.raises(RewindError):
            sequence.rewind(4)
    for use in (lambda: sequence.rewind(4), lambda: sequence.rewind(10), lambda: sequence.forward([5], 1)):
        with pytest.raises(RewindError):
            use()
    assert sequence.length == 10
    sequence.close()


@pytest.mark.parametrize(("code", "error"), [(-3, RewindError), (2, CancelledError)], ids=["failed", "cancelled"])
def test_a_forward_that_cannot_be_undone_breaks_the_sequence(
    sequence: LlamaSequence, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    api = load().api
    decode, calls = api.llama_decode, list[int]()

    def fail_second(*arguments: Any) -> int:
        calls.append(1)
        return code if len(calls) == 2 else int(decode(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(api, "llama_decode", fail_second)
        patch.setattr(api, "llama_memory_seq_rm", lambda *_: False)
        with pytest.raises(error):
            sequence.forward([5] * 500, 1)
    with pytest.raises(RewindError):
        sequence.forward([5], 1)


# --------------------------------------------------------------------------------------------- reductions


def poke(sequence: LlamaSequence, rows: Any, index: int, values: Any) -> None:
    """Overwrite native scores."""
    rows._read_row(index)[:] = values


def reduce_by(sequence: LlamaSequence, native: bool) -> None:
    """Have the next rows searched by our kernels, as after a wait for the interpreter lock, or by numpy."""
    if native:
        require_native()
        assert sequence._native.can_reduce
    sequence._native.native_rows_left = 1000 if native else 0


@pytest.mark.parametrize("native", [False, True], ids=["numpy", "native"])
def test_argmax_by_numpy_and_by_our_kernels_gives_the_same_ids(sequence: LlamaSequence, native: bool) -> None:
    rows = sequence.forward(list(range(3, 23)), 20)
    expected = [int(np.argmax(rows.logits(index))) for index in range(20)]
    reduce_by(sequence, native)
    assert rows.argmax().tolist() == expected
    assert (sequence._native.native_rows_left == 980) is native

    poke(sequence, rows, 3, 0.0)
    assert rows.argmax_row(3) == 0  # ties: the lowest id
    row = np.zeros(rows.logits(0).shape)
    row[[17, 400, 90]] = 2.0
    poke(sequence, rows, 3, row)
    assert rows.argmax_row(3) == 17
    poke(sequence, rows, 3, -np.arange(len(row)) - 1e30)
    assert rows.argmax_row(3) == 0


@pytest.mark.parametrize("native", [False, True], ids=["numpy", "native"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_with_a_score_that_is_not_finite_is_never_sampled(
    sequence: LlamaSequence, native: bool, value: float
) -> None:
    rows = sequence.forward([5, 6], 2)
    reduce_by(sequence, native)
    poke(sequence, rows, 0, value)
    with pytest.raises(NonFiniteLogitsError):
        rows.argmax_row(0)
    with pytest.raises(NonFiniteLogitsError):
        rows.argmax()


@pytest.mark.parametrize("native", [False, True], ids=["numpy", "native"])
@pytest.mark.parametrize("at", [0, 5, -1])
def test_a_single_nan_is_found_by_numpy_and_by_our_kernels(sequence: LlamaSequence, native: bool, at: int) -> None:
    """Otherwise plain decoding might end in an error and drafting in a text, or the reverse."""
    rows = sequence.forward([5, 6], 2)
    reduce_by(sequence, native)
    row = rows.logits(0)
    row[at] = np.nan
    poke(sequence, rows, 0, row)
    with pytest.raises(NonFiniteLogitsError, match=f"hold nan at token id {at % len(row)}"):
        rows.argmax_row(0)


# -------------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_0"])
def test_two_loads_of_one_file_agree_to_the_bit(tiny_ggufs: dict[Quant, Path], quant: Quant) -> None:
    found = []
    for _ in range(2):
        with load_model(tiny_ggufs[quant], LlamaSettings()) as model, model.open(600) as sequence:
            sequence.forward(list(range(3, 503)), 0)
            found.append(sequence.forward([7, 8, 9], 3).copy())
    for index in range(3):
        assert np.array_equal(found[0].logits(index), found[1].logits(index))


def test_a_model_cannot_be_used_after_close(tiny_gguf: Path) -> None:
    with load_model(tiny_gguf, LlamaSettings()) as model:
        pass
    with pytest.raises(ClosedError, match="tiny-Q8_0"):
        model.open(64)
    assert model.facts.vocabulary_size > 0  # facts stay available
