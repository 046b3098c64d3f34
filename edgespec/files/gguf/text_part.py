"""Selects the text model of a multimodal GGUF file and separates its vision and audio tensors.

Ollama keeps such models in one file, and writes some keys differently than llama.cpp reads them, or not at all. The
file of each architecture says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from edgespec.architectures.shape import EMBEDDING
from edgespec.architectures.table import ARCHITECTURES
from edgespec.files.gguf.records import GgufArray, GgufHeader, MetadataValue, TensorInfo

# Name prefixes in llama.cpp's projector files: image encoder, audio encoder, and projection to the text model.
_OTHER_SENSES = ("v.", "a.", "mm.")

_TABLES = ("tokens", "scores", "token_type")


def text_part(header: GgufHeader) -> GgufHeader:
    """The header with only the text model's tensors, and with the keys that llama.cpp's reader needs.

    Raises ModelFileError if the file changes while it is read.
    """
    aside = tuple(tensor for tensor in header.tensors if tensor.name.startswith(_OTHER_SENSES))
    if aside and len(aside) < len(header.tensors):
        text = tuple(tensor for tensor in header.tensors if not tensor.name.startswith(_OTHER_SENSES))
        header = replace(header, tensors=text, vision_tensors=aside)
    architecture = ARCHITECTURES.get(header.architecture)
    if architecture is None or architecture.completed is None:
        return header
    more = architecture.completed(header.metadata, is_multimodal=bool(header.vision_tensors))
    return header if more is None else _completed(header, more)


def _completed(header: GgufHeader, more: Mapping[str, Any]) -> GgufHeader:
    metadata = {**header.metadata, **more}
    rows = next((tensor for tensor in header.tensors if tensor.name == EMBEDDING), None)
    if rows is not None and len(rows.shape) > 1:
        for table in _TABLES:
            key = f"tokenizer.ggml.{table}"
            if key in metadata:
                metadata[key] = _cut(metadata[key], rows)
    return replace(header, metadata=MappingProxyType(metadata), completed=True)


def _cut(table: MetadataValue, embedding: TensorInfo) -> MetadataValue:
    """The table without image tokens, which have no row in the embedding."""
    rows = embedding.shape[1]
    if isinstance(table, tuple):
        return table[:rows]
    return table.first(rows) if isinstance(table, GgufArray) else table
