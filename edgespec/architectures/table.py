"""Every architecture that edgespec computes, by llama.cpp's name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from edgespec.architectures import (
    ernie4_5,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    gemma4_assistant,
    glm4,
    gpt_oss,
    granite,
    llama,
    mistral3,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3moe,
    qwen35,
    qwen35moe,
    seed_oss,
    smollm3,
)
from edgespec.architectures.shape import Architecture, UnsupportedError

_MODULES = (
    *(llama, qwen2, qwen3, gemma3, phi3, granite),
    *(smollm3, mistral3, gemma2, olmo2, glm4, exaone4, seed_oss, ernie4_5, qwen3moe, gpt_oss),
    *(qwen35, qwen35moe, gemma4),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {each.ARCHITECTURE.name: each.ARCHITECTURE for each in _MODULES}
)

OLLAMAS: Mapping[str, Architecture] = MappingProxyType(
    {each.ollama.architecture: each for each in ARCHITECTURES.values() if each.ollama and each.ollama.architecture}
)
"""Those that Ollama's converter named otherwise, by its names."""

READERS: Mapping[str, Architecture] = MappingProxyType(
    {each.ARCHITECTURE.name: each.ARCHITECTURE for each in (gemma4_assistant,)}
)
"""Those of drafters that read their target, and compute nothing without it."""

PLAIN = llama.ARCHITECTURE.name
"""The architecture that needs the fewest keys."""

CLASSES: Mapping[str, Architecture] = MappingProxyType(
    {name: each for each in ARCHITECTURES.values() for name in each.saved.classes}
)
"""The architectures by transformers' names of their classes."""

MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {kind: name for each in ARCHITECTURES.values() for name, kind in each.saved.classes.items()}
)
"""Transformers' classes by the model types of their config.json."""


def find(name: str) -> Architecture:
    """Raises UnsupportedError if edgespec does not compute models of that architecture."""
    if name in READERS:
        raise UnsupportedError(f"a model of the architecture {name} only drafts, for the model whose caches it reads")
    if name not in ARCHITECTURES:
        raise UnsupportedError(f"its architecture is {name}, and edgespec computes {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def scales_tokens_only(name: str) -> bool:
    """Whether llama.cpp scales embeddings by the root of their length only if it looked them up by token.

    gemma and gemma2 do not: their graphs scale every input.
    """
    return name in ARCHITECTURES and ARCHITECTURES[name].scales_tokens_only
