"""A request's body as JSON, read as hostile input."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from edgespec.server.errors import ApiError
from edgespec.text.plain import plain

# Objects and lists within one another. Tool schemas nest about 10 deep; Python's parser recurses.
MOST_NESTING = 64
# Objects and lists in all. A conversation of the most messages, each with ten parts, has half as many. Python parses
# 200 000 in a tenth of a second, in which no other answer is sent.
MOST_NESTED = 200_000

# Brackets, and the texts that may contain some. A text without an end is matched too: searching stays linear.
_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)

# What may be half of a surrogate pair in JSON, and one without its partner in text. No tokenizer takes it.
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``. Raises ApiError with status 400.

    Refused: text that is not UTF-8, names given twice, NaN and infinite numbers, more than ``MOST_NESTING`` levels or
    ``MOST_NESTED`` objects and lists. A byte order mark is skipped. Half of a surrogate pair, which programs leave
    when they cut a text inside an emoji, is read as U+FFFD.
    """
    if not raw.strip():
        raise _invalid("the body is empty; it must be a JSON object")
    depth = count = 0
    for found in _BRACKETS.finditer(raw):
        first = raw[found.start()]
        if first in b"[{":
            depth, count = depth + 1, count + 1
            if depth > MOST_NESTING:
                raise _invalid(f"the JSON nests more than {MOST_NESTING} levels")
            if count > MOST_NESTED:
                raise _invalid(f"the JSON has more than {MOST_NESTED} objects and lists")
        elif first in b"]}":
            depth -= 1
    try:
        document = _loaded(raw.decode("utf-8-sig"))
        if _ESCAPED_SURROGATE.search(raw):
            document = _loaded(_HALF.sub("\ufffd", json.dumps(document, ensure_ascii=False)))
    except ApiError:
        raise
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise _invalid("the body must be a JSON object")
    return document


def _loaded(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def check_text(text: str, param: str) -> str:
    """The text. Raises ApiError if it has a NUL, where C code ends texts."""
    if (at := text.find("\0")) >= 0:
        raise ApiError(f"{param} contains a NUL at character {at}", param=param, code="invalid_text")
    return text


def check_texts(value: Any, param: str) -> Any:
    """A copy of the JSON value, all of whose texts and names pass ``check_text``."""

    def visit(value: Any) -> None:
        for text in value if isinstance(value, dict) else [value]:
            if isinstance(text, str):
                check_text(text, param)

    return plain(value, param, MOST_NESTING, visit)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise _invalid(f"the JSON names {name[:64]!r} twice")
            seen.add(name)
    return found


def _no_constant(name: str) -> NoReturn:
    raise _invalid(f"the JSON has the number {name}, which JSON does not know")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _invalid(f"the number {digits[:32]} is too large")
    return number


def _invalid(message: str) -> ApiError:
    return ApiError(message, code="invalid_json")
