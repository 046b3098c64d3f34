"""Items of earlier answers, which clients of the Responses API name by their ids in place of sending them again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from edgespec.server.errors import ApiError
from edgespec.server.replies import as_json

# Of all answers to one owner: a thousand steps of agents. A request may name each item once, so it becomes longer by
# no more than this.
MOST_ITEMS = 4096
MOST_BYTES = 2_000_000


class KeptItems:
    """The items of one owner that were used last, within limits. Calls may come from any thread."""

    def __init__(self) -> None:
        self._items = dict[str, tuple[Mapping[str, Any], int]]()  # with its size; the one used last is the last
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Keep items of an answer, without log-probabilities."""
        with self._lock:
            for item in items:
                parts = [{"type": part["type"], "text": part["text"]} for part in item.get("content", ())]
                own = {**item, "content": parts} if parts else item
                size = len(as_json(own))
                _, replaced = self._items.pop(item["id"], (own, 0))
                self._items[item["id"]] = own, size
                self._bytes += size - replaced
            while self._bytes > MOST_BYTES or len(self._items) > MOST_ITEMS:
                _, size = self._items.pop(next(iter(self._items)))
                self._bytes -= size

    def expanded(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
        """The body with the items that its ``input`` refers to, and their bytes.

        Raises ApiError for one that is not kept.
        """
        given, named = body.get("input"), set[str]()
        if not isinstance(given, list):
            return body, 0
        items, added = [], 0
        for number, item in enumerate(given):
            if isinstance(item, Mapping) and item.get("type") == "item_reference":
                item, size = self._named(str(item.get("id")), named, f"input[{number}]")
                added += size
            items.append(item)
        return {**body, "input": items}, added

    def _named(self, id: str, named: set[str], param: str) -> tuple[Mapping[str, Any], int]:
        with self._lock:
            if id in named or (found := self._items.pop(id, None)) is None:
                message = f"the item {id[:64]!r} ({param}) is not kept here, or comes twice: send the item itself"
                raise ApiError(f'{message}, as clients do with "store": false', param=param)
            self._items[id] = found
        named.add(id)
        return found
