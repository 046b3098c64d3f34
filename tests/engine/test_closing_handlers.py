"""A signal handler closes the answer that its thread reads, at any line of that thread's calls."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import _base
from functools import partial
from types import FrameType
from typing import Any

from edgespec.engine import answer as answer_module, session as session_module
from edgespec.engine.engine import Engine
from edgespec.runtimes import thread as thread_module
from tests.support.tiny_models import answer

FILES = {module.__file__ for module in (answer_module, session_module, thread_module, threading, _base)}


def with_handler(call: Callable[[], object], handler: Callable[[], object], line: int) -> bool:
    """Make the call, and call ``handler`` before the given line of it. False if it has fewer lines."""
    lines = itertools.count()

    def local(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and next(lines) == line:
            handler()
        return local

    def calls(frame: FrameType, _event: str, _argument: Any) -> Any:
        return local if frame.f_code.co_filename in FILES else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        call()
    finally:
        sys.settrace(before)
    return next(lines) > line


def test_a_handler_may_close_the_answer_at_any_line_of_its_reader(engine: Engine) -> None:
    with engine.session() as session:
        for line in itertools.count():
            generation = session.generate("hello", max_tokens=9, raw=True, depth=0)
            next(generation)
            if not with_handler(partial(next, generation, None), generation.close, line):
                break
            assert list(generation) == []
        generation.close()
        assert line > 10
        assert len(answer(session.generate("hello", max_tokens=9, raw=True)).token_ids) == 9
