"""The drafter loads in parallel with the answer: no answer waits, and a failure only costs the guesses."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from edgespec.errors import CancelledError, ClosedError, EdgespecError, MemoryLimitError, ModelFileError
from edgespec.files import disk
from edgespec.files.progress import QUIET, Job
from edgespec.interfaces.reasons import Reason
from edgespec.placement.model_pool import ModelPool
from edgespec.placement.prepared import PreparedModel
from edgespec.planning.depth.base import FixedDepth
from edgespec.runtimes.background import BackgroundModel
from edgespec.runtimes.native import sidecar
from edgespec.runtimes.native.weights import NativeWeights
from edgespec.runtimes.runtime import LoadedModel
from tests.support.kernel_calls import require_native
from tests.support.processor import processor_runtimes
from tests.support.tiny_models import TinyModels, answer, invent_measurements, require_speculation

WAIT_S = 60.0
LOADING = "drafter is still loading"
PROMPT = "hello world"


class SlowLoads:
    """The drafter's loads last until ``released``; ``interruptible`` ones ask whether to end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.released = threading.Event()
        self.interruptible = False
        self.error: BaseException | None = None
        self.models: list[LoadedModel] = []
        self.attempts = 0
        load = PreparedModel.load

        def slowly(prepared: PreparedModel, job: Job = QUIET) -> LoadedModel:
            if prepared.file.name != "drafter":
                return load(prepared, job)
            self.attempts += 1
            self.begun.set()
            if self.interruptible:
                while not (job.cancelled() or self.released.wait(0.01)):
                    pass
                raise CancelledError("loading was cancelled")
            assert self.released.wait(WAIT_S), "what waits for the load never ends"
            if self.error is not None:
                raise self.error
            self.models.append(load(prepared, job))
            return self.models[-1]

        monkeypatch.setattr(PreparedModel, "load", slowly)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowLoads]:
    slow = SlowLoads(monkeypatch)
    yield slow
    slow.released.set()


@pytest.fixture
def engine(tiny: TinyModels, loads: SlowLoads) -> Iterator[Engine]:
    """An engine whose drafter is not prepared and is loaded when it is first needed."""
    with tiny.load(tiny.slow, lookup=False, context=2000, draft=str(tiny.drafter), native_sidecar=False) as engine:
        invent_measurements(engine)
        require_speculation(engine, 2)
        yield engine


def ended(engine: Engine) -> None:
    engine.pair.pool.drafter_model().wait_until_ended()


def test_an_answer_continues_with_plain_decoding_while_the_drafter_loads(engine: Engine, loads: SlowLoads) -> None:
    with engine.session() as session:
        plain = answer(session.generate(PROMPT, max_tokens=30, depth=0))
        session.clear()
        assert not loads.begun.is_set(), "plain decoding needs no drafter"
        done = answer(session.generate(PROMPT, max_tokens=30, depth=2))
        assert loads.begun.is_set()
        assert not loads.models, "the load is still running"
        assert done.token_ids == plain.token_ids
        assert done.stats.proposed == 0
        assert done.speculation_off == LOADING
        loads.released.set()
        assert engine.pair.pool.drafter_model().wait(WAIT_S)
        session.clear()
        done = answer(session.generate(PROMPT, max_tokens=30, depth=2))
        assert done.token_ids == plain.token_ids
        assert done.stats.rounds_by_source["model"] > 0
        assert loads.attempts == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("answer_too_short", "drafter_waits"),
        ("not_paying_now", "drafter_waits"),
        ("no_drafter_pays", "no_drafter_pays"),
        ("depth_zero", "depth_zero"),
    ],
)
def test_a_loading_drafter_is_reported_as_loading_and_not_as_too_slow(
    engine: Engine, loads: SlowLoads, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    monkeypatch.setattr(FixedDepth, "why_off", lambda *_: Reason(code, "why"))
    with engine.session() as session:
        done = answer(session.generate(PROMPT, max_tokens=30, depth=2))
        assert done.speculation_off_code == said
        assert done.speculation_off == (LOADING if said == "drafter_waits" else "why")
        loads.released.set()
        assert engine.pair.pool.drafter_model().wait(WAIT_S)
        assert session.speculation_off == "why"


def begun(engine: Engine, loads: SlowLoads) -> tuple[Any, Generation]:
    """A session with a partly read answer while the drafter loads."""
    session = engine.session()
    generation = session.generate(PROMPT, depth=2)
    for _ in range(4):
        next(generation)
    assert loads.begun.wait(WAIT_S)
    return session, generation


def test_cancelling_an_answer_does_not_wait_for_the_drafters_load(engine: Engine, loads: SlowLoads) -> None:
    session, generation = begun(engine, loads)
    session.cancel()
    assert answer(generation).finish_reason == "cancelled"
    session.close()
    assert not loads.models
    assert not loads.released.is_set(), "the load still runs"


def test_closing_an_answer_or_a_session_does_not_wait_for_the_drafters_load(engine: Engine, loads: SlowLoads) -> None:
    session, generation = begun(engine, loads)
    generation.close()
    session.close()
    session, generation = begun(engine, loads)
    session.close()
    assert not loads.models


def test_ctrl_c_does_not_wait_for_the_drafters_load(engine: Engine, loads: SlowLoads) -> None:
    session, generation = begun(engine, loads)
    reading = threading.Event()

    def press() -> None:
        assert reading.wait(WAIT_S)
        os.kill(os.getpid(), signal.SIGINT)

    def read() -> None:
        threading.Thread(target=press).start()
        reading.set()
        for _event in generation:
            pass
        time.sleep(WAIT_S)

    with pytest.raises(KeyboardInterrupt):
        read()
    session.close()
    assert not loads.models


@pytest.mark.parametrize("interruptible", [True, False])
def test_closing_the_engine_does_not_wait_for_the_drafters_load(
    tiny: TinyModels, loads: SlowLoads, interruptible: bool
) -> None:
    loads.interruptible = interruptible
    with tiny.load(lookup=False, native_sidecar=False) as engine:
        model = engine.pair.pool.drafter_model()
        model.load()
        assert loads.begun.wait(WAIT_S)
        engine.close()
    with pytest.raises(ClosedError):
        model.open(8)
    if not interruptible:
        assert not loads.models
        loads.released.set()
    assert model.wait_until_ended(WAIT_S)
    for late in loads.models:
        with pytest.raises(ClosedError):
            late.open(8)
    assert len(loads.models) == (not interruptible)
    assert wait_until(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "edgespec-load-model"]
    )


