"""A worker process that dies, hangs or lies; a parent that is killed or interrupted. Nothing hangs or is left."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

import edgespec
from edgespec.errors import CancelledError, ClosedError, WorkerLostError
from edgespec.interfaces.model import Sequence
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.runtimes.process import frames as worker_frames, link as worker_link
from edgespec.runtimes.process.deadlines import Deadlines
from edgespec.runtimes.process.frames import LoadRequest
from edgespec.runtimes.process.model import WorkerModel, WorkerSequence, start_model
from edgespec.runtimes.process.settings import WorkerSettings, run_in_process
from tests.support.fake_runtime import FakeModel
from tests.support.worker_loaders import command

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and file descriptors of POSIX")

WAIT_S = 60
REPOSITORY = Path(edgespec.__file__).parent.parent
TINY = LoadRequest(runtime="fake", path=Path("tiny"))

# A child that works answers in a fraction of a millisecond; one that does not, never.
SHORT = Deadlines(load_s=WAIT_S, answer_s=0.15, token_s=0.001, cancel_s=0.3, close_s=0.2)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "_GRACE_S", 0.1)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process, not even a zombie, no file and no thread more than before."""
    own = psutil.Process()
    gc.collect()
    files, threads = own.num_fds(), threading.active_count()
    yield
    gc.collect()
    for _ in range(200):  # threads that were told to end do so when they are next scheduled
        if (own.num_fds(), threading.active_count(), own.children()) == (files, threads, []):
            return
        time.sleep(0.01)
    assert (own.num_fds(), threading.active_count(), own.children()) == (files, threads, [])


def every_call_fails(model: WorkerModel, sequence: Sequence) -> None:
    for use in (
        lambda: sequence.forward([1], 1),
        lambda: sequence.forward([1] * 300, 0),
        lambda: sequence.rewind(0),
        lambda: sequence.run(lambda: sequence.forward([1], 1)),
        lambda: sequence.submit(lambda: sequence.forward([1], 1)).result(WAIT_S),
        lambda: model.open(16),
    ):
        with pytest.raises(WorkerLostError):
            use()
    sequence.cancel()
    sequence.reset_cancel()


def hit_at_random(model: WorkerModel, rng: random.Random, hit: signal.Signals) -> WorkerLostError:
    """Send a signal while forwards of all sizes, rewinds and rows go on; returns how they ended."""
    sequence = model.open(600)

    def work() -> None:
        while True:
            rows = sequence.forward([rng.randrange(100) for _ in range(rng.choice((1, 1, 3, 40, 400)))], 1)
            rows.argmax_row(0)
            rows.logits(0)
            sequence.rewind(min(sequence.length, rng.randrange(150)))

    before = 0.05 * rng.random()
    running = sequence.submit(work)
    time.sleep(before)
    os.kill(model.pid, hit)
    error = running.exception(WAIT_S)
    assert isinstance(error, WorkerLostError)
    assert 0 <= sequence.length < 600
    every_call_fails(model, sequence)
    return error


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_any_moment(tiny_gguf: Path, seed: int) -> None:
    request = LoadRequest(runtime="llama", path=tiny_gguf, settings=asdict(LlamaSettings()))
    with start_model(request) as model:
        error = hit_at_random(model, random.Random(seed), signal.SIGKILL)
        assert "SIGKILL" in error.message
        assert model.lost == "it was ended by SIGKILL"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_stopped_at_any_moment(tiny_gguf: Path, seed: int) -> None:
    request = LoadRequest(runtime="llama", path=tiny_gguf, settings=asdict(LlamaSettings()))
    with start_model(request, deadlines=SHORT) as model:
        error = hit_at_random(model, random.Random(seed), signal.SIGSTOP)
        assert "does not answer" in error.message


def test_killed_before_it_is_used() -> None:
    with start_model(TINY, command=command("fake")) as model:
        sequence = model.open(16)
        os.kill(model.pid, signal.SIGKILL)
        psutil.Process(model.pid).wait(WAIT_S) if psutil.pid_exists(model.pid) else None
        every_call_fails(model, sequence)
    with pytest.raises(ClosedError):
        sequence.forward([1], 1)


def test_an_abort_is_told_with_its_last_words() -> None:
    with start_model(TINY, command=command("aborting")) as model, model.open(16) as sequence:
        with pytest.raises(WorkerLostError, match="SIGABRT") as caught:
            sequence.forward([1], 1)
        assert "GGML_ASSERT(device lost) failed" in caught.value.stderr
        assert caught.value.hint == "its last words: GGML_ASSERT(device lost) failed"
        assert sequence.length == 0
        every_call_fails(model, sequence)


def test_rows_that_were_not_fetched_are_lost_and_best_ids_are_not() -> None:
    with start_model(TINY, command=command("fake")) as model, model.open(16) as sequence:
        rows = sequence.forward([1, 2], 2)
        best = rows.argmax().tolist()
        os.kill(model.pid, signal.SIGKILL)
        for use in (lambda: rows.logits(0), lambda: rows.top_k(2), rows.copy):
            with pytest.raises(WorkerLostError):
                use()
        assert rows.argmax().tolist() == best


