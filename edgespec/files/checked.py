"""Reads files as hostile input: bounds of size and nesting, and records whose annotations say what a value may be."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import re
import sys
from collections import Counter, abc
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    NoReturn,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from edgespec.errors import ESCAPES, EdgespecError, MemoryLimitError, ModelFileError, reason_of
from edgespec.files.disk import read_bounded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DOWNLOAD_AGAIN = "the download may be incomplete: fetch the folder again"

_LONGEST_SHOWN = 64  # characters of a wrong value in a message: enough for a name or a number

_Pairs: TypeAlias = list[tuple[str, Any]]
T = TypeVar("T")


def read_regular_file(path: Path, most_bytes: int, *, hint: str = DOWNLOAD_AGAIN) -> bytes:
    """All bytes of a file of at most ``most_bytes``.

    Raises ModelFileError if it is missing, larger, unreadable, or not a regular file.
    """
    try:
        return read_bounded(path, most_bytes)
    except FileNotFoundError as error:
        raise ModelFileError(path, "no such file", hint=hint) from error
    except (OSError, ValueError) as error:
        raise ModelFileError(path, f"the file cannot be read: {reason_of(error)}", hint=hint) from error


def cannot_map(path: Path, error: OSError | ValueError, reason: str = "can no longer be read") -> EdgespecError:
    """The error for a file that ``mmap`` refuses: ``reason``, except that without memory the file is not at fault."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        hint = "close other programs, or raise the limit on memory (`ulimit -v`)"
        return MemoryLimitError(f"no memory to map {path}", needed_bytes=None, available_bytes=None, hint=hint)
    return ModelFileError(path, f"{reason}: {error}")


def parse_object(path: Path, raw: bytes, *, offset: int | None = None, hint: str = DOWNLOAD_AGAIN) -> dict[str, Any]:
    """Parse ``raw`` as a JSON object in UTF-8, strictly.

    ``path`` and ``offset`` (in bytes) tell the ModelFileError where ``raw`` came from.
    """
    try:
        document = strict_json(raw.decode("utf-8"))
    except RecursionError:
        raise ModelFileError(path, "its JSON is nested too deeply", offset=offset, hint=hint) from None
    except ValueError as error:
        reason = f"it is not valid JSON: {str(error)[:200]}"
        raise ModelFileError(path, reason, offset=offset, hint=hint) from error
    if not isinstance(document, dict):
        raise ModelFileError(path, "it is not a JSON object", offset=offset, hint=hint)
    return document


def _unique(pairs: _Pairs) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {shown(twice)} occurs twice")
    return found


def no_constant(name: str) -> NoReturn:
    """Refuses what Python reads and JSON does not know: NaN, Infinity, -Infinity. Raises ValueError."""
    raise ValueError(f"{name} is not a number")


def finite(digits: str) -> float:
    """A number of JSON. Raises ValueError if it is too large for a float."""
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:_LONGEST_SHOWN]} is too large")
    return number


