"""Real models from the machine's shared store, so that they are downloaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec import Engine


@pytest.fixture(scope="session")
def pair() -> Iterator[Engine]:
    """The default target and its calibrated drafter, as in `edgespec chat --profile laptop` after a while.

    In the setting whose widths are bit-equal, whatever its measured cost.
    """
    with Engine.load(profile="laptop", download=True, calibrate=True) as engine:
        yield engine
