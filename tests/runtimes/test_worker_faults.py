"""A worker that dies, hangs or sends wrong answers; a killed or interrupted parent. Nothing hangs or is left over."""

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
from edgespec.runtimes.process.model import WorkerModel, WorkerSequence
from edgespec.runtimes.process.settings import WorkerSettings, run_in_process
from tests.support.fake_runtime import FakeModel
from tests.support.loading import start_model
from tests.support.started_threads import started_threads
from tests.support.worker_loaders import command

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and file descriptors of POSIX")

WAIT_S = 60
REPOSITORY = Path(edgespec.__file__).parent.parent
TINY = LoadRequest(runtime="fake", path=Path("tiny"))

# A working child answers within a fraction of a millisecond, a hung child never.
SHORT = Deadlines(load_s=WAIT_S, answer_s=0.15, token_s=0.001, cancel_s=0.3, close_s=0.2)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "_GRACE_S", 0.1)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that no process (zombies included), file or thread is left over."""
    own = psutil.Process()
    gc.collect()
    files, threads = own.num_fds(), len(started_threads())
    yield
    gc.collect()
    for _ in range(200):  # cancelled threads end when they are next scheduled
        if (own.num_fds(), len(started_threads()), own.children()) == (files, threads, []):
            return
        time.sleep(0.01)
    assert (own.num_fds(), len(started_threads()), own.children()) == (files, threads, [])


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


def hit_at_random(
    model: WorkerModel, rng: random.Random, hit: signal.Signals, deadlines: Deadlines | None = None
) -> WorkerLostError:
    """Send a signal during forwards of all sizes, rewinds and rows; returns the error that ended them.

    ``deadlines`` hold from shortly before the signal on.
    """
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
    if deadlines is not None:
        link, until = model._link, time.monotonic() + WAIT_S
        link.deadlines = model.times._deadlines = deadlines
        issued = link._issued
        while link._issued < issued + 2 and not running.done():  # the request in flight has the longer ones
            assert time.monotonic() < until
            time.sleep(0.001)
        time.sleep(0.01 * rng.random())
    model._link._process.send_signal(hit)  # unless a busy machine let a deadline pass, and the process has ended
    error = running.exception(WAIT_S)
    assert isinstance(error, WorkerLostError)
    assert 0 <= sequence.length < 600
    every_call_fails(model, sequence)
    return error


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_worker_killed_at_any_moment_is_reported_as_lost(tiny_gguf: Path, seed: int) -> None:
    request = LoadRequest(runtime="llama", path=tiny_gguf, settings=asdict(LlamaSettings()))
    with start_model(request) as model:
        error = hit_at_random(model, random.Random(seed), signal.SIGKILL)
        assert "SIGKILL" in error.message
        assert model.lost == "it was ended by SIGKILL"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_worker_stopped_at_any_moment_is_reported_as_not_answering(tiny_gguf: Path, seed: int) -> None:
    request = LoadRequest(runtime="llama", path=tiny_gguf, settings=asdict(LlamaSettings()))
    with start_model(request) as model:
        error = hit_at_random(model, random.Random(seed), signal.SIGSTOP, SHORT)
        assert "does not answer" in error.message


def test_a_worker_killed_before_its_first_use_is_reported_as_lost() -> None:
    with start_model(TINY, command=command("fake")) as model:
        sequence = model.open(16)
        os.kill(model.pid, signal.SIGKILL)
        psutil.Process(model.pid).wait(WAIT_S) if psutil.pid_exists(model.pid) else None
        every_call_fails(model, sequence)
    with pytest.raises(ClosedError):
        sequence.forward([1], 1)


def test_a_native_aborts_last_stderr_line_is_in_the_hint() -> None:
    with start_model(TINY, command=command("aborting")) as model, model.open(16) as sequence:
        with pytest.raises(WorkerLostError, match="SIGABRT") as caught:
            sequence.forward([1], 1)
        assert "GGML_ASSERT(device lost) failed" in caught.value.stderr
        assert caught.value.hint == "its last output: GGML_ASSERT(device lost) failed"
        assert sequence.length == 0
        every_call_fails(model, sequence)


def test_after_a_loss_best_ids_remain_but_unread_rows_raise() -> None:
    with start_model(TINY, command=command("fake")) as model, model.open(16) as sequence:
        rows = sequence.forward([1, 2], 2)
        best = rows.argmax().tolist()
        os.kill(model.pid, signal.SIGKILL)
        for use in (lambda: rows.logits(0), lambda: rows.top_k(2), rows.copy):
            with pytest.raises(WorkerLostError):
                use()
        assert rows.argmax().tolist() == best


def test_an_unexpected_error_in_the_worker_ends_the_process() -> None:
    with start_model(TINY, command=command("buggy")) as model, model.open(16) as sequence:
        with pytest.raises(WorkerLostError, match="IndexError: pop from empty list"):
            sequence.forward([1], 1)
        every_call_fails(model, sequence)


def test_a_worker_that_reports_a_wrong_cache_length_is_ended() -> None:
    with start_model(TINY, command=command("wrong_about_itself")) as model, model.open(16) as sequence:
        with pytest.raises(WorkerLostError, match="should hold 1 tokens"):
            sequence.forward([1], 1)
        assert sequence.length == 0
        every_call_fails(model, sequence)


@pytest.mark.slow
def test_a_worker_whose_forward_ignores_a_cancel_is_killed() -> None:
    patient = Deadlines(answer_s=WAIT_S, cancel_s=0.2, close_s=0.2)
    with start_model(TINY, command=command("unresponsive"), deadlines=patient) as model:
        sequence = model.open(16)
        for _ in range(100):
            running = sequence.submit(lambda: sequence.forward([1], 1))
            time.sleep(0.05)
            sequence.cancel()
            error = running.exception(WAIT_S)
            assert isinstance(error, WorkerLostError | CancelledError)
            if isinstance(error, WorkerLostError):
                break
            sequence.reset_cancel()  # the forward had not been sent
        assert "does not answer to a cancel" in error.message


def test_a_worker_whose_command_started_another_process_ends_when_it_is_lost() -> None:
    """As an application in one file does: what it starts is not known here, and has the pipes."""
    starts = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *command("unresponsive")]
    patient = Deadlines(answer_s=0.2, token_s=0.0, cancel_s=0.2, close_s=0.2)
    with start_model(TINY, command=starts, deadlines=patient) as model, model.open(16) as sequence:
        (inner,) = psutil.Process(model.pid).children()
        with pytest.raises(WorkerLostError, match="does not answer"):
            sequence.forward([1], 1)
        assert has_ended(inner)


def test_closing_ends_a_worker_that_does_not_read() -> None:
    with start_model(TINY, command=command("fake"), deadlines=SHORT) as model:
        os.kill(model.pid, signal.SIGSTOP)


def test_a_parent_stopped_past_the_deadline_accepts_an_answer_in_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline has passed when the parent resumes, but the answer is in the pipe."""
    monkeypatch.setattr(worker_link, "_GRACE_S", WAIT_S)
    late = Deadlines(answer_s=0.0, token_s=0.0)
    with start_model(TINY, command=command("fake"), deadlines=late) as model, model.open(16) as sequence:
        assert sequence.forward([1], 1).argmax_row(0) >= 0


