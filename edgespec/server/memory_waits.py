"""Which requests have a session of a model, or open one, and which of them wait until others give memory back."""

from __future__ import annotations

import asyncio


class MemoryWaits:
    """The requests that use a model's memory, each as the event that says that another one gave some back.

    A request clears its event before it tries to take memory, so none that comes during that is missed. All calls
    come from the event loop's thread.
    """

    def __init__(self) -> None:
        self._users = set[asyncio.Event]()
        self._waiting = set[asyncio.Event]()

    def enter(self, own: asyncio.Event) -> None:
        """A request begins to use memory, until ``leave``."""
        self._users.add(own)

    def leave(self, own: asyncio.Event) -> None:
        """Its memory is free."""
        self._users.discard(own)
        self.given_back()

    def given_back(self) -> None:
        """Memory is free: requests that wait for some try again."""
        for each in self._users:
            each.set()

    async def wait(self, own: asyncio.Event, *, holds_session: bool) -> bool:
        """Wait until memory was given back. False, without a wait, if no other request will give any back.

        Requests that wait give none. If all of them do, one that holds a session must fail for the others.
        """
        others = self._users - {own}
        if not own.is_set() and not others - self._waiting:
            if holds_session or not others:
                return False
            for each in others:  # they find that all others wait
                each.set()
        self._waiting.add(own)
        try:
            await own.wait()
        finally:
            self._waiting.remove(own)
        return True
