"""The largest bodies of the benchmark are those that a server takes."""

from __future__ import annotations

import pytest

from benchmarks.request_sizes import bodies
from edgespec.server.strict_json import parse_body
from edgespec.text.request_budget import RequestBudget


@pytest.mark.parametrize("context", [4096, 32_768])
def test_each_body_is_as_large_as_allowed_and_is_parsed(context: int) -> None:
    most = int(RequestBudget(context).body_bytes)
    for name, body in bodies(most).items():
        assert 0.9 * most < len(body) <= most, name
        assert parse_body(body, RequestBudget(context)), name
