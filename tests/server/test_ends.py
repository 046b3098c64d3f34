"""Where an answer ends, and words that it may not have, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http_server import Running, running
from tests.support.scripted_gguf import write_scripted_gguf
from tests.support.tiny_models import TinyModels


@pytest.fixture(scope="module")
def says_hello(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model says "Hello there!"."""
    script = ["Hello", " there", "!", "<|im_end|>"]
    path = write_scripted_gguf(tmp_path_factory.mktemp("ends") / "hello.gguf", script)
    with running(lambda: tiny.load(path, draft=str(path), depth=2)) as server:
        server.wait_until(lambda: server.service.keeper.state == "ready")
        yield server


def token(server: Running, text: str) -> int:
    engine = server.service.keeper.engine
    assert engine is not None
    (found,) = engine.tokenizer.encode(text)
    return found


def choice(server: Running, **body: Any) -> tuple[str, str]:
    reply = server.chat("Hi", temperature=0, max_tokens=12, **body).json()
    first = reply["choices"][0]
    return first["message"]["content"], first["finish_reason"]


def test_a_chat_ends_at_a_stop_token_and_the_token_is_not_told(says_hello: Running) -> None:
    assert choice(says_hello) == ("Hello there!", "stop")
    there = token(says_hello, " there")
    assert choice(says_hello, stop_token_ids=[there]) == ("Hello", "stop")
    body = {"prompt": "x", "stop_token_ids": [there], "logprobs": 0, "temperature": 0}
    (first,) = says_hello.post("/v1/completions", **body).json()["choices"]
    assert (first["text"], first["finish_reason"]) == ("Hello", "stop")
    assert first["logprobs"]["tokens"] == ["Hello"]


def test_a_chat_continues_beyond_ends_that_may_not_come(says_hello: Running) -> None:
    ignoring, reason = choice(says_hello, ignore_eos=True)
    assert (ignoring.startswith("Hello there!"), reason) == (True, "length")
    reply = says_hello.chat("Hi", temperature=0, max_tokens=12, min_tokens=10).json()
    assert reply["usage"]["completion_tokens"] > 10
    assert choice(says_hello, min_tokens=2, stop=["there"]) == ("Hello there!", "stop")
    assert choice(says_hello, min_tokens=1, stop=["there"]) == ("Hello ", "stop")
    assert choice(says_hello, ignore_eos=False, min_tokens=0, stop_token_ids=[]) == ("Hello there!", "stop")


def test_a_banned_word_is_never_written(says_hello: Running) -> None:
    def words(**body: Any) -> list[str]:
        reply = says_hello.post("/v1/completions", prompt="x", temperature=0, max_tokens=8, logprobs=0, **body)
        found: list[str] = reply.json()["choices"][0]["logprobs"]["tokens"]
        return found

    assert words() == ["Hello", " there", "!"]
    for way in (
        {"bad_words": ["!", "Hello"]},
        {"logit_bias": {str(token(says_hello, each)): False for each in ("!", "Hello")}},
    ):
        found = words(**way)
        assert len(found) == 8
        assert not {"!", "Hello"}.intersection(found)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"bad_words": ["Hello", "Hello there"]}, "bad_words", "unsupported_parameter"),
        ({"bad_words": ["x" * 10**5]}, "bad_words", "unsupported_parameter"),
        ({"bad_words": "Hello"}, "bad_words", None),
        ({"min_tokens": 13}, "min_tokens", None),
        ({"min_tokens": -1}, "min_tokens", None),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", None),
        ({"stop_token_ids": ["x"]}, "stop_token_ids", None),
        ({"ignore_eos": "yes"}, "ignore_eos", None),
        ({"logit_bias": {"1": True}}, "logit_bias", None),
    ],
)
def test_wrong_ends_and_words_are_refused_by_name(
    says_hello: Running, body: dict[str, Any], param: str, code: str | None
) -> None:
    refused = says_hello.chat("Hi", max_tokens=12, n=2, stream=True, **body)
    assert refused.status_code == 400, "before anything is read, also for several answers"
    reply = says_hello.chat("Hi", max_tokens=12, **body)
    error = reply.json()["error"]
    assert refused.json()["error"] == error
    assert (reply.status_code, error["param"], error["code"]) == (400, param, code)
    assert (
        param.replace("_", " ") in error["message"] or param in error["message"] or "banned word" in error["message"]
    )
