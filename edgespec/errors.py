"""The errors that edgespec raises. A message says what happened and where; a hint says what to do next.

Every message is a sentence for the user. Any other exception that leaves the library is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "CancelledError",
    "ClosedError",
    "ConstraintError",
    "ContextFullError",
    "DiskSpaceError",
    "DownloadError",
    "EdgespecError",
    "ForwardError",
    "HashMismatchError",
    "InvalidRequestError",
    "MemoryLimitError",
    "ModelFileError",
    "ModelNotFoundError",
    "NonFiniteLogitsError",
    "NoneAllowedError",
    "ProfileError",
    "PromptTooLongError",
    "RewindError",
    "RuntimeUnavailableError",
    "SessionFileError",
    "StaleRowsError",
    "StoreLockedError",
    "TemplateError",
    "WorkerLostError",
]


# Characters that a terminal executes or that change the order of a line: those of C0 and C1, marks of direction, and
# Unicode's ends of lines. Names of files, and what a hub or a model file says, may hold any of them.
_UNSHOWN = (*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
ESCAPES = {code: ascii(chr(code))[1:-1] for code in _UNSHOWN} | {0: "\\0"}


class EdgespecError(Exception):
    """Base of every error edgespec raises on purpose.

    ``message`` is one sentence, ``hint`` (optional) the next step; ``str(error)`` is the message alone. Control
    characters in either, as a file's name may have, are shown as escapes: ``\\0``, ``\\n``, ``\\x1b``.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = message.translate(ESCAPES)
        super().__init__(message)
        self.message = message
        self.hint = None if hint is None else hint.translate(ESCAPES)

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle and copy: they would call ``__init__`` with the message alone, which not every kind takes."""
        return Exception.__new__, (type(self), *self.args), self.__dict__


class InvalidRequestError(EdgespecError):
    """An argument is out of range or conflicts with another argument; ``param`` names it where one is at fault."""

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ProfileError(EdgespecError):
    """A profile, or a value that overrides one, cannot be used."""


class ModelNotFoundError(EdgespecError):
    """The named model is unknown, or known but not on this machine."""


class ModelFileError(EdgespecError):
    """A model file is missing, truncated or malformed. ``offset``: the byte at which parsing failed."""

    def __init__(self, path: Path | str, reason: str, *, offset: int | None = None, hint: str | None = None) -> None:
        where = "" if offset is None else f" (at byte {offset})"
        super().__init__(f"{path}: {reason}{where}", hint=hint)
        self.path = Path(path)
        self.reason = reason
        self.offset = offset


class SessionFileError(EdgespecError):
    """A file with a saved session cannot be written, is damaged, or is another model's; nothing was loaded."""

    def __init__(self, path: Path | str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path = Path(path)
        self.reason = reason


class HashMismatchError(ModelFileError):
    """A file's sha256 differs from the expected one."""


class DownloadError(EdgespecError):
    """No source could deliver the model; ``reasons`` holds (source, sentence) for each one tried."""

    def __init__(self, message: str, *, reasons: Sequence[tuple[str, str]] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reasons = tuple(reasons)


class DiskSpaceError(EdgespecError):
    """Not enough free disk space; existing files are untouched."""

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class StoreLockedError(EdgespecError):
    """Another process holds the store's lock on this model."""


class MemoryLimitError(EdgespecError):
    """Loading would exceed the available or permitted memory; unknown numbers are None."""

    def __init__(
        self, message: str, *, needed_bytes: int | None, available_bytes: int | None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class RuntimeUnavailableError(EdgespecError):
    """A runtime cannot be used here; the message gives the reason and the hint says what to install."""


class TemplateError(EdgespecError):
    """A chat template is malformed, unsafe, or exceeds its time, step or output budget."""


class ContextFullError(EdgespecError):
    """The sequence has no room for the requested tokens."""


class PromptTooLongError(ContextFullError):
    """The prompt alone does not fit in the context."""


class ForwardError(EdgespecError):
    """A runtime's forward failed; ``code`` is the runtime's return code, if it has one."""

    def __init__(self, message: str, *, code: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class NonFiniteLogitsError(ForwardError):
    """The target's logits contain a NaN or +infinity, so no token is sampled."""


class ConstraintError(EdgespecError):
    """An answer that is bound to a form can no longer keep it, so it ends."""


class NoneAllowedError(ConstraintError):
    """None of the scored tokens is allowed by the form of the answer."""


class WorkerLostError(EdgespecError):
    """A worker process ended, hangs or sent an invalid answer; its state is lost. ``stderr``: its last output."""

    def __init__(self, message: str, *, stderr: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.stderr = stderr


class RewindError(EdgespecError):
    """A cache could not drop its last tokens; the sequence must be rebuilt."""


class StaleRowsError(EdgespecError):
    """Rows were read after their Sequence's next forward, rewind or close."""


class ClosedError(EdgespecError):
    """The object was used after ``close()``."""


class CancelledError(EdgespecError):
    """The work was cancelled; the state is that of the last committed token."""


def reason_of(error: Exception) -> str:
    """What an error says; one of the operating system without its number and the name of the file."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
