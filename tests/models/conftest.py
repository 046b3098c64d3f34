"""Real models, from the store that everything else on this machine uses, so that they are fetched once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec import Engine


@pytest.fixture(scope="session")
def pair() -> Iterator[Engine]:
    """The default target and its drafter, as ``edgespec chat --profile laptop`` loads them."""
    with Engine.load(profile="laptop", download=True) as engine:
        yield engine
