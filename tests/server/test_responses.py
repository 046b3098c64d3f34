"""The Responses API, pure: items and tools as they are read, replies and events as the openai package reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast, get_args, get_type_hints

import httpx
import openai
import pytest
from hypothesis import given, strategies as st
from openai.types.responses import Response, ResponseInputItemParam, ResponseStreamEvent
from pydantic import TypeAdapter

from edgespec.decoding.round_base import DecodeStats
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Text, Token
from edgespec.server.answers import Part, ScoredToken, _Parts, joined
from edgespec.server.errors import ApiError
from edgespec.server.faces.face import Head
from edgespec.server.faces.responses import RESPONSES, read_responses
from edgespec.server.items import ELSEWHERE
from edgespec.server.replies import json_pieces
from edgespec.server.schema import Request
from edgespec.text.conversation.pieces import ToolCall
from tests.support.faces import collected
from tests.support.tiny_models import TinyModels

HEAD = Head(id="resp_abc", created=7, model="tiny", fingerprint="f")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HELLO = {"role": "user", "content": "hello"}
CALL = ToolCall(0, "call00001", "weather", '{"city": "Oslo"}')


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load(draft="none") as engine:
        yield engine


@pytest.fixture(scope="module")
def done(engine: Engine) -> Done:
    stats = DecodeStats(
        prompt_tokens=20, cached_tokens=12, emitted_tokens=11, reasoning_tokens=2, proposed=9, accepted=6
    )
    return Done(
        finish_reason="stop",
        text="x",
        token_ids=(),
        stats=stats,
        plan=engine.plan,
        sampling=Sampling(temperature=0.5, seed=5),
    )


def read(**body: Any) -> Any:
    return read_responses({"input": "hello", **body})


def refused(**body: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        read(**body)
    assert error.value.status == 400
    return error.value


def messages(*items: Any, **more: Any) -> list[Any]:
    return list(read(input=list(items), **more).messages)


# ------------------------------------------------------------------------------------------------------------ items


def test_a_text_is_the_users_and_instructions_are_the_systems() -> None:
    assert read().messages == (HELLO,)
    assert read(instructions="Be brief.").messages == ({"role": "system", "content": "Be brief."}, HELLO)


def test_neighbouring_messages_of_developer_and_system_are_one() -> None:
    parts = [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]
    found = messages(
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "system", "content": parts},
        HELLO,
        instructions="first",
    )
    assert found == [{"role": "system", "content": "first\n\na\n\nb\nc"}, HELLO]


def test_calls_and_their_results_are_a_chats() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]}
    found = messages(
        HELLO,
        said,
        {"type": "function_call", "id": "fc_1", "call_id": "a|b", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "c", "name": "get", "namespace": "mcp__files__", "arguments": ""},
        {"type": "function_call_output", "call_id": "a|b", "output": "cold"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "none"}]},
    )
    assert [(each["role"], each["content"]) for each in found[1:]] == [
        ("assistant", "Let me look."),
        ("tool", "cold"),
        ("tool", "none"),
    ]
    calls = [(call["id"], *call["function"].values()) for call in found[1]["tool_calls"]]
    assert calls == [("a|b", "weather", '{"city": "Oslo"}'), ("c", "mcp__files__get", "{}")]
    assert [(each["tool_call_id"], each["name"]) for each in found[2:]] == [
        ("a|b", "weather"),
        ("c", "mcp__files__get"),
    ]


def test_an_image_in_an_output_is_left_out_with_a_warning() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    image = {"type": "input_image", "image_url": "data:"}
    found = read(input=[HELLO, call, {"type": "function_call_output", "call_id": "1", "output": [image]}])
    assert found.messages[-1]["content"] == "[an image was left out: this model reads text]"
    assert found.warnings == ("in a tool's result: an image was left out: this model reads text",)


def test_an_image_that_a_tool_has_shown_is_left_out_with_a_warning() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "view_image", "arguments": "{}"}
    shown = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
    items = [HELLO, call, {"type": "function_call_output", "call_id": "1", "output": "attached"}, shown, shown]
    for more in ([], [HELLO], [{"type": "reasoning", "summary": []}, HELLO]):
        found = read(input=[*items, *more])
        assert found.messages[3]["content"].startswith("[an image was left out: this model reads text]")
        assert found.warnings == ("in a user's message: an image was left out: this model reads text",)
    asked = {"role": "user", "content": [*shown["content"], {"type": "input_text", "text": "what is it?"}]}
    assert refused(input=[*items[:3], asked]).message == "an image (input[3]) is not supported"


def test_an_earlier_models_call_with_text_is_one_with_an_argument() -> None:
    found = messages(
        HELLO,
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
    )
    assert json.loads(found[1]["tool_calls"][0]["function"]["arguments"]) == {"input": 'a "b"'}
    assert (found[2]["name"], found[2]["content"]) == ("patch", "done")


def test_items_of_another_server_are_left_out_with_a_warning() -> None:
    elsewhere = [{"type": kind, "id": "x_1", "encrypted_content": "gA"} for kind in sorted(ELSEWHERE)]
    assert {"web_search_call", "compaction", "program", "program_output"} <= ELSEWHERE
    found = read(input=[HELLO, *elsewhere, {"role": "user", "content": "go"}, elsewhere[0]])
    assert found.messages == read(input=[HELLO, {"role": "user", "content": "go"}]).messages
    (warning,) = found.warnings
    assert warning.startswith(f"items of the type {', '.join(sorted(ELSEWHERE))} are left out: ")


# Items that change the tools or the form of answers: without them the answer would be another.
CHANGING = {"additional_tools", "configuration_update", "compaction_trigger"}
OF_THE_CLIENT = {"function", "custom_tool", "local_shell", "shell", "apply_patch"}


def test_every_item_of_openais_package_is_read_left_out_or_refused_on_purpose() -> None:
    hints = (get_type_hints(each)["type"] for each in get_args(ResponseInputItemParam))
    kinds = {kind for hint in hints for kind in get_args(hint) if isinstance(kind, str)} - {"item_reference"}
    calls = {f"{name}_call{end}" for name in OF_THE_CLIENT for end in ("", "_output")}
    assert kinds - ELSEWHERE - CHANGING == {"message", "reasoning", *calls}
    assert all(refused(input=[HELLO, {"type": kind}]).code == "unsupported_parameter" for kind in CHANGING)


@pytest.mark.parametrize(
    ("name", "member", "identity", "more", "content"),
    [
        ("local_shell", "action", "id", {"output": '{"stdout": "x"}'}, '{"stdout": "x"}'),
        ("local_shell", "action", "call_id", {"output": "x", "id": "lsh_1"}, "x"),
        ("shell", "action", "call_id", {"output": [{"stdout": "é"}], "id": "sho_1"}, '[{"stdout": "é"}]'),
        ("apply_patch", "operation", "call_id", {"output": None, "status": "completed"}, ""),
        ("apply_patch", "operation", "call_id", {"status": "failed"}, "Error: failed"),
        ("apply_patch", "operation", "call_id", {"status": "failed", "output": "no file"}, "Error: no file"),
    ],
)
def test_calls_that_the_client_runs_for_openais_tools_are_calls(
    name: str, member: str, identity: str, more: dict[str, Any], content: str
) -> None:
    calls = [{"type": f"{name}_call", "call_id": each, member: {"command": ["ls"]}} for each in "cd"]
    results = [{"type": f"{name}_call_output", **more, identity: each} for each in "dc"]
    found = messages(HELLO, *calls, *results)
    assert [each["function"] for each in found[1]["tool_calls"]] == [
        {"name": name, "arguments": '{"command": ["ls"]}'}
    ] * 2
    result = {"role": "tool", "name": name, "content": content}
    assert found[2:] == [{**result, "tool_call_id": "d"}, {**result, "tool_call_id": "c"}]


def test_a_result_of_a_local_shell_may_name_the_id_of_its_call() -> None:
    calls = [{"type": "local_shell_call", "call_id": each, "id": f"lsh_{each}", "action": {}} for each in "cd"]
    results = [{"type": "local_shell_call_output", "id": f"lsh_{each}", "output": each} for each in "dc"]
    found = messages(HELLO, *calls, *results)
    assert [(each["tool_call_id"], each["content"]) for each in found[2:]] == [("d", "d"), ("c", "c")]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "reasoning_text", "text": "hm"}],
        [{"type": "thinking", "thinking": "hm"}, {"type": "redacted_thinking", "data": "gA"}],
    ],
)
def test_thinking_among_the_parts_of_a_message_is_its_thinking(content: list[dict[str, Any]]) -> None:
    answer = {"role": "assistant", "content": [*content, {"type": "output_text", "text": "Yes."}]}
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    assert messages(HELLO, answer, HELLO)[1] == thought
    assert refused(input=[HELLO, {**answer, "role": "user"}]).code == "unsupported_parameter"


def test_thinking_that_the_client_has_as_text_comes_back_and_other_is_left_out() -> None:
    answer = {"role": "assistant", "content": "Yes."}
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    hidden = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "xyz"}
    assert messages(HELLO, thought, answer, HELLO)[1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "hm",
    }
    for other in (hidden, {**thought, "content": [{"type": "reasoning_text"}]}, {**thought, "content": {}}):
        assert messages(HELLO, other, answer, HELLO)[1] == answer
    assert "content of input[1] must be text" in refused(input=[HELLO, {**thought, "content": 7}, HELLO]).message


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "msg_1"},
        {"type": "compaction_trigger"},
        {"type": ["message"], "role": "user"},
        {"id": "x"},
        {"role": "tool", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
        {"role": "user", "content": 3},
        {"type": "function_call", "call_id": "1"},
        {"type": "function_call", "call_id": {}, "name": "x"},
        {"type": "function_call", "call_id": "a\0", "name": "x"},
        {"type": "function_call_output", "call_id": "a\0", "output": "x"},
    ],
)
def test_items_that_cannot_be_read_are_refused(item: dict[str, Any]) -> None:
    error = refused(input=[HELLO, item])
    assert str(error.param).partition("[")[0] == "input"
    assert error.message


def test_a_request_without_anything_to_answer_is_refused() -> None:
    assert refused(input=[]).param == "input"
    assert refused(input=None).param == "input"
    assert refused(input=["hello"]).param == "input"
    assert refused(previous_response_id="resp_1").param == "previous_response_id"
    assert refused(conversation="conv_1").code == "unsupported_parameter"


# ------------------------------------------------------------------------------------------------------------ tools

FUNCTION = {"type": "function", "name": "weather", "description": "The weather.", "parameters": {"type": "object"}}
SPACE = {
    "type": "namespace",
    "name": "mcp__files__",
    "description": "About files.",
    "tools": [
        {"type": "function", "name": "read", "description": "Reads.", "strict": False},
        {"type": "custom", "name": "patch"},
        {"type": "function", "name": "list"},
    ],
}


def test_functions_are_a_chats_and_those_of_a_namespace_have_its_name() -> None:
    request = read(tools=[FUNCTION, SPACE])
    functions = [tool["function"] for tool in request.tools]
    assert functions[0] == {key: value for key, value in FUNCTION.items() if key != "type"}
    assert functions[1:] == [
        {"name": "mcp__files__read", "description": "About files.\n\nReads.", "strict": False},
        {"name": "mcp__files__list"},
    ]
    assert request.namespaces == {
        "mcp__files__read": ("mcp__files__", "read"),
        "mcp__files__list": ("mcp__files__", "list"),
    }


def test_other_tools_are_left_out_with_a_warning() -> None:
    request = read(tools=[FUNCTION, {"type": "web_search"}, {"type": "custom", "name": "x"}, {"type": "web_search"}])
    assert len(request.tools) == 1
    assert request.warnings == ("tools of the type web_search, custom are left out: only functions are called",)
    assert read(tools=[FUNCTION]).warnings == ()


@pytest.mark.parametrize(
    "space",
    [
        {"type": "namespace"},
        {**SPACE, "name": 3},
        {**SPACE, "tools": {}},
        {**SPACE, "tools": [{"type": "function", "name": []}]},
        {"type": "function", "name": []},
    ],
)
def test_a_namespace_that_cannot_be_read_is_refused(space: Any) -> None:
    assert refused(tools=[space]).param == "tools"


@pytest.mark.parametrize("choice", [None, "auto", "none", "required"])
def test_a_choice_in_a_word_is_a_chats(choice: str | None) -> None:
    assert read(tools=[FUNCTION], tool_choice=choice).tool_choice == choice


def test_a_chosen_function_is_a_chats_and_allowed_ones_are_the_only_ones() -> None:
    named = read(tools=[FUNCTION], tool_choice={"type": "function", "name": "weather"})
    assert named.tool_choice == {"type": "function", "function": {"name": "weather"}}
    inner = {"type": "function", "name": "read", "namespace": "mcp__files__"}
    assert read(tools=[SPACE], tool_choice=inner).tool_choice["function"]["name"] == "mcp__files__read"
    for mode, entry in (("required", {"name": "weather"}), ("any", {"function": {"name": "weather"}})):
        allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", **entry}]}
        request = read(tools=[FUNCTION, SPACE], tool_choice=allowed)
        assert ([tool["function"]["name"] for tool in request.tools], request.tool_choice) == (
            ["weather"],
            "required",
        )
    for other in ({"type": "web_search"}, {"type": "custom", "name": "x"}, {"type": "allowed_tools"}, {}):
        assert refused(tools=[FUNCTION], tool_choice=other).param == "tool_choice"


# ----------------------------------------------------------------------------------------------------- other fields


def test_the_fields_of_the_answer_are_those_of_a_chat() -> None:
    request = read(max_output_tokens=7, temperature=0.5, top_p=0.9, stream=True, parallel_tool_calls=False)
    assert (request.max_tokens, request.sampling) == (7, {"temperature": 0.5, "top_p": 0.9})
    assert (request.stream, request.parallel_tool_calls) == (True, False)
    assert (read().store, read(store=False).store) == (True, False)
    assert all(read(store=other).store for other in (None, True, "no", 0, {}))
    assert read(store=True, metadata={"a": "b"}, truncation="auto", include=["reasoning.encrypted_content"])
    assert read(reasoning={"effort": "none"}).template_variables["enable_thinking"] is False
    assert "enable_thinking" not in read(reasoning={"effort": "low", "summary": "auto"}).template_variables


def test_a_form_of_the_text_is_the_form_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = read(text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}).form
    assert (named.form.kind, named.field) == ("schema", "text.format.schema")
    assert read(text={"format": {"type": "json_object"}}).form.form.kind == "schema"
    assert read(text={"format": {"type": "text"}, "verbosity": "low"}).form is None
    assert refused(text={"format": {"type": "json_schema", "name": "x"}}).param == "text.format.schema"
    assert refused(text={"format": {"type": "grammar"}}).param == "format"


def test_a_form_is_that_of_texts_and_not_of_a_call_that_must_come() -> None:
    text = {"format": {"type": "json_object"}}
    for choice in ("required", {"type": "function", "name": "weather"}):
        assert read(text=text, tools=[FUNCTION], tool_choice=choice).form is None
    for choice in ("auto", "none", None):
        assert read(text=text, tools=[FUNCTION], tool_choice=choice).form is not None


def test_log_probabilities_are_asked_for_by_include() -> None:
    include = ["message.output_text.logprobs"]
    assert read(include=include, top_logprobs=3).logprobs == 3
    assert read(include=include).logprobs == 0
    assert read().logprobs is None
    assert refused(top_logprobs=3).param == "top_logprobs"


# ----------------------------------------------------------------------------------------------------------- events


def events_of(parts: list[Part], done: Done, **request: Any) -> list[dict[str, Any]]:
    """The events of a streamed reply, each checked against the types of the openai package."""
    written = RESPONSES.events(read(stream=True, **request))
    data = written.begin(0, HEAD, 20) + b"".join(written.part(0, part) for part in parts)
    return parsed(data + written.end(0, done) + written.finish([done]))


def parsed(data: bytes) -> list[dict[str, Any]]:
    found = []
    for number, event in enumerate(data.decode().removesuffix("\n\n").split("\n\n")):
        first, second = event.split("\n")
        found.append(json.loads(second.removeprefix("data: ")))
        assert first == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
        assert type(EVENT.validate_python(found[-1])) in get_args(get_args(ResponseStreamEvent)[0])
    return found


def whole_of(parts: list[Part], done: Done, **request: Any) -> dict[str, Any]:
    reply = RESPONSES.whole(read(**request), HEAD, collected(RESPONSES, parts, done), [done])
    found: dict[str, Any] = json.loads(b"".join(json_pieces(reply)))
    Response.model_validate(found)
    return found


def test_a_message_comes_in_the_events_of_openai(done: Done) -> None:
    events = events_of([Part("Hel"), Part("lo")], done)
    assert [each["type"].removeprefix("response.") for each in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]
    assert [each["delta"] for each in events[4:6]] == ["Hel", "lo"]
    assert (events[6]["text"], events[7]["part"]["text"]) == ("Hello", "Hello")
    assert events[2]["item"] == {
        "id": "msg_abc00",
        "type": "message",
        "role": "assistant",
        "status": "in_progress",
        "content": [],
    }
    assert {each["item_id"] for each in events[3:8]} == {"msg_abc00"}
    assert events[8]["item"] == events[9]["response"]["output"][0]
    assert (events[8]["item"]["status"], events[0]["response"]["status"]) == ("completed", "in_progress")


def test_thinking_text_and_calls_are_items_in_their_order(done: Done) -> None:
    parts = [Part(reasoning="h"), Part(reasoning="m"), Part("Let me look."), Part(calls=(CALL,))]
    events = events_of(parts, done)
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[2:8] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done"),
    ]
    assert kinds[-5:] == [
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    output = events[-1]["response"]["output"]
    assert [(item["type"], item["id"]) for item in output] == [
        ("reasoning", "rs_abc00"),
        ("message", "msg_abc01"),
        ("function_call", "fc_abc02"),
    ]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (output[2]["name"], output[2]["call_id"], output[2]["arguments"]) == (
        "weather",
        "call00001",
        '{"city": "Oslo"}',
    )
    for event in events:
        if "output_index" in event and "item" in event:
            assert event["item"]["id"] == output[event["output_index"]]["id"]


def test_blanks_before_a_call_do_not_make_a_message(done: Done) -> None:
    for parts in ([Part("\n"), Part(calls=(CALL,))], [Part(calls=(CALL,)), Part(" ")]):
        assert [item["type"] for item in events_of(parts, done)[-1]["response"]["output"]] == ["function_call"]
        assert [item["type"] for item in whole_of(parts, done)["output"]] == ["function_call"]


def test_an_answer_without_anything_is_an_empty_message(done: Done) -> None:
    assert events_of([], done)[-1]["response"]["output"][0]["content"][0]["text"] == ""
    assert whole_of([Part(" ")], done)["output"][0]["content"][0]["text"] == " "


def test_a_call_of_a_function_in_a_namespace_has_both_names(done: Done) -> None:
    parts = [Part(calls=(replace(CALL, name="mcp__files__read"),))]
    for event in events_of(parts, done, tools=[SPACE]):
        if "item" in event:
            assert (event["item"]["namespace"], event["item"]["name"]) == ("mcp__files__", "read")
    item = whole_of(parts, done, tools=[SPACE])["output"][0]
    assert (item["namespace"], item["name"]) == ("mcp__files__", "read")
    (again,) = messages(HELLO, item, {**HELLO, "content": "and?"})[1]["tool_calls"]
    assert again["function"]["name"] == "mcp__files__read"


def test_an_answer_that_was_cut_is_incomplete(done: Done) -> None:
    cut = replace(done, finish_reason="length")
    last = events_of([Part("Hel")], cut)[-1]
    assert last["type"] == "response.incomplete"
    for response in (last["response"], whole_of([Part("Hel")], cut)):
        assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    thinking = whole_of([Part(reasoning="h")], cut)["output"]
    assert [(item["type"], item["status"]) for item in thinking] == [("reasoning", "incomplete")]


def test_a_reply_has_usage_and_repeats_its_request(done: Done) -> None:
    asked = {"tools": [FUNCTION, {"type": "web_search"}], "instructions": "Be brief.", "metadata": {"a": "b"}}
    response = whole_of([Part("x")], done, **asked, store=True, max_output_tokens=9)
    assert response["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 12, "cache_write_tokens": 8},
        "output_tokens": 11,
        "output_tokens_details": {
            "reasoning_tokens": 2,
            "accepted_prediction_tokens": 6,
            "rejected_prediction_tokens": 3,
        },
        "total_tokens": 31,
    }
    assert {name: response[name] for name in asked} == asked
    assert (response["store"], response["max_output_tokens"], response["temperature"]) == (True, 9, 0.5)
    assert whole_of([Part("x")], done, store=False)["store"] is False
    assert response["edgespec"]["seed"] == 5
    assert response["edgespec"]["timings"]["predicted_n"] == 11


def test_log_probabilities_come_with_the_text_and_not_with_thinking(done: Done) -> None:
    def part(text: str = "", reasoning: str = "", mark: str = "") -> Part:
        data = (text or reasoning or mark).encode()
        return Part(text, reasoning, (ScoredToken(data, 0, -0.5, ((data, -0.5),)),), thought=not text)

    parts = [part(mark="<think>"), part(reasoning="hm"), part(mark="</think>"), part("a"), part("b")]
    events = events_of(parts, done, include=["message.output_text.logprobs"])
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [[token["token"] for token in each["logprobs"]] for each in deltas] == [["a"], ["b"]]
    for response in (events[-1]["response"], whole_of(parts, done)):
        assert [token["token"] for token in response["output"][1]["content"][0]["logprobs"]] == ["a", "b"]


class Named:
    """Scores that are the tokens' texts."""

    def of(self, tokens: Sequence[Token]) -> tuple[ScoredToken, ...]:
        return tuple(ScoredToken(token.text.encode(), 0, -0.5, ()) for token in tokens)


