"""What a chat template may consume: steps, bytes and time, counted before they are spent.

Jinja's sandbox keeps a template away from Python's internals; it bounds neither CPU nor memory. Everything that a
template does in ``sandbox.py`` and ``filters.py`` is announced here first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from edgespec.errors import TemplateError

# A str or list pays for its header too, or a million empty ones would be free (sys.getsizeof("") is 49, [] is 56).
HEADER_BYTES = 64
# One slot of a container with the number it may be the only owner of (8-byte pointer, 32-byte int).
SLOT_BYTES = 40
# One slot of a copied container, whose values exist already. Templates build lists by ``list = list + [item]``.
POINTER_BYTES = 8
# Text that the C level walks in about the time of one interpreted step (measured: str.upper, 1-3 ns a character).
BYTES_PER_STEP = 64
# Deepest container that is compared, printed or serialised. JSON schemas of real tools nest about ten deep, and
# CPython's own C recursion stays far from its limit.
NESTING = 64
# Macros inside macros and loops inside loops. Recursive macros that print a tool's type nest about ten deep.
CALL_DEPTH = 48
# No prompt needs larger numbers; 256 bits keep every conversion to text instant.
INTEGER_BITS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """What one template may use. The caller's own messages raise the budgets that must grow with them.

    A long conversation is the caller's doing, not the template's: every byte of input allows one more step, one
    more byte per value, two of output and sixteen in total (a template that trims, splits and concatenates touches
    a message five to ten times).
    """

    #: The longest template in common use (gpt-oss, Command A) is about 20 kB; hostile source of 64 kB compiles in
    #: well under a second.
    source_bytes: int = 64 * 1024
    #: A message costs 50 to 200 steps in real templates, so this allows 2 000 and more before the input adds any.
    steps: int = 400_000
    #: A context of 256 k tokens is about 1 MB of English; four times that.
    output_bytes: int = 4 * 1024 * 1024
    #: The largest single str or list: no more than a whole output.
    value_bytes: int = 4 * 1024 * 1024
    #: All values ever made, freed or not, so that it also bounds the peak: with the output and its pieces the
    #: process grows by less than 50 MB.
    total_bytes: int = 20 * 1024 * 1024
    #: Real templates render in 1 to 10 ms, so this is fifty times what they need, on a machine under load too.
    deadline_s: float = 0.5


def stored_bytes(text: str) -> int:
    """At most what Python needs to store ``text``: one byte per ASCII character, else up to four."""
    return len(text) if text.isascii() else 4 * len(text)


class Budget:
    """What is left of one rendering's limits. Every method raises TemplateError when something runs out."""

    __slots__ = ("_deadline", "_depth", "_limits", "_steps", "_total", "_value_bytes", "output_bytes")

    def __init__(self, limits: TemplateLimits, input_bytes: int) -> None:
        self._limits = limits
        self._steps = limits.steps + input_bytes
        self._total = limits.total_bytes + 16 * input_bytes
        self._value_bytes = limits.value_bytes + input_bytes
        self.output_bytes = limits.output_bytes + 2 * input_bytes
        self._deadline = time.monotonic() + limits.deadline_s
        self._depth = 0

    def step(self, count: int = 1) -> None:
        """Count work that is about to be done."""
        self._steps -= count
        if self._steps < 0:
            raise TemplateError(f"it takes more than the {self._limits.steps} steps it may take")
        if time.monotonic() > self._deadline:
            raise TemplateError(f"it runs longer than the {self._limits.deadline_s} s it may run")

    def scan(self, size: int) -> None:
        """Count the reading of ``size`` bytes."""
        self.step(1 + size // BYTES_PER_STEP)

    def make(self, size: int) -> None:
        """Count a value of ``size`` bytes that is about to exist."""
        if size > self._value_bytes:
            raise TemplateError(f"it makes a value of more than the {self._limits.value_bytes} bytes one may have")
        self._total -= size + HEADER_BYTES
        if self._total < 0:
            raise TemplateError(f"it makes values of more than the {self._limits.total_bytes} bytes all may have")
        self.step(1 + size // BYTES_PER_STEP)

    def make_slots(self, count: int) -> None:
        """Count a container of ``count`` values that is about to exist."""
        self.step(count)
        self.make(SLOT_BYTES * count)

    def slots_left(self) -> int:
        """How many more values could be made, at most."""
        return min(self._total, self._value_bytes) // (HEADER_BYTES + SLOT_BYTES)

    def enter(self) -> None:
        """Count one more call inside the present ones."""
        self._depth += 1
        if self._depth > CALL_DEPTH:
            raise TemplateError(f"its macros and loops call each other more than {CALL_DEPTH} deep")

    def leave(self) -> None:
        """The call that ``enter`` counted has ended."""
        self._depth -= 1

    def measure(self, value: Any, depth: int = 0) -> int:
        """Bytes of ``value`` printed, at most. Walks every path, as printing and comparing do.

        ``[x, x]`` made thirty times over is small in memory and endless to walk; the walk itself is counted, so it
        ends here and not in C code that nothing can stop.
        """
        self.step()
        if depth > NESTING:
            raise TemplateError(f"it nests a value more than {NESTING} deep")
        if type(value) is str:
            self.scan(len(value))
            if value.isprintable():
                return stored_bytes(value) * 2 + 2  # a quote or backslash gets a backslash
            return len(value) * (6 if value.isascii() else 12) + 2  # \x00 or \u0000, \U0010ffff or a surrogate pair
        if type(value) in (list, tuple):
            return sum(self.measure(item, depth + 1) + 2 for item in value) + 3
        if type(value) is dict:
            return sum(self.measure(k, depth + 1) + self.measure(v, depth + 1) + 4 for k, v in value.items()) + 2
        if value is None or type(value) in (bool, int, float):
            return self.integer_digits(value) if type(value) is int else 24
        raise TemplateError(f"it uses {kind(value)} where only text, numbers, lists and mappings can stand")

    def integer_digits(self, value: int) -> int:
        """Digits of ``value``, at most; refuses integers no prompt needs."""
        if value.bit_length() > INTEGER_BITS:
            raise TemplateError(f"it makes an integer of more than {INTEGER_BITS} bits")
        return value.bit_length() // 3 + 2

    def made(self, text: str) -> str:
        """``text``, counted after it was made: for results whose size was known to be bounded."""
        self.make(stored_bytes(text))
        return text


def kind(value: object) -> str:
    """What ``value`` is, in words for a message; never its content, which may be endless."""
    names = {
        "str": "text",
        "int": "a number",
        "float": "a number",
        "dict": "a mapping",
        "NoneType": "none",
        "BoundMethod": "a method",
        "LoopContext": "a loop",
        "Undefined": "something undefined",
    }
    name = type(value).__name__
    return names.get(name, f"a {name.lower()}")
