"""Plain records of a GGUF header. ``header.py`` reads them from a hostile file."""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from edgespec.errors import ModelFileError
from edgespec.files.checked import cannot_map

T = TypeVar("T")

# GGUF value types 0..12, as the format numbers them: name, struct format, bytes (strings and arrays have no size).
VALUE_TYPES: Mapping[int, tuple[str, str, int]] = {
    0: ("uint8", "B", 1),
    1: ("int8", "b", 1),
    2: ("uint16", "H", 2),
    3: ("int16", "h", 2),
    4: ("uint32", "I", 4),
    5: ("int32", "i", 4),
    6: ("float32", "f", 4),
    7: ("bool", "?", 1),
    8: ("string", "", 0),
    9: ("array", "", 0),
    10: ("uint64", "Q", 8),
    11: ("int64", "q", 8),
    12: ("float64", "d", 8),
}
_FORMATS = {name: (fmt, size) for name, fmt, size in VALUE_TYPES.values()}

# edgespec's key for the token that stands for a draft token not yet known, in a drafter that drafts all tokens in one
# forward. Masked language models state tokenizer.ggml.mask_token_id, which does not make them such drafters.
MASK_TOKEN_KEY = "edgespec.mask_token_id"
# The default template; with a dot and a name behind it, a further one.
CHAT_TEMPLATE = "tokenizer.chat_template"

# ggml tensor types that occur in files: name, elements per block, bytes per block, from ggml_type_name,
# ggml_blck_size and ggml_type_size of ggml 0.25.3. Not listed: 4, 5, 31-33 and 36-38, which ggml removed, and
# 9 (Q8_1) and 15 (Q8_K), which exist only during a computation.
GGML_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}

# Types of weights that were never quantised.
PLAIN_TYPES = frozenset({"F32", "F16", "BF16"})

# Tables of which a forward reads only one row per token.
_INTERVAL = "full_attention_interval"  # of which the last layer has attention; 4 in llama.cpp if not stated
_LOOKUP_TABLES = frozenset({"token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight"})

_WINDOW_PATTERN = "attention.sliding_window_pattern"  # one bool for each layer, or a period

# In the names of tensors that hold a matrix for each expert.
_EXPERTS = "_exps."

_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
}

_CHUNK_BYTES = 1 << 20  # 1 MiB keeps memory flat; hashing larger pieces is not faster

