"""GGUF files as Ollama stores them: with vision tensors, and with keys and names that llama.cpp does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ModelFileError, RuntimeUnavailableError
from edgespec.export.gguf.files import export_trimmed, export_whole
from edgespec.export.provenance import Provenance
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufArray
from edgespec.files.model_file import read_model_file
from edgespec.files.progress import Job, ProgressEvent
from edgespec.interfaces.model import HOST
from edgespec.placement.prepared import choose_runtime
from edgespec.runtimes.native.model import NativeSettings
from edgespec.runtimes.table import RUNTIMES
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from edgespec.text.tokenizers.choice import open_tokenizer
from tests.support.loading import load_native
from tests.support.raw_gguf import build, tensor
from tests.support.rewritten_gguf import rewrite_gguf
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels

VISION = {
    "v.blk.0.attn_q.weight": np.ones((8, 8), dtype=np.float32),
    "v.patch_embedding.weight": np.full((4, 8), np.nan, dtype=np.float32),
    "mm.mm_input_projection.weight": np.ones((8, 64), dtype=np.float32),
}
# Keys that Ollama's converter of gemma3 leaves out or writes differently (convert/convert_gemma3.go).
LEFT_OUT = ("gemma3.rope.", "gemma3.attention.layer_norm_rms_epsilon", "tokenizer.ggml.add_space_prefix")
SEEN = {"gemma3.mm.tokens_per_image": 256, "gemma3.vision.block_count": 1}
IMAGE_TOKEN = {
    "tokenizer.ggml.tokens": ["<image_soft_token>"],
    "tokenizer.ggml.scores": [0.0],
    "tokenizer.ggml.token_type": [3],
}


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """A gemma3 model as llama.cpp's converter writes it."""
    plain = write_tiny_gguf(tmp_path / "raw.gguf", architecture="gemma3", quant="Q8_0", seed=3)
    keys = {
        "gemma3.rope.freq_base": 1e6,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return rewrite_gguf(plain, tmp_path / "gemma.gguf", keep=lambda key: not key.startswith(LEFT_OUT), keys=keys)


def of_ollama(gemma: Path, keys: Mapping[str, Any] = SEEN, **more: Any) -> Path:
    given = {"tensors": VISION, "lists": IMAGE_TOKEN, **more}
    path = gemma.with_name("ollama.gguf")
    return rewrite_gguf(gemma, path, keep=lambda key: not key.startswith(LEFT_OUT), keys=keys, **given)


def scores(path: Path) -> bytes:
    with load_native(path, NativeSettings()) as model, model.open(64) as sequence:
        return sequence.forward([2, 5, 9, 260, 7, 11, 40, 41], rows=3).logits(2).tobytes()


def test_a_multimodal_gguf_gives_the_same_text_as_the_text_model_alone(gemma: Path) -> None:
    plain, whole = read_header(gemma), read_header(of_ollama(gemma))
    assert [each.name for each in whole.tensors] == [each.name for each in plain.tensors]
    assert {tensor.name for tensor in whole.vision_tensors} == set(VISION)
    assert (whole.tensor_bytes, whole.parameter_count) == (plain.tensor_bytes, plain.parameter_count)
    assert whole.bytes_per_forward == plain.bytes_per_forward
    assert whole.vocabulary_size == plain.vocabulary_size
    assert list(whole.values("tokenizer.ggml.tokens")) == list(plain.values("tokenizer.ggml.tokens"))
    assert list(whole.values("tokenizer.ggml.token_type")) == list(plain.values("tokenizer.ggml.token_type"))
    assert scores(whole.path) == scores(gemma)
    text = " The man saw two."
    found, expected = (open_tokenizer(path).encode(text) for path in (whole.path, gemma))
    assert list(found) == list(expected)


def test_keys_that_ollama_leaves_out_of_gemma3_are_filled_in(gemma: Path) -> None:
    header = read_header(of_ollama(gemma))
    assert header.completed
    assert header.metadata["gemma3.rope.freq_base"] == 1e6
    assert header.metadata["gemma3.rope.freq_base_swa"] == 1e4
    assert header.metadata["gemma3.attention.layer_norm_rms_epsilon"] == 1e-6
    assert header.metadata["tokenizer.ggml.add_space_prefix"] is False
    assert "gemma3.rope.scaling.type" not in header.metadata
    long = gemma.with_name("long.gguf")
    rewrite_gguf(
        of_ollama(gemma),
        long,
        keep=lambda key: key != "gemma3.context_length",
        keys={"gemma3.context_length": 131072},
    )
    assert read_header(long).metadata["gemma3.rope.scaling.type"] == "linear"
    assert read_header(long).metadata["gemma3.rope.scaling.factor"] == 8.0


def test_ollamas_key_names_of_gemma3_are_read(gemma: Path) -> None:
    keys = {"gemma3.rope.global.freq_base": 2e6, "gemma3.rope.local.freq_base": 3e4}
    pattern = {"gemma3.attention.sliding_window_pattern": [True] * 2}
    header = read_header(of_ollama(gemma, keys | pattern, tensors={}, lists={}))
    assert (header.vision_tensors, header.completed) == ((), True)
    assert header.metadata["gemma3.rope.freq_base"] == 2e6
    assert header.metadata["gemma3.rope.freq_base_swa"] == 3e4
    assert header.metadata["gemma3.attention.sliding_window_pattern"] == 6
    other = {"gemma3.attention.sliding_window_pattern": [True, False]}
    kept = read_header(of_ollama(gemma, keys | other, tensors={}, lists={}))
    assert kept.metadata["gemma3.attention.sliding_window_pattern"] == (True, False)


def test_ollamas_key_names_of_mistral3_are_read(tmp_path: Path) -> None:
    plain = write_tiny_gguf(tmp_path / "raw.gguf", architecture="mistral3", quant="Q8_0", seed=3)
    scaling = {"factor": 16.0, "original_context_length": 16, "type": "yarn"}
    keys = {f"mistral3.rope.scaling.{key}": value for key, value in scaling.items()} | {
        "tokenizer.ggml.pre": "tekken"
    }
    own = {
        "rope.scaling.yarn_beta_fast": 24.0,
        "rope.scaling.yarn_beta_slow": 2.0,
        "rope.scaling.yarn_log_multiplier": 1.0,
        "attention.temperature_scale": 0.1,
    }
    names = ("rope.scaling.beta_fast", "rope.scaling.beta_slow", "rope.scaling.mscale_all_dim", "rope.scaling_beta")
    olds = dict(zip(names, own.values(), strict=True))

    def with_keys(name: str, more: Mapping[str, float], **others: str) -> Path:
        given = {**keys, **others, **{f"mistral3.{key}": value for key, value in more.items()}}
        return rewrite_gguf(plain, tmp_path / name, keep=lambda key: key not in given, keys=given)

    ours = with_keys("own.gguf", own)
    theirs = with_keys("ollama.gguf", olds, **{"tokenizer.ggml.pre": "default"})
    header = read_header(theirs)
    assert header.completed
    assert not read_header(ours).completed
    assert header.metadata["tokenizer.ggml.pre"] == "tekken"
    assert scores(theirs) == scores(ours) != scores(plain)


def test_metadata_of_llama_cpps_own_files_is_not_completed(gemma: Path, tiny: TinyModels) -> None:
    for path in (gemma, tiny.target):
        header = read_header(path)
        assert (header.completed, header.vision_tensors) == (False, ())
    assert "gemma3.rope.freq_base_swa" not in read_header(gemma).metadata


def test_vision_tensors_of_other_architectures_are_separated_too(tiny: TinyModels, tmp_path: Path) -> None:
    path = rewrite_gguf(tiny.target, tmp_path / "seeing.gguf", tensors=VISION)
    header = read_header(path)
    assert (len(header.vision_tensors), header.completed) == (3, False)
    assert scores(path) == scores(tiny.target)


def test_the_llama_runtime_refuses_files_with_vision_tensors_before_loading(
    gemma: Path, tiny: TinyModels, tmp_path: Path
) -> None:
    for path in (of_ollama(gemma), rewrite_gguf(tiny.target, tmp_path / "seeing.gguf", tensors=VISION)):
        file = read_model_file(path)
        with pytest.raises(RuntimeUnavailableError, match="vision tensors in the text model's file") as caught:
            RUNTIMES["llama"].check(file, HOST)
        assert "from the hub" in (caught.value.hint or "")
        assert choose_runtime("auto", "auto", file)[0].name == "native"
        with pytest.raises(ModelFileError, match=r"llama\.cpp could not load it"):
            RUNTIMES["llama"].load(file, RUNTIMES["llama"].settings(file, threads=1, device=HOST))
    lacking = read_model_file(of_ollama(gemma, {"gemma3.rope.local.freq_base": 1e4}, tensors={}, lists={}))
    with pytest.raises(RuntimeUnavailableError, match="other keys or names"):
        RUNTIMES["llama"].check(lacking, HOST)


def test_a_vision_file_that_no_runtime_runs_is_refused_with_both_reasons(tiny: TinyModels, tmp_path: Path) -> None:
    keys = {"mllama.block_count": 2, "mllama.context_length": 64}
    path = rewrite_gguf(tiny.target, tmp_path / "m.gguf", tensors=VISION, keys=keys, architecture="mllama")
    with pytest.raises(RuntimeUnavailableError) as caught:
        choose_runtime("auto", "auto", read_model_file(path))
    assert "its architecture is mllama" in caught.value.message
    assert "vision tensors" in caught.value.message


def test_a_projector_file_is_refused_as_a_model(tiny: TinyModels, tmp_path: Path) -> None:
    path = rewrite_gguf(tiny.target, tmp_path / "mmproj-F16.gguf", architecture="clip")
    with pytest.raises(ModelFileError, match="it is an image projector"):
        read_model_file(path)


def test_an_adapter_is_refused_as_a_model(tiny: TinyModels, tmp_path: Path) -> None:
    path = rewrite_gguf(tiny.target, tmp_path / "lora.gguf", keys={"general.type": "adapter"})
    with pytest.raises(ModelFileError, match="it is an adapter") as caught:
        read_model_file(path)
    assert "llama-export-lora" in str(caught.value.hint)


def test_completed_metadata_is_reported_only_when_the_model_is_run(gemma: Path, tmp_path: Path) -> None:
    from edgespec.files.home import Home

    events: list[ProgressEvent] = []
    locator = Locator(store=Store(Home(tmp_path / "home")), job=Job(events.append))
    locator.locate_to_run(str(gemma))
    locator.locate(str(of_ollama(gemma)))
    assert events == []
    locator.locate_to_run(str(of_ollama(gemma)))
    assert [(event.source, event.note) for event in events] == [
        ("ollama", "images are left out: this file's vision part is not used")
    ]


def test_a_gguf_with_ollamas_keys_is_not_exported(gemma: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="converted by Ollama"):
        export_trimmed(of_ollama(gemma), tmp_path / "out", Provenance(name="x"), kept=np.arange(300, dtype=np.int32))
    with pytest.raises(ModelFileError, match="converted by Ollama"):
        export_whole(of_ollama(gemma), tmp_path / "out", Provenance(name="x"))
    assert not (tmp_path / "out").exists()


def test_a_shortened_gguf_array_holds_only_the_first_elements(tiny: TinyModels) -> None:
    tokens = read_header(tiny.target).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufArray)
    assert list(tokens.first(5).strings()) == list(tokens.strings())[:5]
    assert tokens.first(5).byte_count == sum(8 + len(raw) for raw in list(tokens.raw_strings())[:5])
    assert tokens.first(tokens.count) is tokens.first(tokens.count + 1) is tokens
    types = read_header(tiny.target).metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, GgufArray)
    assert list(types.first(7).values()) == list(types.values())[:7]


