"""Answers as JSON: thinking separated, usage, timings, the log's line, counters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, cast

import pytest
from hypothesis import example, given, strategies as st
from starlette.responses import JSONResponse

from edgespec.cli.serve import log_line
from edgespec.decoding.round_base import DecodeStats
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Reading
from edgespec.errors import (
    ClosedError,
    EdgespecError,
    ForwardError,
    InvalidRequestError,
    PromptTooLongError,
)
from edgespec.server.answers import Part, ScoredToken, TokenScores, sampling_for, with_usual_window, without_words
from edgespec.server.errors import ApiError, api_error
from edgespec.server.faces.face import Head, Stretch
from edgespec.server.faces.openai import CHAT, COMPLETION, read_chat, usage
from edgespec.server.metrics import Metrics
from edgespec.server.replies import as_json, fingerprint, json_pieces, timings
from edgespec.server.schema import Request
from edgespec.server.service import RequestLine
from edgespec.server.streaming import PART_BYTES, send_reply
from edgespec.server.threads import Threads
from tests.support.faces import collected
from tests.support.tiny_models import TinyModels

HEAD = Head(id="x", created=1, model="tiny", fingerprint="f")


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load(draft="none") as engine:
        yield engine


def test_a_request_changes_the_models_own_sampling_where_it_says_so() -> None:
    usual = Sampling(temperature=0.7, top_p=0.8, rule="keyed")
    request = Request(sampling={"temperature": 0.1}, seed=2**64 - 1)
    assert sampling_for(usual, request, 0) == Sampling(temperature=0.1, top_p=0.8, seed=2**64 - 1)
    assert sampling_for(usual, request, 1).seed == 0
    assert sampling_for(usual, Request(), 3) == usual
    with pytest.raises(InvalidRequestError):
        sampling_for(usual, Request(sampling={"top_p": 7.0}), 0)


def test_a_banned_word_has_a_token_with_and_without_a_blank_before_it(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    found = without_words(Sampling(logit_bias={7: 1.0}), ["the", " of"], tokenizer)
    words = {token: tokenizer.token_bytes(token) for token, own in dict(found.logit_bias).items() if own == -100}
    assert {word.strip() for word in words.values()} == {b"the", b"of"}
    assert words[tokenizer.encode("a the")[-1]] == b" the"
    assert dict(found.logit_bias)[7] == 1.0
    assert without_words(found, [], tokenizer) is found
    with pytest.raises(ApiError, match="not one token of the model, such as 'a the', is not supported"):
        without_words(Sampling(), ["the", "a the"], tokenizer)


def done_of(engine: Engine, **stats: object) -> Done:
    return Done(
        finish_reason="stop",
        text="x",
        token_ids=(),
        stats=DecodeStats(**stats),  # type: ignore[arg-type]
        plan=engine.plan,
        sampling=Sampling(temperature=1.0, seed=5),
        plain_tokens_per_s=40.0,
    )


# Of two answers that are as the one below.
PREDICTED = {"predicted_n": 22, "predicted_ms": 400.0, "draft_n": 18, "draft_n_accepted": 12}


def test_usage_and_timings_have_the_names_that_clients_know(engine: Engine) -> None:
    done = done_of(
        engine,
        prompt_tokens=20,
        cached_tokens=12,
        emitted_tokens=11,
        reasoning_tokens=2,
        proposed=9,
        accepted=6,
        ttft_s=0.5,
        decode_s=0.2,
    )
    assert usage([done], 1) == {
        "prompt_tokens": 20,
        "completion_tokens": 11,
        "total_tokens": 31,
        "prompt_tokens_details": {"cached_tokens": 12},
        "completion_tokens_details": {
            "reasoning_tokens": 2,
            "accepted_prediction_tokens": 6,
            "rejected_prediction_tokens": 3,
        },
    }
    assert timings([done]) == {
        "cache_n": 12,
        "prompt_n": 8,
        "prompt_ms": 500.0,
        "prompt_per_second": 16.0,
        "predicted_n": 11,
        "predicted_ms": 200.0,
        "predicted_per_second": 50.0,
        "draft_n": 9,
        "draft_n_accepted": 6,
        "plain_per_second": 40.0,
    }
    assert timings([done, done], 2) == {**timings([done]), **PREDICTED}
    prompts = {"cache_n": 24, "prompt_n": 16, "prompt_ms": 1000.0}
    assert timings([done, done], 1) == {**timings([done]), **PREDICTED, **prompts}
    assert usage([done, done], 2)["prompt_tokens"] == 20
    assert usage([done, done], 1)["prompt_tokens"] == 40, "two prompts"
    reply = CHAT.whole(Request(), HEAD, [[Stretch(Part("a", "hm"))]], [done])
    assert reply["choices"][0]["message"] == {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "reasoning_content": "hm",
    }
    assert (reply["seed"], reply["choices"][0]["finish_reason"]) == (5, "stop")
    nothing = timings([done_of(engine)])
    assert nothing["prompt_ms"] is nothing["predicted_per_second"] is None


def test_tokens_that_are_parts_of_a_character_have_names_and_places(engine: Engine) -> None:
    scores = TokenScores(engine.tokenizer)
    parts = [
        Part(tokens=(scores._scored(data, -1.0, ((data, -1.0),)),)) for data in (b"a", b"\xf0\x9f", b"\x98\x83", b"b")
    ]
    (choice,) = _read(_whole(engine, parts, is_chat=False))["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x83", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert [list(each) for each in logprobs["top_logprobs"]] == [[name] for name in logprobs["tokens"]]


def test_the_likeliest_tokens_of_a_completion_include_the_answers_own(engine: Engine) -> None:
    scores = TokenScores(engine.tokenizer)
    parts = [Part(tokens=(scores._scored(b"a", -2.0, top),)) for top in ((), ((b"b", -0.5),), ((b"a", -2.0),))]
    (choice,) = _read(_whole(engine, parts, is_chat=False))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -2.0}, {"b": -0.5, "a": -2.0}, {"a": -2.0}]


def test_the_tokens_that_penalties_look_at_are_those_of_the_request_or_of_the_model() -> None:
    usual = Sampling(repeat_penalty=1.1, repeat_last_n=64)
    assert sampling_for(usual, Request(sampling={"repeat_penalty": 1.5}), 0).repeat_last_n == 64
    assert sampling_for(usual, Request(sampling={"repeat_last_n": 0}), 0).repeat_last_n == 0


@pytest.mark.parametrize(
    ("given", "stated", "last"),
    [
        ({"options": {"repeat_penalty": 1.1}}, None, 64),
        ({"repeat_penalty": 1.1}, None, 64),
        ({"repeat_penalty": 1.1}, 9, 9),
        ({"repeat_penalty": 1.1}, -1, -1),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, None, -1),
        ({"repeat_penalty": 1.0, "presence_penalty": 0.5}, None, -1),
        ({"options": {"repeat_penalty": 1}}, None, -1),
        ({"repetition_penalty": 1.1}, None, -1),
        ({"repetition_penalty": 1.1}, 9, 9),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.0}, None, -1),
    ],
)
def test_a_penalty_of_llama_cpp_and_ollama_looks_at_the_last_64_tokens(
    given: dict[str, Any], stated: int | None, last: int
) -> None:
    request = read_chat({"messages": [{"role": "user", "content": "hi"}], **given})
    own: dict[str, Any] = {} if stated is None else {"repeat_last_n": stated}
    usual = with_usual_window(Sampling(**own), own, request)
    assert sampling_for(usual, request, 0).repeat_last_n == last


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(-9.0, 9.0) | st.text(max_size=5),
        lambda own: st.lists(own, max_size=3) | st.dictionaries(st.text(max_size=5), own, max_size=3),
        max_leaves=8,
    )
)
@example("a\x85b\u2028c\u2029d")
def test_json_in_pieces_is_that_of_the_whole_value_in_one_line(value: object) -> None:
    expected = as_json(value)
    assert json.loads(expected) == json.loads(JSONResponse(value).body)
    assert expected.decode().splitlines() == [expected.decode()]
    assert b"".join(json_pieces(value)) == expected
    assert b"".join(json_pieces([expected, {"a": expected}])) == as_json([value, {"a": value}])
    assert b"".join(json_pieces("\ud83d")) == b'"?"', "half of an emoji"


def _whole(engine: Engine, parts: list[Part], *, is_chat: bool) -> dict[str, Any]:
    """The reply with one answer of these parts."""
    face = CHAT if is_chat else COMPLETION
    done = done_of(engine)
    return face.whole(Request(), HEAD, collected(face, parts, done), [done])


def _read(reply: dict[str, Any]) -> Any:
    return json.loads(b"".join(json_pieces(reply)))


class _Counted:
    """Threads that run what they get here, and count it."""

    def __init__(self) -> None:
        self.runs = 0

    async def run(self, work: Callable[[], Any]) -> Any:
        self.runs += 1
        return work()


def _sent(reply: dict[str, Any]) -> tuple[list[MutableMapping[str, Any]], int]:
    """What is sent of a reply, and how often the threads were used."""
    sent, threads = list[MutableMapping[str, Any]](), _Counted()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(send_reply(send, reply, cast("Threads", threads)))
    return sent, threads.runs


def test_a_small_reply_is_one_part_with_a_length() -> None:
    (start, body), runs = _sent({"a": [1, b"2"]})
    assert body == {"type": "http.response.body", "body": b'{"a":[1,2]}', "more_body": False}
    assert dict(start["headers"])[b"content-length"] == b"11"
    assert runs == 0


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_large_reply_is_made_and_sent_in_parts(engine: Engine, is_chat: bool) -> None:
    top = tuple((b" token%d" % number, -1.23456789 * number) for number in range(20))
    tokens = [Part("x", "", (ScoredToken(b" token", number, -0.1, top),)) for number in range(1000)]
    (start, *parts), runs = _sent(_whole(engine, tokens, is_chat=is_chat))
    assert b"content-length" not in dict(start["headers"])
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert max(len(part["body"]) for part in parts) < PART_BYTES + 4000
    assert runs == len(parts) - 1 > 5
    (choice,) = json.loads(b"".join(part["body"] for part in parts))["choices"]
    assert len(choice["logprobs"]["content" if is_chat else "tokens"]) == 1000


def test_a_fingerprint_depends_on_the_model(engine: Engine, tiny: TinyModels) -> None:
    with tiny.load(tiny.ending, draft="none") as other:
        assert fingerprint(other.plan) != fingerprint(engine.plan) == fingerprint(engine.plan)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (PromptTooLongError("long"), 400, "invalid_request_error"),
        (InvalidRequestError("wrong", hint="right"), 400, "invalid_request_error"),
        (ClosedError("closed"), 503, "server_error"),
        (ForwardError("broke"), 500, "server_error"),
        (EdgespecError("any"), 500, "server_error"),
    ],
)
def test_the_engines_errors_have_a_status(error: EdgespecError, status: int, kind: str) -> None:
    found = api_error(error)
    assert (found.status, found.as_json()["error"]["type"]) == (status, kind)
    assert error.message in found.message
    assert (error.hint or "") in found.message
    assert (b"retry-after", b"2") in found.headers() or status != 503


def test_other_statuses_have_openais_types() -> None:
    kinds = {status: ApiError("x", status=status).type for status in (401, 403, 404, 429, 504)}
    assert kinds == {
        401: "authentication_error",
        403: "permission_error",
        404: "invalid_request_error",
        429: "rate_limit_error",
        504: "server_error",
    }
    once, statuses = (b"x-should-retry", b"false"), (400, 409, 429, 500, 501, 503, 504)
    assert [each for each in statuses if once in ApiError("x", status=each).headers()] == [409, 501, 504]
    assert ApiError("x").as_json() == {
        "error": {"message": "x", "type": "invalid_request_error", "param": None, "code": None}
    }


def test_the_line_of_a_log_has_numbers_and_no_control_characters(engine: Engine) -> None:
    done = done_of(
        engine, prompt_tokens=20, cached_tokens=12, emitted_tokens=11, proposed=9, accepted=6, decode_s=0.2
    )
    line = RequestLine(client="::1", method="POST", path="/v1/x", status=200, seconds=1.234, answers=(done,))
    assert log_line(line, "12:00:00") == (
        "12:00:00 ::1 POST /v1/x 200 1.23 s · 12 of 20 prompt tokens cached · 11 tokens, 50.0 tok/s"
        " · 6 of 9 guesses right"
    )
    left = RequestLine(
        client="::1",
        method="POST",
        path="/v1/x",
        status=0,
        seconds=2,
        reading=Reading(512, 7213),
        error="the client left",
    )
    assert log_line(left, "now") == "now ::1 POST /v1/x - 2.00 s · 512 of 7213 prompt tokens read · the client left"
    hostile = RequestLine(client="?", method="GET", path="/\x1b[2J\n" + "x" * 200, status=0, seconds=0, error="a\rb")
    shown = log_line(hostile, "now")
    assert shown.isprintable()
    assert len(shown) < 150
    assert shown.endswith("- 0.00 s · a\\rb")


def test_counters_are_prometheus_text(engine: Engine) -> None:
    metrics = Metrics()
    metrics.count("/health", 200, [])
    metrics.count("/v1/completions", 200, [done_of(engine, prompt_tokens=3, emitted_tokens=5, ttft_s=0.5)])
    text = metrics.text({"requests_running": 2})
    assert 'edgespec_requests_total{path="/health",status="200"} 1\n' in text
    for line in ("generated_tokens_total 5", "first_token_seconds_sum 0.500000", "requests_running 2"):
        assert f"edgespec_{line}\n" in text
    metrics.count("/v1/completions", 500, [], begun=7)
    four = [done_of(engine, prompt_tokens=20, cached_tokens=3 * (index % 2), emitted_tokens=1) for index in range(4)]
    metrics.count("/v1/completions", 200, four, choices=2)  # two prompts
    text = metrics.text({})
    for line in ("prompt_tokens_total 43", "cached_tokens_total 0", "generated_tokens_total 16"):
        assert f"edgespec_{line}\n" in text
    for line in text.splitlines():
        assert line.startswith(("# HELP edgespec_", "# TYPE edgespec_", "edgespec_"))
