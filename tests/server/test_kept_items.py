"""Items that requests name by their ids: those of earlier answers, within limits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from string import ascii_letters
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from edgespec.server import kept_items
from edgespec.server.bodies import MOST_BODIES_BYTES, MOST_PARSED_BYTES, BodyReader
from edgespec.server.errors import ApiError
from edgespec.server.kept_items import KeptItems
from edgespec.server.replies import as_json
from edgespec.server.security import Access
from edgespec.server.threads import Threads
from edgespec.text.request_budget import RequestBudget
from tests.support.http_server import running
from tests.support.tiny_models import TinyModels

HELLO = {"role": "user", "content": "hello"}


def item(id: str, text: str = "x") -> dict[str, Any]:
    part = {"type": "output_text", "annotations": [], "text": text, "logprobs": [b"{}"]}
    return {"id": id, "type": "message", "role": "assistant", "content": [part]}


def reference(id: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": id}


def named(kept: KeptItems, *ids: Any) -> list[Any]:
    """What a request reads that names the items behind a message."""
    body, added = kept.expanded({"input": [HELLO, *map(reference, ids)], "model": "x"})
    assert body["model"] == "x"
    first, *found = body["input"]
    assert added == sum(len(as_json(each)) for each in found)
    assert first is HELLO
    return found


def test_an_item_that_is_kept_again_takes_its_place_and_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_items, "MOST_BYTES", 400)
    kept = KeptItems()
    for text in "abcdefgh":
        kept.keep([item("msg_1", text)])
    assert named(kept, "msg_1")[0]["content"][0]["text"] == "h"


def test_named_items_are_read_without_log_probabilities() -> None:
    kept = KeptItems()
    call = {"id": "fc_1", "type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    kept.keep([item("msg_1", "yes"), call])
    said = {**item("msg_1"), "content": [{"type": "output_text", "text": "yes"}]}
    assert named(kept, "msg_1", "fc_1") == [said, call]
    assert named(kept) == []
    for other in ("hello", [3], None):
        assert kept.expanded({"input": other}) == ({"input": other}, 0)


@pytest.mark.parametrize("ids", [["msg_2"], [None], [{}], ["msg_1", "msg_1"]])
def test_other_items_are_refused_and_so_is_one_that_comes_twice(ids: list[Any]) -> None:
    kept = KeptItems()
    kept.keep([item("msg_1")])
    with pytest.raises(ApiError, match="send the item itself") as refused:
        named(kept, *ids)
    assert (refused.value.status, refused.value.param) == (400, f"input[{len(ids)}]")


def test_the_items_that_were_not_used_for_the_longest_time_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_items, "MOST_ITEMS", 3)
    kept = KeptItems()
    kept.keep(map(item, "abc"))
    assert len(named(kept, "a")) == 1
    kept.keep(map(item, "de"))
    assert [each["id"] for each in named(kept, *"ade")] == [*"ade"]
    for gone in "bc":
        with pytest.raises(ApiError):
            named(kept, gone)
    monkeypatch.setattr(kept_items, "MOST_BYTES", 1000)
    kept.keep([item("f", "x" * 800)])
    assert len(named(kept, "e", "f")) == 2
    kept.keep([item("g", "x" * 1000)])
    with pytest.raises(ApiError):
        named(kept, "f")
    assert (kept._bytes, kept._items) == (0, {})


def test_each_key_has_its_own_items(tiny: TinyModels) -> None:
    access = Access(keys=("key-number-one", "key-number-two"))
    with running(lambda: tiny.load(draft="none"), access=access) as server, server.client() as client:

        def ask(key: str, *items: Any) -> dict[str, Any]:
            body = {"input": [*items, HELLO], "max_output_tokens": 1}
            found: dict[str, Any] = client.post(
                "/v1/responses", json=body, headers={"authorization": f"Bearer {key}"}
            ).json()
            return found

        first = reference(ask("key-number-one")["output"][0]["id"])
        assert "is not kept here" in ask("key-number-two", first)["error"]["message"]
        assert ask("key-number-one", first)["error"] is None


@pytest.mark.anyio
async def test_a_body_is_as_large_as_the_items_that_it_names() -> None:
    kept, threads, read_on = KeptItems(), Threads(1), list[str]()
    kept.keep([item(each, "x" * (MOST_PARSED_BYTES // 2)) for each in ascii_letters])

    def read(body: Mapping[str, Any]) -> int:
        read_on.append(threading.current_thread().name)
        return len(body["input"])

    async def size(ids: str, most: int = MOST_BODIES_BYTES) -> int:
        body = json.dumps({"input": [*map(reference, ids)]}).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        request, reader = HttpRequest({"type": "http", "headers": []}, receive), BodyReader(most)
        try:
            found, size = await reader.read(request, read, RequestBudget(1), threads, kept)
        finally:
            assert reader.held == 0
        assert found == len(ids)
        return size - len(body)

    assert await size("") == 0
    assert MOST_PARSED_BYTES // 2 < await size("a") < MOST_PARSED_BYTES < await size("ab")
    here = threading.current_thread().name
    assert read_on == [here, here, "edgespec-serve"]
    with pytest.raises(ApiError, match="the body with the items that it names is larger") as large:
        await size(ascii_letters)
    assert large.value.status == 413
    with pytest.raises(ApiError, match="too many large requests"):
        await size("ab", most=MOST_PARSED_BYTES)
    threads.close()


@pytest.mark.anyio
async def test_one_owner_of_several_has_half_of_the_room_for_large_bodies() -> None:
    reader, threads = BodyReader(400_000), Threads(1)

    async def arriving(owner: str | None) -> None:
        parts = [{"type": "http.request", "body": b" " * 150_000, "more_body": True}]

        async def receive() -> dict[str, Any]:
            if not parts:
                await asyncio.Event().wait()
            return parts.pop()

        request = HttpRequest({"type": "http", "headers": []}, receive)
        await reader.read(request, dict, RequestBudget(1), threads, owner=owner)

    reader._most = 200_000
    only = asyncio.create_task(arriving("a"))
    await asyncio.sleep(0)
    assert reader.held == 150_000, "a single one may have more than half, else it would never be taken"
    only.cancel()
    await asyncio.wait([only])
    reader._most = 400_000
    first = asyncio.create_task(arriving("a"))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="too many large requests"):
        await arriving("a")
    second = asyncio.create_task(arriving("b"))
    await asyncio.sleep(0)
    assert reader.held == 300_000
    for each in (first, second):
        each.cancel()
    await asyncio.wait([first, second])
    alone = [asyncio.create_task(arriving(None)) for _ in range(2)]
    await asyncio.sleep(0)
    assert reader.held == 300_000
    for each in alone:
        each.cancel()
    await asyncio.wait(alone)
    threads.close()
