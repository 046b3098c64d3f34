"""A folder of every family that transformers has becomes a GGUF whose logits are transformers'.

Fused matrices, rows in another order, tied heads, scaled positions, layers without rotation, windows, caps, and norms
of one more than their weights each change every logit.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgespec.architectures.table import ARCHITECTURES, CLASSES
from edgespec.errors import InvalidRequestError, ModelFileError
from edgespec.export.huggingface.config import read_config
from edgespec.export.huggingface.gguf import export_from_folder
from edgespec.runtimes.native.model import NativeSettings
from tests.export.transformers_models import LOGITS, PLACES, TOKENS, recorded, weights
from tests.runtimes.contract import logits
from tests.support.hf_folder import write_byte_level_tokenizer, write_json, write_safetensors
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.provenance import described

require_native()
RECORDED = recorded()
# llama.cpp's converter writes them: experts, and layers of another kind than attention.
NOT_CONVERTED = {"qwen3moe", "gpt-oss", "gemma4", "qwen35", "qwen35moe"}
MOST = 0.01  # keys and values are halves in our cache; logits spread over about 3


def saved(folder: Path, model: str, prefix: str = "", **changes: Any) -> Path:
    """The folder that transformers saves, with ``changes`` in config.json and ``prefix`` before tensors' names."""
    found, folder = RECORDED[model], folder / model
    folder.mkdir(parents=True)
    shapes: dict[str, tuple[int, ...]] = {
        name.replace(".layers.0.", f".layers.{layer}."): tuple(shape)
        for layer in range(found["config"]["num_hidden_layers"])
        for name, shape in found["shapes"].items()
    }
    tensors: dict[str, tuple[str, npt.NDArray[Any]]] = {
        prefix + name: ("F32", weights(model, name, shape)) for name, shape in shapes.items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", {**found["config"], **changes})
    write_byte_level_tokenizer(folder)
    return folder


def converted(source: Path, folder: Path) -> Path:
    provenance, options = described({}, name="tiny")
    export_from_folder(source, folder, provenance, **options)
    return folder / "model.gguf"


def compare(path: Path, model: str) -> None:
    with load_native(path, NativeSettings()) as native, native.open(len(TOKENS)) as sequence:
        ours = [row for first in (0, 36) for row in logits(sequence.forward(TOKENS[first : first + 36], 36))]
    differences = [
        float(np.abs(ours[place][:LOGITS] - row).max())
        for place, row in zip(PLACES, RECORDED[model]["logits"], strict=True)
    ]
    assert max(differences) < MOST, differences


@pytest.mark.parametrize("model", RECORDED)
def test_a_converted_folder_has_the_logits_of_transformers(tmp_path: Path, model: str) -> None:
    compare(converted(saved(tmp_path, model), tmp_path / "out"), model)


def test_the_text_model_of_a_ministral_that_sees_is_converted(tmp_path: Path) -> None:
    whole = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": RECORDED["mistral3"]["config"],
    }
    source = saved(tmp_path, "mistral3", "language_model.")
    write_json(source / "config.json", whole)
    compare(converted(source, tmp_path / "out"), "mistral3")


def test_every_dense_family_is_converted_and_recorded() -> None:
    assert {found["config"]["architectures"][0] for found in RECORDED.values()} == {
        kind for kind, each in CLASSES.items() if kind not in each.saved.multimodal
    }
    assert all(each.saved.classes for name, each in ARCHITECTURES.items() if name not in NOT_CONVERTED)


YARN = RECORDED["mistral3"]["config"]["rope_parameters"]
ROPES = RECORDED["olmo3"]["config"]["rope_parameters"]


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (
            "smollm3",
            {"no_rope_layers": [1, 1, 0, 1, 1]},
            "its layers without rotary positions are not the",
        ),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 3}, "without rotary positions are not the"),
        ("olmo3", {"layer_types": ["sliding_attention"] * 5}, "its layers with a sliding window are not the usual"),
        ("olmo3", {"sliding_window": None}, "sliding_window is missing"),
        (
            "olmo3",
            {"rope_parameters": {**ROPES, "sliding_attention": {"rope_theta": 2e4}}},
            "layers is 20000",
        ),
        ("exaone4", {"sliding_window": 24, "layer_types": None}, "its attention has a sliding window of 24"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping is missing"),
        ("gemma2", {"query_pre_attn_scalar": 32}, "its queries are scaled by 32 instead of 16"),
        ("mistral3", {"rope_parameters": {**YARN, "mscale": 2.0}}, "scaled with 'mscale'"),
        ("mistral3", {"rope_parameters": {**YARN, "mscale": None}}, "scaled with 'mscale'"),
        ("mistral3", {"rope_parameters": {**YARN, "truncate": False}}, "scaled with 'truncate'"),
        ("mistral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": -1}}, "llama_4_scaling_beta"),
        ("llama", {"rope_parameters": YARN}, "scaled with 'mscale"),
    ],
)
def test_a_setting_that_the_graph_lacks_is_refused_by_name(
    tmp_path: Path, model: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises((InvalidRequestError, ModelFileError), match=re.escape(words)) as caught:
        read_config(saved(tmp_path, model, **changes))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("olmo3", {"attention_factor": 1.1386294361119891}),  # OLMo 3 states it: 1 + ln(4) / 10
        ("mistral3", {"truncate": True, "max_position_embeddings": 128}),
    ],
)
def test_a_member_of_yarn_that_says_what_is_computed_anyway_changes_nothing(
    tmp_path: Path, model: str, more: dict[str, Any]
) -> None:
    rope = RECORDED[model]["config"]["rope_parameters"]
    full = rope.get("full_attention", rope)
    changed = {**rope, "full_attention": {**full, **more}} if full is not rope else {**rope, **more}
    other = saved(tmp_path / "other", model, rope_parameters=changed)
    assert read_config(saved(tmp_path, model)) == read_config(other)


def test_a_mixture_of_experts_and_an_unknown_class_name_what_converts_them(tmp_path: Path) -> None:
    for number, changes in enumerate(({"num_experts": 8}, {})):
        kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        with pytest.raises(InvalidRequestError) as caught:
            read_config(saved(tmp_path / str(number), "qwen3", **kind, **changes))
        assert "convert_hf_to_gguf.py" in (caught.value.hint or "")
