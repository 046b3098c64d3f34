"""Clients of all APIs at the same time: each gets the text that it gets alone, whatever the others ask."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from edgespec.engine.engine import Engine
from tests.engine.answers import plain_text
from tests.support.http_server import Running

TOKENS = 24
PROMPTS = ("hello", "once upon a time", "the sea", "a list of words")


def user(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def chat(prompt: str) -> dict[str, Any]:
    return {"messages": user(prompt), "max_tokens": TOKENS, "temperature": 0}


def responses(prompt: str) -> dict[str, Any]:
    return {"model": "tiny", "input": prompt, "max_output_tokens": TOKENS, "temperature": 0}


def messages(prompt: str) -> dict[str, Any]:
    return {"model": "any", **chat(prompt)}


def ollama(prompt: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": user(prompt), "options": {"num_predict": TOKENS, "temperature": 0}}


def text_of_responses(reply: dict[str, Any]) -> str:
    return "".join(part["text"] for item in reply["output"] for part in item.get("content", ()))


FACES: Mapping[str, tuple[Callable[[str], dict[str, Any]], Callable[[dict[str, Any]], str]]] = {
    "/v1/chat/completions": (chat, lambda reply: reply["choices"][0]["message"]["content"]),
    "/v1/responses": (responses, text_of_responses),
    "/v1/messages": (messages, lambda reply: "".join(block["text"] for block in reply["content"])),
    "/api/chat": (ollama, lambda reply: reply["message"]["content"]),
    "/api/generate": (lambda prompt: {**ollama(prompt), "prompt": prompt}, lambda reply: reply["response"]),
}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream, as events or as lines."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


def streamed_text(path: str, found: list[dict[str, Any]]) -> str:
    if path == "/v1/chat/completions":
        return "".join(each["choices"][0]["delta"].get("content", "") for each in found if each["choices"])
    if path == "/v1/responses":
        return "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta")
    if path == "/v1/messages":
        return "".join(each["delta"].get("text", "") for each in found if each["type"] == "content_block_delta")
    return "".join(each["message"]["content"] if "message" in each else each["response"] for each in found)


def ask(server: Running, path: str, prompt: str, stream: bool) -> str:
    """The text of one answer, whole or streamed."""
    body, text = FACES[path]
    response = server.post(path, **body(prompt), stream=stream)
    assert response.status_code == 200, response.text
    return streamed_text(path, events(response)) if stream else text(response.json())


@pytest.mark.parametrize("path", FACES)
@pytest.mark.parametrize("stream", [False, True])
def test_every_api_gives_the_text_of_a_session(server: Running, engine: Engine, path: str, stream: bool) -> None:
    assert ask(server, path, "hello", stream) == plain_text(engine, "hello", max_tokens=TOKENS).text


@pytest.mark.parametrize("clients", [2, 4, 8])
def test_clients_of_all_apis_get_the_texts_that_they_get_alone(server: Running, engine: Engine, clients: int) -> None:
    expected = {prompt: plain_text(engine, prompt, max_tokens=TOKENS).text for prompt in PROMPTS}
    asked = [(path, prompt, stream) for prompt in PROMPTS for path in FACES for stream in (False, True)]
    begin = threading.Barrier(clients)

    def answers(client: int) -> list[tuple[str, str]]:
        begin.wait(10)
        own = asked[client::clients]
        return [(prompt, ask(server, path, prompt, stream)) for path, prompt, stream in own]

    with ThreadPoolExecutor(clients) as threads:
        found = [answer for own in threads.map(answers, range(clients)) for answer in own]
    assert len(found) == len(asked) == 40
    assert [answer for answer in found if answer != (answer[0], expected[answer[0]])] == []
