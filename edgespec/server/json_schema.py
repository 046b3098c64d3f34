"""JSON values held against JSON schemas: the keywords that the fields of requests use."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from edgespec.files.checked import Range

Schema: TypeAlias = Mapping[str, Any]
_Check: TypeAlias = Callable[[Any, Any], bool]

_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: _KINDS["number"](value) and (isinstance(value, int) or value.is_integer()),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, Mapping),
}


def fits(schema: Schema, value: Any) -> bool:
    """Whether the schema allows the value. An empty schema allows everything."""
    return all(check(schema[keyword], value) for keyword, check in _KEYWORDS.items() if keyword in schema)


def _only(kind: str, check: _Check) -> _Check:
    """A keyword that says something about values of one kind only."""
    return lambda stated, value: not _KINDS[kind](value) or check(stated, value)


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


_KEYWORDS: Mapping[str, _Check] = {
    "anyOf": lambda schemas, value: any(fits(each, value) for each in schemas),
    "oneOf": lambda schemas, value: sum(fits(each, value) for each in schemas) == 1,
    "const": _same,
    "enum": lambda values, value: any(_same(each, value) for each in values),
    "type": lambda kinds, value: any(_KINDS[kind](value) for kind in ([kinds] if isinstance(kinds, str) else kinds)),
    "minimum": _only("number", lambda least, value: value >= least),
    "maximum": _only("number", lambda most, value: value <= most),
    "minLength": _only("string", lambda least, value: len(value) >= least),
    "minItems": _only("array", lambda least, value: len(value) >= least),
    "maxItems": _only("array", lambda most, value: len(value) <= most),
    "items": _only("array", lambda schema, value: all(fits(schema, each) for each in value)),
    "maxProperties": _only("object", lambda most, value: len(value) <= most),
    "required": _only("object", lambda names, value: all(name in value for name in names)),
    "properties": _only(
        "object", lambda own, value: all(fits(own[name], each) for name, each in value.items() if name in own)
    ),
}


_WORDS = {
    "null": "",
    "boolean": "true or false",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "object": "an object",
}


def wanted(schema: Schema) -> str:
    """What the schema allows, in words, such as "a number from 0 to 1". Null goes without saying."""
    if words := schema.get("description"):
        return str(words)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(filter(None, map(wanted, choices))))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        return " or ".join(json.dumps(each) for each in values if each is not None)
    if members := schema.get("properties"):
        return "{" + ", ".join(f"{json.dumps(name)}: {wanted(each)}" for name, each in members.items()) + "}"
    kinds = schema.get("type", "")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if "minimum" in schema:
        allowed = Range(schema["minimum"], schema.get("maximum", math.inf))
        return allowed.wanted("a whole number" if kind == "integer" else "a number")
    least, most = schema.get("minItems"), schema.get("maxItems", schema.get("maxProperties"))
    if least and most:
        size = f" of {least} to {most}"
    else:
        size = f" of at least {least}" if least else f" of at most {most}" if most else ""
    if kind == "array" and schema.get("items", {}).get("type") == "string":
        size = f"{size or ' of'} texts"
    return _WORDS.get(kind, "anything") + size
