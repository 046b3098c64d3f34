"""Replaces any value in any JSON file of a folder: the result is an EdgespecError or a converted model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from edgespec.errors import EdgespecError
from edgespec.export.huggingface.config import read_config
from edgespec.export.huggingface.tokenizer import read_vocabulary
from tests.export.hf_models import ROWS, random_config
from tests.support.hf_folder import METASPACE_NORMALIZER, write_byte_level_tokenizer

STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**70, 0.5, -1e308, 1e308, "", "x", "\ud800", "\0", [], {}, [[]], [None],
    {"type": []}, {"type": "Sequence"}, {"": {}}, "x" * 5000, [1] * 5000,
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TEMPLATE = {
    "type": "Sequence",
    "processors": [
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|begin|>"}}, {"Sequence": {"id": "A"}}]}
    ],
}


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value; for a long table only to the first few values."""
    found = [path]
    if isinstance(document, dict | list):
        members = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in list(members)[:12]:
            found += places(value, (*path, key))
    return found


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = replaced(document[path[0]], path[1:], value)
    return copy


def sound(folder: Path, kind: str) -> None:
    write_byte_level_tokenizer(folder, "qwen2", chat_template=[{"name": "default", "template": "x"}])
    changes: dict[str, Any] = {"rope_scaling": LLAMA3, "eos_token_id": [0, 2], "hidden_act": "silu"}
    if kind == "gemma3":
        rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
        changes = {"layer_types": ["sliding_attention"] * 2, "rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(random_config(kind, **changes)))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<|begin|>"}}))
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text()) | {"post_processor": TEMPLATE}
    if kind == "gemma3":
        vocab = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)} | {"a": 259, "b": 260, "ab": 261}
        model = {"type": "BPE", "byte_fallback": True, "unk_token": "a", "vocab": vocab, "merges": [["a", "b"]]}
        document |= {"normalizer": METASPACE_NORMALIZER, "pre_tokenizer": None, "model": model}
    path.write_text(json.dumps(document))


def read(folder: Path) -> None:
    read_config(folder)
    read_vocabulary(folder, ROWS).metadata()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"],
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_replaced_json_value_raises_an_edgespec_error_or_converts(
    tmp_path: Path, kind: str, name: str, data: st.DataObject
) -> None:
    sound(tmp_path, kind)
    read(tmp_path)
    document = json.loads((tmp_path / name).read_text())
    path = data.draw(st.sampled_from(places(document)))
    value = data.draw(st.sampled_from(STRANGE))
    (tmp_path / name).write_text(json.dumps(replaced(document, path, value)))
    refusal = None
    try:
        read(tmp_path)
    except EdgespecError as error:
        refusal = error
    assert refusal is None or len(refusal.message) < 600 + len(str(tmp_path))
