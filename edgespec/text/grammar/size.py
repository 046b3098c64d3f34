"""Limits of forms, so that compiling one ends within a second and takes tens of megabytes, whatever it says.

llguidance's own limits count what it has built, and some forms take it long before. Times are those of one processor
core at 2.6 GHz.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from edgespec.text.grammar.form import Form

# Of llguidance's lexer, each about 1 kB.
MOST_STATES = 50_000
# Of a row of llguidance's parser: four for each optional name of an object.
MOST_ITEMS = 20_000
# Alternatives of a grammar, an item each: 0.5 s.
MOST_ALTERNATIVES = 10_000
# Time grows by the square of an object's names: 0.8 to 1.3 s for 2000 optional ones, 2.3 to 2.6 s for 3000.
MOST_NAMES, FEW_NAMES = 2000, 100
# And by the square of the rules of a GBNF grammar.
MOST_RULES = 500
# References of a schema times its depth: native code follows them down its stack, which has room for about 5000.
MOST_LEVELS = 2000
# Patterns that one text must fit together double the time with each: 1 ms with 10, 2 s with 20.
MOST_COMBINED = 10
# Names that are patterns are compared in pairs, 0.4 s with 100 of them.
MOST_NAME_PATTERNS = 100
# The states of all numbers that are multiples: 0.4 s.
MOST_MULTIPLES = 50_000

# Where a grammar holds a schema.
_INNER_SCHEMA = re.compile(r"%json\s*")
_INNER_OR_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|%json ')
# Also without an end, so that many of these are read once.
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*("|\\?\Z)', re.DOTALL)
_JOINS = ("allOf", "anyOf", "oneOf", "$ref")


def check_size(form: Form) -> None:
    """Raise ValueError for a form that would take native code too long, or end the process."""
    if form.kind == "schema":
        _check_schema(json.loads(form.text))
    elif form.kind == "call":
        for _, _, schema in inner_schemas(form.text):
            _check_schema(schema)
    elif form.kind == "grammar":
        for found in _INNER_SCHEMA.finditer(form.text):
            _check_schema(json.JSONDecoder().raw_decode(form.text, found.end())[0])
        if form.text.count("::=") > MOST_RULES:
            raise ValueError(f"it has more than {MOST_RULES} rules")
        outside = _QUOTED.sub(lambda quoted: "" if quoted[1] == '"' else quoted[0], form.text)
        if outside.count("&") > MOST_COMBINED:
            raise ValueError(f"it combines more than {MOST_COMBINED} expressions")
        if outside.count("|") > MOST_ALTERNATIVES:
            raise ValueError(f"it has more than {MOST_ALTERNATIVES} alternatives")


def inner_schemas(text: str) -> Iterator[tuple[int, int, Any]]:
    """The schemas in a grammar of calls, each behind its begin and end there. Text in quotes holds none."""
    place = 0
    while found := _INNER_OR_QUOTED.search(text, place):
        place = found.end()
        if not found[0].startswith('"'):
            schema, place = json.JSONDecoder().raw_decode(text, place)
            yield found.end(), place, schema


def _check_schema(schema: Any) -> None:
    objects, deepest = list[Mapping[str, Any]](), 0
    for value, depth in _values(schema):
        deepest = max(deepest, depth)
        if isinstance(value, dict):
            objects.append(value)
    if sum(len(each) ** 2 for each in objects if len(each) > FEW_NAMES) > MOST_NAMES**2:
        raise ValueError(f"its objects have more names than one of {MOST_NAMES}")
    references = references_in(schema)
    if len(references) * deepest > MOST_LEVELS:
        raise ValueError(f"it has {len(references)} references and {deepest} levels, which may lead too deep")
    named = [each["patternProperties"] for each in objects if isinstance(each.get("patternProperties"), dict)]
    if sum(len(each) ** 2 for each in named) > MOST_NAME_PATTERNS**2:
        raise ValueError(f"it has more than {MOST_NAME_PATTERNS} patternProperties")
    for _, why in costly(schema):
        raise ValueError(why)


def references_in(schema: Any) -> set[str]:
    """All values of ``$ref``."""
    objects = (value for value, _ in _values(schema) if isinstance(value, dict))
    return {each["$ref"] for each in objects if isinstance(each.get("$ref"), str)}


def costly(schema: Any) -> Iterator[tuple[str, str]]:
    """The keywords that cost too much together, each with the reason. Without them only their values are free."""
    objects = [value for value, _ in _values(schema) if isinstance(value, dict)]
    multiples = [each["multipleOf"] for each in objects if _is_number(each.get("multipleOf"))]
    common = math.lcm(*(_digits(each) for each in set(multiples)))
    if multiples and len(multiples) * common > MOST_MULTIPLES:
        yield "multipleOf", f"its {len(multiples)} multipleOf allow too many remainders"
    texts = (each.get(key) for each in objects for key in ("pattern", "format"))
    different = {each for each in texts if isinstance(each, str)}
    if len(different) > MOST_COMBINED and any(map(_joins, objects)):
        why = f"it may combine {len(different)} patterns, and at most {MOST_COMBINED} can be"
        yield from (
            (key, why) for key in ("pattern", "format") if any(isinstance(each.get(key), str) for each in objects)
        )


def _joins(value: Mapping[str, Any]) -> bool:
    """Whether another schema of the same value is joined with others, or with other keywords."""
    joined = [key for key in _JOINS if key in value]
    if "allOf" in joined:
        is_alone = isinstance(value["allOf"], list) and len(value["allOf"]) == len(joined) == 1
        if not is_alone or "patternProperties" in value:
            return True
    return bool(joined) and any(
        key in value for key in ("pattern", "format", "properties", "additionalProperties", "items", "prefixItems")
    )


def _values(schema: Any) -> Iterator[tuple[Any, int]]:
    """All values in a schema, each with its depth."""
    left = [(schema, 1)]
    while left:
        value, depth = left.pop()
        yield value, depth
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        left += [(each, depth + 1) for each in inner]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _digits(value: float) -> int:
    """The number without its decimal point."""
    digits, exponent = Decimal(repr(value)).as_tuple()[1:]
    assert isinstance(exponent, int)
    scale: int = 10 ** max(0, exponent)
    return int("".join(map(str, digits))) * scale
