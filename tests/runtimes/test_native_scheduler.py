"""Steps that requests share: what a step takes, who leads, what waits for whom, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from edgespec.interfaces.model import PREFILL_CHUNK_TOKENS, Company
from edgespec.runtimes.native.cache import NativeCancel
from edgespec.runtimes.native.library import BAD_REQUEST, CANCELLED, OK
from edgespec.runtimes.native.scheduler import (
    ACTIVE_S,
    FIRST_ROWS,
    MOST_ACTIVE_S,
    PROMPT_SHARE,
    RECENT_S,
    STEP_S,
    BatchScheduler,
    Member,
    Request,
    Share,
    StepTimes,
    prompt_rows,
)
from edgespec.runtimes.native.turns import Turns

WATCHDOG_S = 60.0


def request(count: int, scored: int = 1, *, tree: bool = False, member: Member | None = None) -> Request:
    tokens = np.arange(count, dtype=np.int32)
    parents = np.full(count, -1, dtype=np.int32) if tree else None
    return Request(member or Member(NativeCancel()), 0, tokens, 0, scored, parents)


def counts(shares: Sequence[Share]) -> list[tuple[int, int]]:
    return [(share.count, share.scored) for share in shares]


# ------------------------------------------------------------------------------------------------------- times


def test_times_between_and_beyond_the_known_ones() -> None:
    times = StepTimes()
    assert times.seconds(1) is None
    assert times.most_rows(1.0) == FIRST_ROWS
    times.add(1, 0.02)
    times.add(8, 0.04)
    times.add(64, 0.2)
    assert [times.seconds(rows) for rows in (1, 8, 64, 128)] == pytest.approx([0.02, 0.04, 0.2, 0.4])
    assert times.seconds(36) == pytest.approx(0.12)
    assert [times.most_rows(limit) for limit in (0.01, 0.021, 0.041, 0.2, 9.0)] == [0, 1, 8, 64, 256]


def test_times_follow_the_machine() -> None:
    times = StepTimes()
    times.add(8, 0.04)
    for _ in range(20):
        times.add(8, 0.08)
    assert times.seconds(8) == pytest.approx(0.08, rel=0.01)


def test_one_slow_step_is_soon_forgotten() -> None:
    times = StepTimes()
    times.add(8, 5.0)  # it read the weights from the disk
    times.add(8, 0.04)
    assert times.seconds(8) == pytest.approx(0.04)
    times.add(8, 5.0)
    assert times.seconds(8) == pytest.approx(0.05)


def test_a_slow_first_step_of_other_rows_is_recognised() -> None:
    for slow, seconds in ((1, 0.04), (64, 0.08)):
        times = StepTimes()
        times.add(slow, 5.0)
        times.add(8, 0.04)
        times.add(16, 0.06)
        times.add(32, 0.08)
        assert times.seconds(slow) == pytest.approx(0.16 if slow == 64 else seconds)


def test_prompts_leave_running_answers_most_of_their_speed() -> None:
    times = StepTimes()
    times.add(1, 0.03)
    times.add(256, 1.0)
    rows, saved_s = prompt_rows(times, 4, [0.08, 0.2], answering=True)
    spent = (times.seconds(4 + rows) or 0.0) - (times.seconds(4) or 0.0)
    assert PROMPT_SHARE * 0.08 * 0.8 < spent <= PROMPT_SHARE * 0.08
    assert spent + saved_s == pytest.approx(PROMPT_SHARE * 0.08)
    # Rounds that are short: still a share of the step's own time.
    rows, _ = prompt_rows(times, 40, [0.0001], answering=True)
    assert times.seconds(40 + rows) == pytest.approx((1.0 + PROMPT_SHARE) * (times.seconds(40) or 0.0), rel=0.05)
    # With an answer whose rounds are long or not known, the step's length is the limit.
    for rounds_s in ([], [5.0]):
        rows, _ = prompt_rows(times, 0, rounds_s, answering=True)
        assert times.seconds(rows) == pytest.approx(STEP_S, rel=0.05)


@pytest.mark.parametrize("row_s", [0.001, 0.008, 0.02, 0.4])
def test_where_a_row_takes_longer_than_a_share_prompts_save_time_for_it(row_s: float) -> None:
    """On the average prompts take their share, and every prompt ends."""
    times = StepTimes()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        times.add(rows, 0.03 + row_s * rows)
    plain_s = times.seconds(3) or 0.0
    saved_s, taken, spent_s, steps = 0.0, 0, 0.0, 400
    for _ in range(steps):
        rows, saved_s = prompt_rows(times, 3, [plain_s], answering=True, saved_s=saved_s)
        taken, spent_s = taken + rows, spent_s + (times.seconds(3 + rows) or 0.0) - plain_s
    assert taken > 10
    # Of a row that takes longer than what may be saved, some time is lost.
    assert spent_s / steps == pytest.approx(PROMPT_SHARE * plain_s, rel=0.15 if row_s < STEP_S else 0.4)


@pytest.mark.parametrize("row_s", [0.0001, 0.001, 0.008])
def test_saved_time_makes_no_step_longer_than_the_limit(row_s: float) -> None:
    times = StepTimes()
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        times.add(rows, 0.03 + row_s * rows)
    for answers, rounds_s in ((1, 0.6), (3, 0.1), (16, 0.1)):
        least_s = times.seconds(answers) or 0.0
        rows, _ = prompt_rows(times, answers, [rounds_s], answering=True, saved_s=0.99 * STEP_S)
        assert (times.seconds(answers + rows) or 0.0) <= max(STEP_S, (1.0 + PROMPT_SHARE) * least_s)


def test_the_time_that_prompts_save_is_limited() -> None:
    times = StepTimes()
    times.add(1, 0.1)
    times.add(64, 6.4)
    assert [prompt_rows(times, 1, [0.1], answering=True, saved_s=saved_s)[0] for saved_s in (0.06, 0.08)] == [0, 1]
    slow = StepTimes()
    slow.add(1, 1.0)
    slow.add(64, 64.0)
    assert prompt_rows(slow, 1, [1.0], answering=True, saved_s=0.99 * STEP_S)[0] == 0
    rows, saved_s = prompt_rows(slow, 1, [1.0], answering=True, saved_s=STEP_S)
    assert (rows, saved_s) == (1, -STEP_S), "one row at last, whatever it takes"
    fast = StepTimes()
    fast.add(256, 1e-6)
    assert prompt_rows(fast, 1, [100.0], answering=True, saved_s=STEP_S)[1] == STEP_S
    assert prompt_rows(times, 0, [0.03], answering=True, saved_s=-STEP_S) == (1, -STEP_S)


def test_prompts_without_a_running_answer_are_not_cut_to_a_steps_length() -> None:
    times = StepTimes()
    times.add(256, 100 * STEP_S)
    assert prompt_rows(times, 0, [], answering=False, saved_s=0.1) == (PREFILL_CHUNK_TOKENS, 0.1)
    assert prompt_rows(times, 1, [], answering=False)[0] < PREFILL_CHUNK_TOKENS


def test_a_prompt_next_to_a_silent_answer_is_cut_to_a_steps_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafter may be reading: the answer's next rows are not to wait for a step of 256 rows."""
    times = StepTimes()
    times.add(1, STEP_S / 10)
    times.add(256, 20 * STEP_S)
    rows, _ = prompt_rows(times, 0, [], answering=False, may_return=True)
    assert times.seconds(rows) == pytest.approx(STEP_S, rel=0.1)
    model, silent, over = slow_model(monkeypatch), Member(NativeCancel()), Member(NativeCancel())
    model.scheduler._members |= {silent, over}
    now = model.scheduler._clock()
    silent.ended(now - 2 * ACTIVE_S, answers=True, step_s=0.0)
    over.ended(now - 2 * RECENT_S, answers=True, step_s=0.0)
    assert (silent.is_answering(now), silent.may_return(now), over.may_return(now)) == (False, True, False)
    assert model.scheduler.run(request(200)) == OK
    assert len(model.steps) > 5
    silent.ended(now - 2 * RECENT_S, answers=True, step_s=0.0)
    assert model.scheduler.run(request(200)) == OK
    assert model.steps[-1] == [(200, 1)]


