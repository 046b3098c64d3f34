"""What crosses the two pipes between a host and its worker process.

A frame is four bytes of its length, four of the header's length (both little-endian), a JSON object with the few
numbers, and raw bytes: token ids as int32, scores as float32. Neither side trusts the other's frames: sizes are
bounded before anything is allocated, and a frame that does not parse is a WorkerLostError.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec import errors
from edgespec.errors import EdgespecError, ForwardError, MemoryLimitError, ModelFileError, WorkerLostError
from edgespec.files.checked import Key, Kind, WrongValueError, kind_of, read
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.rows import IdArray, LogitsArray

# The largest body is one row of scores: 4 bytes for each of at most four million tokens. Vocabularies end at 262 144.
MOST_BODY_BYTES = 16 * 2**20

# The largest header is an error with its message and a path.
MOST_HEADER_BYTES = 64 * 2**10

_LENGTHS = struct.Struct("<II")  # of everything after the first number, and of the header
_IDS, _SCORES = np.dtype("<i4"), np.dtype("<f4")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. Accessors raise WorkerLostError for anything but the agreed format."""

    header: Mapping[str, Any]
    body: bytearray = field(default_factory=bytearray)

    def integer(self, name: str) -> int:
        """A number that is not negative."""
        value = self.header.get(name)
        if type(value) is not int or value < 0:
            _refuse(f"{name} is {_shown(value)}")
        return value

    def text(self, name: str) -> str:
        value = self.header.get(name)
        if not isinstance(value, str):
            _refuse(f"{name} is {_shown(value)}")
        return value

    def ids(self, start: int = 0, count: int | None = None) -> IdArray:
        """Token ids as int64 of shape (count,), beginning with the ``start``-th; all ids to the end by default."""
        return self._numbers(_IDS, start, count).astype(np.int64)

    def scores(self, start: int = 0, count: int | None = None) -> LogitsArray:
        """Scores as a new float32 array of shape (count,), beginning with the ``start``-th."""
        return self._numbers(_SCORES, start, count).astype(np.float32, copy=False)

    def _numbers(self, kind: np.dtype[Any], start: int, count: int | None) -> NDArray[Any]:
        size = len(self.body) // kind.itemsize
        wanted = size - start if count is None else count
        if len(self.body) % kind.itemsize or not start <= start + wanted <= size:
            _refuse(f"{len(self.body)} bytes where {start + wanted} numbers belong")
        return np.frombuffer(self.body, dtype=kind, count=wanted, offset=start * kind.itemsize)


def ids_bytes(ids: NDArray[Any]) -> bytes:
    return ids.astype(_IDS).tobytes()


def scores_bytes(scores: NDArray[Any]) -> bytes:
    return scores.astype(_SCORES, copy=False).tobytes()


