"""The server over HTTP: the same text as a session, streams, errors, conversations kept between requests."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Text
from edgespec.errors import EdgespecError
from edgespec.server import answers, keeper as keeping, streaming
from edgespec.server.errors import ApiError
from edgespec.server.ollama_routes import NOT_SERVED
from edgespec.server.pool import Kept
from edgespec.server.schema import Request
from edgespec.server.security import Access
from edgespec.text.request_budget import RequestBudget
from tests.engine.answers import plain_text
from tests.support.http_server import WAIT_S, HeldLoad, Running, running
from tests.support.tiny_models import TinyModels, answer

CHAT = "/v1/chat/completions"


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, whose end is checked."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


def failed(response: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """The error of a response, whose shape is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code
    assert len(error["message"]) > 10
    return dict(error)


def test_the_text_is_that_of_a_session(server: Running, engine: Engine) -> None:
    for body in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 11}):
        sampling = Sampling(**body)  # type: ignore[arg-type]
        expected = plain_text(engine, "hello", max_tokens=64, sampling=sampling, stop=["zzz"])
        reply = server.chat("hello", max_tokens=64, stop="zzz", **body).json()
        assert text_of(reply) == expected.text
        assert reply["usage"]["completion_tokens"] == 64
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["model"] == "tiny"
        assert reply["timings"]["draft_n"] >= reply["timings"]["draft_n_accepted"]
        assert reply["timings"]["draft_n"] > 0
        assert reply["seed"] == body.get("seed")


def test_the_assistants_last_message_is_continued(server: Running, engine: Engine) -> None:
    sent = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the people of"}]
    with engine.session() as session:
        expected = answer(session.generate(messages=sent, max_tokens=20)).text
    body = {"messages": sent, "max_tokens": 20, "temperature": 0}
    assert text_of(server.post(**body).json()) == expected
    streamed = events(server.post(**body, stream=True, continue_final_message=True))
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in streamed) == expected


def test_a_stop_text_ends_the_answer_in_front_of_it(server: Running) -> None:
    body = {"max_tokens": 40, "temperature": 0}
    whole = text_of(server.chat("hello", **body).json())
    stop = whole[len(whole) // 2 :][:3]
    cut = whole[: whole.index(stop)]
    reply = server.chat("hello", stop=["never", stop], **body).json()
    assert (text_of(reply), reply["choices"][0]["finish_reason"]) == (cut, "stop")
    first, *parts, last = events(server.chat("hello", stop=stop, stream=True, **body))
    assert "".join(part["choices"][0]["delta"]["content"] for part in (first, *parts)) == cut
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "field",
    [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}],
    ids=str,
)
def test_sampling_fields_change_the_text_as_in_a_session(
    server: Running, engine: Engine, field: dict[str, float]
) -> None:
    drawn = {"temperature": 1.0, "seed": 5}
    expected = plain_text(engine, "hello", max_tokens=24, sampling=Sampling(**drawn, **field))  # type: ignore[arg-type]
    assert text_of(server.chat("hello", max_tokens=24, **drawn, **field).json()) == expected.text
    assert text_of(server.chat("hello", max_tokens=24, **drawn).json()) != expected.text


def test_an_answer_ends_where_the_context_ends(tiny: TinyModels) -> None:
    with running(lambda: tiny.load(draft="none", context=512)) as server:
        reply = server.chat("hello", temperature=0).json()
        assert reply["choices"][0]["finish_reason"] == "length"
        assert 500 < reply["usage"]["total_tokens"] <= 512
        assert server.chat("hello", max_tokens=2).status_code == 200


def test_no_page_may_ask_without_a_named_origin(server: Running) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    response = httpx.options(f"{server.url}{CHAT}", headers=asked)
    assert response.status_code >= 400
    assert not [name for name in response.headers if name.startswith("access-control-")]


