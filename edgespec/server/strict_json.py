"""A request's body as JSON, read as hostile input."""

from __future__ import annotations

import json
import re
from typing import Any

from edgespec.files.checked import strict_json
from edgespec.server.errors import ApiError
from edgespec.text.plain import mended, plain
from edgespec.text.request_budget import RequestBudget

# Objects and lists within one another. Tool schemas nest about 10 deep; Python's parser recurses.
MOST_NESTING = 64
# What comes next: a text, the begin of an object or list, its end, or another value. A text without an end is matched
# too, and the end of the body: searching stays linear.
_NEXT = re.compile(
    rb'[\s,:]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|([\[{])|([\]}]|\Z)|[^\s",:\[\]{}]++)', re.DOTALL
)
_BEGIN, _END = 1, 2

# An object or list counts as this many values: the garbage collector walks through it, and no other thread runs then.
_OF_AN_OBJECT = 4

# What may be half of a surrogate pair in JSON.
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_body(raw: bytes, budget: RequestBudget) -> dict[str, Any]:
    """The JSON object in ``raw``. Raises ApiError with status 400, and what ``budget`` raises.

    Refused: text that is not UTF-8, names given twice, NaN and infinite numbers, more than ``MOST_NESTING`` levels,
    more names and values than the budget allows, where they are counted. A byte order mark is skipped. Half of a
    surrogate pair, which programs leave when they cut a text inside an emoji, is read as U+FFFD.
    """
    if not raw.strip():
        raise _invalid("the body is empty; it must be a JSON object")
    budget.read(len(raw))
    _check_size(raw, budget)
    try:
        document = strict_json(raw.decode("utf-8-sig"))
        if _ESCAPED_SURROGATE.search(raw):
            document = strict_json(mended(json.dumps(document, ensure_ascii=False)))
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise _invalid(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise _invalid("the body must be a JSON object")
    return document


def _check_size(raw: bytes, budget: RequestBudget) -> None:
    """Raise ApiError for JSON that nests too deeply or has too many names and values, before any of it is made."""
    depth = count = 0
    for found in _NEXT.finditer(raw):
        if found.lastindex == _END:
            depth -= 1
            continue
        count += 1
        if found.lastindex == _BEGIN:
            count += _OF_AN_OBJECT - 1
            depth += 1
            if depth > MOST_NESTING:
                raise _invalid(f"the JSON nests more than {MOST_NESTING} levels")
        if count > budget.values:
            raise _invalid(
                f"the JSON has more than {budget.values} names and values, the most for a context of "
                f"{budget.context_length} tokens (an object or list counts as {_OF_AN_OBJECT})"
            )
    budget.counted = count


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


def _invalid(message: str) -> ApiError:
    return ApiError(message, code="invalid_json")
