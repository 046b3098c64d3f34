"""Ollama's API as data: what its bodies ask for, the lines of its replies, and what it says of the model."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import __version__
from edgespec.decoding.round_base import DecodeStats
from edgespec.decoding.sampling import Sampling
from edgespec.engine.events import Done
from edgespec.files.model_file import read_model_file
from edgespec.server.answers import Part, ScoredToken
from edgespec.server.errors import ApiError
from edgespec.server.faces.face import Face, Head
from edgespec.server.faces.ollama import CHAT, GENERATE
from edgespec.server.faces.ollama_about import (
    API_VERSION,
    capabilities,
    listed,
    read_show,
    running,
    shown,
    tagged,
    version,
)
from edgespec.server.faces.table import error_shape
from edgespec.server.keep_alive import kept_alive_s
from edgespec.server.messages import read_messages
from edgespec.server.model_card import ModelCard, card_before_loading
from edgespec.server.replies import json_pieces
from edgespec.server.schema import Request
from edgespec.text.conversation.pieces import ToolCall
from tests.server.test_schema import HI, refused
from tests.support.faces import collected
from tests.support.tiny_models import TinyModels

HEAD = Head(id="x", created=1_700_000_000, model="tiny", fingerprint="f", waited_s=0.25)
BEGUN = {"model": "tiny", "created_at": "2023-11-14T22:13:20.000000Z"}
SAYS: dict[str, Any] = {"ollama-chat": {"role": "assistant", "content": ""}, "ollama-generate": ""}


def lines(face: Face, request: Request, *parts: Part, done: Done | None = None) -> list[dict[str, Any]]:
    """The objects of a streamed reply."""
    events = face.events(request)
    data = events.begin(0, HEAD, 7) + b"".join(events.part(0, part) for part in parts)
    data += b"" if done is None else events.end(0, done) + events.finish([done])
    assert data.isascii()
    return [json.loads(line) for line in data.splitlines()]


def whole(face: Face, request: Request, part: Part, done: Done) -> dict[str, Any]:
    reply = face.whole(request, HEAD, collected(face, [part], done), [done])
    return dict(json.loads(b"".join(json_pieces(reply))))


@pytest.fixture
def done() -> Done:
    stats = DecodeStats(prompt_tokens=7, cached_tokens=4, emitted_tokens=3, ttft_s=0.5, decode_s=2.0)
    return Done(
        finish_reason="length",
        text="abc",
        token_ids=(1, 2, 3),
        stats=stats,
        plan=None,  # type: ignore[arg-type]
        sampling=Sampling(seed=5),
    )


# ------------------------------------------------------------------------------------------------------- requests


def test_a_chat_is_streamed_unless_it_says_otherwise() -> None:
    assert CHAT.read({"messages": HI}) == Request(messages=read_messages(HI), stream=True)
    assert CHAT.read({"messages": HI, "stream": None}).stream
    assert not CHAT.read({"messages": HI, "stream": False}).stream


def test_every_option_is_read() -> None:
    options = {
        "num_ctx": 8192,
        "num_predict": 5,
        "seed": 3,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.1,
        "repeat_penalty": 1.5,
        "repeat_last_n": 64,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "stop": ["a", "b"],
        "num_keep": 4,
        "num_thread": 2,
        "use_mmap": True,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "typical_p": 1.0,
    }
    for face, body in ((CHAT, {"messages": HI}), (GENERATE, {"prompt": "hi"})):
        found = face.read({**body, "options": options, "logprobs": True, "top_logprobs": 2, "format": "json"})
        assert (found.seed, found.max_tokens, found.stop, found.logprobs) == (3, 5, ("a", "b"), 2)
        assert found.form is not None
        assert found.form.form.kind == "schema"
        assert found.sampling == {
            "temperature": 0.5,
            "top_k": 7,
            "top_p": 0.5,
            "min_p": 0.1,
            "repeat_penalty": 1.5,
            "repeat_last_n": 64,
            "presence_penalty": 1,
            "frequency_penalty": -1,
        }
    assert CHAT.read({"messages": HI, "top_logprobs": 2}).logprobs is None, "Ollama obeys it with logprobs only"


@pytest.mark.parametrize("given", [0, -1, -2, -7])
def test_no_number_of_tokens_is_the_rest_of_the_context(given: int) -> None:
    assert CHAT.read({"messages": HI, "options": {"num_predict": given}}).max_tokens is None


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (True, {"enable_thinking": True}),
        ("low", {"reasoning_effort": "low", "enable_thinking": True}),
        ("none", {"reasoning_effort": "none", "enable_thinking": False}),
        ("", {}),
    ],
)
def test_thinking_is_the_templates_variable(think: object, variables: dict[str, Any]) -> None:
    assert CHAT.read({"messages": HI, "think": think}).template_variables == variables
    assert GENERATE.read({"prompt": "x", "think": think}).template_variables == variables


def test_a_prompt_is_a_message_and_a_raw_one_is_text() -> None:
    assert GENERATE.read({"prompt": "hi"}).messages == read_messages(HI)
    system = {"role": "system", "content": "be brief"}
    assert GENERATE.read({"prompt": "hi", "system": "be brief"}).messages == read_messages([system, *HI])
    raw = GENERATE.read({"prompt": "<s>hi", "raw": True, "system": ""})
    assert (raw.prompt, raw.messages) == ("<s>hi", ())
    assert refused(GENERATE.read, {"prompt": "hi", "raw": True, "system": "be brief"}).param == "system"


@pytest.mark.parametrize(
    ("face", "body"),
    [(CHAT, {}), (CHAT, {"messages": []}), (GENERATE, {}), (GENERATE, {"prompt": "", "raw": True})],
)
def test_a_request_without_a_message_asks_for_no_answer(face: Face, body: dict[str, Any]) -> None:
    found = face.read({**body, "keep_alive": 0})
    assert (found.wants_answer, found.keep_alive_s) == (False, 0.0)
    assert face.without_answer is not None
    key = face.reply[2]
    reply = face.without_answer(found, "tiny", HEAD.created, "unload")
    assert reply == {**BEGUN, key: SAYS[face.name], "done": True, "done_reason": "unload"}


def test_roles_have_capital_letters_and_results_the_name_of_their_function() -> None:
    calls = [{"function": {"name": name, "arguments": {"city": "Oslo"}}} for name in ("clock", "weather")]
    found = CHAT.read(
        {
            "messages": [
                {"role": "User", "content": "hi", "images": []},
                {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
                {"role": "tool", "tool_name": "weather", "content": "cold"},
                {"role": "tool", "tool_name": "clock", "content": "noon"},
            ]
        }
    ).messages
    asked, called, cold, noon = found
    assert asked == {"role": "user", "content": "hi"}
    assert called["reasoning_content"] == "hm"
    clock, weather = called["tool_calls"]
    assert json.loads(weather["function"]["arguments"]) == {"city": "Oslo"}
    assert (cold["tool_call_id"], cold["name"], cold["content"]) == (weather["id"], "weather", "cold")
    assert (noon["tool_call_id"], noon["name"]) == (clock["id"], "clock")


def test_an_image_in_a_result_or_in_a_message_that_was_answered_is_left_out_with_a_warning() -> None:
    lacks = "an image was left out: this model reads text"
    shown = {"role": "user", "content": "", "images": ["AA"]}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    result = {"role": "tool", "tool_name": "f", "content": "r", "images": ["AA"]}
    found = CHAT.read({"messages": [shown, called, result]})
    assert [each["content"] for each in found.messages] == [f"[{lacks}]", "", f"r\n[{lacks}]"]
    assert found.warnings == (f"in a user's message: {lacks}", f"in a tool's result: {lacks}")
    for content, read in (({"ok": 1}, f'[{{"ok": 1}}, "[{lacks}]"]'), (["r"], f"r\n[{lacks}]")):
        found = CHAT.read({"messages": [*HI, called, {**result, "content": content}]})
        assert found.messages[-1]["content"] == read


def test_thinking_in_a_separate_message_belongs_to_the_answer_behind_it() -> None:
    thought, answer = {"role": "thinking", "content": "hm"}, {"role": "assistant", "content": "yes"}
    found = CHAT.read({"messages": [*HI, thought, answer, *HI]}).messages
    assert found[1:-1] == ({"role": "assistant", "content": "yes", "reasoning_content": "hm"},)
    without_text = CHAT.read({"messages": [*HI, {**thought, "content": [{"type": "x"}]}, answer, *HI]}).messages
    assert without_text[1:-1] == (answer,)


def test_an_earlier_call_may_have_a_nul_in_its_arguments() -> None:
    call = {"function": {"name": "write_file", "arguments": {"content": "a\0b"}}}
    own = {"role": "assistant", "content": "", "tool_calls": [call]}
    found = CHAT.read({"messages": [*HI, own, {"role": "tool", "content": "ok"}]}).messages
    assert found[1]["tool_calls"][0]["function"]["arguments"] == '{"content": "a\\u0000b"}'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "user", "content": "what is it", "images": ["iVBORw0KGgo="]}]}, "an image"),
        ({"messages": {}}, "messages must be a list"),
        ({"messages": ["hi"]}, "must be an object"),
        ({"messages": HI, "options": {"mirostat": 2}}, "another way to draw tokens"),
        ({"messages": HI, "options": {"temperature": "hot"}}, "temperature must be a number"),
        ({"messages": HI, "options": []}, "options must be an object"),
        ({"messages": HI, "keep_alive": "soon"}, "keep_alive must be seconds or a time"),
        ({"messages": HI, "tools": {}}, "tools must be a list"),
        ({"messages": HI, "format": 3}, "format must be"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_in_ollamas_shape(body: dict[str, Any], words: str) -> None:
    error = refused(CHAT.read, body)
    shape = error_shape("/api/chat")(error)
    assert shape.keys() == {"error"}
    assert words in shape["error"]


def test_a_suffix_makes_a_prompt_the_text_before_a_hole() -> None:
    request = GENERATE.read({"prompt": "a", "suffix": "b"})
    assert (request.prompt, request.suffix, request.messages) == ("a", "b", ())
    assert GENERATE.read({"suffix": "b"}).prompt == ""
    assert GENERATE.read({"prompt": "x", "suffix": ""}) == GENERATE.read({"prompt": "x"})
    with_system = GENERATE.read({"prompt": "a", "suffix": "b", "system": "c"})
    assert with_system == replace(request, warnings=with_system.warnings)
    assert "system message was left out" in with_system.warnings[0]
    assert refused(GENERATE.read, {"prompt": "a", "suffix": "b", "system": "c", "raw": True}).param == "system"


@pytest.mark.parametrize("field", ["template", "context", "images"])
def test_a_prompt_of_another_form_is_refused_by_name(field: str) -> None:
    given: Any = "x" if field == "template" else ["x"]
    assert refused(GENERATE.read, {"prompt": "x", field: given}).param == field
    empty: Any = "" if field == "template" else []
    assert GENERATE.read({"prompt": "x", field: empty}) == GENERATE.read({"prompt": "x"})


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *((300, 300), (0, 0), (0.5, 0.5), (-1, math.inf), (10**400, 1e15), ("5m", 300), ("1h30m", 5400), ("0", 0)),
        *(("-1m", math.inf), ("-1", math.inf), ("300ms", 0.3), ("1.5h", 5400), ("60", 60), (" 24h ", 86400)),
    ],
)
def test_a_time_is_seconds_or_a_text_with_units(given: float | str, seconds: float) -> None:
    assert kept_alive_s(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["", "soon", "5 minutes", "m", "1h30", "1e3", "--1", "inf", "9" * 400])
def test_other_texts_are_refused(given: str) -> None:
    assert refused(kept_alive_s, given).param == "keep_alive"


# -------------------------------------------------------------------------------------------------------- replies


@pytest.mark.parametrize("face", [CHAT, GENERATE], ids=lambda face: face.name)
def test_an_answer_is_lines_and_the_last_has_times_in_nanoseconds(face: Face, done: Done) -> None:
    request = face.read({"messages": HI, "prompt": "hi"})
    first, last = lines(face, request, Part("a\u2028\x85é"), done=done)
    key = face.reply[2]
    assert first == {**BEGUN, key: _says(face, "a\u2028\x85é"), "done": False}
    own = last.pop("edgespec")
    assert (own["seed"], own["timings"]["predicted_n"]) == (5, 3)
    assert last == {
        **BEGUN,
        key: _says(face, ""),
        "done": True,
        "done_reason": "length",
        "total_duration": 2_750_000_000,
        "load_duration": 250_000_000,
        "prompt_eval_count": 7,
        "prompt_eval_cached_count": 4,
        "prompt_eval_duration": 500_000_000,
        "eval_count": 3,
        "eval_duration": 2_000_000_000,
    }
    assert whole(face, request, Part("a"), done) == {**last, key: _says(face, "a"), "edgespec": own}


def _says(face: Face, text: str) -> Any:
    return {"role": "assistant", "content": text} if face is CHAT else text


def test_a_time_that_was_not_measured_is_left_out(done: Done) -> None:
    done = replace(done, stats=DecodeStats(prompt_tokens=7, emitted_tokens=1))
    last = lines(CHAT, CHAT.read({"messages": HI}), done=done)[-1]
    assert "eval_duration" not in last
    assert "prompt_eval_duration" not in last
    assert last["total_duration"] == last["load_duration"]


def test_a_reply_has_the_name_by_which_the_model_was_asked_for(done: Done) -> None:
    request = CHAT.read({"messages": HI, "model": "Tiny:latest"})
    assert {each["model"] for each in lines(CHAT, request, Part("a"), done=done)} == {"Tiny:latest"}
    assert whole(CHAT, request, Part("a"), done)["model"] == "Tiny:latest"


def test_thinking_and_calls_are_parts_of_the_message(done: Done) -> None:
    call = ToolCall(index=1, id="abcdefghi", name="weather", arguments='{"city": "Oslo",\n "at": NaN}')
    request = CHAT.read({"messages": HI})
    thought, called = lines(CHAT, request, Part(reasoning="hm"), Part(calls=(call,)))
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    own = {"id": "abcdefghi", "function": {"index": 1, "name": "weather", "arguments": {"city": "Oslo", "at": "NaN"}}}
    assert called["message"] == {"role": "assistant", "content": "", "tool_calls": [own]}
    reply = whole(CHAT, request, Part("a", "hm", calls=(call,)), done)
    assert reply["message"] == {"role": "assistant", "content": "a", "thinking": "hm", "tool_calls": [own]}
    assert reply["done_reason"] == "length"
    assert lines(GENERATE, request, Part(reasoning="hm"))[0]["thinking"] == "hm"


def test_log_probabilities_come_with_the_text(done: Done) -> None:
    token = ScoredToken(b"a", 0, -0.5, ((b"a", -0.5), (b"\xc3", -math.inf)))
    expected = {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "\ufffd", "logprob": -9999.0, "bytes": [195]},
        ],
    }
    part, request = Part("a", tokens=(token,)), CHAT.read({"messages": HI, "logprobs": True})
    assert lines(CHAT, request, part)[0]["logprobs"] == [expected]
    assert whole(CHAT, request, part, done)["logprobs"] == [expected]


@pytest.mark.parametrize("face", [CHAT, GENERATE])
def test_a_line_without_text_says_that_an_answer_waits(face: Face, done: Done) -> None:
    events, key = face.events(Request()), "message" if face is CHAT else "response"
    assert events.waiting() == b"", "no answer has begun"
    events.begin(0, HEAD, 20)
    waiting = json.loads(events.waiting())
    assert waiting == {"model": "tiny", "created_at": waiting["created_at"], key: _says(face, ""), "done": False}
    assert json.loads(events.end(0, done))["done"]
    assert events.waiting() == b"", "the last line has been sent"


def test_a_stream_that_fails_ends_with_the_error() -> None:
    events = CHAT.events(Request())
    assert events.fail(ApiError("no memory")) == b'{"error": "no memory"}\n'


# ---------------------------------------------------------------------------------------------------- about models


CARD = ModelCard(
    format="gguf",
    architecture="qwen2",
    quantisation="Q4_K_M",
    parameters=1_543_714_304,
    weight_bytes=986_048_000,
    digest="ab" * 32,
    modified=1_700_000_000.5,
    context_length=4096,
    template="{{ messages }}",
    licence="apache-2.0",
    metadata={"general.architecture": "qwen2", "qwen2.context_length": 32768, "qwen2.block_count": 28},
    uses_tools=True,
    thinks=False,
    fills_in=False,
    sampling=Sampling(temperature=0.7),
)


@pytest.mark.parametrize(
    ("name", "shown_name"),
    [
        ("qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b:latest"),
        ("llama3.2:3b", "llama3.2:3b"),
        ("hf:org/repo", "hf:org/repo:latest"),
    ],
)
def test_a_listed_name_has_a_tag(name: str, shown_name: str) -> None:
    own = listed(name, CARD)
    assert tagged(name) == own["name"] == own["model"] == shown_name


def test_a_list_has_size_digest_time_and_details() -> None:
    own = listed("tiny", CARD)
    assert (own["size"], own["digest"], own["modified_at"]) == (986_048_000, "ab" * 32, "2023-11-14T22:13:20.500000Z")
    assert own["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "qwen2",
        "families": ["qwen2"],
        "parameter_size": "1.5B",
        "quantization_level": "Q4_K_M",
    }


@pytest.mark.parametrize(("name", "quantisation"), [("m-Q5_K_M.gguf", "Q5_K_M"), ("m-q5.gguf", "Q8_0")])
def test_a_name_that_tells_bits_alone_leaves_the_quantisation_to_the_file(
    tiny: TinyModels, tmp_path: Path, name: str, quantisation: str
) -> None:
    path = Path(shutil.copy(tiny.target, tmp_path / name))
    assert card_before_loading(lambda: read_model_file(path), 64).quantisation == quantisation


@pytest.mark.parametrize(("count", "words"), [(494_032_768, "494.0M"), (21_504, "21.5K"), (7, "7"), (0, "")])
def test_numbers_of_weights_are_short(count: int, words: str) -> None:
    assert listed("tiny", replace(CARD, parameters=count))["details"]["parameter_size"] == words


def test_a_loaded_model_says_when_it_is_freed() -> None:
    own = running("tiny", CARD, memory_bytes=5, gpu_bytes=2, expires_at=1_700_000_000)
    assert (own["size"], own["size_vram"], own["context_length"]) == (5, 2, 4096)
    assert own["expires_at"] == "2023-11-14T22:13:20.000000Z"
    for never in (None, 1e18):
        assert running("tiny", CARD, memory_bytes=5, gpu_bytes=0, expires_at=never)["expires_at"].startswith("2318")


def test_a_shown_model_says_what_requests_may_use() -> None:
    own = shown("tiny", CARD)
    assert own["model_info"]["qwen2.context_length"] == 4096, "the one that is served, not the longest there is"
    assert own["model_info"]["general.parameter_count"] == 1_543_714_304
    assert own["model_info"]["qwen2.block_count"] == 28
    assert (own["template"], own["license"]) == ("{{ messages }}", "apache-2.0")
    settings = dict(line.split() for line in own["parameters"].splitlines())
    assert (settings["num_ctx"], settings["temperature"]) == ("4096", "0.7")
    assert own["capabilities"] == capabilities(CARD) == ["completion", "tools"]
    assert capabilities(replace(CARD, uses_tools=False, thinks=True)) == ["completion", "thinking"]
    assert capabilities(replace(CARD, fills_in=True, uses_tools=False)) == ["completion", "insert"]
    bare = shown("tiny", replace(CARD, template=None, licence=None, parameters=0, sampling=None))
    assert len(bare["parameters"].splitlines()) == 1, "the sampling is known once the model was loaded"
    assert not {"template", "license"} & bare.keys()
    assert "general.parameter_count" not in bare["model_info"]


def test_the_name_to_show_has_an_older_field_too() -> None:
    assert read_show({"model": "a", "verbose": True}) == read_show({"name": "a"}) == "a"
    for body in ({}, {"model": 3}, {"model": ""}):
        assert refused(read_show, body).param == "model"


def test_the_version_is_that_of_the_api() -> None:
    assert version() == {"version": API_VERSION, "edgespec": {"version": __version__}}
    assert tuple(map(int, API_VERSION.split("."))) >= (0, 6, 4)