def encode_frame(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """The bytes of one frame. Raises ForwardError if it is larger than the receiver accepts."""
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode("utf-8")
    if len(text) > MOST_HEADER_BYTES or len(body) > MOST_BODY_BYTES:
        raise ForwardError(f"a message of {len(text)} + {len(body)} bytes is too large for a worker process")
    return _LENGTHS.pack(4 + len(text) + len(body), len(text)) + text + body


def read_frame(stream: BufferedIOBase) -> Frame | None:
    """The next frame, or None if the stream ends between two frames. Blocks. Raises WorkerLostError."""
    lengths = bytearray(_LENGTHS.size)
    found = _fill(stream, lengths)
    if not found:
        return None
    if found < len(lengths):
        _refuse("the stream ends inside a frame")
    size, header_size = _LENGTHS.unpack(lengths)
    body_size = size - 4 - header_size
    if header_size > MOST_HEADER_BYTES or not 0 <= body_size <= MOST_BODY_BYTES:
        _refuse(f"a frame claims {size} bytes, {header_size} of them header")
    text, body = bytearray(header_size), bytearray(body_size)
    if _fill(stream, text) < header_size or _fill(stream, body) < body_size:
        _refuse("the stream ends inside a frame")
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WorkerLostError("a frame's header is not JSON") from error
    if not isinstance(header, dict):
        _refuse(f"a frame's header is {_shown(header)}")
    return Frame(header, body)


def _fill(stream: BufferedIOBase, buffer: bytearray) -> int:
    """Read until ``buffer`` is full or the stream ends; returns the number of bytes read."""
    view, done = memoryview(buffer), 0
    while done < len(buffer):
        try:
            count = stream.readinto(view[done:])
        except (OSError, ValueError) as error:  # ValueError: closed on this side
            raise WorkerLostError(f"the pipe cannot be read: {error}") from error
        if not count:
            break
        done += count
    return done


def _refuse(what: str) -> NoReturn:
    raise WorkerLostError(f"the pipe carries invalid data: {what}")


def _shown(value: object) -> str:
    return repr(value)[:64]


# ------------------------------------------------------------------------------------------------- what to load


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What a worker process loads: ``path`` is a file or a folder, as ``runtime`` requires.

    ``others`` are further parts of a split model. ``settings`` are the fields of that runtime's settings
    (``dataclasses.asdict``).
    """

    runtime: str
    path: Path
    others: tuple[Path, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    sha256: str | None = None


def read_load_request(value: object) -> LoadRequest:
    """The request to load in ``value``, from ``to_json``. Raises WorkerLostError."""
    return _read(LoadRequest, value)


def read_facts(value: object) -> ModelFacts:
    """The facts in ``value``, from ``to_json``. Raises WorkerLostError."""
    facts = _read(ModelFacts, value)
    for size in ("trained_context_length", "weight_bytes", "bytes_per_forward", "kv_bytes_per_token"):
        if getattr(facts, size) < 0:
            _refuse(f"a model's {size} is {getattr(facts, size)}")
    if min(facts.windowed.bytes_per_token, facts.windowed.positions, facts.windowed.state_bytes) < 0:
        _refuse(f"a cache of {facts.windowed}")
    if not 0 < facts.vocabulary_size <= MOST_BODY_BYTES // _SCORES.itemsize:
        _refuse(f"a vocabulary of {facts.vocabulary_size} tokens")
    if facts.mask_id is not None and not 0 <= facts.mask_id < facts.vocabulary_size:
        _refuse(f"a mask token {facts.mask_id}")
    return facts


def _read(record: type[T], value: object) -> T:
    try:
        return read(record, value)
    except WrongValueError as error:
        _refuse(f"{record.__name__}: {error}")


# ------------------------------------------------------------------------------------------------------- errors

# The facts of an error besides its message and its hint; classes that do not descend from these have none.
_EXTRAS: Mapping[type[EdgespecError], Mapping[str, Kind[Any]]] = {
    ModelFileError: {"path": kind_of(Path), "reason": kind_of(str), "offset": kind_of(int | None)},
    MemoryLimitError: {"needed_bytes": kind_of(int | None), "available_bytes": kind_of(int | None)},
    ForwardError: {"code": kind_of(int | None)},
}

# Errors with other constructors than the classes above: no runtime raises them.
_KNOWN: Mapping[str, type[EdgespecError]] = {
    name: getattr(errors, name)
    for name in errors.__all__
    if name not in {"DownloadError", "DiskSpaceError", "WorkerLostError"}
}

# A message is a sentence; a native one may be longer, and must still fit into a header.
_MOST_MESSAGE_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class _Described:
    kind: Annotated[str, Key("class")]
    message: str
    hint: str | None = None


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception for the pipe: class, message, hint, and the numbers of its class."""
    hint = error.hint if isinstance(error, EdgespecError) else None
    described: dict[str, Any] = {
        "class": type(error).__name__,
        "message": str(error)[:_MOST_MESSAGE_CHARACTERS],
        "hint": None if hint is None else hint[:_MOST_MESSAGE_CHARACTERS],
    }
    for name in _extras(type(error)):
        value = getattr(error, name)
        described[name] = str(value)[:_MOST_MESSAGE_CHARACTERS] if name in {"path", "reason"} else value
    return described


def rebuild_error(described: object) -> EdgespecError | None:
    """The error that ``describe_error`` described, or None if its class may not cross.

    The name only selects among the classes of ``edgespec.errors``.
    """
    try:
        told = read(_Described, described, ignore_unknown=True)
        if told.kind not in _KNOWN:
            return None
        error = _KNOWN[told.kind].__new__(_KNOWN[told.kind])
        EdgespecError.__init__(error, told.message, hint=told.hint)
        for name, kind in _extras(type(error)).items():
            setattr(error, name, kind.read(described.get(name)))  # type: ignore[attr-defined]  # it is a dict
    except WrongValueError:
        return None
    return error


def _extras(kind: type[BaseException]) -> Mapping[str, Kind[Any]]:
    return next((extras for base, extras in _EXTRAS.items() if issubclass(kind, base)), {})
