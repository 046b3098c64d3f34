"""Real models from the machine's shared store, so that they are downloaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec import Engine


@pytest.fixture(scope="session")
def pair() -> Iterator[Engine]:
    """The default target and its calibrated drafter, as in `edgespec chat --profile laptop` after a while.

    The drafter is named: where another one of this machine was measured to be faster, that one would draft.
    """
    with Engine.load(profile="laptop", draft="qwen2.5-coder-0.5b", download=True, calibrate=True) as engine:
        yield engine