def test_the_rest_of_a_prompt_is_cut_but_scored_rows_are_not() -> None:
    prompt = request(200, 10)
    prompt.done = 185
    assert not prompt.is_whole
    prompt.done = 190
    assert prompt.is_whole
    assert request(16, 0).is_whole
    assert not request(17, 0).is_whole


def test_a_prompt_that_slow_answers_wait_for_takes_a_share_of_their_steps() -> None:
    """Where one row alone takes longer than a step is to take, a few rows would make a prompt of 1000 tokens last
    minutes.
    """
    times = StepTimes()
    times.add(1, 2 * STEP_S)
    times.add(16, 2 * STEP_S)
    times.add(256, 20 * STEP_S)
    for rows in (0, 4):
        taken = rows + prompt_rows(times, rows, [3 * STEP_S], answering=True)[0]
        assert times.seconds(taken) == pytest.approx((1.0 + PROMPT_SHARE) * 2 * STEP_S, rel=0.05)
        assert taken > 20


def test_the_next_prompt_of_a_sequence_is_not_cut_for_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, members = slow_model(monkeypatch), [Member(NativeCancel()) for _ in range(2)]
    model.may_compute.clear()
    running = [model.start(request(20, 0))]
    assert model.begun.wait(WATCHDOG_S)
    for number, member in enumerate(members, 1):
        member.ended(model.scheduler._clock(), answers=True, step_s=WATCHDOG_S)
        running.append(model.start(request(200, member=member)))
        model.wait_for(number)
    model.may_compute.set()
    for thread, _ in running:
        thread.join(WATCHDOG_S)
    assert model.steps[1] == [(200, 1), (56, 0)]


