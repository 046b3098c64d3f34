"""The table of fields: what it says of each field is what the parser, the OpenAPI document and the docs say."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest

from edgespec.decoding.sampling import RANGES, Sampling
from edgespec.server.errors import ApiError
from edgespec.server.faces.table import FACES
from edgespec.server.fields.field import Field, Treatment
from edgespec.server.fields.table import FIELDS, TABLES, body_schema, fields_for, read_fields
from edgespec.server.json_schema import Schema, fits, wanted
from edgespec.server.schema import Request
from tests.server.test_schema import result
from tests.support.api_fields import API_FIELDS, BODIES, OTHER_FIELDS

PAGES = sorted((Path(__file__).parents[2] / "docs/guide").glob("fields*.md"))
# Fields of which a reader makes something else before there is a request.
READ_FIRST = {"top_logprobs", "instructions", "include", "system", "raw"}
READ_FIRST |= {"continue_final_message", "add_generation_prompt", "prompts", "before", "line", "samplers"}
READERS = {face.name: face.read for face in FACES}
HEADINGS = {Treatment.OBEYED: "Obeyed", Treatment.REFUSED: "Refused", Treatment.IGNORED: "Without effect"}
ANY_VALUE: tuple[Any, ...] = (None, True, 0, -3, 1.5, "x", [], ["x"], {}, {"x": 1}, {"type": "x"}, 2**70)


def known(treatment: Treatment) -> list[Field]:
    return [field for field in FIELDS if field.treatment is treatment]


def body_with(name: str, value: Any) -> dict[str, Any]:
    """A body with the field: a name with a dot is that of a member."""
    outer, _, own = name.rpartition(".")
    return {outer: {own: value}} if outer else {own: value}


def shown(field: Field) -> Schema:
    """The schema that users read."""
    return field.shown if isinstance(field.shown, Mapping) else field.schema


def rows(table: Iterable[Field], treatment: Treatment) -> list[str]:
    """The rows of the docs' table. Fields of one meaning share a row. Of ignored ones any value is allowed."""
    own = [field for field in table if field.treatment is treatment]
    kinds = groupby(own, lambda field: (wanted(shown(field)), field.meaning))
    return [
        f"| {', '.join(dict.fromkeys(f'`{field.name}`' for field in fields))} | "
        + (f"{meaning} |" if treatment is Treatment.IGNORED else f"{what} | {meaning} |")
        for (what, meaning), fields in kinds
    ]


def test_an_api_has_each_name_once() -> None:
    for api in BODIES:
        assert set(Counter(field.name for field in fields_for(api)).values()) == {1}


@pytest.mark.parametrize(("api", "other"), [(api, other) for api in BODIES for other in API_FIELDS[api]])
def test_every_field_of_the_apis_has_a_row(api: str, other: str) -> None:
    names = {field.name for field in fields_for(api)} | {field.name.partition(".")[0] for field in fields_for(api)}
    assert [name for name in API_FIELDS[api][other] if name not in names] == []


def test_every_field_that_clients_send_to_any_server_has_a_row() -> None:
    for api in ("chat", "completion", "infill", "responses"):
        assert set(OTHER_FIELDS) <= {field.name for field in fields_for(api)}


def test_every_field_that_is_not_obeyed_is_one_of_an_api() -> None:
    names = set(OTHER_FIELDS).union(*(names for others in API_FIELDS.values() for names in others.values()))
    assert [
        field.name for field in FIELDS if field.treatment is not Treatment.OBEYED and field.name not in names
    ] == []


def test_an_obeyed_field_sets_what_a_request_has_and_others_set_nothing() -> None:
    own = {each.name for each in dataclasses.fields(Request)} | READ_FIRST
    own |= {f"sampling.{each.name}" for each in dataclasses.fields(Sampling)}
    assert {field.sets or field.name.rpartition(".")[2] for field in known(Treatment.OBEYED)} <= own
    for field in (*known(Treatment.REFUSED), *known(Treatment.IGNORED)):
        assert not field.sets
        assert not field.shown


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: f"{field.name} of {' and '.join(field.apis)}")
def test_any_value_is_obeyed_or_refused_by_the_fields_name_or_changes_nothing(field: Field) -> None:
    for api, value in product(field.apis, ANY_VALUE):
        found = result(READERS[api], {**BODIES[api], **body_with(field.name, value)})
        if isinstance(found, ApiError):
            assert str(found.param).partition("[")[0] == field.name.rpartition(".")[2]
            assert found.status == 400
            supported = field.treatment is Treatment.OBEYED and "enum" not in field.schema
            codes = [None if supported else field.code]
            if any("enum" in own for own in field.schema.get("properties", {}).values()):
                codes.append("unsupported_parameter")
            if field.name in ("samplers", "logit_bias"):  # a name that is unknown, a text
                codes.append("unsupported_parameter")
            assert found.code in codes
        assert field.treatment is not Treatment.IGNORED or found == READERS[api](BODIES[api])
        assert field.treatment is not Treatment.REFUSED or found == READERS[api](BODIES[api]) or found.code


