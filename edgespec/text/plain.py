"""Copies JSON values of callers into Python's own types, and mends texts that were cut inside a character."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgespec.errors import InvalidRequestError

# Half of a surrogate pair, which programs leave when they cut a text inside an emoji. No tokenizer takes it.
_HALF = re.compile("[\ud800-\udfff]")


def mended(text: str) -> str:
    """The text with U+FFFD in place of each half of a surrogate pair."""
    return _HALF.sub("\ufffd", text)


def plain(value: Any, what: str, deepest: int, visit: Callable[[Any], object]) -> Any:
    """A copy of a JSON value: None, bool, int, float, str, list, and dict with names that are text.

    ``visit`` gets every value inside and the value itself, before its copy is made, and may raise. Raises
    InvalidRequestError, which calls the value ``what``, for other types and for more than ``deepest`` levels.
    """

    def copy(value: Any, depth: int) -> Any:
        if depth > deepest:
            raise InvalidRequestError(f"{what} nests more than {deepest} deep")
        if isinstance(value, Mapping) and not all(isinstance(name, str) for name in value):
            raise InvalidRequestError(f"{what} has a key that is not text")
        visit(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int | float):
            return int(value) if isinstance(value, int) else float(value)
        if isinstance(value, Mapping):
            return {str.__str__(name): copy(item, depth + 1) for name, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            return [copy(item, depth + 1) for item in value]
        raise InvalidRequestError(f"{what} holds {type(value).__name__} {value!r:.40}, which is not JSON")

    return copy(value, 0)
