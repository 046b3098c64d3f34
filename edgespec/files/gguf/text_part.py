"""Selects the text model of a multimodal GGUF file and separates its vision and audio tensors.

Ollama keeps such models in one file, and writes some keys differently than llama.cpp reads them, or not at all. The
values filled in for gemma3 are the defaults of Ollama's reader (model/models/gemma3, and its compatibility layer for
llama.cpp, llama/compat).
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from edgespec.files.gguf.records import GgufArray, GgufHeader, MetadataValue, TensorInfo

# Name prefixes in llama.cpp's projector files: image encoder, audio encoder, and projection to the text model.
_OTHER_SENSES = ("v.", "a.", "mm.")

_TABLES = ("tokens", "scores", "token_type")
_EMBEDDING = "token_embd.weight"

# _OLD_KEYS: Ollama's names of gemma3's rotary bases. _DEFAULTS: values that Ollama's converter left out. From a
# context of _SCALED_FROM on, Google's models scale positions by 8 (config.json), also left out. Every _PERIOD-th
# layer is global; Ollama wrote the pattern as one bool per layer.
_OLD_KEYS = {"rope.freq_base": "rope.global.freq_base", "rope.freq_base_swa": "rope.local.freq_base"}
_DEFAULTS: dict[str, float] = {
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
}
_SCALED_FROM, _SCALE = 131072, 8.0
_PATTERN, _PERIOD = "gemma3.attention.sliding_window_pattern", 6


def text_part(header: GgufHeader) -> GgufHeader:
    """The header with only the text model's tensors, and with the keys that llama.cpp's reader needs.

    Raises ModelFileError if the file changes while it is read.
    """
    aside = tuple(tensor for tensor in header.tensors if tensor.name.startswith(_OTHER_SENSES))
    if aside and len(aside) < len(header.tensors):
        text = tuple(tensor for tensor in header.tensors if not tensor.name.startswith(_OTHER_SENSES))
        header = replace(header, tensors=text, vision_tensors=aside)
    return _of_ollama(header) if header.architecture == "gemma3" and _is_of_ollama(header) else header


def _is_of_ollama(header: GgufHeader) -> bool:
    named = ("rope.global.freq_base", "rope.local.freq_base", "mm.tokens_per_image")
    return bool(header.vision_tensors) or any(f"gemma3.{name}" in header.metadata for name in named)


def _of_ollama(header: GgufHeader) -> GgufHeader:
    metadata = dict(header.metadata)
    for key, old in _OLD_KEYS.items():
        if f"gemma3.{old}" in metadata:
            metadata.setdefault(f"gemma3.{key}", metadata[f"gemma3.{old}"])
    for key, value in _DEFAULTS.items():
        metadata.setdefault(f"gemma3.{key}", value)
    context = metadata.get("gemma3.context_length")
    if isinstance(context, int) and context >= _SCALED_FROM and "gemma3.rope.scaling.type" not in metadata:
        metadata["gemma3.rope.scaling.type"] = "linear"
        metadata.setdefault("gemma3.rope.scaling.factor", _SCALE)
    pattern = metadata.get(_PATTERN)
    if isinstance(pattern, tuple) and pattern == tuple(bool((i + 1) % _PERIOD) for i in range(len(pattern))):
        metadata[_PATTERN] = _PERIOD
    # Gemma adds no space before the text; llama.cpp's default for SentencePiece vocabularies adds one.
    metadata.setdefault("tokenizer.ggml.add_space_prefix", False)
    rows = next((tensor for tensor in header.tensors if tensor.name == _EMBEDDING), None)
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
