"""The order of locks: every lock is on its page, and a wrong order is noticed."""

from __future__ import annotations

import linecache
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import lock_ranks
from tests.support.lock_ranks import WrongOrderError, made_in_package, ranked_locks, ranks


def test_every_lock_of_the_package_is_on_the_page_and_no_other() -> None:
    assert made_in_package() == set(ranks())


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Locks of a package of two, ranked by a page; ``wrong`` are the sentences."""
    made = {"outer": "Lock", "inner": "RLock", "changed": "Condition"}
    source = "\n".join(["import threading", *(f"{name} = threading.{kind}()" for name, kind in made.items())])
    rows = [f"| {rank} | `two.py` `{name}` |" for rank, name in enumerate(made)]
    path, page = tmp_path / "two.py", tmp_path / "locks.md"
    path.write_text(source, encoding="utf-8")
    page.write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.setattr(lock_ranks, "PACKAGE", tmp_path)
    monkeypatch.setattr(lock_ranks, "PAGE", page)
    linecache.checkcache()
    with ranked_locks() as wrong:
        names: dict[str, Any] = {}
        exec(compile(source, str(path), "exec"), names)
        yield SimpleNamespace(**{name: names[name] for name in made}, wrong=wrong)


def test_the_right_order_is_allowed_again_and_again(locks: Any) -> None:
    for _ in range(2):
        with locks.outer, locks.inner, locks.inner, locks.changed:
            locks.changed.notify()
    assert locks.wrong == []


def test_a_lock_that_is_taken_after_an_inner_one_raises(locks: Any) -> None:
    with locks.inner, pytest.raises(WrongOrderError, match=r"two\.py outer was taken while two\.py inner was held"):
        locks.outer.acquire()
    assert len(locks.wrong) == 1
    locks.wrong.clear()


def test_another_thread_and_an_attempt_that_does_not_wait_are_free(locks: Any) -> None:
    taken: list[bool] = []

    def elsewhere() -> None:
        with locks.outer:
            taken.append(True)

    with locks.inner:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert locks.outer.acquire(blocking=False)
        locks.outer.release()
    assert (taken, locks.wrong) == ([True], [])


def test_a_thread_that_waits_for_a_condition_does_not_hold_it(locks: Any) -> None:
    with locks.changed:
        assert not locks.changed.wait(0.01)
        with pytest.raises(WrongOrderError):
            locks.inner.acquire()
    with locks.outer:
        pass
    assert len(locks.wrong) == 1
    locks.wrong.clear()
