"""What a tool's parameter may be by its JSON schema, and the JSON of a value that a model wrote as plain text.

Formats with marks around each value (Qwen3-Coder's) carry no types: ``90210`` is a number for one tool and a postal
code for another. Where a string is allowed the text itself is the value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any
from urllib.parse import unquote

from edgespec.text.conversation.literals import BLANKS, PYTHON, to_json

# Schemas within schemas, references included. A request's JSON nests 48 deep; real tools have few references. A step
# takes three of Python's 1 000 frames.
_DEEPEST = 64

_OF_TEXTS = ("pattern", "format", "minLength", "maxLength")
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
# Python's and Google's names of types, in schemas that were not written as JSON Schema.
_NAMES = {
    "int": "integer", "float": "number", "double": "number",
    "str": "string", "text": "string", "bool": "boolean", "list": "array", "dict": "object", "none": "null",
}  # fmt: skip
# The constants as JSON and Python write them: templates of these models show Python's.
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a schema allows: all values of the ``types``, and these ``members``, as JSON in its shortest form."""

    types: frozenset[str]
    members: frozenset[str] = frozenset()

    def __or__(self, other: Allowed) -> Allowed:
        return Allowed(self.types | other.types, self.members | other.members)

    def __and__(self, other: Allowed) -> Allowed:
        members = {own for own in self.members if other.has(own)} | {own for own in other.members if self.has(own)}
        return Allowed(self.types & other.types, frozenset(members))

    def has(self, value: str) -> bool:
        """Whether it allows this value, which is given as JSON in its shortest form."""
        return value in self.members or _type_of(json.loads(value)) in self.types

    @property
    def has_strings(self) -> bool:
        return "string" in self.types or any(own.startswith('"') for own in self.members)


@dataclass(frozen=True, slots=True)
class Listed:
    """The parameters that a schema names, with their own schemas, and the ``required`` ones, all in its order.

    ``is_open``: it says that others may come too, or requires one that it does not describe.
    """

    properties: Mapping[str, Any]
    required: Sequence[str]
    is_open: bool


def json_type(name: str) -> str | None:
    """JSON Schema's name of a type; None for a type that is not known."""
    own = _NAMES.get(name.lower(), name.lower())
    return own if own in _TYPES else None


def listed(schema: Mapping[str, Any]) -> Listed:
    """The parameters in the schema of a tool's, an object, and in the schemas that it refers to or is made of."""
    return _Schemas(schema).listed()


def bound_of_texts(schema: Mapping[str, Any], own: Any) -> str | None:
    """A keyword in a parameter's ``own`` schema that not every text keeps, such as ``pattern``; None without one."""
    return _Schemas(schema).bound_of_texts(own)


def allowed(schema: Mapping[str, Any], parameter: str) -> Allowed | None:
    """What the schema of a tool's parameters, an object, says of one of them; None if it says nothing.

    The schema must be JSON, as ``check_tools`` returns it.
    """
    return _Schemas(schema).parameter(schema, parameter)


def referred(schema: Mapping[str, Any], reference: str) -> Any:
    """The part of a tool's schema that a reference in it leads to; None if there is none."""
    return _Schemas(schema).at(reference)


def as_json(text: str, own: Allowed | None) -> str:
    """The JSON of a value written as plain ``text``, as its schema allows it; numbers keep their digits."""
    quoted = json.dumps(text, ensure_ascii=False)
    if own is None:
        return _unmistakable(text) or quoted
    if "string" in own.types or quoted in own.members:
        return quoted
    word = _WORDS.get(text.strip().lower())
    if word is not None and own.has(word):
        return word
    found = _json(text)
    return quoted if found is None or (own.has_strings and not own.has(_shortest(json.loads(found)))) else found


def as_kind(text: str, kind: str) -> str:
    """The JSON of a value whose mark says its ``kind``: the name of a JSON type, or whether it is a string."""
    found = None if kind in ("string", "true") else _json(text)
    return json.dumps(text, ensure_ascii=False) if found is None else found


def _unmistakable(text: str) -> str | None:
    """The JSON in a text that may be a string too; None for a number that would be written differently, like 3.10."""
    found = _json(text)
    if found is None:
        return None
    value = json.loads(found)
    return found if _type_of(value) != "number" or str(value) == found else None


def _json(text: str) -> str | None:
    """The JSON in a text, blanks around it left out, that every reader takes; None if it is none.

    Some templates write lists and objects as Python does, and so do their models.
    """
    found = text.strip(BLANKS)
    if _is_json(found):
        return found
    found = to_json(found, PYTHON) if found.startswith(("[", "{")) else ""
    return found if _is_json(found) else None


def _is_json(text: str) -> bool:
    try:
        _shortest(json.loads(text)).encode()  # raises for half a surrogate pair
    except (ValueError, RecursionError):
        return False
    return True


