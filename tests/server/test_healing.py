"""Completions of prompts that end inside a token, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from tests.server.test_http import events, failed
from tests.support.http_server import Running, running
from tests.support.tiny_models import TinyModels, answer

PROMPT = "one two three\nthe peop"
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server(tiny: TinyModels) -> Iterator[Running]:
    with running(lambda: tiny.load(tiny.filling, draft="none", depth=3, lookup=True)) as found:
        found.wait_until(lambda: found.service.keeper.state == "ready")
        yield found


def continued(engine: Engine, prompt: str, *, heal: bool) -> str:
    with engine.session() as session:
        return answer(session.generate(prompt, raw=True, heal=heal, max_tokens=12, depth=0)).text


def completion(server: Running, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", **{**BODY, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_a_completion_is_healed_unless_the_request_says_no(server: Running, engine: Engine) -> None:
    healed, plain = (continued(engine, PROMPT, heal=heal) for heal in (True, False))
    assert healed != plain
    assert completion(server)["choices"][0]["text"] == healed
    assert completion(server, edgespec={"heal": True})["choices"][0]["text"] == healed
    assert completion(server, edgespec={"heal": False})["choices"][0]["text"] == plain
    failed(server.post("/v1/completions", **BODY, edgespec={"heal": "yes"}), 400)


def test_the_prompt_is_neither_sent_again_nor_counted_as_the_answers(server: Running, engine: Engine) -> None:
    whole = completion(server)
    text = whole["choices"][0]["text"]
    assert completion(server, echo=True)["choices"][0]["text"] == PROMPT + text
    for echo, start in ((False, ""), (True, PROMPT)):
        streamed = events(server.post("/v1/completions", stream=True, echo=echo, **BODY))
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == start + text
    assert whole["usage"]["prompt_tokens"] == len(engine.tokenizer.encode(PROMPT, add_bos=True))
    assert whole["usage"]["completion_tokens"] == 12


def test_log_probabilities_have_the_text_alone(server: Running) -> None:
    choice = completion(server, logprobs=2)["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"] == completion(server)["choices"][0]["text"]
    for at, token in zip(found["text_offset"], found["tokens"], strict=True):
        assert choice["text"][at:].startswith(token)


def test_a_seed_gives_the_same_text_again(server: Running) -> None:
    drawn = {"temperature": 1.0, "seed": 5}
    first = completion(server, **drawn)["choices"][0]["text"]
    assert completion(server, **drawn)["choices"][0]["text"] == first
    assert completion(server, **{**drawn, "seed": 6})["choices"][0]["text"] != first


def test_ollamas_raw_text_is_healed_as_well(server: Running, engine: Engine) -> None:
    body = {"prompt": PROMPT, "raw": True, "stream": False, "options": {"temperature": 0, "num_predict": 12}}
    for own, heal in (({}, True), ({"edgespec": {"heal": False}}, False)):
        reply = server.post("/api/generate", model="tiny", **body, **own).json()
        assert reply["response"] == continued(engine, PROMPT, heal=heal)
