"""Anthropic's messages over HTTP: the anthropic package's client, errors, keys, and what a prompt's tokens are.

The model's own calls are scripted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from edgespec.server.security import Access
from tests.engine.answers import plain_text
from tests.engine.test_tools import TEMPLATE
from tests.support.agent_requests import claude_code, with_result
from tests.support.http_server import Running, running
from tests.support.tiny_models import TinyModels

ASK: Any = [{"role": "user", "content": "what is the weather"}]
TOOLS: Any = [
    {
        "name": "weather",
        "description": "tells the weather",
        "input_schema": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tools_server(tiny: TinyModels) -> Iterator[Running]:
    with running(lambda: tiny.load(tiny.with_template("tools", TEMPLATE), draft="none", depth=0)) as found:
        yield found


@pytest.fixture
def client(tools_server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tools_server.url, auth_token="none", max_retries=0) as client:
        yield client


def test_the_anthropic_client_gets_and_streams_the_text_of_plain_decoding(server: Running) -> None:
    engine = server.service.keeper.engine
    assert engine is not None
    expected = plain_text(engine, "hello", max_tokens=16)
    ask: Any = {"model": "claude-x", "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}]}
    greedy = {"extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        reply = client.messages.create(**ask, **greedy)
        (block,) = reply.content
        assert block.type == "text"
        assert (block.text, reply.stop_reason, reply.usage.output_tokens) == (expected.text, "max_tokens", 16)
        with client.messages.stream(**ask, **greedy) as stream:
            assert "".join(stream.text_stream) == expected.text
            final = stream.get_final_message()
    assert ([each.type for each in final.content], final.stop_reason) == (["text"], "max_tokens")
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == expected.stats.prompt_tokens


def test_a_call_its_result_and_the_answer_are_a_conversation(client: anthropic.Anthropic, says: list[str]) -> None:
    says += ["Let me look. ", CALL[:20], CALL[20:]]
    ask: Any = {"model": "x", "max_tokens": 20, "tools": TOOLS}
    reply = client.messages.create(**ask, messages=ASK)
    text, use = reply.content
    assert reply.stop_reason == "tool_use"
    assert (text.type, use.type) == ("text", "tool_use")
    assert use.type == "tool_use"
    assert (use.name, use.input) == ("weather", {"city": "Oslo"})
    says += ["It is ", "cold."]
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "-3", "is_error": False}
    messages: Any = [*ASK, reply.to_param(), {"role": "user", "content": [result]}]
    with client.messages.stream(**ask, messages=messages) as stream:
        final = stream.get_final_message()
    (answer,) = final.content
    assert answer.type == "text"
    assert (answer.text, final.stop_reason) == ("It is cold.", "end_turn")
    assert (final.usage.cache_read_input_tokens or 0) > 20


def test_streamed_calls_are_whole(client: anthropic.Anthropic, says: list[str]) -> None:
    says += ["Well. ", CALL, "\n", CALL]
    with client.messages.stream(model="x", max_tokens=20, tools=TOOLS, messages=ASK) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "Oslo"}] * 2


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_forced_call_is_one_that_the_model_writes(client: anthropic.Anthropic, choice: Any) -> None:
    reply = client.messages.create(model="x", max_tokens=200, tools=TOOLS, tool_choice=choice, messages=ASK)
    (use,) = reply.content
    assert use.type == "tool_use"
    assert (use.name, use.input["city"] in ("Oslo", "Rome"), reply.stop_reason) == ("weather", True, "tool_use")


def test_a_prompt_is_read_for_later_requests(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(model="x", max_tokens=0, messages=[{"role": "user", "content": "for later"}])
    assert (reply.content, reply.stop_reason, reply.usage.output_tokens) == ([], "max_tokens", 0)


def test_a_stop_text_is_named(client: anthropic.Anthropic, server: Running) -> None:
    whole = server.chat("hello", max_tokens=16, temperature=0).json()["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 :][:3]
    body = {"max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": "hello"}]}
    reply = server.post("/v1/messages", stop_sequences=["never", stop], **body).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", stop)
    assert reply["content"][0]["text"] == whole.partition(stop)[0]


def test_tokens_are_counted_as_the_prompt_has_them(client: anthropic.Anthropic, tools_server: Running) -> None:
    fields: Any = {"tools": TOOLS, "system": "be kind", "messages": ASK}
    counted = client.messages.count_tokens(model="x", **fields).input_tokens
    usage = client.messages.create(model="x", max_tokens=1, **fields).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert client.messages.count_tokens(model="x", messages=ASK).input_tokens < counted
    long: Any = [{"role": "user", "content": "word " * 9000}]
    assert client.messages.count_tokens(model="x", messages=long).input_tokens > 9000
    failed = tools_server.post("/v1/messages/count_tokens", messages=[])
    assert (failed.status_code, failed.json()["error"]["type"]) == (400, "invalid_request_error")


def test_an_agents_first_request_and_its_tool_turn_are_answered(tools_server: Running, says: list[str]) -> None:
    body = claude_code("What is in notes.txt?", share=0.04)
    say = '<tool_call>\n{"name": "Read", "arguments": {"file_path": "notes.txt"}}\n</tool_call>'
    says.append(say)
    first = events(tools_server.post("/v1/messages?beta=true", **body).text)
    started = [each["content_block"] for each in first if each["type"] == "content_block_start"]
    assert [block["name"] for block in started] == ["Read"]
    call = {**started[0], "input": {"file_path": "notes.txt"}}
    says.append("Nothing is in it.")
    second = events(tools_server.post("/v1/messages?beta=true", **with_result(body, call, "nothing")).text)
    (said,) = (each["delta"]["text"] for each in second if each["type"] == "content_block_delta")
    assert said == "Nothing is in it."
    before, after = (each[-2]["usage"] for each in (first, second))
    assert after["cache_read_input_tokens"] >= before["input_tokens"] - 1


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def test_very_large_requests_are_answered_or_refused_in_a_sentence(tools_server: Running) -> None:
    turns = [{"role": role, "content": [{"type": "text", "text": "x"}]} for role in ("user", "assistant")] * 500
    many = tools_server.post("/v1/messages", max_tokens=1, messages=[*turns, *ASK])
    wide = [{**TOOLS[0], "name": f"tool{number}", "description": "word " * 400} for number in range(100)]
    for response in (many, tools_server.post("/v1/messages", max_tokens=1, messages=ASK, tools=wide)):
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("prompt is too long: ")
    broken = tools_server.post("/v1/messages", max_tokens=1, messages=[{"role": "user", "content": [[]]}])
    assert broken.json()["error"]["message"] == "a block of messages[0] must be an object with a type"


def test_errors_have_anthropics_shape_and_classes(client: anthropic.Anthropic, tools_server: Running) -> None:
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match="'image'"):
        client.messages.create(model="x", max_tokens=1, messages=image)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="x", max_tokens=1, messages=[{"role": "user", "content": "word " * 5000}])
    for path, status, kind in (
        ("/v1/messages", 405, "invalid_request_error"),
        ("/v1/messages/batches", 404, "not_found_error"),
    ):
        with tools_server.client() as plain:
            response = plain.get(path)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    huge = tools_server.post("/v1/messages", messages=[{"role": "user", "content": "x" * 600_000}])
    assert (huge.status_code, huge.json()["error"]["type"]) == (413, "request_too_large")


def test_the_anthropic_client_lists_the_models_and_the_server_is_alive(
    client: anthropic.Anthropic, tools_server: Running
) -> None:
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == ("tiny", "tiny", "model")
    assert model.created_at.year >= 2026
    assert client.models.retrieve("tiny").id == "tiny"
    with tools_server.client() as plain:
        assert plain.head("/").status_code == 200


def test_a_key_may_be_a_bearers_or_x_api_key(tiny: TinyModels) -> None:
    with running(lambda: tiny.load(draft="none", depth=0), access=Access(keys=("secret-key",))) as server:
        ask: Any = {"model": "x", "max_tokens": 1, "messages": ASK}
        for key in ({"api_key": "secret-key"}, {"auth_token": "secret-key"}):
            with anthropic.Anthropic(base_url=server.url, max_retries=0, **key) as client:
                assert client.messages.create(**ask).usage.output_tokens == 1
                assert client.messages.count_tokens(model="x", messages=ASK).input_tokens > 0
        with anthropic.Anthropic(base_url=server.url, max_retries=0, api_key="wrong-key") as client:
            with pytest.raises(anthropic.AuthenticationError, match="the API key is wrong"):
                client.messages.create(**ask)
            with pytest.raises(anthropic.AuthenticationError, match="the API key is wrong"):
                client.messages.count_tokens(model="x", messages=ASK)


def test_a_long_prompt_is_read_between_pings(slow: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.server.streaming.KEEP_ALIVE_S", 0.1)
    long = [{"role": "user", "content": "word " * 2000}]
    reply = slow.post("/v1/messages", messages=long, max_tokens=1, stream=True)
    found = [each["type"] for each in events(reply.text)]
    start = found.index("message_start")
    assert set(found[:start]) <= {"ping"}
    assert "ping" in found[start:]
    assert found[-1] == "message_stop"
