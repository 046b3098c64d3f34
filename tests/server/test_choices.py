"""Several answers to one request: decoded in parallel by sessions that share the prompt, each as it is alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.errors import ConstraintError, MemoryLimitError
from edgespec.placement.cache_rooms import CacheRoom
from edgespec.runtimes.runtime import LoadedModel
from edgespec.server.answers import _Held
from edgespec.server.queue import MOST_RUNNING
from edgespec.text.conversation.answer_parts import AnswerText
from tests.engine.test_tools import TEMPLATE, tool
from tests.server.test_tools import CALL
from tests.support.http_server import WAIT_S, Running, running
from tests.support.tiny_models import TinyModels
from tests.support.watched_sequences import HeldAnswer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = [{"role": "user", "content": "hello people"}]
DRAWN = {"temperature": 1.0, "seed": 5}


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """What a stream says, without its end."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def pieces(streamed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of all chunks, in order."""
    return [choice for chunk in streamed for choice in chunk.get("choices", ())]


def said(streamed: list[dict[str, Any]]) -> dict[int, tuple[str, str | None]]:
    """Text and reason of each choice of a stream."""
    found: dict[int, tuple[str, str | None]] = {}
    for choice in pieces(streamed):
        text, reason = found.get(choice["index"], ("", None))
        more = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        assert reason is None, "nothing comes behind an end"
        found[choice["index"]] = text + more, choice["finish_reason"]
    return found


@pytest.fixture
def branched(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """The branches that were opened."""
    found, branch = list[Session](), Session.branch

    def counted(own: Session, **settings: Any) -> Session:
        found.append(branch(own, **settings))
        return found[-1]

    monkeypatch.setattr(Session, "branch", counted)
    return found


# One session for all answers. Private: no request says how many of its answers are decoded in parallel.
IN_TURN: Any = (_Held, "places", 1)


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {"messages": ASKED, "n": 2, "temperature": 0}),
    "drawn": (CHAT, {"messages": ASKED, "n": 4, **DRAWN}),
    "more than places": (CHAT, {"messages": ASKED, "n": MOST_RUNNING + 3, **DRAWN}),
    "stop texts": (CHAT, {"messages": ASKED, "n": 4, "stop": ["e", "th"], **DRAWN}),
    "log-probabilities": (CHAT, {"messages": ASKED, "n": 3, "logprobs": True, "top_logprobs": 2, **DRAWN}),
    "penalties": (CHAT, {"messages": ASKED, "n": 3, "frequency_penalty": 0.5, "min_tokens": 5, **DRAWN}),
    "a text": (COMPLETIONS, {"prompt": "one two three", "n": 4, "logprobs": 1, "echo": False, **DRAWN}),
    "one token": (COMPLETIONS, {"prompt": [5], "n": 2, **DRAWN}),
    "several texts": (COMPLETIONS, {"prompt": ["one", "two people"], "n": 3, **DRAWN}),
}


@pytest.mark.parametrize("name", BODIES)
def test_answers_in_parallel_are_those_in_turn(
    server: Running, monkeypatch: pytest.MonkeyPatch, branched: list[Session], name: str
) -> None:
    path, body = BODIES[name]
    body = {"max_tokens": 24, **body}
    with monkeypatch.context() as patch:
        patch.setattr(*IN_TURN)
        expected = server.post(path, **body).json()
    assert not branched
    found = server.post(path, **body).json()
    prompts = len(body["prompt"]) if name == "several texts" else 1
    assert len(branched) == prompts * (min(body["n"], MOST_RUNNING) - 1)
    assert found["choices"] == expected["choices"]
    assert found["seed"] == expected["seed"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][count] == expected["usage"][count]
    streamed = said(chunks(server.post(path, **body, stream=True)))
    texts = [each["text"] if "text" in each else each["message"]["content"] for each in found["choices"]]
    assert streamed == {
        index: (text, choice["finish_reason"])
        for index, (text, choice) in enumerate(zip(texts, found["choices"], strict=True))
    }
    assert all(branch.closed for branch in branched)


def test_each_answer_is_that_of_its_seed_alone(server: Running) -> None:
    body = {"max_tokens": 16, "temperature": 1.0}
    several = server.post(messages=ASKED, n=3, seed=7, **body).json()
    alone = [server.post(messages=ASKED, seed=7 + index, **body).json() for index in range(3)]
    assert [each["message"] for each in several["choices"]] == [each["choices"][0]["message"] for each in alone]
    assert len({each["message"]["content"] for each in several["choices"]}) == 3