def test_an_error_no_contract_foresees_ends_the_process() -> None:
    with start_model(TINY, command=command("buggy")) as model, model.open(16) as sequence:
        with pytest.raises(WorkerLostError, match="IndexError: pop from empty list"):
            sequence.forward([1], 1)
        every_call_fails(model, sequence)


def test_a_cache_that_says_something_else_ends_the_process() -> None:
    with start_model(TINY, command=command("wrong_about_itself")) as model, model.open(16) as sequence:
        with pytest.raises(WorkerLostError, match="should hold 1 tokens"):
            sequence.forward([1], 1)
        assert sequence.length == 0
        every_call_fails(model, sequence)


@pytest.mark.slow
def test_a_forward_that_ignores_a_cancel_is_given_up() -> None:
    patient = Deadlines(answer_s=WAIT_S, cancel_s=0.2, close_s=0.2)
    with start_model(TINY, command=command("unresponsive"), deadlines=patient) as model:
        sequence = model.open(16)
        running = sequence.submit(lambda: sequence.forward([1], 1))
        time.sleep(0.05)
        sequence.cancel()
        error = running.exception(WAIT_S)
        assert isinstance(error, WorkerLostError | CancelledError)
        if isinstance(error, CancelledError):  # it had not begun
            pytest.fail("the forward was cancelled before it was sent")
        assert "does not answer to a cancel" in error.message


def test_closing_ends_a_process_that_does_not_listen() -> None:
    with start_model(TINY, command=command("fake"), deadlines=SHORT) as model:
        os.kill(model.pid, signal.SIGSTOP)


def test_a_parent_that_was_stopped_takes_the_answer_that_came_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline is over when it goes on, but the answer is there."""
    monkeypatch.setattr(worker_link, "_GRACE_S", WAIT_S)
    late = Deadlines(answer_s=0.0, token_s=0.0)
    with start_model(TINY, command=command("fake"), deadlines=late) as model, model.open(16) as sequence:
        assert sequence.forward([1], 1).argmax_row(0) >= 0


def test_an_interrupted_load_ends_its_process() -> None:
    watch = threading.Timer(0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    try:
        watch.start()
        start_model(TINY, command=command("slow"))
        pytest.fail("it was loaded")
    except KeyboardInterrupt:
        watch.join()


def test_a_request_larger_than_a_pipe_does_not_wait_for_a_child_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_frames, "MOST_HEADER_BYTES", 2**20)
    request = replace(TINY, name="n" * 200_000)
    patient = Deadlines(load_s=WAIT_S, answer_s=0.3, close_s=0.2)
    with pytest.raises(WorkerLostError, match="does not read"):
        start_model(request, command=[sys.executable, "-c", "import time; time.sleep(600)"], deadlines=patient)


def test_a_lost_process_is_replaced_once() -> None:
    settings = WorkerSettings(command=command("fake"), restart_after_s=0.0)
    with closing(run_in_process(FakeModel(50).facts, TINY, settings)) as model:
        best = []
        for _ in range(2):
            assert model.wait(WAIT_S)
            sequence = model.open(16)
            assert isinstance(sequence, WorkerSequence)
            best.append(sequence.forward([1, 2], 1).argmax_row(0))
            os.kill(sequence.pid, signal.SIGKILL)
            with pytest.raises(WorkerLostError):
                sequence.forward([1], 1)
        assert best[0] == best[1]
        with pytest.raises(WorkerLostError, match="lost twice, now since it was ended by SIGKILL"):
            model.open(16)


@pytest.mark.slow
def test_a_process_that_hangs_while_it_loads_is_given_up_and_replaced_once() -> None:
    hanging = WorkerSettings(
        command=command("slow"), deadlines=Deadlines(load_s=0.2, close_s=0.2), restart_after_s=0.0
    )
    model = run_in_process(FakeModel(50).facts, TINY, hanging)
    with closing(model), pytest.raises(WorkerLostError, match="tiny is lost: it does not answer"):
        model.wait(WAIT_S)


def test_closing_does_not_wait_for_a_load() -> None:
    settings = WorkerSettings(command=command("slow"), deadlines=Deadlines(close_s=0.2))
    model = run_in_process(FakeModel(50).facts, TINY, settings)
    model.load()
    while not psutil.Process().children():
        time.sleep(0.01)
    model.close()


@pytest.mark.slow
def test_a_process_that_was_timed_is_not_waited_for_as_if_it_were_not() -> None:
    """Were it, this test would be ended by its own limit."""
    patient = Deadlines(answer_s=3600.0, timed_s=1.0, close_s=0.2)
    for use in (lambda own: own.forward([1], 1), lambda own: own.rewind(0)):
        with start_model(TINY, command=command("fake"), deadlines=patient) as model, model.open(16) as sequence:
            for _ in range(3):
                sequence.forward([1], 1)
            os.kill(model.pid, signal.SIGSTOP)
            with pytest.raises(WorkerLostError, match="does not answer"):
                use(sequence)


@pytest.mark.slow
def test_a_request_that_was_interrupted_does_not_disturb_the_next() -> None:
    with start_model(TINY, command=command("fake")) as model, model.open(16) as sequence:
        for attempt in range(50):
            rows = sequence.forward([1], 1)
            watch = threading.Timer(
                0.0005 * attempt / 50, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]
            )
            try:
                watch.start()
                for _ in range(10**6):
                    rows.logits(0)
                pytest.fail("nobody interrupted")
            except KeyboardInterrupt:
                watch.join()
            sequence.rewind(0)
        assert sequence.forward([1], 1).logits(0).shape == (50,)


# ------------------------------------------------------------------------------------------- children that lie

GREETING = "import sys, os, time, struct; read = sys.stdin.buffer.read; out = sys.stdout.buffer\n"
FRAME = """
def frame(header, body=b''):
    read(1)  # an answer before the question would be another lie
    out.write(struct.pack('<II', 4 + len(header) + len(body), len(header)) + header + body); out.flush()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("sys.exit(3)", "exit status 3"),
        ("out.write(os.urandom(4096) + b'x' * 99); out.flush(); time.sleep(600)", "a frame claims|not JSON|header"),
        ("out.write(b'\\xff' * 4); out.write(b'\\0' * 4); out.flush(); time.sleep(600)", "a frame claims"),
        ("out.write(b'\\0' * 8); out.flush(); time.sleep(600)", "a frame claims"),
        ("out.write(b'\\x10\\0\\0'); out.flush()", "ends inside a frame"),
        ("frame(b'{')", "not JSON"),
        ("frame(b'[1]')", "header is"),
        ("frame(b'[' * 60000)", "not JSON"),
        ("frame(b'{}'); time.sleep(600)", "id is None"),
        ("frame(b'{\"id\":true}'); time.sleep(600)", "id is True"),
        ("frame(b'{\"id\":77}'); time.sleep(600)", "request 77, which was never made"),
        ("frame(b'{\"id\":1}'); time.sleep(600)", "facts are None"),
        ('frame(b\'{"id":1,"error":{"class":"SystemExit","message":"x"}}\'); time.sleep(600)', "SystemExit: x"),
        ('frame(b\'{"id":1,"error":5}\'); time.sleep(600)', "the reason is unknown"),
        ("os.close(1); time.sleep(600)", "ended by SIGKILL"),
        ("time.sleep(600)", "does not answer"),
        ("while True: out.write(b'y' * 65536)", "a frame claims"),
        ("while True: os.write(2, b'y' * 65536)", "does not answer"),
    ],
)
def test_a_child_that_talks_nonsense_is_lost(code: str, words: str) -> None:
    hostile = [sys.executable, "-c", GREETING + FRAME + code]
    deadlines = Deadlines(load_s=1.0, close_s=0.2)
    before = psutil.Process().memory_info().rss
    with pytest.raises(WorkerLostError, match=words) as caught:
        start_model(TINY, command=hostile, deadlines=deadlines)
    assert len(caught.value.stderr) <= 4096
    assert len(caught.value.hint or "") < 300
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