def test_slow_answers_are_known_as_running() -> None:
    """A step of a large model may take longer than ACTIVE_S, and so may all that follows until the next one."""
    member = Member(NativeCancel())
    now = 1.0
    for _ in range(20):
        member.arrived(now)
        now += 4 * ACTIVE_S
        member.ended(now, answers=True, step_s=4 * ACTIVE_S)
        assert member.is_answering(now + 1.5 * ACTIVE_S)
        now += 2 * ACTIVE_S
    assert member.round_s == pytest.approx(6 * ACTIVE_S)
    assert not member.is_answering(now + 30 * ACTIVE_S)


def slow_model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """Its steps are known to take long, whatever the test's steps take."""
    model = Model()
    model.scheduler._times.add(1, STEP_S / 10)
    model.scheduler._times.add(256, 20 * STEP_S)
    monkeypatch.setattr(StepTimes, "add", lambda _times, _rows, _seconds: None)
    return model


def test_prompts_that_arrive_together_share_whole_steps_while_no_answer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = slow_model(monkeypatch)
    model.may_compute.clear()
    running = [model.start(request(20, 0))]
    assert model.begun.wait(WATCHDOG_S)
    running += [model.start(request(200)) for _ in range(2)]
    model.wait_for(2)
    model.may_compute.set()
    for thread, _ in running:
        thread.join(WATCHDOG_S)
    assert model.steps == [[(20, 0)], [(200, 1), (56, 0)], [(144, 1)]]


def test_a_sequence_answers_until_it_is_silent() -> None:
    member = Member(NativeCancel())
    member.arrived(0.0)
    assert not member.is_answering(0.0)
    member.ended(1.0, answers=True, step_s=0.1)
    member.arrived(1.0005)
    member.ended(1.1, answers=True, step_s=0.1)
    assert member.is_answering(1.1 + ACTIVE_S / 2)
    assert not member.is_answering(1.1 + 1.01 * ACTIVE_S)
    assert member.round_s == pytest.approx(0.1)
    member.ended(1.6, answers=False, step_s=0.1)
    assert not member.is_answering(1.6)


def test_a_step_of_an_hour_does_not_make_an_answer_last_for_hours() -> None:
    """The process was stopped and continued."""
    member = Member(NativeCancel())
    for now, step_s in ((1.0, 0.1), (3601.0, 3600.0)):
        member.arrived(now)
        member.ended(now, answers=True, step_s=step_s)
    assert member.is_answering(3601.0)
    assert not member.is_answering(3601.0 + 1.01 * MOST_ACTIVE_S)
    assert not member.may_return(3601.0 + 1.01 * MOST_ACTIVE_S)


# --------------------------------------------------------------------------------------------------- schedulers