YARN: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
# What Ollama's converters named otherwise (convert/convert_gptoss.go, convert_olmo.go), by llama.cpp's names.
RENAMED = {
    "gpt-oss.": "gptoss.",
    "attn_output.": "attn_out.",
    "attn_sinks.weight": "attn_sinks",
    "post_attention_norm": "ffn_norm",
}


def under(names: Mapping[str, str]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        return reduce(lambda text, pair: text.replace(*pair), names.items(), name)

    return rename


def gpt_oss(folder: Path) -> Path:
    made = {"architecture": "gpt-oss", "quant": "MXFP4", "window": 4, "experts": (4, 2), "settings": YARN}
    return write_tiny_gguf(folder / "llama.gguf", **made)  # type: ignore[arg-type]


def gpt_oss_of_ollama(plain: Path, **more: Any) -> Path:
    lacks = ("gpt-oss.rope.scaling.type", "gpt-oss.expert_feed", "gpt-oss.feed_forward", "tokenizer.ggml.pre")
    return rewrite_gguf(
        plain,
        plain.with_name("ollama.gguf"),
        keep=lambda key: not key.startswith(lacks),
        keys={"gptoss.feed_forward_length": 64, **more.pop("keys", {})},  # an expert's
        rename=under(RENAMED),
        architecture="gptoss",
        **more,
    )


def test_gpt_oss_under_ollamas_names_gives_the_same_scores(tmp_path: Path) -> None:
    plain = gpt_oss(tmp_path)
    expected, found = read_header(plain), read_header(gpt_oss_of_ollama(plain, keys={"gpt-oss.block_count": 512}))
    assert (found.architecture, found.completed, expected.completed) == ("gpt-oss", True, False)
    assert found.metadata["general.architecture"] == "gpt-oss"
    assert found.block_count == expected.block_count  # a key by llama.cpp's name in such a file is not read
    assert {each.name: each.shape for each in found.tensors} == {each.name: each.shape for each in expected.tensors}
    assert (found.experts, found.bytes_per_forward) == (expected.experts, expected.bytes_per_forward)
    assert found.metadata["tokenizer.ggml.pre"] == "gpt-4o"
    assert scores(found.path) == scores(plain)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("blk.0.attn_sinks.weight", "holds tensor 'blk.0.attn_sinks.weight' twice"),
        ("blk.1.ffn_gate_up_exps.weight", "'blk.1.ffn_gate_up_exps.weight' joins what is read apart"),
        ("blk.0.attn_qkv.weight", "'blk.0.attn_qkv.weight' joins what is read apart"),
    ],
)
def test_tensors_that_cannot_have_llama_cpps_names_are_refused(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ModelFileError, match=reason):
        read_header(gpt_oss_of_ollama(gpt_oss(tmp_path), tensors={name: np.ones(4, dtype=np.float32)}))