def test_a_stream_has_the_same_text_in_chunks(server: Running) -> None:
    body = {"max_tokens": 20, "temperature": 0.9, "seed": 3}
    whole = server.chat("hello", **body).json()
    response = server.chat("hello", stream=True, stream_options={"include_usage": True}, **body)
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *parts, last, usage = events(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == text_of(whole)
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
    assert last["seed"] == 3
    assert last["timings"]["predicted_n"] == 20
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 20
    assert len({chunk["id"] for chunk in (first, *parts, last, usage)}) == 1
    plain = events(server.chat("hello", stream=True, **body))
    assert all("usage" not in chunk for chunk in plain)
    assert plain[-1]["choices"][0]["finish_reason"] == "length"


def test_a_drawn_seed_is_returned_and_repeats_the_answer(server: Running) -> None:
    first = server.chat("hello", max_tokens=12, temperature=1.0).json()
    again = server.chat("hello", max_tokens=12, temperature=1.0, seed=first["seed"]).json()
    assert text_of(first) == text_of(again)
    assert first["seed"] < 2**53
    several = server.chat("hello", max_tokens=12, temperature=1.0, n=2).json()
    second = server.chat("hello", max_tokens=12, temperature=1.0, seed=several["seed"] + 1).json()
    assert text_of(second) == several["choices"][1]["message"]["content"], "further seeds count up from the drawn one"
    assert first["system_fingerprint"] == again["system_fingerprint"]


def test_a_single_answer_draws_a_seed_that_no_other_answer_had(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, begin = list[int | None](), answers._generation

    def beginning(request: Request, kept: Kept, sampling: Sampling, budget: RequestBudget) -> Generation:
        asked.append(sampling.seed)
        return begin(request, kept, sampling, budget)

    monkeypatch.setattr(answers, "_generation", beginning)
    drawn = server.chat("hello", max_tokens=2, temperature=1.0).json()
    assert drawn["seed"] is not None
    server.chat("hello", max_tokens=2, temperature=1.0, seed=3)
    assert asked == [None, 3]


def test_several_answers_have_further_seeds(server: Running) -> None:
    body = {"max_tokens": 8, "temperature": 1.0, "seed": 5}
    reply = server.chat("hello", n=3, **body).json()
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert texts[1] == text_of(server.chat("hello", **{**body, "seed": 6}).json())
    assert len(set(texts)) > 1
    streamed = events(server.chat("hello", n=3, stream=True, **body))
    for index, text in enumerate(texts):
        own = [chunk["choices"][0] for chunk in streamed if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == text


def test_a_completion_continues_raw_text(server: Running, engine: Engine) -> None:
    expected = plain_text(engine, "Once upon", raw=True, heal=True, max_tokens=10)
    body = {"prompt": "Once upon", "max_tokens": 10, "temperature": 0}
    reply = server.post("/v1/completions", **body).json()
    assert (reply["object"], reply["choices"][0]["text"]) == ("text_completion", expected.text)
    echoed = server.post("/v1/completions", echo=True, **body).json()
    assert echoed["choices"][0]["text"] == "Once upon" + expected.text
    for echo, start in ((False, ""), (True, "Once upon")):
        streamed = events(server.post("/v1/completions", stream=True, echo=echo, **body))
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == start + expected.text
    nothing = server.post("/v1/completions", **{**body, "max_tokens": 0, "echo": True}).json()
    assert (nothing["choices"][0]["text"], nothing["choices"][0]["finish_reason"]) == ("Once upon", "length")
    assert nothing["usage"]["completion_tokens"] == 0


def test_a_growing_conversation_is_not_read_again(server: Running) -> None:
    messages = [{"role": "user", "content": "hello " * 30}]
    first = server.post(CHAT, messages=messages, max_tokens=10, temperature=0).json()
    messages += [{"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "and now"}]
    second = server.post(CHAT, messages=messages, max_tokens=10, temperature=0).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"]
    assert cached == second["timings"]["cache_n"]
    assert second["timings"]["prompt_n"] == second["usage"]["prompt_tokens"] - cached


def test_the_same_request_is_not_read_again(server: Running) -> None:
    body = {"max_tokens": 60, "temperature": 0, "stop": "never written"}
    first = server.chat("repeat this", **body).json()
    again = server.chat("repeat this", **body).json()
    assert text_of(again) == text_of(first)
    assert again["timings"]["prompt_n"] == 1


def test_concurrent_requests_get_their_own_texts(server: Running, engine: Engine) -> None:
    prompts = [f"hello {number}" for number in range(6)]
    expected = [plain_text(engine, each, max_tokens=16).text for each in prompts]
    answers = [server.asking(each, max_tokens=16, temperature=0) for each in prompts]
    assert [text_of(answer.result(WAIT_S).json()) for answer in answers] == expected


def test_the_models_own_sampling_is_the_default(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Sampling(temperature=0.9, top_k=7)
    monkeypatch.setattr(Engine, "file_sampling", usual)
    with running(lambda: tiny.load(draft="none")) as server:
        reply = server.chat("hello", max_tokens=8).json()
        engine = server.service.keeper.engine
        assert engine is not None
        sampling = Sampling(temperature=0.9, top_k=7, seed=reply["seed"])
        assert text_of(reply) == plain_text(engine, "hello", max_tokens=8, sampling=sampling).text


def test_log_probabilities_are_those_of_the_engine(server: Running, engine: Engine) -> None:
    with engine.session() as session:
        expected = [
            token
            for event in session.generate("hello", max_tokens=12, logprobs=2)
            if isinstance(event, Text)
            for token in event.tokens
        ]
    body = {"max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    reply = server.chat("hello", **body).json()["choices"][0]
    content = reply["logprobs"]["content"]
    assert [each["logprob"] for each in content] == [each.logprob for each in expected]
    assert [[other["logprob"] for other in each["top_logprobs"]] for each in content] == [
        [other.logprob for other in each.top] for each in expected
    ]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == reply["message"]["content"]
    streamed = events(server.chat("hello", stream=True, **body))
    own = [chunk["choices"][0]["logprobs"] for chunk in streamed if chunk["choices"][0]["logprobs"]]
    assert [token for each in own for token in each["content"]] == content


def test_a_completion_has_the_older_shape_of_log_probabilities(server: Running) -> None:
    body = {"prompt": "Once upon", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    choice = server.post("/v1/completions", **body).json()["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    for at, token in zip(found["text_offset"], found["tokens"], strict=True):
        assert choice["text"][at:].startswith(token)
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top == {token: logprob}
    streamed = [
        chunk["choices"][0]["logprobs"] for chunk in events(server.post("/v1/completions", stream=True, **body))
    ]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [one for each in streamed if each for one in each[name]] == found[name]


def test_a_biased_token_is_never_written(server: Running, engine: Engine) -> None:
    body = {"max_tokens": 8, "temperature": 0}
    first = engine.tokenizer.encode(text_of(server.chat("hello", **body).json()), special=False)
    reply = server.chat("hello", logit_bias={str(token): -100 for token in first}, **body).json()
    assert text_of(reply) != text_of(server.chat("hello", **body).json())
    for wrong in ({"999999": 1}, {"5": 10**400}, {"5": -(10**400)}):
        failed(server.chat("hello", logit_bias=wrong), 400)


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, None),
        ({"messages": [{"role": "user", "content": "x"}], "model": "gpt-17"}, 404, "model_not_found"),
        ({"messages": [{"role": "user", "content": "x"}], "top_p": 7}, 400, None),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 300_000}]}, 400, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}}, 400, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_gets_an_error_with_a_status(
    server: Running, body: dict[str, Any], status: int, code: str | None, stream: bool
) -> None:
    failed(server.post(CHAT, stream=stream, **body), status, code)
    assert server.chat("hello", max_tokens=1).status_code == 200


def test_unknown_paths_and_methods_get_an_error(server: Running) -> None:
    with server.client() as client:
        failed(client.get("/v1/nothing"), 404)
        failed(client.get(CHAT), 405)
        failed(client.post("/health"), 405)
        failed(client.post(CHAT, content=b"{"), 400, "invalid_json")
        failed(client.get("/v1/models/gpt-17"), 404, "model_not_found")
        for path, advice in (
            ("/v1", "'/v1' is not served here: the models are at /v1/models, the page for browsers at /"),
            ("/v1/", "'/v1/' is not served here: the models are at /v1/models, the page for browsers at /"),
            ("/v1/threads/T/messages", "'/v1/threads/T/messages' is not served here: see /openapi.json"),
            ("/v1/chat/completions/", "'/v1/chat/completions/' is not served here: use /v1/chat/completions"),
            ("//v1/chat/completions", "'//v1/chat/completions' is not served here: use /v1/chat/completions"),
            ("/embeddings", f"'/embeddings' is not served here: {NOT_SERVED['/v1/embeddings'][1]}"),
            ("/reranking", f"'/reranking' is not served here: {NOT_SERVED['/v1/reranking'][1]}"),
        ):
            assert failed(client.post(server.url + path, content=b"{}"), 404, "not_found")["message"] == advice
        error = failed(client.get("/health", headers={"host": "evil.example"}), 403, "host_not_allowed")
        assert "--api-key" in error["message"]
        error = failed(client.get("/health", headers={"origin": "http://evil.example"}), 403, "origin_not_allowed")
        assert "--allow-origin" in error["message"]


@pytest.mark.parametrize(
    ("path", "served", "base"),
    [
        ("/v1/chat/completions/chat/completions", CHAT, "/v1"),
        ("/chat/completions", CHAT, "/v1"),
        ("/v1/v1/completions", "/v1/completions", "/v1"),
        ("/v1/v1/messages", "/v1/messages", ""),
        ("/messages", "/v1/messages", "/v1"),
        ("/v1/api/tags", "/api/tags", ""),
        ("/api/v1/chat/completions", CHAT, "/v1"),
        ("/openai/v1/chat/completions", CHAT, "/v1"),
        ("/v1/messages/v1/messages/count_tokens", "/v1/messages/count_tokens", ""),
        ("/api/api/chat", "/api/chat", ""),
        ("/api/generate/api/chat", "/api/chat", ""),
        ("/api/v1/models", "/v1/models", "/v1"),
    ],
)
def test_a_path_behind_a_wrong_base_address_gets_the_right_one(
    server: Running, path: str, served: str, base: str
) -> None:
    assert f"use {served} (the base address of clients is http://HOST:PORT{base})" in server.post(path).text


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embedding", "/v1/rerank", "/v1/reranking"])
def test_embeddings_are_refused_in_words_and_are_not_asked_for_again(server: Running, path: str) -> None:
    response = server.post(path, input="x")
    assert failed(response, 501, "not_implemented")["message"] == NOT_SERVED[path][1]
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(("version", "status"), [(b"1.0", b"200"), (b"1.1", b"400")])
def test_a_health_check_in_http_1_0_needs_no_host(server: Running, version: bytes, status: bytes) -> None:
    server.wait_until(lambda: server.service.keeper.state == "ready")
    with server.connect() as own:
        own.sendall(b"GET /health HTTP/%s\r\nConnection: close\r\n\r\n" % version)
        assert own.makefile("rb").readline().split()[1] == status


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://127.0.0.1/v1/models/ti%6Ey?x=1", 200),
        (b"http://127.0.0.1:8471/health", 200),
        (b"HTTP://127.0.0.1:8471/health", 200),
        (b"http://localhost", 200),
        (b"http://evil.example/v1/models", 403),
        (b"http://127.0.0.1@evil.example/v1/models", 403),
        (b"http://127.0.0.1%2f.evil.example/v1/models", 403),
        (b"http:///v1/models", 403),
    ],
)
def test_a_whole_address_in_a_request_is_its_host_and_its_path(server: Running, target: bytes, status: int) -> None:
    server.wait_until(lambda: server.service.keeper.state == "ready")
    with server.connect() as own:
        own.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % target)
        assert int(own.makefile("rb").readline().split()[1]) == status


