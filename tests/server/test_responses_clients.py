"""The openai package's responses against a real server: whole, streamed, parsed, with tools. Calls are scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from edgespec.engine.engine import Engine
from tests.engine.answers import plain_text
from tests.engine.test_tools import TEMPLATE
from tests.support.http_server import Running, running
from tests.support.tiny_models import TinyModels

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": PLACE, "strict": True}


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tools_server(tiny: TinyModels) -> Iterator[Running]:
    with running(lambda: tiny.load(tiny.with_template("tools", TEMPLATE), draft="none", depth=0)) as found:
        yield found


@pytest.fixture
def agent(tools_server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response_has_the_text_of_a_chat_under_any_models_name(client: openai.OpenAI, engine: Engine) -> None:
    expected = plain_text(engine, "hello", max_tokens=16)
    response = client.responses.create(model="gpt-17", input="hello", max_output_tokens=16, temperature=0)
    assert response.output_text == expected.text
    assert (response.status, response.model) == ("incomplete", "tiny")
    assert response.usage is not None
    assert response.usage.output_tokens == 16


def test_a_stream_of_the_openai_client_ends_with_the_whole_response(client: openai.OpenAI, engine: Engine) -> None:
    expected = plain_text(engine, "hello", max_tokens=16)
    with client.responses.stream(model="tiny", input="hello", max_output_tokens=16, temperature=0) as stream:
        kinds = [event.type for event in stream]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    events = list(
        client.responses.create(model="tiny", input="hello", max_output_tokens=16, temperature=0, stream=True)
    )
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_is_an_item_and_its_result_continues_the_conversation(
    agent: openai.OpenAI, says: list[str], streamed: bool
) -> None:
    def ask(items: list[Any]) -> Any:
        if not streamed:
            return agent.responses.create(model="tiny", input=items, tools=[WEATHER], max_output_tokens=20)
        with agent.responses.stream(model="tiny", input=items, tools=[WEATHER], max_output_tokens=20) as stream:
            return stream.get_final_response()

    says += ["Let me look. ", CALL[:20], CALL[20:]]
    items: list[Any] = [{"role": "user", "content": "what is the weather"}]
    first = ask(items)
    assert [item.type for item in first.output] == ["message", "function_call"]
    call = first.output[1]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    says += ["It is ", "cold."]
    items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "-3"})
    second = ask(items)
    assert (second.output_text, second.status) == ("It is cold.", "completed")
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 20


@pytest.mark.parametrize("streamed", [False, True])
def test_items_of_earlier_answers_may_be_named_by_their_ids(
    agent: openai.OpenAI, says: list[str], streamed: bool
) -> None:
    asked: Any = {"role": "user", "content": "what is the weather"}
    ask: Any = {"model": "tiny", "tools": [WEATHER], "max_output_tokens": 20}

    def items(**more: Any) -> list[Any]:
        says.extend(["Let me look. ", CALL[:20], CALL[20:]])
        if not streamed:
            return list(agent.responses.create(input=[asked], **ask, **more).output)
        with agent.responses.stream(input=[asked], **ask, **more) as stream:
            return list(stream.get_final_response().output)

    text, call = items()
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "-3"}
    sent = [each.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for each in (text, call)]
    named: Any = [{"type": "item_reference", "id": each.id} for each in (text, call)]
    whole = agent.responses.create(input=[asked, *sent, result], **ask, temperature=0)
    again = agent.responses.create(input=[asked, *named, result], **ask, temperature=0)
    assert again.output_text == whole.output_text
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1
    unkept: Any = [{"type": "item_reference", "id": each.id} for each in items(store=False)]
    with pytest.raises(openai.BadRequestError, match="send the item itself"):
        agent.responses.create(input=[asked, *unkept], **ask)


def test_a_function_of_a_namespace_is_called_by_both_names(agent: openai.OpenAI, says: list[str]) -> None:
    space: Any = {"type": "namespace", "name": "mcp__sky", "description": "The sky.", "tools": [WEATHER]}
    says += [CALL.replace("weather", "mcp__sky__weather")]
    response = agent.responses.create(model="tiny", input="hello", tools=[space], max_output_tokens=20)
    (item,) = response.output
    assert item.type == "function_call"
    assert (item.namespace, item.name) == ("mcp__sky", "weather")


def test_tools_that_are_left_out_are_warned_of(agent: openai.OpenAI) -> None:
    tools: Any = [WEATHER, {"type": "web_search"}]
    response = agent.responses.create(model="tiny", input="hello", tools=tools, max_output_tokens=2)
    assert response.model_extra is not None
    assert "web_search" in response.model_extra["edgespec"]["warnings"][0]


class Place(BaseModel):
    """A city that exists."""

    city: str
    large: bool


def test_an_answer_is_parsed_as_the_class_that_was_asked_for(client: openai.OpenAI) -> None:
    response = client.responses.parse(model="tiny", input="hello", text_format=Place, temperature=0)
    assert response.status in ("completed", "incomplete")
    if response.status == "completed":
        assert isinstance(response.output_parsed, Place)
    assert response.output_text.startswith('{"city": "')


def test_a_forced_call_has_the_functions_arguments(agent: openai.OpenAI) -> None:
    places = {**PLACE, "properties": {"city": {"enum": ["Oslo", "Rome"]}}}
    tool: Any = {**WEATHER, "parameters": places}
    response = agent.responses.create(model="tiny", input="hello", tools=[tool], tool_choice="required")
    (item,) = response.output
    assert item.type == "function_call"
    assert json.loads(item.arguments)["city"] in ("Oslo", "Rome")


def test_errors_are_those_of_the_openai_client(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as stored:
        client.responses.create(model="tiny", input="hello", previous_response_id="resp_1")
    assert (stored.value.param, stored.value.code) == ("previous_response_id", "previous_response_not_found")
    assert "none is kept" in stored.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.responses.create(model="tiny", input="word " * 5000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
    stream = client.responses.create(model="tiny", input="word " * 5000, stream=True)
    with pytest.raises(openai.APIError, match="context_length_exceeded") as inside:
        list(stream)
    assert (inside.value.code, inside.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError) as tools:
        client.responses.create(model="tiny", input="hello", tools=[WEATHER])
    assert "tools" in tools.value.message


def test_a_closed_stream_ends_its_answer_whose_item_is_kept(server: Running, client: openai.OpenAI) -> None:
    before = len(server.lines)
    stream = client.responses.create(model="tiny", input="hello", stream=True, max_output_tokens=2000)
    item = next(event.item for event in stream if event.type == "response.output_item.added")
    stream.close()
    server.wait_until(lambda: server.service.queue.running == 0 and len(server.lines) > before)
    named: Any = [{"type": "item_reference", "id": item.id}, {"role": "user", "content": "hello"}]
    assert client.responses.create(model="tiny", input=named, max_output_tokens=2).error is None
