"""Requests over HTTP that wait, whose clients leave, or whose server ends."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import tracemalloc
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgespec.cli.serve import log_line
from edgespec.engine.engine import Engine
from edgespec.engine.events import Reading
from edgespec.engine.session import Session
from edgespec.errors import MemoryLimitError
from edgespec.placement.cache_rooms import CacheRoom
from edgespec.server import answering, app, streaming
from edgespec.server.answers import _session
from edgespec.server.forms import FormCompiler
from edgespec.server.keeper import LoadedEngine, ModelKeeper
from edgespec.server.keystrokes import KeyTurn
from edgespec.server.pool import Kept, SessionPool
from edgespec.server.queue import RequestQueue
from edgespec.server.schema import Request
from edgespec.text.chat_template.template import ChatTemplate
from edgespec.text.conversation.conversation import Conversation
from edgespec.text.request_budget import RequestBudget
from tests.server.test_http import CHAT, events, failed
from tests.support.http_server import WAIT_S, HeldLoad, Running, running
from tests.support.tiny_models import TinyModels
from tests.support.watched_sequences import HeldAnswer

LONG = "hello " * 500  # half a second of reading for the slow model


def test_a_client_that_leaves_ends_its_answer(slow: Running) -> None:
    before = len(slow.lines)
    for stream in (True, False):
        with slow.connect() as own:
            slow.send_chat(own, "hello", stream=stream, max_tokens=4000)
            slow.wait_until(lambda: slow.service.queue.running == 1)
            if stream:
                assert own.recv(100).startswith(b"HTTP/1.1 200")
        slow.wait_until(lambda: slow.service.queue.running == 0)
    slow.wait_until(lambda: len(slow.lines) == before + 2)
    assert {line.error for line in slow.lines[before:]} == {"the client left"}
    assert [line.status for line in slow.lines[before:]] == [200, 0]
    with slow.connect() as own:
        own.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
    slow.wait_until(lambda: len(slow.lines) == before + 3)
    assert (slow.lines[-1].status, slow.lines[-1].error) == (0, "the client left")
    assert 'status="500"' not in slow.service.metrics.text({})
    assert slow.chat("hello", max_tokens=1).status_code == 200


@pytest.mark.parametrize("step", ["take", "prepare"])
def test_a_client_that_leaves_frees_its_place_whatever_its_step_does(
    slow: Running, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    pool, begun, release = slow.service.keeper._loaded.pool, threading.Event(), threading.Event()  # type: ignore[union-attr]
    owner, name = (SessionPool, "take") if step == "take" else (Conversation, "turn")
    own = getattr(owner, name)

    def held(*arguments: Any, **settings: Any) -> Any:
        begun.set()
        assert release.wait(WAIT_S)
        return own(*arguments, **settings)

    monkeypatch.setattr(owner, name, held)
    with slow.connect() as client:
        slow.send_chat(client, "hello", max_tokens=4)
        assert begun.wait(WAIT_S)
    slow.wait_until(lambda: slow.service.queue.running == 0)
    assert pool.in_use == 1, "the step still runs"
    monkeypatch.setattr(owner, name, own)
    assert slow.chat("hello", max_tokens=1).status_code == 200
    release.set()
    slow.wait_until(lambda: pool.in_use == 0)
    assert len(pool) >= 1, "its session is kept"
    assert slow.chat("hello", max_tokens=1).status_code == 200


def test_a_client_that_leaves_ends_the_preparation_of_its_prompt(
    slow: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is rendered, and not tokenised any more."""
    engine, begun, release = slow.service.keeper.engine, threading.Event(), threading.Event()
    assert engine is not None
    tokenizer, render, encoded = type(engine.tokenizer), ChatTemplate.render, list[str]()
    encode = tokenizer.encode

    def held(*arguments: Any, **settings: Any) -> str:
        begun.set()
        assert release.wait(WAIT_S)
        return render(*arguments, **settings)

    monkeypatch.setattr(ChatTemplate, "render", held)
    monkeypatch.setattr(tokenizer, "encode", lambda own, text, **_: encoded.append(text) or encode(own, text, **_))
    with slow.connect() as client:
        slow.send_chat(client, LONG, max_tokens=4)
        assert begun.wait(WAIT_S)
    slow.wait_until(lambda: slow.service.queue.running == 0)
    release.set()
    slow.wait_until(lambda: slow.service.keeper._loaded.pool.in_use == 0)  # type: ignore[union-attr]
    assert not any(LONG in text for text in encoded)
    assert slow.chat("hello", max_tokens=1).status_code == 200


