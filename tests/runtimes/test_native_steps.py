"""What a step of the native runtime takes of the requests that wait."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.runtimes.native.library import MOST_ENTRIES
from edgespec.runtimes.native.scheduler import MOST_WAIT_S, Request, shares_of
from tests.runtimes.test_native_scheduler import counts, request


def with_room(rows: int) -> Callable[[int], int]:
    return lambda _rows: rows


def test_a_request_without_others_is_not_cut() -> None:
    assert counts(shares_of([request(256)], with_room(4), 0.0, alone=True)) == [(256, 1)]


def test_a_prompt_is_cut_while_another_answer_runs() -> None:
    assert counts(shares_of([request(256)], with_room(4), 0.0, alone=False)) == [(4, 0)]


def test_whole_requests_come_first_and_the_shortest_prompt_next() -> None:
    waiting = [request(200), request(100), request(1), request(8, 8), request(5, 5, tree=True)]
    shares = shares_of(waiting, with_room(120), 0.0, alone=False)
    assert [share.request for share in shares] == [waiting[2], waiting[3], waiting[4], waiting[1], waiting[0]]
    assert counts(shares) == [(1, 1), (8, 8), (5, 5), (100, 1), (20, 0)]


def test_a_prompt_that_has_waited_long_is_no_longer_overtaken() -> None:
    old, older, short = request(200), request(256), request(100)
    older.since, old.since, short.since = 1.0, 2.0, 2.5
    waiting = [short, old, older]

    def order(now: float) -> list[Request]:
        return [share.request for share in shares_of(waiting, with_room(220), now, alone=False)]

    assert order(1.0 + 0.99 * MOST_WAIT_S) == [short, old]
    assert order(1.0 + MOST_WAIT_S) == [older]
    older.since = 2.1
    assert order(2.1 + MOST_WAIT_S) == [old, older]


def test_the_room_for_prompts_depends_on_the_whole_requests() -> None:
    asked: list[int] = []

    def room(rows: int) -> int:
        asked.append(rows)
        return 7

    assert counts(shares_of([request(200), request(8, 8)], room, 0.0, alone=False)) == [(8, 8), (7, 0)]
    assert asked == [8]


def test_no_scored_row_is_cut_off() -> None:
    long = request(100, 40)
    assert counts(shares_of([long, request(1)], with_room(80), 0.0, alone=False)) == [(1, 1), (60, 0)]
    long.done = 60
    assert counts(shares_of([long, request(1)], with_room(4), 0.0, alone=False)) == [(40, 40), (1, 1)]
    assert counts(shares_of([request(100, 0), request(1)], with_room(99), 0.0, alone=False)) == [(1, 1), (99, 0)]


def test_a_step_has_at_most_64_scored_rows_256_rows_and_64_requests() -> None:
    assert counts(shares_of([request(40, 40), request(30, 30), request(20, 20)], with_room(1), 0.0, alone=False)) == [
        (40, 40),
        (20, 20),
    ]
    assert len(shares_of([request(1) for _ in range(70)], with_room(1), 0.0, alone=False)) == MOST_ENTRIES
    many = [request(16, 1) for _ in range(17)]
    assert sum(share.count for share in shares_of(many, with_room(1), 0.0, alone=False)) == 256
    assert counts(shares_of([request(16, 1), request(300)], with_room(500), 0.0, alone=False)) == [(16, 1), (240, 0)]
    scored = [request(40, 40), request(100, 30)]
    assert counts(shares_of(scored, with_room(500), 0.0, alone=False)) == [(40, 40), (70, 0)]


def test_a_prompt_always_makes_progress() -> None:
    waiting = [request(200, 1), request(1)]
    for _ in range(100):
        shares = shares_of(waiting, with_room(4), 0.0, alone=False)
        prompt = next(share for share in shares if share.request is waiting[0])
        assert prompt.count > 0
        waiting[0].done += prompt.count
        if not waiting[0].left:
            return
    raise AssertionError("the prompt did not end")