# ---------------------------------------------------------------------------------------- parents that go away

PARENT = """
import sys, time
from edgespec.runtimes.process.settings import WorkerSettings, run_in_process
from edgespec.runtimes.process.model import start_model, LoadRequest
from pathlib import Path
from tests.support.fake_runtime import FakeModel
from tests.support.worker_loaders import command
model = start_model(LoadRequest(runtime="fake", path=Path("tiny")), command=command("LOADER"))
sequence = model.open(16)
print(model.pid, flush=True)
"""


def run_parent(code: str, loader: str = "fake") -> tuple[subprocess.Popen[str], psutil.Process]:
    """A process with a worker of its own, in a process group of its own; returns both."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.replace("LOADER", loader) + code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
    )
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


def has_ended(process: psutil.Process) -> bool:
    for _ in range(WAIT_S * 100):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:  # whoever inherited it has not looked yet
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


ENDINGS: dict[str, Callable[[subprocess.Popen[str]], object]] = {
    "killed": lambda parent: parent.kill(),
    "terminated": lambda parent: parent.terminate(),
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_child_ends_with_its_parent(ending: str) -> None:
    parent, child = run_parent("time.sleep(600)")
    with parent:
        ENDINGS[ending](parent)
        parent.wait(WAIT_S)
        assert has_ended(child)


@pytest.mark.slow
def test_a_child_ends_when_its_parent_just_leaves() -> None:
    parent, child = run_parent("sequence.forward([1], 1)")
    with parent:
        assert parent.wait(WAIT_S) == 0
        assert has_ended(child)


def test_ctrl_c_is_for_the_parent_alone() -> None:
    code = """
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    print(sequence.forward([1], 1).count, flush=True)
model.close()
"""
    parent, child = run_parent(code)
    assert parent.stdout is not None
    with parent:
        assert parent.stdout.readline() == "ready\n"
        os.killpg(parent.pid, signal.SIGINT)
        child.send_signal(signal.SIGINT)  # and for whoever put both into one group after all
        assert parent.stdout.readline() == "interrupted\n"
        assert parent.stdout.readline() == "1\n"
        assert parent.wait(WAIT_S) == 0
        assert has_ended(child)
