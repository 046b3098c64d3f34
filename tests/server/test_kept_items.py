"""Items that requests name by their ids: those of earlier answers, within limits."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.server import kept_items
from edgespec.server.errors import ApiError
from edgespec.server.kept_items import KeptItems
from edgespec.server.security import Access
from tests.support.http_server import running
from tests.support.tiny_models import TinyModels

HELLO = {"role": "user", "content": "hello"}


def item(id: str, text: str = "x") -> dict[str, Any]:
    part = {"type": "output_text", "annotations": [], "text": text, "logprobs": [b"{}"]}
    return {"id": id, "type": "message", "role": "assistant", "content": [part]}


def named(kept: KeptItems, *ids: Any) -> list[Any]:
    """What a request reads that names the items behind a message."""
    body = kept.expanded({"input": [HELLO, *({"type": "item_reference", "id": each} for each in ids)], "model": "x"})
    assert body["model"] == "x"
    first, *found = body["input"]
    assert first is HELLO
    return found


def test_named_items_are_read_without_log_probabilities() -> None:
    kept = KeptItems()
    call = {"id": "fc_1", "type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    kept.keep([item("msg_1", "yes"), call])
    said = {**item("msg_1"), "content": [{"type": "output_text", "text": "yes"}]}
    assert named(kept, "msg_1", "fc_1") == [said, call]
    assert named(kept) == []
    for other in ("hello", [3], None):
        assert kept.expanded({"input": other})["input"] == other


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

        first = {"type": "item_reference", "id": ask("key-number-one")["output"][0]["id"]}
        assert "is not kept here" in ask("key-number-two", first)["error"]["message"]
        assert ask("key-number-one", first)["error"] is None
