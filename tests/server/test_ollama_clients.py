"""Ollama's own client does its work, and its API over HTTP: routes, errors, the model that comes and goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.pair.load import Limits
from edgespec.files.model_file import read_model_file
from edgespec.server import streaming
from edgespec.server.faces.ollama_about import API_VERSION
from edgespec.server.ollama_routes import NOT_SERVED
from edgespec.server.security import Access
from tests.engine.answers import plain_text
from tests.engine.test_thinking import BEGINS
from tests.engine.test_tools import TEMPLATE, tool
from tests.server.test_forms import LEVEL, is_level
from tests.server.test_several_models import GIB, serving
from tests.server.test_tools import CALL
from tests.support.http_server import HeldLoad, Running, running
from tests.support.tiny_models import TinyModels

HELLO = [{"role": "user", "content": "hello"}]
PLAIN = {"temperature": 0, "num_predict": 16, "num_ctx": 100_000}


@pytest.fixture
def client(server: Running) -> Iterator[ollama.Client]:
    with closing(ollama.Client(server.url)) as client:
        yield client


@pytest.fixture(scope="module")
def tools_server(tiny: TinyModels) -> Iterator[Running]:
    with running(lambda: tiny.load(tiny.with_template("tools", TEMPLATE), draft="none", depth=0)) as found:
        yield found


def failed(response: httpx.Response, status: int) -> str:
    """The error of a response, whose shape is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert isinstance(error, str)
    assert response.json() == {"error": error}
    return error


# ------------------------------------------------------------------------------------------------------ the client


def test_the_client_chats_and_streams_the_text_of_a_session(client: ollama.Client, engine: Engine) -> None:
    expected = plain_text(engine, "hello", max_tokens=16)
    whole = client.chat("tiny", HELLO, options=PLAIN)
    assert whole.message.content == expected.text
    assert (whole.model, whole.done, whole.done_reason) == ("tiny", True, "length")
    assert (whole.eval_count, whole.prompt_eval_count) == (16, expected.stats.prompt_tokens)
    assert whole.total_duration is not None
    assert whole.eval_duration is not None
    assert whole.total_duration >= whole.eval_duration > 0
    *parts, last = client.chat("tiny:latest", HELLO, options=PLAIN, stream=True)
    assert "".join(each.message.content or "" for each in parts) == expected.text
    assert not any(each.done for each in parts)
    assert (last.done, last.done_reason, last.message.content, last.eval_count) == (True, "length", "", 16)


def test_the_client_continues_a_prompt_and_raw_text(client: ollama.Client, engine: Engine) -> None:
    reply = client.generate("tiny", "hello", options=PLAIN)
    assert reply.response == plain_text(engine, "hello", max_tokens=16).text
    assert reply.done
    expected = plain_text(engine, "Once upon", max_tokens=16, raw=True).text
    parts = list(client.generate("tiny", "Once upon", raw=True, options=PLAIN, stream=True))
    assert "".join(each.response or "" for each in parts) == expected
    scored = client.generate("tiny", "hello", options=PLAIN, logprobs=True, top_logprobs=2)
    assert scored.logprobs is not None
    assert "".join(each.token for each in scored.logprobs) == reply.response
    assert {len(each.top_logprobs or ()) for each in scored.logprobs} == {2}


def test_the_client_lists_shows_and_sees_the_loaded_model(client: ollama.Client, engine: Engine) -> None:
    (listed,) = client.list().models
    assert listed.model == "tiny:latest"
    assert listed.size == engine.pair.target.header.tensor_bytes
    assert listed.digest == engine.pair.pool.target.identity
    assert listed.details is not None
    assert (listed.details.family, listed.details.quantization_level) == ("llama", "Q8_0")
    assert listed.modified_at is not None
    assert listed.modified_at.year > 2020
    shown = client.show(listed.model)
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == engine.plan.context_length
    assert shown.capabilities == ["completion"]
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.context_length) == ("tiny:latest", engine.plan.context_length)
    assert loaded.size is not None
    assert loaded.size > listed.size
    assert loaded.size_vram == 0


