"""Calls in an answer's text: each format, any chunks, and no text lost."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.text.conversation import call_formats as formats
from edgespec.text.conversation.call_formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    MOST_NAME,
    OLMO,
    QWEN_XML,
    CallFormat,
    call_format,
)
from edgespec.text.conversation.call_reader import Known
from edgespec.text.conversation.pieces import Piece, ToolCall
from edgespec.text.conversation.tool_calls import MOST_CALLS, CallText
from tests.support.call_samples import FORMATS, SAMPLES

KNOWN = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {},
}


def parser(form: CallFormat) -> CallText:
    return CallText(form, KNOWN, ids="abcdefg")


def found(form: CallFormat, *chunks: str, known: Known = KNOWN) -> tuple[str, list[tuple[str, str]]]:
    """The text without calls, and the calls."""
    own = CallText(form, known, ids="abcdefg")
    pieces = [piece for chunk in chunks for piece in own.feed(chunk)] + own.flush()
    assert "".join(piece.raw for piece in pieces) == "".join(chunks), "nothing is lost"
    calls = [piece.call for piece in pieces if piece.call]
    assert [(call.index, call.id) for call in calls] == [(at, f"abcdefg{at:02d}") for at in range(len(calls))]
    return "".join(piece.text for piece in pieces), [(call.name, call.arguments) for call in calls]


PARIS = '{"city": "Paris"}'
CALL = f'{{"name": "weather", "arguments": {PARIS}}}'
LLAMAS = f'{{"name": "weather", "parameters": {PARIS}}}'
FUNCTION = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
ONE = [("weather", PARIS)]
OLMOS = '<function_calls>weather(city="Paris", days=2)\nnow()</function_calls>'
LISTED = '{"city": "Paris", "days": [2, {"a": []}]}'
TWO = [("weather", '{"city": "Paris", "days": 2}'), ("now", "{}")]


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", ONE),
        (OLMO, f"So. {OLMOS}", "So.", TWO),
        (OLMO, OLMOS.replace('"', "'"), "", TWO),
        (OLMO, OLMOS.replace("\n", ", "), "", TWO),
        (OLMO, OLMOS.replace("\n", ";\n"), "", TWO),
        (OLMO, OLMOS.replace("now()", "now();"), "", TWO),
        (OLMO, OLMOS.replace("2)", "2, )"), "", TWO),
        (OLMO, OLMOS.replace("2", "[2, {'a': [],},]"), "", [("weather", LISTED), TWO[1]]),
        (OLMO, OLMOS.replace("\n", ", and ").replace("</", "; </"), ", and now(); </function_calls>", TWO[:1]),
        (OLMO, "<function_calls>\nnow()\n</function_calls>", "", TWO[1:]),
        (OLMO, "<function_calls>now {}</function_calls>", "<function_calls>now {}</function_calls>", []),
        (OLMO, "<function_calls>[now()]</function_calls>", "", TWO[1:]),
        (HERMES, f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n", "Let me see.", ONE),
        (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> So.", "So.", ONE * 2),
        (HERMES, f"<tool_call>\n{CALL}", "", ONE),
        (HERMES, f"<tool_call>{CALL}<tool_call>{CALL}", "", ONE * 2),
        (HERMES, f"<tool_call>{{{CALL}}}</tool_call>", "", ONE),
        (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
        (HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
        (HERMES, '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "now"}</tool_call>', "", [("now", '{"a": 1}')]),
        (
            HERMES,
            '<tool_call>{"name": "now", "arguments": {"a": "}</tool_call>\\"{"}}</tool_call>',
            "",
            [("now", '{"a": "}</tool_call>\\"{"}')],
        ),
        (HERMES, f"```json\n{CALL}\n```", "", ONE),
        (HERMES, f"```\n{CALL}\n```", "", ONE),
        (HERMES, f"\n{CALL}\n", "", ONE),
        (HERMES, f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>", "", ONE * 2),
        (HERMES, f"<tool_call>\n{CALL}\n{CALL}", "", ONE * 2),
        (HERMES, f"<tool_call>{CALL}{{{CALL}}}{CALL}</tool_call><tool_call>{CALL}</tool_call>", "", ONE * 4),
        (HERMES, f"<tool_call>{CALL}\n{CALL[:-1]}", CALL[:-1], ONE),
        (HERMES, f'<tool_call>{CALL}\n{{"a": 1}}</tool_call>', '{"a": 1}</tool_call>', ONE),
        (LLAMA, LLAMAS, "", ONE),
        (LLAMA, f"<|python_tag|>{LLAMAS}", "", ONE),
        (LLAMA, f"{LLAMAS}; {LLAMAS}", "", ONE * 2),
        (LLAMA, '{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}]", "", ONE),
        (MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL}]", "", ONE * 2),
        (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{PARIS}", "", ONE),
        (MISTRAL, f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{PARIS}", "", ONE),
        (MISTRAL, f"Yes.[TOOL_CALLS]weather{PARIS}[TOOL_CALLS]now{{}}", "Yes.", [*ONE, ("now", "{}")]),
        (QWEN_XML, f"<tool_call>\n{FUNCTION}\n</tool_call>", "", ONE),
        (QWEN_XML, FUNCTION, "", ONE),
        (QWEN_XML, f"So:\n<tool_call>{FUNCTION}", "So:", ONE),
        (QWEN_XML, f"So:\n{FUNCTION}\n</tool_call>", "So:", ONE),
        (QWEN_XML, f"{FUNCTION} More", "More", ONE),
        (QWEN_XML, "<function=now></function>", "", [("now", "{}")]),
        (
            QWEN_XML,
            "<function=weather><parameter=city>\n12\n</parameter><parameter=days>\n3\n</parameter>"
            '<parameter=more>["a"]</parameter><parameter=note>a <b>\n\nc</parameter></function>',
            "",
            [("weather", '{"city": "12", "days": 3, "more": ["a"], "note": "a <b>\\n\\nc"}')],
        ),
        (QWEN_XML, f"<tool_call>\n{FUNCTION}\n{FUNCTION}\n</tool_call>", "", ONE * 2),
        (QWEN_XML, f"<tool_call>{CALL}</tool_call>", "", ONE),
        (QWEN_XML, f"<tool_call>\n{FUNCTION}\n<function=other>", "<function=other>", ONE),
        (
            QWEN_XML,
            "<function=weather><parameter=city>\na\n<parameter=days>3<parameter=b></parameter></function>",
            "",
            [("weather", '{"city": "a", "days": "3<parameter=b>"}')],
        ),
        (
            QWEN_XML,
            "<function=weather><parameter=city>a <parameter=city> b</parameter></function>",
            "",
            [("weather", '{"city": "a <parameter=city> b"}')],
        ),
        (
            QWEN_XML,
            "<function=weather><parameter=note>a</parameter>b\n</parameter>\n</function>",
            "",
            [("weather", '{"note": "a</parameter>b"}')],
        ),
        (
            QWEN_XML,
            f"<tool_call><function=now><parameter=a>x</parameter>\n</tool_call>\n<tool_call>{FUNCTION}</tool_call>",
            "<tool_call><function=now><parameter=a>x</parameter>\n</tool_call>",
            ONE,
        ),
        (
            QWEN_XML,
            f"<function=now><parameter=a>x</parameter> So:\n{FUNCTION}",
            "<function=now><parameter=a>x</parameter> So:",
            ONE,
        ),
        (
            QWEN_XML,
            "<tool_call><function=now><parameter=a>x\n<parameter=b>\ny\n</function>\n</tool_call>"
            "<tool_call><function=now><parameter=a>z</parameter></function></tool_call>",
            "",
            [("now", '{"a": "x", "b": "y"}'), ("now", '{"a": "z"}')],
        ),
    ],
)
def test_calls_of_each_format_are_read(form: CallFormat, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert found(form, text) == (said, calls)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_format_has_calls_between_texts_calls_in_a_row_and_calls_that_are_cut_off(name: str) -> None:
    form, sample = SAMPLES[name]
    assert found(form, sample) == ("", ONE)
    assert found(form, f"Let me see.\n\n{sample}\n{sample} So.") == ("Let me see.So.", ONE * 2)
    unknown = sample.replace("weather", "sunshine")
    assert found(form, unknown) == (unknown, [])
    needed = min(end for end in range(len(sample) + 1) if found(form, sample[:end])[1])
    assert found(form, sample[: needed - 1]) == (sample[: needed - 1], [])
    assert found(form, sample[:needed])[1] == ONE


BARELY = {
    "seed": (
        "<function=weather>\n<parameter=city>\nA</parameter>\n<parameter=days>3</parameter></function>",
        "\nA",
    ),
    "minimax": (
        '<invoke name="weather"><parameter name="city"> A </parameter><parameter name="days">3</invoke>'
        "</minimax:tool_call>",
        " A ",
    ),
    "deepseek xml": (
        '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="true">3</｜DSML｜parameter>'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter></｜DSML｜invoke>',
        "3",
    ),
    "deepseek": ('<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "A", "days": 3}', "A"),
    "kimi": ('<|tool_call_begin|>weather<|tool_call_argument_begin|>{"city": "A", "days": 3}', "A"),
    "glm": (
        "<tool_call>weather<arg_key>city</arg_key><arg_value></tool_call></arg_value><arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value></tool_call>",
        "</tool_call>",
    ),
    "harmony": ('to=functions.weather<|channel|>commentary json<|message|>{"city": "A", "days": 3}', "A"),
    "minicpm": (
        '<function name="weather"><param name="city"><![CDATA[<A></param>]]></param><param name="days">3</param>'
        "</function>",
        "<A></param>",
    ),
    "gemma": ('<|tool_call>call:weather{city:<|"|>a\'s "b", {c}\\<|"|>,days:3}', 'a\'s "b", {c}\\'),
    "lfm2": ("<|tool_call_start|>[weather(city='it\\'s', days=3)]", "it's"),
    "mistral": ('[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{"city": "A", "days": 3}', "A"),
    "apertus": ('<|tools_prefix|>[{"weather": {"city": "A", "days": 3}}, {"now": {}}]', "A"),
}


@pytest.mark.parametrize("name", BARELY)
def test_calls_are_read_without_the_marks_that_they_do_not_need(name: str) -> None:
    text, city = BARELY[name]
    _, ((function, arguments), *_) = found(FORMATS[name], text)
    assert (function, json.loads(arguments)) == ("weather", {"city": city, "days": 3})


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.parameters])
def test_a_value_ends_at_an_end_mark_only_where_the_call_continues_behind_it(name: str) -> None:
    form, sample = SAMPLES[name]
    end = form.parameters[-1][1]
    begin = formats.Mark(form.parameters[-1][0]).parts[0]
    almost = (f"a{end} \n {begin}", f"{end}{form.ends[0][:-1]} ")
    for city in (f"a{end}b", f"{end}{end}", f"<a>\n  {begin}>1{end}\n</a>", *almost):
        text = sample.replace("Paris", city)
        expected = json.dumps({"city": city}, ensure_ascii=False)
        assert found(form, text) == ("", [("weather", expected)]), city
        assert found(form, *text) == found(form, text), city
    cut = sample[: sample.index("Paris")] + f"a{end}b{end}\n"
    assert found(form, cut) == (cut, [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "<tool_call>"),
        (HERMES, "a <tool_call> b"),
        (HERMES, f"<tool_call>{CALL[:-1]}"),
        (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": -1e999}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "now", "arguments": "{"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
        (HERMES, '<tool_call>{"name": 5}</tool_call>'),
        (HERMES, "<tool_call>{'name': 'now'}</tool_call>"),
        (HERMES, '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3001 + "</tool_call>"),
        (HERMES, f"The format is:\n```json\n{CALL}\n```"),
        (HERMES, f"```python\n{CALL}\n```"),
        (HERMES, f"```json\n{CALL}\nand more"),
        (HERMES, '{"name": "Ada", "age": 36}'),
        (HERMES, '{"age": 36}'),
        (HERMES, "``"),
        (HERMES, "```"),
        (HERMES, "{"),
        (LLAMA, f"It is {LLAMAS}"),
        (LLAMA, "<|python_tag|>print(1)"),
        (LLAMA, f"<|python_tag|>{LLAMAS[:-1]}"),
        (MISTRAL, "[TOOL_CALLS]"),
        (MISTRAL, "[TOOL_CALLS] []"),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}"),
        (MISTRAL, f"[TOOL_CALLS] [{CALL} {CALL}]"),
        (MISTRAL, "[TOOL_CALLS]other[ARGS]{}"),
        (MISTRAL, "[TOOL_CALLS] weather\nin {}"),
        (MISTRAL, "[TOOL_CALLS]" + "x" * 300),
        (MISTRAL, CALL),
        (QWEN_XML, "<function="),
        (QWEN_XML, "<function=other></function>"),
        (QWEN_XML, "<function=now>text</function>"),
        (QWEN_XML, "<function=now><parameter=a>1</function>"),
        (QWEN_XML, "<function=now><parameter=<a>>1</parameter></function>"),
        (QWEN_XML, f"<function={'n' * 300}"),
    ],
)
def test_text_that_is_not_a_call_stays_text(form: CallFormat, text: str) -> None:
    assert found(form, text) == (text, [])


def test_calls_beyond_the_most_are_text() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    said, calls = found(HERMES, text * (MOST_CALLS + 1))
    assert len(calls) == MOST_CALLS
    assert said == text


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_many_braces_are_text(form: CallFormat) -> None:
    for text in ("{" * 20_000, "<tool_call>" + "{" * 20_000 + "}" * 20_000, "[TOOL_CALLS]" + "{" * 20_000):
        assert found(form, text) == (text, [])


@pytest.mark.parametrize("name", SAMPLES)
def test_names_of_tools_may_be_as_long_as_they_are_accepted(name: str) -> None:
    form, sample = SAMPLES[name]
    long = "fs." + "w" * (MOST_NAME - 3)
    said, calls = found(form, *sample.replace("weather", long), known={long: {}})
    assert [call[0] for call in calls] == [long], said


@pytest.mark.parametrize("end", ["}", "}}"])
@pytest.mark.parametrize("opening", ["<tool_call>", ""])
def test_a_call_in_double_braces_may_end_with_one(opening: str, end: str) -> None:
    text = opening + '{{"name": "weather", "arguments": {"city": "Paris"}' + end
    assert found(HERMES, text) == ("", [("weather", '{"city": "Paris"}')])
    assert found(HERMES, *text) == found(HERMES, text)


PLAIN = [*"{}[](),;\"'\\:=<`\n a1é🙂", "</", "weather", "now", "city", "days", "Hello.", "```json", "```", '"name"']
MORE = [CALL, CALL[:-3], LLAMAS, PARIS, "{'city': 'x'}"]


def pieces(form: CallFormat, sample: str) -> st.SearchStrategy[str]:
    """What calls consist of in this format."""
    own = [form.opening, form.closing, *form.ends, *form.marks, sample, sample[:-9], sample[9:]]
    values = [mark for pair in form.parameters for mark in pair]
    filled = [
        mark.format(name="weather", key="city", kind="string", id="x:0", word="json")
        for mark in (*form.heads, *values)
    ]
    return st.sampled_from([each for each in (*own, *filled) if each] * 2 + PLAIN + MORE)


@pytest.mark.parametrize("name", SAMPLES)
@given(st.data())
@settings(max_examples=80, deadline=None)
def test_chunks_do_not_change_calls_and_text(name: str, data: st.DataObject) -> None:
    form, sample = SAMPLES[name]
    text = "".join(data.draw(st.lists(pieces(form, sample), max_size=14)))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    said, calls = whole = found(form, text)
    assert found(form, *cut(text, sizes)) == whole
    assert calls or said == text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (LLAMA, LLAMAS + " ; " + LLAMAS),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "}}{\\"}"}}</tool_call>'),
        (HERMES, f"a\n\n<tool_call>\n{CALL}\n</tool_call> b"),
        *SAMPLES.values(),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_a_call_between_texts_is_read_from_chunks_of_any_size(form: CallFormat, text: str, size: int) -> None:
    for whole in (text, f"First.\n\n{text}", f"Well.{text}\nThen."):
        assert found(form, *cut(whole, [size])) == found(form, whole)


def cut(text: str, sizes: list[int]) -> list[str]:
    """The text in pieces of these sizes, again and again."""
    chunks, at = list[str](), 0
    for size in cycle(sizes):
        if at >= len(text):
            return chunks
        chunks.append(text[at : at + size])
        at += size
    raise AssertionError


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_text_without_a_call_is_held_back_only_where_a_call_may_begin(form: CallFormat) -> None:
    own, text = parser(form), 'Paris: a <b> [TOOL] {"x": 1} `code` and ```json {} ``` are text.'
    shown = ""
    for position, character in enumerate(text, 1):
        shown += "".join(piece.text for piece in own.feed(character))
        held = text[len(shown) : position]
        assert len(held.strip()) < max(map(len, form.openings)), "only the beginning of an opening"
    assert shown + "".join(piece.text for piece in own.flush()) == text


def test_a_call_is_given_as_soon_as_it_is_complete() -> None:
    own = parser(HERMES)
    assert own.feed(f"<tool_call>{CALL}</tool_call") == []
    call = ToolCall(0, "abcdefg00", "weather", PARIS)
    assert own.feed(">") == [Piece(f"<tool_call>{CALL}</tool_call>", call=call)]
    assert own.feed("\n") == [Piece("\n")]
    assert own.flush() == []


def test_a_long_call_is_not_read_again_for_every_chunk() -> None:
    code = "x = {}\n" * 4000
    text = f"<tool_call>{json.dumps({'name': 'now', 'arguments': {'code': code}})}</tool_call>"
    _, ((_, arguments),) = found(HERMES, *(text[at : at + 40] for at in range(0, len(text), 40)))
    assert json.loads(arguments) == {"code": code}


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }}", HERMES),
        ('{{ "<tool_call>{{\\"name\\": <function-name>}}" }}', HERMES),
        ("<tool_call><function=x><parameter=y>", QWEN_XML),
        ("[TOOL_CALLS]", MISTRAL),
        ('<|start_header_id|> {"name": f, "parameters": p}', LLAMA),
        ('<|start_header_id|> {"name": f}', None),
        ("<tool_call>{{ name }}<arg_key>", formats.GLM),
        ('<tool_calls>[{"name": ', formats.LISTED),
        ("<tool_call>{{ name }}", None),
        ("{{ messages }}", None),
    ],
)
def test_the_format_of_calls_is_found_in_the_template(template: str, form: CallFormat | None) -> None:
    assert call_format(template) is form


def test_every_format_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "embedding" / "requests.md").read_text(encoding="utf-8")
    for form in formats.FORMATS:
        assert f"\n| {form.models} | " in page