@pytest.mark.parametrize(
    "error",
    [
        ModelFileError("drafter.gguf", "the file changed after its header was read"),
        MemoryLimitError("no memory for 1.00 GiB of weights", needed_bytes=2**30, available_bytes=None),
    ],
)
def test_a_failed_load_of_the_drafter_keeps_the_text_and_is_reported_once(
    engine: Engine, loads: SlowLoads, error: EdgespecError
) -> None:
    loads.error = error
    loads.released.set()
    with engine.session() as session:
        plain = answer(session.generate(PROMPT, max_tokens=20, depth=0))
        for _ in range(2):
            session.clear()
            done = answer(session.generate(PROMPT, max_tokens=20, depth=2))
            assert done.token_ids == plain.token_ids
            ended(engine)
        assert done.speculation_off == f"{error.message}; this session continues without it"
    assert loads.attempts == 1, "a failed load is not repeated in every session"


def test_an_unexpected_error_while_loading_the_drafter_is_reported_in_one_sentence(
    engine: Engine, loads: SlowLoads
) -> None:
    loads.error = RuntimeError("the driver is gone")
    loads.released.set()
    with engine.session() as session:
        for _ in range(2):
            done = answer(session.generate(PROMPT, max_tokens=20, depth=2))
            ended(engine)
    assert done.speculation_off == "drafter cannot be loaded: the driver is gone; this session continues without it"


def test_free_memory_is_checked_before_the_drafter_is_loaded(engine: Engine, loads: SlowLoads) -> None:
    engine.pair.pool.left_bytes = 1000
    with engine.session() as session:
        for _ in range(2):
            done = answer(session.generate(PROMPT, max_tokens=20, depth=2))
            ended(engine)
    assert "drafter needs about" in str(done.speculation_off)
    assert loads.attempts == 0


def test_a_forgotten_engine_is_freed_when_its_drafters_load_ends(tiny: TinyModels, loads: SlowLoads) -> None:
    engine = tiny.load(lookup=False, native_sidecar=False)
    model = engine.pair.pool.drafter_model()
    model.load()
    assert loads.begun.wait(WAIT_S)
    del engine
    loads.released.set()
    model.wait_until_ended()
    assert model.open(8).length == 0, "a caller that has the model may use it"
    model.close()


# ------------------------------------------------------------------------------------------- prepared drafters


@pytest.fixture
def prepared(tiny: TinyModels) -> Callable[..., Engine]:
    """Makes engines whose drafter an earlier engine has prepared."""
    if "native" not in processor_runtimes():
        pytest.skip("only our own runtime prepares weights")

    def load(**settings: object) -> Engine:
        return tiny.load(lookup=False, runtime="native", draft_runtime="native", **settings)

    with load() as engine:
        assert engine.pair.pool.drafter_model().wait(WAIT_S)
    return load


def wait_until(true: Callable[[], bool], seconds: float = WAIT_S) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def test_a_prepared_drafter_is_loaded_with_the_target(prepared: Callable[..., Engine]) -> None:
    with prepared() as engine:
        invent_measurements(engine)
        require_speculation(engine)
        model = engine.pair.pool.drafter_model()
        assert model.begun
        assert wait_until(lambda: model.waits_because is None)
        with engine.session() as session:
            done = answer(session.generate(PROMPT, max_tokens=8, depth=2))
            assert done.stats.rounds_by_source["model"] > 0, "in the first round of the first answer"


@pytest.mark.parametrize("why", ["plain", "not prepared", "no drafter"])
def test_a_drafter_that_is_unused_or_slow_to_load_is_not_loaded_with_the_target(
    prepared: Callable[..., Engine], why: str
) -> None:
    unlike: dict[str, dict[str, object]] = {
        "plain": {"depth": 0},
        "not prepared": {"native_sidecar": False},
        "no drafter": {"draft": "none"},
    }
    with prepared(**unlike[why]) as engine, engine.session():
        assert engine.pair.pool.names == ()


