"""What an answer consists of: the same for any chunks, thinking without its marks, calls where they count."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

import edgespec
from edgespec.text.conversation.answer_parts import Said
from edgespec.text.conversation.call_formats import (
    GEMMA,
    GRANITE,
    HARMONY,
    HERMES,
    LFM2,
    LLAMA,
    MISTRAL,
    QWEN_XML,
    CallFormat,
)
from edgespec.text.conversation.pieces import Piece, ToolCall, joined, overlap
from edgespec.text.conversation.thinking import ThinkingMarks, thinking_marks
from edgespec.text.conversation.tool_calls import CallText
from tests.support import call_samples
from tests.support.answer_pieces import CITY, QWEN, pieces_of
from tests.support.call_samples import SAMPLES
from tests.support.counted_steps import counted_lines

CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
MARKED = f"<tool_call>\n{CALL}\n</tool_call>"
FUNCTION = "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"
FORMATS = {"none": None, **call_samples.FORMATS}
GRANITE_MARKS = replace(QWEN, around=("<response>", "</response>"))


def said(chunks: list[str], **settings: Any) -> Said:
    whole = Said()
    whole.add(pieces_of(chunks, **settings))
    assert whole.raw == "".join(chunks), "nothing is lost"
    return whole


# ---------------------------------------------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nhm, hm\n</think>\n\nYes.", False, "hm, hm", "Yes."),
        ("\n <think>so</think>yes", False, "so", "yes"),
        ("<think>\n\u3000so</think>\n\n\u3000yes", False, "\u3000so", "\u3000yes"),
        ("hm\n\nso\n</think>Yes.", True, "hm\n\nso", "Yes."),
        ("<think>\nhm</think>Yes.", True, "hm", "Yes."),
        ("</think>Yes.", True, "", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>never closed ", False, "never closed", ""),
        ("<think>a </thin b", False, "a </thin b", ""),
        ("<think>a </thin", False, "a </thin", ""),
        ("<think></think><think>again</think>", False, "", "<think>again</think>"),
        ("<think>so</think>\n ", False, "so", ""),
        ("  Yes <think> no", False, None, "  Yes <think> no"),
        ("<thinking> is another word", False, None, "<thinking> is another word"),
        ("", False, None, ""),
        ("", True, None, ""),
        (" \n", False, None, " \n"),
        (" \n", True, "", ""),
        ("<thi", False, None, "<thi"),
        ("<thi", True, "<thi", ""),
    ],
)
def test_thinking_has_no_marks_and_outer_blanks(text: str, inside: bool, reasoning: str | None, content: str) -> None:
    for (name, form), chunks in itertools.product(FORMATS.items(), ([text], list(text))):
        whole = said(chunks, inside=inside, form=form)
        assert (whole.reasoning, whole.content) == (reasoning, content), name
        assert whole.text == text, name
    if not inside:
        assert said([text], marks=None).content == text


def test_thinking_comes_as_it_is_written() -> None:
    whole = [
        (piece.text, piece.reasoning) for piece in pieces_of(["<think>", "\nhm", " so ", "</think>", "\n", "Yes"])
    ]
    assert whole == [("<think>", ""), ("\nhm", "hm"), (" so ", " so"), ("</think>", ""), ("\n", ""), ("Yes", None)]


HARMONY_MARKS, FINAL = thinking_marks("<|channel|>analysis<|message|> <|end|>") or QWEN, "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"<|channel|>analysis<|message|>Hm, hm.<|end|><|start|>assistant{FINAL}Yes.", "Hm, hm.", "Yes."),
        (f"{FINAL}Yes.", "", "Yes."),
        ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
        ("<|channel|>final<|constrain|>JSON<|message|>{}", "", "{}"),
        ("<|channel|>final json<|message|>{}", "", "{}"),
        ("<|channel|>commentary <|constrain|>json<|message|>{}", "", "{}"),
        ("<|channel|>final to", None, "<|channel|>final to"),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
            f"<|end|><|start|>assistant<|channel|>analysis<|message|> So. <|end|><|start|>assistant{FINAL}Yes",
            "Hm.\n\nSo.",
            "I look.Yes",
        ),
        ("<|channel|>analysis<|message|>Hm", "Hm", ""),
        ("<|channel|>other<|message|>Hm", None, "<|channel|>other<|message|>Hm"),
        ("Yes <|chan", None, "Yes <|chan"),
        ("", None, ""),
    ],
)
def test_where_answers_have_marks_thinking_may_come_again(text: str, reasoning: str | None, content: str) -> None:
    for chunks in ([text], list(text)):
        whole = said(chunks, marks=HARMONY_MARKS)
        assert (whole.reasoning, whole.content) == (reasoning, content)


FENCED = "```\n<response>\nYes\n</response>\n```"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<think>so</think>\n<response>\nYes.\n</response>\n", "Yes."),
        ("<think>so</think><response>Use </response> at the end</response>", "Use </response> at the end"),
        ("<think>so</think><response>Yes </respon", "Yes </respon"),
        ("<think>so</think>Yes <response>no</response>", "Yes <response>no</response>"),
        ("<think>so</think><respond>", "<respond>"),
        ("<think>so</think>" + " " * 90 + "<response>a" + " " * 90 + "</response>", "a" + " " * 26),
        ("<response>Yes</response>", "<response>Yes</response>"),
        ("<think>so</think><response>Yes</response>\n\nMore", "Yes</response>\n\nMore"),
        (
            "<think>so</think><response>```\n<response a='b'>\n</response>\n```\n</response>",
            "```\n<response a='b'>\n</response>\n```",
        ),
        ("<think>so</think><response>Yes</response> ", "Yes"),
        ("<think>so</think><response>Yes</response><|end_of_cite|>No", "Yes<|end_of_cite|>No"),
        ("<think>so</think><response>```\n<response>\nYes\n</response>\n```\n</response>\n", FENCED),
        ("<think>so</think><response>Yes</response>\n<response>no</response>", "Yes</response>\n<response>no"),
    ],
)
def test_an_answer_behind_thinking_is_shown_without_the_marks_around_it(text: str, content: str) -> None:
    for size in (1, 7, len(text)):
        whole = said([text[at : at + size] for at in range(0, len(text), size)], marks=GRANITE_MARKS)
        assert whole.content == content
        assert whole.reasoning == ("so" if "so" in text else None)


@pytest.mark.parametrize("between", ["</response>", "\n</response>\n"])
def test_the_mark_behind_an_answer_is_none_of_its_text_in_front_of_a_call(between: str) -> None:
    call = '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]'
    text = f"<think>so</think><response>I look.{between}{call}"
    for chunks in ([text], list(text)):
        whole = said(chunks, marks=GRANITE_MARKS, form=GRANITE)
        assert (whole.content, len(whole.calls)) == ("I look.", 1)


@pytest.mark.parametrize(
    ("begun", "text", "content"),
    [
        ("<think>so</think><response>Ye", "s.</response>", "s."),
        ("<think>so</think>\n<response>", "\nYes.\n</response>\n", "Yes."),
        ("<think>so</think>", "\n<response>Yes.</response>", "Yes."),
        ("<think>so</think><response>a\n<response>b", "\n</response>\nc</response>", "\n</response>\nc"),
        ("<think>so</think><response>Yes</response>", " and </response>", " and </response>"),
        ("<think>so</think>Yes", " <response>no</response>", " <response>no</response>"),
        ("Yes <response>", "no</response>", "no</response>"),
    ],
)
def test_an_answer_that_is_continued_is_shown_without_the_mark_behind_it(begun: str, text: str, content: str) -> None:
    for chunks in ([text], list(text)):
        assert said(chunks, marks=GRANITE_MARKS, begun=begun).content == content


@pytest.mark.parametrize("thinking", [None, "Hm."])
@pytest.mark.parametrize(
    "head",
    [
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        " to=functions.weather<|channel|>commentary json<|message|>",
        " to=functions.weather<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.weather<|channel|>commentary<|message|>",
        "<|channel|>commentary to=functions.weather<|message|>",
    ],
)
def test_a_call_in_a_channel_is_a_call(head: str, thinking: str | None) -> None:
    before = "" if thinking is None else f"<|channel|>analysis<|message|>{thinking}<|end|><|start|>assistant"
    text = f'{before}{head}{{"city": "Oslo"}}<|call|>'
    for chunks in ([text], list(text)):
        whole = said(chunks, marks=HARMONY_MARKS, form=HARMONY)
        assert (whole.reasoning, whole.content) == (thinking, "")
        assert [(call.name, call.arguments) for call in whole.calls] == [("weather", '{"city": "Oslo"}')]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hello<|channel|>commentary<|message|><|call|>", "Hello"),
        ("Hello<|channel|>commentary json<|message|>Yes", "HelloYes"),
        (" to=functions.now<|channel|>commentary<|message|>", ""),
        (" to=functions.now<|channel|>commentary json<|message|>no<|call|>", "no"),
        (f'{FINAL}Yes to=functions.other<|channel|>commentary<|message|>{{"a": 1}}<|call|>', 'Yes {"a": 1}'),
        ("<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}<|call|>", "{}"),
        (f"{FINAL}from to=functions. to <|channel|>", "from to=functions. to <|channel|>"),
    ],
)
@pytest.mark.parametrize("form", [None, HARMONY], ids=["no tools", "tools"])
def test_the_marks_around_other_text_than_calls_are_not_shown(
    form: CallFormat | None, text: str, content: str
) -> None:
    for chunks in ([text], list(text)):
        whole = said(chunks, marks=HARMONY_MARKS, form=form)
        assert (whole.content, whole.text, whole.calls) == (content, text, [])


# ------------------------------------------------------------------------------------------- calls and thinking


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"<think>I could {MARKED}.</think>\n{MARKED}", f"I could {MARKED}.", "", 1),
        (f"<think>I should look.{MARKED}", "I should look.", "", 1),
        (f"<think>I should look.\n{MARKED}\n{MARKED}\n", "I should look.", "", 2),
        (f"<think>I should look.\n{MARKED} Or not.", f"I should look.\n{MARKED} Or not.", "", 0),
        (f"<think>{MARKED} No: {MARKED}", f"{MARKED} No:", "", 1),
        (f"<think>I should look.\n{MARKED}</think>So.", f"I should look.\n{MARKED}", "So.", 0),
        (f"<think>I should look.\n<tool_call>\n{CALL}", "I should look.", "", 1),
        (f"<think>I should look.\n<tool_call>\n{CALL[:-1]}", f"I should look.\n<tool_call>\n{CALL[:-1]}", "", 0),
        (f"<think>{CALL}", CALL, "", 0),
        (f"<think>so</think>\n\n{CALL}", "so", "", 1),
        (f"<think>so</think>Let me see.\n\n{MARKED}\n", "so", "Let me see.", 1),
    ],
)
def test_calls_in_thinking_are_thoughts_unless_they_end_an_answer_that_never_stops_thinking(
    text: str, reasoning: str, content: str, calls: int
) -> None:
    for chunks in ([text], list(text), [text[at : at + 7] for at in range(0, len(text), 7)]):
        whole = said(chunks, form=HERMES)
        assert (whole.reasoning, whole.content) == (reasoning, content)
        assert whole.calls == [ToolCall(at, f"abcdefg{at:02d}", "weather", '{"city": "Oslo"}') for at in range(calls)]


BITS = st.sampled_from(
    [
        *[
            "<think>",
            "</think>",
            "<thi",
            "</",
            "<",
            "\n",
            " ",
            "word",
            "{",
            "}",
            '"',
            "\\",
            "```json",
            "```",
            ";",
            ",",
        ],
        *[
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "<|python_tag|>",
            CALL,
            MARKED,
            FUNCTION,
            CALL[:-1],
            "[",
            "]",
        ],
        *["<function=weather>", "<parameter=city>", "</parameter>", "</function>", "weather[ARGS]{}", "\U0001f642"],
        *["<|channel|>analysis<|message|>", "<|channel|>", "<|end|>", "<|start|>assistant", FINAL, "<|message|>"],
        *["<|channel|>commentary", "<|channel|>final ", "<|constrain|>", "JSON"],
    ]
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[CallFormat | None, ThinkingMarks, str]:
    """A format, marks of thinking, and a text of what both consist of."""
    name, marks = draw(st.sampled_from(list(FORMATS))), draw(st.sampled_from([QWEN, HARMONY_MARKS, GRANITE_MARKS]))
    sample = SAMPLES[name][1] if name in SAMPLES else "."
    own = st.sampled_from([*marks.all, sample, sample[:20], sample[20:]])
    return FORMATS[name], marks, "".join(draw(st.lists(BITS | own | own, max_size=14)))


@given(answers(), st.lists(st.integers(1, 30), min_size=1, max_size=8), st.booleans())
@example((HERMES, QWEN, f"<think>{MARKED}{MARKED} </think>"), [1], False)
@example((QWEN_XML, HARMONY_MARKS, f"<tool_call>{FUNCTION}</tool_call>\n<think>"), [1], False)
@example((HERMES, HARMONY_MARKS, f"{FINAL}<tool_call>{FINAL}{MARKED}"), [1], False)
@example((HERMES, HARMONY_MARKS, f"{FINAL}{MARKED}<|channel|>analysis<|message|>{MARKED}"), [1], False)
@settings(max_examples=1000, deadline=None)
def test_any_chunks_give_the_same_pieces(
    answer: tuple[CallFormat | None, ThinkingMarks, str], sizes: list[int], inside: bool
) -> None:
    form, marks, text = answer
    chunks, at = list[str](), 0
    for turn in range(len(text)):
        chunks.append(text[at : at + sizes[turn % len(sizes)]])
        at += len(chunks[-1])
    whole = joined(pieces_of([text], marks=marks, inside=inside, form=form))
    assert "".join(piece.raw for piece in whole) == text
    assert joined(pieces_of(chunks, marks=marks, inside=inside, form=form)) == whole
    assert all(piece.raw or piece.call for piece in whole)
    calls = [piece.call for piece in whole if piece.call]
    assert [call.index for call in calls] == list(range(len(calls)))


# ------------------------------------------------------------------------------------------------------- pieces


def test_neighbouring_pieces_of_one_kind_are_one() -> None:
    call = Piece("c", call=ToolCall(0, "abcdefg00", "now", "{}"))
    pieces = [Piece("a", "a"), Piece(" "), Piece("b", "b"), Piece("t", "t", ""), Piece("u", "u", "u"), call, call]
    assert joined(pieces) == [Piece("a b", "ab"), Piece("tu", "tu", "u"), call, call]
    assert joined([]) == []


@given(st.text("ab<", max_size=8), st.lists(st.text("ab<", min_size=1, max_size=5), max_size=3))
def test_the_overlap_is_the_longest_end_that_begins_a_mark(text: str, marks: list[str]) -> None:
    ends = [length for length in range(1, len(text) + 1) if any(m.startswith(text[-length:]) for m in marks)]
    proper = [length for length in ends if any(m != text[-length:] and m.startswith(text[-length:]) for m in marks)]
    assert overlap(text, marks) == max(proper, default=0)


# --------------------------------------------------------------------------------------------------------- time


MORE_HOSTILE = {
    "objects in objects": (HERMES, "<tool_call>{", "}"),
    "calls that are none": (HERMES, "<tool_call>{}</tool_call>", ""),
    "half marks": (QWEN_XML, "<function=weather><parameter=city></paramet", ""),
    "lists that never end": (MISTRAL, '[TOOL_CALLS][{"name": "weather"}, ', ""),
    "names without arguments": (MISTRAL, "[TOOL_CALLS]weather ", ""),
    "bare braces": (LLAMA, "{", ""),
    "quotes in texts": (LFM2, "<|tool_call_start|>[weather(city='' ' ", ""),
    "half marks in texts": (GEMMA, '<|tool_call>call:weather{city:<|"|><|"', ""),
}
HOSTILE: dict[str, tuple[CallFormat, str, str]] = {
    **{
        f"{what} of {name}": (form, text, "")
        for name, (form, sample) in SAMPLES.items()
        for what, text in {
            "openings": "".join(form.openings),
            "objects that never end": form.openings[0] + '{"a": "',
            "calls that never end": sample[: sample.index("Paris") + 1] + " ",
            "calls": sample,
        }.items()
    },
    **MORE_HOSTILE,
}


def steps(form: CallFormat, text: str, size: int) -> int:
    """The steps that reading the text in pieces of ``size`` characters takes."""
    own = CallText(form, {"weather": CITY}, ids="abcdefg")
    with counted_lines() as found:
        for at in range(0, len(text), size):
            own.feed(text[at : at + size])
        own.flush()
    return found[0]


@pytest.mark.parametrize("size", [4, 100_000])
@pytest.mark.parametrize(("form", "text", "end"), HOSTILE.values(), ids=HOSTILE)
def test_parsing_takes_time_in_proportion_to_the_text(form: CallFormat, text: str, end: str, size: int) -> None:
    once, twice = (steps(form, text * count + end * count, size) for count in (40, 80))
    assert twice < 2.6 * once


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("value", ["x = {}\n", "</ <x> ", "it's ' "])
def test_a_long_valid_call_takes_time_in_proportion_to_its_length(name: str, value: str) -> None:
    form, sample = SAMPLES[name]
    once, twice = (sample.replace("Paris", value.replace("\n", "\\n") * count) for count in (60, 120))
    calls = [piece.call for piece in pieces_of([twice], marks=None, form=form) if piece.call]
    assert [len(json.loads(call.arguments)["city"]) > 120 * 4 for call in calls] == [True]
    steps(form, once, 4)  # what is computed once in a process is not counted
    assert steps(form, twice, 4) < 2.6 * steps(form, once, 4)


def test_no_module_outside_this_folder_names_a_mark() -> None:
    root = Path(edgespec.__file__).parent
    own = root / "text" / "conversation"
    marks = re.compile(
        r"think>|THINK\]|tool_call>|TOOL_CALLS|python_tag|<function=|arg_key|tool_call_begin|START_ACTION"
    )
    naming = [path for path in root.rglob("*.py") if marks.search(path.read_text(encoding="utf-8"))]
    assert naming
    assert [path for path in naming if own not in path.parents] == []
