"""A drafter's process is killed or stopped: answers continue, equal plain decoding's, and nothing leaks."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest

from edgespec.cli.terminal.status import StatusLine
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Event, Round, Text
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.engine.session import Session
from edgespec.errors import WorkerLostError
from edgespec.interfaces.model import LoadsInBackground
from edgespec.planning.depth.base import FixedDepth
from edgespec.runtimes.process import link as worker_link
from edgespec.runtimes.process.deadlines import Deadlines
from edgespec.runtimes.process.model import WorkerSequence
from edgespec.runtimes.process.settings import WorkerSettings
from tests.engine.answers import SAMPLED, plain_text
from tests.support.budgets import FixedBudget
from tests.support.started_threads import started_threads
from tests.support.tiny_models import TinyModels, answer, require_speculation
from tests.support.worker_loaders import command

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and file descriptors of POSIX")

WAIT_S = 60.0
TOKENS = 40
PROMPT = "hello world"
MODES = ("serial", "pipelined")

# A tiny drafter answers in a fraction of a millisecond and is loaded within a second; a stopped one never answers.
SHORT = Deadlines(load_s=4.0, answer_s=1.0, token_s=0.001, timed_s=0.4, cancel_s=0.5, close_s=0.2)
QUICK = WorkerSettings(deadlines=SHORT, restart_after_s=0.05)
# For tests that a false loss would fail: on a busy machine a process may wait for seconds.
CALM = replace(QUICK, deadlines=replace(SHORT, load_s=WAIT_S, answer_s=WAIT_S, timed_s=WAIT_S, cancel_s=WAIT_S))
NEVER_AGAIN = replace(CALM, restart_after_s=3600.0)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "_GRACE_S", 0.1)


@pytest.fixture(scope="module", autouse=True)
def libraries(tiny: TinyModels) -> None:
    """Load the libraries first: the files they open stay open."""
    tiny.load(draft="none").close()


def left() -> tuple[int, int, int]:
    own = psutil.Process()
    return own.num_fds(), len(started_threads()), len(own.children(recursive=True))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that no process (not even a zombie), file or thread is left over."""
    gc.collect()
    before = left()
    yield
    gc.collect()
    for _ in range(500):  # stopping threads end when they are next scheduled
        if left() == before:
            return
        time.sleep(0.01)
    assert left() == before


Load = Callable[..., Engine]


@pytest.fixture
def load(tiny: TinyModels) -> Load:
    def load(worker: WorkerSettings = CALM, **overrides: object) -> Engine:
        engine = tiny.load_speculating(lookup=False, draft_isolation="process", worker=worker, **overrides)
        try:
            require_speculation(engine)
        except BaseException:
            engine.close()
            raise
        return engine

    return load


def open_session(engine: Engine, mode: str) -> Session:
    """A session that always drafts to its depth cap, serial or pipelined."""
    cap = engine.plan.depth_cap
    budget = FixedBudget(most=cap, ahead=cap + 1, patience=0.05)
    beside = mode == "pipelined"
    return engine.session(
        _speculation=Speculation(
            drafters=engine.drafters,
            policy=FixedDepth(cap + beside),
            depth_cap=cap,
            budget=(lambda: budget) if beside else None,
        )
    )


def wait_for_drafter(engine: Engine) -> None:
    model = engine.pair.pool.drafter_model()
    assert isinstance(model, LoadsInBackground)
    assert model.wait(WAIT_S)


def strike_idle(engine: Engine, process: psutil.Process, hit: signal.Signals) -> None:
    """Kill or stop the drafter's process. A stopped one is lost within a moment; the next one may take its time."""
    sequence = engine.pair.pool.drafter_model().open(8)
    assert isinstance(sequence, WorkerSequence)
    os.kill(process.pid, hit)
    sequence._link.deadlines = sequence._times._deadlines = replace(SHORT, answer_s=0.3)
    sequence.close()


def worker_process_or_none() -> psutil.Process | None:
    """Between fork and exec a child is a copy of this program: stopping it would stop the starting thread."""
    own = psutil.Process()
    for child in own.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.cmdline() != own.cmdline():
                return child
    return None


def is_missed(engine: Engine, lost: psutil.Process) -> bool:
    """Whether the engine has noticed the loss, which comes a moment after the process ends."""
    if worker_process_or_none() not in (lost, None):
        return True  # a new process runs already
    model = engine.pair.pool.drafter_model()
    assert isinstance(model, LoadsInBackground)
    try:
        return not model.wait(0.0)
    except WorkerLostError:
        return True


def worker_process() -> psutil.Process:
    """Wait for the only worker process and return it."""
    for _ in range(int(WAIT_S * 100)):
        process = worker_process_or_none()
        if process is not None:
            return process
        time.sleep(0.01)
    raise AssertionError("no worker process was started")


