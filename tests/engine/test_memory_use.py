"""One count of an engine's memory: weights, the caches of all sessions, of their drafters, and models to compare."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.pair.load import Limits
from edgespec.engine.session import Session
from edgespec.errors import MemoryLimitError
from edgespec.files.disk import gib
from edgespec.placement.memory import STEP_POSITIONS, MemoryEstimate, MemoryUse, in_steps
from tests.support.command_line import run_python
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import SHAPE, TinyModels, answer, load_drafter

NAMES = {
    "allowed_bytes",
    "taken_bytes",
    "left_bytes",
    "sessions",
    "session_bytes",
    "caches_bytes",
    "target_weights_bytes",
    "drafters",
    "others",
}


@pytest.fixture
def engine(tiny: TinyModels) -> Iterator[Engine]:
    # Without prepared weights the drafter is loaded when it is asked for, not with the engine.
    with tiny.load(lookup=False, native_sidecar=False) as engine:
        yield engine


def per_session(estimate: MemoryEstimate) -> int:
    """What a new session takes."""
    return estimate.session_bytes(0)


def alone(estimate: MemoryEstimate) -> int:
    """What a model takes with one new session."""
    return estimate.weights_bytes + per_session(estimate)


def test_every_session_and_the_loaded_drafter_are_counted(engine: Engine) -> None:
    target, drafter = engine.pair.pool.target_memory, engine.pair.pool.drafter
    assert drafter is not None
    before = engine.memory
    assert set(before) == NAMES
    assert before["target_weights_bytes"] == target.weights_bytes
    assert (before["sessions"], before["drafters"], before["others"]) == (0, {}, {})
    assert before["taken_bytes"] == alone(target), "one session is reserved"
    with engine.session(), engine.session() as second:
        assert engine.memory["taken_bytes"] == alone(target) + per_session(target)
        load_drafter(engine)
        both = per_session(target) + per_session(drafter.memory)
        used = engine.memory
        assert used["drafters"] == {"drafter": drafter.memory.weights_bytes}
        assert (used["session_bytes"], used["caches_bytes"]) == (both, 2 * both)
        assert used["taken_bytes"] == target.weights_bytes + drafter.memory.weights_bytes + 2 * both
        assert used["left_bytes"] == used["allowed_bytes"] - used["taken_bytes"]
        third = second.branch()
        assert engine.memory["sessions"] == 3
        del third
        gc.collect()
        assert engine.memory["sessions"] == 2, "a forgotten session is not counted"
    assert engine.memory["sessions"] == 0
    assert engine.memory["allowed_bytes"] == before["allowed_bytes"]


def test_a_session_that_would_not_fit_next_to_the_drafter_is_refused_with_the_numbers(tiny: TinyModels) -> None:
    """Without the drafter two more sessions would fit."""
    with tiny.load(lookup=False) as engine:
        target, drafter = engine.pair.pool.target_memory, engine.pair.pool.drafter
    assert drafter is not None
    both = per_session(target) + per_session(drafter.memory)
    limits = Limits(max_memory_bytes=target.weights_bytes + drafter.memory.weights_bytes + 2 * both + 1000)
    with tiny.load(lookup=False, limits=limits) as engine:
        load_drafter(engine)
        with engine.session() as first, engine.session():
            for opened in (engine.session, first.branch):
                with pytest.raises(MemoryLimitError) as caught:
                    opened()
                error = caught.value
                assert (error.needed_bytes, error.available_bytes) == (both, 1000)
                assert error.message.startswith(
                    f"another session needs about {gib(both)} more, of which the drafter's"
                )
                assert f"2 open sessions take {gib(engine.memory['taken_bytes'])}" in error.message
                assert error.hint == "close a session, or load with a smaller context"
            assert answer(first.generate("hello", max_tokens=2)).text
        engine.session().close()


def test_a_drafter_is_refused_if_open_sessions_took_its_memory(tiny: TinyModels) -> None:
    with tiny.load(lookup=False) as engine:
        target, drafter = engine.pair.pool.target_memory, engine.pair.pool.drafter
    assert drafter is not None
    limits = Limits(max_memory_bytes=target.total_bytes + drafter.memory.total_bytes + per_session(target))
    settings = {"lookup": False, "native_sidecar": False, "limits": limits}
    with tiny.load(**settings) as engine, engine.session(), engine.session():  # type: ignore[arg-type]
        assert engine.pair.pool.drafter is not None, "it would fit with one session"
        with pytest.raises(MemoryLimitError, match="drafter needs about"):
            load_drafter(engine)


def test_a_drafter_that_memory_had_no_room_for_is_tried_again_for_later_sessions(tiny: TinyModels) -> None:
    with tiny.load(lookup=False, native_sidecar=False) as engine:
        pool, left_bytes = engine.pair.pool, engine.pair.pool.left_bytes
        pool.left_bytes = 0
        with pytest.raises(MemoryLimitError, match="drafter needs about"):
            load_drafter(engine)
        assert engine.memory["drafters"] == {}
        pool.left_bytes = left_bytes
        load_drafter(engine)
        assert engine.memory["drafters"] != {}


def test_models_to_compare_and_to_time_are_counted(engine: Engine) -> None:
    pool, before = engine.pair.pool, engine.memory
    engine.pair.load_comparable([pool.target])
    once = engine.pair.pool.target_memory
    compared = once.total_bytes + once.cache_bytes + once.buffers_bytes
    assert engine.memory["others"] == {"target": compared}, "with two caches"
    engine.pair.load_comparable([pool.target])
    assert engine.memory["others"] == {"target": 2 * compared}
    assert engine.memory["left_bytes"] == before["left_bytes"] - 2 * compared
    place = next((each for each in pool.places.targets if each.settings.device == "cpu"), None)
    if place is None:
        pytest.skip("this machine offers no other place for the target")
    timed = pool.open_target(place)
    assert len(engine.memory["others"]) == 1, "nothing is loaded yet"
    assert timed.wait(60.0)
    (more,) = set(engine.memory["others"]) - {"target"}
    assert more == f"target on {place.settings.device}"
    timed.close()
    assert set(engine.memory["others"]) == {"target"}


def test_the_session_of_ask_is_counted(engine: Engine) -> None:
    engine.ask("hello", max_tokens=2)
    assert engine.memory["sessions"] == 1


def use(allowed: int, sessions: tuple[int, ...], *, drafts: bool = False, grows: bool = True) -> MemoryUse:
    """Weights of 10 bytes, a cache of one byte a step and buffers of 2 bytes, for target and drafter."""
    one = MemoryEstimate(weights_bytes=10, cache_bytes=3, buffers_bytes=2, positions=3 * STEP_POSITIONS, grows=grows)
    drafters = {"small": one} if drafts else {}
    return MemoryUse(allowed_bytes=allowed, target=one, sessions=sessions, drafters=drafters, others={})


def test_the_first_session_is_always_allowed() -> None:
    """It was checked when the target was loaded; memory that others took since then does not refuse it."""
    used = replace(use(0, ()), others={"x": 4})
    used.require_session(0)
    assert (used.taken_bytes, used.left_bytes) == (17, -17)
    two = (STEP_POSITIONS, STEP_POSITIONS)
    use(19, two).require_session(0)
    with pytest.raises(MemoryLimitError) as caught:
        use(18, two).require_session(0)
    assert "drafter" not in caught.value.message
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (3, 2)


def test_a_session_in_spare_memory_leaves_room_for_one_that_fills_the_context() -> None:
    one = (STEP_POSITIONS,)
    use(10 + 3 + 3 + 5, one).require_session(0, spare=True)
    with pytest.raises(MemoryLimitError) as caught:
        use(10 + 3 + 3 + 4, one).require_session(0, spare=True)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (3 + 5, 7)
    use(10 + 3 + 3, one).require_session(0)


def test_a_cache_counts_in_steps_as_far_as_it_is_filled() -> None:
    assert STEP_POSITIONS == 1024
    counts = [in_steps(tokens) // STEP_POSITIONS for tokens in (0, 1, 1024, 1025, 2048, 2049)]
    assert counts == [1, 1, 1, 2, 2, 3]
    used = use(100, (2 * STEP_POSITIONS, STEP_POSITIONS))
    assert used.caches_bytes == (2 + 2) + (1 + 2)
    assert [used.session_bytes(tokens) for tokens in (0, 1025, 3000, 9000)] == [3, 4, 5, 5], (
        "no more than the context"
    )
    whole = use(100, (2 * STEP_POSITIONS, STEP_POSITIONS), grows=False)
    assert whole.caches_bytes == 2 * 5, "other runtimes take the whole context"
    assert use(100, (STEP_POSITIONS, 2 * STEP_POSITIONS)).drafter_bytes(used.target) == 10 + 3 + 4
    use(34, (STEP_POSITIONS, 2 * STEP_POSITIONS)).require_drafter("small", used.target)
    with pytest.raises(MemoryLimitError, match="small needs about"):
        use(33, (STEP_POSITIONS, 2 * STEP_POSITIONS)).require_drafter("small", used.target)


def test_growth_is_refused_with_the_numbers_unless_a_session_is_alone() -> None:
    two = (STEP_POSITIONS, STEP_POSITIONS)
    use(18, two).require_growth(STEP_POSITIONS, 3000)
    with pytest.raises(MemoryLimitError) as caught:
        use(17, two).require_growth(STEP_POSITIONS, 3000)
    error = caught.value
    assert (error.needed_bytes, error.available_bytes) == (2, 1)
    assert error.message.startswith("a conversation of 3000 tokens needs about")
    assert "2 open sessions take" in error.message
    assert error.hint == "close another session, or begin a new conversation"
    with pytest.raises(MemoryLimitError, match="of which the drafter's cache takes"):
        use(33, two, drafts=True).require_growth(STEP_POSITIONS, 3000)
    use(0, (STEP_POSITIONS,)).require_growth(STEP_POSITIONS, 3000)


LONG = 6000  # tokens of context


@pytest.fixture
def roomy(tiny: TinyModels) -> Iterator[Engine]:
    """An engine in whose memory two sessions fit that fill two steps each, and no more."""
    path = write_tiny_gguf(tiny.folder / "roomy.gguf", **SHAPE, seed=3, context_length=LONG)  # type: ignore[arg-type]
    settings = {"draft": "none", "lookup": False, "runtime": "native"}
    with tiny.load(path, **settings) as engine:  # type: ignore[arg-type]
        one = engine.pair.pool.target_memory
    limits = Limits(max_memory_bytes=one.weights_bytes + 2 * one.session_bytes(2 * STEP_POSITIONS))
    with tiny.load(path, limits=limits, context=LONG, **settings) as engine:  # type: ignore[arg-type]
        yield engine


def say(session: Session, tokens: int, more: int = 2) -> Done:
    """An answer of ``more`` tokens to a raw prompt of that many."""
    prompt = "a" * (tokens - 1)
    done = answer(session.generate(prompt, raw=True, max_tokens=more))
    assert abs(done.stats.prompt_tokens - tokens) <= 1
    return done


def test_two_sessions_of_a_long_context_cost_what_they_use(roomy: Engine) -> None:
    one = roomy.pair.pool.target_memory
    assert one.positions == LONG
    with roomy.session() as first, roomy.session() as second:
        assert roomy.memory["caches_bytes"] == 2 * one.session_bytes(0)
        for session in (first, second):
            say(session, 2000)
        assert roomy.memory["caches_bytes"] == 2 * one.session_bytes(2000)
        assert roomy.memory["left_bytes"] == 0
        for opened in (roomy.session, first.branch):
            with pytest.raises(MemoryLimitError, match="another session needs"):
                opened()
        with pytest.raises(MemoryLimitError, match="a conversation of 3000 tokens needs"):
            say(first, 3000)
        assert say(first, 2040, 4).finish_reason == "length", "the session continues"
        with pytest.raises(MemoryLimitError, match="a conversation of 2049 tokens needs"):
            say(second, 2040, 20)  # the answer outgrows the memory
        assert say(second, 2040, 4).finish_reason == "length"
        second.close()
        assert say(first, 3000).finish_reason == "length"
        assert roomy.memory["caches_bytes"] == one.session_bytes(3000)
    assert roomy.memory["sessions"] == 0


def test_a_copy_takes_what_its_source_has_filled(roomy: Engine) -> None:
    one = roomy.pair.pool.target_memory
    with roomy.session() as first:
        say(first, 1500)
        with first.branch() as second:
            assert roomy.memory["caches_bytes"] == 2 * one.session_bytes(1500)
            assert say(second, 1600).stats.cached_tokens > 1400


FILLING = """
import sys, psutil
from edgespec import Done, Engine
path, home = sys.argv[1:]
with Engine.load(path, draft="none", lookup=False, threads=1, runtime="native", store_home=home) as engine:
    process, bytes_a_token = psutil.Process(), engine.pair.target.facts.kv_bytes_per_token
    with engine.session() as warm:
        list(warm.generate("hello", raw=True, max_tokens=2))
    grown, sessions = [], [engine.session() for _ in range(2)]
    for session in sessions:
        before = process.memory_info().rss
        *_, done = session.generate("a" * 2000, raw=True, max_tokens=2)
        grown.append((process.memory_info().rss - before) / bytes_a_token / done.stats.prompt_tokens)
    before = process.memory_info().rss
    copy = sessions[0].branch()
    grown.append((process.memory_info().rss - before) / bytes_a_token / done.stats.prompt_tokens)
    print(engine.plan.context_length, *grown)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is measured as Linux counts it")