def test_the_ranges_of_sampling_are_those_of_requests() -> None:
    wider = {"top_p": ("above", 0), "repeat_penalty": ("least", 0.01), "top_k": ("least", -1)}
    narrower = {"temperature": 2}
    properties = body_schema("chat")["properties"]
    for name, allowed in RANGES.items():
        if name != "seed":  # negative seeds are those of OpenAI's 64-bit integers
            least, most = properties[name]["minimum"], properties[name]["maximum"]
            assert least == (wider[name][1] if name in wider else allowed.least)
            assert most == narrower.get(name, min(allowed.most, 2**31 - 1))
            assert read_fields("chat", {**BODIES["chat"], name: most})["sampling"] == {name: most}


@pytest.mark.parametrize(("name", "treatment"), list(product(TABLES, Treatment)))
def test_the_docs_have_the_table(name: str, treatment: Treatment) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    (section,) = re.findall(rf"(?ms)^## {name}$(.*?)(?=^##? |\Z)", pages)
    (table,) = re.findall(rf"(?ms)^### {HEADINGS[treatment]}$(.*?)(?=^### |\Z)", section)
    assert "\n".join(rows(TABLES[name], treatment)) in table


def test_the_openapi_document_leaves_the_table_as_it_is() -> None:
    before = repr(FIELDS)
    members = {
        name for api in READERS for name, each in body_schema(api)["properties"].items() if "properties" in each
    }
    assert {"options", "tool_choice"} <= members
    assert repr(FIELDS) == before


def test_every_api_has_a_table_and_a_body_to_try() -> None:
    assert {api for field in FIELDS for api in field.apis} == set(READERS) == set(BODIES) == set(API_FIELDS)


def test_the_fields_of_chats_are_those_of_responses_too() -> None:
    names = {api: {field.name for field in fields_for(api)} for api in BODIES}
    assert names["chat"] - names["responses"] == {"messages", "edgespec.tokens"}


# ---------------------------------------------------------------------------------------------------- JSON schemas


@pytest.mark.parametrize(
    ("schema", "allowed", "refused", "words"),
    [
        ({}, [None, 1, "x", [], {}], [], "anything"),
        ({"type": ["boolean", "null"]}, [True, False, None], [0, 1, "true"], "true or false"),
        ({"type": "string", "minLength": 1}, ["x"], ["", None, 3], "text"),
        (
            {"type": "integer", "minimum": 1},
            [1, 7.0, 10**400],
            [0, 1.5, True, "1", None],
            "a whole number of at least 1",
        ),
        (
            {"type": ["number", "null"], "minimum": 0, "maximum": 1},
            [0, 0.5, 1, None],
            [-1, 1.5, True, float("nan")],
            "a number from 0 to 1",
        ),
        ({"enum": [None, "auto", 1]}, [None, "auto", 1, 1.0], ["x", True, []], '"auto" or 1'),
        ({"anyOf": [{"const": False}, {"type": "string"}]}, [False, "x"], [0, None, True], "false or text"),
        ({"oneOf": [{"type": "null"}, {"type": "array", "items": {}}]}, [None, [1]], [{}, "x"], "a list"),
        (
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
            [["a"], ["a", "b"]],
            [[], ["a", 1], ["a", "b", "c"], "a"],
            "a list of 1 to 2 texts",
        ),
        (
            {"type": "object", "required": ["a"], "properties": {"a": {"const": 1}}},
            [{"a": 1}, {"a": 1, "b": 2}],
            [{}, {"a": 2}, [], "a"],
            '{"a": 1}',
        ),
        ({"type": "object", "maxProperties": 1}, [{}, {"1": 2}], [{"a": 1, "b": 2}, []], "an object of at most 1"),
        (
            {"anyOf": [{"type": "array", "minItems": 1}, {"type": "array", "items": {}, "minItems": 1}]},
            [[1]],
            [[], "x"],
            "a list of at least 1",
        ),
    ],
)
def test_a_schema_allows_what_it_says(schema: Schema, allowed: list[Any], refused: list[Any], words: str) -> None:
    assert [value for value in allowed if not fits(schema, value)] == []
    assert [value for value in refused if fits(schema, value)] == []
    assert wanted(schema) == words


def test_the_tables_schemas_use_no_keyword_that_is_not_checked() -> None:
    known = {"type", "minimum", "maximum", "minLength", "minItems", "maxItems", "items", "maxProperties", "required"}
    known |= {"anyOf", "oneOf", "const", "enum", "properties", "description"}

    def keywords(schema: Schema) -> set[str]:
        inner = [
            *schema.get("anyOf", ()),
            *schema.get("oneOf", ()),
            *([schema["items"]] if "items" in schema else ()),
        ]
        inner += schema.get("properties", {}).values()
        return set(schema).union(*map(keywords, inner))

    for field in FIELDS:
        assert keywords(field.schema) <= known, field.name