def say(session: Session, prompt: str = PROMPT, **settings: object) -> Done:
    return answer(session.generate(prompt, raw=True, max_tokens=TOKENS, **settings))  # type: ignore[arg-type]


def drafts_again(session: Session) -> bool:
    """Whether one of a few answers has drafts: with a target this fast, a drafter may be too late."""
    return any(say(session).stats.proposed for _ in range(200))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_with_a_drafter_process_the_text_is_plain_decodings(load: Load, mode: str, sampling: Sampling) -> None:
    with load() as engine, open_session(engine, mode) as session:
        wait_for_drafter(engine)
        expected = plain_text(engine, PROMPT, raw=True, max_tokens=TOKENS, sampling=sampling)
        done = say(session, sampling=sampling)
        assert done.token_ids == expected.token_ids
        assert done.speculation_off is None
        assert drafts_again(session)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_an_answer_does_not_wait_for_a_loading_drafter_process(load: Load, mode: str) -> None:
    patient = replace(QUICK, command=command("slow"), deadlines=replace(SHORT, load_s=3600.0))
    with load(patient) as engine, open_session(engine, mode) as session:
        done = say(session)
        assert done.token_ids == plain_text(engine, PROMPT, raw=True, max_tokens=TOKENS).token_ids
        assert done.stats.proposed == 0
        assert done.speculation_off == "drafter is still loading in a separate process"
        assert "no guesses: drafter is still loading" in StatusLine(verbose=True).text(done)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hit", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_drafter_process_is_restarted_and_used_again(load: Load, mode: str, hit: signal.Signals) -> None:
    with load() as engine, open_session(engine, mode) as session:
        wait_for_drafter(engine)
        first = say(session)
        before = worker_process()
        strike_idle(engine, before, hit)
        # In pipelined mode the loss may be noticed only after several answers.
        while not is_missed(engine, before):
            assert say(session).token_ids == first.token_ids
        wait_for_drafter(engine)
        assert worker_process().pid != before.pid
        assert drafts_again(session)
        assert say(session).speculation_off is None


