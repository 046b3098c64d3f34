"""How long a request asks for the model to stay loaded, as Ollama's clients say it."""

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