def test_the_client_raises_its_own_errors(client: ollama.Client) -> None:
    for ask in (
        lambda: client.chat("gpt-17", HELLO),
        lambda: client.show("gpt-17"),
        lambda: list(client.chat("gpt-17", HELLO, stream=True)),
    ):
        with pytest.raises(ollama.ResponseError, match="'gpt-17' is not served here") as missing:
            ask()
        assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="context_length_exceeded") as long:
        client.chat("tiny", [{"role": "user", "content": "word " * 5000}])
    assert long.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="an image") as image:
        client.chat("tiny", [{"role": "user", "content": "what is it", "images": [b"\x89PNG"]}])
    assert image.value.status_code == 400


def test_an_answer_has_the_form_that_the_client_asks_for(client: ollama.Client) -> None:
    for reply in (
        client.chat("tiny", HELLO, format=LEVEL, options={"temperature": 0, "num_predict": 60}).message.content,
        client.generate("tiny", "hello", format=LEVEL, options={"temperature": 0, "num_predict": 60}).response,
    ):
        assert is_level(reply or "")


def test_a_call_of_the_client_has_arguments_as_an_object_and_its_result_is_read(
    tools_server: Running, says: list[str]
) -> None:
    client, asked = ollama.Client(tools_server.url), {"role": "user", "content": "what is the weather"}
    assert client.show("tiny").capabilities == ["completion", "tools"]

    def weather(city: str) -> str:
        """The weather in a city."""
        raise AssertionError("a client describes the function, and does not call it")

    says += ["Let me look. ", CALL]
    reply = client.chat("tiny", [asked], tools=[weather], options={"num_predict": 20})
    assert (reply.message.content, reply.done_reason) == ("Let me look.", "stop")
    assert reply.message.tool_calls is not None
    (call,) = reply.message.tool_calls
    assert (call.function.name, dict(call.function.arguments)) == ("weather", {"city": "Oslo"})
    says += ["It is ", "cold."]
    messages = [asked, reply.message, {"role": "tool", "tool_name": "weather", "content": "-3"}]
    final = client.chat("tiny", messages, tools=[weather], options={"num_predict": 20})
    assert final.message.content == "It is cold."
    assert final.message.tool_calls is None
    says += ["Well. ", CALL]
    parts = list(client.chat("tiny", [asked], tools=[tool()], stream=True, options={"num_predict": 20}))
    calls = [call for each in parts for call in each.message.tool_calls or ()]
    assert [dict(call.function.arguments) for call in calls] == [{"city": "Oslo"}]
    assert "".join(each.message.content or "" for each in parts).strip() == "Well."


def test_thinking_stands_apart(tiny: TinyModels, says: list[str]) -> None:
    said = ["so ", "it is", "\n</think>\n\nThe ", "answer"]
    with running(lambda: tiny.load(tiny.with_template("opens-ollama", BEGINS), draft="none", depth=0)) as server:
        client = ollama.Client(server.url)
        assert client.show("tiny").capabilities == ["completion", "thinking"]
        says += said
        message = client.chat("tiny", HELLO, think=True).message
        assert (message.thinking, message.content) == ("so it is", "The answer")
        says += said
        parts = [each.message for each in client.chat("tiny", HELLO, think="low", stream=True)]
        assert "".join(each.thinking or "" for each in parts) == "so it is"
        assert "".join(each.content or "" for each in parts) == "The answer"
        says += said
        whole = client.generate("tiny", "hello", think=True)
        assert (whole.thinking, whole.response) == ("so it is", "The answer")


def test_the_asynchronous_client_asks_several_questions_at_the_same_time(server: Running, engine: Engine) -> None:
    texts = ("one", "two", "three", "four")

    async def run() -> list[str]:
        client = ollama.AsyncClient(server.url)

        async def ask(text: str) -> str:
            stream = await client.chat("tiny", [{"role": "user", "content": text}], options=PLAIN, stream=True)
            return "".join([each.message.content or "" async for each in stream])

        try:
            return await asyncio.gather(*map(ask, texts))
        finally:
            await client.close()

    assert asyncio.run(run()) == [plain_text(engine, text, max_tokens=16).text for text in texts]


