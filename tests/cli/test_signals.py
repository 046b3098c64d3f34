"""What a signal does at each point of a command, in this process."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from edgespec.cli.terminal import interrupts as module
from edgespec.cli.terminal.interrupts import SIGNALS, Interrupts
from edgespec.cli.terminal.output import ProgressPrinter, State
from edgespec.errors import CancelledError, ClosedError
from edgespec.files.progress import Loading

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are a matter of POSIX")

WAIT_S = 60.0
CTRL_C = (signal.SIGINT,)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which the process would have ended immediately."""
    codes: list[int] = []
    monkeypatch.setattr(module.os, "_exit", codes.append)
    return codes


@pytest.fixture
def interrupts(ended: list[int]) -> Iterator[Interrupts]:
    with Interrupts().installed() as handled:
        yield handled
    assert not [each for each in threading.enumerate() if each.name == "edgespec-signals"]


def test_a_signal_is_noted_and_raises_nothing_by_itself(interrupts: Interrupts) -> None:
    interrupts.check()
    assert (interrupts.pending(), interrupts.leaving) == (False, False)
    signal.raise_signal(signal.SIGINT)
    assert (interrupts.pending(), interrupts.leaving, interrupts.exit_code) == (True, True, None)
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
    interrupts.obeyed()
    assert interrupts.pending(), "a program that is to end does not continue"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_exit_code_tells_which_signal_ended_the_program(interrupts: Interrupts, number: int) -> None:
    signal.raise_signal(number)
    assert (interrupts.leaving, interrupts.exit_code) == (True, 128 + number)


