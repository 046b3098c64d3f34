"""Clients of all APIs at the same time: each gets the text that it gets alone, whatever the others ask."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from edgespec.engine.engine import Engine
from tests.engine.answers import plain_text
from tests.support.faces import ANSWERS
from tests.support.http_server import Running

TOKENS = 24
PROMPTS = ("hello", "once upon a time", "the sea", "a list of words")


def ask(server: Running, path: str, prompt: str, stream: bool) -> str:
    """The text of one answer, whole or streamed."""
    way = ANSWERS[path]
    response = server.post(path, **way.body(prompt, TOKENS), stream=stream)
    assert response.status_code == 200, response.text
    text, _ = way.streamed(response.text.split("\n")) if stream else way.whole(response.json())
    return text


@pytest.mark.parametrize("path", ANSWERS)
@pytest.mark.parametrize("stream", [False, True])
def test_every_api_gives_the_text_of_a_session(server: Running, engine: Engine, path: str, stream: bool) -> None:
    assert ask(server, path, "hello", stream) == plain_text(engine, "hello", max_tokens=TOKENS).text


@pytest.mark.parametrize("clients", [2, 4, 8])
def test_clients_of_all_apis_get_the_texts_that_they_get_alone(server: Running, engine: Engine, clients: int) -> None:
    expected = {prompt: plain_text(engine, prompt, max_tokens=TOKENS).text for prompt in PROMPTS}
    asked = [(path, prompt, stream) for prompt in PROMPTS for path in ANSWERS for stream in (False, True)]
    begin = threading.Barrier(clients)

    def answers(client: int) -> list[tuple[str, str]]:
        begin.wait(60)
        own = asked[client::clients]
        return [(prompt, ask(server, path, prompt, stream)) for path, prompt, stream in own]

    with ThreadPoolExecutor(clients) as threads:
        found = [answer for own in threads.map(answers, range(clients)) for answer in own]
    assert len(found) == len(asked) == 40
    assert [answer for answer in found if answer != (answer[0], expected[answer[0]])] == []