# ----------------------------------------------------------------------------------- the model that comes and goes


def test_a_request_without_a_message_loads_the_model_or_frees_it(tiny: TinyModels) -> None:
    with running(lambda: tiny.load(draft="none"), keep_alive_s=600.0) as server:
        client, keeper = ollama.Client(server.url), server.service.keeper
        loaded = client.chat("tiny", [])
        assert (loaded.done, loaded.done_reason, loaded.message.content) == (True, "load", "")
        assert keeper.state == "ready"
        (left,) = client.ps().models
        client.generate("tiny", "", keep_alive="2h")
        (longer,) = client.ps().models
        assert left.expires_at is not None
        assert longer.expires_at is not None
        assert 6500 < (longer.expires_at - left.expires_at).total_seconds() < 6700
        assert client.generate("tiny", keep_alive=0).done_reason == "unload"
        server.wait_until(lambda: keeper.state == "unloaded")
        assert client.ps().models == []
        assert [each.model for each in client.list().models] == ["tiny:latest"], "it is known while it is not loaded"
        assert client.show("tiny").details is not None
        assert keeper.state == "unloaded", "a list does not load it"
        assert client.chat("tiny", HELLO, keep_alive=0, options=PLAIN).message.content
        server.wait_until(lambda: keeper.state == "unloaded")
        client.chat("tiny", HELLO, keep_alive=-1, options=PLAIN)
        assert client.ps()["models"][0].expires_at.year == 2318
        assert keeper.loads == 3


def test_a_list_waits_for_the_first_loading(tiny: TinyModels) -> None:
    held = HeldLoad(lambda: tiny.load(draft="none"))
    with running(held) as server, server.client() as client:
        assert client.get("/api/ps").json() == {"models": []}
        assert client.get("/").text == "Ollama is running"
        with pytest.raises(httpx.ReadTimeout):
            client.get("/api/tags", timeout=0.2)
        held.release.set()
        assert [each["name"] for each in client.get("/api/tags").json()["models"]] == ["tiny:latest"]


# ---------------------------------------------------------------------------------------------------------- routes


def test_the_root_says_what_clients_look_for(server: Running) -> None:
    with server.client() as client:
        assert client.get("/").text == "Ollama is running"
        assert client.head("/").status_code == 200
        assert client.get("/api/version").json()["version"] == API_VERSION


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/api/push", "edgespec export MODEL --to gguf -o DIR"),
        ("POST", "/api/create", "edgespec export"),
        ("POST", "/api/copy", "edgespec serve MODEL --alias NAME"),
        ("DELETE", "/api/delete", "edgespec models rm"),
        ("POST", "/api/blobs/sha256:0", "edgespec pull"),
        ("POST", "/api/embed", "embeddings and ranking are not supported"),
        ("POST", "/api/embeddings", "embeddings and ranking are not supported"),
    ],
)
def test_what_would_change_the_store_is_refused_with_the_command_to_use(
    server: Running, method: str, path: str, words: str
) -> None:
    with server.client() as client:
        assert words in failed(client.request(method, path, json={"model": "tiny"}), 501)


def test_a_served_model_is_pulled_already_and_no_other_is_fetched(server: Running, client: ollama.Client) -> None:
    assert client.pull("tiny").status == "success"
    assert [each.status for each in client.pull("tiny:latest", stream=True)] == ["success"]
    assert server.post("/api/pull", name="tiny").headers["content-type"] == "application/x-ndjson"
    assert "`edgespec pull MODEL`" in failed(server.post("/api/pull", model="gpt-17"), 501)
    assert "model must be" in failed(server.post("/api/pull"), 400)


