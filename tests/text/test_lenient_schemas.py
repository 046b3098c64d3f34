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


UNREAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "a pattern that looks ahead": ({"type": "string", "pattern": EMAIL}, '"x"', "pattern"),
    "a pattern that looks back": ({"type": "string", "pattern": r"^(a|b)\1$"}, '"x"', "pattern"),
    "a pattern of Python's": ({"type": "string", "pattern": r"^a\Z"}, '"x"', "pattern"),
    "a pattern of names": ({"type": "object", "patternProperties": {"^(?!x)": {"type": "null"}}}, "{}", "pattern"),
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
        ({"type": "string", "format": "binary"}, "no form can keep the format binary"),
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
