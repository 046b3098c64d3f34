"""The reader of conversations: what callers keep and agents replay, in one form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.messages import begun, check_conversation, read_conversation
from tests.support.counted_steps import counted_lines

Message = dict[str, Any]

SYSTEM = {"role": "system", "content": "be kind"}


def user(content: str = "hello") -> Message:
    return {"role": "user", "content": content}


def said(content: str | None = "", *calls: str, **more: Any) -> Message:
    """The assistant's message, with calls of these ids."""
    called = [{"id": own, "type": "function", "function": {"name": f"f{own}", "arguments": "{}"}} for own in calls]
    return {"role": "assistant", "content": content, **({"tool_calls": called} if calls else {}), **more}


def result(own: str, name: str | None = None, content: str = "found") -> Message:
    named = {} if name is None else {"name": name}
    return {"role": "tool", "tool_call_id": own, "content": content, **named}


def test_a_conversation_in_its_usual_form_is_read_unchanged() -> None:
    usual = [SYSTEM, user(), said("let me look", "a", "b"), result("a", "fa"), result("b", "fb"), user("thanks")]
    assert read_conversation(usual) == usual
    assert read_conversation([]) == []


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([user("a"), user("b")], [user("a\n\nb")]),
        ([user(""), user("b")], [user("b")]),
        ([user(), said("one"), said("two")], [user(), said("one\n\ntwo")]),
        ([user(), said("text"), said("", "a")], [user(), said("text", "a")]),
        ([user(), said("", "a"), said(None, "b")], [user(), said("", "a", "b")]),
        ([user(), said("", "a"), said("after")], [user(), said("", "a"), said("after")]),
        (
            [user(), said("", "a"), said("", "b", reasoning_content="hm")],
            [user(), said("", "a"), said("", "b", reasoning_content="hm")],
        ),
        (
            [user(), said("x", reasoning="why"), said("y", thinking="how")],
            [user(), said("x\n\ny", reasoning_content="why\n\nhow")],
        ),
        ([said("hi"), user()], [user(""), said("hi"), user()]),
        ([SYSTEM, said("hi"), user()], [SYSTEM, user(""), said("hi"), user()]),
        ([result("a"), user()], [user(""), result("a"), user()]),
        ([SYSTEM], [user("be kind")]),
        ([{"role": "developer", "content": "be kind"}, user()], [SYSTEM, user()]),
        ([{"role": "User", "content": "a"}, {"role": "model", "content": "b"}], [user("a"), said("b")]),
        ([user(), said("", "a"), {**result("a"), "role": "ipython"}], [user(), said("", "a"), result("a", "fa")]),
        ([user("a"), SYSTEM, said("b")], [user("a\n\nbe kind"), said("b")]),
        ([{"role": "system", "content": ""}, user()], [{"role": "system", "content": ""}, user()]),
    ],
)
def test_neighbours_are_joined_where_the_order_of_what_they_say_stays(given: Any, read: list[Message]) -> None:
    assert read_conversation(given) == read


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([user(), said("", "a"), user("b")], [user(), said("", "a"), user("b")]),
        ([said("", "a"), result("b"), result("a")], [result("b"), result("a", "fa")]),
        ([said("", "a"), result("a"), result("a")], [result("a", "fa"), result("a", "fa")]),
        ([said("", "a"), user(), result("a")], [user(), result("a", "fa")]),
        ([user(), result("a", "mine")], [result("a", "mine")]),
        ([user(), {"role": "tool", "content": "found"}], [result("call00000")]),
        ([said("", "a", "b"), {"role": "tool", "content": "found"}], [result("a", "fa")]),
        (
            [said("", "a"), user(), said("", "b"), {"role": "tool", "content": "found"}],
            [user(), said("", "b"), result("b", "fb")],
        ),
        ([said("", "call_1|fc_1"), result("call_1|fc_1")], [result("call_1|fc_1", "fcall_1|fc_1")]),
        ([said("", "5"), {**result("5"), "tool_call_id": 5}], [result("5", "f5")]),
        ([said("", "i" * 200), result("i" * 200)], [result("i" * 200, "f" + "i" * 200)]),
        ([said("", "a", "b"), result("x"), result("y")], [result("a", "fa"), result("b", "fb")]),
        ([said("", "a", "b"), result("x"), result("a")], [result("b", "fb"), result("a", "fa")]),
        ([said("", "a", "b"), result("x"), user()], [result("x"), user()]),
        ([said("", "a"), result("x"), result("y")], [result("x"), result("y")]),
        ([said("", "a", "b"), result("x", "fb"), result("y", "other")], [result("b", "fb"), result("y", "other")]),
        ([said("", "a", "b"), {"role": "tool", "content": "found", "name": "fb"}], [result("b", "fb")]),
    ],
)
def test_results_are_taken_as_they_are_with_their_functions_name(given: Any, read: list[Message]) -> None:
    assert read_conversation(given)[-len(read) :] == read


@pytest.mark.parametrize("own", [None, "x"])
@pytest.mark.parametrize("name", [None, "f1"])
def test_results_are_read_in_proportion_to_their_number(own: str | None, name: str | None) -> None:
    def lines(count: int) -> int:
        call = {"function": {"name": "f1", "arguments": "{}"}}
        answer = {"role": "tool", "tool_call_id": own, "content": "found", "name": name}
        with counted_lines() as found:
            read_conversation([said("", tool_calls=[call] * count), *[answer] * count])
        return found[0]

    assert lines(200) < 2.2 * lines(100)


