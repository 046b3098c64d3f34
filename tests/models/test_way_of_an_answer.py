"""An answer runs through few files, so a reader can follow it completely."""

from __future__ import annotations

import sys
import threading

import pytest

from edgespec import Engine
from scripts.trace_answer import PROMPT, Trace

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

# Up to the first accepted token, if copies and the drafting model are both asked until then and the plan has a short
# head, which lays out rows for the prompt's rare tokens. Which of them happens depends on the machine's times, so the
# longest of the ways is the limit: 70 files where it was counted, and two for machines whose plan differs.
MOST_FILES = 72


def test_an_answer_up_to_its_first_accepted_token_enters_few_files(pair: Engine) -> None:
    pair.pair.pool.drafter_model().wait()
    trace = Trace()
    threading.setprofile(trace)  # the session's threads
    try:
        with pair.session() as session:
            sys.setprofile(trace)
            trace.on = True
            for _ in session.generate(PROMPT, max_tokens=256):
                if not trace.on:
                    break
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert {"engine/session.py", "decoding/serial.py", "runtimes/native/sequence.py"} <= trace.entered.keys()
    assert trace.accepted_from is not None, "nothing was accepted"
    assert len(trace.entered) <= MOST_FILES, list(trace.entered)
