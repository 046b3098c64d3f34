"""Grammars of calls: what the grammar of a format allows is read as a call, and what models write is allowed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.call_formats import (
    FUNCTION_GEMMA,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    LFM2,
    LLAMA,
    OLMO,
    QWEN_XML,
    CallFormat,
)
from edgespec.text.conversation.pieces import ToolCall
from edgespec.text.conversation.tool_use import ToolUse
from edgespec.text.grammar.calls import bare_beginning, begun_form, call_form
from edgespec.text.grammar.form import MOST_BYTES, Form
from tests.support.call_samples import SAMPLES

WEATHER = {"city": {"enum": ["Oslo", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}}
CLOCK = {"zone": {"enum": ["UTC", "Central Europe"]}, "seconds": {"type": "boolean"}}
BYTES = LLTokenizer("byte")


def tool(name: str, properties: Mapping[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = (tool("weather", WEATHER, "city"), tool("clock", CLOCK, "zone", "seconds"))


def use(form: CallFormat, tools: tuple[dict[str, Any], ...] = TOOLS, **marks: int) -> ToolUse:
    return ToolUse(
        tools=tools, format=form, marks={token: name.encode() for name, token in marks.items()}, ids="x" * 7
    )


def matcher(form: Form) -> LLMatcher:
    made = LLMatcher(BYTES, LLMatcher.grammar_from_lark(form.text))
    assert not made.is_error(), made.get_error()
    return made


def is_whole(form: Form, text: str) -> bool:
    made, data = matcher(form), list(text.encode())
    return made.try_consume_tokens(data) == len(data) and made.is_accepting()


def drawn(form: Form, seed: int) -> str:
    """A random text of the form, which ends where it may. Letters outside of ASCII are rare."""
    made, draw, found = matcher(form), random.Random(seed), list[int]()
    while not made.is_accepting():
        mask = np.frombuffer(made.compute_bitmask(), dtype=np.uint32)
        allowed = [token for token in range(256) if mask[token // 32] >> token % 32 & 1]
        plain = [token for token in allowed if 32 < token < 127]
        found.append(draw.choice(plain or allowed))
        assert made.consume_token(found[-1])
        assert len(found) < 5000
    return bytes(found).decode(errors="replace")


def calls(form: ToolUse, text: str) -> list[ToolCall]:
    parser = form.parser()
    pieces = [*parser.feed(text), *parser.flush()]
    assert not "".join(piece.text for piece in pieces), f"text outside of calls: {text!r}"
    return [piece.call for piece in pieces if piece.call is not None]


@pytest.mark.parametrize("name", SAMPLES)
def test_what_models_write_is_in_the_grammar_of_their_format(name: str) -> None:
    form, sample = SAMPLES[name]
    if form is LLAMA:
        sample = sample.removeprefix("<|python_tag|>")  # its template shows none either
    bound = call_form(use(form), ["weather", "clock"], several=True)
    assert is_whole(bound, sample)
    assert is_whole(bound, sample + "\n" + sample) or form is LLAMA
    assert not is_whole(call_form(use(form), ["clock"], several=True), sample), "another tool"
    assert not is_whole(call_form(use(form), ["weather"], several=False), sample + sample)
    assert not is_whole(bound, sample.replace("Paris", "Rome"))
    assert not is_whole(bound, "Let me see. " + sample)


@pytest.mark.parametrize("name", SAMPLES)
def test_what_the_grammar_of_a_format_allows_is_read_as_a_call(name: str) -> None:
    asked = use(SAMPLES[name][0])
    for seed, named in enumerate(["weather", "clock"] * 4):
        (found,) = calls(asked, drawn(call_form(asked, [named], several=False), seed))
        own = json.loads(found.arguments)
        assert found.name == named
        if named == "weather":
            assert own.pop("city") in ("Oslo", "Paris")
            assert own.pop("days", 1) in (1, 2, 3)
        else:
            assert own.pop("seconds") in (True, False)
            assert own.pop("zone") in ("UTC", "Central Europe")
        assert not own


def test_gpt_oss_is_bound_to_each_way_in_which_it_names_a_function() -> None:
    form = call_form(use(HARMONY), ["weather"], several=False)
    for head in (
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        " to=functions.weather<|channel|>commentary <|constrain|>json",
        " to=functions.weather<|channel|>commentary json",
    ):
        assert is_whole(form, head + '<|message|>{"city": "Oslo"}<|call|>'), head
    assert not is_whole(form, '<|channel|>final<|message|>{"city": "Oslo"}<|call|>')
    assert not is_whole(form, '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"city": "Oslo"}')


def test_a_mark_that_is_a_control_token_is_that_token() -> None:
    text = call_form(use(HERMES, **{"<tool_call>": 7}), ["weather"], several=True).text
    assert "<[7]>" in text
    assert '"<tool_call>"' not in text
    assert '"</tool_call>"' in text


def test_a_text_between_marks_may_hold_anything_but_its_end() -> None:
    form = call_form(use(QWEN_XML, (tool("note", {"text": {"type": "string"}}, "text"),)), ["note"], several=False)
    said = "a < b\n</param>\n<function=x>"
    text = f"<tool_call>\n<function=note>\n<parameter=text>\n{said}\n</parameter>\n</function>\n</tool_call>"
    assert is_whole(form, text)


@pytest.mark.parametrize("name", [name for name, (form, _) in SAMPLES.items() if form.parameters])
def test_a_text_between_marks_may_hold_its_end_mark(name: str) -> None:
    form, sample = SAMPLES[name]
    begin, end = form.parameters[-1]

    def value(key: str, text: str, kind: str = "true") -> str:
        mark = begin.replace("{key}", key).replace("{kind}", kind)
        return f"{mark}{form.padding}{text}{form.padding}{end}"

    inner = value("days", "x", "false")
    asked = use(form, (tool("weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, "city"),))
    for bound in (begun_form(asked), call_form(asked, ["weather"], several=False)):
        for city in (f"a{end}b", end, f"a{end} \n {begin[:5]}\n", f"a{end} \n{form.ends[0][:-1]}"):
            text = sample.replace(value("city", "Paris"), value("city", city) + "\n" + value("days", "3", "false"))
            assert is_whole(bound, text), text
            assert is_whole(bound, sample.replace("Paris", city)), city
            assert not is_whole(bound, text.replace("3", "x")), "the type of the next value"
            assert not is_whole(bound, text[: text.rindex(form.ends[0])]), "a call without its end"
            (found,) = calls(asked, text)
            assert json.loads(found.arguments) == {"city": city, "days": 3}
        for mark in filter(None, (*form.openings, form.closing)):
            for between in ("\n", " So:\n"):
                text = sample.replace("Paris", f"a{end}{between}{mark}")
                assert not is_whole(bound, text), "a call without its end"
        assert not is_whole(bound, sample.replace("Paris", f"a{end}{inner}")), "only where the call cannot continue"
    city = value("city", "Paris")
    assert not is_whole(bound, sample.replace(city, city + city)), "where no other value may follow"
    both = use(form, (tool("weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, "city", "days"),))
    for bound in (begun_form(both), call_form(both, ["weather"], several=False)):
        assert not is_whole(bound, sample), "where the call may not end"
        split = value("city", f"a{end}b") + "\n" + value("days", "3", "false")
        led = is_whole(bound, sample.replace(city, split))
        assert not led, "where a required value is missing: the text does not hold what would end the call"
        assert not is_whole(bound, f"{sample}\nb{end}{value('days', '3', 'false')}{form.ends[0]}{form.closing}")


def test_values_between_marks_have_the_types_of_their_schemas() -> None:
    shared = {"$defs": {"level": {"type": "integer", "minimum": 1, "maximum": 5}}}
    own = tool("set", {"to": {"$ref": "#/$defs/level"}, "on": {"type": ["string", "null"]}}, "to")
    own["function"]["parameters"] |= shared
    form = call_form(use(QWEN_XML, (own,)), ["set"], several=False)
    begin, end = "<tool_call><function=set><parameter=to>\n", "\n</parameter></function></tool_call>"
    assert is_whole(form, begin + "3" + end)
    assert not is_whole(form, begin + "x" + end)
    assert not is_whole(form, "<tool_call><function=set></function></tool_call>"), "a required parameter is missing"


def test_a_tools_arguments_are_an_object_of_its_properties_unless_its_schema_says_otherwise() -> None:
    def arguments(parameters: dict[str, Any]) -> Form:
        own = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        return call_form(use(LLAMA, (own,)), ["f"], several=False)

    def text(arguments: str) -> str:
        return f'{{"name": "f", "parameters": {arguments}}}'

    closed = arguments({"properties": {"a": {"type": "integer"}}})
    assert is_whole(closed, text('{"a": 1}'))
    assert not is_whole(closed, text('{"b": 1}'))
    assert not is_whole(closed, text("3"))
    assert is_whole(arguments({"additionalProperties": True}), text('{"b": 1}'))
    composed = arguments({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {}}, "required": ["a"]}}})
    assert is_whole(composed, text('{"a": 1}'))


def test_tools_with_too_large_schemas_are_refused() -> None:
    large = tool("f", {"a": {"enum": ["x" * MOST_BYTES]}})
    with pytest.raises(InvalidRequestError, match="too large") as raised:
        call_form(use(HERMES, (large,)), ["f"], several=False)
    assert raised.value.param == "tools"


@pytest.mark.parametrize("form", [HERMES, QWEN_XML], ids=["json", "marks"])
def test_schemas_in_other_letters_count_as_in_utf_8_and_descriptions_not_at_all(form: CallFormat) -> None:
    cities = [f"城市{number}" for number in range(12_000)]
    properties = {
        "description": {"type": "array", "items": {"enum": cities, "description": "城" * MOST_BYTES}},
        "default": {"const": {"title": "ü"}, "examples": ["x" * MOST_BYTES]},
    }
    asked = use(form, (tool("f", properties, "description", "default"),))
    for bound in (call_form(asked, ["f"], several=False), begun_form(asked)):
        assert len(bound.text.encode()) > MOST_BYTES // 2
        values = ('["城市7"]', '{"title": "ü"}')
        if form is HERMES:
            arguments = ", ".join(f'"{key}": {value}' for key, value in zip(properties, values, strict=True))
            text = f'<tool_call>\n{{"name": "f", "arguments": {{{arguments}}}}}\n</tool_call>'
        else:
            said = zip(properties, values, strict=True)
            lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in said)
            text = f"<tool_call>\n<function=f>\n{lines}</function>\n</tool_call>"
        assert is_whole(bound, text)
        assert not is_whole(bound, text.replace("城市7", "城市x"))
        assert not is_whole(bound, text.replace("ü", "u"))


def test_half_of_a_character_in_a_schema_is_a_replacement_character() -> None:
    form = call_form(use(LLAMA, (tool("f", {"a": {"const": "\ud83d"}}, "a"),)), ["f"], several=False)
    assert is_whole(form, '{"name": "f", "parameters": {"a": "\ufffd"}}')


def test_only_a_strict_tool_is_kept_whole() -> None:
    for strict, works in ((None, True), (False, True), (True, False)):
        own = tool("f", {"a": {"type": "integer", "not": {"const": 1}}}, strict=strict)
        form = call_form(use(LLAMA, (own,)), ["f"], several=False)
        assert LLMatcher(BYTES, LLMatcher.grammar_from_lark(form.text)).is_error() is not works


def test_a_strict_tools_text_between_marks_is_refused_if_its_schema_cannot_be_kept() -> None:
    some = {"enum": ["red", "blue"]}
    for own, kept in (
        ({"type": "string"}, True),
        ({"$ref": "#/$defs/some"}, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, True),
        ({"type": "string", "pattern": "^[A-Z]{3}$"}, False),
        ({"type": "string", "maxLength": 3}, False),
        ({"anyOf": [{"type": "string", "minLength": 3}, {"type": "null"}]}, False),
        ({"anyOf": [{"$ref": "#/$defs/some"}, {"type": "null"}]}, False),
    ):
        for strict in (True, False):
            given = tool("f", {"code": own}, "code", strict=strict)
            given["function"]["parameters"]["$defs"] = {"some": some}
            asked = use(QWEN_XML, (given,))
            if kept or not strict:
                call_form(asked, ["f"], several=False)
                continue
            with pytest.raises(InvalidRequestError, match="of 'code' in a strict tool") as raised:
                call_form(asked, ["f"], several=False)
            assert raised.value.param == "tools"
        assert begun_form(asked).kind == "call"


def test_without_a_call_the_answer_may_be_json_of_a_schema() -> None:
    other = Form(kind="schema", text=json.dumps({"enum": ["done"]}), spacing="compact")
    form = call_form(use(HERMES), ["weather"], several=True, otherwise=other)
    assert is_whole(form, '"done"')
    assert is_whole(form, SAMPLES["hermes"][1])
    assert not is_whole(form, '"undone"')
    marked = call_form(use(HARMONY), ["weather"], several=True, otherwise=other, marks=("<|a|>", "<|b|>"))
    assert is_whole(marked, '<|a|>"done"')
    assert is_whole(marked, '<|b|>"done"')
    assert is_whole(marked, SAMPLES["harmony"][1])
    assert not is_whole(marked, '"done"')
    strict = tool("f", {"code": {"type": "string", "pattern": "^[A-Z]{3}$"}}, strict=True)
    for format in (HERMES, QWEN_XML, LFM2):
        form = call_form(use(format, (strict,)), ["f"], several=True, otherwise=other)
        assert is_whole(form, '"done"'), "no tool is strict that need not be called"
    with pytest.raises(InvalidRequestError, match="may call tools cannot be bound to a regex"):
        call_form(use(HERMES), ["weather"], several=True, otherwise=Form(kind="regex", text="a"))


# ------------------------------------------------------------------------------------- calls that a model begins


def begun_text(form: CallFormat, sample: str) -> str:
    """The sample from the text on that begins a call."""
    return sample[min(at for mark in form.beginnings if (at := sample.find(mark)) >= 0) :]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_call_that_a_model_begins_is_written_as_models_write_it_and_has_any_text_behind_it(name: str) -> None:
    form, sample = SAMPLES[name]
    bound, text = begun_form(use(form)), begun_text(form, sample)
    assert is_whole(bound, text)
    assert is_whole(bound, "d. " + text + ">\nThat is all {"), "its first and last token may hold other text"
    assert not is_whole(bound, text[: text.index("Paris") + 5])
    assert not is_whole(bound, text.replace("Paris", "Rome"))
    assert not is_whole(bound, text.replace("weather", "weathers"))


ORDERED = tool("f", {"a": {"type": "integer"}, "r": {"type": "integer"}, "b": {"type": "integer"}, "c": {}}, "r")


def xml(*values: str) -> str:
    said = "".join(f"<parameter={key}>\n1\n</parameter>\n" for key in values)
    return f"<tool_call>\n<function=f>\n{said}</function>\n</tool_call>"


def literal(*values: str) -> str:
    return f"<|tool_call_start|>[f({', '.join(f'{key}=1' for key in values)})]<|tool_call_end|>"


def written_json(*values: str) -> str:
    arguments = ", ".join(f'"{key}": 1' for key in values)
    return f'<tool_call>\n{{"name": "f", "arguments": {{{arguments}}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "write"), [(QWEN_XML, xml), (LFM2, literal), (HERMES, written_json)], ids=["marks", "python", "json"]
)
def test_optional_arguments_of_a_call_that_a_model_begins_come_in_any_order(
    form: CallFormat, write: Callable[..., str]
) -> None:
    bound, forced = begun_form(use(form, (ORDERED,))), call_form(use(form, (ORDERED,)), ["f"], several=False)
    for keys in ("r", "rcba", "rbac", "ra", "rcb"):
        assert is_whole(bound, write(*keys)), keys
    assert is_whole(bound, write(*"arbc")), "the schema's order"
    assert is_whole(bound, write(*"cbr")) or form is HERMES, "there required ones come first, or all in order"
    assert not is_whole(bound, write(*"ab")), "a required one is missing"
    assert not is_whole(bound, write("r", "other"))
    assert is_whole(forced, write(*"arbc"))
    for free in (tool("f", {"a": {"type": "integer"}, "b": {"type": "integer"}}), tool("f", {})):
        assert is_whole(begun_form(use(form, (free,))), write())
    assert is_whole(begun_form(use(form, (free,))), write()), "no arguments at all"
    both = tool("f", {"a": {"type": "integer"}, "b": {"type": "integer"}}, "a", "b")
    assert is_whole(begun_form(use(form, (both,))), write(*"ab"))


def test_references_to_other_properties_bind_calls_in_json() -> None:
    inside = {"a": {"type": "integer"}, "b": {"type": "array", "items": {"$ref": "#/properties/a"}}, "c": {}}
    form = begun_form(use(HERMES, (tool("f", inside),)))
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
    assert is_whole(form, text)
    assert not is_whole(form, text.replace("2", '"x"'))


@pytest.mark.parametrize("padding", ["", "\n"])
def test_a_text_need_not_end_with_a_line(padding: str) -> None:
    asked = use(QWEN_XML, (tool("note", {"text": {"type": "string"}}, "text"),))
    text = f"<tool_call><function=note><parameter=text>{padding}x\ny{padding}</parameter></function></tool_call>"
    for bound in (begun_form(asked), call_form(asked, ["note"], several=False)):
        assert is_whole(bound, text)
        assert is_whole(bound, text + "more") is (bound.text.startswith("start: begun"))
    (found,) = calls(asked, text)
    assert json.loads(found.arguments) == {"text": "x\ny"}


@pytest.mark.parametrize(("form", "write"), [(QWEN_XML, xml), (LFM2, literal)], ids=["marks", "python"])
def test_parameters_that_a_schema_refers_to_are_kept_and_unnamed_ones_refused(
    form: CallFormat, write: Callable[..., str]
) -> None:
    one, two = (
        {"properties": {"a": {"type": "integer"}}},
        {"properties": {"b": {"type": "integer"}}, "required": ["b"]},
    )

    def asked(**parameters: Any) -> ToolUse:
        return use(form, ({"type": "function", "function": {"name": "f", "parameters": parameters}},))

    whole = asked(allOf=[one, {"$ref": "#/$defs/two"}], **{"$defs": {"two": two}})
    for bound in (begun_form(whole), call_form(whole, ["f"], several=False)):
        assert is_whole(bound, write("a", "b"))
        assert not is_whole(bound, write("a"))
    either = asked(anyOf=[one, two])
    assert is_whole(begun_form(either), write("a"))
    number, seven = {"properties": {"n": {"type": "integer"}}}, {"properties": {"n": {"const": 7}}}
    for parts in ({**number, "anyOf": [seven]}, {"anyOf": [seven, number]}):
        assert is_whole(begun_form(asked(**parts)), write("n")), "an alternative does not narrow what others allow"
    inside = {"a": {"type": "integer"}, "b": {"anyOf": [{"$ref": "#/properties/a"}, {"type": "null"}]}, "c": {}}
    assert is_whole(begun_form(asked(properties=inside)), write("a", "b", "c"))
    circle = asked(**{"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}})
    assert is_whole(begun_form(circle), write())
    for open_ in ({"additionalProperties": True}, {"patternProperties": {"a": {}}}, {"required": ["a"]}):
        with pytest.raises(InvalidRequestError, match="only be bound to parameters that a tool names") as raised:
            call_form(asked(**open_), ["f"], several=False)
        assert raised.value.param == "tools"
        for keys in ("", "a", "zy"):
            assert is_whole(begun_form(asked(**open_)), write(*keys)), "what the model calls by itself is kept"
        named = begun_form(asked(**open_, properties={"red": {"type": "integer"}, "s": {}}))
        for names in ([], ["s", "red", "z"], ["z"], ["ready", "re", "red"], ["城市", "ünï_1.b-c", "red"]):
            assert is_whole(named, write(*names)), names
        assert not is_whole(named, write("red").replace("1", "x")), "the type of a named one"
        assert not is_whole(named, write("red ").replace("1", "x")), "nor with a blank"
    assert is_whole(call_form(asked(additionalProperties=True, **one), ["f"], several=False), write("a"))


def test_a_mark_of_a_channel_alone_begins_no_call() -> None:
    assert HARMONY.beginnings == ("commentary to=functions.",)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>{"name":"clock","arguments":{"zone":"UTC","seconds":true}}</tool_call>'),
        (HERMES, '<tool_call>\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Oslo"\n  }\n}\n</tool_call>'),
        (QWEN_XML, "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"),
    ],
)
def test_blanks_of_calls_that_a_model_begins_are_free(form: CallFormat, text: str) -> None:
    assert is_whole(begun_form(use(form)), text)


@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("frame", ["{}", "```json\n{}\n```", "```\n{}\n```", "\n{}"])
def test_a_call_without_marks_is_bound_once_it_names_a_tool(frame: str, key: str) -> None:
    asked = use(HERMES if key == "arguments" else LLAMA)
    pattern, form = bare_beginning(asked), begun_form(asked, bare=True)
    assert pattern is not None
    text = frame.replace("{}", f'{{"name": "weather", "{key}": {{"city": "Oslo"}}}}')
    assert pattern.match(text)
    assert not pattern.match(text.replace("weather", "weathers"))
    assert is_whole(form, text)
    assert is_whole(form, text + "\nmore")
    assert not is_whole(form, text.replace("Oslo", "Bergen"))
    assert bare_beginning(use(QWEN_XML)) is None


def test_tools_that_are_strict_bind_begun_calls_as_far_as_possible() -> None:
    own = tool("f", {"a": {"type": "integer", "not": {"const": 1}}}, strict=True)
    assert is_whole(begun_form(use(HERMES, (own,))), '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')


# ---------------------------------------------------------------------------- arguments that are not JSON

PARAMETERS = {
    "a": {"type": "string"},
    "n": {"type": "integer", "minimum": 1, "maximum": 9},
    "on": {"type": ["boolean", "null"]},
    "kind": {"enum": ["it's", 'say "x"', 3, None]},
    "more": {"type": "array"},
    "map": {"type": "object"},
    "any": {},
}
LITERAL = tool("f", PARAMETERS, "n")
PYTHONIC = [
    "n=3",
    "a='x', n=3",
    "n=1, on=True, kind='say \"x\"'",
    "n=9, kind=\"it's\", more=[1, 'a', {'k': None}]",
]
MARKED = [
    "n:3",
    'a:<|"|>x<|"|>,n:3',
    'n:1,on:true,kind:<|"|>say "x"<|"|>',
    "n:9,kind:null,more:[1,true,{k:null}],any:2.5",
]


@pytest.mark.parametrize(
    ("form", "frame", "texts"),
    [
        (LFM2, "<|tool_call_start|>[f({})]<|tool_call_end|>", PYTHONIC),
        (GEMMA, "<|tool_call>call:f{{{}}}<tool_call|>", MARKED),
        (
            FUNCTION_GEMMA,
            "<start_function_call>call:f{{{}}}<end_function_call>",
            [each.replace('<|"|>', "<escape>") for each in MARKED],
        ),
        (
            OLMO,
            "<function_calls>f({})</function_calls>",
            ["n=3", 'a="x\\n", n=3', 'n=1, on=true, kind="say \\"x\\""', 'n=9, kind=null, more=[1, {"k": null}]'],
        ),
    ],
    ids=["python", "marked", "escaped", "python with json"],
)
def test_arguments_that_are_not_json_have_the_names_types_and_values_of_their_schema(
    form: CallFormat, frame: str, texts: list[str]
) -> None:
    asked = use(form, (LITERAL,))
    bound = call_form(asked, ["f"], several=False)
    sign = "=" if form.syntax.is_python else ":"
    for text in texts:
        assert is_whole(bound, frame.format(text)), text
        assert is_whole(begun_form(asked), "So " + frame.format(text) + "."), text
        (found,) = calls(asked, frame.format(text))
        assert json.loads(found.arguments)["n"] in (1, 3, 9)
    for wrong in (
        "",
        f"n{sign}0",
        f"n{sign}x",
        f"b{sign}3",
        f"n{sign}3 n{sign}4",
        texts[0] + ",",
        texts[2].replace("3", "4"),
    ):
        if wrong != texts[2]:
            assert not is_whole(bound, frame.format(wrong)), wrong
    for number in range(20 if form.syntax.is_python else 0):  # random letters never make the mark that ends a text
        (found,) = calls(asked, drawn(bound, number))
        own = json.loads(found.arguments)
        assert own["n"] in range(1, 10)
        assert own.get("kind") in (*PARAMETERS["kind"]["enum"], None)  # type: ignore[misc]
        assert isinstance(own.get("on", None), bool | None)


NULL = {"type": "null"}
ROMANS = {"type": "string", "pattern": "^[IVX]+$"}
NESTED: dict[str, Any] = {}
for _ in range(70):
    NESTED = {"type": "array", "items": NESTED}
DEFINED: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number - 1}"} for number in range(1, 2001)}
DEFINED |= {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}, "n": {"type": "number"}}


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        (PARAMETERS, ""),
        ({"a": {"anyOf": [{"type": "string"}, NULL], "default": None, "title": "A"}, "b": True}, ""),
        ({"a": {"type": ["string", "null"], "enum": ["x", None]}, "b": {"const": 3, "type": "integer"}}, ""),
        ({"a": ROMANS}, "pattern of 'a'"),
        ({"a": {"type": "string", "maxLength": 3}}, "maxLength of 'a'"),
        ({"a": {"anyOf": [NULL, ROMANS]}}, "pattern of 'a'"),
        ({"a": {"type": "array", "items": {"type": "string"}}}, ""),
        ({"a": {"type": "object", "properties": {}}}, ""),
        ({"a": {"anyOf": [{"type": "integer"}, NULL]}}, ""),
        ({"a": {"type": ["number", "null"], "minimum": 3}}, ""),
        ({"a": {"type": "array", "items": ROMANS}}, "pattern of 'a'"),
        ({"a": {"type": "array", "items": {}, "minItems": 1}}, "minItems of 'a'"),
        ({"a": {"items": {}}}, "items of 'a'"),
        ({"a": {"type": "object", "properties": {"b, c": {}}}}, "properties of 'a'"),
        ({"a": {"type": "object", "properties": {"b": {}}, "required": ["c"]}}, "required of 'a'"),
        ({"a": {"type": "object", "additionalProperties": {}}}, "additionalProperties of 'a'"),
        ({"a": {"type": "object", "properties": {"b": ROMANS}}}, "pattern of 'a'"),
        ({"a": {"type": "integer", "anyOf": [{"minimum": 3}]}}, "integer of 'a'"),
        ({"a": {"type": "number", "anyOf": [{"type": "number", "minimum": 3}]}}, "minimum of 'a'"),
        ({"a": {"type": "number", "anyOf": [{"$ref": "#/$defs/n"}]}}, "[$]ref of 'a'"),
        ({"a": {"enum": [[1]]}}, "enum of 'a'"),
        ({"a": {"$ref": "#/$defs/a"}}, "[$]ref of 'a'"),
        ({"a": {"$ref": "#/$defs/n", "type": "number"}}, "[$]ref of 'a'"),
        ({"a": {"$ref": "#/$defs/tree"}}, "[$]ref of 'a'"),
        ({"a": NESTED}, "nesting of 'a'"),
        ({"a": {"$ref": "#/$defs/d2000"}}, "nesting of 'a'"),
        ({"a": {"type": "date"}}, "type of 'a'"),
        ({"a": False}, "false of 'a'"),
        ({"a": {"type": 5}}, "type of 'a'"),
        ({"a": {"enum": 5}}, "enum of 'a'"),
        ({"a": {"anyOf": 5}}, "false of 'a'"),
    ],
)
def test_strict_arguments_that_are_not_json_are_refused_if_they_cannot_be_kept(
    properties: dict[str, Any], said: str
) -> None:
    own = tool("f", properties, strict=True)
    own["function"]["parameters"]["$defs"] = DEFINED
    asked = use(LFM2, (own, tool("g", {})))
    call_form(asked, ["g"], several=False)
    if not said:
        call_form(asked, ["f"], several=False)
        return
    with pytest.raises(InvalidRequestError, match=f"cannot keep {said} in a strict tool") as raised:
        call_form(asked, ["f"], several=False)
    assert raised.value.param == "tools"
    assert begun_form(asked).kind == "call"


@pytest.mark.parametrize(
    ("form", "frame"),
    [
        (GEMMA, "<|tool_call>call:f{{a:{}}}<tool_call|>"),
        (OLMO, "<function_calls>f(a={})</function_calls>"),
        (LFM2, "<|tool_call_start|>[f(a={})]<|tool_call_end|>"),
    ],
    ids=["marked", "python with json", "python"],
)
def test_strict_arguments_that_are_not_json_keep_what_is_in_lists_and_objects(form: CallFormat, frame: str) -> None:
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0}, "at": {"anyOf": [{"$ref": "#/$defs/kind"}, NULL]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    own = tool("f", {"a": {"type": "array", "items": {"$ref": "#/$defs/point"}}}, "a", strict=True)
    own["function"]["parameters"]["$defs"] = {"point": point, "kind": {"enum": ["here", "there"]}}
    asked = use(form, (own,))
    bound = call_form(asked, ["f"], several=False)

    def written(text: str) -> str:
        if form is GEMMA:
            text = re.sub('"(x|at|y)": ', r"\1:", text).replace(", ", ",").replace('"', '<|"|>')
        return frame.format(text.replace('"', "'").replace("null", "None") if form is LFM2 else text)

    for value in ([], [{"x": 3}], [{"x": 0, "at": "there"}, {"x": 1, "at": None}]):
        text = written(json.dumps(value))
        assert is_whole(bound, text), text
        (found,) = calls(asked, text)
        assert json.loads(found.arguments) == {"a": value}
    for wrong in (
        3,
        [3],
        [{}],
        [{"x": -1}],
        [{"x": 1.5}],
        [{"at": "here"}],
        [{"x": 1, "at": "no"}],
        [{"x": 1, "y": 2}],
    ):
        assert not is_whole(bound, written(json.dumps(wrong))), wrong
        assert is_whole(begun_form(asked), written(json.dumps(wrong))) == isinstance(wrong, list), "types alone"


def test_many_references_are_kept_without_copies() -> None:
    defined: dict[str, Any] = {"d0": {"type": "number"}}
    for number in range(1, 20):
        part = {"$ref": f"#/$defs/d{number - 1}"}
        defined[f"d{number}"] = {"type": "object", "properties": {"x": part, "y": part}}
    own = tool("f", {"a": {"$ref": "#/$defs/d19"}}, strict=True)
    own["function"]["parameters"]["$defs"] = defined
    assert len(call_form(use(GEMMA, (own,)), ["f"], several=False).text) < 20_000


def test_strict_parameters_that_are_not_json_are_refused_if_they_are_more_than_listed() -> None:
    for more, said in (
        ({"minProperties": 1}, "minProperties"),
        ({"required": ["b"]}, "required"),
        ({"required": [[]]}, "required"),
    ):
        own = tool("f", {"a": {}}, strict=True)
        own["function"]["parameters"] |= more
        with pytest.raises(InvalidRequestError, match=f"cannot keep {said} in a strict tool"):
            call_form(use(GEMMA, (own,)), ["f"], several=False)


def test_a_number_that_is_not_json_is_a_number() -> None:
    own = tool("f", {"a": {"anyOf": [{"type": "integer"}, {"type": "number"}]}}, "a")
    form = call_form(use(LFM2, (own,)), ["f"], several=False)
    assert is_whole(form, "<|tool_call_start|>[f(a=2.5)]<|tool_call_end|>")
    assert not is_whole(form, '<|tool_call_start|>[f(a="x")]<|tool_call_end|>')


def test_marks_of_texts_may_be_control_tokens() -> None:
    text = call_form(use(GEMMA, (LITERAL,), **{'<|"|>': 9}), ["f"], several=False).text
    assert "literal_text: <[9]> /(?s:.*)/ <[9]>" in text


class ControlledBytes:
    """A tokenizer of bytes, and of control tokens behind them."""

    bos_token_id, eos_token_id = None, 256

    def __init__(self, controls: Mapping[str, int]) -> None:
        self.tokens = [*(bytes([each]) for each in range(256)), b"<eos>", *(name.encode() for name in controls)]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.mark.parametrize(
    "names",
    [
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>", "</tool_call>"),
        ("<arg_key>", "</tool_call>"),
        ("</tool_call>",),
        ("</arg_value>",),
        ("arg_value",),
    ],
)
def test_any_part_of_the_marks_behind_a_text_may_be_a_control_token(names: tuple[str, ...]) -> None:
    controls = {name: number for number, name in enumerate(names, 257)}
    asked = use(GLM, (tool("f", {"a": {"type": "string"}, "n": {"type": "integer"}}, "a"),), **controls)
    vocabulary = LLTokenizer(TokenizerWrapper(ControlledBytes(controls)))
    cut = re.compile(f"({'|'.join(map(re.escape, names))})")

    def allows(form: Form, text: str) -> bool:
        made = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(form.text))
        parts = [[controls[part]] if part in controls else list(part.encode()) for part in cut.split(text)]
        tokens = [token for part in parts for token in part]
        return made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()

    said = "a </arg_value>\n<arg b" if cut.search("</arg_value>") is None else "a </arg_val\n b"
    text = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{said}</arg_value>\n"
    more = "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n"
    for form in (begun_form(asked), call_form(asked, ["f"], several=False)):
        for written in (text, text + more):
            assert allows(form, written + "</tool_call>")
            assert not allows(form, written)
        assert not allows(form, text + more.replace("3", "x") + "</tool_call>")