class Model:
    """Computes steps when told to, and keeps what they had."""

    def __init__(
        self, *, turns: Turns | None = None, weight: float = 1.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.steps: list[list[tuple[int, int]]] = []
        self.code: Callable[[Share], int] = lambda share: OK
        self.may_compute = threading.Event()
        self.may_compute.set()
        self.begun = threading.Event()
        self.scheduler = BatchScheduler(self.compute, turns=turns or Turns(clock), weight=weight, clock=clock)

    def compute(self, shares: Sequence[Share]) -> list[int]:
        self.steps.append(counts(shares))
        self.begun.set()
        assert self.may_compute.wait(WATCHDOG_S)
        return [self.code(share) for share in shares]

    def start(self, wanted: Request) -> tuple[threading.Thread, list[object]]:
        found: list[object] = []

        def run() -> None:
            try:
                found.append(self.scheduler.run(wanted))
            except ZeroDivisionError as error:
                found.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread, found

    def wait_for(self, waiting: int) -> None:
        deadline = time.monotonic() + WATCHDOG_S
        while len(self.scheduler._waiting) != waiting:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_requests_that_arrive_during_a_step_share_the_next_one() -> None:
    model = Model()
    model.may_compute.clear()
    running = [model.start(request(1))]
    assert model.begun.wait(WATCHDOG_S)
    running += [model.start(request(rows, rows)) for rows in (2, 3, 4)]
    model.wait_for(3)
    model.may_compute.set()
    for thread, found in running:
        thread.join(WATCHDOG_S)
        assert found == [OK]
    assert model.steps[0] == [(1, 1)]
    assert sorted(model.steps[1]) == [(2, 2), (3, 3), (4, 4)]
    assert model.scheduler._leader is None


def test_a_request_knows_the_other_answers_of_its_last_step() -> None:
    model = Model()
    model.may_compute.clear()
    first = request(1)
    running = [model.start(first)]
    assert model.begun.wait(WATCHDOG_S)
    others = [request(2, 2), request(4, 4, tree=True), request(3, 0), request(200)]
    running += [model.start(each) for each in others]
    model.wait_for(4)
    model.may_compute.set()
    for thread, found in running:
        thread.join(WATCHDOG_S)
        assert found == [OK]
    assert first.company == Company()
    assert others[0].company == Company(answers=1, rows=4, reading=True)
    assert others[1].company == Company(answers=1, rows=2, reading=True)
    assert others[2].company == Company(answers=2, rows=6, reading=True), (
        "a forward without scored rows does not count as a round"
    )


def test_a_request_knows_how_long_it_waited_for_another_step() -> None:
    now = [100.0]
    model = Model(clock=lambda: now[0])
    model.may_compute.clear()
    first, later = request(1, 0), request(2, 2)
    running = [model.start(first)]
    assert model.begun.wait(WATCHDOG_S)
    running.append(model.start(later))
    model.wait_for(1)
    now[0] += 0.5
    model.may_compute.set()
    for thread, found in running:
        thread.join(WATCHDOG_S)
        assert found == [OK]
    assert (first.waited_s, later.waited_s) == (0.0, pytest.approx(0.5))


def test_each_request_gets_its_own_status() -> None:
    model = Model()
    model.code = lambda share: BAD_REQUEST if share.count == 3 else OK
    model.may_compute.clear()
    running = [model.start(request(1))]
    assert model.begun.wait(WATCHDOG_S)
    running += [model.start(request(rows, rows)) for rows in (2, 3)]
    model.wait_for(2)
    model.may_compute.set()
    for thread, _ in running:
        thread.join(WATCHDOG_S)
    assert [found for _, found in running] == [[OK], [OK], [BAD_REQUEST]]


def test_a_waiting_request_that_is_cancelled_returns_while_the_step_runs() -> None:
    model = Model()
    model.may_compute.clear()
    first, first_found = model.start(request(1))
    assert model.begun.wait(WATCHDOG_S)
    cancelled = request(2)
    thread, found = model.start(cancelled)
    model.wait_for(1)
    cancelled.member.cancel.set(True)
    thread.join(WATCHDOG_S)
    assert found == [CANCELLED]
    model.may_compute.set()
    first.join(WATCHDOG_S)
    assert first_found == [OK]
    assert len(model.steps) == 1


def test_a_prompt_that_is_cancelled_ends_between_two_steps() -> None:
    model = Model()
    model.may_compute.clear()
    thread, found = model.start(request(1))
    assert model.begun.wait(WATCHDOG_S)
    prompt, other = request(200), request(150)
    prompts = [model.start(prompt), model.start(other)]
    model.wait_for(2)
    model.code = lambda share: prompt.member.cancel.set(True) or OK if share.request is other else OK  # type: ignore[func-returns-value]
    model.may_compute.set()
    for each in (thread, prompts[0][0], prompts[1][0]):
        each.join(WATCHDOG_S)
    assert (found, prompts[0][1], prompts[1][1]) == ([OK], [CANCELLED], [OK])
    assert sum(count for step in model.steps for count, _ in step) < 1 + 200 + 150


def test_a_cancelled_leader_computes_no_step_of_others() -> None:
    model = Model()
    leader, other = request(200), request(150)
    led_by: list[threading.Thread] = []

    def code(share: Share) -> int:
        led_by.append(threading.current_thread())
        if share.request is leader:
            leader.member.cancel.set(True)
        return OK

    model.code = code
    model.may_compute.clear()
    running = model.start(leader)
    assert model.begun.wait(WATCHDOG_S)
    waiting = model.start(other)
    model.wait_for(1)
    leader.tokens = np.arange(300, dtype=np.int32)  # the step that runs is not its last
    model.may_compute.set()
    for thread, _ in (running, waiting):
        thread.join(WATCHDOG_S)
    assert (running[1], waiting[1]) == ([CANCELLED], [OK])
    assert led_by[0] is running[0]
    assert set(led_by[1:]) == {waiting[0]}


def test_an_error_in_the_leaders_thread_does_not_stop_the_others() -> None:
    model = Model()

    def fail(share: Share) -> int:
        model.code = lambda _share: OK
        raise ZeroDivisionError

    model.code = fail
    model.may_compute.clear()
    first, first_found = model.start(request(1))
    assert model.begun.wait(WATCHDOG_S)
    second, second_found = model.start(request(1))
    model.wait_for(1)
    model.may_compute.set()
    first.join(WATCHDOG_S)
    second.join(WATCHDOG_S)
    assert isinstance(first_found[0], ZeroDivisionError)
    assert second_found == [OK]


def shared_step(model: Model, *others: Request) -> list[tuple[threading.Thread, list[object]]]:
    """One request that is computed, and others that wait to share the next step, which has not begun."""
    model.may_compute.clear()
    running = [model.start(request(1))]
    assert model.begun.wait(WATCHDOG_S)
    for number, other in enumerate(others, 1):
        running.append(model.start(other))
        model.wait_for(number)
    return running


def test_an_error_in_a_shared_step_is_the_leaders_alone() -> None:
    model = Model()
    running = shared_step(model, request(2, 2), request(3, 3), request(4, 4))

    def fail_once(share: Share) -> int:
        if share.count > 1:
            model.code = lambda _share: OK
            raise ZeroDivisionError
        return OK

    model.code = fail_once
    model.may_compute.set()
    for thread, _ in running:
        thread.join(WATCHDOG_S)
    assert [str(found) for _, found in running] == ["[0]", "[ZeroDivisionError()]", "[0]", "[0]"]
    assert model.steps == [[(1, 1)], [(2, 2), (3, 3), (4, 4)], [(3, 3), (4, 4)]]
    assert model.scheduler._leader is None


def test_a_cancel_during_a_shared_step_ends_only_its_request() -> None:
    model = Model()
    cancelled, other = request(2, 2), request(3, 3)
    running = shared_step(model, cancelled, other)

    def cancel(share: Share) -> int:
        if share.request is cancelled:
            cancelled.member.cancel.set(True)
        return OK

    model.code = cancel
    model.may_compute.set()
    for thread, _ in running:
        thread.join(WATCHDOG_S)
    assert [found for _, found in running] == [[OK], [CANCELLED], [OK]]
    assert model.steps[1:] == [[(2, 2), (3, 3)]]


def test_a_request_whose_thread_stops_waiting_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    stops, stays = request(2, 2), request(3, 3)
    wait = model.scheduler._wait

    def fail(waiting: Request) -> None:
        if waiting is stops:
            raise ZeroDivisionError
        wait(waiting)

    monkeypatch.setattr(model.scheduler, "_wait", fail)
    model.may_compute.clear()
    running = [model.start(request(1))]
    assert model.begun.wait(WATCHDOG_S)
    stopped, found = model.start(stops)
    stopped.join(WATCHDOG_S)
    assert isinstance(found[0], ZeroDivisionError)
    running.append(model.start(stays))
    model.wait_for(1)
    model.may_compute.set()
    for thread, _ in running:
        thread.join(WATCHDOG_S)
    assert [each for _, each in running] == [[OK], [OK]]
    assert model.steps == [[(1, 1)], [(3, 3)]]


def test_a_thread_that_stops_waiting_hands_the_lead_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    stops, stays = request(2, 2), request(3, 3)
    wait = model.scheduler._wait

    def fail(waiting: Request) -> None:
        wait(waiting)
        if waiting is stops:
            raise ZeroDivisionError

    monkeypatch.setattr(model.scheduler, "_wait", fail)
    running = shared_step(model, stops, stays)
    model.may_compute.set()
    for thread, _ in running:
        thread.join(WATCHDOG_S)
    assert [str(found) for _, found in running] == ["[0]", "[ZeroDivisionError()]", "[0]"]
    assert model.steps == [[(1, 1)], [(3, 3)]]
    assert model.scheduler._leader is None


def test_a_thread_that_stops_waiting_stays_until_the_step_that_uses_its_memory_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    stops, stop = request(2, 2), threading.Event()
    wait = model.scheduler._wait

    def fail(waiting: Request) -> None:
        if waiting is stops:
            assert stop.wait(WATCHDOG_S)
            raise ZeroDivisionError
        wait(waiting)

    monkeypatch.setattr(model.scheduler, "_wait", fail)
    leader = request(3, 3)
    running = shared_step(model, leader, stops)
    second, may_end = threading.Event(), threading.Event()

    def code(share: Share) -> int:
        if share.request is stops:
            second.set()
            assert may_end.wait(WATCHDOG_S)
        return OK

    model.code = code
    model.may_compute.set()
    assert second.wait(WATCHDOG_S)
    stop.set()
    running[2][0].join(0.1)
    assert running[2][0].is_alive()
    may_end.set()
    for thread, _ in running:
        thread.join(WATCHDOG_S)
    assert [str(found) for _, found in running] == ["[0]", "[0]", "[ZeroDivisionError()]"]
    assert model.scheduler._leader is None


def test_a_closed_sequence_is_not_waited_for() -> None:
    model, member = Model(), Member(NativeCancel())
    assert model.scheduler.run(request(1, member=member)) == OK
    assert model.scheduler._members == {member}
    model.scheduler.forget(member)
    assert not model.scheduler._members


def test_a_sequence_closed_while_the_lock_is_held_is_forgotten_with_the_next_request() -> None:
    model, member, other = Model(), Member(NativeCancel()), Member(NativeCancel())
    assert model.scheduler.run(request(1, member=member)) == OK
    with model.scheduler._lock:
        closing = threading.Thread(target=model.scheduler.forget, args=(member,), daemon=True)
        closing.start()
        closing.join(WATCHDOG_S)
        assert not closing.is_alive()
    assert model.scheduler.run(request(1, member=other)) == OK
    assert model.scheduler._members == {other}


def test_a_prompt_rides_along_with_an_answer_that_is_expected() -> None:
    model = Model(clock=lambda: 100.0)  # it waits for RIDE_S, and a thread on a busy machine may take longer
    answering, reading = Member(NativeCancel()), Member(NativeCancel())
    assert model.scheduler.run(request(1, member=answering)) == OK
    thread, found = model.start(request(100, member=reading))
    model.wait_for(1)  # it does not begin immediately
    assert model.scheduler.run(request(2, 2, member=answering)) == OK
    thread.join(WATCHDOG_S)
    assert found == [OK]
    assert (2, 2) in model.steps[1]
    assert len(model.steps[1]) == 2


def test_an_answer_that_may_be_over_is_not_expected() -> None:
    member = Member(NativeCancel())
    now = 1.0
    for _ in range(3):
        member.arrived(now)
        now += 0.02
        member.ended(now, answers=True, step_s=0.02)
    assert member.expected_s(now) == pytest.approx(0.04)
    assert member.expected_s(now + 0.041) <= 0.0
    assert member.is_answering(now + 0.041)
    member.cancel.set(True)
    assert member.expected_s(now) == 0.0
    assert not member.is_answering(now)


def test_the_end_of_a_prompt_does_not_count_as_an_answer() -> None:
    model, member = Model(), Member(NativeCancel())
    prompt = request(200, member=member)
    prompt.done = 195
    assert not prompt.is_whole, "its last rows are cut like the others"
    assert model.scheduler.run(prompt) == OK
    assert not member.answers
    assert model.scheduler.run(request(5, member=member)) == OK
    assert member.answers


def test_the_times_of_steps_are_not_computed_for_a_single_client(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(StepTimes, "seconds", lambda _self, rows: asked.append(rows))
    model = Model()
    assert model.scheduler.run(request(1)) == OK
    assert not asked
