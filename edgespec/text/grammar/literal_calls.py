"""Grammars of arguments that are not JSON: as in Python, or with a mark on each side of a text.

Kept are names, required properties, types, enumerations and the ranges of numbers; what is within lists and objects,
and the patterns and lengths of texts, are free.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from edgespec.text.conversation.argument_values import Allowed, Listed, allowed, json_type
from edgespec.text.conversation.literals import Syntax
from edgespec.text.grammar.form import lark_text

_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Keywords that allow and refuse nothing.
_ABOUT = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
_OF_OBJECT = ("type", "properties", "required", "additionalProperties", "$schema", "$id", "$defs", "definitions")


def other_names(known: Iterable[str]) -> str:
    """A terminal of Lark for the names of parameters that are not the ``known`` ones."""
    named = " | ".join(map(lark_text, known))
    return "/[A-Za-z_][A-Za-z0-9_.:-]{0,63}/" + (f" & ~({named})" if named else "")


def not_kept(schema: Mapping[str, Any]) -> str | None:
    """A keyword in a tool's parameters that ``LiteralArguments`` may not keep, and whose it is; None without one."""
    properties = schema.get("properties", {})
    if found := next((word for word in schema if word not in (*_ABOUT, *_OF_OBJECT)), None):
        return found[:40]
    if not all(isinstance(each, str) and each in properties for each in _listed(schema, "required")):
        return "required"
    found_in = ((_not_kept(own, alone=True), key) for key, own in properties.items())
    return next((f"{found} of {key!r:.60}" for found, key in found_in if found), None)


def _not_kept(own: Any, *, alone: bool) -> str | None:
    """As ``not_kept``, of one parameter; not ``alone``: of one of the schemas that it may have."""
    if not isinstance(own, Mapping):
        return None if own is True else "false"
    known = ("type", "enum", "const", "anyOf", *_RANGES, *_ABOUT)
    if found := next((word for word in own if word not in known), None):
        return f"{found:.40}"
    types = [json_type(each) if isinstance(each, str) else None for each in _listed(own, "type")]
    if None in types:
        return "type"
    members = [*_listed(own, "enum"), *([own["const"]] if "const" in own else [])]
    if any(isinstance(each, list | dict) for each in members) or not isinstance(own.get("enum", []), list):
        return "enum"
    if not alone or len(types) != 1 or members or "anyOf" in own:
        if found := next((word for word in _RANGES if word in own), None):
            return found
        if "integer" in types and not members:
            return "integer"
    return next(filter(None, (_not_kept(each, alone=False) for each in _listed(own, "anyOf"))), None)


def _listed(schema: Mapping[str, Any], word: str) -> list[Any]:
    found = schema.get(word, [])
    return found if isinstance(found, list) else [found]


