"""How long requests ask for the model to stay loaded, as Ollama's clients say it, and who keeps it longest."""

from __future__ import annotations

import math
import re

from edgespec.server.errors import ApiError
from edgespec.server.json_schema import Schema

KEEP_ALIVE: Schema = {"anyOf": [{"type": ["number", "null"]}, {"type": "string"}]}

# Thirty million years; a float holds it exactly.
_LONGEST_S = 10**15
# Seconds by the units of Go, in which Ollama is written.
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"\d{1,15}(?:\.\d{0,15})?"
_STEP = re.compile(rf"({_NUMBER})({'|'.join(_UNITS)})")
_TEXT = re.compile(rf"(?P<sign>[+-]?)(?P<time>(?:{_NUMBER}(?:{'|'.join(_UNITS)}))+|{_NUMBER})")


def kept_alive_s(given: float | str) -> float:
    """Seconds, infinite below 0. A text is a number of seconds, or numbers with units: ``1h30m``. Raises ApiError."""
    if not isinstance(given, str):
        return math.inf if given < 0 else float(min(given, _LONGEST_S))
    found = _TEXT.fullmatch(given.strip())
    if found is None:
        message = f'keep_alive must be seconds or a time such as "5m" or "1h30m", not {given[:40]!r}'
        raise ApiError(message, param="keep_alive")
    if found["sign"] == "-":
        return math.inf
    steps = _STEP.findall(found["time"])
    return sum(float(number) * _UNITS[unit] for number, unit in steps) if steps else float(found["time"])


class Stays:
    """Until when a loaded model stays: the one of its users who keeps it longest counts.

    Times are those of one clock, in seconds; infinite: always.
    """

    def __init__(self, usual_s: float | None, now: float) -> None:
        """``usual_s`` for users who name no time, and from ``now`` until one comes; None: always."""
        self._usual_s = math.inf if usual_s is None else usual_s
        self.loaded = now  # no time ends before
        self._asked = dict[str, float]()
        self._used = dict[str, float]()

    def use(self, owner: str, now: float) -> None:
        """A request of this user has come or ended."""
        self._used[owner] = now

    def ask(self, owner: str, seconds: float, now: float) -> None:
        """A user asks for a time from the end of its last request."""
        self._asked[owner], self._used[owner] = seconds, now

    @property
    def until(self) -> float:
        """The time at which the model is freed."""
        ends = (max(used, self.loaded) + self._asked.get(owner, self._usual_s) for owner, used in self._used.items())
        return max(ends, default=self.loaded + self._usual_s)
