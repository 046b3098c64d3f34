"""What a session is asked, refused where it makes no sense whatever the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

from edgespec.decoding.sampling import Sampling
from edgespec.engine.answer import StopStrings
from edgespec.errors import InvalidRequestError


def check_request(
    prompt: str,
    *,
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    depth: int | None = None,
    raw: bool = False,
) -> None:
    """Raise InvalidRequestError for arguments of ``Session.generate`` that make no sense, whatever the model is."""
    if not isinstance(prompt, str):
        raise InvalidRequestError(
            f"the prompt is text, not {_kind(prompt)}", hint="a session keeps the messages itself"
        )
    if not raw and not prompt.strip():
        raise InvalidRequestError("the prompt is empty", hint="give at least one character")
    for name, value, least in (("max_tokens", max_tokens, 1), ("depth", depth, 0)):
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
            raise InvalidRequestError(f"{name} is a whole number, not {_kind(value)}")
        if value is not None and value < least:
            raise InvalidRequestError(f"{name} must be {f'at least {least}' if least else '0 or more'}, not {value}")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise InvalidRequestError(
            f"sampling is an edgespec.Sampling, not {_kind(sampling)}", hint="for example Sampling(temperature=0.7)"
        )
    if not isinstance(stop, Sequence) or not all(isinstance(each, str) for each in stop):
        raise InvalidRequestError(f"stop strings are given as a list of texts, not as {_kind(stop)}")
    StopStrings(stop)


def check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    """Raise InvalidRequestError for what is no conversation to go on with: prompts and their answers, in turns."""
    roles = ["user", "assistant"] * ((len(messages) + 1) // 2)
    for number, (message, role) in enumerate(zip(messages, roles, strict=False)):
        own = isinstance(message, Mapping)
        if not own or message.get("role") != role or not isinstance(message.get("content"), str):
            raise InvalidRequestError(
                f"message {number} of the conversation is not a text of the {role}",
                hint="prompts and answers take turns, the prompt first; give a system message as system",
            )
    if len(messages) % 2:
        raise InvalidRequestError("the conversation ends with a prompt", hint="leave it out and ask it")


def check_system(text: object) -> None:
    """Raise InvalidRequestError for what is no system message."""
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"the system message is text, not {type(text).__name__}")


def _kind(value: object) -> str:
    """What somebody gave instead, in Python's words."""
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"