Scalar: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True)
class GgufArray:
    """A long array left in the file: ``count`` elements in ``byte_count`` bytes from absolute ``offset`` on.

    Every use reads the array again, and raises ModelFileError if the file has changed and no longer holds the array.
    """

    path: Path
    element_type: str
    count: int
    offset: int
    byte_count: int

    def first(self, count: int) -> GgufArray:
        """The array of the first ``count`` elements."""
        if count >= self.count:
            return self
        if self.element_type != "string":
            byte_count = count * _FORMATS[self.element_type][1]
        else:
            byte_count = sum(8 + len(raw) for raw in islice(self.raw_strings(), count))
        return replace(self, count=count, byte_count=byte_count)

    def sha256(self) -> str:
        """Hex digest of the raw bytes: equal digests mean equal arrays (strings are stored with their lengths)."""
        digest = hashlib.sha256()
        with self._map() as data:
            end = self.offset + self.byte_count
            for start in range(self.offset, end, _CHUNK_BYTES):
                digest.update(data[start : min(start + _CHUNK_BYTES, end)])
        return digest.hexdigest()

    def raw_strings(self) -> Iterator[bytes]:
        """Every string as its stored bytes. Raises TypeError if the elements are not strings."""
        if self.element_type != "string":
            raise TypeError(f"an array of {self.element_type}, not of strings")
        length_at = struct.Struct("<Q").unpack_from
        with self._map() as data:
            position, end = self.offset, self.offset + self.byte_count
            for _ in range(self.count):
                length = length_at(data, position)[0] if position + 8 <= end else end
                if position + 8 + length > end:
                    raise ModelFileError(self.path, "the file changed after its header was read", offset=position)
                yield data[position + 8 : position + 8 + length]
                position += 8 + length

    def strings(self) -> Iterator[str]:
        """Every string as text; bytes that are not UTF-8 appear as ``\\xNN``."""
        for raw in self.raw_strings():
            yield raw.decode("utf-8", "backslashreplace")

    def values(self) -> Iterator[Scalar]:
        """Every element as a Python value."""
        if self.element_type == "string":
            yield from self.strings()
            return
        letter, size = _FORMATS[self.element_type]
        per_chunk = _CHUNK_BYTES // size
        with self._map() as data:
            for first in range(0, self.count, per_chunk):
                length = min(per_chunk, self.count - first)
                yield from struct.unpack_from(f"<{length}{letter}", data, self.offset + first * size)

    def _map(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise cannot_map(self.path, error) from error
        if len(data) < self.offset + self.byte_count:
            data.close()
            raise ModelFileError(self.path, "the file became shorter after its header was read")
        return data


MetadataValue: TypeAlias = Scalar | tuple[Scalar, ...] | GgufArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``shape`` fastest dimension first, sizes in bytes.

    ``offset`` is absolute in the file, for a split model in its parts joined in order. No tensor spans two parts.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    byte_count: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def some_rows(self, first: int, count: int) -> TensorInfo:
        """``count`` rows of a matrix, or elements of a vector, from ``first`` on, as a tensor: they follow one
        another in the file. The name says which, unless they are all. Raises ValueError for rows that do not exist.
        """
        shape = self.shape
        while len(shape) > 1 and shape[-1] == 1:  # some writers pad shapes with ones
            shape = shape[:-1]
        if not 0 <= first < first + count <= shape[-1]:
            raise ValueError(f"tensor {self.name} has no rows {first}..{first + count - 1} among {shape[-1]}")
        row_bytes = self.byte_count // shape[-1]
        return replace(
            self,
            name=self.name if count == shape[-1] else f"{self.name}[{first}:{first + count}]",
            shape=(*shape[:-1], count),
            offset=self.offset + first * row_bytes,
            byte_count=count * row_bytes,
        )


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file of a split model: ``byte_count`` bytes, at offset ``start`` of all parts joined in order."""

    path: Path
    start: int
    byte_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """A checked GGUF header.

    ``metadata`` holds scalars and arrays of up to 64 elements as Python values, longer arrays as ``GgufArray``.
    ``tensors`` are those of the text model, ``vision_tensors`` those for images and sound. ``completed``: some keys
    or names are not the file's, since Ollama's converter left them out or has others. ``split`` lists the parts of a
    split model in order and is empty for a model in one file. For a split model ``path`` and ``metadata`` are of the
    first part and ``file_bytes`` is the total size. The properties raise ModelFileError if the file lacks a needed
    key.
    """

    path: Path
    file_bytes: int
    version: int
    architecture: str
    alignment: int
    metadata: Mapping[str, MetadataValue]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    split: tuple[FilePart, ...] = ()
    vision_tensors: tuple[TensorInfo, ...] = ()
    completed: bool = False
    _made: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, what: str, make: Callable[[], T]) -> T:
        """What ``make`` makes of this header, made by the first caller that names it ``what``."""
        if what not in self._made:
            self._made[what] = make()
        made: T = self._made[what]
        return made

    @property
    def parts(self) -> tuple[FilePart, ...]:
        """The files of the model, in order."""
        return self.split or (FilePart(self.path, 0, self.file_bytes),)

    def values(self, key: str) -> Iterator[Scalar]:
        """The elements of the array ``key``, in memory or in the file; empty if there is no such array."""
        value = self.metadata.get(key, ())
        if isinstance(value, GgufArray):
            return value.values()
        return iter(value if isinstance(value, tuple) else ())

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens in the tokenizer's table."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, GgufArray):
            return tokens.count
        if isinstance(tokens, tuple):
            return len(tokens)
        raise ModelFileError(self.path, "it holds no vocabulary (no tokenizer.ggml.tokens)")

    @property
    def context_length(self) -> int:
        """The context length in tokens that the model was trained for."""
        return self._count("context_length")

    @property
    def block_count(self) -> int:
        return self._count("block_count")

    @property
    def embedding_length(self) -> int:
        return self._count("embedding_length")

    @property
    def hidden_length(self) -> int:
        """Elements of the target's rows that a drafter reads: of a layer of the model, or of a model for itself."""
        return self._optional("embedding_length_out") or self.embedding_length

    @property
    def head_count(self) -> int | tuple[int, ...]:
        """Attention heads: one number, or one per layer (0 in layers without attention)."""
        return self._counts("attention.head_count")

    @property
    def head_count_kv(self) -> int | tuple[int, ...]:
        """Key-value heads: one number, or one per layer; if not stated, the number of attention heads."""
        if self._key("attention.head_count_kv") in self.metadata:
            return self._counts("attention.head_count_kv")
        return self.head_count

    @property
    def key_length(self) -> int:
        """Elements of one head's key; if not stated, the embedding length divided by the heads."""
        return self._head_length("attention.key_length")

    @property
    def value_length(self) -> int:
        """Elements of one head's value; if not stated, the embedding length divided by the heads."""
        return self._head_length("attention.value_length")

    @property
    def chat_template(self) -> str | None:
        template = self.metadata.get(CHAT_TEMPLATE)
        return template if isinstance(template, str) else None

    @property
    def named_templates(self) -> Mapping[str, str]:
        """Further chat templates by name, such as ``tool_use``."""
        prefix = f"{CHAT_TEMPLATE}."
        return {
            key.removeprefix(prefix): value
            for key, value in self.metadata.items()
            if key.startswith(prefix) and isinstance(value, str)
        }

    @property
    def mask_token_id(self) -> int | None:
        """The mask token of a drafter that drafts all tokens in one forward; None for any other model."""
        value = self.metadata.get(MASK_TOKEN_KEY)
        return value if isinstance(value, int) else None

    @property
    def sampling(self) -> Mapping[str, float]:
        """The sampling settings in the file (``general.sampling.*``), unchecked, by their names in Sampling."""
        stated = ((name, self.metadata.get(f"general.sampling.{key}")) for key, name in _SAMPLING_KEYS.items())
        return {
            name: value
            if isinstance(value, int)
            else float(f"{value:.7g}")  # the decimal number that the float32 was rounded from
            for name, value in stated
            if isinstance(value, int | float) and not isinstance(value, bool)
        }

    @property
    def parameter_count(self) -> int:
        """Elements of all tensors; a head tied to the embedding counts once."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.byte_count for tensor in self.tensors)

    @property
    def bytes_per_forward(self) -> int:
        """Bytes of weights that a forward of width 1 reads.

        Lookup tables such as the token embedding do not count, unless the embedding is also the output head. Of a
        mixture of experts, only the experts that one token uses count.
        """
        tied = not any(tensor.name == "output.weight" for tensor in self.tensors)
        return sum(
            self.bytes_read_of(tensor)
            for tensor in self.tensors
            if tensor.name not in _LOOKUP_TABLES or (tied and tensor.name == "token_embd.weight")
        )

    def bytes_read_of(self, tensor: TensorInfo) -> int:
        """Bytes of a tensor that a forward of width 1 reads: all, or those of the experts that a token uses."""
        used, count = self.experts
        return tensor.byte_count * used // count if count and _EXPERTS in tensor.name else tensor.byte_count

    @property
    def experts(self) -> tuple[int, int]:
        """How many experts of a layer a row uses, of how many; (0, 0) if it uses all, or there are none."""
        used, count = self._optional("expert_used_count"), self._optional("expert_count")
        return (used, count) if 0 < used < count else (0, 0)

    @property
    def expert_layers(self) -> int:
        """Layers whose feed-forward is a mixture of experts."""
        return sum(f"ffn_down{_EXPERTS}weight" in tensor.name for tensor in self.tensors)

    @property
    def expert_bytes_per_forward(self) -> int:
        """The part of ``bytes_per_forward`` that is experts'."""
        return sum(self.bytes_read_of(tensor) for tensor in self.tensors if _EXPERTS in tensor.name)

    @property
    def reads_target(self) -> bool:
        """Whether it is a drafter without keys, which reads its target's cache."""
        from edgespec.architectures.table import READERS  # here: help and completion need no architecture

        return self.architecture in READERS

    @property
    def drafting_layers(self) -> int:
        """Layers behind the others that only draft."""
        return self._optional("nextn_predict_layers")

    @property
    def attention_layers(self) -> int:
        """Layers with a cache of keys and values: all, but for gated delta layers and those that only draft."""
        layers, interval = self.block_count - self.drafting_layers, self._optional(_INTERVAL)
        if not self._optional("ssm.state_size"):
            return self.block_count
        recurrent = self.metadata.get(self._key("attention.recurrent_layers"))
        recurrent = tuple(recurrent.values()) if isinstance(recurrent, GgufArray) else recurrent
        if isinstance(recurrent, tuple):
            return max(1, layers - sum(map(bool, recurrent[:layers])))
        return max(1, layers // (interval or 4))

    def kv_bytes_per_token(self, bits_per_element: float) -> int:
        """Bytes of key-value cache per token, all layers, rounded up; 16 bits per element is llama.cpp's default.

        Layers with a sliding window count as full layers, so the result is an upper bound for such models. In Gemma 4
        the last layers may share the caches of earlier ones, and heads of layers with a window have another length.
        """
        heads, shared = self.head_count_kv, self._optional("attention.shared_kv_layers")
        if isinstance(heads, int):
            heads = (heads,) * max(0, self.attention_layers - shared)
        heads = heads[: max(0, self.block_count - shared)]
        if not any(heads):
            return 0
        whole = self.key_length + self.value_length
        windowed = [self._optional(f"attention.{part}_length_swa") for part in ("key", "value")]
        kinds = [bool(each) and all(windowed) for each in self.values(self._key(_WINDOW_PATTERN))]
        kinds += [False] * (len(heads) - len(kinds))
        elements = sum(count * (sum(windowed) if kind else whole) for count, kind in zip(heads, kinds, strict=False))
        return math.ceil(elements * bits_per_element / 8)

    def _key(self, suffix: str) -> str:
        return f"{self.architecture}.{suffix}"

    def _optional(self, suffix: str) -> int:
        value = self.metadata.get(self._key(suffix), 0)
        return value if isinstance(value, int) else 0

    def _count(self, suffix: str) -> int:
        value = self.metadata.get(self._key(suffix))
        if not isinstance(value, int):
            raise ModelFileError(self.path, f"it does not state {self._key(suffix)}")
        return value

    def _counts(self, suffix: str) -> int | tuple[int, ...]:
        value = self.metadata.get(self._key(suffix))
        if isinstance(value, GgufArray):
            value = tuple(value.values())
        if isinstance(value, tuple):
            return tuple(int(each) for each in value)
        return self._count(suffix)

    def _head_length(self, suffix: str) -> int:
        value = self.metadata.get(self._key(suffix))
        if isinstance(value, int):
            return value
        heads = self.head_count
        most = heads if isinstance(heads, int) else max(heads)
        if most == 0:
            raise ModelFileError(self.path, f"it states neither {self._key(suffix)} nor any attention head")
        return self.embedding_length // most