def test_some_answers_end_early_and_the_others_continue(server: Running) -> None:
    body = {"max_tokens": 40, "n": 4, **DRAWN}
    whole = [each["message"]["content"] for each in server.post(messages=ASKED, **body).json()["choices"]]
    counts = Counter(letter for text in whole for letter in set(text))
    stop = next(letter for letter, count in counts.most_common() if count in (1, 2, 3))
    found = server.post(messages=ASKED, stop=[stop], **body).json()["choices"]
    assert {each["finish_reason"] for each in found} == {"stop", "length"}
    assert [each["message"]["content"] for each in found] == [text.split(stop)[0] for text in whole]


def test_the_prompt_is_read_once_and_counted_once(tiny: TinyModels) -> None:
    asked = [{"role": "user", "content": "hello " * 60}]
    with running(lambda: tiny.load(draft="none", lookup=False, context=1024)) as server:
        found = server.post(messages=asked, n=3, max_tokens=8, **DRAWN).json()
        prompt = found["usage"]["prompt_tokens"]
        assert prompt > 60
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert found["usage"]["completion_tokens"] == 24
        assert found["timings"]["prompt_n"] == prompt
        assert found["timings"]["prompt_ms"] > 0
        server.wait_until(lambda: bool(server.lines))
        assert [done.stats.cached_tokens for done in server.lines[-1].answers] == [0, prompt - 1, prompt - 1]
        again = server.post(messages=asked, n=3, max_tokens=8, **DRAWN).json()
        assert again["choices"] == found["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt - 1
        body = {"messages": [{"role": "user", "content": "again " * 60}], "max_tokens": 4, "stream": True}
        progress = chunks(server.post(**body, n=2, return_progress=True))
        assert {each["choices"][0]["index"] for each in progress if "prompt_progress" in each} == {0}


def test_the_answers_of_a_stream_come_beside_one_another(slow: Running) -> None:
    response = slow.post(messages=ASKED, n=3, max_tokens=200, stream=True, **DRAWN)
    found = pieces(chunks(response))
    first_end = next(at for at, each in enumerate(found) if each["finish_reason"] is not None)
    assert {each["index"] for each in found[:first_end] if each["delta"].get("content")} == {0, 1, 2}


def test_each_answer_has_its_own_calls(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    said_by = dict[AnswerText, Iterator[str]]()

    def scripted(own: AnswerText, token: int, held: int = 0) -> tuple[str, bool]:
        own_chunks = said_by.setdefault(own, iter(["Well. ", CALL[:20], CALL[20:]]))
        chunk = next(own_chunks)
        return chunk, chunk.endswith(CALL[20:])

    monkeypatch.setattr(AnswerText, "feed", scripted)
    body = {"messages": ASKED, "tools": [tool()], "n": 3, "max_tokens": 20, **DRAWN}
    with running(lambda: tiny.load(tiny.with_template("tools", TEMPLATE), draft="none", depth=0)) as server:
        choices = server.post(**body).json()["choices"]
        found = pieces(chunks(server.post(**body, stream=True)))
    assert len(said_by) == 6
    assert [each["finish_reason"] for each in choices] == ["tool_calls"] * 3
    calls = [each["message"]["tool_calls"] for each in choices]
    assert [call["function"]["name"] for (call,) in calls] == ["weather"] * 3
    for index in range(3):
        deltas = [each["delta"] for each in found if each["index"] == index]
        (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


def open_sessions(engine: Engine) -> int:
    return sum(not session.closed for session in [*engine.pair.sessions])


def engine_of(server: Running) -> Engine:
    engine = server.service.keeper.engine
    assert engine is not None
    return engine


def test_a_client_that_leaves_ends_all_its_answers(slow: Running, branched: list[Session]) -> None:
    engine, keeper = engine_of(slow), slow.service.keeper
    with slow.connect() as own:
        slow.send_chat(own, "hello", n=3, max_tokens=4000, stream=True)
        slow.wait_until(lambda: len(branched) == 2 and all(branch.answering for branch in branched))
    slow.wait_until(lambda: slow.service.queue.running == 0 and all(branch.closed for branch in branched))
    slow.wait_until(lambda: open_sessions(engine) == keeper.kept_sessions and not engine.pair.answering)
    loaded = keeper._loaded  # private: its users are counted nowhere else
    assert loaded is not None
    slow.wait_until(lambda: loaded.pool.in_use == 0)
    assert slow.chat("hello", max_tokens=2, n=2).status_code == 200


def test_a_client_that_leaves_while_the_prompt_is_read_opens_no_branch(
    slow: Running, branched: list[Session]
) -> None:
    with slow.connect() as own:
        slow.send_chat(own, "two " * 1500, n=3, max_tokens=20)
        slow.wait_until(lambda: engine_of(slow).pair.answering)
    slow.wait_until(lambda: slow.service.queue.running == 0 and not engine_of(slow).pair.answering)
    assert not branched


@pytest.fixture
def one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answer that gets a token fails at its fourth."""
    feed, fed = AnswerText.feed, Counter[AnswerText]()

    def failing(own: AnswerText, token: int, held: int = 0) -> tuple[str, bool]:
        fed[own] += 1
        if fed[own] == 4 and [*fed].index(own) == 1:
            raise ConstraintError("it broke here")
        return feed(own, token, held)

    monkeypatch.setattr(AnswerText, "feed", failing)


@pytest.mark.usefixtures("one_fails")
def test_an_answer_that_fails_leaves_the_others_their_end(server: Running, branched: list[Session]) -> None:
    response = server.post(messages=ASKED, n=3, max_tokens=20, stream=True, **DRAWN)
    streamed = chunks(response)
    *_, failed, last = streamed
    assert (last["error"]["message"], last.keys()) == ("it broke here", {"error"})
    assert Counter(reason for _, reason in said(streamed).values()) == {"length": 2, "error": 1}
    ended = {each["index"] for each in failed["choices"]}
    assert ended == {index for index, (_, reason) in said(streamed).items() if reason == "error"}
    server.wait_until(lambda: all(branch.closed for branch in branched))


@pytest.mark.usefixtures("one_fails")
def test_a_whole_reply_with_an_answer_that_fails_is_its_error(server: Running, branched: list[Session]) -> None:
    response = server.post(messages=ASKED, n=3, max_tokens=20, **DRAWN)
    assert response.status_code >= 400
    assert response.json()["error"]["message"] == "it broke here"
    server.wait_until(lambda: all(branch.closed for branch in branched))


def test_without_spare_memory_answers_come_in_turn(
    server: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch, branched: list[Session]
) -> None:
    body = {"messages": ASKED, "n": 4, "max_tokens": 12, **DRAWN}
    expected = server.post(**body).json()["choices"]
    rooms, asked, fit = engine.pair.pool.rooms, list[int](), [0]
    open_room = rooms.open

    def limited(tokens: int, *, spare: bool = False) -> CacheRoom:
        if spare:
            asked.append(tokens)
            if len(asked) > fit[0]:
                raise MemoryLimitError("memory is short", needed_bytes=2, available_bytes=1)
        return open_room(tokens, spare=spare)

    monkeypatch.setattr(rooms, "open", limited)
    for fit[0] in (0, 1):
        branched.clear()
        asked.clear()
        found = server.post(**body).json()
        assert found["choices"] == expected
        assert len(branched) == fit[0]
        assert asked == [found["usage"]["prompt_tokens"] + 12] * (fit[0] + 1)


class WithoutForks:
    """A model whose runtime does not copy caches."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.facts = replace(model.facts, can_fork=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_caches_that_cannot_be_copied_are_not(
    server: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch, branched: list[Session]
) -> None:
    body = {"messages": ASKED, "n": 3, "max_tokens": 12, **DRAWN}
    expected = server.post(**body).json()["choices"]
    branched.clear()
    monkeypatch.setattr(engine.pair, "target", WithoutForks(engine.pair.target))
    assert server.post(**body).json()["choices"] == expected
    assert not branched


def test_answers_of_other_requests_take_places(
    slow: Running, branched: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = HeldAnswer(monkeypatch)
    first = slow.asking("hello", max_tokens=20)
    assert holding.come.wait(WAIT_S)
    assert slow.chat("people", n=MOST_RUNNING, max_tokens=3).status_code == 200
    assert len(branched) == MOST_RUNNING - 2
    holding.release.set()
    assert first.result(WAIT_S).status_code == 200
