"""Messages of chats: the conversation that is read, the parts that it does not keep, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.server.faces.messages import MESSAGES
from edgespec.server.faces.openai import read_chat
from edgespec.server.faces.responses import read_responses
from edgespec.server.messages import MOST_MESSAGES, read_messages
from edgespec.text.conversation.messages import THINKING
from tests.server.test_schema import HI, assistant, refused, user


def test_shapes_that_clients_send_become_one_conversation() -> None:
    given = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": [{"type": "text", "text": "b"}]},
        user("one"),
        {**user([{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]), "name": "someone"},
        {
            **assistant([{"type": "text", "text": "y"}, {"type": "text", "text": "es"}]),
            "tool_calls": None,
            "reasoning_content": "hm",
        },
        user("four"),
    ]
    assert read_messages(given) == (
        {"role": "system", "content": "a\n\nb"},
        user("one\n\ntwo\nthree"),
        {**assistant("yes"), "reasoning_content": "hm"},
        user("four"),
    )
    for role in ("assistant", "Assistant", "model"):
        assert read_messages([*HI, {"role": role, "content": None}, user("again")])[1] == assistant("")


def test_a_late_system_message_is_the_users_at_its_place() -> None:
    system, late = {"role": "system", "content": "a"}, {"role": "developer", "content": "b"}
    assert read_messages([user("x"), late]) == (user("x\n\nb"),)
    found = read_messages([system, user("x"), assistant("y"), late, user("z"), late])
    assert found == (system, user("x"), assistant("y"), user("b\n\nz\n\nb"))
    assert read_messages([system]) == (user("a"),)
    assert read_messages([system, late]) == (user("a\n\nb"),)


def test_whether_the_last_message_is_continued_may_be_said_as_it_is() -> None:
    sent = [user("x"), assistant("y")]
    for more in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        assert read_chat({"messages": sent, **more}).messages == tuple(sent)
    for name, wrong in (("continue_final_message", False), ("add_generation_prompt", True)):
        error = refused(read_chat, {"messages": sent, name: wrong})
        assert (error.param, error.code) == (name, None)


def test_a_conversation_may_begin_with_the_assistant_and_end_with_an_empty_message() -> None:
    assert read_messages([assistant("x"), user("y")]) == (user(""), assistant("x"), user("y"))
    system = {"role": "system", "content": "a"}
    assert read_messages([system, assistant("x"), user("")]) == (system, user(""), assistant("x"), user(""))
    assert read_messages([user(" \n")]) == (user(" \n"),)
    assert read_messages([user("x"), assistant("")]) == (user("x"),), "the place of the answer"
    assert read_messages([user("x"), assistant("y")]) == (user("x"), assistant("y")), "the answer continues it"
    refusal = assistant([{"type": "refusal", "refusal": "no"}])
    refused_beside = {"role": "assistant", "content": None, "refusal": "no"}
    assert read_messages([*HI, refusal, *HI])[1] == assistant("no") == read_messages([*HI, refused_beside, *HI])[1]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]},
        {"type": "thinking", "thinking": "hm"},
        {"type": "reasoning", "text": "hm"},
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "reasoning_text", "text": "hm"},
        {
            "type": "thinking",
            "thinking": [{"type": "text", "text": "hm"}, {"type": "reference", "reference_ids": [1]}],
        },
    ],
)
def test_thinking_among_the_parts_of_an_answer_is_its_thinking(part: dict[str, Any]) -> None:
    answer, after = assistant([part, {"type": "text", "text": "x"}]), user("y")
    thought = {**assistant("x"), "reasoning_content": "hm"}
    assert read_messages([*HI, answer, after]) == read_messages([*HI, thought, after])
    assert read_messages([*HI, {**answer, "reasoning": "ah"}, after])[1]["reasoning_content"] == "ah"
    assert read_messages([*HI, assistant([part]), after])[1] == {**thought, "content": ""}


@pytest.mark.parametrize("other", [{"a": 1}, [{"a": 1}], [], "", None])
@pytest.mark.parametrize("name", THINKING)
def test_thinking_without_text_is_left_out(name: str, other: Any) -> None:
    hidden = {"type": "redacted_thinking", "data": "gA"}
    answer = assistant([hidden, {"type": "thinking", "thinking": other}, {"type": "text", "text": "x"}])
    for each in (answer, {**assistant("x"), name: other}):
        assert read_messages([*HI, each, user("y")])[1] == assistant("x")
    named = {**assistant("x"), name: [{"type": "text", "text": "hm"}]}
    assert read_messages([*HI, named, user("y")])[1]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "hello",
        [3],
        [{}],
        [{"role": 3, "content": "x"}],
        [{"role": "wizard", "content": "x"}],
        [user(3)],
        [user([3])],
        [user([{"type": "text"}])],
        [user([{"type": "image_url", "image_url": {"url": "http://x"}}])],
        [user(["a text without a type"])],
        [user([{"type": "refusal", "text": "x"}])],
        [user([{"type": "thinking", "thinking": "x"}])],
        [*HI, assistant([{"type": ["thinking"]}]), user("y")],
        [*HI, {**assistant("x"), "tool_calls": [{"id": "\0"}]}, user("y")],
        [*HI, {**assistant("x"), "tool_calls": [{"function": {"name": "f\0"}}]}, user("y")],
        [*HI, {**assistant("x"), "tool_calls": [{"type": "custom", "custom": {"input": "z"}}]}, user("y")],
        *([*HI, {**assistant("x"), name: 7}, user("y")] for name in THINKING),
        [*HI, assistant([{"type": "thinking", "thinking": True}]), user("y")],
        [{"role": "function", "content": "x", "name": "f"}, *HI],
    ],
)
def test_other_messages_are_refused(wrong: Any) -> None:
    error = refused(read_messages, wrong)
    assert error.status == 400
    assert str(error.param).startswith("messages")


def test_an_image_in_a_result_is_left_out_with_a_warning() -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a.png"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    calls = [*HI, {**assistant(""), "tool_calls": [call]}]
    found = read_chat({"messages": [*calls, {"role": "tool", "tool_call_id": "call00001", "content": parts}]})
    assert found.messages[-1]["content"] == "a.png\n[an image was left out: this model reads text]"
    assert found.warnings == ("in a tool's result: an image was left out: this model reads text",)


PICTURE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (PICTURE, "an image"),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, "a recording"),
        ({"type": "video_url", "video_url": {"url": "data:"}}, "a video"),
        ({"type": "file", "file": {"file_data": "AA"}}, "a file"),
    ],
)
def test_what_was_answered_is_left_out_with_a_warning_and_new_parts_are_refused(part: Any, what: str) -> None:
    asked = user([{"type": "text", "text": "what is it?"}, part])
    found = read_chat({"messages": [asked, assistant("ok"), *HI]})
    assert found == read_chat({"messages": [asked, {"role": "Model", "content": "ok"}, *HI]})
    assert found.messages[0] == user(f"what is it?\n[{what} was left out: this model reads text]")
    assert found.warnings == (f"in a user's message: {what} was left out: this model reads text",)
    for messages in ([asked], [*HI, assistant("ok"), asked], [asked, assistant("It is")], [asked, assistant("")]):
        assert f"{what} (messages[" in refused(read_chat, {"messages": messages}).message


@pytest.mark.parametrize(
    ("given", "read", "lacks"),
    [
        ([{"type": "resource", "resource": {"uri": "file:///a", "text": "body"}}], "body", None),
        ([{"type": "resource", "resource": {"uri": "file:///a", "blob": "AA"}}], None, "a resource"),
        ([{"type": "resource_link", "uri": "file:///a", "name": "a"}], None, "a resource"),
        ([{"type": "audio", "data": "AA"}], None, "a recording"),
        ([{"type": "video_url", "video_url": {"url": "data:"}}], None, "a video"),
        ({"type": "image", "data": "AA", "mimeType": "image/png"}, None, "an image"),
        ({"type": "computer_screenshot", "image_url": "data:"}, None, "an image"),
        ([{"type": "document", "source": None}], None, "a document"),
        ([{"type": "image", "base64": "AA", "mime_type": "image/png"}], None, "an image"),
        ([{"type": "image", "source": "data:image/png;base64,AA"}], None, "an image"),
        ([{"type": "input_image", "image_url": None}], None, "an image"),
        ([{"type": "text", "text": "a"}, {"type": "image", "url": "u"}], "a\n[LACKS]", "an image"),
        ([{"type": "file", "name": "a", "bytes": 3}], '[{"type": "file", "name": "a", "bytes": 3}]', None),
        ({"content": [{"type": "image", "data": "AA"}], "isError": False}, None, "an image"),
        ([{"type": "image", "data": "AA"}, {"ok": 1}], '["[LACKS]", {"ok": 1}]', "an image"),
        (
            {"path": "a", "content": [{"type": "image", "data": "AA"}]},
            '{"path": "a", "content": ["[LACKS]"]}',
            "an image",
        ),
        ({"type": "text", "text": "a"}, "a", None),
        ({"content": [{"type": "text", "text": "a"}], "structuredContent": {"b": 1}}, "a", None),
        ({"content": [], "structuredContent": {"b": 1}}, '{"content": [], "structuredContent": {"b": 1}}', None),
        ([{"type": "dir", "name": "src"}], '[{"type": "dir", "name": "src"}]', None),
        ([{"type": "file", "name": "a", "size": 3}], '[{"type": "file", "name": "a", "size": 3}]', None),
        ([{"type": "file", "file": "a", "line": 3}], '[{"type": "file", "file": "a", "line": 3}]', None),
        ([{"id": 1, "text": "hit", "url": "u"}], '[{"id": 1, "text": "hit", "url": "u"}]', None),
        ([{"type": "new", "text": "a"}], '[{"type": "new", "text": "a"}]', None),
        ([{"text": "b", "annotations": None}, "c"], "b\nc", None),
        ([], "", None),
        (["a", "b"], "a\nb", None),
        ([{"ok": 1}, "é"], '[{"ok": 1}, "é"]', None),
        ({"ok": 1, "é": None}, '{"ok": 1, "é": null}', None),
        (5, "5", None),
        (False, "false", None),
    ],
)
def test_a_result_may_be_any_json(given: Any, read: str | None, lacks: str | None) -> None:
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    content = {"content": given}
    chat = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", **content}]
    blocks = [*HI, assistant([use]), user([{"type": "tool_result", "tool_use_id": "a", **content}])]
    items = [*HI, item, {"type": "function_call_output", "call_id": "a", "output": given}]
    for found, between in (
        (read_chat({"messages": chat}), "\n"),
        (MESSAGES.read({"messages": blocks}), "\n\n"),
        (read_responses({"input": items}), "\n"),
    ):
        what = f"{lacks} was left out: this model reads text"
        own = "[LACKS]" if read is None else read.replace("\n", between)
        assert found.messages[-1]["content"] == own.replace("LACKS", what)
        assert found.warnings == (() if lacks is None else (f"in a tool's result: {what}",))


def test_calls_and_their_results_are_passed_on_and_not_joined() -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    given = [
        user("x"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "call00001"},
        {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "call00002"},
    ]
    assert read_messages(given) == (
        user("x"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "f"},
        {"role": "tool", "content": "4", "tool_call_id": "call00002"},
    )
    printed = read_messages([user("a\0b"), {**assistant("x"), "reasoning": "\0"}, user("y")])
    assert printed[0] == user("a\0b")
    assert printed[1]["reasoning_content"] == "\0"
    tool = {"type": "function", "function": {"name": "f"}}
    found = read_chat({"messages": HI, "tools": [tool], "tool_choice": "auto"})
    assert (found.tools, found.tool_choice) == ((tool,), "auto")
    for wrong in ("x", {"a": 1}, [{"a": "\0"}], [["a", "\0"]]):
        assert refused(read_chat, {"messages": HI, "tools": wrong}).param == "tools"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        *((word, word) for word in ("auto", "none", "required")),
        ("any", "required"),
        *(({"type": word}, word) for word in ("auto", "none", "required")),
        ({"type": "any"}, "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        ({"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_a_choice_of_tools_is_read_in_each_form_that_clients_write(given: Any, read: Any) -> None:
    tool = {"type": "function", "name": "f", "function": {"name": "f"}}
    assert read_chat({"messages": HI, "tools": [tool], "tool_choice": given}).tool_choice == read
    assert read_responses({"input": "hi", "tools": [tool], "tool_choice": given}).tool_choice == read


@pytest.mark.parametrize(
    "entry", [{"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}]
)
@pytest.mark.parametrize(("mode", "own"), [({}, "auto"), ({"mode": "any"}, "required"), ({"mode": "auto"}, "auto")])
def test_allowed_tools_are_read_in_each_form_that_clients_write(entry: Any, mode: Any, own: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("e", "f")]
    choice = {"type": "allowed_tools", "allowed_tools": {"tools": [entry], **mode}}
    found = read_chat({"messages": HI, "tools": tools, "tool_choice": choice})
    assert (found.tools, found.tool_choice) == ((tools[1],), own)


def test_a_custom_tools_call_is_one_with_an_argument() -> None:
    call = {"id": "call_1", "type": "custom", "custom": {"name": "apply_patch", "input": '*** Begin "Patch"'}}
    result = {"role": "tool", "content": "done", "tool_call_id": "call_1"}
    found = read_messages([user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}, result])
    function = {"name": "apply_patch", "arguments": json.dumps({"input": '*** Begin "Patch"'})}
    assert found[1]["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    assert found[2]["name"] == "apply_patch"


def test_the_number_of_messages_has_a_limit() -> None:
    assert "at most" in refused(read_messages, HI * (MOST_MESSAGES + 1)).message