@pytest.mark.slow
@pytest.mark.parametrize("hit", [signal.SIGKILL, signal.SIGSTOP])
def test_between_loss_and_restart_of_a_drafter_the_answer_reports_the_reason(load: Load, hit: signal.Signals) -> None:
    with load(NEVER_AGAIN) as engine, open_session(engine, "serial") as session:
        wait_for_drafter(engine)
        strike_idle(engine, worker_process(), hit)
        done = say(session)
        why = {signal.SIGKILL: "it was ended by SIGKILL", signal.SIGSTOP: "it does not answer"}[hit]
        expected = f"the worker process of drafter is lost: {why}; it is being started again"
        assert (done.stats.proposed, done.speculation_off) == (0, expected)
        assert f"no guesses: {expected}" in StatusLine(verbose=True).text(done)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_drafter_process_lost_twice_is_off_and_the_answer_reports_the_reason(load: Load, mode: str) -> None:
    with load() as engine, open_session(engine, mode) as session:
        expected = plain_text(engine, PROMPT, raw=True, max_tokens=TOKENS).token_ids
        for _ in range(2):
            wait_for_drafter(engine)
            lost = worker_process()
            lost.kill()
            while not is_missed(engine, lost):
                assert say(session).token_ids == expected
        lost_twice = (
            "drafter is off: its worker process was lost twice, the last time because it was ended by SIGKILL"
        )
        off = f"{lost_twice}; this session continues without it"
        for own in (session, open_session(engine, mode)):
            for _ in range(3):  # until the drafter has been used once more
                done = say(own)
            assert done.token_ids == expected
            assert (done.stats.proposed, done.speculation_off) == (0, off)
            assert StatusLine(verbose=True).text(done).endswith(f"no guesses: {off}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("leave", ["cancel", "close"])
def test_leaving_an_answer_does_not_wait_long_for_a_hanging_drafter_process(
    load: Load, mode: str, leave: str
) -> None:
    """Waiting for the drafter would exceed this test's time limit."""
    patient = replace(SHORT, load_s=WAIT_S, answer_s=3600.0, timed_s=3600.0)
    with load(replace(QUICK, deadlines=patient)) as engine:
        session = open_session(engine, mode)
        wait_for_drafter(engine)
        say(session)
        os.kill(worker_process().pid, signal.SIGSTOP)
        generation = session.generate("the " * 100, raw=True, max_tokens=1000)
        for event in generation:
            if isinstance(event, Text):
                time.sleep(0.05)  # the drafter is now in use and hangs
                session.cancel() if leave == "cancel" else session.close()
                break
        done = list(generation)[-1]
        assert isinstance(done, Done)
        assert done.finish_reason == "cancelled"
        session.close()


# ------------------------------------------------------------------------------------------ kills at any moment


def strike(process: psutil.Process, hit: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(hit)


class Moments:
    """Kills or stops workers, and compares every answer with plain decoding's."""

    prompts = ("hello world", "the water of the river " * 12, "one two three four " * 30)

    def __init__(self, mode: str, seed: int) -> None:
        self.mode = mode
        self.rng = random.Random(seed)
        self.strikes = self.given_up = self.proposed = 0
        self._expected: dict[tuple[str, bool], tuple[int, ...]] = {}

    def expect(self, engine: Engine) -> None:
        for prompt in self.prompts:
            for sampling in (Sampling(), SAMPLED):
                done = plain_text(engine, prompt, raw=True, max_tokens=TOKENS, sampling=sampling)
                self._expected[prompt, sampling.greedy] = done.token_ids

    def live_through(self, engine: Engine, phases: tuple[str, str], hits: tuple[signal.Signals, ...]) -> None:
        """Kill or stop both processes of an engine in these phases, and check answers during and after it."""
        with open_session(engine, self.mode) as session:
            struck: psutil.Process | None = None
            for phase, hit in zip(phases, hits, strict=True):
                if phase == "loading":
                    struck = self._strike_loading(session, hit, struck)
                    continue
                try:
                    wait_for_drafter(engine)
                    while (process := worker_process_or_none()) is None:
                        wait_for_drafter(engine)  # on a busy machine the last draft may have been too late
                except WorkerLostError:  # and the engine has given the drafter up
                    self.given_up += 1
                    continue
                struck = process
                self._strike_working(session, phase, functools.partial(strike, struck, hit))
                while not is_missed(engine, struck):
                    self._answer(session)  # until the loss is noticed
            for _ in range(3):
                self._answer(session)

    def _strike_loading(
        self, session: Session, hit: signal.Signals, former: psutil.Process | None
    ) -> psutil.Process | None:
        process = worker_process_or_none()
        while process is None or process == former:
            if "is off" in str(self._answer(session).speculation_off):
                self.given_up += 1
                return former  # on a busy machine a delay may look like a hang
            process = worker_process_or_none()
        at = time.monotonic() + self.rng.random() * 0.4
        while time.monotonic() < at:
            self._answer(session)
        strike(process, hit)
        self.strikes += 1
        return process

    def _strike_working(self, session: Session, phase: str, hit: Callable[[], None]) -> None:
        prompt, sampling = self._question()
        generation = session.generate(prompt, raw=True, max_tokens=TOKENS, sampling=sampling)
        rounds = {"idle": -1, "reading": 0, "drafting": self.rng.randrange(1, 6)}[phase]
        self.strikes += 1
        if phase == "idle":
            hit()
        last: Event | None = None
        for event in generation:
            last = event
            if rounds == 0 and isinstance(event, Text | Round):
                time.sleep(self.rng.random() * 0.003)
                hit()
            rounds -= rounds == 0 or isinstance(event, Round)
        hit()  # the process may have ended before
        self._check(last, prompt, sampling)

    def _question(self) -> tuple[str, Sampling]:
        return self.rng.choice(self.prompts), self.rng.choice((Sampling(), SAMPLED))

    def _answer(self, session: Session) -> Done:
        prompt, sampling = self._question()
        done = say(session, prompt, sampling=sampling)
        self._check(done, prompt, sampling)
        return done

    def _check(self, done: Event | None, prompt: str, sampling: Sampling) -> None:
        assert isinstance(done, Done)
        assert (done.finish_reason, len(done.token_ids)) == ("length", TOKENS)
        assert done.token_ids == self._expected[prompt, sampling.greedy]
        self.proposed += done.stats.proposed


# Every phase for the first and the second process, and in one of the modes with each signal. A hanging load has the
# longest limit.
PHASES = (
    ("reading", "drafting"),
    ("drafting", "idle"),
    ("idle", "reading"),
    ("loading", "drafting"),
    ("drafting", "drafting"),
    ("reading", "reading"),
    ("drafting", "loading"),
)
HITS = ((signal.SIGKILL, signal.SIGSTOP), (signal.SIGSTOP, signal.SIGKILL))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_killed_at_many_moments_never_changes_an_answer_and_leaks_nothing(load: Load, mode: str) -> None:
    moments = Moments(mode, seed=MODES.index(mode))
    processes = left()[2]
    resident: list[int] = []
    for number, phases in enumerate(PHASES):
        hits = HITS[(number + MODES.index(mode)) % 2]
        with load(QUICK, context=512) as engine:
            if not resident:
                moments.expect(engine)
            moments.live_through(engine, phases, hits)
        gc.collect()
        for _ in range(500):  # no thread waits for a process that was loading
            if left()[2] == processes:
                break
            time.sleep(0.01)
        assert left()[2] == processes
        resident.append(psutil.Process().memory_info().rss)
    assert moments.strikes + moments.given_up == 2 * len(PHASES)
    assert moments.strikes > 0
    assert moments.proposed > 0
    # A leaked model, cache or thread of each engine would show here.
    assert resident[-1] - resident[3] < 16 * 2**20