def strict_json(text: str, parse_float: Callable[[str], float] = finite) -> Any:
    """The value of a JSON text. Raises ValueError, also for names given twice, NaN and infinity; RecursionError.

    ``parse_float`` reads numbers with a point or an exponent, and may raise ValueError.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=no_constant, parse_float=parse_float)


class Fields:
    """The members of one JSON object, each checked when read; null counts as absent.

    Every method raises ModelFileError with the file and the member for a value of another type or out of range.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], where: str = "") -> None:
        self.path = path
        self._values = values
        self._where = where

    def or_else(self, defaults: Mapping[str, Any]) -> Fields:
        """The same object, with these members where it has none."""
        stated = {name: value for name, value in self._values.items() if value is not None}
        return Fields(self.path, {**defaults, **stated}, self._where)

    def names(self) -> list[str]:
        """Names of the members that are not null."""
        return [name for name, value in self._values.items() if value is not None]

    def wrong(self, name: str, wanted: str) -> ModelFileError:
        """The ModelFileError that the member ``name`` is not ``wanted``."""
        value = self._values.get(name)
        problem = f"is missing: it must be {wanted}" if value is None else str(_wrong(wanted, value).problem)
        return ModelFileError(self.path, f"{self._where}{name} {problem}", hint=DOWNLOAD_AGAIN)

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number from ``least`` to ``most``; if absent, ``default``, or an error without a default."""
        return int(self._needed(name, _narrowed(_SIMPLE[int], Range(least, most)), default))

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        """A finite number from ``least`` to ``most``; if absent, ``default``, or an error without a default."""
        return float(self._needed(name, _narrowed(_SIMPLE[float], Range(least, most)), default))

    def flag(self, name: str) -> bool | None:
        """True, false, or None if absent."""
        return self._read(name, _SIMPLE[bool])

    def text(self, name: str) -> str | None:
        """A string that can be written as UTF-8, or None if absent."""
        return self._read(name, _narrowed(_SIMPLE[str], Check(is_text, _STRING)))

    def items(self, name: str) -> list[Any] | None:
        """An array with unchecked elements, or None if absent."""
        return self._read(name, _LIST)

    def member(self, name: str) -> Fields | None:
        """The nested object ``name``, or None if absent."""
        value = self._read(name, _TABLE)
        return None if value is None else Fields(self.path, value, f"{self._where}{name}.")

    def _needed(self, name: str, kind: Kind[float], default: float | None) -> float:
        value = self._values.get(name)
        if value is None and default is None:
            raise self.wrong(name, kind.wanted)
        found = self._read(name, kind)
        return found if found is not None else kind.read(default)

    def _read(self, name: str, kind: Kind[T]) -> T | None:
        value = self._values.get(name)
        try:
            return None if value is None else kind.read(value)
        except WrongValueError:
            raise self.wrong(name, kind.wanted) from None

    def raw(self, name: str) -> Any:
        """The member, unchecked."""
        return self._values.get(name)

    def has_object(self, name: str) -> bool:
        """Whether the member is an object, for members that may have several types."""
        return isinstance(self._values.get(name), dict)


def ascending(ids: NDArray[np.integer]) -> bool:
    """Whether each id is larger than the one before it. Differences of ids, as np.diff makes them, may overflow."""
    return bool((ids[1:] > ids[:-1]).all())


def is_text(value: str) -> bool:
    """Whether a string from JSON can be written as UTF-8."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
        return False
    return True


def is_line(value: str) -> bool:
    """Whether a terminal shows all of the text, as one line.

    Not ``str.isprintable``, which refuses the ideographic space and the joiners of emoji, Persian and Hindi too.
    """
    return is_text(value) and value.translate(ESCAPES) == value


def read_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """The JSON object in the file ``path`` of at most ``most_bytes``. Raises ModelFileError."""
    return parse_object(path, read_regular_file(path, most_bytes))


def read_fields(path: Path, most_bytes: int) -> Fields:
    """The JSON object in the file ``path`` of at most ``most_bytes``. Raises ModelFileError."""
    return Fields(path, read_object(path, most_bytes))


# ------------------------------------------------------------------------------------------------------- records


class WrongValueError(ValueError):
    """A value that does not fit its record. As text, one sentence with the names that lead to the value.

    ``devices 2, threads must be a whole number from 1 to 64, got "all"``. ``hint`` may suggest another name. Callers
    add the file and raise another error.
    """

    def __init__(
        self, problem: str, path: Sequence[str | int] = (), *, hint: str | None = None, joint: str = " "
    ) -> None:
        self.problem, self.path, self.hint, self.joint = problem, tuple(path), hint, joint
        where = ""
        for step in self.path:
            numbers = isinstance(step, int) and not where[-1:].isdigit()  # "devices 2", "ratios 1, 2"
            where += f"{' ' if numbers else ', '}{step}" if where else str(step)
        super().__init__(f"{where}{joint}{problem}" if where else problem if joint == ": " else f"it {problem}")

    def within(self, step: str | int) -> WrongValueError:
        """The same error, one level further out."""
        return WrongValueError(self.problem, (step, *self.path), hint=self.hint, joint=self.joint)


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