def test_interrupting_a_load_ends_the_worker_process() -> None:
    watch = threading.Timer(0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    try:
        watch.start()
        start_model(TINY, command=command("slow"))
        pytest.fail("it was loaded")
    except KeyboardInterrupt:
        watch.join()


def test_a_request_larger_than_the_pipe_times_out_if_the_worker_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_frames, "MOST_HEADER_BYTES", 2**20)
    request = replace(TINY, name="n" * 200_000)
    patient = Deadlines(load_s=WAIT_S, answer_s=0.3, close_s=0.2)
    with pytest.raises(WorkerLostError, match="does not read"):
        start_model(request, command=[sys.executable, "-c", "import time; time.sleep(600)"], deadlines=patient)


def test_a_lost_worker_process_is_replaced_once() -> None:
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
        with pytest.raises(WorkerLostError, match="lost twice, the last time because it was ended by SIGKILL"):
            model.open(16)


@pytest.mark.slow
def test_a_worker_that_hangs_while_loading_is_killed_and_replaced_once() -> None:
    hanging = WorkerSettings(
        command=command("slow"), deadlines=Deadlines(load_s=0.2, close_s=0.2), restart_after_s=0.0
    )
    model = run_in_process(FakeModel(50).facts, TINY, hanging)
    with closing(model), pytest.raises(WorkerLostError, match="tiny is lost: it does not answer"):
        model.wait(WAIT_S)


