"""A drafter's thread that runs jobs immediately but reports them as done only later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Held:
    """Runs each job at submission; ``looks()`` says for how many checks the job still counts as running."""

    def __init__(self, looks: Callable[[], int]) -> None:
        self._looks = looks

    def __call__(self, job: Callable[[], Any]) -> Future[Any]:
        return _Held(job, self._looks())


class _Held(Future[Any]):
    def __init__(self, job: Callable[[], Any], looks: int) -> None:
        super().__init__()
        self._left = looks
        self._value: Any = None
        self._error: BaseException | None = None
        try:
            self._value = job()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        if not super().done():
            if self._left > 0:
                self._left -= 1
                return False
            self._show()
        return True

    def result(self, timeout: float | None = None) -> Any:
        if not super().done():
            self._show()
        return super().result(timeout)

    def _show(self) -> None:
        if not self.set_running_or_notify_cancel():
            return
        if self._error is None:
            self.set_result(self._value)
        else:
            self.set_exception(self._error)
