"""One count of an engine's memory: weights, the caches of all sessions, of their drafters, and models to compare."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.pair.load import Limits
from edgespec.errors import MemoryLimitError
from edgespec.files.disk import gib
from edgespec.placement.memory import MemoryEstimate, MemoryUse
from tests.support.command_line import run_python
from tests.support.tiny_models import TinyModels, answer, load_drafter

NAMES = {
    "allowed_bytes",
    "taken_bytes",
    "left_bytes",
    "sessions",
    "session_bytes",
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
    return estimate.cache_bytes + estimate.buffers_bytes


def test_every_session_and_the_loaded_drafter_are_counted(engine: Engine) -> None:
    target, drafter = engine.pair.pool.target_memory, engine.pair.pool.drafter
    assert drafter is not None
    before = engine.memory
    assert set(before) == NAMES
    assert before["target_weights_bytes"] == target.weights_bytes
    assert (before["sessions"], before["drafters"], before["others"]) == (0, {}, {})
    assert before["taken_bytes"] == target.total_bytes, "one session is reserved"
    with engine.session(), engine.session() as second:
        assert engine.memory["taken_bytes"] == target.total_bytes + per_session(target)
        load_drafter(engine)
        both = per_session(target) + per_session(drafter.memory)
        used = engine.memory
        assert used["drafters"] == {"drafter": drafter.memory.weights_bytes}
        assert used["session_bytes"] == both
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
                assert error.message.startswith(f"another session needs about {gib(both)}, of which the drafter's")
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


def test_models_to_compare_and_to_time_are_counted(engine: Engine) -> None:
    pool, before = engine.pair.pool, engine.memory
    engine.load_comparable([pool.target])
    once = engine.pair.pool.target_memory
    compared = once.total_bytes + per_session(once)
    assert engine.memory["others"] == {"target": compared}, "with two caches"
    engine.load_comparable([pool.target])
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


def test_the_first_session_is_always_allowed() -> None:
    """It was checked when the target was loaded; memory that others took since then does not refuse it."""
    one = MemoryEstimate(weights_bytes=10, cache_bytes=3, buffers_bytes=2, positions=3)
    used = MemoryUse(allowed_bytes=0, target=one, sessions=0, drafters={}, others={"x": 4})
    used.require_session()
    assert (used.taken_bytes, used.left_bytes) == (19, -19)
    many = MemoryUse(allowed_bytes=30, target=one, sessions=2, drafters={}, others={})
    assert many.with_drafter(one).total_bytes == 20
    many.require_session()
    with pytest.raises(MemoryLimitError) as caught:
        MemoryUse(allowed_bytes=20, target=one, sessions=2, drafters={}, others={}).require_session()
    assert "drafter" not in caught.value.message
    assert caught.value.available_bytes == 0


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
