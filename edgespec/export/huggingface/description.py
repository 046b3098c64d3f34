"""Metadata for ``tokenizer.gguf`` of a model that Optimum converts.

The model may have any architecture, so the metadata holds only keys that all architectures share. Layers, key-value
heads and their length come from the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgespec.architectures.table import CLASSES, MODEL_TYPES, PLAIN
from edgespec.errors import InvalidRequestError
from edgespec.export.huggingface.config import CONFIG, Value, mask_token_of
from edgespec.export.packages import require
from edgespec.files.checked import Fields, read_fields
from edgespec.files.gguf.records import MASK_TOKEN_KEY

_MOST_BYTES = 1 << 20  # real files have a few kB
_MOST_POSITIONS, _MOST_WIDTH, _MOST_HEADS, _MOST_TOKENS = 2**31 - 1, 2**20, 2**14, 2**20

# Each tuple: the names of one number in different classes of transformers.
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")

# llama.cpp's names of other architectures, where they differ from transformers' names.
_OTHER_NAMES: Mapping[str, str] = {
    "gpt_bigcode": "starcoder",
    "gpt_neox": "gptneox",
    "gptj": "gptj",
    "cohere": "command-r",
    "phi": "phi2",
}


# Architectures whose graphs were compared with transformers beyond the sliding window, across several forwards.
# The context of other architectures is limited to the window's length, up to which a window has no effect.
_WINDOWS_TRACED = frozenset({"gemma3_text", "mistral"})


class CacheShape(Protocol):
    """The shape of the cache in the graph."""

    @property
    def block_count(self) -> int: ...
    @property
    def head_count_kv(self) -> int: ...
    @property
    def key_length(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderModel:
    """A model's facts from config.json. ``architecture`` is llama.cpp's name, needed to read the tokenizer.

    ``context_length`` is in tokens. ``mask_token_id`` is as in ModelConfig.
    """

    model_type: str
    architecture: str
    context_length: int
    vocabulary_size: int
    embedding_length: int
    head_count: int
    mask_token_id: int | None = None

    def metadata(self, cache: CacheShape) -> dict[str, Value]:
        """The GGUF keys of the architecture with their values."""
        values: dict[str, Value] = {
            "block_count": cache.block_count,
            "context_length": self.context_length,
            "embedding_length": self.embedding_length,
            "attention.head_count": self.head_count,
            "attention.head_count_kv": cache.head_count_kv,
            "attention.key_length": cache.key_length,
            "attention.value_length": cache.key_length,
            "vocab_size": self.vocabulary_size,
        }
        own: dict[str, Value] = {} if self.mask_token_id is None else {MASK_TOKEN_KEY: self.mask_token_id}
        return {f"{self.architecture}.{name}": value for name, value in values.items()} | own


def describe_folder(folder: Path) -> FolderModel:
    """Read the config.json in ``folder``.

    Raises ModelFileError if the file is missing or malformed, InvalidRequestError for a model that cannot be
    converted.
    """
    fields = read_fields(folder / CONFIG, _MOST_BYTES)
    model_type = fields.text("model_type")
    if not model_type:
        # Without a model_type transformers would guess one from the folder's path.
        raise InvalidRequestError(
            f"{fields.path} states no model_type, which Optimum needs",
            hint='add it, for example "model_type": "llama"',
        )
    if fields.has_object("quantization_config"):
        raise InvalidRequestError(
            f"the weights in {folder} are quantised already",
            hint="give the folder with the original weights; --quant quantises them",
        )
    text = fields.member("text_config") or fields
    context_length = _first(text, _POSITIONS, _MOST_POSITIONS)
    slides = text.raw("sliding_window") is not None and text.flag("use_sliding_window") is not False
    if slides and model_type not in _WINDOWS_TRACED:
        context_length = min(context_length, text.integer("sliding_window", 1, _MOST_POSITIONS))
    if (original := _short_factors_until(text)) is not None:
        context_length = min(context_length, original)
    vocabulary_size = text.integer("vocab_size", 1, _MOST_TOKENS)
    return FolderModel(
        model_type=model_type,
        architecture=_architecture(model_type),
        context_length=context_length,
        vocabulary_size=vocabulary_size,
        embedding_length=_first(text, _WIDTHS, _MOST_WIDTH),
        head_count=_first(text, _HEADS, _MOST_HEADS),
        mask_token_id=mask_token_of(fields, vocabulary_size),
    )


def _short_factors_until(text: Fields) -> int | None:
    """The longest text of a model with factors for short and for long ones: tracing a short text keeps the former."""
    name = "original_max_position_embeddings"
    for rope in (text.member(member) for member in ("rope_parameters", "rope_scaling") if text.has_object(member)):
        if rope is not None and (rope.text("rope_type") or rope.text("type")) in ("longrope", "su"):
            return (text if rope.raw(name) is None else rope).integer(name, 1, _MOST_POSITIONS)
    return None


def _first(fields: Fields, names: tuple[str, ...], most: int) -> int:
    """The number under the first of these names that is present."""
    return fields.integer(next((name for name in names if fields.raw(name) is not None), names[0]), 1, most)


def _architecture(model_type: str) -> str:
    gguf = require("gguf")

    if model_type in MODEL_TYPES:
        return CLASSES[MODEL_TYPES[model_type]].name
    name = _OTHER_NAMES.get(model_type, model_type)
    # llama.cpp reads no tokenizer of an unknown architecture.
    return name if name in gguf.MODEL_ARCH_NAMES.values() else PLAIN
