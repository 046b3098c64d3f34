"""Beginnings on disk, over HTTP: after a restart an agent's conversation does not read its instructions again."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from edgespec.engine.prefixes import stored
from edgespec.engine.prefixes.stored import stored_prefixes
from edgespec.files.home import Home
from edgespec.server import keeper as keeping
from edgespec.server.security import Access
from tests.support.http_server import Running, running
from tests.support.kernel_calls import require_native
from tests.support.tiny_models import TinyModels

WORDS = ["hello", "world", "the", "people", "of", "one", "two", "three", "and", "what", "is", "water"]
SYSTEM = " ".join(random.Random(2).choices(WORDS, k=2300))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    require_native()
    monkeypatch.setattr(keeping, "CALIBRATE_AFTER_S", 0.01)


@contextmanager
def serving(tiny: TinyModels, home: Home, **settings: Any) -> Iterator[Running]:
    target = tiny._make("long", seed=3, context_length=4096)
    own = {"runtime": "native", "draft": "none", "depth": 0, "prefixes": True, "store_home": home}
    with running(lambda: tiny.load(target, **own), **settings) as server:
        server.wait_until(lambda: server.service.keeper.state == "ready")
        yield server


def ask(server: Running, prompt: str, **headers: str) -> tuple[str, int]:
    """The answer to a conversation's first prompt, and the tokens that were not read."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    with server.client(headers=headers) as client:
        found: httpx.Response = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8})
    assert found.status_code == 200, found.text
    body = found.json()
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_restarted_server_reads_a_beginning_from_the_disk(tiny: TinyModels, home: Home) -> None:
    with serving(tiny, home) as server:
        ask(server, "hello")
        expected = [ask(server, "and what is water")[0], ask(server, "three people")[0]]
        server.wait_until(lambda: len(stored_prefixes(home)) == 1)
    with serving(tiny, home) as server:
        text, cached = ask(server, "three people")
        assert (text, cached > 2048) == (expected[1], True)
        assert ask(server, "and what is water")[0] == expected[0]


def test_a_key_gets_none_of_another_key_s_beginnings(tiny: TinyModels, home: Home) -> None:
    keys = ("first-long-key", "second-long-key")
    one, other = ({"authorization": f"Bearer {key}"} for key in keys)
    with serving(tiny, home, access=Access(keys)) as server:
        for prompt in ("hello", "and what is water"):
            ask(server, prompt, **one)
        server.wait_until(lambda: len(stored_prefixes(home)) == 1)
    with serving(tiny, home, access=Access(keys)) as server:
        assert ask(server, "three people", **other)[1] == 0
        assert ask(server, "three people", **one)[1] > 2048


def test_no_request_waits_for_a_prefix(tiny: TinyModels, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    with serving(tiny, home) as server:
        make_the_disk_slow(monkeypatch, begun, go)
        ask(server, "hello")
        ask(server, "and what is water")
        assert begun.wait(60), "it is being written"
        assert ask(server, "three people")[0], "answered while the disk is slow"
        assert not stored_prefixes(home)
        go.set()
        server.wait_until(lambda: len(stored_prefixes(home)) == 1)


def make_the_disk_slow(patch: pytest.MonkeyPatch, begun: threading.Event, go: threading.Event) -> None:
    """The disk takes nothing between two parts until ``go`` is set."""
    written = stored.write_session_file

    def slow(path: Any, home: Home, header: Any, tokens: Any, parts: Iterator[bytes], *rest: Any, **more: Any) -> int:
        def slowly() -> Iterator[bytes]:
            for part in parts:
                begun.set()
                assert go.wait(60)
                yield part

        return written(path, home, header, tokens, slowly(), *rest, **more)

    patch.setattr(stored, "write_session_file", slow)
