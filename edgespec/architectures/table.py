"""Every architecture that edgespec computes, by llama.cpp's name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from edgespec.architectures import gemma3, llama, qwen2, qwen3
from edgespec.architectures.shape import Architecture, UnsupportedError

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {each.ARCHITECTURE.name: each.ARCHITECTURE for each in (llama, qwen2, qwen3, gemma3)}
)


def find(name: str) -> Architecture:
    """Raises UnsupportedError if edgespec does not compute models of that architecture."""
    if name not in ARCHITECTURES:
        raise UnsupportedError(f"its architecture is {name}, and edgespec computes {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
