"""Real models, from the store that everything else on this machine uses, so that they are fetched once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec import Engine


@pytest.fixture(scope="session")
def pair() -> Iterator[Engine]:
    """The default target and its drafter, calibrated: what ``edgespec chat --profile laptop`` has after a while.

    In the setting whose widths are bit-equal, whatever an earlier calibration found that to cost.
    """
    with Engine.load(profile="laptop", download=True, calibrate=True) as engine:
        yield engine
