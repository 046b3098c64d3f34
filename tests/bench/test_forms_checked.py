"""Answers bound to random schemas, forced calls of random tools, and cursors that go back: a sample of each."""

from __future__ import annotations

import json

from benchmarks.forms_checked import measure, wrong
from benchmarks.random_schemas import LENIENT, lenient_schema, schema, tools


def test_schemas_and_tools_are_the_same_in_every_process_and_differ_by_number() -> None:
    for kind in (schema, lenient_schema, tools):
        texts = [json.dumps(kind(number)) for number in range(60)]
        assert texts == [json.dumps(kind(number)) for number in range(60)]
        assert len(set(texts)) > 50
    keywords = {word for number in range(300) for word in json.dumps(schema(number)).split('"')}
    assert keywords >= {
        *("anyOf", "oneOf", "allOf", "$ref", "enum", "const", "pattern", "format", "prefixItems", "minItems"),
        *("maxItems", "minimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "patternProperties"),
        *("required", "additionalProperties", "null", "boolean", "integer", "number", "string", "array", "object"),
    }
    assert all(LENIENT[number].keys() <= lenient_schema(number).keys() for number in range(len(LENIENT)))


def test_the_validator_says_what_is_wrong() -> None:
    own = {"type": "object", "properties": {"day": {"format": "date"}, "n": {"maximum": 3}}}
    assert wrong(own, '{"day": "2026-11-27", "n": 3}') is None
    for text in ('{"day": "2026-11-27", "n": 4}', '{"day": "2026-13-27"}', '{"n": 3', "[]"):
        assert wrong(own, text) is not None, text


def test_answers_of_random_schemas_and_forced_calls_of_random_tools_pass_a_validator() -> None:
    found = measure(schemas=24, lenient=6, sets=8, steps=2000, max_tokens=400)
    strict, lenient, calls = found["strict"], found["lenient"], found["tools"]
    assert (strict["refused"], strict["invalid"], calls["invalid"]) == ([], [], [])
    assert strict["finished"] >= 22
    assert calls["finished"] >= 7
    assert (lenient["accepted_strictly"], lenient["without_warning"]) == (0, [])
    assert found["cursors"] == {"steps": 2000, "different": []}