@dataclass(frozen=True, slots=True)
class Length:
    """An annotation: the number of characters of a string, or of entries of a list or a table."""

    least: int
    most: float = math.inf

    def admits(self, value: Sized) -> bool:
        """Whether the value is as long."""
        return self.least <= len(value) <= self.most

    def wanted(self, noun: str) -> str:
        """Such as "a list of 1 to 9 entries"."""
        span = f"{self.least} to {self.most}" if self.most < math.inf else f"{self.least} or more"
        span = str(self.least) if self.least == self.most else span
        return f"{noun} of {span} {'characters' if noun == _STRING else 'entries'}"


@dataclass(frozen=True, slots=True)
class Check:
    """An annotation: ``fits`` says whether a value of the right type is what ``words`` say."""

    fits: Callable[[Any], object]
    words: str

    def admits(self, value: Any) -> bool:
        """Whether the value is as wanted."""
        return bool(self.fits(value))

    def wanted(self, _noun: str) -> str:
        """What is wanted, in words."""
        return self.words


@dataclass(frozen=True, slots=True)
class From:
    """An annotation: the file holds a ``kind``, which ``convert`` makes the value of. It may raise ValueError."""

    kind: Any
    convert: Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Key:
    """An annotation: the name in the file, where it cannot be the field's."""

    name: str


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """What an annotation says: ``wanted`` in words, and ``read``, which checks and converts a value.

    ``read`` raises WrongValueError.
    """

    wanted: str
    read: Callable[[object], T]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record: its name in Python, its kind, and whether a file may leave it out."""

    name: str
    kind: Kind[Any]
    optional: bool


Sha256: TypeAlias = Annotated[str, Check(re.compile("[0-9a-f]{64}").fullmatch, "64 lower-case hex digits")]


def read(record: type[T], value: object, *, ignore_unknown: bool = False) -> T:
    """``value``, from JSON or TOML, as a ``record``: a dataclass, or a type that a field of one may have.

    Fields are int, float, bool, str, Path, Literal, Any, another record, tuple, list, frozenset, dict, Mapping, and
    unions of these; an annotation adds Range, Length, Check, From and Key. Numbers are finite, True is not a number,
    strings can be written. A field with a default may be left out. ``__post_init__`` may raise ValueError.
    Raises WrongValueError, also for an unknown name unless ``ignore_unknown``.
    """
    kind: Kind[T] = kind_of(record, ignore_unknown=ignore_unknown)
    return kind.read(value)


def to_json(value: Any) -> Any:
    """A record as JSON that ``read`` reads as the same record; infinity, which JSON lacks, as null."""
    if is_dataclass(value):
        return {own.name: to_json(getattr(value, own.name)) for own in dataclasses.fields(value) if own.init}
    if isinstance(value, Mapping):
        return {str(name): to_json(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and math.isinf(value) else value


def kind_of(hint: Any, *, ignore_unknown: bool = False) -> Kind[Any]:
    """The kind of any annotation that a field of a record may have. Raises TypeError for others."""
    return _kind(hint, ignore_unknown)


def fields_of(record: Any) -> Mapping[str, Field]:
    """The fields of a record by their names in a file, for a reader that takes them one by one."""
    return _fields(record, False)


def ranges_of(record: type) -> dict[str, Range]:
    """The ranges that annotate the fields of a record, by name."""
    hints = get_type_hints(record, include_extras=True)
    found = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: each for name, notes in found.items() for each in notes if isinstance(each, Range)}


def unknown_name(name: str, known: Iterable[str]) -> WrongValueError:
    """The error for an unknown name, with the nearest field as a hint."""
    import difflib  # here: only a wrong file needs it

    known = sorted(known)
    near = difflib.get_close_matches(name[:_LONGEST_SHOWN], known, n=1)
    hint = f'Did you mean "{near[0]}"?' if near else f"Known keys: {', '.join(known)}."
    return WrongValueError(f"unknown key {shown(name)}", hint=hint, joint=": ")


def shown(value: object) -> str:
    """A short printable text for any value of a hostile document."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else f"a list of length {len(value)}"
    if isinstance(value, str):
        quoted = f'"{value[:_LONGEST_SHOWN]}"'
        text = quoted if is_line(quoted) else json.dumps(value[:_LONGEST_SHOWN])
    elif isinstance(value, int) and abs(value) > _MOST_WHOLE:  # Python refuses to print very long integers
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    else:
        text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


