"""JSON schemas and tools drawn at random: the keywords and shapes that programs send, in small and nested schemas."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("name", "id", "size", "city", "kind", "notes", "items", "next", "größe", "a b", "x-y", "$id2", "on")
_WORDS = ("low", "high", "red", "green", "naïve", "ÅNGSTRÖM", 'say "no"', "a\\b", "line\nbreak", "日本", "")
_PATTERNS = ("^[a-z]{2,5}$", "^[A-Z][0-9]{3}$", "^(yes|no)$", "^\\d{4}-\\d{2}$", "^[a-f0-9]+$", "[0-9]x$", "^-?[1-9]")
# Those that the jsonschema package checks without further packages.
_FORMATS = ("date", "ipv4", "ipv6", "email", "uuid")
# Levels of lists and objects in one schema.
_DEEPEST = 3
# A model of random weights ends a text of any length after hundreds of tokens.
_FREE_TEXTS = 2

# What no mask can keep while a text is written; llguidance names them in its warnings.
LENIENT: tuple[Schema, ...] = (
    {"not": {"const": "low"}},
    {"uniqueItems": True},
    {"contains": {"const": 1}},
    {"dependentRequired": {"a": ["b"]}},
    {"if": {"const": 1}, "then": {"const": 1}},
    {"propertyNames": {"pattern": "^[a-z]"}},
)


class _Drawn:
    """One schema. References lead to its ``definitions``."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._texts, self.definitions = draw, _FREE_TEXTS, dict[str, Schema]()
        self._leaves: tuple[Callable[[], Schema], ...] = (
            *(self._whole, self._number, self._text, self._enum, self._one_of_types, self._const),
            *(lambda: {"type": "boolean"}, lambda: {"type": "null"}),
        )
        self._shapes: tuple[Callable[[int], Schema], ...] = (
            *(self.object, self.object, self.object, self._list, self._list, self._tuple, self._any_of),
            *(self._one_of, self._all_of, self._reference, self._linked, self._by_pattern, self._described),
        )

    def any(self, depth: int) -> Schema:
        draw = self._draw
        if depth >= _DEEPEST or draw.random() < 0.55:
            return draw.choice(self._leaves)()
        return draw.choice(self._shapes)(depth + 1)

    # ------------------------------------------------------------------------------------------------ leaves

    def _whole(self) -> Schema:
        draw, least = self._draw, self._draw.randint(-50, 50)
        keywords: Schema = draw.choice(
            (
                {},
                {"minimum": least},
                {"maximum": least},
                {"minimum": least, "maximum": least + draw.randint(0, 500)},
                {"exclusiveMinimum": least, "exclusiveMaximum": least + draw.randint(2, 500)},
                {"minimum": 0, "multipleOf": draw.choice((2, 5, 7))},
            )
        )
        return {"type": "integer", **keywords}

    def _number(self) -> Schema:
        least = self._draw.randint(-50, 50) / 4
        return {"type": "number", **self._draw.choice(({}, {"minimum": least, "maximum": least + 2.5}))}

    def _text(self) -> Schema:
        draw = self._draw
        least = draw.randint(0, 4)
        kinds: list[Schema] = [
            {"maxLength": draw.randint(1, 20)},
            {"minLength": least, "maxLength": least + draw.randint(0, 9)},
            {"pattern": draw.choice(_PATTERNS)},
            {"format": draw.choice(_FORMATS)},
        ]
        if self._texts:
            kinds.append({})
        chosen = draw.choice(kinds)
        self._texts -= not chosen
        return {"type": "string", **chosen}

    def _enum(self) -> Schema:
        values: list[Any] = [*_WORDS, 1, 2.5, -3, True, None, [1, "x"], {"a": 1}]
        return {"enum": self._draw.sample(values, self._draw.randint(1, 6))}

    def _const(self) -> Schema:
        return {"const": self._draw.choice((*_WORDS, 7, False, None, {"v": [1, 2]}))}

    def _one_of_types(self) -> Schema:
        return {"type": self._draw.sample(["integer", "boolean", "null"], self._draw.randint(1, 3))}

    # ------------------------------------------------------------------------------------------------ shapes

    def object(self, depth: int) -> Schema:
        draw = self._draw
        names = draw.sample(_NAMES, draw.randint(0, 5))
        own: Schema = {"type": "object", "properties": {name: self.any(depth) for name in names}}
        if draw.random() < 0.8:
            own["required"] = draw.sample(names, draw.randint(0, len(names)))
        if draw.random() < 0.85:
            own["additionalProperties"] = False
        elif draw.random() < 0.5:
            own["additionalProperties"] = self._whole()
        return own

    def _list(self, depth: int) -> Schema:
        draw, least = self._draw, self._draw.randint(0, 3)
        limits: Schema = draw.choice(
            ({}, {"maxItems": least + 2}, {"minItems": least}, {"minItems": least, "maxItems": least + 3})
        )
        return {"type": "array", "items": self.any(depth), **limits}

    def _tuple(self, depth: int) -> Schema:
        first = [self.any(depth) for _ in range(self._draw.randint(1, 3))]
        rest: Any = self._draw.choice((False, {"type": "boolean"}))
        return {"type": "array", "prefixItems": first, "items": rest, "minItems": len(first)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.any(depth) for _ in range(self._draw.randint(1, 3))]}

    def _one_of(self, depth: int) -> Schema:
        """Objects that a constant tells apart, or values of different types."""
        if self._draw.random() < 0.5:
            return {"oneOf": [self._whole(), {"type": "null"}, {"type": "array", "items": self.any(depth)}]}
        kinds = self._draw.sample(("cat", "dog", "bird"), 2)
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "value": self.any(depth)},
                    "required": ["kind"],
                    "additionalProperties": False,
                }
                for kind in kinds
            ]
        }

    def _all_of(self, depth: int) -> Schema:
        parts = [
            {"type": "object", "properties": {name: self.any(depth)}, "required": [name]}
            for name in ("left", "right")
        ]
        return {"allOf": parts[: self._draw.randint(1, 2)]}

    def _reference(self, depth: int) -> Schema:
        name = f"d{len(self.definitions)}"
        self.definitions[name] = {}  # its number is taken
        self.definitions[name] = self.any(depth)
        return {"$ref": f"#/$defs/{name}"}

    def _linked(self, depth: int) -> Schema:
        """A list whose elements hold the next one."""
        name = f"d{len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = {
            "type": "object",
            "properties": {
                "value": self._whole(),
                "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}

    def _by_pattern(self, depth: int) -> Schema:
        return {
            "type": "object",
            "patternProperties": {"^[a-c]{1,3}$": self._whole(), "^x-": {"type": "boolean"}},
            "additionalProperties": False,
        }

    def _described(self, depth: int) -> Schema:
        notes = {"title": "A title", "description": "What it is.", "default": None, "examples": [1]}
        return {**self.any(depth), **notes}


def schema(number: int) -> Schema:
    """The schema of a number, at whose top is a list or an object more often than not. Always the same."""
    drawn = _Drawn(random.Random(number))
    own = drawn.object(1) if number % 3 else drawn.any(0)
    return {**own, "$defs": drawn.definitions} if drawn.definitions else own


def lenient_schema(number: int) -> Schema:
    """A schema with a keyword that cannot be kept."""
    own = schema(number)
    shared = {"$defs": own.pop("$defs")} if "$defs" in own else {}
    return {"anyOf": [own], **shared, **LENIENT[number % len(LENIENT)]}


def tools(number: int) -> list[dict[str, Any]]:
    """One to four tools, whose arguments are objects."""
    draw = random.Random(number)
    found = []
    for place in range(draw.randint(1, 4)):
        drawn = _Drawn(draw)
        parameters = drawn.object(1)
        if drawn.definitions:
            parameters["$defs"] = drawn.definitions
        own = {"name": f"{draw.choice(('get', 'set-it', 'find_all'))}{place}", "parameters": parameters}
        found.append({"type": "function", "function": own})
    return found