def test_tokens_of_the_answer_in_the_round_that_ends_thinking_come_with_its_text() -> None:
    parts = _Parts(Request(logprobs=0), cast(Any, Named()))
    tokens = tuple(Token(text, number) for number, text in enumerate(("hm", "</think>", "\n\n", "The", " end")))
    said = [
        parts.of(Text("hm", tokens, reasoning="hm")),
        parts.of(Text("</think>\n\n", reasoning="")),
        parts.of(Text("The end")),
        parts.of(Text(" ", (Token(" now", 9),), reasoning="")),
        parts.of(Text("now")),
    ]
    assert [[scored.data.decode() for scored in part.tokens] for part in said] == [
        ["hm"],
        ["</think>", "\n\n"],
        ["The", " end"],
        [],
        [" now"],
    ]
    assert [part.thought for part in said] == [True, True, False, False, False]


def test_a_reply_that_fails_says_so_in_openais_words(done: Done) -> None:
    for error, code in (
        (ApiError("long", code="context_length_exceeded"), "context_length_exceeded"),
        (ApiError("lost", status=503, code="unavailable"), "server_error"),
        (ApiError("busy", status=429), "rate_limit_exceeded"),
        (ApiError("odd"), "invalid_prompt"),
    ):
        written = RESPONSES.events(read(stream=True))
        data = written.begin(0, HEAD, 20) + written.part(0, Part("Hel")) + written.fail(error)
        last = json.loads(data.decode().split("data: ")[-1])
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": code, "message": error.message}