# ------------------------------------------------------------------------------- from an annotation to its reader

# The largest absolute value without a Range: what fits into 64 bits, and into a float.
_MOST_WHOLE, _MOST_FLOAT = 2**63 - 1, sys.float_info.max


def _wrong(wanted: str, value: object) -> WrongValueError:
    return WrongValueError(f"must be {wanted}, got {shown(value)}")


@cache
def _kind(hint: Any, loose: bool) -> Kind[Any]:
    """The reader of an annotation. ``loose`` records ignore unknown names."""
    marks = getattr(hint, "__metadata__", ())
    source = next((mark for mark in marks if isinstance(mark, From)), None)
    if source is None:
        kind = _base(hint.__origin__ if marks else hint, loose)
    else:
        kind = _converted(_kind(source.kind, loose), source.convert)
    for mark in marks:
        if isinstance(mark, Range | Length | Check):
            kind = _narrowed(kind, mark)
    return kind


def _base(hint: Any, loose: bool) -> Kind[Any]:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in _SIMPLE:
        return _SIMPLE[origin]
    if is_dataclass(origin):
        return _record(hint, loose)
    if origin is Literal:
        wanted = " or ".join(shown(choice) for choice in arguments)
        return _matching(wanted, lambda value: any(value == own and type(value) is type(own) for own in arguments))
    if origin in (Union, UnionType):
        return _union([_kind(each, loose) for each in arguments if each is not NoneType], NoneType in arguments)
    if origin is tuple and arguments[1:] != (...,):
        return _row([_kind(each, loose) for each in arguments])
    if origin in (list, abc.Sequence):
        return _list(list, _kind(arguments[0] if arguments else Any, loose))
    if origin in (tuple, frozenset):
        return _list(origin, _kind(arguments[0], loose))
    if origin in (dict, abc.Mapping):
        key, entry = arguments or (str, Any)
        return _mapping(_kind(key, loose), _kind(entry, loose))
    raise TypeError(f"no value is read from a file as {hint}")


def _matching(wanted: str, fits: Callable[[Any], bool], make: Callable[[Any], Any] | None = None) -> Kind[Any]:
    def read(value: object) -> Any:
        if not fits(value):
            raise _wrong(wanted, value)
        return value if make is None else make(value)

    return Kind(wanted, read)


def _is_writable(value: object) -> bool:
    """False for half of a surrogate pair, which JSON can escape; names of files hold bytes as others (PEP 383)."""
    try:
        return isinstance(value, str) and value.encode("utf-8", "surrogateescape") is not None
    except UnicodeEncodeError:
        return False


_STRING = "a string"
_TABLE = _matching("a table", lambda value: isinstance(value, dict))
_LIST = _matching("a list", lambda value: isinstance(value, list))

# True is an int in Python, and no number here. A whole number is compared before it is made a float, as it may be
# larger than any float.
_SIMPLE: Mapping[Any, Kind[Any]] = {
    int: _matching("a whole number", lambda value: type(value) is int and abs(value) <= _MOST_WHOLE),
    float: _matching("a number", lambda value: type(value) in (int, float) and abs(value) <= _MOST_FLOAT, float),
    bool: _matching("true or false", lambda value: isinstance(value, bool)),
    str: _matching(_STRING, _is_writable),
    Path: _matching("a path", lambda value: _is_writable(value) and "\0" not in value, Path),
    Any: Kind("anything", lambda value: value),
}


def _union(choices: Sequence[Kind[Any]], optional: bool) -> Kind[Any]:
    if optional and len(choices) == 1:
        return Kind(choices[0].wanted, lambda value: None if value is None else choices[0].read(value))
    wanted = " or ".join(choice.wanted for choice in choices)

    def read(value: object) -> Any:
        for choice in choices:
            with suppress(WrongValueError):
                return choice.read(value)
        if optional and value is None:
            return None
        raise _wrong(wanted, value)

    return Kind(wanted, read)


