"""The worker process: its output is parsed, bad output is refused, and no process outlives the call."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgespec.errors import (
    CancelledError,
    EdgespecError,
    InvalidRequestError,
    MemoryLimitError,
    RuntimeUnavailableError,
)
from edgespec.export.optimum import process as optimum_process
from edgespec.export.optimum.process import check_interpreter, last_line, run_worker, versions_in
from edgespec.files.progress import Job, ProgressEvent

PYTHON = Path(sys.executable)
SAY = "import json, os, signal, subprocess, sys, time\ndef say(**values): print(json.dumps(values), flush=True)\n"

Worker = Callable[[str], None]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Replaces the worker by a short script."""

    def write(body: str) -> None:
        (tmp_path / "worker.py").write_text(SAY + body)
        monkeypatch.setattr(optimum_process, "WORKER", tmp_path / "worker.py")

    return write


def run(**more: object) -> object:
    return run_worker(PYTHON, ["convert", "a", "b"], source="tiny", **more)  # type: ignore[arg-type]


def test_worker_stages_are_reported_and_the_result_returned(worker: Worker) -> None:
    worker("say(stage='one')\nsay(stage='two')\nprint('noise', file=sys.stderr)\nsay(result={'args': sys.argv[1:]})")
    events: list[ProgressEvent] = []
    assert run(job=Job(events.append)) == {"args": ["convert", "a", "b"]}
    assert [(event.stage, event.source) for event in events] == [("one", "tiny"), ("two", "tiny")]
    assert run() == {"args": ["convert", "a", "b"]}


def test_the_worker_is_isolated_offline_and_has_no_stdin(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    worker(
        "say(result={'isolated': sys.flags.isolated, 'path': '/somewhere' in sys.path,"
        " 'offline': os.environ['HF_HUB_OFFLINE'], 'input': sys.stdin.read()})"
    )
    assert run() == {"isolated": 1, "path": False, "offline": "1", "input": ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ("say(error={'kind': 'unknown', 'message': 'no such model'})", InvalidRequestError, "tiny: no such model"),
        ("say(error={'kind': 'weights', 'message': 'lm_head is missing'})", InvalidRequestError, "lm_head"),
        ("say(error={'kind': 'check', 'message': 'logits differ'})", InvalidRequestError, "logits differ"),
        ("say(error={'kind': 'missing', 'message': 'torch'})", RuntimeUnavailableError, "lacks packages for"),
        ("say(error={'kind': 'memory', 'message': 'too large'})", MemoryLimitError, "too large"),
        ("say(error={'kind': 'failed', 'message': 'KeyError: 1'})", EdgespecError, "KeyError: 1"),
        ("say(error={'kind': 7, 'message': ['a'] * 9999})", EdgespecError, "could not be converted"),
        ("say(error='text')", EdgespecError, "without an answer"),
        ("say(result=[1])", EdgespecError, "without an answer"),
        ("say(stage=['no', 'text'])", EdgespecError, "without an answer"),
        ("print('no JSON')", EdgespecError, "not an answer: no JSON"),
        ("print('[' * 100000)", EdgespecError, "not an answer"),
        ("print('[1, 2]')", EdgespecError, "not an answer: [1, 2]"),
        ("sys.stdout.buffer.write(b'\\xff\\xfe\\n')", EdgespecError, "not an answer"),
        ("print('x' * 10_000_000)", EdgespecError, "not an answer"),
        ("for n in range(5000): say(stage='again')", EdgespecError, "prints too much"),
        ("sys.exit('the last of it')", EdgespecError, "(exit code 1): the last of it"),
        ("pass", EdgespecError, "no output"),
    ],
)
def test_bad_worker_output_raises_an_error_with_a_reason(
    worker: Worker, body: str, error: type[EdgespecError], words: str
) -> None:
    worker(body)
    with pytest.raises(EdgespecError) as raised:
        run()
    assert type(raised.value) is error
    assert words in raised.value.message
    assert len(raised.value.message) < 600
    assert raised.value.hint
    assert ("site folder are not seen" in raised.value.hint) == (error is RuntimeUnavailableError)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals that kill")
def test_a_killed_worker_raises_memory_limit_error(worker: Worker) -> None:
    worker("say(stage='one')\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(MemoryLimitError, match="ran out of memory"):
        run()


CHILD = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\nsay(stage=str(child.pid))\n"


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_cancellation_kills_the_worker_and_its_children(worker: Worker) -> None:
    worker(CHILD + "time.sleep(60)")
    pids: list[int] = []
    with pytest.raises(CancelledError):
        run(job=Job(lambda event: pids.append(int(event.stage)), cancelled=lambda: bool(pids)))
    assert gone(pids[0])


def test_an_exception_of_the_caller_kills_the_worker(worker: Worker) -> None:
    worker(CHILD + "time.sleep(60)")
    pids: list[int] = []

    def interrupt(event: ProgressEvent) -> None:
        pids.append(int(event.stage))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job=Job(interrupt))
    assert gone(pids[0])


def test_without_a_thread_to_read_with_the_worker_is_killed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker("time.sleep(60)")
    started, start_group = list[subprocess.Popen[bytes]](), optimum_process.start_group

    def noted(*arguments: Any, **settings: Any) -> subprocess.Popen[bytes]:
        started.append(start_group(*arguments, **settings))
        return started[-1]

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(optimum_process, "start_group", noted)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MemoryLimitError, match="no thread can be started"):
        run()
    assert started[0].returncode is not None


@pytest.mark.slow
def test_a_child_that_keeps_the_pipe_open_does_not_block(worker: Worker) -> None:
    worker(CHILD + "say(result={'done': 1})")
    pids: list[int] = []
    assert run(job=Job(lambda event: pids.append(int(event.stage)))) == {"done": 1}
    assert gone(pids[0])


# ------------------------------------------------------------------------------------------------ interpreters


def test_check_interpreter_returns_the_versions_of_the_worker(worker: Worker) -> None:
    worker("say(result={'versions': {'torch': '2.13.0', 'n': 5}} if sys.argv[1:] == ['probe'] else {})")
    assert check_interpreter(PYTHON) == {"torch": "2.13.0", "n": "5"}
    assert versions_in({"versions": "none"}) == {}


def test_the_real_worker_reports_missing_packages() -> None:
    """This environment has neither PyTorch nor Optimum."""
    with pytest.raises(RuntimeUnavailableError) as raised:
        check_interpreter(PYTHON)
    assert "optimum-onnx" in raised.value.message
    assert "torch" in raised.value.message
    assert "--python" in (raised.value.hint or "")


def test_a_path_that_is_not_a_program_is_refused_as_interpreter(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "text"):
        with pytest.raises(InvalidRequestError, match="not a program"):
            check_interpreter(path)


@pytest.mark.skipif(os.name == "nt", reason="Windows decides by the ending what can be run")
def test_a_program_that_is_not_python_is_refused_as_interpreter(tmp_path: Path) -> None:
    for name, content in (("broken", b"\x7fELF nothing"), ("echo", b"#!/bin/sh\necho hello\n")):
        path = tmp_path / name
        path.write_bytes(content)
        path.chmod(0o755)
        with pytest.raises(EdgespecError) as raised:
            check_interpreter(path)
        assert "Python" in (raised.value.hint or "")


def test_last_line_returns_the_last_non_empty_line() -> None:
    assert last_line(b"one\n  two \n\n \n") == "two"
    assert last_line(b"\xff") == "�"
    assert last_line(b"") == "no output"
    assert len(last_line(b"x" * 5000)) == 300
