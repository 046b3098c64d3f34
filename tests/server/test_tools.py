"""Tools over HTTP: calls as the openai client reads them. The model's own calls are scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from edgespec.server.faces.openai import read_chat
from tests.engine.test_tools import TEMPLATE, tool
from tests.server.test_http import events
from tests.support.http_server import Running, running
from tests.support.tiny_models import TinyModels

ASK: Any = [{"role": "user", "content": "what is the weather"}]
TOOLS: Any = [tool()]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tools_server(tiny: TinyModels) -> Iterator[Running]:
    with running(lambda: tiny.load(tiny.with_template("tools", TEMPLATE), draft="none", depth=0)) as found:
        yield found


@pytest.fixture
def client(tools_server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_call_is_a_tool_call_and_its_result_continues_the_conversation(
    client: openai.OpenAI, says: list[str]
) -> None:
    says += ["\nLet me look. ", CALL[:20], CALL[20:]]
    reply = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, max_tokens=20)
    choice = reply.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "\nLet me look.")
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    says += ["It is ", "cold."]
    result = {"role": "tool", "tool_call_id": call.id, "content": "-3"}
    messages: Any = [*ASK, choice.message.model_dump(exclude_none=True), result]
    final = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=20)
    assert (final.choices[0].finish_reason, final.choices[0].message.content) == ("stop", "It is cold.")
    assert final.choices[0].message.tool_calls is None
    assert final.usage is not None
    assert final.usage.prompt_tokens_details is not None
    assert (final.usage.prompt_tokens_details.cached_tokens or 0) > 20


def test_calls_are_streamed(client: openai.OpenAI, says: list[str]) -> None:
    says += ["Well. ", CALL, "\n", CALL]
    stream = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, max_tokens=20, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    assert choices[-1].finish_reason == "tool_calls"
    assert "".join(choice.delta.content or "" for choice in choices).strip() == "Well."
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert {call.function.name for call in calls if call.function is not None} == {"weather"}


@pytest.mark.parametrize("streamed", [False, True])
def test_without_parallel_calls_an_answer_has_the_first_only(
    client: openai.OpenAI, says: list[str], streamed: bool
) -> None:
    for parallel, count in ((False, 1), (True, 2), (openai.omit, 2)):
        says += [CALL, "\n", CALL.replace("Oslo", "Rome")]
        ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": TOOLS, "max_tokens": 20}
        if streamed:
            stream = client.chat.completions.create(**ask, parallel_tool_calls=parallel, stream=True)
            calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
        else:
            reply = client.chat.completions.create(**ask, parallel_tool_calls=parallel)
            calls = reply.choices[0].message.tool_calls
            assert reply.choices[0].finish_reason == "tool_calls"
        assert len(calls) == count
        assert "Oslo" in calls[0].function.arguments


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_a_further_call_ends_the_answer(
    tools_server: Running, says: list[str], stream: bool
) -> None:
    says += [CALL, "\n", CALL, *["and on "] * 400]
    reply = tools_server.post(messages=ASK, tools=TOOLS, parallel_tool_calls=False, max_tokens=300, stream=stream)
    chosen = [chunk["choices"][0] for chunk in events(reply)] if stream else reply.json()["choices"]
    assert chosen[-1]["finish_reason"] == "tool_calls"
    assert "and on" not in reply.text


def test_a_call_that_is_not_allowed_stays_text(client: openai.OpenAI, says: list[str]) -> None:
    says += [CALL]
    reply = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, tool_choice="none", max_tokens=20)
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].message.content == CALL


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("tools", [{"type": "function"}], None),
        ("tools", [TOOLS[0], TOOLS[0]], None),
        ("tool_choice", "weather", None),
        ("tool_choice", {"type": "function", "function": {"name": "clock"}}, None),
        ("tool_choice", {"type": "allowed_tools"}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_tools_and_choices_are_refused(
    tools_server: Running, field: str, value: Any, code: str | None, stream: bool
) -> None:
    response = tools_server.post(messages=ASK, **{"tools": TOOLS, "stream": stream, field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (field, code, "invalid_request_error")
    assert error["message"]


def test_tools_that_are_not_functions_are_left_out_with_a_warning(tools_server: Running, says: list[str]) -> None:
    says += ["It is ", "cold."]
    custom = {"type": "custom", "custom": {"name": "sql"}}
    reply = tools_server.post(messages=ASK, tools=[*TOOLS, custom, {"type": "web_search"}], max_tokens=20).json()
    assert reply["choices"][0]["message"]["content"] == "It is cold."
    assert reply["edgespec"]["warnings"] == [
        "tools of the type custom, web_search are left out: only functions are called"
    ]


def test_allowed_tools_are_the_only_ones_that_are_called(client: openai.OpenAI) -> None:
    both: Any = [tool(parameters=PLACE), tool("clock", parameters=PLACE)]
    allowed: Any = {"mode": "required", "tools": [NAMED]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    (found,) = client.chat.completions.create(model="tiny", messages=ASK, tools=both, tool_choice=choice).choices
    assert [call.function.name for call in found.message.tool_calls or [] if call.type == "function"] == ["weather"]
    choice["allowed_tools"] = {"tools": [NAMED]}
    request = read_chat({"messages": ASK, "tools": both, "tool_choice": choice})
    assert (request.tools, request.tool_choice) == ((both[0],), "auto")


PLACE = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_one_that_the_model_writes(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": [tool(parameters=PLACE)], "tool_choice": choice}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
        calls: Any = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        reason = chunks[-1].finish_reason
    else:
        (choice_,) = client.chat.completions.create(**ask).choices
        calls, reason = choice_.message.tool_calls, choice_.finish_reason
        assert choice_.message.content is None
    (call,) = calls
    assert (call.function.name, reason) == ("weather", "tool_calls")
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_a_schema_of_a_tool_that_cannot_be_kept_is_refused_or_a_warning(tools_server: Running) -> None:
    loose = {**PLACE, "not": {"required": ["zip"]}}
    strict = tools_server.post(messages=ASK, tools=[tool(parameters=loose, strict=True)], tool_choice="required")
    assert strict.status_code == 400
    assert strict.json()["error"]["param"] == "tools"
    reply = tools_server.post(messages=ASK, tools=[tool(parameters=loose)], tool_choice="required").json()
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert "not" in reply["edgespec"]["warnings"][0]


def test_a_form_that_excludes_calls_is_refused_with_tools_by_its_field(tools_server: Running) -> None:
    error = tools_server.post(messages=ASK, tools=TOOLS, guided_regex="a").json()["error"]
    assert error["param"] == "guided_regex"
    error = tools_server.post(messages=ASK, tools=TOOLS, guided_regex="a", tool_choice="required").json()["error"]
    assert error["param"] == "tool_choice"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_schema_of_the_answer_does_not_count_where_a_call_is_required(tools_server: Running, choice: Any) -> None:
    kept = {"type": "json_schema", "json_schema": {"schema": {"enum": [7]}, "strict": True}}
    ask = {"messages": ASK, "tools": [tool(parameters=PLACE)], "tool_choice": choice}
    (reply,) = tools_server.post(**ask, response_format=kept).json()["choices"]
    assert reply["finish_reason"] == "tool_calls"


def test_a_model_whose_template_has_no_tools_says_so(server: Running) -> None:
    response = server.post(messages=ASK, tools=TOOLS)
    assert response.status_code == 400
    assert "tools" in response.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ['{"city": "\ud83d"}', r'{"city": "\ud83d"}'])
def test_a_past_call_and_its_result_may_have_half_of_an_emoji(
    tools_server: Running, says: list[str], arguments: str
) -> None:
    says += ["It is ", "cold."]
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    past = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "log \ud83d"}
    body = json.dumps({"messages": [*ASK, past, result], "tools": TOOLS, "max_tokens": 20})
    with tools_server.client() as own:
        reply = own.post("/v1/chat/completions", content=body)
    assert reply.json()["choices"][0]["message"]["content"] == "It is cold."


CALLED: Any = {"id": "call_1|fc_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
FOUND: Any = {"role": "tool", "tool_call_id": "call_1|fc_1", "content": "3 degrees"}


@pytest.mark.parametrize(
    "replayed",
    [
        [{"role": "assistant", "content": "Let me look."}, {"role": "assistant", "tool_calls": [CALLED]}, FOUND],
        [
            {"role": "assistant", "content": None, "tool_calls": [{**CALLED, "id": "x" * 200}]},
            {"role": "assistant", "content": "It failed.", "reasoning": "It failed, so I say it."},
            {"role": "user", "content": "Again"},
        ],
        [{"role": "assistant", "tool_calls": [CALLED], "reasoning_content": "I must look."}, FOUND, FOUND],
        [FOUND, {"role": "user", "content": [{"type": "text", "text": "And now?"}]}],
        [{"role": "assistant", "content": ""}, {"role": "developer", "content": ""}, {"role": "user", "content": ""}],
    ],
)
def test_what_agents_replay_is_answered(tools_server: Running, says: list[str], replayed: list[Any]) -> None:
    says += ["It is ", "cold."]
    response = tools_server.post(messages=[*ASK, *replayed], tools=TOOLS, max_tokens=20)
    assert response.json()["choices"][0]["message"]["content"] == "It is cold."