def test_a_real_cache_takes_memory_only_where_it_is_filled(tiny: TinyModels, tmp_path: Path) -> None:
    """In tokens of cache for each token of the prompt; 32 768 would be 16."""
    wide = {"quant": "Q8_0", "heads": 8, "kv_heads": 8, "width": 512, "layers": 8, "context_length": 32_768}
    path = write_tiny_gguf(tmp_path / "wide.gguf", **wide)  # type: ignore[arg-type]
    result = run_python(FILLING, path, tiny.home.root, home=tiny.home.root)
    assert result.code == 0, result.err
    context, *grown = result.out.split()
    assert context == "32768"
    assert all(0.9 < float(each) < 1.5 for each in grown), result.out


# -------------------------------------------------------------------------------- an address space that is full

LOADING_WITHOUT_MEMORY = """
import resource, sys, psutil
from edgespec import EdgespecError, Engine
small, large, home = sys.argv[1:]
Engine.load(small, draft="none", threads=1, store_home=home).close()  # what every load needs is mapped now
limit = psutil.Process().memory_info().vms + 4_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    Engine.load(large, draft="none", threads=1, store_home=home)
except EdgespecError as error:
    print(type(error).__name__)
"""

A_SESSION_WITHOUT_MEMORY = """
import resource, sys, psutil
from edgespec import EdgespecError, Engine
_, large, home = sys.argv[1:]
with Engine.load(large, draft="none", threads=1, store_home=home, context=16384) as engine:
    first = engine.session()
    limit = psutil.Process().memory_info().vms + 40_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        engine.session()
    except EdgespecError as error:
        list(first.generate("hello", max_tokens=3))
        print(type(error).__name__)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of an address space is Linux's")
@pytest.mark.parametrize("script", [LOADING_WITHOUT_MEMORY, A_SESSION_WITHOUT_MEMORY], ids=["model", "session"])
def test_a_real_lack_of_memory_is_a_typed_error_and_open_sessions_continue(tiny: TinyModels, script: str) -> None:
    result = run_python(script, tiny.target, tiny.slow, tiny.home.root, home=tiny.home.root)
    assert (result.code, result.out, result.err) == (0, "MemoryLimitError\n", "")