@pytest.mark.parametrize("early", [b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_client_that_sent_more_and_leaves_ends_its_answer(slow: Running, early: bytes) -> None:
    before = len(slow.lines)
    with slow.connect() as own:
        slow.send_chat(own, "hello", max_tokens=8000)
        slow.wait_until(lambda: slow.service.queue.running == 1)
        own.sendall(early)
        time.sleep(0.1)  # it arrives in a separate packet
    slow.wait_until(lambda: (0, "the client left") in [(line.status, line.error) for line in slow.lines[before:]])
    slow.wait_until(lambda: slow.service.queue.running == 0)


def test_early_requests_of_one_client_are_not_kept_without_limit(slow: Running) -> None:
    with slow.connect() as own:
        slow.send_chat(own, "hello", max_tokens=3000)
        slow.wait_until(lambda: slow.service.queue.running == 1)
        own.settimeout(0.3)
        with pytest.raises(TimeoutError):
            own.sendall(b"x" * 50_000_000)


def test_other_answers_continue_while_a_long_prompt_is_cut_into_tokens(engine: Engine) -> None:
    text = "hello world " * 200_000
    begun, ended, ticks = threading.Event(), threading.Event(), list[int]()

    def tick() -> None:
        begun.set()
        while not ended.wait(0.001):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    assert begun.wait(WAIT_S)
    before = len(ticks)
    engine.tokenizer.encode(text)
    during = len(ticks) - before
    ended.set()
    thread.join()
    assert during > 2, "a call that kept the interpreter lock would let no other thread run"


def test_long_prompts_that_are_refused_are_not_kept_in_memory(server: Running) -> None:
    def held() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    def refused(number: int) -> None:
        response = server.chat(f"{number} " + "word " * 60_000)
        failed(response, 400, "context_length_exceeded")

    tracemalloc.start()
    try:
        refused(0)
        before = held()
        for number in range(1, 6):
            refused(number)
        server.wait_until(lambda: held() - before < 500_000)  # the last request ends
    finally:
        tracemalloc.stop()


def test_a_silent_stream_gets_comments(slow: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert streaming.KEEP_ALIVE_S == 5.0
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    response = slow.chat(LONG, stream=True, max_tokens=1)
    assert "\n\n: waiting\n\n" in response.text
    assert events(response)[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "silence"),
    [("chat", {"message": {"role": "assistant", "content": ""}}), ("generate", {"response": ""})],
)
def test_a_silent_stream_of_ollama_gets_lines_without_text(
    slow: Running, monkeypatch: pytest.MonkeyPatch, path: str, silence: dict[str, Any]
) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    asked = {"prompt": path + LONG, "messages": [{"role": "user", "content": path + LONG}]}
    response = slow.post(f"/api/{path}", **asked, options={"num_predict": 1})
    first, *_, last = map(json.loads, response.text.splitlines())
    assert (silence.items() <= first.items(), first["done"], last["done"]) == (True, False, True)


@pytest.mark.anyio
async def test_a_client_that_takes_nothing_ends_its_answer(slow: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert app.LONGEST_WRITE_S == 60.0
    monkeypatch.setattr(app, "LONGEST_WRITE_S", 0.05)
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.02)
    sent = list[str]()

    async def receive() -> Any:
        if not sent:
            sent.append("body")
            body = {"messages": [{"role": "user", "content": LONG}], "stream": True, "max_tokens": 1}
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    keeper = ModelKeeper(lambda: pytest.fail("nothing is loaded here"))
    lines = list[app.RequestLine]()
    guard = app.make_app(app.Service(keeper=keeper, names=("tiny",), log=lines.append))
    ended = asyncio.Event()

    async def decode(*_: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(answering.Answering, "_decode", decode)
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"host", b"localhost")]}
    scope |= {"query_string": b"", "root_path": "", "raw_path": CHAT.encode(), "scheme": "http"}
    scope["http_version"] = "1.1"
    await guard(scope, receive, send)
    assert sent == ["body", "http.response.start", "http.response.body"]
    assert ended.is_set(), "the answer was cancelled by the failed comment"
    assert (lines[0].status, lines[0].error) == (200, "the client left")