def test_a_second_ctrl_c_ends_the_process_immediately(
    interrupts: Interrupts, ended: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    signal.raise_signal(signal.SIGINT)
    assert ended == []
    signal.raise_signal(signal.SIGINT)
    assert ended == [130]
    assert capfd.readouterr().err == "interrupted\n"


def test_a_second_sigterm_ends_the_process_immediately_and_more_sighups_do_not(
    interrupts: Interrupts, ended: list[int]
) -> None:
    for _ in range(3):  # a terminal that is closed sends several
        signal.raise_signal(signal.SIGHUP)
    assert (interrupts.exit_code, ended) == (128 + signal.SIGHUP, [])
    signal.raise_signal(signal.SIGTERM)  # and the end of a login one of these besides
    assert ended == [128 + signal.SIGHUP]
    with Interrupts().installed():
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the second ends native code too"


def test_a_forgiven_ctrl_c_only_ends_the_present_work(interrupts: Interrupts) -> None:
    with interrupts.during(forgives=CTRL_C):
        signal.raise_signal(signal.SIGINT)
        assert (interrupts.pending(), interrupts.leaving) == (True, False)
        interrupts.obeyed()
        assert not interrupts.pending()


def test_ctrl_c_twice_within_two_seconds_is_not_forgiven(
    interrupts: Interrupts, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with interrupts.during(forgives=CTRL_C):
        signal.raise_signal(signal.SIGINT)
        interrupts.obeyed()
        now += 2.1
        signal.raise_signal(signal.SIGINT)
        interrupts.obeyed()
        assert not interrupts.leaving
        now += 1.9
        signal.raise_signal(signal.SIGINT)
        assert (interrupts.leaving, ended) == (True, [])


@pytest.mark.parametrize("order", [(signal.SIGTERM, signal.SIGHUP), (signal.SIGHUP, signal.SIGTERM)])
def test_a_sighup_with_a_forgiven_sigterm_is_not_the_second_of_two(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    """systemd sends both at the same time to what runs in a scope."""
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.0)
    with interrupts.during(forgives=SIGNALS):
        for number in (*order, signal.SIGHUP):
            signal.raise_signal(number)
            assert (interrupts.pending(), interrupts.leaving) == (True, False)
        signal.raise_signal(signal.SIGTERM)
    assert (interrupts.leaving, interrupts.exit_code) == (True, 128 + signal.SIGTERM)


def test_a_second_ctrl_c_is_not_forgiven_before_the_first_was_obeyed(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with interrupts.during(forgives=CTRL_C):
        signal.raise_signal(signal.SIGINT)
        now += 60
        signal.raise_signal(signal.SIGINT)
    assert interrupts.leaving


def test_no_number_of_presses_that_stop_an_answer_leaves(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with interrupts.during(forgives=CTRL_C):
        with interrupts.during(forgives=CTRL_C, counts=False):
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
                now += 3
        assert (interrupts.pending(), interrupts.leaving) == (True, False)
        signal.raise_signal(signal.SIGINT)  # the answer has just ended
        assert not interrupts.leaving, "the first of two"
        interrupts.obeyed()
        signal.raise_signal(signal.SIGINT)
        assert interrupts.leaving


def test_an_answer_that_does_not_stop_is_left(interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with interrupts.during(forgives=CTRL_C, counts=False):
        for seconds in (0.0, 10.0, 0.1):
            assert not interrupts.leaving
            now += seconds
            signal.raise_signal(signal.SIGINT)
    assert interrupts.leaving


def test_a_block_forgives_only_the_signals_that_it_names(interrupts: Interrupts) -> None:
    with interrupts.during(forgives=CTRL_C):
        signal.raise_signal(signal.SIGTERM)
    assert interrupts.exit_code == 128 + signal.SIGTERM
    with Interrupts().installed() as serving, serving.during(forgives=SIGNALS):
        signal.raise_signal(signal.SIGTERM)
        assert (serving.leaving, serving.exit_code) == (False, None)


def test_ctrl_break_on_windows_is_handled_as_sigterm_is(monkeypatch: pytest.MonkeyPatch, ended: list[int]) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    spec = importlib.util.spec_from_file_location("interrupts_of_windows", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "interrupts_of_windows", own)
    spec.loader.exec_module(own)
    before = signal.getsignal(signal.SIGUSR1)
    with own.Interrupts().installed() as interrupts:
        with interrupts.during(forgives=own.SIGNALS):
            signal.raise_signal(signal.SIGUSR1)
            assert (interrupts.pending(), interrupts.leaving) == (True, False)
        interrupts.obeyed()
        with interrupts.during():
            signal.raise_signal(signal.SIGUSR1)
        assert (interrupts.leaving, interrupts.exit_code) == (True, 128 + signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, "the second ends native code too"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_stops_what_a_block_does_until_the_block_ends(interrupts: Interrupts) -> None:
    """The first calls may come before there is anything to stop; their errors are of no interest."""
    stopped, calls = threading.Event(), list[threading.Thread]()

    def stop() -> None:
        calls.append(threading.current_thread())
        if len(calls) < 3:
            raise ClosedError("not begun")
        stopped.set()

    with interrupts.during(stop):
        signal.raise_signal(signal.SIGINT)
        assert stopped.wait(WAIT_S)
    done = len(calls)
    assert threading.main_thread() not in calls
    time.sleep(0.15)
    assert len(calls) == done


def test_a_block_ends_after_the_call_that_stops_it(interrupts: Interrupts) -> None:
    """Nothing is freed by another thread while the program exits."""
    stopping, over = threading.Event(), list[str]()

    def stop() -> None:
        stopping.set()
        time.sleep(0.2)
        over.append("stopped")

    with interrupts.during(stop):
        signal.raise_signal(signal.SIGINT)
        assert stopping.wait(WAIT_S)
    assert over[0] == "stopped"


def test_a_signal_does_not_stop_what_begins_after_it_was_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the watcher wakes late: a Ctrl-C at one prompt would count as a second one at the next."""
    late, stopped = threading.Event(), threading.Event()
    monkeypatch.setattr(Interrupts, "_watch", _after(late, Interrupts._watch))
    with Interrupts().installed() as interrupts:
        try:
            with interrupts.during(forgives=CTRL_C):
                signal.raise_signal(signal.SIGINT)
                interrupts.obeyed()
                with interrupts.during(stopped.set, forgives=CTRL_C):
                    late.set()
                    assert not stopped.wait(0.2)
        finally:
            late.set()


def _after(event: threading.Event, work: Callable[[Interrupts], None]) -> Callable[[Interrupts], None]:
    def waiting(interrupts: Interrupts) -> None:
        event.wait(WAIT_S)
        work(interrupts)

    return waiting


def test_a_block_does_not_begin_after_a_signal(interrupts: Interrupts) -> None:
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts.during(lambda: None):
        pytest.fail("it began")


def test_a_signal_ends_a_wait_for_a_line(interrupts: Interrupts) -> None:
    main = threading.get_ident()

    def line() -> str:
        threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT]).start()
        threading.Event().wait(WAIT_S)
        return "a line"

    with pytest.raises(KeyboardInterrupt):
        interrupts.read(line)


def test_a_line_is_not_awaited_after_a_signal_and_its_wait_ends_with_it(interrupts: Interrupts) -> None:
    assert interrupts.read(lambda: "a line") == "a line"
    signal.raise_signal(signal.SIGINT)  # raises nothing here
    with pytest.raises(KeyboardInterrupt):
        interrupts.read(lambda: pytest.fail("it was awaited"))


def test_progress_ends_an_operation_after_a_signal(interrupts: Interrupts) -> None:
    state = State(interrupts=interrupts, json=True)
    with state.progress() as progress:
        progress(Loading("loading"))
        progress.job.check("it was cancelled")
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            progress(Loading("loading"))
        with pytest.raises(CancelledError, match="it was cancelled"):
            progress.job.check("it was cancelled")
    ProgressPrinter(quiet=True)(Loading("of a server, which ends in its own way"))


def test_ignored_signals_stay_ignored_and_handlers_are_restored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    others = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Interrupts().installed() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert not interrupts.pending()
            assert signal.getsignal(signal.SIGTERM) == interrupts._handle
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert {number: signal.getsignal(number) for number in others} == others
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_installs_no_handler() -> None:
    def elsewhere() -> None:
        with Interrupts().installed() as interrupts:
            interrupts.check()
            found.append(signal.getsignal(signal.SIGTERM))

    found: list[object] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_without_a_thread_signals_are_noted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Interrupts().installed() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.pending()
