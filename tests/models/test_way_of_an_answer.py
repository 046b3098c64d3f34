"""An answer runs through few files, so a reader can follow it completely."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from edgespec import Engine
from edgespec.files.home import Home, home as users_home
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from scripts.trace_answer import PROMPT, Trace
from tests.support.tiny_models import invent_measurements

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

TARGET, DRAFTER = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
# Up to the first accepted token, if copies and the drafting model are both asked until then and the plan has a short
# head, which lays out rows for the prompt's rare tokens. Which of them happens depends on the machine's times, so the
# longest of the ways is the limit: 70 files where it was counted, and two for machines whose plan differs.
MOST_FILES = 72


@pytest.fixture
def engine(home: Home) -> Iterator[Engine]:
    """The default pair, with invented times: what this machine measured may choose another runtime or drafter."""
    place = users_home()
    for name in (TARGET, DRAFTER):
        Locator(store=Store(place), download=True).locate(name)
    home.root.mkdir()
    home.models.symlink_to(place.models)
    runtimes = {"runtime": "native", "draft_runtime": "native", "mode": "serial"}
    with Engine.load(TARGET, draft=DRAFTER, store_home=home, **runtimes) as engine:  # type: ignore[arg-type]
        invent_measurements(engine, 0.1, 0.02)
        engine.load_drafter()
        yield engine


def test_an_answer_up_to_its_first_accepted_token_enters_few_files(engine: Engine) -> None:
    trace = Trace()
    threading.setprofile(trace)  # the session's threads
    try:
        with engine.session() as session:
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