def _within(step: str | int, kind: Kind[Any], value: object) -> Any:
    try:
        return kind.read(value)
    except WrongValueError as error:
        raise error.within(step) from None


def _row(kinds: Sequence[Kind[Any]]) -> Kind[Any]:
    """A list of as many entries as there are kinds."""
    whole = _narrowed(_LIST, Length(len(kinds), len(kinds)))

    def read(value: object) -> Any:
        entries = zip(kinds, whole.read(value), strict=True)
        return tuple(_within(at, kind, each) for at, (kind, each) in enumerate(entries, start=1))

    return Kind(whole.wanted, read)


def _list(make: Callable[[Iterable[Any]], Any], entry: Kind[Any]) -> Kind[Any]:
    def read(value: object) -> Any:
        found = [_within(at, entry, each) for at, each in enumerate(_LIST.read(value), start=1)]
        if make is frozenset and (twice := [each for each, count in Counter(found).items() if count > 1]):
            raise WrongValueError(f"{shown(twice[0])} occurs twice", joint=": ")
        return make(found)

    return Kind(_LIST.wanted, read)


def _mapping(key: Kind[Any], entry: Kind[Any]) -> Kind[Any]:
    def read(value: object) -> Any:
        table = _TABLE.read(value).items()
        return {_within(shown(name), key, name): _within(shown(name), entry, each) for name, each in table}

    return Kind(_TABLE.wanted, read)


def _converted(kind: Kind[Any], convert: Callable[[Any], object]) -> Kind[Any]:
    def read(value: object) -> Any:
        found = kind.read(value)
        try:
            return convert(found)
        except WrongValueError:
            raise
        except ValueError as error:
            raise WrongValueError(str(error), joint=": ") from error

    return Kind(kind.wanted, read)


def _narrowed(kind: Kind[Any], check: Range | Length | Check) -> Kind[Any]:
    wanted = check.wanted(kind.wanted)

    def read(value: object) -> Any:
        try:
            found = kind.read(value)
        except WrongValueError as error:
            raise error if error.path or error.joint == ": " else _wrong(wanted, value) from None
        if found is not None and not check.admits(found):
            raise _wrong(wanted, value)
        return found

    return Kind(wanted, read)


@cache
def _fields(record: Any, loose: bool) -> Mapping[str, Field]:
    cls = get_origin(record) or record
    hints = get_type_hints(cls, include_extras=True)
    stated = dict(zip(getattr(cls, "__parameters__", ()), get_args(record), strict=True))
    found = {}
    for own in dataclasses.fields(cls):
        if own.init:
            hint = hints[own.name]
            key = next((mark.name for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Key)), own.name)
            optional = own.default is not dataclasses.MISSING or own.default_factory is not dataclasses.MISSING
            found[key] = Field(own.name, _kind(_stated(hint, stated), loose), optional)
    return found


def _stated(hint: Any, stated: Mapping[Any, Any]) -> Any:
    """An annotation of a generic record with its type variables replaced."""
    if not stated or isinstance(hint, TypeVar):
        return stated.get(hint, hint)
    parameters = getattr(hint, "__parameters__", ())
    return hint[tuple(stated[each] for each in parameters)] if parameters else hint


def _record(record: Any, loose: bool) -> Kind[Any]:
    make, members = get_origin(record) or record, _fields(record, loose)

    def read(value: object) -> Any:
        found = {}
        for name, given in _TABLE.read(value).items():
            if name in members:
                found[members[name].name] = _within(name, members[name].kind, given)
            elif not loose:
                raise unknown_name(name, members)
        for name, field in members.items():
            if not field.optional and field.name not in found:
                raise WrongValueError(f"is missing: it must be {field.kind.wanted}", (name,))
        try:
            return make(**found)
        except ValueError as error:
            raise WrongValueError(str(error), joint=": ") from error

    return Kind(_TABLE.wanted, read)