def test_a_log_hears_how_much_of_a_prompt_is_read(tiny: TinyModels) -> None:
    heard = dict[str, list[Reading]]()
    load = partial(tiny.load, draft="none", context=2048)
    with running(load, reading=lambda request: heard.setdefault(request, []).append) as server:
        assert server.chat("the " * 600, max_tokens=1).status_code == 200
        server.wait_until(lambda: bool(server.lines))
    told = heard[f"127.0.0.1 POST {CHAT}"]
    assert [event.tokens for event in told] == list(range(0, told[0].of, 256))
    assert server.lines[-1].reading == Reading(told[0].of, told[0].of), "all of it, once there is text"


def test_a_full_queue_answers_429_with_retry_after(tiny: TinyModels) -> None:
    load = HeldLoad(lambda: tiny.load(draft="none"))
    with running(load, queue=RequestQueue(1, 1)) as server:
        answers = [server.asking("x", max_tokens=1) for _ in range(2)]
        server.wait_until(lambda: (server.service.queue.running, server.service.queue.waiting) == (1, 1))
        response = server.chat("x")
        failed(response, 429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
        load.release.set()
        assert [answer.result(WAIT_S).status_code for answer in answers] == [200, 200]


def test_an_answer_that_the_server_ends_is_an_error(tiny: TinyModels) -> None:
    with running(lambda: tiny.load(tiny.slow, draft="none", lookup=False, context=8192)) as server:
        server.wait_until(lambda: server.service.keeper.state == "ready")
        answer = server.asking("hello", max_tokens=4000)
        server.wait_until(lambda: server.service.queue.running == 1 and server.service.keeper.state == "ready")
        engine = server.service.keeper.engine
        assert engine is not None
        server.wait_until(lambda: engine.pair.answering)
        engine.close()
        failed(answer.result(WAIT_S), 503, "unavailable")
        server.wait_until(lambda: server.service.keeper.state == "unloaded")
        assert server.chat("hello", max_tokens=1).status_code == 200, "the model is loaded again"


def test_an_answer_that_a_second_stop_cuts_is_logged_with_what_was_read_and_sent(tiny: TinyModels) -> None:
    with running(lambda: tiny.load(tiny.slow, draft="none", lookup=False, context=8192)) as server:
        with server.client() as client:
            asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8000, "stream": True}
            with client.stream("POST", CHAT, json=asked) as reply:
                lines = reply.iter_lines()
                while "content" not in next(lines):
                    pass
                assert [server.server.stop(), server.server.stop()] == [True, False]
                told = json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]
        assert (told["message"], told["code"]) == ("the server is shutting down", "shutting_down")
        server.wait_until(lambda: bool(server.lines))
    (line,) = server.lines
    assert line.reading is not None
    assert line.reading.tokens == line.reading.of > 1
    shown = f" · {line.reading.of} of {line.reading.of} prompt tokens read · {line.begun} tokens · the server is "
    assert line.begun > 0
    assert shown in log_line(line, "now")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_not_complete_when_the_server_ends_says_why(tiny: TinyModels, stream: bool) -> None:
    with running(lambda: tiny.load(tiny.slow, draft="none", lookup=False, context=8192)) as server:
        server.wait_until(lambda: server.service.keeper.state == "ready")
        cast("Any", server.server.config).timeout_graceful_shutdown = 0.1
        answer = server.asking("hello", max_tokens=8000, stream=stream)
        server.wait_until(lambda: bool(server.service.keeper.engine and server.service.keeper.engine.pair.answering))
        assert server.server.stop()
        reply = answer.result(WAIT_S)
        told = reply.text.strip().split("\n\n")[-1].removeprefix("data: ")
        assert json.loads(told)["error"]["code"] == "shutting_down"
        server.wait_until(lambda: bool(server.lines))
    assert reply.status_code == server.lines[0].status == (200 if stream else 503)
    assert server.lines[0].error == "the server is shutting down"


def test_a_server_that_ends_while_the_model_loads_refuses_what_waits(tiny: TinyModels) -> None:
    load = HeldLoad(lambda: tiny.load(draft="none"))
    with running(load, queue=RequestQueue(1, 5)) as server:
        answers = [server.asking("x") for _ in range(2)]
        server.wait_until(lambda: (server.service.queue.running, server.service.queue.waiting) == (1, 1))
        assert server.server.stop()
        for answer in answers:
            failed(answer.result(WAIT_S), 503)
    load.release.set()
    assert server.server.load_error is None


