"""Rows of scores that several tests of the benchmarks compare."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def random_rows() -> tuple[np.ndarray, np.ndarray]:
    """Five rows of 40 scores twice, float32; the second time with a little noise."""
    random = np.random.default_rng(7)
    first = random.normal(0, 3, (5, 40)).astype(np.float32)
    return first, first + random.normal(0, 0.3, first.shape).astype(np.float32)
