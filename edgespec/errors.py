"""One small tree of errors. A message says what happened and where; a hint says what to do next.

Everything in this tree is a sentence meant for a person. Any other exception that leaves the library is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "CancelledError",
    "ClosedError",
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
    "ProfileError",
    "PromptTooLongError",
    "RewindError",
    "RuntimeUnavailableError",
    "StaleRowsError",
    "StoreLockedError",
    "TemplateError",
    "WorkerLostError",
]


class EdgespecError(Exception):
    """Base of every error edgespec raises on purpose.

    ``message`` is one sentence, ``hint`` (optional) the next step; ``str(error)`` is the message alone.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidRequestError(EdgespecError):
    """An argument is out of its range or does not fit the others."""


class ProfileError(EdgespecError):
    """A profile, or a value that overrides one, cannot be used."""


class ModelNotFoundError(EdgespecError):
    """No model of that name is known, or it is known but not on this machine."""


class ModelFileError(EdgespecError):
    """A model file is missing, truncated or malformed. ``offset`` is the byte where reading stopped making sense."""

    def __init__(self, path: Path | str, reason: str, *, offset: int | None = None, hint: str | None = None) -> None:
        where = "" if offset is None else f" (at byte {offset})"
        super().__init__(f"{path}: {reason}{where}", hint=hint)
        self.path = Path(path)
        self.reason = reason
        self.offset = offset


class HashMismatchError(ModelFileError):
    """A file's sha256 is not the one it should have."""


class DownloadError(EdgespecError):
    """No source could deliver the model; ``reasons`` holds (source, sentence) for each one tried."""

    def __init__(self, message: str, *, reasons: Sequence[tuple[str, str]] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reasons = tuple(reasons)


class DiskSpaceError(EdgespecError):
    """Not enough free disk space; what was there before is untouched."""

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class StoreLockedError(EdgespecError):
    """Another process holds the store's lock on this model."""


class MemoryLimitError(EdgespecError):
    """Loading would not fit in the memory that is available or allowed; the numbers are None where not known."""

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
    """The sequence has no room for what was asked."""


class PromptTooLongError(ContextFullError):
    """The prompt alone does not fit in the context."""


class ForwardError(EdgespecError):
    """A runtime's forward failed; ``code`` is the runtime's own return code where it has one."""

    def __init__(self, message: str, *, code: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class NonFiniteLogitsError(ForwardError):
    """The target's logits hold a NaN or +infinity; nothing is sampled from garbage."""


class WorkerLostError(EdgespecError):
    """A worker process ended, hangs or talks nonsense; what it held is gone. ``stderr``: the end of what it wrote."""

    def __init__(self, message: str, *, stderr: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.stderr = stderr


class RewindError(EdgespecError):
    """A cache refused to drop its tail; the sequence must be rebuilt."""


class StaleRowsError(EdgespecError):
    """Rows were read after their Sequence's next forward, rewind or close."""


class ClosedError(EdgespecError):
    """The object was used after ``close()``."""


class CancelledError(EdgespecError):
    """The work was cancelled; state is back at the last committed token."""
