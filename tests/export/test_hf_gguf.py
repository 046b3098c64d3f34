from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from edgespec.errors import CancelledError, DiskSpaceError, InvalidRequestError, ModelFileError
from edgespec.export.huggingface import gguf as hf_gguf
from edgespec.export.huggingface.gguf import export_from_folder, is_model_folder
from edgespec.export.huggingface.tensors import interleaved
from edgespec.files import disk
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufArray
from edgespec.files.gguf.vocabulary import compare_vocabularies
from edgespec.files.progress import Job, ProgressEvent
from edgespec.files.safetensors import to_float32
from edgespec.runtimes.llama.library import load
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer
from tests.export.hf_models import (
    HEAD_WIDTH,
    HEADS,
    KV_HEADS,
    ROWS,
    WIDTH,
    Tensors,
    random_tensors,
    write_random_folder,
)
from tests.export.models import loads, logits, write_model
from tests.support.hf_folder import write_hf_folder, write_safetensors
from tests.support.provenance import described
from tests.support.tiny_gguf import write_tiny_gguf

TEXTS = (
    "",
    " ",
    "  two  spaces ",
    "The water of these people, and more words!",
    "naïve café straße über ångström",
    "Привет мир 你好 世界 🙂🚀👩‍💻",
    "x = [1, 22, 333]; y == 'it''s' ? {}: <s>",
    "\n\n\ttabs\r\n and lines \x00 \x7f",
    "<|im_start|>user\nhi<|im_end|>",
    "ababab abcabc ▁ under ▁▁",
    "don't I'LL we've 1234567890 3.14159",
)


def export(source: Path, folder: Path, **more: Any) -> Mapping[str, Any]:
    provenance, options = described(more, name="tiny")
    return export_from_folder(source, folder, provenance, **options)


