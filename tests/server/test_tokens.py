"""``/props``, ``/tokenize`` and ``/detokenize``, as clients of llama.cpp's server and of vLLM read them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.server.faces.messages import COUNT
from edgespec.server.queue import RequestQueue
from edgespec.server.security import Access
from tests.server.test_http import failed
from tests.support.http_server import WAIT_S, Running, running
from tests.support.tiny_gguf import CHATML
from tests.support.tiny_models import TinyModels


def props(server: Running, **headers: str) -> Any:
    with server.client(headers=headers) as client:
        return client.get("/props")


def test_props_say_what_clients_look_for_and_no_path(server: Running, engine: Engine, tiny: TinyModels) -> None:
    found = props(server)
    assert found.json()["default_generation_settings"]["n_ctx"] == engine.plan.context_length
    assert found.json()["total_slots"] == 4
    assert found.json()["chat_template"] == CHATML
    assert found.json()["modalities"] == {"vision": False, "audio": False}
    assert found.json()["model_alias"] == "tiny"
    assert str(tiny.folder) not in found.text


def test_a_picture_of_another_site_loads_no_model_and_a_link_leads_to_the_page(server: Running) -> None:
    failed(props(server, **{"sec-fetch-site": "cross-site"}), 403)
    assert props(server, **{"sec-fetch-site": "same-origin"}).status_code == 200
    with server.client(headers={"sec-fetch-site": "cross-site"}) as client:
        assert client.get("/").status_code == 200


def test_a_text_becomes_tokens_and_the_tokens_the_text(server: Running, engine: Engine) -> None:
    tokens = server.post("/tokenize", content="the people<|im_end|>").json()["tokens"]
    assert tokens == engine.tokenizer.encode("the people<|im_end|>", special=True)
    assert server.post("/detokenize", tokens=tokens).json() == {"content": engine.tokenizer.detokenize(tokens)}
    plain = server.post("/tokenize", content="a", add_special=True, parse_special=False).json()["tokens"]
    assert plain == engine.tokenizer.encode("a", add_bos=True)
    assert server.post("/tokenize").json() == {"tokens": []}


def test_tokens_may_come_with_their_texts_or_bytes(server: Running, engine: Engine) -> None:
    text = "the <|im_end|>🙃"
    found = server.post("/tokenize", content=text, with_pieces=True).json()["tokens"]
    assert [each["id"] for each in found] == engine.tokenizer.encode(text, special=True)
    pieces = [each["piece"] for each in found]
    assert "<|im_end|>" in pieces
    parts = [each for each in pieces if isinstance(each, list)]
    assert bytes(byte for part in parts for byte in part).decode() == "🙃"


def test_vllms_bodies_are_a_prompt_or_the_messages_of_a_chat(server: Running, engine: Engine) -> None:
    text = "the people<|im_end|>"
    tokens = engine.tokenizer.encode(text, special=True)
    found = server.post("/tokenize", model="tiny", prompt=text, add_special_tokens=False).json()
    assert found == {"tokens": tokens, "count": len(tokens), "max_model_len": engine.plan.context_length}
    with_begin = engine.tokenizer.encode(text, special=True, add_bos=True)
    assert server.post("/tokenize", prompt=text).json()["tokens"] == with_begin
    hello: Any = [{"role": "user", "content": "hello"}]
    chat = server.post("/tokenize", messages=hello, add_generation_prompt=True, with_pieces=True).json()
    assert chat["count"] == len(chat["tokens"]) == engine.prompt_tokens(hello)
    shown = "".join(each["piece"] for each in chat["tokens"])
    assert shown.replace(" ", "").endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_texts_are_cut_one_after_another_and_more_than_wait_are_refused(
    server: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service, "counts", counts := RequestQueue(1, 1))
    tokenizer, begun, release = type(engine.tokenizer), threading.Semaphore(0), threading.Event()
    encode = tokenizer.encode

    def held(*arguments: Any, **settings: Any) -> Any:
        begun.release()
        assert release.wait(WAIT_S)
        return encode(*arguments, **settings)

    monkeypatch.setattr(tokenizer, "encode", held)
    with server.connect() as own:
        own.sendall(b'POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16\r\n\r\n{"content": "a"}')
        assert begun.acquire(timeout=WAIT_S)
    asked = threading.Thread(target=server.post, args=("/tokenize",), kwargs={"content": "b"})
    asked.start()
    server.wait_until(lambda: (counts.running, counts.waiting) == (1, 1))
    hello: Any = [{"role": "user", "content": "hello"}]
    for path, body in (("/detokenize", {"tokens": [1]}), (COUNT, {"messages": hello})):
        assert server.post(path, **body).status_code == 429
    assert not begun.acquire(blocking=False), "the client that left keeps its turn until its text is cut"
    release.set()
    asked.join()
    server.wait_until(lambda: counts.running == 0)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"content": 3}, "content"),
        ("/tokenize", {"content": "a\0b"}, "content"),
        ("/tokenize", {"content": "a", "add_special": 1}, "add_special"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [0, 10**6]}, "tokens"),
    ],
)
def test_other_bodies_are_refused_by_the_fields_name(server: Running, path: str, body: Any, param: str) -> None:
    assert failed(server.post(path, **body), 400)["param"] == param


def test_the_key_is_asked_for(tiny: TinyModels) -> None:
    with running(lambda: tiny.load(draft="none"), access=Access(keys=("a-long-key",))) as found:
        assert props(found).status_code == 401
        assert props(found, authorization="Bearer a-long-key").status_code == 200
        failed(found.post("/tokenize", content="a"), 401)
