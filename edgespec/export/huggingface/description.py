"""What a tokenizer's GGUF says about a model that Optimum converts.

It may be of any architecture, so this is only what all of them have. Layers, heads of the cache and their length are
the graph's own and come from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgespec.errors import InvalidRequestError
from edgespec.export.huggingface.config import CONFIG, Value
from edgespec.export.packages import require
from edgespec.files.json_object import Fields, read_fields

_MOST_BYTES = 1 << 20  # real ones have a few kB
_MOST_POSITIONS, _MOST_WIDTH, _MOST_HEADS, _MOST_TOKENS = 2**31 - 1, 2**20, 2**14, 2**20

# The same number under the names that the classes of transformers give it.
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")

# Names by which llama.cpp knows an architecture, where they are not transformers' own.
_ARCHITECTURES: Mapping[str, str] = {
    "gemma3_text": "gemma3",
    "gpt_bigcode": "starcoder",
    "gpt_neox": "gptneox",
    "gptj": "gptj",
    "mistral": "llama",
    "mixtral": "llama",
    "cohere": "command-r",
    "phi": "phi2",
}


# Architectures whose graphs were compared with transformers' past their layers' window, across several forwards.
# Others are used up to its length only, where a window is no window.
_WINDOWS_TRACED = frozenset({"gemma3_text", "mistral"})


class CacheShape(Protocol):
    """What the graph itself says about its cache."""

    @property
    def block_count(self) -> int: ...
    @property
    def head_count_kv(self) -> int: ...
    @property
    def key_length(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderModel:
    """A model as its config.json states it. ``architecture`` is llama.cpp's name of it, by which it reads tokenizers.

    ``context_length`` is in tokens.
    """

    model_type: str
    architecture: str
    context_length: int
    vocabulary_size: int
    embedding_length: int
    head_count: int

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
        return {f"{self.architecture}.{name}": value for name, value in values.items()}


def describe_folder(folder: Path) -> FolderModel:
    """The model in ``folder`` by its config.json.

    Raises ModelFileError if that is missing or malformed, InvalidRequestError for a model that cannot be converted.
    """
    fields = read_fields(folder / CONFIG, _MOST_BYTES)
    model_type = fields.text("model_type")
    if not model_type:
        # transformers would guess one from the folder's path.
        raise InvalidRequestError(
            f"{fields.path} states no model_type, by which Optimum knows how to read a model",
            hint='write it there, as "model_type": "llama"',
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
    return FolderModel(
        model_type=model_type,
        architecture=_architecture(model_type),
        context_length=context_length,
        vocabulary_size=text.integer("vocab_size", 1, _MOST_TOKENS),
        embedding_length=_first(text, _WIDTHS, _MOST_WIDTH),
        head_count=_first(text, _HEADS, _MOST_HEADS),
    )


def _first(fields: Fields, names: tuple[str, ...], most: int) -> int:
    """The number under the first of these names that is there."""
    return fields.integer(next((name for name in names if fields.raw(name) is not None), names[0]), 1, most)


def _architecture(model_type: str) -> str:
    gguf = require("gguf")

    name = _ARCHITECTURES.get(model_type, model_type)
    # Of an architecture that it does not know llama.cpp would not even read the tokenizer.
    return name if name in gguf.MODEL_ARCH_NAMES.values() else "llama"
