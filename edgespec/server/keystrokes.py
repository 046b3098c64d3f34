"""Requests of editors while text is typed: which of them a newer one replaces, and at which line they end."""

from __future__ import annotations

import asyncio
import re
import time
import unicodedata
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager

from edgespec.server.errors import ApiError
from edgespec.text.conversation.hole import Hole

# Characters that are typed or deleted between two requests for one place; a pasted text is another place.
_MOST_TYPED = 200
# Characters that an input method converts together: of the Latin alphabet, kana, bopomofo, and one of Hangul.
_MOST_CONVERTED = 20
_KANA, _HANGUL = "\u3041-\u30ff", "\u3131-\u318e\uac00-\ud7a3"
_HAN = "\u3005-\u3007\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_CONVERSIONS = (
    (re.compile(f"[A-Za-z' \u3105-\u312f{_KANA}]+"), re.compile(f"[{_KANA}{_HAN}]+")),
    (re.compile(f"[{_HANGUL}]"), re.compile(f"[{_HANGUL}]+")),
)
_OF_SOUNDS = re.compile(f"[{_KANA}{_HANGUL}]")
# Characters in front of the place that both requests must have: an editor's window may begin elsewhere.
_NEAR = 200


def is_newer(old: Hole, new: Hole) -> bool:
    """Whether text was typed or deleted at one place of one text between the two, which are not the same."""
    if old.after != new.after or old.before == new.before:
        return False
    ways = ((old.before, new.before), (new.before, old.before))
    return any(_typed(*way, _MOST_TYPED) is not None for way in ways) or _is_converted(old.before, new.before)


def _typed(short: str, long: str, most: int) -> str | None:
    """What ``long`` has behind the end of ``short``, at most ``most`` characters; None if it does not continue it."""
    near = short[-_NEAR:]
    at = long.rfind(near, max(0, len(long) - _NEAR - most)) if len(near) == _NEAR else 0
    typed = long[at + len(near) :]
    return typed if long.startswith(near, at) and len(typed) <= most else None


def _is_converted(old: str, new: str) -> bool:
    """Whether an input method has converted the last characters, as ``ni`` to ``你`` and ``하`` to ``한``."""
    for count in range(1, min(_MOST_CONVERTED + 1, len(old))):
        if typed := _typed(old[:-count], new, _MOST_CONVERTED):
            return _may_become(old[-count:], typed)
    return False


def _may_become(composed: str, converted: str) -> bool:
    """Whether an input method may write the second for the first, or for the beginning of it.

    A sound stays the same sound. No table says which letters may become which Chinese characters: any may.
    """
    if _OF_SOUNDS.match(composed) and _OF_SOUNDS.match(converted) and _sound(composed[0]) != _sound(converted[0]):
        return False
    for before, behind in _CONVERSIONS:
        found = behind.match(converted)
        if found and before.fullmatch(composed) and composed.endswith(converted[found.end() :]):
            return True
    return False


def _sound(character: str) -> str:
    """The leading sound of a syllable of Hangul; the hiragana of a kana, without its voicing."""
    first = unicodedata.normalize("NFKD", character)[0]
    return chr(ord(first) - 0x60) if "\u30a1" <= first <= "\u30f6" else first


class KeyTurn:
    """One request's place among those of its client. All calls come from the event loop's thread."""

    def __init__(self, hole: Hole | None = None) -> None:
        self.hole = hole
        self.left = asyncio.Event()
        self.end_answer: Callable[[], None] = lambda: None
        self.replaced = False
        self.holds_session = False
        self._task = asyncio.current_task()

    def replace(self) -> None:
        """A newer request takes the place of this one: it ends now, or its answer does within one forward."""
        if not self.replaced:
            self.replaced = True
            if self.holds_session or self._task is None:
                self.end_answer()
            else:
                self._task.cancel()

    def forget(self) -> None:
        """The request has ended: what it answered with may be freed, and there is nothing to end."""
        self._task, self.end_answer = None, lambda: None

    def check(self) -> None:
        """Raise ApiError with status 409 if a newer request has taken the place of this one."""
        if self.replaced:
            message = "a newer request of this client for the same place has replaced this one"
            raise ApiError(message, status=409, code="replaced")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block the request may be replaced. Behind it, it has left, unless it holds a session."""
        try:
            self.check()
            yield
        except asyncio.CancelledError:
            if self.replaced and not self.holds_session and self._task is not None and not self._task.uncancel():
                self.check()
            raise
        finally:
            if not self.holds_session:
                self.left.set()


class Keystrokes:
    """The running requests of each client for the text in a hole.

    A client is what the key of ``turn`` says: the owner of the API key, the address, the program's name and the
    path. A newer request replaces an older one of the same client, and only if both are for the same place in the
    same text. So no request of another program, of another window, or for another file is ended.
    """

    def __init__(self) -> None:
        self._running = dict[Hashable, list[KeyTurn]]()

    @asynccontextmanager
    async def turn(self, client: Hashable, hole: Hole | None) -> AsyncIterator[KeyTurn]:
        """The request's turn. Older requests for the same place are ended first, and their sessions are free."""
        own = KeyTurn(hole)
        if hole is None:
            yield own
            return
        running = {each: [turn for turn in found if not turn.left.is_set()] for each, found in self._running.items()}
        self._running = {each: found for each, found in running.items() if found}
        of_client = self._running.setdefault(client, [])
        older = [turn for turn in of_client if turn.hole is not None and is_newer(turn.hole, hole)]
        of_client.append(own)
        try:
            with own.waiting():
                for turn in older:
                    turn.replace()
                for turn in older:
                    await turn.left.wait()
                yield own
        finally:
            own.forget()


class Lines:
    """Ends a text before a line with fewer than ``indent`` blanks, or behind a line once ``milliseconds`` are over.

    The first line is not looked at. Blanks at a line's beginning are held back. Times of 0 and -1 limit nothing.
    """

    def __init__(self, indent: int = 0, milliseconds: int | None = None) -> None:
        self.ended = False
        self._indent = indent
        self._seconds = milliseconds / 1000 if milliseconds and milliseconds > 0 else None
        self._began: float | None = None
        self._has_line = False
        self._held = ""

    def feed(self, text: str) -> str:
        """What of the text is certain."""
        if self._began is None:
            self._began = time.monotonic()
        if self.ended:
            return ""
        if not self._indent:
            self._has_line |= "\n" in text
            self.ended = self._is_late()
            return text
        shown = ""
        for character in text:
            if character == "\n":
                self._has_line = True
            if self._held:
                if character in " \t\n":
                    self._held = self._held + character
                    continue
                if len(self._held) - self._held.rfind("\n") - 1 < self._indent:
                    self.ended = True
                    return shown
                shown, self._held = shown + self._held + character, ""
            elif character == "\n":
                self._held = character
            else:
                shown += character
        self.ended = self._is_late()
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _is_late(self) -> bool:
        assert self._began is not None
        return self._seconds is not None and self._has_line and time.monotonic() - self._began > self._seconds
