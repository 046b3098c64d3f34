"""The JSON of a value that a model wrote as plain text, for every way in which a schema says what it may be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from edgespec.text.conversation.argument_values import allowed, as_json
from edgespec.text.conversation.literals import PYTHON, to_json

STRING, NULL, WHOLE = {"type": "string"}, {"type": "null"}, {"type": "integer"}
TREE = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Tree"}}, {"type": "integer"}]}
DEFS = {
    "$defs": {
        "Id": STRING,
        "Chain": {"$ref": "#/$defs/Id"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Either": {"anyOf": [{"$ref": "#/$defs/Either"}, STRING]},
        "Tree": TREE,
        "a/b~c d": STRING,
        "Many": {"anyOf": [{"$ref": "#/$defs/More"}] * 60},
        "More": {"anyOf": [{"$ref": "#/$defs/Id"}] * 60},
    },
    "definitions": {"Old": [STRING]},
}


def value(schema: Any, text: str, **more: Any) -> str:
    return as_json(text, allowed({"type": "object", "properties": {"a": schema}, **DEFS, **more}, "a"))


def ref(path: str) -> dict[str, str]:
    return {"$ref": path}


@pytest.mark.parametrize(
    "schema",
    [
        STRING,
        {"type": ["string", "null"]},
        {"type": ["integer", "string"]},
        {"anyOf": [STRING, NULL]},
        {"anyOf": [{"type": "array", "items": STRING}, {"anyOf": [NULL, STRING]}]},
        {"oneOf": [WHOLE, STRING]},
        {"allOf": [STRING, {"minLength": 1}]},
        {"allOf": [{"type": ["string", "integer"]}, {"anyOf": [STRING, {"type": "boolean"}]}]},
        {"type": "string", "nullable": True},
        {"type": "STRING"},
        {"type": "str"},
        {"type": ["string", "date"]},
        ref("#/$defs/Id"),
        ref("#/$defs/Chain"),
        ref("#/$defs/Either"),
        ref("#/$defs/Many"),
        ref("#/$defs/a~1b~0c%20d"),
        ref("#/definitions/Old/0"),
        {**ref("#/$defs/Id"), "description": "a postal code"},
        {"anyOf": [ref("#/$defs/Id"), NULL], "default": None},
        {"anyOf": [{"anyOf": [ref("#/$defs/Loop"), STRING]}]},
    ],
)
def test_where_a_string_is_allowed_the_text_is_the_value(schema: Any) -> None:
    for text in (
        "90210",
        "0042",
        "3.10",
        "1e5",
        "true",
        "True",
        "[1]",
        '{"a": 1}',
        "it's",
        "",
        " x ",
        '"quoted"',
        "null",
    ):
        assert value(schema, text) == json.dumps(text)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "FALSE", "false"),
        ({"type": "bool"}, " false ", "false"),
        ({"type": ["boolean", "null"]}, "None", "null"),
        ({"anyOf": [WHOLE, NULL]}, "None", "null"),
        ({"anyOf": [WHOLE, NULL]}, "NULL", "null"),
        ({"type": "integer", "nullable": True}, "None", "null"),
        ({"type": "integer"}, "None", '"None"'),
        ({"type": "integer"}, "True", '"True"'),
        (WHOLE, " 42 ", "42"),
        (WHOLE, "0042", '"0042"'),
        ({"type": "number"}, "3.10", "3.10"),
        ({"type": "number"}, "0.12345678901234567890123", "0.12345678901234567890123"),
        ({"type": "number"}, "1e999", '"1e999"'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "1" * 5000, f'"{"1" * 5000}"'),
        ({"type": "array"}, '["a", 3.10]', '["a", 3.10]'),
        ({"type": "array"}, '["\\ud800"]', '"[\\"\\\\ud800\\"]"'),
        ({"type": "array"}, "[" * 5000, json.dumps("[" * 5000)),
        ({"type": "object"}, '\n{"a": {"b": None}}', '{"a": {"b": null}}'),
        ({"type": "array"}, """[1, 3.10, {'a': True}, 'it\\'s "so"']""", '[1, 3.10, {"a": true}, "it\'s \\"so\\""]'),
        ({"type": "array"}, "[a, b]", '"[a, b]"'),
        (ref("#/$defs/Tree"), "[1, [2]]", "[1, [2]]"),
        ({"enum": [1, 2]}, "1", "1"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": ["auto", 1]}, "auto", '"auto"'),
        ({"enum": ["auto", 1]}, "1", "1"),
        ({"enum": ["auto", 1]}, "2", '"2"'),
        ({"enum": ["1.0", None]}, "None", "null"),
        ({"enum": ["1.0", None]}, "1.0", '"1.0"'),
        ({"enum": [True, "auto"]}, "True", "true"),
        ({"type": ["string", "integer"], "enum": [3, 4]}, "3", "3"),
        ({"type": "string", "enum": ["3", 4]}, "3", '"3"'),
        ({"const": "7"}, "7", '"7"'),
        ({"const": 7}, "7", "7"),
        ({"const": {"a": [1]}}, '{ "a": [1] }', '{ "a": [1] }'),
        ({"anyOf": [{"const": "on"}, {"const": False}]}, "false", "false"),
        ({"anyOf": [{"const": "on"}, {"const": False}]}, "on", '"on"'),
    ],
)
def test_other_values_are_read_by_their_types(schema: Any, text: str, expected: str) -> None:
    assert value(schema, text) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {}, True, False, None, 5, {"type": "date"}, {"type": None}, {"enum": 5}, {"anyOf": {}}, {"anyOf": []},
        {"anyOf": [{}]}, ref("#/$defs/None"), ref("#/$defs/Loop"), ref("#/definitions/Old/9"), ref("https://x"),
        {"$ref": 5}, ref(""),
    ],
)  # fmt: skip
def test_without_a_schema_a_value_is_text_unless_it_stays_the_same_as_json(schema: Any) -> None:
    for text in ("42", "-1.5", "true", "null", '["a"]', '{"a": 3.10}'):
        assert value(schema, text) == text
    for text in ("3.10", "0042", "1e5", "-0", "1e999", "True", "x", ""):
        assert value(schema, text) == json.dumps(text)
    assert as_json("3.10", allowed({}, "other")) == '"3.10"'