def test_more_requests_than_memory_holds_sessions_wait_for_one(
    slow: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = slow.service.keeper.engine
    assert engine is not None
    pool, rooms = slow.service.keeper._loaded.pool, engine.pair.pool.rooms  # type: ignore[union-attr]
    refusals, open_room = list[int](), rooms.open
    while pool._drop_oldest():  # sessions of other tests would serve
        pass

    def limited(tokens: int, *, spare: bool) -> CacheRoom:
        if used := rooms.positions:
            refusals.append(len(used))
            raise MemoryLimitError("memory is short", needed_bytes=2, available_bytes=1)
        return open_room(tokens, spare=spare)

    monkeypatch.setattr(rooms, "open", limited)
    answers = [slow.asking(text * 1500, max_tokens=2) for text in ("one ", "two ", "three ")]
    assert [answer.result(WAIT_S).status_code for answer in answers] == [200, 200, 200]
    assert refusals
    slow.wait_until(lambda: pool.in_use == 0)


class ShortMemory(SessionPool):
    """Sessions without content, as many at the same time as ``memory`` says."""

    memory = 1

    def take(self, owner: str, text: str) -> Kept:
        if self.in_use > self.memory:
            raise MemoryLimitError("memory is short", needed_bytes=2, available_bytes=1)
        return Kept(cast("Session", SimpleNamespace(close=lambda: None)), owner)

    def give(self, kept: Kept) -> None:
        pass


def test_requests_that_wait_for_memory_get_it_in_their_order(server: Running, engine: Engine) -> None:
    pool, ended = ShortMemory(engine), list[int]()

    async def ask(number: int, loaded: LoadedEngine) -> None:
        async with _session(Request(), "", loaded, RequestBudget(), KeyTurn()):
            await asyncio.sleep(0.01)
        ended.append(number)

    async def several(count: int) -> list[BaseException | None]:
        loaded = LoadedEngine(engine, pool, server.service.keeper.threads, FormCompiler())
        return await asyncio.gather(*(ask(number, loaded) for number in range(count)), return_exceptions=True)

    assert set(asyncio.run(several(12))) == {None}
    assert ended == list(range(12))
    pool.memory = 0
    found = asyncio.run(asyncio.wait_for(several(4), WAIT_S))
    assert [type(each) for each in found] == [MemoryLimitError] * 4, "no request could give memory back"


def test_a_prompt_that_memory_has_no_room_for_waits_for_the_running_answers(
    slow: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = slow.service.keeper.engine
    assert engine is not None
    loaded = slow.service.keeper._loaded  # private: no request closes what earlier tests left
    while loaded is not None and loaded.pool._drop_oldest():
        pass  # a kept conversation may have room for the prompt
    rooms, refusals = engine.pair.pool.rooms, list[int]()
    grow = rooms.grow

    def limited(room: CacheRoom, tokens: int) -> None:
        if not refusals:
            refusals.append(tokens)
            raise MemoryLimitError("memory is short", needed_bytes=2, available_bytes=1)
        grow(room, tokens)

    monkeypatch.setattr(rooms, "grow", limited)
    holding = HeldAnswer(monkeypatch)
    first = slow.asking("one", max_tokens=20)
    assert holding.come.wait(WAIT_S)
    second = slow.asking("two " * 1500, max_tokens=2)
    slow.wait_until(lambda: bool(refusals))
    assert not second.done()
    holding.release.set()
    assert second.result(WAIT_S).status_code == 200
    assert first.result(WAIT_S).status_code == 200
    monkeypatch.setattr(rooms, "grow", lambda *_: limited_always())
    refused = slow.asking("three " * 1500, max_tokens=2).result(WAIT_S)
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "memory is short"


def limited_always() -> None:
    raise MemoryLimitError("memory is short", needed_bytes=2, available_bytes=1)


def test_an_empty_message_and_a_conversation_of_the_assistants_are_answered(server: Running) -> None:
    said = {"role": "assistant", "content": "x"}
    for messages in ([{"role": "user", "content": ""}], [said, {"role": "user", "content": ""}]):
        assert server.post(messages=messages, max_tokens=1).status_code == 200


def test_a_server_that_ends_finishes_running_answers(tiny: TinyModels) -> None:
    with running(lambda: tiny.load(tiny.slow, draft="none", lookup=False, context=8192)) as server:
        answer = server.asking("hello", max_tokens=100)
        server.wait_until(lambda: server.service.queue.running == 1)
        assert server.server.stop()
        assert answer.result(WAIT_S).json()["usage"]["completion_tokens"] == 100