@pytest.mark.parametrize("store", [True, False])
def test_items_are_kept_as_they_end_and_the_open_one_if_the_answer_fails(store: bool) -> None:
    kept = list[Any]()
    written = RESPONSES.events(read(stream=True, store=store))
    written.begin(0, replace(HEAD, keep=kept.extend), 20)
    written.part(0, Part(reasoning="hm"))
    assert kept == []
    written.part(0, Part("Hel"))
    assert [(each["id"], each["status"]) for each in kept] == [("rs_abc00", "completed")] * store
    written.fail(ApiError("lost", status=503))
    assert [(each["id"], each["status"]) for each in kept[1:]] == [("msg_abc01", "incomplete")] * store
    assert not store or kept[1]["content"][0]["text"] == "Hel"


def test_a_stream_that_fails_before_the_answer_begins_has_an_error_and_a_response_that_fails() -> None:
    written = RESPONSES.events(read(stream=True, model="gpt-17"))
    assert written.waiting() == b": waiting\n\n"
    created, waiting, error, failed = parsed(written.fail(ApiError("wrong")))
    assert (created["type"], waiting["type"]) == ("response.created", "response.in_progress")
    assert (created["response"]["model"], created["response"]["status"]) == ("gpt-17", "in_progress")
    about = {"message": "wrong", "param": None, "code": "invalid_prompt"}
    inner = {"type": "invalid_request_error", **about}
    assert error == {"type": "error", "sequence_number": 2, **about, "error": inner}
    assert (failed["type"], failed["response"]["id"]) == ("response.failed", created["response"]["id"])
    assert failed["response"]["error"] == {"code": "invalid_prompt", "message": "wrong"}