def test_calls_of_one_answer_with_the_same_id_get_different_ids_and_their_results_too() -> None:
    calls = [{"id": "x", "function": {"name": name, "arguments": "{}"}} for name in ("alpha", "beta", "gamma")]
    calls.insert(1, {**calls[2], "id": "x_2"})
    read = read_conversation([user(), said("", tool_calls=calls), *[result("x")] * 3, result("x_2")])
    assert [each["id"] for each in read[1]["tool_calls"]] == ["x", "x_2", "x_3", "x_4"]
    assert read[2:] == [result("x", "alpha"), result("x_3", "beta"), result("x_4", "gamma"), result("x_2", "gamma")]
    assert read_conversation(read) == read


def test_half_of_a_character_is_read_as_the_replacement_character() -> None:
    half, whole = "log \ud83d", "log \ufffd"
    call = {"id": half, "function": {"name": half, "arguments": r'{"a": "log \ud83d", "b": "' + half + '"}'}}
    sent = [user(half), said(half, reasoning=half, tool_calls=[call]), {**result(half), "content": half}]
    asked, called, found = read_conversation(sent)
    (function,) = (each["function"] for each in called["tool_calls"])
    assert {asked["content"], called["content"], called["reasoning_content"], found["content"]} == {whole}
    assert {called["tool_calls"][0]["id"], found["tool_call_id"], found["name"], function["name"]} == {whole}
    assert function["arguments"] == '{"a": "log \ufffd", "b": "log \ufffd"}'


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"a": "x\ny\t\0", "b": 1}', {"a": "x\ny\t\0", "b": 1}),
        ('{"a": [NaN, -Infinity, 1e999, 1.5], "b": 1}', {"a": [None, None, None, 1.5], "b": 1}),
        ('{"a": "x', {}),
    ],
)
def test_arguments_of_earlier_calls_are_kept_as_far_as_they_can_be_read(given: Any, read: Any) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": given}}
    *_, called = read_conversation([user(), said("", tool_calls=[call])])
    arguments = called["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == read
    assert read_conversation([user(), called]) == [user(), called]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ([{"role": "wizard", "content": "x"}], "message 0 of the conversation has the unknown role 'wizard'"),
        ([user(), {"content": "x"}], "message 1 of the conversation has the unknown role None"),
        ([{"role": "user"}], "the content of message 0 of the conversation must be text, not None"),
        ([user(), {"role": "tool", "content": None}], "the content of message 1 of the conversation must be text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "the content of message 0 of the conversation must be"),
        ([{"role": "system", "content": 3}], "the content of message 0 of the conversation must be text, not int 3"),
        ([user(), said("x", thinking=True)], "the thinking of message 1 of the conversation must be text"),
        ("hello", "messages must be a list, not str"),
        ([user(), "hello"], "message 1 of the conversation is not a mapping"),
    ],
)
def test_unknown_roles_and_contents_that_are_not_text_are_refused(wrong: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        read_conversation(wrong)
    assert raised.value.message.startswith(why)


def test_an_assistants_last_message_is_begun_and_an_empty_one_is_the_answers_place() -> None:
    sent = [SYSTEM, user("a"), said("b"), user("c"), said("", "d"), result("d", "fd")]
    assert check_conversation(None, sent, raw=False) == ("c", sent[:3], sent[4:])
    assert check_conversation(None, [user("a"), said("")], raw=False) == ("a", [], [])
    for last in (said("b"), said("", reasoning_content="hm")):
        assert check_conversation(None, [user("a"), last], raw=False) == ("a", [], [last])
        assert begun([last]) == last
    assert begun([user("a")]) is begun([said("", "b")]) is begun([]) is None
    with pytest.raises(InvalidRequestError, match="is a call, and its result is missing"):
        check_conversation(None, [user("a"), said("", "b")], raw=False)


KINDS = [
    user("u"), said("t"), said(""), said("", "a"), said("t", "a", "b"), said("t", reasoning_content="r"),
    said("", "b", thinking="r"), said("", "a", "a"), result("a"), result("unknown"), {"role": "tool", "content": ""},
    SYSTEM, {"role": "developer", "content": ""},
]  # fmt: skip


@given(st.lists(st.sampled_from(KINDS), max_size=8))
def test_any_order_is_read_without_losing_a_text_and_reading_again_changes_nothing(sent: list[Message]) -> None:
    read = read_conversation(sent)
    assert read_conversation(read) == read
    assert told(read) == told(sent)


def told(messages: list[Message]) -> tuple[list[str], ...]:
    """The texts, the thinking, and the calls with the results, each in order."""
    texts = [part for each in messages for part in each["content"].split("\n\n") if part]
    thoughts = [each.get("reasoning_content") or each.get("thinking") or "" for each in messages]
    roles = [role for each in messages for role in ["call"] * len(each.get("tool_calls", ())) + [each["role"]]]
    return (
        texts,
        [part for thought in thoughts for part in thought.split("\n\n") if part],
        [role for role in roles if role in ("call", "tool")],
    )
