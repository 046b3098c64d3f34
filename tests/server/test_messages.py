"""Anthropic's messages: what is read of a request, and the events of an answer. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import pytest
from anthropic.types.beta import BetaContentBlock

from edgespec.decoding.round_base import DecodeStats
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.server.answers import Part
from edgespec.server.errors import ApiError
from edgespec.server.faces.face import Head
from edgespec.server.faces.messages import MESSAGES
from edgespec.server.messages import MOST_MESSAGES
from edgespec.server.schema import Request
from edgespec.text.conversation.pieces import ToolCall
from tests.server.test_schema import HI, assistant, refused, user
from tests.support.agent_requests import claude_code, with_result
from tests.support.faces import collected
from tests.support.tiny_models import TinyModels

HEAD = Head(id="msg_1", created=1, model="tiny", fingerprint="f")
CALL = ToolCall(0, "call00000", "Read", '{"file_path": "notes.txt"}')
USE = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "notes.txt"}}


NO_DOCUMENT = "[a document was left out: this model reads text]"


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def read(*messages: dict[str, Any], **fields: Any) -> Request:
    return MESSAGES.read({"messages": list(messages), **fields})


def said(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return list(read(*messages, **fields).messages)


# ------------------------------------------------------------------------------------------------- requests


def test_a_request_without_fields_uses_the_defaults() -> None:
    assert MESSAGES.read({"messages": HI}) == Request(messages=(user("hi"),))
    assert (Request().hide_thinking, Request().warnings) == (False, ())


def test_every_field_is_read() -> None:
    found = read(
        user("hi"),
        model="claude",
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["a", "b"],
        stream=True,
        thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        tools=[{"name": "Read", "description": "reads", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert found.sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 40}
    assert (found.model, found.max_tokens, found.stop, found.stream) == ("claude", 5, ("a", "b"), True)
    assert found.template_variables == {"enable_thinking": True, "reasoning_effort": "high"}
    assert (found.hide_thinking, found.tool_choice, found.parallel_tool_calls) == (True, "required", False)
    function = {"name": "Read", "description": "reads", "parameters": {"type": "object"}}
    assert found.tools == ({"type": "function", "function": function},)
    assert found.form is None, "a call must come"
    schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert read(user("hi"), output_config=schema, tool_choice={"type": "auto"}).form is not None


def test_the_system_text_comes_first_and_one_in_the_middle_is_the_users() -> None:
    assert said(user("hi"), system="be kind") == [{"role": "system", "content": "be kind"}, user("hi")]
    blocks = [text("be kind", cache_control={"type": "ephemeral"}), text(""), text("be short")]
    assert said(user("hi"), system=blocks)[0] == {"role": "system", "content": "be kind\n\nbe short"}
    assert said(user("hi"), system=[]) == said(user("hi"), system="") == [user("hi")]
    middle = {"role": "system", "content": [text("news")]}
    assert said(user("a"), assistant("b"), middle, user("c")) == [user("a"), assistant("b"), user("news\n\nc")]


def test_a_line_that_is_new_in_every_request_is_left_out_of_the_system_text() -> None:
    line = "x-anthropic-billing-header: cc_version=2; cch={};"
    first, second = (said(user("hi"), system=[text(line.format(each)), text("be kind")]) for each in ("0a", "1b"))
    assert first == second == [{"role": "system", "content": "be kind"}, user("hi")]
    assert said(user("hi"), system=f"{line}\nbe kind") == first


def test_a_call_and_its_result_are_separate_messages() -> None:
    done = [text("look", citations=None), USE]
    found = said(user("read it"), assistant(done), user([result([text("a"), text("b")]), text("well?")]))
    called = {
        "id": "toolu_1",
        "type": "function",
        "function": {"name": "Read", "arguments": '{"file_path": "notes.txt"}'},
    }
    assert found == [
        user("read it"),
        {**assistant("look"), "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "a\n\nb", "name": "Read"},
        user("well?"),
    ]


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (result("no such file", is_error=True), "Error: no such file"),
        (result("fine", is_error=False), "fine"),
        (result("PATH=/bin\0HOME=/root\0"), "PATH=/bin\0HOME=/root\0"),
        ({"type": "tool_result", "tool_use_id": "toolu_1"}, ""),
        (result([{"type": "tool_reference", "tool_name": "Grep"}]), "Grep"),
        (
            result([{"type": "search_result", "title": "T", "source": "S", "content": [text("x")]}]),
            "T\nS\nx",
        ),
        (result([{"type": "document", "source": {"type": "text", "data": "a\nb"}}]), "a\nb"),
        (result([{"type": "document", "title": 3, "source": {"type": "text", "data": "a"}}]), "a"),
        (result([{"type": "document", "source": {"type": "text"}}]), NO_DOCUMENT),
        (
            result([{"type": "document", "source": {"type": "content", "content": [text("a"), {"type": "novel"}]}}]),
            '[{"type": "text", "text": "a"}, {"type": "novel"}]',
        ),
        (result([{"type": "search_result", "title": None, "content": "x"}]), "x"),
        (result([{"type": "text"}]), '[{"type": "text"}]'),
    ],
)
def test_a_result_is_text(block: dict[str, Any], content: str) -> None:
    assert said(user("x"), assistant([USE]), user([block]))[-1]["content"] == content


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "a\nb"}, "a\nb"),
        ({"type": "content", "content": [text("a"), text("b")]}, "a\nb"),
        ({"type": "content", "content": "a"}, "a"),
    ],
)
def test_a_document_of_text_is_read_behind_its_title(source: dict[str, Any], content: str) -> None:
    document = {"type": "document", "source": source, "title": None, "citations": {"enabled": True}}
    assert said(user([text("see"), document])) == [user(f"see\n\n{content}")]
    titled = {**document, "title": "T", "context": "of 2024"}
    assert said(user([titled])) == [user(f"T\nof 2024\n{content}")]


def test_an_image_in_a_result_is_left_out_with_a_warning() -> None:
    shown = {"type": "document", "title": "T", "source": {"type": "content", "content": [IMAGE]}}
    block = result([text("a.png:"), IMAGE, *FILES, shown, {**SEARCHED, "content": [IMAGE]}])
    found = MESSAGES.read({"messages": [user("x"), assistant([USE]), user([block])]})
    said = ["an image was left out: this model reads text", "a document was left out: this model reads text"]
    image, document = (f"[{each}]" for each in said)
    content = ["a.png:", image, *[document] * len(FILES), f"T\n{image}", f"T\nS\n{image}"]
    assert found.messages[-1]["content"] == "\n\n".join(content)
    assert found.warnings == tuple(f"in a tool's result: {each}" for each in said)


def test_a_document_that_a_tool_has_shown_or_that_was_answered_is_left_out_with_a_warning() -> None:
    called, shown = [user("x"), assistant([USE])], user([FILES[2]])
    line = "a document was left out: this model reads text"
    for history in (
        [*called, user([result("read")]), shown, assistant("ok"), user("hi")],
        [*called, user([result("read")]), shown, user("hi")],
        [*called, user([result("read")]), shown],
        [*called, user([result("read"), text("a reminder")]), shown],
        [*called, user([result("read"), FILES[2]])],
        [*called, user([result("read"), FILES[2], text("a reminder")])],
        [*called, user([text("so"), result("read"), FILES[2], text("a reminder")])],
        [user([text("see"), FILES[2]]), assistant("ok"), user("hi")],
    ):
        found = read(*history)
        assert sum(f"[{line}]" in each["content"] for each in found.messages if each["role"] == "user") == 1
        assert found.warnings == (f"in a user's message: {line}",)
    for newest in ([user([text("see"), IMAGE])], [*called, user([result("read"), text("see"), IMAGE])]):
        assert refused(MESSAGES.read, {"messages": newest}).code == "unsupported_parameter"


def test_the_order_of_an_assistants_blocks_is_kept() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        text("a"),
        text("b"),
        USE,
        {"type": "redacted_thinking", "data": "xyz"},
        {**USE, "id": "toolu_2"},
        text("c"),
    ]
    first, second = said(user("x"), assistant(blocks), user("y"))[1:3]
    assert (first["content"], first["reasoning_content"], len(first["tool_calls"])) == ("ab", "hm", 2)
    assert second == assistant("c")


def test_blocks_of_another_servers_tools_are_left_out_with_a_warning() -> None:
    own = {"text", "thinking", "tool_use", "compaction"}
    of_anthropic = get_args(get_args(BetaContentBlock)[0])
    kinds = sorted({get_args(each.model_fields["type"].annotation)[0] for each in of_anthropic} - own)
    assert {"server_tool_use", "web_search_tool_result", "fallback", "redacted_thinking"} < set(kinds)
    elsewhere = [{"type": kind, "id": "s", "tool_use_id": "s", "content": []} for kind in kinds]
    found = read(user("x"), assistant([*elsewhere, text("ok"), elsewhere[0]]), user("y"))
    assert found.messages == read(user("x"), assistant([text("ok")]), user("y")).messages
    (warning,) = found.warnings
    assert warning.startswith(f"blocks of the type {', '.join(kinds)} are left out: they belong to another server")


@pytest.mark.parametrize(
    ("between", "content"),
    [
        ([{"type": "server_tool_use"}, {"type": "web_search_tool_result"}], "a\n\nb"),
        ([{"type": "redacted_thinking", "data": "gA"}], "ab"),
        ([{"type": "compaction", "content": None}], "a\n\nb"),
    ],
)
def test_texts_around_blocks_that_are_left_out_stand_apart(between: list[dict[str, Any]], content: str) -> None:
    blocks = [text("a"), *between, text("b")]
    assert said(user("x"), assistant(blocks), user("y"))[1] == assistant(content)
    assert said(user("x"), assistant(blocks[:-1]))[1] == assistant(content.removesuffix("b").rstrip())


def test_a_summary_stands_for_what_came_before_it() -> None:
    summary = {"type": "compaction", "content": "the summary"}
    older = {"type": "compaction", "content": "older"}
    first, last = assistant([older, text("a")]), assistant([text("b"), summary, text("c")])
    assert said(user("x"), first, user("y"), last, user("z")) == [user("the summary"), assistant("c"), user("z")]
    assert said(user("x"), assistant([summary])) == [user("the summary")]
    assert said(user("x"), assistant([summary]), user("z")) == said(user("the summary"), user("z"))
    searched = {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}
    for before in ("junk", {"x": 1}, assistant([{"x": 1}]), assistant([searched])):
        found = MESSAGES.read({"messages": [before, assistant([searched, summary])]})
        assert (found.messages, found.warnings) == ((user("the summary"),), ())


def test_a_file_for_another_servers_container_is_left_out_once_it_was_answered() -> None:
    uploaded = user([text("x"), {"type": "container_upload", "file_id": "f"}])
    line = "a file was left out: this model reads text"
    found = read(uploaded, assistant("ok"), user("y"))
    assert (found.messages[0], found.warnings) == (user(f"x\n\n[{line}]"), (f"in a user's message: {line}",))
    assert refused(MESSAGES.read, {"messages": [uploaded]}).code == "unsupported_parameter"


def test_tools_that_are_not_functions_are_left_out_with_a_warning() -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "custom", "name": "Read"}]
    write = {"name": "Write", "input_schema": None, "parameters": {"type": "object"}}
    found = read(user("hi"), tools=[*tools, {"type": "function", "function": write}])
    assert [tool["function"]["name"] for tool in found.tools] == ["Read", "Write"]
    assert found.tools[1]["function"]["parameters"] == {"type": "object"}
    assert found.warnings == ("the tool 'web_search_20250305' is not a function and was left out",)


@pytest.mark.parametrize(
    ("choice", "own"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "Read"}, {"type": "function", "function": {"name": "Read"}}),
    ],
)
def test_choices_of_tools_have_the_sessions_names(choice: dict[str, Any], own: Any) -> None:
    found = read(user("hi"), tool_choice=choice)
    assert (found.tool_choice, found.parallel_tool_calls) == (own, True)


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("disabled", False), ("adaptive", None)])
def test_thinking_is_switched_only_where_it_is_asked_for(kind: str, thinks: bool | None) -> None:
    variables = {} if thinks is None else {"enable_thinking": thinks}
    assert read(user("hi"), thinking={"type": kind, "budget_tokens": 2000}).template_variables == variables


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
SEARCHED = {"type": "search_result", "title": "T", "source": "S"}
FILES: list[dict[str, Any]] = [
    {"type": "document", "title": "T", "source": source}
    for source in (None, {}, {"type": "base64", "data": "AAAA"}, {"type": "url", "url": "http://x"})
]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (user([IMAGE]), "'image'"),
        *((user([each]), "'document'") for each in FILES),
        (user([{"type": "document", "source": {"type": "text", "data": None}}]), "without text"),
        (user([{"type": "document", "source": {"type": "content", "content": [IMAGE]}}]), "'image'"),
        (user([{**SEARCHED, "content": [IMAGE]}]), "'image'"),
        (user([{"type": "novelty"}]), "'novelty'"),
        (user([{"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}]), "'server_tool_use'"),
        (assistant([{"type": "novelty"}]), "'novelty'"),
        (user([{"type": "text"}]), "without text"),
        (assistant([{"type": "text"}]), "no text"),
        (user(["x"]), "an object with a type"),
        (user([{"type": 3}]), "an object with a type"),
        (user(None), "text or a list"),
        (user({}), "text or a list"),
        ({"role": "tool", "content": "x"}, "user, assistant or system, not 'tool'"),
        (assistant([{**USE, "id": "a\0"}]), "NUL"),
        (assistant([{**USE, "name": "a\0"}]), "NUL"),
        (user([{**result("x"), "tool_use_id": "\0"}]), "NUL"),
        (assistant([{**USE, "name": None}]), "no function name"),
        ("x", "must be an object"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message: Any, words: str) -> None:
    error = refused(MESSAGES.read, {"messages": [user("hi"), message, user("z")]})
    assert error.param in ("messages[1]", "messages")
    assert words in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [user("x")] * (MOST_MESSAGES + 1)}, "messages"),
        ({"messages": HI, "system": [IMAGE]}, "system"),
        ({"messages": HI, "system": 3}, "system"),
        ({"messages": HI, "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"messages": HI, "stop_sequences": "x"}, "stop_sequences"),
        ({"messages": HI, "max_tokens": -1}, "max_tokens"),
        ({"messages": HI, "container": "c_1"}, "container"),
        ({"messages": HI, "output_config": {"format": {"type": "json_schema"}}}, "format"),
    ],
)
def test_other_fields_that_cannot_be_obeyed_are_named(body: dict[str, Any], param: str) -> None:
    assert refused(MESSAGES.read, body).param == param


def test_an_answer_that_is_begun_is_the_last_message() -> None:
    request = MESSAGES.read({"messages": [user("x"), assistant("y")]})
    assert request.messages[-1] == {"role": "assistant", "content": "y"}


def test_an_agents_request_is_read_whole() -> None:
    body = claude_code("What is in notes.txt?", share=0.2)
    body = with_result(body, USE, "nothing", is_error=True)
    found = MESSAGES.read(json.loads(json.dumps(body)))
    assert [each["role"] for each in found.messages] == ["system", "user", "assistant", "tool"]
    assert found.messages[1]["content"].endswith("What is in notes.txt?")
    assert found.messages[-1]["content"] == "Error: nothing"
    assert found.tools[0]["function"]["name"] == "Read"
    assert found.model == body["model"]
    assert "billing" not in found.messages[0]["content"]


# -------------------------------------------------------------------------------------------------- answers


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load(draft="none") as engine:
        yield engine


def done(engine: Engine, **members: Any) -> Done:
    own: dict[str, Any] = {"finish_reason": "stop", "text": "x", "token_ids": (), "plan": engine.plan}
    stats = DecodeStats(prompt_tokens=20, cached_tokens=12, emitted_tokens=11)
    return Done(**{**own, "stats": stats, "sampling": Sampling(seed=5), **members})


def events(raw: bytes) -> list[dict[str, Any]]:
    found = []
    for each in raw.decode().split("\n\n")[:-1]:
        name, data = each.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def streamed(parts: Sequence[Part], end: Done, request: Request | None = None) -> list[dict[str, Any]]:
    writer = MESSAGES.events(request or Request())
    raw = writer.begin(0, HEAD, 20) + b"".join(writer.part(0, part) for part in parts)
    return events(raw + writer.end(0, end) + writer.finish([end]))


PARTS = [
    Part(reasoning="h"),
    Part(reasoning="m"),
    Part("\n"),
    Part("Let me"),
    Part(" look. "),
    Part(calls=(CALL,)),
    Part("\n"),
    Part(calls=(CALL,)),
]


def test_the_events_of_an_answer_come_in_order(engine: Engine) -> None:
    found = streamed(PARTS, done(engine, tool_calls=(CALL, CALL)))
    assert [each["type"] for each in found] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"] * 2,
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    started = [each for each in found if each["type"] == "content_block_start"]
    assert [each["index"] for each in started] == [0, 1, 2, 3]
    assert [each["content_block"] for each in started][:3] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call00000", "name": "Read", "input": {}},
    ]
    deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
    assert "".join(each.get("thinking", "") for each in deltas) == "hm"
    assert "".join(each.get("text", "") for each in deltas) == "\nLet me look. "
    assert deltas[-1] == {"type": "input_json_delta", "partial_json": CALL.arguments}
    message = found[0]["message"]
    assert (message["id"], message["role"], message["content"], message["stop_reason"]) == (
        "msg_1",
        "assistant",
        [],
        None,
    )
    assert message["usage"]["input_tokens"] == 20
    end = found[-2]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"] == {
        "input_tokens": 8,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 12,
        "output_tokens": 11,
    }
    assert end["edgespec"]["timings"]["cache_n"] == 12
    assert end["edgespec"]["seed"] == 5


def whole(request: Request, parts: list[Part], end: Done) -> dict[str, Any]:
    return MESSAGES.whole(request, HEAD, collected(MESSAGES, parts, end), [end])


def test_a_whole_reply_has_text_and_calls_in_the_order_of_the_answer(engine: Engine) -> None:
    parts = [
        Part(calls=(CALL,)),
        Part("\n"),
        Part(" So"),
        Part(" far."),
        Part(calls=(CALL,)),
        Part("\n"),
        Part("end"),
    ]
    reply = whole(Request(), parts, done(engine, tool_calls=(CALL, CALL)))
    assert [(each["type"], each.get("text")) for each in reply["content"]] == [
        ("tool_use", None),
        ("text", "\n So far."),
        ("tool_use", None),
        ("text", "\nend"),
    ]


def test_a_whole_reply_has_the_same_blocks(engine: Engine) -> None:
    end = done(engine, tool_calls=(CALL,))
    reply = whole(Request(), PARTS[:6], end)
    assert reply["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "\nLet me look. "},
        {"type": "tool_use", "id": "call00000", "name": "Read", "input": {"file_path": "notes.txt"}},
    ]
    assert set(MESSAGES.reply) <= set(reply)
    assert (reply["stop_reason"], reply["usage"]["cache_read_input_tokens"]) == ("tool_use", 12)
    blank = whole(Request(), [Part("\n")], done(engine))
    assert (blank["content"], blank["stop_reason"]) == ([], "end_turn")


def test_hidden_thinking_is_in_no_reply(engine: Engine) -> None:
    request = Request(hide_thinking=True)
    assert "thinking" not in json.dumps(streamed(PARTS, done(engine), request))
    assert len(whole(request, PARTS[:5], done(engine))["content"]) == 1


@pytest.mark.parametrize(
    ("members", "request_", "reason", "sequence"),
    [
        ({}, Request(), "end_turn", None),
        ({"stop_text": "END"}, Request(stop=("END",)), "stop_sequence", "END"),
        ({"stop_text": "<|im_end|>"}, Request(stop=("END",)), "end_turn", None),
        ({"finish_reason": "length"}, Request(max_tokens=11), "max_tokens", None),
        ({"finish_reason": "length"}, Request(max_tokens=12), "model_context_window_exceeded", None),
        ({"finish_reason": "length"}, Request(), "model_context_window_exceeded", None),
        ({"finish_reason": "length", "tool_calls": (CALL,)}, Request(max_tokens=11), "max_tokens", None),
    ],
)
def test_the_reason_for_the_end_is_named(
    engine: Engine, members: dict[str, Any], request_: Request, reason: str, sequence: str | None
) -> None:
    end = done(engine, **members)
    assert streamed([], end, request_)[1]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    reply = whole(request_, [Part()], end)
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)


def test_a_stream_that_waits_or_fails_says_so_before_and_after_its_beginning() -> None:
    writer = MESSAGES.events(Request())
    failed = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    for _ in range(2):
        assert events(writer.waiting()) == [{"type": "ping"}]
        assert events(writer.fail(ApiError("busy", status=503))) == [failed]
        writer.begin(0, HEAD, 20)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    assert MESSAGES.error(ApiError("x", status=status)) == {"type": "error", "error": {"type": kind, "message": "x"}}


def test_a_prompt_that_is_too_long_has_the_words_that_agents_look_for() -> None:
    error = ApiError("context_length_exceeded: 9 tokens", code="context_length_exceeded")
    assert MESSAGES.error(error)["error"]["message"] == "prompt is too long: 9 tokens"