@pytest.mark.parametrize(
    "schema",
    [
        ref("#/$defs/All"),
        {"allOf": [ref("#/$defs/All"), {"properties": {"b": WHOLE}}]},
        {"anyOf": [{"properties": {"b": WHOLE}}, ref("#/$defs/All")]},
        {"properties": {"b": WHOLE}, "additionalProperties": STRING},
        {"properties": {"b": WHOLE}, "oneOf": [{"additionalProperties": ref("#/$defs/Id")}]},
    ],
)
def test_a_parameter_is_found_wherever_the_schema_of_the_tool_has_it(schema: dict[str, Any]) -> None:
    whole = {**schema, "$defs": {"All": {"properties": {"a": STRING}, "allOf": [ref("#/$defs/All")]}, "Id": STRING}}
    assert as_json("42", allowed(whole, "a")) == '"42"'
    assert as_json("42", allowed(whole, "b")) in ("42", '"42"')


@pytest.mark.parametrize("key", ["anyOf", "oneOf", "allOf"])
def test_schemas_that_multiply_or_lead_far_are_read_once_and_not_without_end(key: str) -> None:
    for length, expected in ((30, '"42"'), (5000, "42")):
        defs = {f"D{at}": {key: [ref(f"#/$defs/D{at + 1}")] * 9} for at in range(length)} | {f"D{length}": STRING}
        assert as_json("42", allowed({"properties": {"a": ref("#/$defs/D0")}, "$defs": defs}, "a")) == expected
        whole = {f"D{at}": {key: [ref(f"#/$defs/D{at + 1}")] * 9} for at in range(length)}
        whole[f"D{length}"] = {"properties": {"a": STRING}}
        assert as_json("42", allowed({**ref("#/$defs/D0"), "$defs": whole}, "a")) == expected


# ------------------------------------------------------------------------------------------- generated schemas

TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
Told = tuple[dict[str, Any], frozenset[str]]
"""A schema and the types that it allows."""


def leaf(types: frozenset[str]) -> Told:
    return {"type": next(iter(types)) if len(types) == 1 else sorted(types)}, types


def either(told: list[Told]) -> Told:
    return {"anyOf": [schema for schema, _ in told]}, frozenset().union(*(types for _, types in told))


def both(told: list[Told]) -> Told:
    """All of the schemas; the types of the first, which each of the others allows too."""
    (first, types), *others = told
    return {"allOf": [first, *({"anyOf": [schema, leaf(types)[0]]} for schema, _ in others)]}, types


def referred(told: Told) -> Told:
    return {"$ref": "#/$defs/" + json.dumps(told[0]).replace("~", "~0").replace("/", "~1").replace("%", "%25")}, told[
        1
    ]


LEAVES = st.sets(st.sampled_from(TYPES), min_size=1, max_size=4).map(frozenset).map(leaf)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(either),
        st.lists(inner, min_size=1, max_size=3).map(both),
        inner.map(referred),
        inner.map(lambda told: ({**told[0], "nullable": True}, told[1] | {"null"})),
    ),
    max_leaves=6,
)


def definitions(schema: Any) -> dict[str, Any]:
    """The schemas that references lead to: each one's name is its JSON."""
    found = dict[str, Any]()
    if isinstance(schema, dict):
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/$defs/").replace("%25", "%").replace("~1", "/").replace("~0", "~")
            found = {name: json.loads(name)} | definitions(json.loads(name))
        for inner in schema.values():
            found |= definitions(inner)
    for inner in schema if isinstance(schema, list) else []:
        found |= definitions(inner)
    return found


@given(SCHEMAS, st.one_of(st.sampled_from(["90210", "3.10", "True", "None", "x", "[1]", "{}"]), st.text(max_size=5)))
@example(({"type": "boolean"}, frozenset({"boolean"})), "FALSE")
@example(({"type": "array"}, frozenset({"array"})), "['a']")
@settings(max_examples=400, deadline=None)
def test_generated_schemas_say_what_their_parts_say(told: Told, text: str) -> None:
    schema, types = told
    found = as_json(text, allowed({"properties": {"a": schema}, "$defs": definitions(schema)}, "a"))
    kinds = {"number" if kind == "integer" else kind for kind in types}
    if "string" in kinds:
        assert found == json.dumps(text, ensure_ascii=False)
    elif text == "True":
        assert found == ("true" if "boolean" in kinds else '"True"')
    elif text == "None":
        assert found == ("null" if "null" in kinds else '"None"')
    else:
        words = ("true", "false", "null", "none")
        ways = (text.strip(), to_json(text.strip(), PYTHON), json.dumps(text, ensure_ascii=False))
        assert found in ways or text.strip().lower() in words
    json.loads(found)
