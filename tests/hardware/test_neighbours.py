"""How busy other programs keep the processors, as seen by this process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import edgespec.hardware.neighbours as module
from edgespec.hardware.neighbours import BUSY_SHARE, Neighbours, Used, processor_seconds, worker_seconds


def looks(*seen: Used | None) -> Callable[[], Used | None]:
    left: Iterator[Used | None] = iter(seen)
    return lambda: next(left)


def share(*seen: Used | None) -> float:
    neighbours = Neighbours(looks(*seen))
    for _ in range(len(seen) // 2):
        with neighbours:
            pass
    return neighbours.share


def test_the_share_leaves_out_this_process_own_use() -> None:
    assert share(Used(0, 0, 0), Used(1, 3, 4)) == 0.5
    assert share(Used(5, 50, 500), Used(6, 51, 504)) == 0.0
    assert share(Used(0, 0, 0), Used(2, 1.9, 4)) == 0.0, "systems count in steps"


def test_the_use_of_own_workers_is_left_out_too() -> None:
    worked = iter([1.0, 3.0, 3.0, 2.0])  # the last time one has ended
    neighbours = Neighbours(looks(Used(0, 0, 0), Used(1, 4, 4), Used(1, 4, 4), Used(1, 5, 8)), lambda: next(worked))
    with neighbours:
        pass
    assert neighbours.share == 0.25
    with neighbours:
        pass
    assert neighbours.share == 0.25


def test_running_workers_seconds_are_counted() -> None:
    before = worker_seconds()
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as worker:  # type: ignore[call-overload]
        worker.stdout.readline()
        assert worker_seconds() - before >= 0.2
        worker.communicate(b"\n")
    assert worker_seconds() - before < 0.2


def test_only_time_inside_the_context_manager_is_added_up() -> None:
    quiet, busy = (Used(0, 0, 0), Used(1, 1, 2)), (Used(1, 90, 100), Used(2, 92, 102))
    assert share(*quiet, *busy) == pytest.approx(1 / 4)


def test_short_times_and_unknown_use_count_as_quiet() -> None:
    assert share(Used(0, 0, 0), Used(0, 0.05, 0.05)) == 0.0
    assert share(None, Used(0, 1, 1)) == share(Used(0, 0, 0), None) == 0.0
    assert Neighbours(looks()).share == 0.0
    assert Neighbours()._look is module.processor_seconds


def test_neighbours_are_busy_above_the_allowed_share() -> None:
    for taken, expected in ((BUSY_SHARE - 0.01, False), (BUSY_SHARE + 0.01, True)):
        neighbours = Neighbours(looks(Used(0, 0, 0), Used(0, taken, 1)))
        with neighbours:
            pass
        assert neighbours.busy is expected


def used() -> tuple[float, float]:
    found = processor_seconds()
    assert found is not None
    return found.busy_s, found.total_s


def test_our_processors_are_counted_with_what_a_hypervisor_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Times(SimpleNamespace):
        def __iter__(self) -> Iterator[float]:
            return iter(vars(self).values())

    every = [
        Times(user=1.0, idle=5.0, iowait=1.0, steal=3.0, guest=0.5),
        Times(user=7.0, idle=1.0, iowait=0.0, steal=0.0, guest=0.0),
    ]
    monkeypatch.setattr(module.psutil, "cpu_times", lambda percpu: every if percpu else None)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _pid: {0}, raising=False)
    assert used() == (4.0, 10.0)
    # Processors 1 and 3 are switched off; a container lists ours alone, under other numbers.
    for online, allowed, expected in (([0, 2], {2}, (7.0, 8.0)), ([0, 1], {12, 13}, (11.0, 18.0))):
        monkeypatch.setattr(module, "online_processors", lambda online=online: online)
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda _pid, own=allowed: own, raising=False)
        assert used() == expected

    def refuse(percpu: bool) -> Any:
        raise PermissionError(percpu)

    monkeypatch.setattr(module.psutil, "cpu_times", refuse)
    assert processor_seconds() is None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its processors")
def test_another_busy_program_is_detected_and_own_work_is_not() -> None:
    before = os.sched_getaffinity(0)
    own = {min(before)}
    os.sched_setaffinity(0, own)
    try:
        alone = Neighbours(processor_seconds)
        with alone:
            end = time.perf_counter() + 0.5
            while time.perf_counter() < end:
                pass
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as program:
            beside = Neighbours(processor_seconds)
            with beside:
                time.sleep(1.0)
            program.kill()
    finally:
        os.sched_setaffinity(0, before)
    assert beside.busy
    assert beside.share > alone.share