def test_errors_of_every_kind_have_ollamas_shape(server: Running) -> None:
    with server.client() as client:
        assert "not served here" in failed(client.get("/api/nothing"), 404)
        assert "method not allowed" in failed(client.get("/api/chat"), 405)
        assert "not valid JSON" in failed(client.post("/api/chat", content=b"{"), 400)
        assert "larger than" in failed(client.post("/api/generate", content=b'{"prompt": "' + b"x" * 10**7), 413)
        assert "model must be" in failed(client.post("/api/show", json={}), 400)
        assert "pages of" in failed(client.post("/api/chat", headers={"Origin": "https://evil.example"}), 403)
        streamed = client.post("/api/chat", json={"messages": HELLO, "tools": [{"type": "function"}]})
        assert "is not a function" in failed(streamed, 400), "before the first line an error has its own status"


def test_a_key_is_needed_for_all_but_the_version(tiny: TinyModels) -> None:
    key = "a-key-for-tests"
    with running(lambda: tiny.load(draft="none"), access=Access(keys=(key,))) as server, server.client() as client:
        for method, path in (("GET", "/api/tags"), ("GET", "/api/ps"), ("POST", "/api/show"), ("POST", "/api/chat")):
            assert "key" in failed(client.request(method, path, json={}), 401)
        assert client.get("/api/version").status_code == client.get("/").status_code == 200
        own = ollama.Client(server.url, headers={"Authorization": f"Bearer {key}"})
        assert own.chat("tiny", HELLO, options=PLAIN).done


def test_a_stream_is_lines_of_json(server: Running) -> None:
    with server.client() as client:
        response = client.post("/api/chat", json={"messages": HELLO, "options": PLAIN})
    assert response.headers["content-type"] == "application/x-ndjson"
    own: list[dict[str, Any]] = list(map(json.loads, response.content.splitlines()))
    assert [each["done"] for each in own] == [False] * (len(own) - 1) + [True]
    assert own[-1]["edgespec"]["timings"]["draft_n"] > 0


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_client_that_waits_gets_headers_and_then_lines_or_an_error(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, path: str, fails: bool
) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.02)

    text, held = "word " * 5000 if fails else "hello", HeldLoad(lambda: tiny.load(draft="none"))
    body = {"messages": [{"role": "user", "content": text}], "prompt": text, "options": PLAIN}
    with running(held) as server, server.client() as client, client.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, "the model is not loaded yet"
        held.release.set()
        *_, last = map(json.loads, reply.iter_lines())
    assert "context_length_exceeded" in last["error"] if fails else last["done"]


def test_the_openapi_document_has_every_route(server: Running) -> None:
    with server.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    answers = {"/", "/api/version", "/api/tags", "/api/ps", "/api/show", "/api/chat", "/api/generate"}
    assert {*answers, *NOT_SERVED} <= paths.keys()


def test_a_server_of_several_models_lists_all_and_loads_none_for_a_list(tiny: TinyModels) -> None:
    paths = {"target": tiny.target, "chatty": tiny.with_template("tools", TEMPLATE)}
    loads = {name: partial(_load_alone, tiny, path) for name, path in paths.items()}
    with serving(loads, GIB) as server, closing(ollama.Client(server.url)) as client:
        first, second = (each.keeper for each in server.service.models)
        first.locate, second.locate = (partial(read_model_file, path) for path in paths.values())
        listed = client.list().models
        assert [each.model for each in listed] == ["target:latest", "chatty:latest"]
        before = {each.model: each.digest for each in listed}
        assert len(set(before.values())) == 2
        assert client.show("chatty").capabilities == ["completion", "tools"]
        assert client.show("target").capabilities == ["completion"]
        assert client.ps().models == []
        assert (first.loads, second.loads) == (0, 0)
        assert client.chat("chatty", HELLO, options=PLAIN).message.content
        assert [each.model for each in client.ps().models] == ["chatty:latest"]
        assert {each.model: each.digest for each in client.list().models} == before
        assert "name a model" in failed(server.post("/api/generate", prompt="hello"), 404)
        assert client.generate("chatty", keep_alive=0).done_reason == "unload"
        server.wait_until(lambda: second.state == "unloaded")


def _load_alone(tiny: TinyModels, path: Path, limits: Limits) -> Engine:
    return tiny.load(path, limits=limits, draft="none")
