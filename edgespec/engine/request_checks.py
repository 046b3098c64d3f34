"""Checks of a session's arguments that do not depend on the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path

from edgespec.decoding.logprobs import MOST_TOP
from edgespec.decoding.sampling import Sampling
from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.answer_parts import StopStrings
from edgespec.text.conversation.messages import described


def check_request(
    prompt: str | None,
    *,
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    depth: int | None = None,
    raw: bool = False,
    logprobs: int | None = None,
) -> str:
    """The prompt. Raises InvalidRequestError for arguments of ``Session.generate`` that no model accepts."""
    if not isinstance(prompt, str):
        raise InvalidRequestError(
            f"the prompt must be text, not {described(prompt)}",
            hint="a whole conversation is given as messages=",
            param="prompt",
        )
    if not raw and not prompt.strip():
        raise InvalidRequestError("the prompt is empty", hint="give at least one character", param="prompt")
    for name, value, least in (("max_tokens", max_tokens, 1), ("depth", depth, 0), ("logprobs", logprobs, 0)):
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
            raise InvalidRequestError(f"{name} must be a whole number, not {described(value)}", param=name)
        if value is not None and value < least:
            allowed = f"at least {least}" if least else "0 or more"
            raise InvalidRequestError(f"{name} must be {allowed}, not {value}", param=name)
    if logprobs is not None and logprobs > MOST_TOP:
        raise InvalidRequestError(f"logprobs can be at most {MOST_TOP}, not {logprobs}", param="logprobs")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise InvalidRequestError(
            f"sampling must be a Sampling, not {described(sampling)}",
            hint="for example Sampling(temperature=0.7)",
            param="sampling",
        )
    if not isinstance(stop, Sequence) or not all(isinstance(each, str) for each in stop):
        raise InvalidRequestError(f"stop strings must be a list of texts, not {described(stop)}", param="stop")
    StopStrings(stop)
    return prompt


def check_bias(sampling: Sampling, vocabulary_size: int) -> None:
    """Raise InvalidRequestError if the sampling's bias names a token that the model does not have."""
    highest = max(dict(sampling.logit_bias), default=0)
    if highest >= vocabulary_size:
        raise InvalidRequestError(
            f"logit_bias names token {highest}, and this model's tokens are 0 to {vocabulary_size - 1}",
            param="logit_bias",
        )


def check_path(path: object) -> Path:
    """The path of a file, behind a link: what is saved replaces the file. Raises InvalidRequestError."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InvalidRequestError(f"a file's path must be text or a Path, not {described(path)}")
    file = Path(path)
    return file.resolve() if file.is_symlink() else file


def busy() -> InvalidRequestError:
    """The error for a request during an answer."""
    return InvalidRequestError(
        "this session is already generating an answer", hint="wait for its end, or open another session"
    )