def test_closing_a_worker_model_does_not_wait_for_its_load() -> None:
    settings = WorkerSettings(command=command("slow"), deadlines=Deadlines(close_s=0.2))
    model = run_in_process(FakeModel(50).facts, TINY, settings)
    model.load()
    while not psutil.Process().children():
        time.sleep(0.01)
    model.close()


@pytest.mark.slow
def test_a_hung_worker_with_timed_forwards_gets_the_short_deadline() -> None:
    """With the long deadline this test would time out."""
    patient = Deadlines(answer_s=3600.0, timed_s=WAIT_S, close_s=0.2)
    for use in (lambda own: own.forward([1], 1), lambda own: own.rewind(0)):
        with start_model(TINY, command=command("fake"), deadlines=patient) as model, model.open(16) as sequence:
            for _ in range(3):
                sequence.forward([1], 1)
            os.kill(model.pid, signal.SIGSTOP)
            assert isinstance(sequence, WorkerSequence)
            sequence._times._deadlines = replace(patient, timed_s=0.2)  # nothing can be timed any more
            with pytest.raises(WorkerLostError, match="does not answer"):
                use(sequence)


@pytest.mark.slow
def test_an_interrupted_request_does_not_disturb_the_next_request() -> None:
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
                pytest.fail("no interrupt arrived")
            except KeyboardInterrupt:
                watch.join()
            sequence.rewind(0)
        assert sequence.forward([1], 1).logits(0).shape == (50,)


# --------------------------------------------------------------------------------- invalid answers of a worker

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
        ("frame(b'{\"id\":1}'); time.sleep(600)", "it must be a table, got null"),
        ('frame(b\'{"id":1,"error":{"class":"SystemExit","message":"x"}}\'); time.sleep(600)', "SystemExit: x"),
        ('frame(b\'{"id":1,"error":5}\'); time.sleep(600)', "the reason is unknown"),
        ("os.close(1); time.sleep(600)", "ended by SIGKILL"),
        ("time.sleep(600)", "does not answer"),
        ("while True: out.write(b'y' * 65536)", "a frame claims"),
        ("while True: os.write(2, b'y' * 65536)", "does not answer"),
    ],
)
def test_a_worker_that_sends_invalid_frames_is_lost(code: str, words: str) -> None:
    hostile = [sys.executable, "-c", GREETING + FRAME + code]
    # An interpreter may take long to start. Only one that says nothing is given up early.
    deadlines = Deadlines(load_s=1.0 if words == "does not answer" else WAIT_S, close_s=0.2)
    before = psutil.Process().memory_info().rss
    with pytest.raises(WorkerLostError, match=words) as caught:
        start_model(TINY, command=hostile, deadlines=deadlines)
    assert len(caught.value.stderr) <= 4096
    assert len(caught.value.hint or "") < 300
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


# ------------------------------------------------------------------------------------------- parents that exit

PARENT = """
import sys, time
from edgespec.runtimes.process.frames import LoadRequest
from edgespec.runtimes.process.settings import StartingWorker, WorkerSettings, run_in_process
from pathlib import Path
from tests.support.fake_runtime import FakeModel
from tests.support.worker_loaders import command
request = LoadRequest(runtime="fake", path=Path("tiny"))
model = StartingWorker(request, WorkerSettings(command=command("LOADER"))).wait()
sequence = model.open(16)
print(model.pid, flush=True)
"""


def run_parent(code: str, loader: str = "fake") -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start a process with a worker, in a separate process group; returns both."""
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
            if process.status() == psutil.STATUS_ZOMBIE:  # its new parent has not reaped it yet
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
def test_a_worker_ends_with_its_killed_parent(ending: str) -> None:
    parent, child = run_parent("time.sleep(600)")
    with parent:
        ENDINGS[ending](parent)
        parent.wait(WAIT_S)
        assert has_ended(child)


@pytest.mark.slow
def test_a_worker_ends_when_its_parent_exits_without_closing_it() -> None:
    parent, child = run_parent("sequence.forward([1], 1)")
    with parent:
        assert parent.wait(WAIT_S) == 0
        assert has_ended(child)


def test_ctrl_c_interrupts_the_parent_but_not_the_worker() -> None:
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
        child.send_signal(signal.SIGINT)  # as if a caller had put both into one group
        assert parent.stdout.readline() == "interrupted\n"
        assert parent.stdout.readline() == "1\n"
        assert parent.wait(WAIT_S) == 0
        assert has_ended(child)
