"""Errors as OpenAI's clients read them: a status and ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from edgespec.errors import (
    CancelledError,
    ClosedError,
    ConstraintError,
    DownloadError,
    EdgespecError,
    InvalidRequestError,
    MemoryLimitError,
    ModelFileError,
    ModelNotFoundError,
    PromptTooLongError,
    RuntimeUnavailableError,
    TemplateError,
    WorkerLostError,
)

# Errors of the machine or of loading: the same request may succeed later.
_UNAVAILABLE = (
    CancelledError,
    ClosedError,
    DownloadError,
    MemoryLimitError,
    ModelFileError,
    ModelNotFoundError,
    RuntimeUnavailableError,
    WorkerLostError,
)

# The code for a prompt that is longer than the context, at which clients shorten it.
TOO_LONG = "context_length_exceeded"

# Seconds after which a client should ask again if the server cannot say better.
RETRY_S = 2


class GoneError(Exception):
    """The client closed the connection, or takes nothing."""


class ApiError(Exception):
    """An answer with an error. ``param`` names the request's field, ``code`` is for programs.

    ``retry_s``: the value of Retry-After, in seconds; None without this header.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_s = retry_s

    @property
    def type(self) -> str:
        """OpenAI's class of the error."""
        if self.status in (401, 403):
            return "authentication_error" if self.status == 401 else "permission_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def logged(self) -> str:
        """The error for a log. The message of a client's error may quote the request, so its code stands for it."""
        if self.status >= 500:
            return self.message
        return " in ".join(filter(None, (self.code or self.type, self.param)))

    def as_json(self) -> dict[str, Any]:
        """The answer's body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return json.dumps(self.as_json()).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the answer, Content-Type included."""
        found = [(b"content-type", b"application/json")]
        if self.retry_s is not None:
            found.append((b"retry-after", str(self.retry_s).encode()))
        if self.status in (HTTPStatus.CONFLICT, HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.GATEWAY_TIMEOUT):
            # Clients repeat such a request unasked. It would replace the newer one, be refused or take as long again.
            found.append((b"x-should-retry", b"false"))
        if self.status == HTTPStatus.UNAUTHORIZED:
            found.append((b"www-authenticate", b"Bearer"))
        return found


def unsupported(param: str, what: str) -> ApiError:
    """The error for a field whose meaning would be lost if it were ignored."""
    return ApiError(f"{what} is not supported", param=param, code="unsupported_parameter")


def sentence(error: EdgespecError) -> str:
    """The error's message, with its hint."""
    return error.message if error.hint is None else f"{error.message} ({error.hint})"


def api_error(error: EdgespecError, param: str | None = None) -> ApiError:
    """The answer to a request that failed with ``error``; ``param`` is the field with the prompt."""
    message = sentence(error)
    if isinstance(error, PromptTooLongError):
        return ApiError(f"{TOO_LONG}: {message}", param=param, code=TOO_LONG)  # clients look for it in the message
    if isinstance(error, InvalidRequestError):
        return ApiError(message, param=error.param)
    if isinstance(error, ConstraintError):
        return ApiError(message, code="constraint_failed")
    if isinstance(error, TemplateError):
        return ApiError(message, code="template_error")
    if isinstance(error, _UNAVAILABLE):
        return ApiError(message, status=503, code="unavailable", retry_s=RETRY_S)
    return ApiError(message, status=500, code="internal_error")
