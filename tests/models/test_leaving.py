"""An answer of the default pair can be left quickly: while its drafter loads or its prompt is read, or in a round.

Each takes under 150 ms alone on two cores. The bound allows for other load; the rest of the work would take longer.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from edgespec import Done, Engine, Reading, Text
from edgespec.runtimes.native import weights

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

AT_ONCE_S = 10.0
TOKENS = 4000
CONTEXT = 16384
CODE = "Write a function that sorts a list by merging, with its tests."
LONG = "def next_number(number: int) -> int:\n    return number + 1\n\n\n" * 600  # at least 10,000 tokens


@pytest.fixture(scope="module")
def laying_out() -> Iterator[Engine]:
    """A pair whose drafter is laid out again at every load, which takes seconds."""
    with Engine.load(
        "qwen2.5-coder-1.5b",
        draft="qwen2.5-coder-0.5b",
        download=True,
        runtime="native",
        draft_runtime="native",
        native_sidecar=False,
        lookup=False,
        context=CONTEXT,
        depth=4,
    ) as engine:
        yield engine


def left_after(
    engine: Engine, prompt: str, due: Callable[[Counter[type]], bool], *, close: bool, later_s: float = 0.0
) -> tuple[float, Done]:
    """Seconds from leaving an answer to its end.

    ``due`` decides when to leave, from the number of events by type; the answer is left ``later_s`` seconds after.
    """
    seen: Counter[type] = Counter()
    left: list[float] = []
    session = engine.session()
    done = threading.Event()

    def leave() -> None:
        while not due(seen) and not done.is_set():
            time.sleep(0.005)
        time.sleep(later_s)
        left.append(time.perf_counter())
        (session.close if close else session.cancel)()

    leaver = threading.Thread(target=leave)
    leaver.start()
    events = []
    for event in session.generate(prompt, max_tokens=TOKENS, ignore_eos=True):
        events.append(event)
        seen[type(event)] += 1
    assert left, "the answer ended before it was left"
    took_s = time.perf_counter() - left[0]
    done.set()
    leaver.join()
    session.close()
    assert isinstance(events[-1], Done)
    return took_s, events[-1]


@pytest.mark.parametrize("close", [False, True])
def test_an_answer_can_be_left_quickly_while_the_drafter_loads(laying_out: Engine, close: bool) -> None:
    pool = laying_out.pair.pool
    pool.use_threads(laying_out.pair.target.settings.threads)  # so that the drafter is loaded again
    took_s, done = left_after(laying_out, CODE, lambda _: pool.names != (), close=close)
    assert pool.drafter_model().waits_because is not None, "the load must still be running"
    assert (done.finish_reason, done.stats.proposed) == ("cancelled", 0)
    assert took_s < AT_ONCE_S


@pytest.mark.parametrize("close", [False, True])
def test_an_answer_can_be_left_quickly_while_the_prompt_is_read(laying_out: Engine, close: bool) -> None:
    assert len(laying_out.pair.prompts.request_tokens(LONG)) > 10_000
    took_s, done = left_after(laying_out, LONG, lambda seen: seen[Reading] > 0, close=close, later_s=0.5)
    assert (done.finish_reason, done.stats.emitted_tokens) == ("cancelled", 0)
    assert took_s < AT_ONCE_S


@pytest.mark.parametrize("close", [False, True])
def test_an_answer_can_be_left_quickly_during_a_round(laying_out: Engine, close: bool) -> None:
    assert laying_out.pair.pool.drafter_model().wait()
    # Counted in events, not in seconds: machines differ.
    took_s, done = left_after(laying_out, CODE, lambda seen: seen[Text] > 20, close=close)
    assert done.finish_reason == "cancelled"
    assert done.stats.proposed > 0
    assert took_s < AT_ONCE_S


def test_the_engine_closes_quickly_while_the_drafter_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(
        "qwen2.5-coder-1.5b",
        draft="qwen2.5-coder-0.5b",
        runtime="native",
        draft_runtime="native",
        native_sidecar=False,
    )
    model = engine.pair.pool.drafter_model()
    relay, begun, laid = weights.NativeWeights.relay, threading.Event(), list[int]()

    def counted(own: weights.NativeWeights, strip: weights._Strip) -> int:
        laid.append(len([*weights._strips(own.layout)]))
        begun.set()
        return relay(own, strip)

    monkeypatch.setattr(weights.NativeWeights, "relay", counted)
    model.load()
    assert begun.wait(60)
    started = time.perf_counter()
    engine.close()
    assert time.perf_counter() - started < AT_ONCE_S
    model.wait_until_ended()
    assert time.perf_counter() - started < AT_ONCE_S
    assert len(laid) < laid[0] / 2, "a load ends after its current piece"
