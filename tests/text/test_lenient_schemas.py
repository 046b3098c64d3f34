"""Parts of schemas that llguidance cannot read: a lenient schema is kept without them."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.call_formats import HERMES, LFM2, QWEN_XML, CallFormat
from edgespec.text.grammar.calls import begun_form, call_form
from edgespec.text.grammar.compiled import Forms
from edgespec.text.grammar.form import Form
from edgespec.text.grammar.lenient import binding
from edgespec.text.tokenizers.gguf import GgufTokenizer
from tests.text.test_call_forms import is_whole, tool, use
from tests.text.test_forms import cut, made, takes

# Zod 4's z.email().
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


@pytest.fixture(scope="module")
def forms(tokenizer: GgufTokenizer) -> Forms:
    return Forms(tokenizer, tokenizer.vocabulary_size)


def whole(forms: Forms, tokenizer: GgufTokenizer, form: Form, text: str) -> bool:
    own, ids = forms.compiled(form).cursor(), cut(tokenizer, text)
    if own.allows(ids) < len(ids):
        return False
    own.at(ids)
    return own.complete


MANY = {"allOf": [{"type": "string", "pattern": f"^[a-z]*{number}"} for number in range(11)]}
UNREAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "a pattern that looks ahead": ({"type": "string", "pattern": EMAIL}, '"x"', "pattern"),
    "a pattern that looks back": ({"type": "string", "pattern": r"^(a|b)\1$"}, '"x"', "pattern"),
    "a pattern of Python's": ({"type": "string", "pattern": r"^a\Z"}, '"x"', "pattern"),
    "a pattern of names": ({"type": "object", "patternProperties": {"^(?!x)": {"type": "null"}}}, "{}", "pattern"),
    "a bound beyond all integers": ({"type": "integer", "minimum": -1e20}, "3", "minimum -1e+20 is left out"),
    "a bound beyond what is read": ({"type": "integer", "minimum": 2 * 10**18}, "3", "minimum 2000000000000000000"),
    "a bound of large numbers": ({"type": "number", "maximum": 1e19}, "3", "maximum 1e+19 is left out"),
    "a factor of many": ({"type": "integer", "multipleOf": 86400}, "3", "multipleOf is left out"),
    "many patterns": ({"anyOf": [{"pattern": "y"}], **MANY}, '"x"', "at most 10 can be"),
    "Python's type": ({"type": "int"}, "3", "'int' is read as 'integer'"),
    "Google's types": ({"type": ["STRING", "NULL"]}, '"x"', "'STRING' is read as 'string'"),
    "no type": ({"type": "file"}, '"x"', "'file'"),
    "null for required names": ({"type": "object", "required": None}, "{}", "required"),
    "null for properties": ({"type": "object", "properties": None}, "{}", "properties"),
    "null for a property": ({"properties": {"pattern": None}, "required": ["pattern"]}, '{"pattern": 3}', "pattern"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_lenient_schema_is_kept_without_what_is_not_read_at_any_depth(
    forms: Forms, tokenizer: GgufTokenizer, name: str
) -> None:
    inner, value, said = UNREAD[name]
    deep = {"$defs": {"a": {"properties": {"b": inner, "c": {"enum": [1]}}, "required": ["b", "c"]}}}
    schema = {**deep, "type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 1}
    form = made(schema=schema, lenient=True)
    assert any(said in each for each in forms.compiled(form).warnings) or not said
    assert takes(forms, tokenizer, f'[{{"b": {value}, "c": 1}}]', schema=schema, lenient=True)
    assert not takes(forms, tokenizer, f'[{{"b": {value}, "c": 2}}]', schema=schema, lenient=True)
    with pytest.raises(InvalidRequestError, match="this schema cannot be followed"):
        forms.compiled(made(schema=schema))


NAMES = ("My Type", "Page<Item>", "Page[Item]", "A|B", "List`1", "日本", "a%20b")
DRAFTS = (
    *("https://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-04/schema", "urn:draft/2019-09"),
    *("http://json-schema.org/schema#", "https://spec.openapis.org/oas/3.1/dialect/base"),
)
PATHS = {"type": "object", "properties": {"path": {"type": "string", "format": "path"}}}
ENUM = {"type": "string", "enum": ["x", "y"]}
# What schemas say in other words than JSON Schema: a part, the whole schema, the texts that fit, and another.
MEANT: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...], str]] = {
    "a text or null": ({"type": "string", "nullable": True}, {}, ('"x"', "null"), "3"),
    "one of several types or null": ({"type": ["integer", "null"], "nullable": True}, {}, ("3", "null"), '"x"'),
    "not null": ({"type": "string", "nullable": False}, {}, ('"x"',), "null"),
    "a choice or null": ({**ENUM, "nullable": True}, {}, ('"x"', "null"), '"z"'),
    "a choice without a type or null": ({"enum": ["x", None], "nullable": True}, {}, ('"x"', "null"), '"z"'),
    "a constant or null": ({"const": "x", "nullable": True}, {}, ('"x"', "null"), '"y"'),
    "what a reference leads to or null": (
        {"nullable": True, "description": "d", "allOf": [{"$ref": "#/$defs/E"}]},
        {"$defs": {"E": ENUM}},
        ('"x"', "null"),
        '"z"',
    ),
    "what a reference to its own definition leads to or null": (
        {"oneOf": [{"$ref": "#/properties/a/$defs/F"}], "$defs": {"F": ENUM}, "nullable": True},
        {},
        ('"x"', "null"),
        '"z"',
    ),
    "one of several schemas or null": (
        {"nullable": True, "anyOf": [{"type": "integer"}, ENUM]},
        {},
        ("3", '"x"', "null"),
        '"z"',
    ),
    "any 64-bit integer": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, {}, ("-7",), "1.5"),
    "any unsigned integer": ({"type": "integer", "maximum": 2**64 - 1}, {}, ("7",), "1" + "0" * 25),
    "any large integer": ({"type": "integer", "maximum": 2**63 - 1}, {}, (str(2**63 - 1),), "1" + "0" * 25),
    "any float of 32 bits": ({"type": "number", "minimum": -3.4028234663852886e38}, {}, ("-7.5",), '"x"'),
    "any double": ({"type": "number", "maximum": 1.7976931348623157e308, "minimum": 0}, {}, ("7.5",), "-1"),
    "any number but infinity": ({"type": "number", "exclusiveMaximum": 10**400}, {}, ("7.5",), '"x"'),
    "any positive double": ({"type": "number", "minimum": 5e-324}, {}, ("0.5",), "-0.5"),
    "any negative double": ({"type": "number", "maximum": -5e-324}, {}, ("-0.5",), "0.5"),
    "any number from about zero": ({"type": "number", "exclusiveMinimum": -1e-30}, {}, ("0", "0.5"), "-0.5"),
    "an exclusive bound above about zero": (
        {"type": "number", "minimum": 5e-324, "exclusiveMinimum": 5},
        {},
        ("6",),
        "5",
    ),
    "about zero above an exclusive bound": (
        {"type": "number", "minimum": 5e-324, "exclusiveMinimum": -5},
        {},
        ("6",),
        "-1",
    ),
    "a bound below about zero": ({"type": "number", "exclusiveMaximum": 5e-324, "maximum": -5}, {}, ("-5",), "-4"),
    "a float as a length": ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, {}, ('"x"',), '""'),
    "a float as a number of items": ({"type": "array", "items": ENUM, "minItems": 1.0}, {}, ('["x"]',), "[]"),
    "lists for objects": ({"type": "object", "properties": []}, {"$defs": []}, ("{}", '{"x": 1}'), "1"),
    "an object for a list": ({"type": "object", "required": {}}, {}, ("{}",), "1"),
    "any name": (
        {"propertyNames": {"type": "string"}, "additionalProperties": ENUM},
        {},
        ('{"a": "x"}',),
        '{"a": 1}',
    ),
    "any name at all": ({"propertyNames": {"title": "t"}, "additionalProperties": ENUM}, {}, ("{}",), '{"a": 1}'),
    "names of any kind": ({"propertyNames": True, "type": "object"}, {}, ("{}",), "1"),
    "a fragment as an id": ({"$id": "#a", "type": "string"}, {}, ('"x"',), "3"),
    "a path as an id": ({"$id": "#/properties/a", "type": "string"}, {}, ('"x"',), "3"),
    **{
        f"the reference {each}": (
            {"$ref": f"#/$defs/{each}"},
            {"$defs": {each.replace("%20", " "): ENUM}},
            ('"x"',),
            '"z"',
        )
        for each in NAMES
    },
    **{f"the draft {each}": (ENUM, {"$schema": each}, ('"x"',), '"z"') for each in DRAFTS},
}


@pytest.mark.parametrize("name", MEANT)
def test_a_schema_is_read_as_it_is_meant(forms: Forms, tokenizer: GgufTokenizer, name: str) -> None:
    inner, root, taken, refused = MEANT[name]
    schema = {**root, "type": "object", "properties": {"a": inner}, "required": ["a"]}
    for strict in (False, True):
        form = made(schema=schema, lenient=not strict)
        own = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
        call = call_form(use(HERMES, (own,)), ["f"], several=False)
        assert not forms.compiled(form).warnings
        assert not forms.compiled(call).warnings
        for value in taken:
            assert whole(forms, tokenizer, form, f'{{"a": {value}}}'), value
            assert whole(forms, tokenizer, call, said("f", f'{{"a": {value}}}')), value
        assert not whole(forms, tokenizer, form, f'{{"a": {refused}}}')
        assert not whole(forms, tokenizer, call, said("f", f'{{"a": {refused}}}'))
        assert not whole(forms, tokenizer, call, said("f", "{}")), "a is required"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("composed", "below", "taken", "refused"),
    [
        ({"anyOf": [{"type": "object"}, ENUM]}, "anyOf/0", "{}", '"x"'),
        ({"anyOf": [{"type": "object"}, ENUM]}, "anyOf/1", '"x"', "{}"),
        ({"oneOf": [{"type": "object"}, ENUM]}, "oneOf/1", '"x"', "{}"),
        ({"allOf": [{"type": "object"}], "properties": {"q~/%": ENUM}}, "properties/q~0~1%25", '"x"', "{}"),
        ({"allOf": [ENUM], "description": "d"}, "allOf/0", '"x"', "{}"),
    ],
)
def test_a_reference_into_a_schema_that_may_be_null_leads_to_the_same_part(
    forms: Forms,
    tokenizer: GgufTokenizer,
    composed: dict[str, Any],
    below: str,
    taken: str,
    refused: str,
    strict: bool,
) -> None:
    parts = {"a": {**composed, "nullable": True}, "b": {"$ref": f"#/properties/a/{below}"}}
    schema = {"type": "object", "properties": parts, "required": ["b"]}
    assert takes(forms, tokenizer, f'{{"b": {taken}}}', schema=schema, lenient=not strict)
    assert not takes(forms, tokenizer, f'{{"b": {refused}}}', schema=schema, lenient=not strict)
    (*warnings,) = forms.compiled(made(schema=schema, lenient=not strict)).warnings
    assert any("nullable is left out" in each for each in warnings) == ("anyOf" not in composed)


def test_the_arguments_of_a_call_are_never_null(forms: Forms, tokenizer: GgufTokenizer) -> None:
    own = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "nullable": True}}}
    for form in (call_form(use(HERMES, (own,)), ["f"], several=False), begun_form(use(HERMES, (own,)))):
        assert whole(forms, tokenizer, form, said("f", "{}"))
        assert not whole(forms, tokenizer, form, said("f", "null"))


def test_properties_may_have_the_names_of_such_keywords(forms: Forms, tokenizer: GgufTokenizer) -> None:
    schema = {"type": "object", "properties": {"nullable": {"const": True}, "$id": {"const": "#a"}}}
    taken = '{"nullable": true, "$id": "#a"}'
    assert takes(forms, tokenizer, taken, schema=schema)
    assert not takes(forms, tokenizer, taken.replace("true", "null"), schema=schema)


def test_a_strict_schema_is_kept_without_a_format_that_json_schema_does_not_have(
    forms: Forms, tokenizer: GgufTokenizer
) -> None:
    (warning,) = forms.compiled(made(schema=PATHS)).warnings
    assert "'path'" in warning
    assert takes(forms, tokenizer, '{"path": "/a b"}', schema=PATHS)
    assert not forms.compiled(made(schema={"type": "integer", "format": "int64"})).warnings
    with pytest.raises(InvalidRequestError, match="regex"):
        forms.compiled(made(schema={"type": "string", "format": "regex"}))


def test_an_only_part_of_all_joins_nothing(forms: Forms, tokenizer: GgufTokenizer) -> None:
    formats = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "uuid")
    texts = [{"format": each} for each in formats] + [{"pattern": f"^x{number}$"} for number in range(3)]
    properties = {f"p{number}": {"type": "string", **each} for number, each in enumerate(texts)}
    alone = {"allOf": [{"$ref": "#/$defs/E"}], "description": "x", "default": "x", "example": "x", "x-order": 1}
    schema = {"$defs": {"E": ENUM}, "type": "object", "properties": {**properties, "e": alone}, "required": ["e"]}
    for lenient in (False, True):
        assert takes(forms, tokenizer, '{"e": "x"}', schema=schema, lenient=lenient)
        assert not takes(forms, tokenizer, '{"e": "z"}', schema=schema, lenient=lenient)


def test_values_that_look_like_keywords_stay(forms: Forms, tokenizer: GgufTokenizer) -> None:
    schema: dict[str, Any] = {
        "properties": {"type": {"const": None}, "pattern": {"enum": [{"type": "int", "required": None}]}},
        "required": ["type", "pattern"],
    }
    assert forms.compiled(made(schema=schema, lenient=True)).warnings == ()
    said = '{"type": null, "pattern": {"type": "int", "required": null}}'
    assert takes(forms, tokenizer, said, schema=schema, lenient=True)


WORD = {"type": "string"}


@pytest.mark.parametrize("name", ["title", "default", "examples", "readOnly", "properties", "$defs", "a/b"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_property_with_any_name_may_be_referred_to(name: str, strict: bool) -> None:
    reference = f"#/properties/{name.replace('/', '~1')}"
    tags = {"type": "array", "items": {"$ref": reference}}
    asked = use(QWEN_XML, (tool("f", {name: {"type": "integer"}, "tags": tags}, "tags", strict=strict),))
    text = "<tool_call>\n<function=f>\n<parameter=tags>\n[7]\n</parameter>\n</function>\n</tool_call>"
    for form in (call_form(asked, ["f"], several=False), begun_form(asked)):
        assert is_whole(form, text)
        assert not is_whole(form, text.replace("7", '"x"'))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("reference", "more"),
    [
        ("#/components/schemas/default", {"components": {"schemas": {"default": WORD}}}),
        ("#/$defs/group/title", {"$defs": {"group": {"title": WORD}}}),
        ("#/$defs/group/examples/items", {"$defs": {"group": {"examples": {"items": WORD}}}}),
        ("#/x-parts/description", {"x-parts": {"description": WORD}}),
    ],
)
def test_what_a_reference_leads_to_stays_under_any_name(reference: str, more: dict[str, Any], strict: bool) -> None:
    own = tool("f", {"a": {"$ref": reference}}, "a", strict=strict)
    own["function"]["parameters"] |= more
    for form in (call_form(use(HERMES, (own,)), ["f"], several=False), begun_form(use(HERMES, (own,)))):
        assert is_whole(form, said("f", '{"a": "x"}'))
        assert not is_whole(form, said("f", '{"a": 7}'))


def test_only_what_says_nothing_of_a_value_is_left_out() -> None:
    about = {"title": "T", "description": "d", "default": "x", "examples": ["x"], "readOnly": True, "$comment": "c"}
    of_names = {"dependentRequired": {"title": ["examples"], "default": []}, "required": ["title"]}
    inner = {"properties": {"default": True, "title": WORD}, "dependencies": {"examples": ["title"], "title": WORD}}
    assert binding({**about, **of_names, **inner, "items": about}) == {**of_names, **inner, "items": {}}


ASKED = (
    tool("send", {"to": {"type": "string", "pattern": EMAIL}, "n": {"type": "INTEGER"}}, "to", "n"),
    tool("see", {"at": {"$ref": "https://example.com/at"}}, "at"),
    tool("clock", {"zone": {"enum": ["UTC", "%json x"]}}, "zone"),
)


def said(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_a_tool_whose_schema_cannot_be_followed_is_free_and_the_others_stay_bound(
    forms: Forms, tokenizer: GgufTokenizer
) -> None:
    names = [each["function"]["name"] for each in ASKED]
    for form in (call_form(use(HERMES, ASKED), names, several=False), begun_form(use(HERMES, ASKED))):
        assert whole(forms, tokenizer, form, said("send", '{"to": "x", "n": 3}'))
        assert not whole(forms, tokenizer, form, said("send", '{"to": "x", "n": "3"}'))
        assert whole(forms, tokenizer, form, said("see", '{"what": 3}'))
        assert not whole(forms, tokenizer, form, said("see", "3"))
        assert whole(forms, tokenizer, form, said("clock", '{"zone": "%json x"}'))
        assert not whole(forms, tokenizer, form, said("clock", '{"zone": "x"}'))
        warnings = " ".join(forms.compiled(form).warnings)
        assert "parameters of a tool cannot be followed and are free" in warnings
        assert "'INTEGER' is read as 'integer'" in warnings


def test_a_tool_that_is_too_costly_loses_the_keyword_or_is_free_alone(forms: Forms, tokenizer: GgufTokenizer) -> None:
    names = {f"p{number}": {"type": "null"} for number in range(2001)}
    tools = (tool("wait", {"ms": {"type": "integer", "multipleOf": 86400}}, "ms"), tool("all", names), ASKED[2])
    called = ["wait", "all", "clock"]
    for form in (call_form(use(HERMES, tools), called, several=False), begun_form(use(HERMES, tools))):
        assert any("multipleOf is left out" in each for each in forms.compiled(form).warnings)
        assert whole(forms, tokenizer, form, said("wait", '{"ms": 7}'))
        assert not whole(forms, tokenizer, form, said("wait", '{"ms": "7"}'))
        assert whole(forms, tokenizer, form, said("all", '{"other": 7}'))
        assert not whole(forms, tokenizer, form, said("clock", '{"zone": "x"}'))


def test_one_tool_that_cannot_be_followed_frees_none_of_many_others(forms: Forms, tokenizer: GgufTokenizer) -> None:
    many = tuple(tool(f"f{number}", {f"p{number}": {"type": "integer"}}, f"p{number}") for number in range(250))
    asked = use(HERMES, (*many, tool("bad", {"x": {"$ref": "#/nowhere"}})))
    form = call_form(asked, [each["function"]["name"] for each in asked.tools], several=False)
    assert len(forms.compiled(form).warnings) == 1
    assert whole(forms, tokenizer, form, said("f249", '{"p249": 7}'))
    assert not whole(forms, tokenizer, form, said("f249", '{"p249": "7"}'))


def test_the_schema_of_an_answer_beside_tools_is_refused_if_it_cannot_be_followed(forms: Forms) -> None:
    answer = made(schema={"$ref": "https://example.invalid/a"}, lenient=True)
    with pytest.raises(InvalidRequestError, match="cannot be followed"):
        forms.compiled(answer)
    names = [each["function"]["name"] for each in ASKED]
    with pytest.raises(InvalidRequestError, match="cannot be followed"):
        forms.compiled(call_form(use(HERMES, ASKED), names, several=False, otherwise=answer))


def test_many_parts_that_are_left_out_give_a_few_warnings(forms: Forms) -> None:
    form = made(schema={"type": "object", **{f"minimum{number}": None for number in range(100)}}, lenient=True)
    warnings = forms.compiled(form).warnings
    assert len([each for each in warnings if "is null" in each]) == 20
    assert any("80 more" in each for each in warnings)


def test_a_strict_tool_whose_schema_cannot_be_followed_is_refused(forms: Forms) -> None:
    for each in ASKED[:2]:
        strict = ({**each, "function": {**each["function"], "strict": True}}, ASKED[2])
        with pytest.raises(InvalidRequestError, match="a call of these tools cannot be followed"):
            forms.compiled(call_form(use(HERMES, strict), ["clock", strict[0]["function"]["name"]], several=False))


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        ({"type": "array", "uniqueItems": True}, 'no form can keep ["uniqueItems"]'),
        ({"type": "string", "format": "regex"}, "no form can keep the format regex"),
    ],
)
def test_a_refused_strict_tool_names_the_keyword_and_shows_no_grammar(
    forms: Forms, inner: dict[str, Any], why: str
) -> None:
    strict = tool("send", {"to": inner}, "to", strict=True)
    with pytest.raises(InvalidRequestError) as raised:
        forms.compiled(call_form(use(HERMES, (strict,)), ["send"], several=False))
    assert raised.value.message == f"a call of these tools cannot be followed: {why}"
    assert raised.value.hint == "leave strict out"


@pytest.mark.parametrize("style", [QWEN_XML, LFM2], ids=["marks", "Python"])
def test_arguments_that_are_not_json_have_their_types_too(forms: Forms, style: CallFormat) -> None:
    own = tool("set", {"to": {"type": "FLOAT", "minimum": None}, "on": {"type": "int", "maximum": 3}}, "to")
    assert forms.compiled(begun_form(use(style, (own,)))).warnings


def test_a_large_bound_is_kept_in_a_range(forms: Forms, tokenizer: GgufTokenizer) -> None:
    least = 2 * 10**18
    schema = {"type": "integer", "minimum": least, "maximum": 2**63}
    assert not forms.compiled(made(schema=schema, lenient=True)).warnings
    assert takes(forms, tokenizer, str(least), schema=schema, lenient=True)
    assert not takes(forms, tokenizer, "5", schema=schema, lenient=True)
