"""Tools with the default pair: a weather tool is called, and its result is read from the cached conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec import Done, Engine, Session, Text, ToolCall

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = [{"role": "user", "content": "What is the weather in Paris right now?"}]


def answered(session: Session, messages: list[dict[str, Any]], **more: Any) -> tuple[str, list[ToolCall], Done]:
    events = list(session.generate(messages=messages, tools=[WEATHER], max_tokens=60, **more))
    done = events[-1]
    assert isinstance(done, Done)
    calls = [event for event in events if isinstance(event, ToolCall)]
    return "".join(event.text for event in events if isinstance(event, Text)), calls, done


def test_the_default_model_calls_a_weather_tool(pair: Engine) -> None:
    with pair.session() as session:
        text, calls, done = answered(session, ASKED)
        assert text == ""
        assert [call.name for call in calls] == ["get_weather"]
        assert json.loads(calls[0].arguments) == {"city": "Paris"}
        assert done.tool_calls == tuple(calls)
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": '{"celsius": 21, "sky": "clear"}'}
        _, _, told = answered(session, [*session.messages, result])
        assert told.stats.cached_tokens >= done.stats.prompt_tokens
    with pair.session() as plain:
        text, again, same = answered(plain, ASKED, depth=0)
        assert (text, same.token_ids) == ("", done.token_ids)
        assert [(call.name, call.arguments) for call in again] == [(call.name, call.arguments) for call in calls]
