"""The pool of threads by itself: steps in turn, who does what, cancels, parking, stacks, and two pools on the same
processors."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgespec.kernels import compile as compiling
from tests.support.kernel_calls import require_native

SOURCE = Path(__file__).with_name("pool_check.c")
WATCHDOG_S = 120  # each takes a second at most; what hangs does so for ever

Ask = Callable[..., str]

linux = pytest.mark.skipif(sys.platform != "linux", reason="processors and default stacks are set on Linux only")


def compiled(folder: Path, *flags: str) -> Path:
    """The program, or a skipped test where nothing compiles here."""
    require_native()
    program = folder / "pool_check"
    command = [
        "-std=c11",
        "-O2",
        "-pthread",
        f"-I{compiling.FOLDER}",
        *flags,
        os.fspath(SOURCE),
        "-o",
        os.fspath(program),
    ]
    try:
        done = subprocess.run(
            [*compiling._find_compiler(None), *command], capture_output=True, text=True, check=False
        )
    except (compiling.CompileError, OSError) as error:
        pytest.skip(f"no C compiler: {error}")
    if done.returncode and flags:
        pytest.skip(f"the compiler knows no {flags}")
    assert done.returncode == 0, done.stderr
    return program


def asking(program: Path) -> Ask:
    def ask(*words: object) -> str:
        done = subprocess.run(
            [program, *map(str, words)], capture_output=True, text=True, check=False, timeout=WATCHDOG_S
        )
        assert done.returncode == 0, (words, done.returncode, done.stderr)
        return done.stdout.strip()

    return ask


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    return asking(compiled(tmp_path_factory.mktemp("pool")))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_step_is_run_by_all_and_begins_when_all_have_ended_the_last(ask: Ask, threads: int) -> None:
    assert ask("steps", threads) == "0 0"


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_cancel_ends_all_threads_at_the_next_barrier_and_not_the_pool(ask: Ask, threads: int) -> None:
    assert ask("cancel", threads).split() == ["7"] * threads + ["39"] * threads


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16])
def test_every_item_of_a_step_is_given_to_exactly_one_thread_and_after_a_cancel_too(ask: Ask, threads: int) -> None:
    assert ask("sharing", threads) == "0 0"


@pytest.mark.parametrize("threads", [2, 3, 4, 6, 8, 16])
def test_a_slow_thread_does_as_much_as_it_can_and_the_others_the_rest(ask: Ask, threads: int) -> None:
    """On a clock of its own, so exact: one thread at a third of the others' speed, 16 items for each and more."""
    step, least, most, equal = map(float, ask("unequal", threads, 3, 16).split())
    assert step <= 1.12  # of the time that it would take with the items divided by speed
    assert 0.3 < least <= most < 0.4  # of what another one does
    assert equal < 1.05  # among equal threads nobody waits for more than the last item


@pytest.mark.parametrize(("slowness", "each", "step"), [(3, 8, 1.25), (2, 8, 1.25), (4, 16, 1.25), (4, 64, 1.1)])
def test_few_items_and_other_speeds_stay_near_what_can_be_had(
    ask: Ask, slowness: int, each: int, step: float
) -> None:
    for threads in (2, 8, 16):
        assert float(ask("unequal", threads, slowness, each).split()[0]) <= step + 0.005


@pytest.mark.parametrize("threads", [2, 4, 8])
def test_short_shares_are_whole_until_a_long_one_tells_which_thread_is_slow(ask: Ask, threads: int) -> None:
    first, long, then, quick, long_again, whole = map(int, ask("worth", threads).split())
    assert (first, long) == (100, 75)  # all of it, and all but the quarter that was offered
    assert then < 55  # now it is helped with short ones as well
    assert (quick, long_again, whole) == (100, 101, 100)  # until it was quick in a long one


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 7])
def test_an_idle_pool_uses_no_processor(ask: Ask, threads: int) -> None:
    # 0.2 ms of spinning for each thread; one that never parked would use 500.
    assert float(ask("idle", threads)) < 0.1


@pytest.mark.parametrize("threads", [2, 4])
def test_two_pools_on_the_same_processors_both_finish(ask: Ask, threads: int) -> None:
    assert ask("crowd", threads) in {"0", "2"}


@pytest.fixture
def two_processors() -> Iterator[int]:
    """How many this test has, at most two: this thread, and the processes that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield min(len(before), 2)
    os.sched_setaffinity(0, before)


@linux
def test_two_pools_that_spin_on_the_same_processors_both_finish(ask: Ask, two_processors: int) -> None:
    assert ask("crowd", two_processors) == "2"


@linux
def test_threads_sleep_at_barriers_while_others_want_their_processors(ask: Ask, two_processors: int) -> None:
    if two_processors < 2:
        pytest.skip("two threads spin on two processors")
    assert ask("neighbours") == "crowded alone"


@linux
def test_threads_spin_only_where_each_can_have_a_processor(ask: Ask) -> None:
    here = len(os.sched_getaffinity(0))
    assert ask("spins", here) == "1"
    assert ask("spins", here + 1) == "0"
    assert ask("spins", 1, 1) == "1"
    assert ask("spins", 2, 1) == "0"  # a quota below the processors there are
    assert ask("spins", here, here) == "1"
    if here > 1:
        assert ask("spins", here, here - 1) == "0"


@linux
def test_threads_have_the_stack_that_kernels_need_whatever_the_systems_default(ask: Ask) -> None:
    assert ask("stack") == "3"


def test_a_fault_in_a_thread_reaches_its_handler(ask: Ask) -> None:
    assert ask("fault") == "handled"


def test_the_applications_signals_are_left_to_its_own_threads(ask: Ask) -> None:
    assert ask("signals") == "0"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the sanitizer is tried on Linux only")
@pytest.mark.parametrize("question", [("steps", 3), ("sharing", 2), ("sharing", 7), ("cancel", 3), ("crowd", 2)])
def test_no_two_threads_race(question: tuple[object, ...]) -> None:
    with tempfile.TemporaryDirectory() as name:
        program = compiled(Path(name), "-fsanitize=thread", "-g")
        try:
            asking(program)("steps", 1)
        except AssertionError as error:
            pytest.skip(f"the sanitizer does not run here: {error}")
        asking(program)(*question)