def test_the_openai_client_raises_the_error_of_such_a_stream() -> None:
    def failing(_: httpx.Request) -> httpx.Response:
        data = RESPONSES.events(read(stream=True)).fail(ApiError("busy", status=429, code="queue_full"))
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=data)

    http = httpx.Client(transport=httpx.MockTransport(failing))
    with (
        openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http) as client,
        pytest.raises(openai.APIError, match="busy") as error,
    ):
        list(client.responses.create(model="tiny", input="hello", stream=True))
    assert error.value.code == "queue_full"


def test_a_reply_that_has_begun_waits_with_an_event(done: Done) -> None:
    written = RESPONSES.events(read(stream=True))
    events = parsed(written.begin(0, HEAD, 20) + written.waiting())
    assert [event["type"] for event in events][1:] == ["response.in_progress"] * 2


texts = st.text(st.characters(codec="utf-8"), max_size=6)
parts_of_answers = st.lists(
    st.builds(Part, content=texts) | st.builds(Part, reasoning=texts) | st.just(Part(calls=(CALL,))), max_size=8
)


@given(parts_of_answers)
def test_the_deltas_of_an_item_are_its_text_and_the_items_those_of_the_reply(done: Done, parts: list[Part]) -> None:
    events = events_of(parts, done)
    output = events[-1]["response"]["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    for item in output:
        deltas = "".join(each["delta"] for each in events if each.get("item_id") == item["id"] and "delta" in each)
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    said = "".join(item["content"][0]["text"] for item in output if item["type"] == "message")
    assert said.strip() == joined(parts).content.strip() or any(item["type"] == "function_call" for item in output)


@given(parts_of_answers)
def test_a_whole_reply_has_the_items_of_the_stream_in_their_order(done: Done, parts: list[Part]) -> None:
    def shown(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in item.items() if name != "id"} for item in items]

    assert shown(whole_of(parts, done)["output"]) == shown(events_of(parts, done)[-1]["response"]["output"])