def test_the_mxfp4_of_ollamas_first_gpt_oss_is_refused(tmp_path: Path) -> None:
    raw = build(tensors=[tensor("blk.0.ffn_down_exps.weight", (32, 1, 1), 4)], data=32)
    (tmp_path / "early.gguf").write_bytes(raw)
    with pytest.raises(ModelFileError, match="removed ggml type 4") as caught:
        read_header(tmp_path / "early.gguf")
    assert "pull the model again" in (caught.value.hint or "")


def test_olmo3_by_ollamas_name_gives_the_scores_of_olmo2(tmp_path: Path) -> None:
    plain = write_tiny_gguf(tmp_path / "o.gguf", architecture="olmo2", layers=5, window=4, settings=YARN)
    pattern = [True, True, True, False, True]
    keys = {"olmo3.rope.scaling.attn_factor": 1.1386294, "olmo3.attention.sliding_window_pattern": pattern}
    ollama = rewrite_gguf(
        plain, tmp_path / "ollama.gguf", keys=keys, rename=under({"olmo2.": "olmo3."}), architecture="olmo3"
    )
    header = read_header(ollama)
    assert (header.architecture, header.completed, read_header(plain).completed) == ("olmo2", True, False)
    assert header.metadata["tokenizer.ggml.pre"] == "dbrx"
    assert scores(ollama) == scores(plain)


