"""A model's metadata, by llama.cpp's keys, each value checked when it is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from edgespec.errors import ModelFileError


class UnsupportedError(Exception):
    """Why edgespec does not compute this model, in a few words."""


@runtime_checkable
class _LongArray(Protocol):
    """An array that was left in the file."""

    def values(self) -> Iterator[object]: ...


class Facts:
    """A model's metadata, each value checked when it is read, and the shapes of its tensors by name.

    Keys are given without the architecture's name. A shape has its fastest dimension first, as in GGUF.
    """

    def __init__(
        self, path: Path, architecture: str, values: Mapping[str, object], tensors: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.path, self.tensors = path, tensors
        self._architecture, self._values = architecture, values
        self._asked = set[str]()

    def wrong(self, reason: str) -> ModelFileError:
        """The error that the file contradicts itself."""
        return ModelFileError(self.path, reason)

    def value(self, key: str) -> object:
        """The value, with an array as a tuple; None if the file does not state it."""
        self._asked.add(key)
        value = self._values.get(f"{self._architecture}.{key}")
        return tuple(value.values()) if isinstance(value, _LongArray) else value

    def never_asked(self, keys: Iterable[str]) -> str | None:
        """The first of these keys that the file states, as more than nothing, and that was never read."""
        return next((key for key in keys if key not in self._asked and self.value(key)), None)

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        """A whole number, which may be stated for each layer if all layers have the same. Without a default it is
        needed. Raises UnsupportedError if layers differ, ModelFileError."""
        value = self._stated(key, default)
        if isinstance(value, tuple):
            if len(value) != self.integer("block_count"):
                raise self.wrong(f"it states {key} for {len(value)} layers, but has another number of layers")
            if len(set(value)) != 1:
                raise UnsupportedError(f"its layers differ in their {key}")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(f"its {key} is {value!r:.40}: a whole number of at least {least} is needed")
        return value

    def integers(self, key: str, default: int | None = None, *, least: int = 0) -> tuple[int, ...]:
        """A whole number for each layer, which may be stated once. Raises ModelFileError."""
        count, value = self.integer("block_count"), self._stated(key, default)
        if isinstance(value, tuple) and len(value) == count:
            each = (Facts(self.path, self._architecture, {f"{self._architecture}.{key}": one}, {}) for one in value)
            return tuple(one.integer(key, least=least) for one in each)
        return (self.integer(key, default, least=least),) * count

    def number(self, key: str, default: float | None = None, *, within: tuple[float, float] | None = None) -> float:
        """A positive number, between those of ``within`` if given. Without a default it is needed. Raises
        ModelFileError.
        """
        value = self._stated(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(f"its {key} is {value!r:.40}: a positive number is needed")
        if within is not None and not within[0] <= value <= within[1]:
            raise self.wrong(f"its {key} is {value!r:.40}: a number from {within[0]:g} to {within[1]:g} is needed")
        return float(value)

    def _stated(self, key: str, default: float | None) -> object:
        value = self.value(key)
        if value is None and default is None:
            raise self.wrong(f"it does not state {self._architecture}.{key}")
        return default if value is None else value
