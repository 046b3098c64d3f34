"""Answers that may call tools: free until a call begins, which then ends as a valid one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from edgespec.errors import ConstraintError, InvalidRequestError
from edgespec.text.conversation.call_formats import GEMMA, GLM, HERMES, MINICPM, MINIMAX, QWEN_XML, CallFormat, Mark
from edgespec.text.conversation.thinking import ThinkingMarks
from edgespec.text.grammar.begun_calls import BegunCalls, BegunCallsCursor
from edgespec.text.grammar.calls import bare_beginning, begun_form, call_form
from edgespec.text.grammar.compiled import FormCursor, Forms
from edgespec.text.tokenizers.gguf import GgufTokenizer
from tests.support.counted_steps import counted_lines
from tests.support.wandering import wander
from tests.text.test_call_forms import use
from tests.text.test_forms import cut

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THINKING = ThinkingMarks("<think>", "</think>")


@pytest.fixture(scope="module")
def forms(tokenizer: GgufTokenizer) -> Forms:
    return Forms(tokenizer, tokenizer.vocabulary_size)


def constraint(
    forms: Forms,
    tokenizer: GgufTokenizer,
    form: CallFormat = HERMES,
    thinking: ThinkingMarks | None = None,
    inside: bool = False,
    compiled: list[bool] | None = None,
) -> BegunCalls:
    asked = use(form)

    def begin(bare: bool) -> FormCursor:
        if compiled is not None:
            compiled.append(bare)
        return forms.compiled(begun_form(asked, bare=bare)).cursor()

    return BegunCalls(
        marks=form.whole_beginnings,
        names=frozenset(tool["function"]["name"] for tool in asked.tools),
        bare=bare_beginning(asked),
        begin=begin,
        thinking=thinking,
        inside=inside,
        tokenizer=tokenizer,
    )


def free(cursor: BegunCallsCursor, tokenizer: GgufTokenizer, text: str) -> bool:
    """Whether any token may follow the text."""
    cursor.at(cut(tokenizer, text))
    return cursor.mask is None


def test_any_token_may_follow_until_a_call_begins_and_after_it_ends(forms: Forms, tokenizer: GgufTokenizer) -> None:
    cursor = constraint(forms, tokenizer).cursor()
    before = "Let me see. <tool <tool_call"
    for text in ("", before, before + " x", '{"a": 1', "```json\n{", "<", '{"name": "other", '):
        assert free(cursor, tokenizer, text), text
    for end in range(len("<tool_call>"), len(CALL)):
        assert not free(cursor, tokenizer, f"Hm: {CALL[:end]}"), CALL[:end]
    for text in (CALL, CALL + "\nMore", CALL + "\n<", f"Hm: {CALL} {CALL}"):
        assert free(cursor, tokenizer, text), text
    assert not free(cursor, tokenizer, f"{CALL} and {CALL[:30]}")


@pytest.mark.parametrize(
    ("form", "about", "begun"),
    [
        (HERMES, "It writes `<tool_call>", "It writes: <tool_call>"),
        (HERMES, 'It writes "<tool_call>', '"<tool_call>" is <tool_call>'),
        (GLM, "It writes '<tool_call>", "<tool_call>"),
        (HERMES, "It writes (`<tool_call>", "See `foo.py`<tool_call>"),
        (HERMES, "\n'<tool_call>", "The users'<tool_call>"),
        (HERMES, "`<tool_call>", 'He said "go."<tool_call>'),
        (MINICPM, 'In WSDL: <function name="area"/> and <function name="weather"/', 'So: <function name="weather">'),
        (MINICPM, '`<function name="weather">', '<function <function name="clock">'),
        (MINIMAX, '<invoke name="rain">, <invoke name="weather"', '<invoke name="weather">'),
        (QWEN_XML, "`<function=", "a < b <function="),
    ],
)
def test_a_text_about_a_mark_begins_no_call(
    forms: Forms, tokenizer: GgufTokenizer, form: CallFormat, about: str, begun: str
) -> None:
    cursor = constraint(forms, tokenizer, form).cursor()
    for end in range(len(about) + 1):
        assert free(cursor, tokenizer, about[:end]), about[:end]
    assert free(cursor, tokenizer, about + "` in front.\n")
    assert not free(cursor, tokenizer, begun)
    assert not free(cursor, tokenizer, f"{about}`.\n{begun}")
    parser = use(form).parser()
    assert "".join(piece.text for piece in [*parser.feed(f"{about}`."), *parser.flush()]) == f"{about}`."


@pytest.mark.parametrize("form", [HERMES, MINICPM])
def test_tokens_outside_of_calls_take_the_same_time_with_many_tools(
    forms: Forms, tokenizer: GgufTokenizer, form: CallFormat
) -> None:
    own = constraint(forms, tokenizer, form)
    many = replace(own, names=frozenset(f"tool_{number}" for number in range(1000)))

    def lines(form: BegunCalls) -> int:
        cursor, tokens = form.cursor(), cut(tokenizer, 'In WSDL: <function name="area"/> and <tool_ca')
        with counted_lines() as found:
            cursor.at(tokens)
        return found[0]

    lines(own)  # what is computed once in a process is not counted
    assert lines(many) == lines(own)


def test_a_token_without_the_beginning_of_a_mark_looks_for_none(
    forms: Forms, tokenizer: GgufTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[str]()

    def begun_at(_mark: Mark, text: str) -> int:
        looked.append(text)
        return len(text)

    monkeypatch.setattr(Mark, "begun_at", begun_at)
    cursor = constraint(forms, tokenizer).cursor()
    begun, more = cut(tokenizer, "Let me see."), cut(tokenizer, " There is one or the other.")
    cursor.at(begun)
    looked.clear()
    cursor.at([*begun, *more])
    single = [token for token in more if len(tokenizer.token_bytes(token)) == 1]
    assert len(looked) == len(single) < len(more)


def test_in_a_call_the_mask_is_that_of_its_grammar(forms: Forms, tokenizer: GgufTokenizer) -> None:
    own = constraint(forms, tokenizer).cursor()
    own.at(cut(tokenizer, "Hm: " + CALL[:60]))  # within the arguments
    assert own.allows(cut(tokenizer, CALL[60:])) == len(cut(tokenizer, CALL[60:]))
    assert own.allows(cut(tokenizer, CALL[60:] + "\nMore <tool_call>x")) < len(
        cut(tokenizer, CALL[60:] + "\nMore <tool_call>x")
    )
    wrong = cut(tokenizer, "}</tool_call>")
    assert own.allows(wrong) < len(wrong)
    stop = min(tokenizer.stop_ids)
    assert own.allows([stop]) == 0, "the answer may not end in a call"
    assert own.mask is not None
    bits = np.unpackbits(own.mask.view(np.uint8), bitorder="little")[: tokenizer.vocabulary_size]
    assert bits.tolist() == [own.allows([token]) for token in range(tokenizer.vocabulary_size)]
    with pytest.raises(ConstraintError):
        own.at([*cut(tokenizer, "Hm: " + CALL[:60]), *cut(tokenizer, "</tool_call>")])
    own.at(cut(tokenizer, CALL))
    assert own.allows([stop]) == 1


def test_what_may_follow_is_the_same_for_a_cursor_that_went_back(forms: Forms, tokenizer: GgufTokenizer) -> None:
    own = constraint(forms, tokenizer, thinking=THINKING)
    text = cut(tokenizer, "<think>a</think>Hm: " + CALL + "Hm: " + CALL[:70])
    cursor, draw = own.cursor(), random.Random(1)
    for _ in range(200):
        place = draw.randrange(len(text) + 1)
        fresh = own.cursor()
        cursor.at(text[:place])
        fresh.at(text[:place])
        masks = cursor.mask, fresh.mask
        assert (masks[0] is None) == (masks[1] is None)
        assert masks[0] is None or np.array_equal(*masks)  # type: ignore[arg-type]
        assert cursor.allows(text[place : place + 4]) == len(text[place : place + 4])
    assert wander(own.cursor, random.Random(2), 300, tokenizer.vocabulary_size, tokenizer.stop_ids) == []


def test_no_call_begins_in_thinking(forms: Forms, tokenizer: GgufTokenizer) -> None:
    begun = CALL[:30]
    cursor = constraint(forms, tokenizer, thinking=THINKING).cursor()
    assert free(cursor, tokenizer, f"<think>{begun}")
    assert not free(cursor, tokenizer, f"<think>{begun}</think>\n{begun}")
    assert not free(cursor, tokenizer, f"I <think>{begun}"), "a mark in the answer is text"
    inside = constraint(forms, tokenizer, thinking=THINKING, inside=True).cursor()
    assert free(inside, tokenizer, begun)
    assert not free(inside, tokenizer, f"x</think>{begun}")
    again = ThinkingMarks("<think>", "<end>", ("<final>",), ("<end>",))
    twice = constraint(forms, tokenizer, thinking=again).cursor()
    assert free(twice, tokenizer, f"<final>so<end><think>{begun}")
    assert not free(twice, tokenizer, f"<final>so<end><think>x<end>{begun}")


@pytest.mark.parametrize("frame", ["", "\n", "```json\n", "<think>x</think>\n"])
def test_a_call_without_marks_begins_where_the_answer_does(
    forms: Forms, tokenizer: GgufTokenizer, frame: str
) -> None:
    cursor = constraint(forms, tokenizer, thinking=THINKING).cursor()
    assert free(cursor, tokenizer, frame + '{"name": "weather')
    assert not free(cursor, tokenizer, frame + '{"name": "weather"')
    assert not free(cursor, tokenizer, frame + '{"name": "weather", "arguments": {"city": ')
    whole = frame + '{"name": "weather", "arguments": {"city": "Oslo"}}' + ("\n```" if "`" in frame else "")
    assert free(cursor, tokenizer, whole)
    assert free(cursor, tokenizer, "Well: " + frame + '{"name": "weather"'), "behind other text it is text"


class Refusing:
    """The cursor of a grammar that takes no token, as if one held a mark and what no call has behind it."""

    complete = False
    mask = None
    forced = ()

    def at(self, tokens: Sequence[int]) -> None:
        raise ConstraintError("no")

    def allows(self, tokens: Sequence[int]) -> int:
        return 0


def test_a_mark_whose_token_has_what_no_call_has_behind_it_is_text(forms: Forms, tokenizer: GgufTokenizer) -> None:
    own = replace(constraint(forms, tokenizer), begin=lambda bare: Refusing())
    assert free(own.cursor(), tokenizer, CALL + "x")


def test_a_grammar_is_compiled_when_the_first_call_begins_and_one_that_cannot_be_binds_nothing(
    forms: Forms, tokenizer: GgufTokenizer
) -> None:
    compiled = list[bool]()
    cursor = constraint(forms, tokenizer, compiled=compiled).cursor()
    assert free(cursor, tokenizer, "Hello, <b>world</b>")
    assert compiled == []
    assert not free(cursor, tokenizer, CALL[:20])
    assert free(cursor, tokenizer, f"{CALL}{CALL}")
    assert compiled == [False]

    assert free(replace(constraint(forms, tokenizer), begin=lambda bare: None).cursor(), tokenizer, CALL[:20] + "x")


@pytest.mark.parametrize("form", [HERMES, QWEN_XML, GEMMA])
def test_empty_objects_of_php_within_the_schema_of_a_tool_are_objects(forms: Forms, form: CallFormat) -> None:
    empty = {"type": "object", "properties": [], "$defs": []}
    parameters = {"type": "object", "properties": {"a": empty, "b": {"type": "array", "items": empty}}}
    asked = use(form, ({"type": "function", "function": {"name": "f", "parameters": parameters}},))
    for made in (begun_form(asked), call_form(asked, ["f"], several=False)):
        assert forms.compiled(made).cursor().mask is not None


def test_the_form_of_too_large_tools_is_refused() -> None:
    large = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"enum": ["x" * 300_000]}}}},
    }
    with pytest.raises(InvalidRequestError, match="too large"):
        begun_form(use(HERMES, (large,)))
