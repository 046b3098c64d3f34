"""Gemma 4 with its assistant: tiny pairs of files, and the assistant's published computation in double precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.files.gguf.header import read_header
from edgespec.runtimes.native.sequence import NativeSequence
from tests.support.native_models import ASSISTANT, SHARING
from tests.support.tiny_gguf import write_tiny_gguf

__all__ = ["Assistant", "Pair", "agreeing_pair", "written_pair"]

Doubles = NDArray[np.float64]
Pair = tuple[Path, Path]
"""The files of a target and of its assistant."""

_TILE = 16


def written_pair(folder: Path, **settings: Any) -> Pair:
    """A target whose last layers share caches, and an assistant half as wide."""
    target = write_tiny_gguf(folder / "target.gguf", **{**SHARING, "width": 128, **settings})
    return target, write_tiny_gguf(folder / "assistant.gguf", **{**ASSISTANT, "seed": 1, **settings})


def agreeing_pair(folder: Path, drafter_context: int = 2048) -> Pair:
    """The same, as wide, whose assistant mostly drafts what the target chooses: both nearly look up a token."""
    target = write_tiny_gguf(folder / "agreeing.gguf", **{**SHARING, "width": 128})
    own = {**ASSISTANT, "width": 128, "context_length": drafter_context}
    assistant = write_tiny_gguf(folder / "its-assistant.gguf", **own)
    for path in (target, assistant):
        signs = np.where(np.random.default_rng(5).random(128) < 0.5, -1.0, 1.0).astype("<f4")
        with path.open("r+b") as file:
            for tensor in read_header(path).tensors:
                weights = np.fromfile(path, "<f4", tensor.elements, offset=tensor.offset)
                if ".post_" in tensor.name:
                    weights *= 0.05
                elif tensor.name == "output_norm.weight":
                    weights[:] = signs  # else a token's likeliest successor would be itself
                elif tensor.name == "nextn.pre_projection.weight":
                    weights[:] = np.eye(tensor.shape[1], tensor.shape[0], dtype="<f4").ravel()
                file.seek(tensor.offset)
                file.write(weights.tobytes())
    return target, assistant


def _normed(x: Doubles, weight: Doubles) -> Doubles:
    scale: Doubles = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)
    return x * scale * weight


def _gelu(x: Doubles) -> Doubles:
    joined: Doubles = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return joined


@dataclass(frozen=True)
class _File:
    """Every tensor and number of a file, as gguf-py reads them."""

    path: Path
    reader: gguf.GGUFReader = field(init=False)
    tensors: Mapping[str, Doubles] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reader", gguf.GGUFReader(str(self.path)))
        read = {
            each.name: gguf.dequantize(each.data, each.tensor_type).astype(np.float64) for each in self.reader.tensors
        }
        object.__setattr__(self, "tensors", read)

    def number(self, key: str) -> Any:
        architecture = self.reader.fields["general.architecture"].contents()
        return self.reader.fields[f"{architecture}.{key}"].contents()


class Assistant:
    """llama.cpp's gemma4-assistant: each token of a draft at one position, by the target's keys and values."""

    def __init__(self, target: Path, assistant: Path) -> None:
        self._target, self._own = _File(target), _File(assistant)

    def _caches(self, sequence: NativeSequence) -> dict[bool, tuple[Doubles, Doubles]]:
        """Keys and values (positions, heads, length) of the last layer with a window, and of the last one without.

        The Sequence gives a cache's parts in another order for files: a test may look into it.
        """
        windowed = self._target.number("attention.sliding_window_pattern")
        heads = self._target.number("attention.head_count_kv")
        own = len(heads) - self._target.number("attention.shared_kv_layers")
        lengths = {kind: self._target.number(f"attention.key_length{'_swa' * kind}") for kind in (False, True)}
        cache, count, found = sequence._native, sequence.length, {}
        positions = -(-count // _TILE) * _TILE

        def read(number: int, length: int) -> Doubles:
            return cache._read_head(number, 0, count, positions * length * 2).view(np.float16).astype(np.float64)

        for layer in range(own):
            length, numbers = lengths[bool(windowed[layer])], range(sum(heads[:layer]), sum(heads[: layer + 1]))
            keys = np.stack([read(number, length).reshape(-1, length, _TILE) for number in numbers])
            values = np.stack([read(number + sum(heads[:own]), length).reshape(-1, length) for number in numbers])
            found[bool(windowed[layer])] = (
                keys.transpose(1, 3, 0, 2).reshape(positions, -1, length),
                values.transpose(1, 0, 2),
            )
        return found

    def _turned(self, heads: Doubles, position: int, *, windowed: bool) -> Doubles:
        length, half = heads.shape[-1], heads.shape[-1] // 2
        base = self._own.number("rope.freq_base_swa" if windowed else "rope.freq_base")
        angles = position * base ** (-np.arange(0, length, 2) / length)
        if not windowed:
            angles /= self._own.tensors["rope_freqs.weight"]
        x, y = heads[..., :half], heads[..., half:]
        return np.concatenate(
            [x * np.cos(angles) - y * np.sin(angles), x * np.sin(angles) + y * np.cos(angles)], axis=-1
        )

    def _layer(
        self, number: int, x: Doubles, position: int, caches: Mapping[bool, tuple[Doubles, Doubles]]
    ) -> Doubles:
        def of(name: str) -> Doubles:
            return self._own.tensors[f"blk.{number}.{name}.weight"]

        windowed = bool(self._own.number("attention.sliding_window_pattern")[number])
        keys, values = caches[windowed]
        first = max(0, position + 1 - self._own.number("attention.sliding_window")) if windowed else 0
        heads = self._own.number("attention.head_count")
        query = (_normed(x, of("attn_norm")) @ of("attn_q").T).reshape(heads, -1)
        query = self._turned(_normed(query, of("attn_q_norm")), position, windowed=windowed)
        sharing = heads // keys.shape[1]
        seen = [np.repeat(each[first:position], sharing, axis=1) for each in (keys, values)]
        scores = np.einsum("hd,khd->hk", query, seen[0])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hk,khd->hd", weights, seen[1]).ravel() @ of("attn_output").T
        x = x + _normed(mixed, of("post_attention_norm"))
        fed = _normed(x, of("ffn_norm"))
        fed = (_gelu(fed @ of("ffn_gate").T) * (fed @ of("ffn_up").T)) @ of("ffn_down").T
        scaled: Doubles = (x + _normed(fed, of("post_ffw_norm"))) * of("layer_output_scale")
        return scaled

    def draft(self, sequence: NativeSequence, token: int, count: int) -> tuple[list[int], list[Doubles]]:
        """The ``count`` likeliest tokens behind a text, with their scores. The target's Sequence has read the text
        but for its last ``token``."""
        position, caches = sequence.length, self._caches(sequence)
        row = sequence.keep_features().row(position - 1)
        assert row is not None
        hidden, embedding = row.astype(np.float64), self._target.tensors["token_embd.weight"]
        drafted, found = list[int](), list[Doubles]()
        for _ in range(count):
            pair = np.concatenate([embedding[token] * np.sqrt(embedding.shape[1]), hidden])
            x = self._own.tensors["nextn.pre_projection.weight"] @ pair
            for number in range(self._own.number("block_count")):
                x = self._layer(number, x, position, caches)
            x = _normed(x, self._own.tensors["output_norm.weight"])
            hidden = self._own.tensors["nextn.post_projection.weight"] @ x
            found.append(self._own.tensors["token_embd.weight"] @ x)
            drafted.append(token := int(found[-1].argmax()))
        return drafted, found