def _shortest(value: Any) -> str:
    """Raises ValueError for NaN and infinite numbers, RecursionError."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False)


def _type_of(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


class _Schemas:
    """Reads the schemas of one tool. References lead to parts of the ``root``; each is followed once.

    The result is None for a schema that names no type and for one that leads to itself.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._looked_at = set[str]()
        self._known = dict[str, Allowed | None]()

    def parameter(self, schema: Any, name: str, depth: int = 0) -> Allowed | None:
        """What the schema of an object says of one of its parameters."""
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return None
        properties, others, target = (schema.get(key) for key in ("properties", "additionalProperties", "$ref"))
        if isinstance(properties, Mapping) and name in properties:
            return self.allowed(properties[name], depth)
        parts = [each for key in ("allOf", "anyOf", "oneOf") for each in _each(schema, key)]
        if isinstance(target, str) and target not in self._looked_at:
            self._looked_at.add(target)
            parts.append(self.at(target))
        told = _told(or_, [self.parameter(each, name, depth + 1) for each in parts])
        return self.allowed(others, depth) if told is None else told

    def listed(self) -> Listed:
        """What the root lists."""
        properties, required, is_open = dict[str, Any](), dict[str, None](), False
        settled = set[str]()  # those that no alternative alone lists
        waiting = [(self._root, True)]
        for schema, always in waiting:  # which grows
            if not isinstance(schema, Mapping):
                continue
            own, stated, target = (schema.get(key) for key in ("properties", "required", "$ref"))
            for key, each in own.items() if isinstance(own, Mapping) else ():
                if key not in properties or (always and key not in settled):
                    properties[key] = each
                elif key not in settled:
                    properties[key] = {"anyOf": [properties[key], each]}
                settled |= {key} if always else set()
            if always and isinstance(stated, list):
                required |= {key: None for key in stated if isinstance(key, str)}
            is_open = (
                is_open or schema.get("additionalProperties", False) is not False or "patternProperties" in schema
            )
            if isinstance(target, str) and target not in self._looked_at:
                self._looked_at.add(target)
                waiting.append((self.at(target), always))
            waiting += [(each, always) for each in _each(schema, "allOf")]
            waiting += [(each, False) for key in ("anyOf", "oneOf") for each in _each(schema, key)]
        known = [key for key in properties if key in required]
        return Listed(properties, known, is_open or len(known) < len(required))

    def bound_of_texts(self, own: Any) -> str | None:
        """A keyword that bounds texts in a schema, or in one that it refers to or is made of; None without one."""
        waiting = [own]
        for schema in waiting:  # which grows
            if not isinstance(schema, Mapping):
                continue
            if found := next((word for word in _OF_TEXTS if word in schema), None):
                return found
            if isinstance(target := schema.get("$ref"), str) and target not in self._looked_at:
                self._looked_at.add(target)
                waiting.append(self.at(target))
            waiting += [each for key in ("allOf", "anyOf", "oneOf") for each in _each(schema, key)]
        return None

    def allowed(self, schema: Any, depth: int) -> Allowed | None:
        """What the schema allows."""
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return None
        parts, target = [_own(schema)], schema.get("$ref")
        if isinstance(target, str):
            if target not in self._known:
                self._known[target] = None
                self._known[target] = self.allowed(self.at(target), depth + 1)
            parts.append(self._known[target])
        parts += [self.allowed(each, depth + 1) for each in _each(schema, "allOf")]
        for key in ("anyOf", "oneOf"):
            parts.append(_told(or_, [self.allowed(each, depth + 1) for each in _each(schema, key)]))
        own = _told(and_, parts)
        return own | Allowed(frozenset({"null"})) if own is not None and schema.get("nullable") is True else own

    def at(self, reference: str) -> Any:
        """The schema at a JSON pointer into the root; None, which says nothing, if there is none."""
        mark, *steps = unquote(reference).split("/")
        found: Any = self._root if mark == "#" else None
        for step in steps:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isdecimal() and int(step[:9]) < len(found):
                found = found[int(step[:9])]
            else:
                found = found.get(step) if isinstance(found, Mapping) else None
        return found


def _own(schema: Mapping[str, Any]) -> Allowed | None:
    """What ``type``, ``enum`` and ``const`` of a schema allow."""
    stated = schema.get("type")
    names = [each for each in (stated if isinstance(stated, list) else [stated]) if isinstance(each, str)]
    known = frozenset("number" if own == "integer" else own for own in map(json_type, names) if own is not None)
    members = [schema["enum"]] if isinstance(schema.get("enum"), list) else []
    members += [[schema["const"]]] if "const" in schema else []
    only = [Allowed(frozenset(), frozenset(map(_shortest, values))) for values in members]
    return _told(and_, [Allowed(known) if known else None, *only])


def _told(join: Callable[[Allowed, Allowed], Allowed], parts: Sequence[Allowed | None]) -> Allowed | None:
    """The parts that say something, joined."""
    told = [part for part in parts if part is not None]
    return reduce(join, told) if told else None


def _each(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The schemas under a key that holds a list."""
    found = schema.get(key)
    return found if isinstance(found, list) else []
