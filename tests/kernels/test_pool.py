"""The thread pool by itself: order of steps, division of work, cancels, parking, stacks, and two pools on the same
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
WATCHDOG_S = 120  # each test takes a second at most; a hanging pool never ends

Ask = Callable[..., str]

linux = pytest.mark.skipif(sys.platform != "linux", reason="processors and default stacks are set on Linux only")


def compiled(folder: Path, *flags: str) -> Path:
    """The compiled program; skips the test if there is no compiler."""
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
def test_a_pool_step_runs_on_all_threads_after_all_ended_the_previous_one(ask: Ask, threads: int) -> None:
    assert ask("steps", threads) == "0 0"


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_cancel_ends_the_run_at_the_next_barrier_and_the_pool_stays_usable(ask: Ask, threads: int) -> None:
    assert ask("cancel", threads).split() == ["7"] * threads + ["39"] * threads


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16])
def test_each_item_goes_to_exactly_one_thread_also_after_a_cancel(ask: Ask, threads: int) -> None:
    assert ask("sharing", threads) == "0 0"


@pytest.mark.parametrize("threads", [2, 3, 4, 6, 8, 16])
def test_a_slow_thread_gets_items_in_proportion_to_its_speed(ask: Ask, threads: int) -> None:
    """Exact, on a simulated clock: one thread at a third of the others' speed, at least 16 items for each."""
    step, least, most, equal = map(float, ask("unequal", threads, 3, 16).split())
    assert step <= 1.12  # relative to items divided by speed
    assert 0.3 < least <= most < 0.4  # relative to another thread's items
    assert equal < 1.05  # equal threads wait for the last item at most


@pytest.mark.parametrize(("slowness", "each", "step"), [(3, 8, 1.25), (2, 8, 1.25), (4, 16, 1.25), (4, 64, 1.1)])
def test_with_few_items_a_step_takes_little_more_than_the_possible_minimum(
    ask: Ask, slowness: int, each: int, step: float
) -> None:
    for threads in (2, 8, 16):
        assert float(ask("unequal", threads, slowness, each).split()[0]) <= step + 0.005


@pytest.mark.parametrize("threads", [2, 4, 8])
def test_short_shares_are_divided_only_for_threads_slow_in_a_long_share(ask: Ask, threads: int) -> None:
    first, long, then, quick, long_again, whole = map(int, ask("worth", threads).split())
    assert (first, long) == (100, 75)  # the whole share, and the share without the offered quarter
    assert then < 55  # now the others help with its short shares too
    assert (quick, long_again, whole) == (100, 101, 100)  # until it was quick in a long share


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 7])
def test_an_idle_thread_pool_uses_no_processor_time(ask: Ask, threads: int) -> None:
    # 0.2 ms of spinning for each thread; a thread that never parked would use 500 ms.
    assert float(ask("idle", threads)) < 0.1


@pytest.mark.parametrize("threads", [2, 4])
def test_two_thread_pools_on_the_same_processors_both_finish(ask: Ask, threads: int) -> None:
    assert ask("crowd", threads) in {"0", "2"}


@pytest.fixture
def two_processors() -> Iterator[int]:
    """The number of processors of this test, at most two: for this thread and the processes it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield min(len(before), 2)
    os.sched_setaffinity(0, before)


@linux
def test_two_spinning_thread_pools_on_the_same_processors_both_finish(ask: Ask, two_processors: int) -> None:
    assert ask("crowd", two_processors) == "2"


@linux
def test_threads_sleep_at_barriers_while_other_programs_use_their_processors(ask: Ask, two_processors: int) -> None:
    if two_processors < 2:
        pytest.skip("two threads spin on two processors")
    assert ask("neighbours") == "crowded alone"


@linux
def test_threads_spin_only_if_each_can_have_a_processor(ask: Ask) -> None:
    here = len(os.sched_getaffinity(0))
    assert ask("spins", here) == "1"
    assert ask("spins", here + 1) == "0"
    assert ask("spins", 1, 1) == "1"
    assert ask("spins", 2, 1) == "0"  # a quota below the number of processors
    assert ask("spins", here, here) == "1"
    if here > 1:
        assert ask("spins", here, here - 1) == "0"


@linux
def test_threads_have_the_stack_that_kernels_need_on_any_system(ask: Ask) -> None:
    assert ask("stack") == "3"


def test_a_memory_fault_in_a_pool_thread_reaches_the_signal_handler(ask: Ask) -> None:
    assert ask("fault") == "handled"


def test_pool_threads_do_not_receive_the_applications_signals(ask: Ask) -> None:
    assert ask("signals") == "0"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the sanitizer is tried on Linux only")
@pytest.mark.parametrize("question", [("steps", 3), ("sharing", 2), ("sharing", 7), ("cancel", 3), ("crowd", 2)])
def test_the_thread_pool_has_no_data_race(question: tuple[object, ...]) -> None:
    with tempfile.TemporaryDirectory() as name:
        program = compiled(Path(name), "-fsanitize=thread", "-g")
        try:
            asking(program)("steps", 1)
        except AssertionError as error:
            pytest.skip(f"the sanitizer does not run here: {error}")
        asking(program)(*question)
