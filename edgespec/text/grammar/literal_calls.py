"""Grammars of arguments that are not JSON: as in Python, or with a mark on each side of a text.

Kept are names, required properties, types, enumerations and the ranges of numbers, of strict tools also within lists
and objects; the patterns and lengths of texts are free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from edgespec.text.conversation.argument_values import Allowed, Listed, allowed, json_type, referred
from edgespec.text.conversation.literals import Syntax
from edgespec.text.grammar.form import lark_text

_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_PARTS = ("items", "properties", "required", "additionalProperties")
_OF_VALUE = ("type", "enum", "const", "anyOf", *_OF_PARTS)
# Schemas within schemas, as deep as the readers of ``argument_values`` go.
_DEEPEST = 64
# Keys of objects in values have no quotes in every format.
_KEY = re.compile(r"[^\s{}\[\]:,<>]+")
# Keywords that allow and refuse nothing.
ABOUT = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
_SIGNS = r"{}\[\]():,="
_OF_OBJECT = ("type", "properties", "required", "additionalProperties", "$schema", "$id", "$defs", "definitions")


def other_names(known: Iterable[str], signs: str = "") -> str:
    """A terminal of Lark for the names of parameters, in any letters, that are not the ``known`` ones.

    ``signs``: what they do not hold either, as in a regular expression.
    """
    named = " | ".join(map(lark_text, known))
    return rf"/[^\s<>\"'{signs}]{{1,64}}/" + (f" & ~({named})" if named else "")


def not_kept(schema: Mapping[str, Any]) -> str | None:
    """A keyword in a tool's parameters that ``LiteralArguments`` may not keep, and whose it is; None without one."""
    properties = schema.get("properties", {})
    if found := next((word for word in schema if word not in (*ABOUT, *_OF_OBJECT)), None):
        return found[:40]
    if not all(isinstance(each, str) and each in properties for each in _listed(schema, "required")):
        return "required"
    kept = _Kept(schema)
    found_in = ((kept.word(own, ()), key) for key, own in properties.items())
    return next((f"{found:.40} of {key!r:.60}" for found, key in found_in if found), None)


