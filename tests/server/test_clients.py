"""Clients of OpenAI's interface do their work: the openai package, and curl as a process."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator

import openai
import pytest

from edgespec.engine.engine import Engine
from tests.engine.answers import plain_text
from tests.support.http_server import Running
from tests.support.pages import fenced

PAGE = "docs/guide/serve.md"


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_client_chats_and_streams(client: openai.OpenAI, engine: Engine) -> None:
    expected = plain_text(engine, "hello", max_tokens=16)
    whole = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_completion_tokens=16, temperature=0
    )
    assert whole.choices[0].message.content == expected.text
    assert whole.usage is not None
    details = whole.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == expected.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16


def test_the_openai_client_gets_log_probabilities_completions_and_models(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
        n=2,
        seed=1,
    )
    assert len(reply.choices) == 2
    logprobs = reply.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(each.top_logprobs) for each in logprobs.content] == [2] * 4
    assert client.completions.create(model="tiny", prompt="Once upon", max_tokens=4).choices[0].text
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-17", messages=[{"role": "user", "content": "hello"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], temperature=-3)
    assert "temperature" in wrong.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 5000}])
    assert long.value.code == "context_length_exceeded"


def test_a_closed_stream_of_the_openai_client_ends_its_answer(server: Running, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True, max_tokens=2000
    )
    next(iter(stream))
    stream.close()
    server.wait_until(lambda: server.service.queue.running == 0)


def test_the_asynchronous_openai_client_asks_several_questions_at_the_same_time(
    server: Running, engine: Engine
) -> None:
    async def run() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            replies = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="tiny", messages=[{"role": "user", "content": text}], max_tokens=8, temperature=0
                    )
                    for text in ("one", "two", "three")
                )
            )
        return [reply.choices[0].message.content for reply in replies]

    assert asyncio.run(run()) == [plain_text(engine, text, max_tokens=8).text for text in ("one", "two", "three")]


def test_the_command_of_the_guide_gets_an_answer_from_curl(server: Running) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (command,) = [block.strip() for block in fenced(PAGE, "sh") if block.startswith("curl")]
    command = command.replace("http://127.0.0.1:8471", server.url)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert '"choices":' in done.stdout
    assert '"finish_reason":"length"' in done.stdout
