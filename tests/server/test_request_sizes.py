"""Twice as large a request takes at most twice as many steps, in every field and header, until its answer begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.server.errors import ApiError
from edgespec.server.fields.table import fields_for
from edgespec.server.security import Access
from edgespec.text.conversation.tool_use import ToolUse
from edgespec.text.grammar.calls import call_form
from tests.support.api_fields import BODIES
from tests.support.call_samples import SAMPLES
from tests.support.counted_steps import counted_steps
from tests.support.request_sizes import READERS, TEXTS, prepare
from tests.support.tiny_models import TinyModels

# A fixed part makes the ratio smaller; at 2.6 the rest would be far above linear.
MOST_RATIO = 2.6
SIZE = 400

SHAPES: dict[str, Callable[[int], Any]] = {
    "text": lambda n: "ab " * n,
    "texts": lambda n: [f"text {number}" for number in range(n)],
    "a list of a text": lambda n: ["ab " * n],
    "numbers": lambda n: list(range(n)),
    "names": lambda n: {f"name{number}": number for number in range(n)},
    "an object of a text": lambda n: {"type": "ab " * n},
    "objects": lambda n: [{"type": "function", "function": {"name": f"f{number}"}} for number in range(n)],
    "properties": lambda n: [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {f"p{i}": {} for i in range(n)}}}}
    ],
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(number: int) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


CONVERSATIONS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "turns": lambda n: [*([user("x"), {"role": "assistant", "content": "y"}] * n), user("z")],
    "messages of one role": lambda n: [user("x")] * n,
    "system messages": lambda n: [*([{"role": "system", "content": "x"}] * n), user("z")],
    "parts": lambda n: [user([{"type": "text", "text": "x"}] * n)],
    "calls": lambda n: [
        user("x"),
        *({"role": "assistant", "content": None, "tool_calls": [call(number)]} for number in range(n)),
        *({"role": "tool", "tool_call_id": f"call_{number}", "content": "y"} for number in range(n)),
        user("z"),
    ],
    "arguments": lambda n: [
        user("x"),
        {
            "role": "assistant",
            "tool_calls": [
                {
                    **call(0),
                    "function": {"name": "f", "arguments": json.dumps({f"a{each}": each for each in range(n)})},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "y"},
    ],
    "thinking": lambda n: [
        user("x"),
        {"role": "assistant", "content": "y", "reasoning_content": "z " * n},
        user("z"),
    ],
}


@pytest.fixture(scope="module")
def opened(tiny: TinyModels) -> Iterator[tuple[Engine, Session]]:
    """A session of a model with a context in which everything here fits or is refused."""
    with tiny.load(draft="none", lookup=False, context=2048) as engine, engine.session() as session:
        yield engine, session


def check_ratio(
    opened: tuple[Engine, Session], api: str, body: Callable[[int], dict[str, Any]], size: int = SIZE
) -> None:
    """Compare the steps of two requests, one of them twice as large, read as the server does."""
    engine, session = opened

    def steps(size: int) -> float:
        raw = json.dumps({**BODIES[api], "max_tokens": 1, **body(size)}).encode()
        return counted_steps(lambda budget: prepare(engine, session, api, raw, budget))

    steps(2)  # what is done once for a model
    assert steps(2 * size) < MOST_RATIO * steps(size)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("api", READERS)
def test_every_field_is_read_in_proportion_to_its_size(opened: tuple[Engine, Session], api: str, shape: str) -> None:
    def body(names: list[str], value: Any) -> dict[str, Any]:
        for name in reversed(names):
            value = {name: value}
        return dict(value)

    for name in [*(field.name for field in fields_for(api)), "unknown"]:
        own = partial(body, name.split("."))
        check_ratio(opened, api, lambda size, own=own: own(SHAPES[shape](size)), SIZE // 2)  # type: ignore[misc]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_in_proportion_to_its_length(opened: tuple[Engine, Session], text: str) -> None:
    said = {"role": "assistant", "content": "y"}
    check_ratio(opened, "chat", lambda size: {"messages": [user(TEXTS[text] * size)]})
    check_ratio(
        opened, "chat", lambda size: {"messages": [user("x"), {**said, "content": TEXTS[text] * size}, user("z")]}
    )
    check_ratio(opened, "completion", lambda size: {"prompt": TEXTS[text] * size})


@pytest.mark.parametrize("shape", CONVERSATIONS)
def test_a_conversation_is_read_in_proportion_to_its_length(opened: tuple[Engine, Session], shape: str) -> None:
    check_ratio(opened, "chat", lambda size: {"messages": CONVERSATIONS[shape](size // 4)})


def use(number: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"call_{number}", "name": "f", "input": {"a": 1}}


def results(count: int) -> list[dict[str, Any]]:
    return [{"type": "tool_result", "tool_use_id": f"call_{number}", "content": "y"} for number in range(count)]


BLOCKS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "texts": lambda n: [user([{"type": "text", "text": "x"}] * n)],
    "calls": lambda n: [user("x"), {"role": "assistant", "content": list(map(use, range(n)))}, user(results(n))],
    "calls between texts": lambda n: [
        user("x"),
        {"role": "assistant", "content": [{"type": "text", "text": "x"}, use(0)] * n},
        user(results(1)),
    ],
    "thinking": lambda n: [
        user("x"),
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "y"}] * n},
        user("z"),
    ],
}


@pytest.mark.parametrize("shape", BLOCKS)
def test_blocks_are_read_in_proportion_to_their_number(opened: tuple[Engine, Session], shape: str) -> None:
    check_ratio(opened, "messages", lambda size: {"messages": BLOCKS[shape](size // 4)})


def properties(size: int) -> dict[str, Any]:
    names = [f"p{number}" for number in range(size)]
    return {"type": "object", "properties": {name: {"enum": ["a", 1]} for name in names}, "required": names}


FORMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "properties": lambda n: {"json_schema": properties(n)},
    "schemas within schemas": lambda n: {
        "json_schema": {"anyOf": [{"items": {"enum": [each]}} for each in range(n)]}
    },
    "choices": lambda n: {"guided_choice": [f"choice {number}" for number in range(n)]},
    "a grammar": lambda n: {"grammar": "root ::= " + " | ".join(f'"{number}"' for number in range(n))},
    "a regular expression": lambda n: {"guided_regex": "ab?" * n},
}


@pytest.mark.parametrize("shape", FORMS)
@pytest.mark.parametrize("api", ["chat", "completion"])
def test_a_form_is_read_in_proportion_to_its_size(opened: tuple[Engine, Session], api: str, shape: str) -> None:
    check_ratio(opened, api, FORMS[shape])


@pytest.mark.parametrize("name", ["hermes", "qwen xml"])
def test_the_form_of_calls_is_made_in_proportion_to_the_size_of_the_tools(name: str) -> None:
    def steps(size: int) -> float:
        tool = {"type": "function", "function": {"name": "f", "parameters": properties(size)}}
        use = ToolUse(tools=(tool,), format=SAMPLES[name][0], marks={}, ids="")
        return counted_steps(lambda _budget: call_form(use, ["f"], several=False))

    assert steps(2 * SIZE) < MOST_RATIO * steps(SIZE)


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "host", "origin"])
@pytest.mark.parametrize("text", ["a", "Bearer ", ":", "[", ".", "http://"])
def test_headers_are_read_in_proportion_to_their_length(header: str, text: str) -> None:
    access = Access(keys=("secret",), origins=("http://localhost:3000",))

    def read(value: str) -> None:
        values = {"host": "localhost", "origin": "http://localhost:3000", header: value}
        try:
            access.check_browser([values["host"]], [values["origin"]])
            access.owner(values)
        except ApiError:
            pass

    def steps(size: int) -> float:
        return counted_steps(lambda _budget: read(text * size))

    assert steps(2 * SIZE) < MOST_RATIO * steps(SIZE)