class _Kept:
    """Looks for what cannot be kept in the schemas of one tool. References lead to parts of the ``root``."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._seen = set[str]()

    def word(self, own: Any, within: tuple[str, ...], *, alone: bool = True) -> str | None:
        """A keyword that cannot be kept in a schema ``within`` others, each a reference to it or empty.

        Not ``alone``: other keywords say what its value may be, too.
        """
        if not isinstance(own, Mapping):
            return None if own is True else "false"
        if len(within) > _DEEPEST:
            return "nesting"
        if "$ref" in own:
            return self._referred(own, within) if alone else "$ref"
        if found := next((word for word in own if word not in (*_OF_VALUE, *_RANGES, *ABOUT)), None):
            return str(found)
        types = [json_type(each) if isinstance(each, str) else None for each in _listed(own, "type")]
        if None in types:
            return "type"
        members = [*_listed(own, "enum"), *([own["const"]] if "const" in own else [])]
        if any(isinstance(each, list | dict) for each in members) or not isinstance(own.get("enum", []), list):
            return "enum"
        alone = alone and not members and not (types and "anyOf" in own)
        if not (alone and types):
            if found := next((word for word in own if word in (*_RANGES, *_OF_PARTS)), None):
                return str(found)
            if "integer" in types and not members:
                return "integer"
        return self._parts(own, within, alone=alone)

    def _referred(self, own: Mapping[str, Any], within: tuple[str, ...]) -> str | None:
        target = own["$ref"]
        if not isinstance(target, str) or target in within or any(word not in ("$ref", *ABOUT) for word in own):
            return "$ref"
        if target in self._seen:
            return None
        self._seen.add(target)
        found = referred(self._root, target)
        return self.word(found, (*within, target)) if isinstance(found, Mapping) else "$ref"

    def _parts(self, own: Mapping[str, Any], within: tuple[str, ...], *, alone: bool) -> str | None:
        properties = own.get("properties", {})
        if not isinstance(properties, Mapping) or not all(map(_KEY.fullmatch, properties)):
            return "properties"
        if not all(isinstance(each, str) and each in properties for each in _listed(own, "required")):
            return "required"
        if own.get("additionalProperties", False) is not False:
            return "additionalProperties"
        parts = [*properties.values(), *([own["items"]] if "items" in own else [])]
        words = [(each, True) for each in parts] + [(each, alone) for each in _listed(own, "anyOf")]
        return next(filter(None, (self.word(each, (*within, ""), alone=is_alone) for each, is_alone in words)), None)


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
        self.between = '", "' if self._python else '","'
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
            member = f'/{_KEY.pattern}/ ":" literal_value'
        yield f"literal_constant: {' | '.join(map(lark_text, self._syntax.constants))}"
        items, pairs = (f"({each} ({self.between} {each})*)?" for each in ("literal_value", f"({member})"))
        # A longer exponent may make a number that no reader holds.
        yield r"literal_number: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?/"
        yield f'literal_list: "[" {items} "]"'
        yield f'literal_object: "{{" {pairs} "}}"'
        yield "literal_value: literal_text | literal_number | literal_constant | literal_list | literal_object"

    @property
    def _rest(self) -> str:
        mark = self._mark(self._quote)
        return f"/(?s:.*)/ {mark}" if mark.startswith("<[") else "literal_rest"

    def rules(self, name: str, schema: Mapping[str, Any], parameters: Listed, *, strict: bool) -> Iterator[str]:
        """The rule ``name`` of the parameters of a schema, with commas between them.

        With ``strict`` all of the schema is kept: ``not_kept`` has found nothing in it.
        """
        keys, required = list(parameters.properties), parameters.required
        whole = _Whole(self, name, schema)
        for place, key in enumerate(keys):
            own = parameters.properties[key]
            value = whole.value(own) if strict else self.value(allowed(schema, key), own)
            yield f"{name}_item{place}: {lark_text(key)} {self._sign} ({value})"
        yield from whole.rules
        items = {key: f"{name}_item{place}" for place, key in enumerate(keys)}
        if not self._ordered:
            free = [item for key, item in items.items() if key not in required]
            if parameters.is_open:
                yield f"OTHER_{name.upper()}: {other_names(keys, _SIGNS)}"
                yield f"{name}_other: OTHER_{name.upper()} {self._sign} literal_value"
                free.append(f"{name}_other")
            yield f"{name}: {self._in_any_order([items[key] for key in required], free)}"
            return
        yield from self.in_order(name, [(item, key not in required) for key, item in items.items()])

    def in_order(self, name: str, items: Sequence[tuple[str, bool]]) -> Iterator[str]:
        """The rule ``name`` of items with commas between them, each with whether it may be left out."""
        yield f"{name}: {name}_0"
        for place, (item, optional) in enumerate(items):
            first, more = f"{item} {name}_more{place + 1}", f"{name}_more{place + 1}"
            yield f"{name}_{place}: {first}" + (f" | {name}_{place + 1}" if optional else "")
            yield f"{name}_more{place}: {self.between} {first}" + (f" | {more}" if optional else "")
        yield f'{name}_{len(items)}: ""'
        yield f'{name}_more{len(items)}: ""'

    def member(self, key: str, value: str) -> str:
        """A member of an object in a value."""
        return (
            f'{lark_text(self._syntax.text(key))} ": " {value}' if self._python else f'{lark_text(key)} ":" {value}'
        )

    def _in_any_order(self, required: Sequence[str], free: Sequence[str]) -> str:
        """The required parameters in their order, and the free ones anywhere between them."""
        others = f"({' | '.join(free)})"
        if not free:
            return f" {self.between} ".join(required) or '""'
        if not required:
            return f"({others} ({self.between} {others})*)?"
        own = (f"{item} ({self.between} {others})*" for item in required)
        return f"({others} {self.between})* " + f" {self.between} ".join(own)

    def value(self, may: Allowed | None, own: Any) -> str:
        if may is None:
            return "literal_value"
        found = [self._literal(json.loads(each)) for each in sorted(may.members)]
        for kind in sorted(may.types):
            if kind == "number" and len(may.types) == 1 and isinstance(own, dict) and "$ref" not in own:
                bounds = {word: own[word] for word in ("type", *_RANGES) if word in own}
                found.append("%json " + json.dumps({"type": "number", **bounds}))
            else:
                found.append(self.type(kind))
        return " | ".join(found) or "literal_value"

    def type(self, kind: str) -> str:
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


class _Whole:
    """All that the schemas of one tool say, in ``rules`` whose names begin with ``name``."""

    def __init__(self, literals: LiteralArguments, name: str, root: Mapping[str, Any]) -> None:
        self._literals, self._name, self._root = literals, name, root
        self._referred = dict[str, str]()
        self.rules = list[str]()

    def value(self, own: Any) -> str:
        """What a schema allows."""
        if not isinstance(own, Mapping):
            return "literal_value"
        if "$ref" in own:
            target = own["$ref"]
            if target not in self._referred:
                self._referred[target] = self._rule(self.value(referred(self._root, target)))
            return self._referred[target]
        types = _listed(own, "type")
        if "enum" in own or "const" in own or (bool(types) == ("anyOf" in own)):
            return self._literals.value(allowed({"properties": {"": own}}, ""), own)
        if "anyOf" in own:
            return " | ".join(map(self.value, own["anyOf"])) or "literal_value"
        return " | ".join(self._of_type(json_type(each), own) for each in types)

    def _of_type(self, kind: str | None, own: Mapping[str, Any]) -> str:
        if kind in ("number", "integer"):
            return self._literals.value(Allowed(frozenset({"number"})), {**own, "type": kind})
        if kind == "array" and "items" in own:
            item = self._rule(self.value(own["items"]))
            return f'"[" ({item} ({self._literals.between} {item})*)? "]"'
        if kind == "object" and ("properties" in own or "additionalProperties" in own):
            values = {key: self._rule(self.value(each)) for key, each in own.get("properties", {}).items()}
            required = _listed(own, "required")
            members = [(self._literals.member(key, value), key not in required) for key, value in values.items()]
            name = self._new_name
            self.rules += self._literals.in_order(name, members)
            return f'"{{" {name} "}}"'
        return self._literals.type(str(kind))

    @property
    def _new_name(self) -> str:
        return f"{self._name}_part{len(self.rules)}"

    def _rule(self, expression: str) -> str:
        """The name of the rule of an expression."""
        name = self._new_name
        self.rules.append(f"{name}: {expression}")
        return name