@pytest.mark.parametrize("name", ["tiny", "TINY", "Tiny:latest", "default", ""])
def test_the_model_has_its_name_in_any_case_and_with_ollamas_tag(server: Running, name: str) -> None:
    assert server.chat("hello", max_tokens=1, model=name).status_code == 200


def test_a_prompt_that_is_too_long_is_an_error_that_clients_know(server: Running) -> None:
    for path, field, body in (
        (CHAT, "messages", {"messages": [{"role": "user", "content": "word " * 5000}]}),
        ("/v1/completions", "prompt", {"prompt": "word " * 5000}),
        ("/v1/completions", "prompt", {"prompt": "x" * 300_000}),
    ):
        error = failed(server.post(path, **body), 400, "context_length_exceeded")  # type: ignore[arg-type]
        assert error["param"] == field
        # litellm and LangChain look for these.
        assert "exceeds the available context size" in error["message"]
        assert "context_length_exceeded" in error["message"]


def test_health_of_a_model_that_is_loaded_again(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that sends nothing after a 503 would never send the request that loads the model."""
    passed_s, now, fails = 0.0, keeping._now, False

    def load_or_fail() -> Engine:
        if fails:
            raise EdgespecError("/home/me/model is damaged")
        return tiny.load(draft="none")

    def health(**headers: str) -> tuple[int, dict[str, str]]:
        found = client.get("/health", headers=headers)
        return found.status_code, found.json()

    monkeypatch.setattr(keeping, "_now", lambda: now() + passed_s)
    load, key = HeldLoad(load_or_fail), {"authorization": "Bearer key-number-one"}
    with running(load, access=Access(keys=("key-number-one",))) as server, server.client(headers=key) as client:
        assert client.get("/v1/models/tiny").json()["meta"] is None
        load.release.set()
        server.wait_until(lambda: health() == (200, {"status": "ok", "model": "ready"}))
        load.release.clear()
        known = client.get("/v1/models/tiny").json()["meta"]
        assert known["n_ctx"] > 0
        client.post("/api/generate", json={"model": "tiny", "keep_alive": 0})
        server.wait_until(lambda: health() == (200, {"status": "ok", "model": "unloaded"}))
        assert client.get("/v1/models/tiny").json()["meta"] == known
        fails, asking = True, {"messages": [{"role": "user", "content": "hello"}]}
        answered = ThreadPoolExecutor(1).submit(client.post, CHAT, json=asking)
        server.wait_until(lambda: health() == (200, {"status": "ok", "model": "loading"}))
        load.release.set()
        assert answered.result(WAIT_S).status_code == 500
        assert health() == (503, {"status": "failed", "message": "/home/me/model is damaged"})
        assert health(authorization="Bearer another") == (503, {"status": "failed"})
        passed_s = keeping.FAILED_S
        assert health() == (200, {"status": "ok", "model": "unloaded"})


def test_an_unexpected_failure_is_an_error_of_the_server(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    with monkeypatch.context() as patched:
        patched.setattr("edgespec.server.answers.TokenScores.of", broken)
        server.chat("hello", max_tokens=3)
        kept = server.service.keeper.kept_sessions
        failed(server.chat("hello", max_tokens=3), 500, "internal_error")
        assert server.service.keeper.kept_sessions == kept - 1, "its session is closed"
    monkeypatch.setattr("edgespec.server.answering.fingerprint", broken)
    for stream in (False, True):
        error = failed(server.chat("hello", stream=stream), 500, "internal_error")
        assert "ZeroDivisionError" in error["message"]
        assert "secret" not in error["message"]
    assert server.lines[-1].error == error["message"]


def test_an_error_after_the_start_of_a_stream_is_an_event(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ApiError("it broke here", status=500)

    def counted() -> tuple[int, ...]:
        text = server.service.metrics.text({})
        names = ("generated_tokens_total", f'requests_total{{path="{CHAT}",status="500"}}')
        found = [re.search(rf"^edgespec_{re.escape(name)} (\d+)$", text, re.MULTILINE) for name in names]
        return tuple(0 if each is None else int(each[1]) for each in found)

    monkeypatch.setattr(streaming.EventStream, "part", broken)
    server.wait_until(lambda: server.service.connections() == 0)  # the requests of other tests are counted
    before, (tokens, failures) = len(server.lines), counted()
    response = server.chat("hello", stream=True)
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "it broke here"
    server.wait_until(lambda: len(server.lines) > before)
    line = server.lines[before]
    assert (line.status, line.begun > 0) == (200, True)
    assert counted() == (tokens + line.begun, failures + 1)


# --------------------------------------------------------------------------------------- other routes, the log


def test_models_health_and_the_openapi_document(server: Running) -> None:
    with server.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["object"]) == ("tiny", "model")
        assert client.get("/v1/models/tiny").json() == model
        assert client.get("/v1/models/").json() == client.get("/v1/models").json()
        assert "models" not in client.get("/v1/models").json()
        codex = client.get("/v1/models", params={"client_version": "0.171.0"}).json()
        assert (codex["models"], codex["data"]) == ([], [model])
        assert client.get("/health").json() == {"status": "ok", "model": "ready"}
        document = client.get("/openapi.json").json()
        assert document["openapi"].startswith("3.1")
        assert {CHAT, "/v1/completions", "/v1/models", "/health", "/metrics"} <= document["paths"].keys()


def test_requests_are_logged_and_counted_without_their_text(server: Running) -> None:
    before = len(server.lines)
    server.chat("a secret word", max_tokens=3)
    server.wait_until(lambda: CHAT in [line.path for line in server.lines[before:]])
    line = next(line for line in server.lines[before:] if line.path == CHAT)
    assert (line.method, line.path, line.status, line.client) == ("POST", CHAT, 200, "127.0.0.1")
    assert line.answers[0].stats.emitted_tokens == 3
    server.wait_until(lambda: server.service.connections() == 0)
    with server.client() as client:
        text = client.get("/metrics").text
    assert f'edgespec_requests_total{{path="{CHAT}",status="200"}}' in text
    assert "edgespec_model_loaded 1" in text
    assert "edgespec_connections 1" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        ("/v1/completions", {"prompt": ["secret", ""]}, "invalid_request_error in prompt"),
        ("/v1/completions", {"prompt": {"secret": 1}}, "invalid_request_error in prompt"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "secret"}]}]},
            "unsupported_parameter in messages[0]",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x"}], "stop": {"a": "secret"}},
            "invalid_request_error in stop",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"secret": "secret"}]},
            "invalid_request_error in tools",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": "secret"}, "model_not_found in model"),
    ],
)
def test_the_log_of_a_refused_request_has_nothing_of_its_text_unless_asked(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], shown: str
) -> None:
    def answer_and_line() -> tuple[str, str | None]:
        before = len(server.lines)
        message = failed(server.post(path, **body), 404 if "model" in body else 400)["message"]
        server.wait_until(lambda: len(server.lines) > before)
        return message, server.lines[-1].error

    assert answer_and_line()[1] == shown
    monkeypatch.setattr(server.service, "content", lambda *_: None)
    message, line = answer_and_line()
    assert line == message


def test_an_error_quotes_the_beginning_of_a_field_only(server: Running) -> None:
    response = server.chat("x", response_format={"type": "long " * 1000})
    assert len(failed(response, 400)["message"]) < 300


def test_while_the_model_loads_health_says_so_and_requests_wait(tiny: TinyModels) -> None:
    load = HeldLoad(lambda: tiny.load(draft="none"))
    with running(load) as server, server.client() as client:
        response = client.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "loading"})
        assert client.get("/v1/models").status_code == 200
        threading.Timer(0.05, load.release.set).start()
        assert server.chat("hello", max_tokens=2).status_code == 200
        assert client.get("/health").status_code == 200


# --------------------------------------------------------------------------------------------------- keys


def test_each_key_has_its_own_conversations(tiny: TinyModels) -> None:
    access = Access(keys=("key-number-one", "key-number-two"), origins=("http://LOCALHOST:3000",))
    body = {"messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 2}
    with running(lambda: tiny.load(draft="none"), access=access) as server, server.client() as client:

        def cached(key: str) -> int:
            reply = client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"}).json()
            return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("key-number-one") == 0
        assert cached("key-number-two") == 0, "no key sees what another key cached"
        assert cached("key-number-one") > 15
        for path in ("/v1/models", "/metrics", "/v1/models/tiny"):
            failed(client.get(path), 401, "invalid_api_key")
        failed(client.post(CHAT, json=body, headers={"authorization": "Bearer key-number-six"}), 401)
        assert client.get("/health").status_code in (200, 503)
        allowed = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
        response = client.options(CHAT, headers={**allowed, "access-control-request-headers": "authorization"})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert "access-control-allow-private-network" not in response.headers
        response = client.options(CHAT, headers={**allowed, "access-control-request-private-network": "true"})
        assert response.headers["access-control-allow-private-network"] == "true", "a public page in Chrome"
        assert "access-control-allow-origin" not in client.get("/health").headers