class LiteralArguments:
    """The rules of arguments in a ``syntax``, ``ordered`` as in the schema or not. ``mark`` gives a mark in Lark."""

    def __init__(self, syntax: Syntax, mark: Callable[[str], str], *, ordered: bool) -> None:
        self._ordered = ordered
        self._syntax = syntax
        self._python = syntax.is_python
        self._mark = mark
        (*_, self._quote) = syntax.quotes
        self._between = '", "' if self._python else '","'
        self._sign = '"="' if self._python else '":"'

    def shared(self) -> Iterator[str]:
        """The rules of values of each type."""
        if self._python:
            yield r"literal_text: /'([^'\\\n]|\\.)*'/ | /\"([^\"\\\n]|\\.)*\"/"
            member = 'literal_text ": " literal_value'
        else:
            yield f"literal_text: {self._mark(self._quote)} {self._rest}"
            if not self._mark(self._quote).startswith("<["):
                yield f"literal_rest[suffix={lark_text(self._quote)}]: /(?s:.*)/"
            member = r'/[^\s{}\[\]:,<>]+/ ":" literal_value'
        yield f"literal_constant: {' | '.join(map(lark_text, self._syntax.constants))}"
        items, pairs = (f"({each} ({self._between} {each})*)?" for each in ("literal_value", f"({member})"))
        # A longer exponent may make a number that no reader holds.
        yield r"literal_number: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?/"
        yield f'literal_list: "[" {items} "]"'
        yield f'literal_object: "{{" {pairs} "}}"'
        yield "literal_value: literal_text | literal_number | literal_constant | literal_list | literal_object"

    @property
    def _rest(self) -> str:
        mark = self._mark(self._quote)
        return f"/(?s:.*)/ {mark}" if mark.startswith("<[") else "literal_rest"

    def rules(self, name: str, schema: Mapping[str, Any], parameters: Listed) -> Iterator[str]:
        """The rule ``name`` of the parameters of a schema, with commas between them."""
        keys, required = list(parameters.properties), parameters.required
        for place, key in enumerate(keys):
            value = self._value(allowed(schema, key), parameters.properties[key])
            yield f"{name}_item{place}: {lark_text(key)} {self._sign} ({value})"
        items = {key: f"{name}_item{place}" for place, key in enumerate(keys)}
        if not self._ordered:
            free = [item for key, item in items.items() if key not in required]
            if parameters.is_open:
                yield f"OTHER_{name.upper()}: {other_names(keys)}"
                yield f"{name}_other: OTHER_{name.upper()} {self._sign} literal_value"
                free.append(f"{name}_other")
            yield f"{name}: {self._in_any_order([items[key] for key in required], free)}"
            return
        yield f"{name}: {name}_0"
        for place, key in enumerate(keys):
            first, more = f"{name}_item{place} {name}_more{place + 1}", f"{name}_more{place + 1}"
            optional = key not in required
            yield f"{name}_{place}: {first}" + (f" | {name}_{place + 1}" if optional else "")
            yield f"{name}_more{place}: {self._between} {first}" + (f" | {more}" if optional else "")
        yield f'{name}_{len(keys)}: ""'
        yield f'{name}_more{len(keys)}: ""'

    def _in_any_order(self, required: Sequence[str], free: Sequence[str]) -> str:
        """The required parameters in their order, and the free ones anywhere between them."""
        others = f"({' | '.join(free)})"
        if not free:
            return f" {self._between} ".join(required) or '""'
        if not required:
            return f"({others} ({self._between} {others})*)?"
        own = (f"{item} ({self._between} {others})*" for item in required)
        return f"({others} {self._between})* " + f" {self._between} ".join(own)

    def _value(self, may: Allowed | None, own: Any) -> str:
        if may is None:
            return "literal_value"
        found = [self._literal(json.loads(each)) for each in sorted(may.members)]
        for kind in sorted(may.types):
            if kind == "number" and len(may.types) == 1 and isinstance(own, dict) and "$ref" not in own:
                bounds = {word: own[word] for word in ("type", *_RANGES) if word in own}
                found.append("%json " + json.dumps({"type": "number", **bounds}))
            else:
                found.append(self._type(kind))
        return " | ".join(found) or "literal_value"

    def _type(self, kind: str) -> str:
        constants = {"boolean": (True, False), "null": (None,)}
        if kind in constants:
            return " | ".join(map(self._literal, constants[kind]))
        return {
            "string": "literal_text",
            "number": "literal_number",
            "array": "literal_list",
            "object": "literal_object",
        }[kind]

    def _literal(self, value: Any) -> str:
        """A value of an enumeration as models write it."""
        if isinstance(value, str):
            return lark_text(self._syntax.text(value)) if self._python else self._marked(value)
        if value is None or isinstance(value, bool):
            return lark_text(self._syntax.constant(value))
        if isinstance(value, int | float):
            return lark_text(json.dumps(value))
        return "literal_list" if isinstance(value, list) else "literal_object"

    def _marked(self, text: str) -> str:
        mark = self._mark(self._quote)
        return f"{mark} {lark_text(text)} {mark}" if text else f"{mark} {mark}"
