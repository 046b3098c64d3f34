"""Reads bodies: as many bytes as the context allows, and large ones off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request as HttpRequest

from edgespec.server.errors import RETRY_S, ApiError, GoneError
from edgespec.server.kept_items import KeptItems
from edgespec.server.strict_json import parse_body
from edgespec.server.threads import Threads
from edgespec.text.request_budget import RequestBudget

T = TypeVar("T")

# A larger body is parsed on a thread: this takes a few milliseconds, in which no other answer is sent.
MOST_PARSED_BYTES = 65_536
# A smaller one with more names and values is read on a thread: each takes some microseconds.
MOST_READ_VALUES = 4000
# Larger bodies that arrive or are parsed at the same time together.
MOST_BODIES_BYTES = 64_000_000
# Clients send other values of Content-Encoding with a plain body: ``identity``, ``utf-8``, ``aws-chunked``.
_COMPRESSED = frozenset(("gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress"))


@dataclass(eq=False, slots=True)
class _Large:
    """A large body that arrives or is parsed. ``owner``: whose it is, where several may ask."""

    owner: str | None
    size: int = 0


class BodyReader:
    """Reads and parses bodies. The large ones that arrive at the same time have a limit together.

    Those of one of several owners may have half of it, or a single body.
    """

    def __init__(self, most_bytes: int = MOST_BODIES_BYTES) -> None:
        self._most = most_bytes
        self._large = set[_Large]()
        self._parsing = asyncio.Lock()

    @property
    def held(self) -> int:
        """Bytes of the large bodies."""
        return sum(each.size for each in self._large)

    async def read(
        self,
        request: HttpRequest,
        read: Callable[[Mapping[str, Any]], T],
        budget: RequestBudget,
        threads: Threads,
        items: KeptItems | None = None,
        owner: str | None = None,
    ) -> tuple[T, int]:
        """What ``read`` makes of the object in the body, and the body's size, with those of ``items`` that it names.

        ``owner``: whose it is, where several may ask. Raises ApiError with status 415 for a compressed body, 413
        beyond the budget and 429 beyond the limits of the owner and of all, and GoneError.
        """
        encodings = ",".join(request.headers.getlist("content-encoding")).lower().split(",")
        if compressed := [each for each in map(str.strip, encodings) if each in _COMPRESSED]:
            message = f"the body is compressed ({compressed[0]}): send it as it is, without Content-Encoding"
            raise ApiError(message, status=415, code="unsupported_encoding")
        body, large = bytearray(), _Large(owner)

        def parsed() -> tuple[Mapping[str, Any], int]:
            given = parse_body(bytes(body), budget)
            found, added = (given, 0) if items is None else items.expanded(given)
            if len(body) + added > budget.body_bytes:
                raise _too_large(budget, "the body with the items that it names")
            return found, len(body) + added

        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > budget.body_bytes:
            raise _too_large(budget)
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > budget.body_bytes:
                    raise _too_large(budget)
                self._hold(large, len(body))
            if large.size:
                async with self._parsing:  # one after another: other threads wait while native code parses
                    found, size = await threads.run(parsed)
            else:
                found, size = parsed()
                self._hold(large, size)
                if not large.size and budget.counted <= MOST_READ_VALUES:
                    return read(found), size
            async with self._parsing:
                return await threads.run(lambda: read(found)), size
        except ClientDisconnect:
            raise GoneError from None
        finally:
            self._large.discard(large)

    def _hold(self, large: _Large, size: int) -> None:
        """Note the size of a body if it is large. Raises ApiError beyond the limits of its owner and of all."""
        if size > MOST_PARSED_BYTES:
            large.size = size
            self._large.add(large)
            of_owner = sum(each.size for each in self._large if each.owner == large.owner)
            if self.held > self._most or (large.owner is not None and of_owner > max(self._most // 2, size)):
                message = "too many large requests arrive at the same time"
                raise ApiError(message, status=429, code="queue_full", retry_s=RETRY_S)


def _too_large(budget: RequestBudget, what: str = "the body") -> ApiError:
    message = f"{what} is larger than {budget.body_bytes} bytes, the most for a context of {budget.context_length}"
    advice = "images and all else that is left out count too, and a larger context (--context) allows more"
    return ApiError(f"{message} tokens: {advice}", status=413, code="body_too_large")
