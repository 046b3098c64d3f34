"""Stop strings in streamed text: found across chunks, never shown, and nothing shown that might become one."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.errors import InvalidRequestError


class StopStrings:
    """Watches text for stop strings.

    The text ends before the stop string that is complete first, as if each character came alone: so a chunk's size
    changes nothing, and generation ends as early as it can. Of several that are complete at the same character the
    longest counts, so that no part of a stop string is ever shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequestError for an empty stop string, which would stop everything."""
        if isinstance(stops, str):
            raise InvalidRequestError("stop strings are given as a list of texts, not as one text")
        if any(not stop for stop in stops):
            raise InvalidRequestError("a stop string is empty; it would stop before the first character")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._stopped = False

    def feed(self, chunk: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was found). After a stop everything is dropped."""
        if self._stopped:
            return "", True
        text = self._held + chunk
        best: tuple[int, int] | None = None  # where the stop string that is whole first ends and begins
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        if best is not None:
            self._held, self._stopped = "", True
            return text[: best[1]], True
        keep = self._prefix_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text kept back, when no more comes; empty after a stop."""
        rest, self._held = self._held, ""
        return rest

    def _prefix_length(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