@pytest.mark.parametrize(("architecture", "shared"), [("qwen35", 0), ("qwen35moe", 32)])
def test_qwen35_under_ollamas_names_gives_the_same_scores(tmp_path: Path, architecture: str, shared: int) -> None:
    plain = write_tiny_gguf(tmp_path / "q.gguf", architecture=architecture, layers=4, shared=shared)
    lacks = ("attention.head_count_kv", "rope.dimension_sections", "full_attention_interval")
    keys = {"attention.head_count_kv": [0, 2, 0, 2], "mrope_sections": [3, 3, 2], "ssm.v_head_reordered": True}
    ollama = rewrite_gguf(
        plain,
        tmp_path / "ollama.gguf",
        keep=lambda key: not key.endswith(lacks),
        keys={f"{architecture}.{key}": each for key, each in keys.items()},
        tensors={**VISION, "mtp.fc.weight": np.ones((4, 8), dtype=np.float32)},
        rename=under({"ssm_dt.bias": "ssm_dt"}),
    )
    header = read_header(ollama)
    assert (header.completed, read_header(plain).completed, len(header.vision_tensors)) == (True, False, len(VISION))
    assert [each.name for each in header.tensors] == [each.name for each in read_header(plain).tensors]
    assert header.attention_layers == 2
    assert scores(ollama) == scores(plain)
    other = rewrite_gguf(
        ollama,
        tmp_path / "other.gguf",
        keep=lambda key: not key.endswith("reordered"),
        keys={f"{architecture}.ssm.v_head_reordered": False},
    )
    with pytest.raises(RuntimeUnavailableError, match="value heads of its delta layers are in another order"):
        scores(other)
