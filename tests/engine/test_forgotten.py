"""Forgotten answers in reference cycles: the garbage collector may free an answer on any thread."""

from __future__ import annotations

import psutil
import pytest

from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from tests.engine.answers import SAMPLED, plain_text
from tests.support.forgetting import Forget, alive, eager_collector, in_cycles, in_tasks, in_threads
from tests.support.started_threads import started_threads

FORGOTTEN = 500
PAUSE_S = 0.001
GROWTH_BYTES = 16 * 2**20  # a leaked cache takes 6 MiB, a leaked answer 0.1 MiB


@pytest.mark.slow
@pytest.mark.parametrize("forget", [in_cycles, in_threads, in_tasks])
def test_five_hundred_forgotten_answers_leak_no_memory_and_no_threads(engine: Engine, forget: Forget) -> None:
    expected = plain_text(engine, "hello world", max_tokens=20, sampling=SAMPLED).token_ids
    with eager_collector():
        forget(engine, 40, PAUSE_S)
        threads, bytes_before = len(started_threads()), psutil.Process().memory_info().rss
        forget(engine, FORGOTTEN, PAUSE_S)
        assert alive(Generation) == 0
    assert len(started_threads()) <= threads
    assert psutil.Process().memory_info().rss - bytes_before < GROWTH_BYTES
    assert plain_text(engine, "hello world", max_tokens=20, sampling=SAMPLED).token_ids == expected
