"""What a request may cost before its first token: characters, values and time. Whatever reads it asks here first."""

from __future__ import annotations

import math
import time

from edgespec.errors import CancelledError, InvalidRequestError

# Text that fits in the context has a few bytes a token; ids, schemas and other fields come on top of it.
_BODY_BYTES, _BODY_BYTES_PER_TOKEN = 256_000, 64
# A name or value that reaches the prompt is a token there, or more.
_VALUES, _VALUES_PER_TOKEN = 20_000, 2
# How often a whole body may be read: each of sixteen answers reads its prompt a few times.
_READINGS = 128


class RequestBudget:
    """The budget of one request: what it may still cost. Any thread may ``cancel`` the request."""

    def __init__(self, context_length: int | None = None, seconds: float = math.inf) -> None:
        """For a context of this length in tokens. None, as for requests from Python: only time has a limit."""
        tokens = math.inf if context_length is None else context_length
        self.context_length = context_length
        self.body_bytes = _BODY_BYTES + _BODY_BYTES_PER_TOKEN * tokens
        self.values = _VALUES + _VALUES_PER_TOKEN * tokens  # names and values of JSON
        self.counted = 0  # of these in its body
        self._characters = _READINGS * self.body_bytes
        self._until = time.monotonic() + seconds
        self.cancelled = False
        # For a prompt that is only read (max_tokens 0): the tokens of its later answers, for which it leaves room.
        self.answer_tokens: int | None = 0

    def cancel(self) -> None:
        """End the work on the request where it asks next."""
        self.cancelled = True

    @property
    def left_s(self) -> float:
        """Seconds until the request must be complete; infinite without a limit."""
        return self._until - time.monotonic()

    def check(self) -> None:
        """Raise CancelledError if the request was cancelled or its time is over."""
        if self.cancelled or self.left_s < 0:
            raise CancelledError("the request was cancelled")

    def read(self, characters: int) -> None:
        """Count characters, or bytes, that are about to be read. Raises CancelledError and InvalidRequestError."""
        self.check()
        self._characters -= characters
        if self._characters < 0:
            raise InvalidRequestError(
                f"the request takes too much work for a context of {self.context_length} tokens",
                hint="shorten it or use a larger context (--context)",
            )
