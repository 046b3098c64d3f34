"""The largest bodies of the benchmark are those that a server takes, and short ones of many values are read apart."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from benchmarks.request_sizes import bodies, short_bodies
from edgespec.server.bodies import MOST_PARSED_BYTES, MOST_READ_VALUES, BodyReader
from edgespec.server.strict_json import parse_body
from edgespec.server.threads import Threads
from edgespec.text.request_budget import RequestBudget


@pytest.mark.parametrize("context", [4096, 32_768])
def test_each_body_is_as_large_as_allowed_and_is_parsed(context: int) -> None:
    most = int(RequestBudget(context).body_bytes)
    for name, body in bodies(most).items():
        assert 0.9 * most < len(body) <= most, name
        assert parse_body(body, RequestBudget(context)), name


async def read_on(body: bytes, context: int) -> str:
    """The thread on which a server reads the body."""
    reader, threads = BodyReader(), Threads(1)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    def read(given: Mapping[str, Any]) -> str:
        return threading.current_thread().name

    request = HttpRequest({"type": "http", "headers": []}, receive)
    found, _ = await reader.read(request, read, RequestBudget(context), threads)
    assert reader.held == 0
    threads.close()
    return found


@pytest.mark.anyio
@pytest.mark.parametrize("context", [4096, 32_768])
async def test_a_short_body_of_many_values_is_read_on_a_thread(context: int) -> None:
    here = threading.current_thread().name
    for name, (_, body) in short_bodies(context).items():
        assert len(body) <= MOST_PARSED_BYTES, name
        assert await read_on(body, context) == "edgespec-serve", name
    for count, thread in ((0, here), (MOST_READ_VALUES, "edgespec-serve")):
        assert await read_on(b'{"x":[' + b"0," * count + b"0]}", context) == thread
