"""Reads JSON files as hostile input: checks size, nesting, duplicate names and types."""

from __future__ import annotations

import json
import math
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar, get_type_hints

from edgespec.errors import ModelFileError

DOWNLOAD_AGAIN = "the download may be incomplete: fetch the folder again"

_LONGEST_SHOWN = 64  # characters of a wrong value in a message: enough for a name or a number

_Pairs: TypeAlias = list[tuple[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Range:
    """An annotation: a number from ``least`` to ``most``; with ``above``, larger than ``least``.

    ``noun`` names the number in messages.
    """

    least: float
    most: float = math.inf
    noun: str = ""
    above: bool = False

    def admits(self, value: float) -> bool:
        """Whether the number is in the range. False for NaN."""
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def wanted(self, noun: str) -> str:
        """Such as "a whole number from 1 to 9"."""
        least, most = (str(end) if isinstance(end, int) else f"{end:g}" for end in (self.least, self.most))
        bounded = self.most < math.inf
        if self.above:
            return f"{self.noun or noun} above {least}" + (f" and up to {most}" if bounded else "")
        return f"{self.noun or noun} " + (f"from {least} to {most}" if bounded else f"of at least {least}")


def ranges_of(record: type) -> dict[str, Range]:
    """The ranges that annotate the fields of a record, by name."""
    hints = get_type_hints(record, include_extras=True)
    found = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: each for name, notes in found.items() for each in notes if isinstance(each, Range)}


def read_regular_file(path: Path, most_bytes: int) -> bytes:
    """All bytes of a file of at most ``most_bytes``.

    Raises ModelFileError if it is missing, larger, unreadable, or not a regular file (opening a pipe would block).
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(path, "it is not a regular file", hint=DOWNLOAD_AGAIN)
        if status.st_size > most_bytes:
            reason = f"{status.st_size} bytes are too large for this file"
            raise ModelFileError(path, reason, hint=DOWNLOAD_AGAIN)
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelFileError(path, "no such file", hint=DOWNLOAD_AGAIN) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ModelFileError(path, f"the file cannot be read: {error}") from error


def parse_object(path: Path, raw: bytes, *, offset: int | None = None) -> dict[str, Any]:
    """Parse ``raw`` as a JSON object: UTF-8, no duplicate names, no NaN or infinity.

    ``path`` and ``offset`` (in bytes) tell the ModelFileError where ``raw`` came from.
    """
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ModelFileError(path, "its JSON is nested too deeply", offset=offset, hint=DOWNLOAD_AGAIN) from None
    except ValueError as error:
        reason = f"it is not valid JSON: {str(error)[:200]}"
        raise ModelFileError(path, reason, offset=offset, hint=DOWNLOAD_AGAIN) from error
    if not isinstance(document, dict):
        raise ModelFileError(path, "it is not a JSON object", offset=offset, hint=DOWNLOAD_AGAIN)
    return document


def _unique(pairs: _Pairs) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {_show(twice)} occurs twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _show(value: object) -> str:
    """A short printable text for any value of a hostile document."""
    if value is None or isinstance(value, str | int | float):
        return ascii(value)[:_LONGEST_SHOWN]
    return f"a {type(value).__name__}"


class Fields:
    """The members of one JSON object, each checked when read; null counts as absent.

    Every method raises ModelFileError with the file and the member for a value of another type or out of range.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], where: str = "") -> None:
        self.path = path
        self._values = values
        self._where = where

    def names(self) -> list[str]:
        """Names of the members that are not null."""
        return [name for name, value in self._values.items() if value is not None]

    def wrong(self, name: str, wanted: str) -> ModelFileError:
        """The ModelFileError that the member ``name`` is not ``wanted``."""
        value = self._values.get(name)
        stated = "is missing" if value is None else f"is {_show(value)}"
        return ModelFileError(self.path, f"{self._where}{name} {stated}: {wanted} is needed", hint=DOWNLOAD_AGAIN)

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number from ``least`` to ``most``; if absent, ``default``, or an error without a default."""
        value = self._or_default(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        """A finite number from ``least`` to ``most``; if absent, ``default``, or an error without a default."""
        value = self._or_default(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.wrong(name, f"a number from {least:g} to {most:g}")
        if not math.isfinite(value):
            raise self.wrong(name, "a finite number")
        return float(value)

    def flag(self, name: str) -> bool | None:
        """True, false, or None if absent."""
        return self._typed(name, bool, "true or false")

    def text(self, name: str) -> str | None:
        """A string that can be written as UTF-8, or None if absent."""
        value = self._typed(name, str, "a string")
        if value is not None and not is_text(value):
            raise self.wrong(name, "a string")
        return value

    def items(self, name: str) -> list[Any] | None:
        """An array with unchecked elements, or None if absent."""
        return self._typed(name, list, "an array")

    def member(self, name: str) -> Fields | None:
        """The nested object ``name``, or None if absent."""
        value = self._typed(name, dict, "an object")
        return None if value is None else Fields(self.path, value, f"{self._where}{name}.")

    def _or_default(self, name: str, default: float | None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def _typed(self, name: str, kind: type[T], wanted: str) -> T | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, wanted)
        return value

    def raw(self, name: str) -> Any:
        """The member, unchecked."""
        return self._values.get(name)

    def has_object(self, name: str) -> bool:
        """Whether the member is an object, for members that may have several types."""
        return isinstance(self._values.get(name), dict)


def is_text(value: str) -> bool:
    """Whether a string from JSON can be written as UTF-8."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
        return False
    return True


def read_fields(path: Path, most_bytes: int) -> Fields:
    """The JSON object in the file ``path`` of at most ``most_bytes``. Raises ModelFileError."""
    return Fields(path, parse_object(path, read_regular_file(path, most_bytes)))
