"""An answer runs through few files, so a reader can follow it completely."""

from __future__ import annotations

import sys
import threading

import pytest

from edgespec import Engine
from scripts.trace_answer import PROMPT, Trace

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

# Up to the first accepted token, by the drafters that were asked until then. A drafting model opens its cache, draws
# tokens and scores with a short head. Shared forwards take three files (batch, scheduler, turns), tools and names of
# control tokens three, masks of one-pass drafters one. A short head lays out rows for the prompt's rare tokens: three
# files (weights, tensors, weight_files), on machines where the plan has such a head.
MOST_FILES = {("lookup",): 37, ("model",): 45, ("lookup", "model"): 48}


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
    asked = tuple(name for name in ("lookup", "model") if f"drafters/{name}.py" in trace.entered)
    assert trace.accepted_from in asked
    assert len(trace.entered) <= MOST_FILES[asked], list(trace.entered)
