"""Checks of a session's arguments that do not depend on the model."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

from edgespec.decoding.logprobs import MOST_TOP
from edgespec.decoding.sampling import MOST_BIASED, Sampling, SamplingFields
from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.answer_parts import StopStrings
from edgespec.text.conversation.ends import Ends
from edgespec.text.conversation.hole import Hole
from edgespec.text.conversation.messages import described
from edgespec.text.plain import mended


def check_request(
    prompt: str | Sequence[int] | None,
    *,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    depth: int | None = None,
    raw: bool = False,
    logprobs: int | None = None,
) -> str | list[int]:
    """The prompt, with U+FFFD for half of a character, or its tokens.

    Raises InvalidRequestError for arguments of ``Session.generate`` that no model accepts.
    """
    tokens = _are_tokens(prompt)
    if not isinstance(prompt, str) and not (raw and tokens):
        if raw:
            wanted, hint = "text or a list of token ids", "ids are whole numbers from 0 on; an array has tolist()"
        else:
            wanted = "text"
            hint = "tokens are given with raw=True" if tokens else "a whole conversation is given as messages="
        raise InvalidRequestError(f"the prompt must be {wanted}, not {described(prompt)}", hint=hint, param="prompt")
    if not raw and isinstance(prompt, str) and not prompt.strip():
        raise InvalidRequestError("the prompt is empty", hint="give at least one character", param="prompt")
    check_number("max_tokens", max_tokens, 0)
    check_number("depth", depth, 0)
    check_number("logprobs", logprobs, 0, MOST_TOP)
    if not isinstance(stop, Sequence) or not all(isinstance(each, str) for each in stop):
        raise InvalidRequestError(f"stop strings must be a list of texts, not {described(stop)}", param="stop")
    StopStrings(stop)
    return mended(prompt) if isinstance(prompt, str) else list(map(int, prompt or ()))


def check_sampling(sampling: Sampling | None, fields: Mapping[str, Any], usual: Sampling) -> Sampling:
    """``sampling``, or the ``usual`` one without it, with the ``fields`` that the caller named changed.

    Raises InvalidRequestError for a value out of range, and for a name that no argument has.
    """
    if sampling is not None and not isinstance(sampling, Sampling):
        raise InvalidRequestError(
            f"sampling must be a Sampling, not {described(sampling)}",
            hint="for example Sampling(temperature=0.7)",
            param="sampling",
        )
    known = SamplingFields.__annotations__
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"of sampling there are {', '.join(known)}"
            raise InvalidRequestError(f"there is no argument {name!r}", hint=hint, param=name)
    own = usual if sampling is None else sampling
    return replace(own, **fields) if fields else own


def check_hole(prompt: object, suffix: object, files: object) -> Hole | None:
    """What is around the hole, with U+FFFD for half of a character; None without a suffix.

    Raises InvalidRequestError for what is not text, and for files without a hole.
    """
    if suffix is None:
        if files:
            raise InvalidRequestError(
                "files are read around a hole alone", hint="give a suffix as well", param="files"
            )
        return None
    before, behind = check_text("prompt", prompt), check_text("suffix", suffix)
    listed = files if isinstance(files, Sequence) and not isinstance(files, str) else [files]
    pairs = [each if isinstance(each, Sequence) and not isinstance(each, str) else () for each in listed]
    if not all(len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs):
        raise InvalidRequestError("files must be a list of pairs of a name and a text", param="files")
    return Hole(before, behind, tuple((mended(name), mended(own)) for name, own in pairs))


def check_ends(stop_token_ids: Sequence[int], min_tokens: int | None, max_tokens: int | None) -> None:
    """Raise InvalidRequestError for stop tokens and a least number of tokens that no model accepts."""
    check_number("min_tokens", min_tokens, 0)
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        message = f"min_tokens is {min_tokens}, more than the {max_tokens} tokens of max_tokens"
        raise InvalidRequestError(message, param="min_tokens")
    name = "stop_token_ids"
    if not _are_tokens(stop_token_ids):
        raise InvalidRequestError(f"{name} must be a list of token ids, not {described(stop_token_ids)}", param=name)
    if len(stop_token_ids) > MOST_BIASED:
        raise InvalidRequestError(
            f"{name} names {len(stop_token_ids)} tokens", hint=f"at most {MOST_BIASED}", param=name
        )


def check_text(name: str, value: object) -> str:
    """The text, with U+FFFD for half of a character. Raises InvalidRequestError for what is none."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"the {name} must be text, not {described(value)}", param=name)
    return mended(value)


def check_number(name: str, value: int | None, least: int, most: int | None = None) -> None:
    """Raise InvalidRequestError unless it is a whole number from ``least`` to ``most``, or None."""
    if value is None:
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be a whole number, not {described(value)}", param=name)
    if value < least:
        allowed = f"at least {least}" if least else "0 or more"
        raise InvalidRequestError(f"{name} must be {allowed}, not {value}", param=name)
    if most is not None and value > most:
        raise InvalidRequestError(f"{name} can be at most {most}, not {value}", param=name)


def _are_tokens(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(_is_token, value))


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def check_tokens(
    prompt: str | Sequence[int],
    sampling: Sampling,
    stop_token_ids: Sequence[int],
    ends: Ends,
    vocabulary_size: int,
) -> None:
    """Raise InvalidRequestError for a token that the model does not have, and if no token may begin the answer."""
    bias = dict(sampling.logit_bias)
    asked = () if isinstance(prompt, str) else prompt
    for name, tokens in (("logit_bias", bias), ("stop_token_ids", stop_token_ids), ("prompt", asked)):
        highest = max(tokens, default=0)
        if highest >= vocabulary_size:
            raise InvalidRequestError(
                f"{name} names token {highest}, and this model's tokens are 0 to {vocabulary_size - 1}", param=name
            )
    if len(sampling.banned.union(ends.not_before)) >= vocabulary_size:
        raise InvalidRequestError("no token may begin the answer: all tokens of the model are banned")


def check_path(path: object) -> Path:
    """The path of a file, behind a link: what is saved replaces the file. Raises InvalidRequestError."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InvalidRequestError(f"a file's path must be text or a Path, not {described(path)}")
    file = Path(path)
    return file.resolve() if file.is_symlink() else file


def busy() -> InvalidRequestError:
    """The error for a request during an answer."""
    return InvalidRequestError(
        "this session is already generating an answer", hint="wait for its end, cancel it, or open another session"
    )
