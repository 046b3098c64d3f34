"""Architectures are named in architectures/ and in the store's data, and nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from edgespec.architectures.shape import UnsupportedError
from edgespec.architectures.table import ARCHITECTURES, CLASSES, MODEL_TYPES, find, scales_tokens_only

PACKAGE = Path(__file__).resolve().parents[2] / "edgespec"

# Where "llama" is the name of a runtime or of SentencePiece vocabularies, and others are those of pre-tokenizers or
# of chat formats.
RUNTIMES = {
    "cli/doctor/report.py",
    "export/perplexity.py",
    "export/trim/choose_rows.py",
    "planning/choice/planner.py",
    "planning/simulated/machine_file.py",
    "profiles/layers.py",
    "runtimes/llama/context.py",
    "runtimes/llama/devices.py",
    "runtimes/llama/facts.py",
    "runtimes/llama/library.py",
    "runtimes/llama/runtime.py",
}
VOCABULARIES = {"export/huggingface/tokenizer.py"}
OTHER_TABLES = {
    "text/conversation/call_formats.py": {"gpt-oss"},
    "text/tokenizers/vocabulary.py": {"llama", "gemma4"},
    "export/huggingface/pretokenizers.py": {"qwen2"},
    "text/tokenizers/word_splits.py": {"qwen2", "exaone4", "glm4", "qwen35"},
}


def named_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return words & {*ARCHITECTURES, "phi3", "granite"}


def test_no_other_module_names_an_architecture() -> None:
    allowed = {**{module: {"llama"} for module in RUNTIMES | VOCABULARIES}, **OTHER_TABLES}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name != "architectures":
            module = path.relative_to(PACKAGE).as_posix()
            assert named_in(path) <= allowed.get(module, set()), module


def test_every_architecture_is_found_by_its_name_its_classes_and_its_model_types() -> None:
    for name, architecture in ARCHITECTURES.items():
        assert find(name) is architecture
        assert architecture.saved.multimodal <= set(architecture.saved.classes)
        for kind, model_type in architecture.saved.classes.items():
            assert CLASSES[kind] is architecture
            assert MODEL_TYPES[model_type] == kind
    with pytest.raises(UnsupportedError, match="its architecture is mamba, and edgespec computes llama"):
        find("mamba")


def test_llama_cpp_scales_embeddings_of_gemma_only_if_it_looked_them_up() -> None:
    assert [name for name in (*ARCHITECTURES, "gemma") if scales_tokens_only(name)] == ["gemma3", "gemma4"]