def test_after_a_change_of_threads_the_prepared_drafter_is_mapped_again(prepared: Callable[..., Engine]) -> None:
    with prepared() as engine:
        before = engine.pair.pool.drafter_model()
        assert engine.pair.adopt(threads=2)
        after = engine.pair.pool.drafter_model()
        assert after is not before
        assert after.wait(WAIT_S)


# ------------------------------------------------------------------------------------ once on a machine


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch, tiny: TinyModels) -> Callable[..., Engine]:
    """Makes engines of a tiny pair with a plan that drafts, whatever the times on this machine."""
    if "native" not in processor_runtimes():
        pytest.skip("only our own runtime prepares weights")
    with tiny.load(lookup=False, runtime="native", draft_runtime="native", native_sidecar=False) as engine:
        invent_measurements(engine)
    shutil.rmtree(tiny.home.prepared, ignore_errors=True)

    def load(**settings: object) -> Engine:
        return tiny.load(lookup=False, runtime="native", draft_runtime="native", **settings)

    return load


def test_the_drafters_prepared_weights_are_written_before_the_first_answer(pays: Callable[..., Engine]) -> None:
    told: list[str] = []
    with pays(progress=lambda event: told.append(event.stage)) as engine:
        require_speculation(engine)
        assert engine.pair.pool.drafter_model().waits_because is None
    assert "preparing drafter, once on this machine" in told
    told.clear()
    with pays(progress=lambda event: told.append(event.stage)) as engine:
        assert engine.pair.pool.drafter_model().begun
    assert told == ["loading target"], "prepared only once"


@pytest.mark.parametrize("why", ["depth 0", "not kept", "no room", "read-only"])
def test_an_unused_drafter_or_one_that_cannot_be_stored_is_not_prepared(
    pays: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "no room":
        monkeypatch.setattr(disk, "free_bytes", lambda _path: 1000)
    if why == "read-only":
        monkeypatch.setattr(sidecar.os, "access", lambda *_: False)
    settings = {"depth 0": {"depth": 0}, "not kept": {"native_sidecar": False}}.get(why, {})
    with pays(**settings) as engine:
        assert engine.pair.pool.names == ()


def test_a_drafter_that_cannot_be_prepared_does_not_end_the_answer(
    pays: Callable[..., Engine], loads: SlowLoads
) -> None:
    loads.error = ModelFileError(Path("drafter.gguf"), "it is broken")
    loads.released.set()
    with pays() as engine, engine.session() as session:
        done = answer(session.generate(PROMPT, max_tokens=8, depth=2))
        assert done.stats.emitted_tokens
        assert "it is broken; this session continues without it" in str(done.speculation_off)
    assert loads.attempts == 1


def test_the_expected_load_time_is_that_of_the_last_load(prepared: Callable[..., Engine]) -> None:
    with prepared() as engine:
        pool = engine.pair.pool
        assert pool.drafter_model().wait(WAIT_S)
        assert pool.load_s == engine.pair.costs().load_s == 0.0
        took_s = pool.drafter_model().load_s
        pool.use_threads(engine.pair.target.settings.threads)
        assert pool.load_s == took_s, "as long as the last load"
    with prepared(native_sidecar=False) as engine:
        assert engine.pair.costs().load_s == engine.pair.pool.load_s > 0.0
    with prepared(draft="none") as engine:
        assert engine.pair.costs().load_s == 0.0


def test_a_pool_closed_by_another_thread_reports_no_load_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer's thread may ask for the drafter while the pool is closed."""
    pool, drafter_model = engine.pair.pool, ModelPool.drafter_model

    def closed_first(own: ModelPool) -> BackgroundModel:
        own.close()
        return drafter_model(own)

    monkeypatch.setattr(ModelPool, "drafter_model", closed_first)
    assert pool.load_s == 0.0


def test_during_a_load_the_expected_time_is_the_remaining_time(engine: Engine, loads: SlowLoads) -> None:
    pool = engine.pair.pool
    before_s = pool.load_s
    pool.drafter_model().load()
    assert loads.begun.wait(WAIT_S)
    time.sleep(0.001)
    assert pool.load_s < before_s
    with suppress(EdgespecError):
        pool.drafter_model().wait(0.0)


def test_a_cancelled_load_of_the_target_ends_while_its_weights_are_laid_out(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native runtime lays its weights out in strips, and asks before each."""
    require_native()
    laid, relay = list[object](), NativeWeights.relay

    def laid_out(weights: NativeWeights, strip: Any) -> int:
        laid.append(strip)
        time.sleep(0.05)
        return relay(weights, strip)

    monkeypatch.setattr(NativeWeights, "relay", laid_out)
    with pytest.raises(CancelledError, match="loading was cancelled"):
        tiny.load(runtime="native", draft="none", cancelled=lambda: bool(laid), store_home=tiny.home.root / "other")
    assert laid
