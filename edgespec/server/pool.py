"""Conversations kept between requests, so that a longer version of one is not read again from its beginning.

HTTP clients send the whole conversation every time. A request continues the session of its owner whose text it shares
most of. If it shares only a beginning, for example a system prompt, it continues a copy. No session, and no copy of
one, is ever given to another owner.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.errors import EdgespecError
from edgespec.interfaces.counted_text import common_prefix
from edgespec.server.messages import Message
from edgespec.server.schema import Request
from edgespec.text.conversation.messages import THINKING, begun

# A caller of one program holds one or two conversations. Memory is the other bound: a session has a whole cache.
MOST_KEPT = 8

# Characters of a shared beginning from which on a session is copied: about fifty tokens, which the 1.5B reads in 0.1
# to 0.7 s on two cores. Copying their cache takes about a millisecond.
LEAST_COPIED = 200


@dataclass(slots=True)
class Kept:
    """A session, whose it is, and the text that its caches hold."""

    session: Session
    owner: str
    text: str = ""


def text_of(request: Request, answer: str | None = None) -> str:
    """A request as one text that is a prefix of any continuation's text."""
    if (hole := request.hole) is not None:  # what is after the hole is short, and is read again at every key
        return f"hole\0{json.dumps(hole.files)}\0{hole.before}"
    if request.prompt is not None:
        return f"raw\0{request.prompt}{answer or ''}"
    shown = [each for each in (request.tools, request.template_variables) if each]
    text = f"{json.dumps(shown) if shown else ''}\0{text_of_messages(request.messages)}"
    if begun(request.messages) is not None:  # the answer continues the last message
        text = text.removesuffix("\0")
        return text if answer is None else f"{text}{answer}\0"
    return text if answer is None else f"{text}assistant\0{answer}\0"


def text_of_messages(messages: Sequence[Message]) -> str:
    return "".join(
        f"{each['role']}\0{each.get(THINKING[0], '')}{each['content']}\0"
        + (json.dumps(each["tool_calls"]) if "tool_calls" in each else "")
        for each in messages
    )


def is_worth(common: int, kept: int, asked: int) -> bool:
    """Whether to continue a session: reading ``common`` again would take longer than the rest of the ``kept`` text.

    All in characters. The rest is lost, and may have to be read again for another request; not if all that is
    ``asked`` is common, since then the rest begins with the answer to the same request.
    """
    return common >= min(kept - common, asked)


class SessionPool:
    """The sessions of one engine that no request uses. Thread-safe."""

    def __init__(self, engine: Engine, most_kept: int = MOST_KEPT) -> None:
        self._engine = engine
        self._most = most_kept
        self._lock = threading.Lock()
        self._kept: list[Kept] = []  # the least recently used first
        self._closed = False
        self._users = set[object]()
        engine.pair.make_room = self._drop_oldest

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def in_use(self) -> int:
        """The requests that have a session or open one."""
        return len(self._users)

    @contextlib.contextmanager
    def user(self) -> Iterator[None]:
        """A request that opens, uses and gives back a session: it counts until the block ends, however it ends."""
        own = object()
        self._users.add(own)
        try:
            yield
        finally:
            self._users.remove(own)

    def take(self, owner: str, text: str) -> Kept:
        """A session for a request with this text: a kept one that shares most of it, a copy, or a new one.

        Sessions that were not used for the longest time are closed if memory is short. Raises MemoryLimitError if all
        sessions are in use, and ClosedError.
        """
        with self._lock:
            own = [each for each in self._kept if each.owner == owner]
            shares = [(common_prefix(each.text, text), each) for each in own]
            worth = [(common, each) for common, each in shares if is_worth(common, len(each.text), len(text))]
            if worth:
                _, best = max(worth, key=lambda pair: pair[0])
                self._kept.remove(best)
                return best
            common, nearest = max(shares, key=lambda pair: pair[0], default=(0, None))
            if common < LEAST_COPIED or not self._engine.pair.target.facts.can_fork:
                nearest = None
            if nearest is not None:
                self._kept.remove(nearest)  # no other request may use it during the copy
        if nearest is not None and (copied := self._copied(nearest)) is not None:
            return copied
        return Kept(self._engine.session(owner=owner), owner)

    def _copied(self, source: Kept) -> Kept | None:
        """A copy of a session that was removed from the kept ones, and is kept again; None without memory for it."""
        copy: Session | None = None
        try:
            with contextlib.suppress(EdgespecError):  # a new session serves as well
                copy = source.session.branch()
        finally:
            with self._lock:
                closed = self._closed
                if not closed:
                    self._kept.append(source)
            if closed:
                source.session.close()
        return None if copy is None else Kept(copy, source.owner)

    def give(self, kept: Kept) -> None:
        """Keep a session for later requests. ``kept.text`` is what its caches hold."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._kept.append(kept)
        if closed:
            kept.session.close()
        while len(self._kept) > self._most and self._drop_oldest():
            pass

    def _drop_oldest(self) -> bool:
        """Close a session of the owner who has the most, the one not used for the longest time; False without any.

        So one owner's many conversations cannot cost another owner the only one.
        """
        with self._lock:
            counts = Counter(each.owner for each in self._kept)
            oldest = next((each for each in self._kept if counts[each.owner] == max(counts.values())), None)
            if oldest is None:
                return False
            self._kept.remove(oldest)
        oldest.session.close()
        return True

    def close(self) -> None:
        """Close all kept sessions, and each session that is given back later."""
        with self._lock:
            self._closed = True
        while self._drop_oldest():
            pass