def values(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of a GGUF, dequantised."""
    return {
        each.name: gguf.dequantize(each.data, each.tensor_type).astype(np.float32)
        for each in gguf.GGUFReader(str(path)).tensors
    }


def array(path: Path, name: str) -> list[Any]:
    value = read_header(path).metadata[f"tokenizer.ggml.{name}"]
    assert isinstance(value, GgufArray)
    return list(value.values())


def same_tensors(left: Path, right: Path) -> None:
    before, after = values(left), values(right)
    assert sorted(before) == sorted(after)
    for name, weights in before.items():
        assert weights.tobytes() == after[name].tobytes(), name


def same_ids(left: Path, right: Path) -> None:
    one, other = LlamaTokenizer(left), LlamaTokenizer(right)
    try:
        assert one.vocabulary_size == other.vocabulary_size
        assert (one.stop_ids, one.adds_bos) == (other.stop_ids, other.adds_bos)
        for text in TEXTS:
            for special in (False, True):
                ids = one.encode(text, special=special, add_bos=True)
                assert other.encode(text, special=special, add_bos=True) == ids, text
                assert one.detokenize(ids) == other.detokenize(ids)
    finally:
        one.close()
        other.close()


# ------------------------------------------------------------------------- from a GGUF to a folder and back


@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
def test_a_gguf_converted_to_hugging_face_and_back_has_the_same_bits(tmp_path: Path, quant: Any) -> None:
    source = write_tiny_gguf(tmp_path / "source.gguf", quant=quant, seed=4)
    folder = write_hf_folder(source, tmp_path / "folder")
    manifest = export(folder, tmp_path / "out")
    made = tmp_path / "out" / "model.gguf"
    same_tensors(source, made)
    assert manifest["tensors"] == {"F32": len(read_header(source).tensors)}

    assert array(made, "tokens") == array(source, "tokens")
    assert array(made, "token_type") == array(source, "token_type")
    assert compare_vocabularies(read_header(source), read_header(made)) is None
    assert read_header(made).chat_template == read_header(source).chat_template
    # The scores are other numbers, with the same order for pieces that merges make.
    tokens, before, after = array(source, "tokens"), array(source, "scores"), array(made, "scores")
    merged = [token for token, text in enumerate(tokens) if len(text) > 1 and after[token] > min(after)]
    assert len(merged) > 250
    ranked = sorted(merged, key=lambda token: -before[token])
    assert all(after[left] > after[right] for left, right in pairwise(ranked))
    same_ids(source, made)


def test_a_gguf_converted_to_hugging_face_and_back_gives_equal_logits(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "source.gguf", seed=4)
    export(write_hf_folder(source, tmp_path / "folder"), tmp_path / "out")
    tokens = list(range(1, 200, 7))
    np.testing.assert_array_equal(logits(tmp_path / "out" / "model.gguf", tokens), logits(source, tokens))


@pytest.mark.parametrize("tied", [False, True])
def test_a_gemma_gguf_survives_conversion_to_hugging_face_and_back(tmp_path: Path, tied: bool) -> None:
    source = write_model(tmp_path / "source.gguf", "gemma3", quant="F32", tied=tied)
    export(write_hf_folder(source, tmp_path / "folder"), tmp_path / "out")
    made = tmp_path / "out" / "model.gguf"
    same_tensors(source, made)
    assert loads(source) == loads(made)
    if loads(source):
        tokens = [1, 260, 270, 259, 40, 299, 2, 261]
        np.testing.assert_array_equal(logits(made, tokens), logits(source, tokens))


@pytest.mark.models
@pytest.mark.timeout(900)
def test_smollm2_survives_conversion_to_hugging_face_and_back(tmp_path: Path) -> None:
    from edgespec.files.home import home
    from edgespec.store.catalogue import lookup
    from edgespec.store.store import Store

    source = Store(home()).fetch(lookup("smollm2-135m")).path
    export(write_hf_folder(source, tmp_path / "folder"), tmp_path / "out")
    made = tmp_path / "out" / "model.gguf"
    same_tensors(source, made)
    for name in ("tokens", "token_type", "merges"):
        assert array(made, name) == array(source, name)
    assert read_header(made).metadata["tokenizer.ggml.pre"] == "smollm"
    same_ids(source, made)


# ----------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_converted_matrices_keep_type_and_bits(tmp_path: Path, dtype: str) -> None:
    source = write_random_folder(tmp_path / "in", dtype=dtype)
    manifest = export(source, tmp_path / "out")
    header = read_header(tmp_path / "out" / "model.gguf")
    data = (tmp_path / "out" / "model.gguf").read_bytes()
    raw = {each.name: data[each.offset : each.offset + each.byte_count] for each in header.tensors}
    tensors = random_tensors("llama", dtype)
    assert raw["blk.1.ffn_down.weight"] == tensors["model.layers.1.mlp.down_proj.weight"][1].tobytes()
    assert raw["output.weight"] == tensors["lm_head.weight"][1].tobytes()
    norm = to_float32(tensors["model.norm.weight"][1])
    assert raw["output_norm.weight"] == norm.tobytes()
    assert header.metadata["general.file_type"] == {"F32": 0, "F16": 1, "BF16": 32}[dtype]
    matrices, vectors = 2 * 7 + 2, 2 * 2 + 1
    assert manifest["tensors"] == ({"F32": matrices + vectors} if dtype == "F32" else {dtype: 16, "F32": 5})
    assert loads(tmp_path / "out" / "model.gguf")


def test_rotary_pairs_of_a_llama_become_neighbouring_rows(tmp_path: Path) -> None:
    export(write_random_folder(tmp_path / "in"), tmp_path / "out")
    found, tensors = values(tmp_path / "out" / "model.gguf"), random_tensors("llama")
    for name, ours, heads in (("q", "attn_q", HEADS), ("k", "attn_k", KV_HEADS)):
        before = tensors[f"model.layers.0.self_attn.{name}_proj.weight"][1]
        after = found[f"blk.0.{ours}.weight"]
        for head in range(heads):
            for row in range(HEAD_WIDTH // 2):
                at = head * HEAD_WIDTH
                np.testing.assert_array_equal(after[at + 2 * row], before[at + row])
                np.testing.assert_array_equal(after[at + 2 * row + 1], before[at + row + HEAD_WIDTH // 2])
    np.testing.assert_array_equal(found["blk.0.attn_v.weight"], tensors["model.layers.0.self_attn.v_proj.weight"][1])
    assert interleaved(np.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_architectures_other_than_llama_keep_the_order_of_rows(tmp_path: Path, architecture: str) -> None:
    export(write_random_folder(tmp_path / "in", architecture, tied=True), tmp_path / "out")
    found, tensors = values(tmp_path / "out" / "model.gguf"), random_tensors(architecture, tied=True)
    np.testing.assert_array_equal(found["blk.1.attn_q.weight"], tensors["model.layers.1.self_attn.q_proj.weight"][1])
    norm = tensors["model.layers.1.input_layernorm.weight"][1]
    np.testing.assert_array_equal(found["blk.1.attn_norm.weight"], norm + np.float32(architecture == "gemma3"))
    if architecture == "qwen2":
        bias = tensors["model.layers.1.self_attn.k_proj.bias"][1]
        np.testing.assert_array_equal(found["blk.1.attn_k.bias"], bias)
    assert "output.weight" not in found
    assert loads(tmp_path / "out" / "model.gguf")


def test_stacked_matrices_of_phi3_stay_stacked(tmp_path: Path) -> None:
    export(write_random_folder(tmp_path / "in", "phi3"), tmp_path / "out")
    found, tensors = values(tmp_path / "out" / "model.gguf"), random_tensors("phi3")
    for ours, theirs in (("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")):
        np.testing.assert_array_equal(found[f"blk.1.{ours}.weight"], tensors[f"model.layers.1.{theirs}.weight"][1])
    assert loads(tmp_path / "out" / "model.gguf")


def test_biases_of_a_llama_are_reordered_like_their_rows(tmp_path: Path) -> None:
    tensors = random_tensors("llama")
    bias = np.arange(HEADS * HEAD_WIDTH, dtype=np.float32)
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = ("F32", bias)
    export(write_random_folder(tmp_path / "in", tensors=tensors), tmp_path / "out")
    found = values(tmp_path / "out" / "model.gguf")["blk.1.attn_q.bias"]
    assert found[:4].tolist() == [0, 8, 1, 9]
    assert found[16:20].tolist() == [16, 24, 17, 25]


def test_a_head_tied_to_the_embedding_is_not_written(tmp_path: Path) -> None:
    tensors = random_tensors("llama")
    copied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    export(write_random_folder(tmp_path / "in", tensors=copied, tie_word_embeddings=True), tmp_path / "out")
    assert "output.weight" not in values(tmp_path / "out" / "model.gguf")
    # Without tie_word_embeddings, the weights decide.
    export(write_random_folder(tmp_path / "in", tensors=tensors, tie_word_embeddings=None), tmp_path / "out")
    assert "output.weight" in values(tmp_path / "out" / "model.gguf")
    export(write_random_folder(tmp_path / "in", tied=True, tie_word_embeddings=None), tmp_path / "out")
    assert "output.weight" not in values(tmp_path / "out" / "model.gguf")


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_a_head_that_differs_from_the_embedding_is_written_though_it_is_called_tied(
    tmp_path: Path, dtype: str
) -> None:
    tensors = random_tensors("llama")
    head = tensors["model.embed_tokens.weight"][1].astype(np.float16).astype(np.float32)
    head[-1, -1] = 1
    stored = head if dtype == "F32" else head.astype(np.float16)
    source = write_random_folder(
        tmp_path / "in", tensors={**tensors, "lm_head.weight": (dtype, stored)}, tie_word_embeddings=True
    )
    export(source, tmp_path / "out")
    np.testing.assert_array_equal(values(tmp_path / "out" / "model.gguf")["output.weight"], head)
    assert loads(tmp_path / "out" / "model.gguf")


def test_llama_cpp_loads_the_tensor_of_llama3_rope_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    export(write_random_folder(tmp_path / "in", rope_scaling=scaling), tmp_path / "out")
    made = tmp_path / "out" / "model.gguf"
    factors = values(made)["rope_freqs.weight"]
    assert factors.shape == (HEAD_WIDTH // 2,)
    assert factors[0] == 1.0
    assert factors[-1] == 8.0
    export(write_random_folder(tmp_path / "plain"), tmp_path / "plain-out")
    tokens = list(range(3, 60))
    assert (logits(made, tokens) != logits(tmp_path / "plain-out" / "model.gguf", tokens)).any()


def test_a_sharded_hugging_face_model_converts_like_a_single_file(tmp_path: Path) -> None:
    source, tensors = write_random_folder(tmp_path / "in"), random_tensors("llama")
    export(source, tmp_path / "one")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        write_safetensors(source / shard, {name: tensors[name] for name in part})
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    manifest = export(source, tmp_path / "two")
    assert (tmp_path / "one/model.gguf").read_bytes() == (tmp_path / "two/model.gguf").read_bytes()
    assert manifest["source"]["bytes"] == sum((source / shard).stat().st_size for shard in shards)


@pytest.mark.parametrize(
    ("prefix", "head"), [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")]
)
def test_the_text_model_of_a_multimodal_folder_is_converted(tmp_path: Path, prefix: str, head: str) -> None:
    def renamed(name: str) -> str:
        return name.replace("lm_head.", head) if name.startswith("lm_head") else prefix + name.removeprefix("model.")

    tensors: Tensors = {renamed(name): each for name, each in random_tensors("gemma3").items()}
    tensors["vision_tower.patch.weight"] = ("F32", np.zeros((2, 2), np.float32))
    source = write_random_folder(tmp_path / "in", "gemma3", tensors=tensors)
    config = json.loads((source / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "tie_word_embeddings": False, "text_config": config}
    (source / "config.json").write_text(json.dumps(whole))
    export(source, tmp_path / "out")
    export(write_random_folder(tmp_path / "text", "gemma3"), tmp_path / "text-out")
    same_tensors(tmp_path / "out" / "model.gguf", tmp_path / "text-out" / "model.gguf")


# ------------------------------------------------------------------------------ the folder that is written


def test_the_manifest_of_a_converted_folder_states_source_and_files(tmp_path: Path) -> None:
    source = write_random_folder(tmp_path / "in", dtype="BF16")
    manifest = export(source, tmp_path / "out", licence="Apache-2.0")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    content = (tmp_path / "out" / "model.gguf").read_bytes()
    size = (source / "model.safetensors").stat().st_size
    assert manifest["files"] == {"model.gguf": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    assert manifest["source"] == {"name": "tiny", "sha256": None, "bytes": size}
    assert (manifest["schema_version"], manifest["kind"], manifest["quant"]) == (1, "gguf", "keep")
    assert (manifest["architecture"], manifest["vocabulary_size"]) == ("llama", ROWS)
    assert manifest["licence"] == "Apache-2.0"
    assert set(manifest["tools"]) == {"gguf"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "model.gguf"]
    metadata = read_header(tmp_path / "out" / "model.gguf").metadata
    assert (metadata["general.name"], metadata["general.license"]) == ("tiny", "Apache-2.0")
    assert metadata["llama.vocab_size"] == ROWS


STATED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05}
READ = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repeat_penalty": 1.05}


@pytest.mark.parametrize(
    ("stated", "read"),
    [
        ({"do_sample": True, **STATED}, READ),
        (STATED, READ),
        ({"do_sample": True, "top_k": -1, "top_p": 0.95}, {"temperature": 1.0, "top_k": 0, "top_p": 0.95}),
        ({"do_sample": False, **STATED}, {}),
        ({"repetition_penalty": 1.05}, {}),
    ],
)
def test_the_makers_sampling_is_written(tmp_path: Path, stated: dict[str, Any], read: dict[str, float]) -> None:
    source = write_random_folder(tmp_path / "in")
    (source / "generation_config.json").write_text(json.dumps(stated))
    export(source, tmp_path / "out")
    assert read_header(tmp_path / "out" / "model.gguf").sampling == read


@pytest.mark.parametrize(
    ("odd", "note"),
    [
        ({"top_k": 50.0}, "top_k must be a whole number from -1 to 2147483647, got 50.0"),
        ({"top_p": 0.0}, "top_p must be a number from 1e-06 to 1, got 0.0"),
        ({"temperature": "hot"}, 'temperature must be a number from 0 to 100, got "hot"'),
        ({"do_sample": 1}, "do_sample must be true or false, got 1"),
    ],
)
def test_sampling_that_cannot_be_read_is_left_out_with_a_note(tmp_path: Path, odd: dict[str, Any], note: str) -> None:
    source = write_random_folder(tmp_path / "in")
    (source / "generation_config.json").write_text(json.dumps({"do_sample": True, **STATED, **odd}))
    events = list[ProgressEvent]()
    export(source, tmp_path / "out", job=Job(events.append))
    expected = {name: value for name, value in READ.items() if name not in odd}
    assert read_header(tmp_path / "out" / "model.gguf").sampling == expected
    assert [(each.source, each.note) for each in events if each.note] == [
        ("generation_config.json", f"{note}; it is left out")
    ]


def test_a_hugging_face_folder_can_be_quantised_during_conversion(tmp_path: Path) -> None:
    manifest = export(write_random_folder(tmp_path / "in", dtype="BF16"), tmp_path / "out", quant="q8", threads=2)
    header = read_header(tmp_path / "out" / "model.gguf")
    assert header.metadata["general.file_type"] == 7
    assert manifest["quant"] == "q8_0"
    assert manifest["tensors"] == {"F32": 5, "Q8_0": 16}
    assert manifest["tools"]["llama.cpp"] == load().build
    assert manifest["licence"] is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "model.gguf"]


def test_converting_the_same_folder_twice_gives_the_same_file(tmp_path: Path) -> None:
    source = write_random_folder(tmp_path / "in")
    export(source, tmp_path / "one")
    export(source, tmp_path / "two")
    assert (tmp_path / "one/model.gguf").read_bytes() == (tmp_path / "two/model.gguf").read_bytes()


def test_conversion_progress_ends_at_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_gguf, "_TOLD_BYTES", 1)
    events: list[ProgressEvent] = []
    export(write_random_folder(tmp_path / "in"), tmp_path / "out", job=Job(events.append))
    done = [event.done_bytes for event in events]
    assert done == sorted(done)
    assert {event.stage for event in events} == {"writing"}
    assert events[-1].done_bytes == events[-1].total_bytes
    assert len(events) > 20


def test_a_cancelled_conversion_leaves_no_files(tmp_path: Path) -> None:
    asked: list[None] = []

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > 5

    with pytest.raises(CancelledError, match="nothing was written"):
        export(write_random_folder(tmp_path / "in"), tmp_path / "out", job=Job(cancelled=cancelled))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_conversion_checks_disk_space_before_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_random_folder(tmp_path / "in")
    monkeypatch.setattr(disk, "free_bytes", lambda _path: disk.SLACK_BYTES + 4 * WIDTH * ROWS)
    with pytest.raises(DiskSpaceError):
        export(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_conversion_replaces_only_earlier_exports(tmp_path: Path) -> None:
    source = write_random_folder(tmp_path / "in")
    export(source, tmp_path / "out", name="one")
    export(source, tmp_path / "out", name="two")
    assert json.loads((tmp_path / "out/manifest.json").read_text())["source"]["name"] == "two"
    with pytest.raises(InvalidRequestError, match="would be replaced"):
        export(source, source)
    with pytest.raises(InvalidRequestError, match="would be replaced"):
        export(source, tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InvalidRequestError, match="not an exported model"):
        export(source, tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"name": ""}, "needs a name"), ({"quant": "q99"}, "unknown quantisation"), ({"threads": 0}, "threads must be")],
)
def test_invalid_arguments_of_a_conversion_are_refused(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        export(tmp_path / "nowhere", tmp_path / "out", **arguments)


# ------------------------------------------------------------------------------------------------- refusals


def tensors_with(**changes: tuple[str, npt.NDArray[Any]] | None) -> Tensors:
    """Weights of a llama with ``changes`` (None: removed); two underscores in a name stand for a dot."""
    found = random_tensors("llama")
    for name, each in changes.items():
        if each is None:
            del found[name.replace("__", ".")]
        else:
            found[name.replace("__", ".")] = each
    return found


ONE = np.zeros((1, 1), np.float32)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (tensors_with(lm_head__weight=None), "lack the tensor for output.weight"),
        (tensors_with(model__norm__weight=None), "lack the tensor for output_norm.weight"),
        (tensors_with(model__embed_tokens__weight=None), "lack model.embed_tokens.weight"),
        (tensors_with(model__embed_tokens__weight=("F32", ONE)), "has 1 rows and config.json says 265"),
        (tensors_with(lm_head__weight=("F32", ONE)), r"has the shape [1, 1] and config.json says [265, 64]"),
    ],
)
def test_weights_that_contradict_config_json_are_refused(tmp_path: Path, tensors: Tensors, words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        export(write_random_folder(tmp_path / "in", tensors=tensors), tmp_path / "out")
    assert words in caught.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (tensors_with(model__more__weight=("F32", ONE)), "does not belong to the llama architecture"),
        (tensors_with(token_embd__weight=("F32", ONE)), "does not belong to the llama architecture"),
        (tensors_with(model__norm=("F32", ONE)), "does not belong to the llama architecture"),
        (tensors_with(model__norm__bias=("F32", ONE)), "llama.cpp does not use tensor 'model.norm.bias'"),
        (tensors_with(model__norm__weight=("I32", np.zeros(WIDTH, np.int32))), "is I32; only F32, F16 and BF16"),
    ],
)
def test_weights_that_llama_cpp_does_not_support_are_refused(tmp_path: Path, tensors: Tensors, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        export(write_random_folder(tmp_path / "in", tensors=tensors), tmp_path / "out")
    assert words in caught.value.message
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_a_qwen2_without_biases_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors("qwen2")
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ModelFileError, match=r"lack the tensor for blk\.1\.attn_k\.bias"):
        export(write_random_folder(tmp_path / "in", "qwen2", tensors=tensors), tmp_path / "out")


def test_buffers_of_old_transformers_releases_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors("llama")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", np.zeros(8, np.float32))
    export(write_random_folder(tmp_path / "in", tensors=tensors), tmp_path / "out")
    assert loads(tmp_path / "out" / "model.gguf")


def test_a_tokenizer_with_more_tokens_than_embedding_rows_is_refused(tmp_path: Path) -> None:
    source = write_random_folder(tmp_path / "in")
    document = json.loads((source / "tokenizer.json").read_text())
    document["model"]["vocab"]["more"] = ROWS
    (source / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ModelFileError, match="has no row in the model's embedding of 265 rows"):
        export(source, tmp_path / "out")


def test_a_folder_with_config_json_is_a_model_folder(tmp_path: Path) -> None:
    assert is_model_folder(write_random_folder(tmp_path / "in"))
    assert not is_model_folder(tmp_path)
    assert not is_model_folder(tmp_path / "in" / "config.json")
    with pytest.raises(ModelFileError, match="no such file"):
        export(tmp_path / "in" / "missing", tmp_path / "out")
