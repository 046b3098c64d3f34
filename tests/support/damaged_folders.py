"""The refusal of a damaged folder of an export."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.errors import ModelFileError


def refusal(read: Callable[[Path], object], folder: Path) -> ModelFileError:
    """The error that reading the folder raises, in under a second of CPU time."""
    started = time.process_time()
    with pytest.raises(ModelFileError) as raised:
        read(folder)
    assert time.process_time() - started < 1
    assert raised.value.hint
    assert len(raised.value.message) < 1000
    return raised.value
