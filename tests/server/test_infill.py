"""Editors: /infill, completions with a suffix, several prompts, and the newest request for one place."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from edgespec.engine.engine import Engine
from edgespec.text.conversation import conversation
from edgespec.text.conversation.hole import hole_tokens
from tests.server.test_http import events, failed
from tests.support.http_server import WAIT_S, Running, running
from tests.support.tiny_models import TinyModels, answer

BEFORE, AFTER = "one two three\nfour five six\n", "\nseven eight"
FILES = [{"filename": "a.py", "text": "the people of the world\n"}, {"filename": "b.py", "text": "one two\n"}]
BODY: dict[str, Any] = {"input_prefix": BEFORE, "input_suffix": AFTER, "input_extra": FILES, "n_predict": 24}


@pytest.fixture(scope="module")
def server(tiny: TinyModels) -> Iterator[Running]:
    with running(lambda: tiny.load(tiny.filling, draft="none", depth=3, lookup=True)) as found:
        found.wait_until(lambda: found.service.keeper.state == "ready")
        yield found


@pytest.fixture(scope="module")
def slow(tiny: TinyModels) -> Iterator[Running]:
    with running(lambda: tiny.load(tiny.slow_filling, draft="none", lookup=False, context=2048)) as found:
        found.wait_until(lambda: found.service.keeper.state == "ready")
        yield found


def filled(engine: Engine, before: str, after: str, **settings: Any) -> str:
    with engine.session() as session:
        return answer(session.generate(before, suffix=after, **settings)).text


def infill(server: Running, **body: Any) -> dict[str, Any]:
    response = server.post("/infill", **{**BODY, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def asking(server: Running, path: str, agent: str = "editor", **body: Any) -> Future[httpx.Response]:
    def post() -> httpx.Response:
        with server.client(headers={"user-agent": agent}) as client:
            return client.post(path, json=body)

    return ThreadPoolExecutor(1).submit(post)


# -------------------------------------------------------------------------------------------------- what is answered


def test_infill_gives_the_text_of_a_session_in_llama_cpps_shape(server: Running, engine: Engine) -> None:
    expected = filled(
        engine, BEFORE, AFTER, files=[(each["filename"], each["text"]) for each in FILES], max_tokens=24
    )
    reply = infill(server)
    assert reply["content"] == expected
    assert (reply["stop"], reply["stop_type"], reply["truncated"]) == (True, "limit", False)
    assert reply["tokens_predicted"] == reply["timings"]["predicted_n"] == 24
    assert reply["tokens_evaluated"] > 0
    assert infill(server, input_prefix=BEFORE[:-5], prompt=BEFORE[-5:])["content"] == expected
    stop = expected[len(expected) // 2 :][:3]
    ended = infill(server, stop=[stop])
    assert ended["content"] == expected[: expected.index(stop)]
    assert (ended["stop_type"], ended["stopping_word"], reply["stopping_word"]) == ("word", stop, "")


def test_infill_is_streamed_as_llama_cpp_does(server: Running) -> None:
    whole = infill(server)
    response = server.post("/infill", **BODY, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    sent = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    assert "".join(each["content"] for each in sent) == whole["content"]
    assert [each["stop"] for each in sent] == [False] * (len(sent) - 1) + [True]
    assert sent[-1]["tokens_predicted"] == 24
    assert sent[-1]["has_new_line"] is whole["has_new_line"] is ("\n" in whole["content"])


def test_what_llama_vim_sends_is_answered_as_it_reads_it(server: Running) -> None:
    fields = ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached", "nothing"]
    own = {"id_slot": 0, "n_indent": 0, "top_k": 40, "top_p": 0.9, "cache_prompt": True, "t_max_prompt_ms": 500}
    more = {"samplers": ["top_k", "top_p", "infill"], "t_max_predict_ms": 60_000, "response_fields": fields}
    reply = infill(server, **own, **more)
    assert reply.keys() == {*fields} - {"nothing"}
    assert reply["timings/predicted_n"] == 24
    ahead = {"n_predict": 0, "samplers": [], "response_fields": [""], "prompt": ""}
    assert infill(server, **own, **{**more, **ahead}) == {}
    reply = infill(server, **own, n_predict=0)
    assert (reply["content"], reply["tokens_predicted"], reply["generation_settings"]["n_predict"]) == ("", 0, 0)
    assert infill(server)["timings"]["prompt_n"] == 1, "the rest was read ahead"


def test_what_llama_vim_sends_to_the_chat_is_read_ahead_and_answered(server: Running) -> None:
    own: dict[str, Any] = {"id_slot": 0, "messages": [{"role": "user", "content": "one two"}], "cache_prompt": True}
    ahead = {"samplers": [], "n_predict": 0, "response_fields": [""]}
    reply = server.post(**own, **ahead).json()
    assert (reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"]) == ("", 0)
    several = server.post("/v1/completions", prompt=["one tw", "two"], n=2, **ahead).json()
    assert [each["text"] for each in several["choices"]] == [""] * 4
    drawn = {"min_p": 0.1, "temperature": 0.1, "samplers": ["min_p", "temperature"], "seed": 5, "max_tokens": 8}
    streamed = events(server.post(**own, **drawn, stream=True))
    assert streamed[-1]["timings"]["prompt_n"] == 1, "the rest was read ahead"
    text = "".join(each["choices"][0]["delta"].get("content", "") for each in streamed)
    named = {"min_p": 0.1, "temperature": 0.1, "top_k": 0, "top_p": 1, "seed": 5, "max_tokens": 8}
    assert text == server.post(**own, **named).json()["choices"][0]["message"]["content"]


def test_a_suggestion_is_the_likeliest_text_unless_it_is_drawn(server: Running) -> None:
    assert infill(server)["content"] == infill(server)["content"]
    assert infill(server, temperature=1.5, seed=3)["content"] != infill(server)["content"]


def test_a_completion_with_a_suffix_fills_the_hole(server: Running, engine: Engine) -> None:
    expected = filled(engine, BEFORE, AFTER, max_tokens=16)
    body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 16, "temperature": 0}
    reply = server.post("/v1/completions", **body).json()
    assert reply["choices"][0]["text"] == expected
    streamed = events(server.post("/v1/completions", **body, stream=True))
    assert "".join(each["choices"][0]["text"] for each in streamed) == expected
    plain = server.post("/v1/completions", **{**body, "suffix": ""}).json()
    assert plain["choices"][0]["text"] != expected
    echoed = server.post("/v1/completions", **body, echo=True).json()
    assert echoed["choices"][0]["text"] == BEFORE + expected


def test_several_answers_between_two_texts_have_the_prompt_that_is_read_before_them(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = list[int]()

    def watched(tokenizer: Any, hole: Any, room: int, budget: Any) -> list[int]:
        rooms.append(room)
        return hole_tokens(tokenizer, hole, room, budget)

    monkeypatch.setattr(conversation, "hole_tokens", watched)
    body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 16, "n": 2}
    assert len(server.post("/v1/completions", **body).json()["choices"]) == 2
    assert len(rooms) == 3
    assert len(set(rooms)) == 1


def test_openais_client_fills_holes_and_asks_for_several_prompts(server: Running, engine: Engine) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        ask = client.completions.create
        found = ask(model="tiny", prompt=BEFORE, suffix=AFTER, max_tokens=16, temperature=0)
        assert found.choices[0].text == filled(engine, BEFORE, AFTER, max_tokens=16)
        two = ask(model="tiny", prompt=["one", engine.tokenizer.encode("two")], max_tokens=4, temperature=0)
        assert [choice.index for choice in two.choices] == [0, 1]


def test_several_prompts_have_a_choice_each(server: Running, engine: Engine) -> None:
    tokens = engine.tokenizer.encode("one two", add_bos=True)
    prompts: list[Any] = ["the people", tokens, "one two"]
    body = {"max_tokens": 8, "temperature": 0}
    alone = [server.post("/v1/completions", prompt=each, **body).json() for each in prompts]
    texts = [each["choices"][0]["text"] for each in alone]
    assert texts[1] == texts[2] != texts[0]
    reply = server.post("/v1/completions", prompt=prompts, n=2, **body).json()
    assert [each["text"] for each in reply["choices"]] == [text for text in texts for _ in range(2)]
    assert [each["index"] for each in reply["choices"]] == list(range(6))
    assert reply["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)
    assert reply["usage"]["completion_tokens"] == 48
    streamed = events(server.post("/v1/completions", prompt=prompts, stream=True, **body))
    for index, text in enumerate(texts):
        own = [each["choices"][0] for each in streamed if each["choices"][0]["index"] == index]
        assert "".join(each["text"] for each in own) == text
    failed(server.post("/v1/completions", prompt=[10**6], **body), 400)


def test_a_model_without_the_tokens_is_refused_in_words(tiny: TinyModels) -> None:
    with running(lambda: tiny.load(draft="none")) as found:
        for path, body in (("/infill", BODY), ("/v1/completions", {"prompt": "a", "suffix": "b"})):
            error = failed(found.post(path, **body), 400)
            assert "cannot fill in the middle" in error["message"]


def test_what_is_typed_on_is_read_from_the_cache(server: Running) -> None:
    before = "".join(f"the people of the world {number}\n" for number in range(40))
    first = infill(server, input_prefix=before + "on", n_predict=4)
    second = infill(server, input_prefix=before + "one", n_predict=4)
    assert second["timings"]["prompt_n"] < first["timings"]["prompt_n"] // 10
    assert second["content"] == infill(server, input_prefix=before + "one", n_predict=4)["content"]


# -------------------------------------------------------------------------------------------- a newer request


LONG = "".join(f"the people of the world {number}\n" for number in range(60))


def test_a_newer_request_for_the_same_place_replaces_the_older_one(slow: Running) -> None:
    for path, named in (("/infill", ("input_prefix", "input_suffix")), ("/v1/completions", ("prompt", "suffix"))):
        before = path + LONG

        def body(typed: str, named: tuple[str, str] = named, before: str = before) -> dict[str, Any]:
            return {named[0]: before + typed, named[1]: AFTER, "max_tokens": 400, "temperature": 0}

        older = asking(slow, path, **body("o"))
        slow.wait_until(lambda: slow.service.queue.running == 1)
        newer = asking(slow, path, **{**body("on"), "max_tokens": 4})
        error = failed(older.result(WAIT_S), 409)
        assert error["code"] == "replaced"
        assert newer.result(WAIT_S).status_code == 200
        again = slow.post(path, **{**body("one"), "max_tokens": 2}).json()
        read = again["timings"]["prompt_n"]
        assert read < 60, "one session goes from each request to the next"


def test_requests_of_others_and_for_other_places_are_not_replaced(slow: Running) -> None:
    def body(before: str, after: str = AFTER) -> dict[str, Any]:
        return {"input_prefix": before, "input_suffix": after, "max_tokens": 60}

    asked = [
        asking(slow, "/infill", **body(LONG + "o")),
        asking(slow, "/infill", **body(LONG + "o")),  # the same: another answer to it
        asking(slow, "/infill", agent="another editor", **body(LONG + "on")),
        asking(slow, "/infill", **body("other file\n" + LONG + "on", "\nother")),
    ]
    assert [each.result(WAIT_S).status_code for each in asked] == [200] * 4


def test_a_client_that_leaves_and_asks_again_finds_its_session(slow: Running) -> None:
    before = "left\n" + LONG
    body = {"input_suffix": AFTER, "max_tokens": 400}
    slow.post("/infill", input_prefix=before, **{**body, "max_tokens": 1})
    with slow.client(
        headers={"user-agent": "editor"},
    ) as client:
        with client.stream(
            "POST", "/infill", json={**body, "input_prefix": before + "o", "stream": True}
        ) as response:
            next(response.iter_lines())
        again = client.post("/infill", json={**body, "input_prefix": before + "on", "max_tokens": 2}).json()
    assert again["timings"]["prompt_n"] < 60


def test_a_model_that_is_freed_behind_a_suggestion_leaves_nothing(tiny: TinyModels) -> None:
    with running(lambda: tiny.load(tiny.filling, draft="none", depth=0, lookup=False)) as server:
        infill(server, n_predict=2)
        engine = server.service.keeper.engine
        assert engine is not None
        pair = weakref.ref(engine.pair)
        del engine
        server.post("/api/generate", model="tiny", keep_alive=0)

        def is_freed() -> bool:
            gc.collect()
            return pair() is None

        server.wait_until(is_freed)
