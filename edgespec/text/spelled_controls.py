"""Control tokens that a message spells out stay text: whoever pastes ``<|im_end|>`` asks about it, or forges a turn.

The rule: in the contents of messages nothing is a control token; in what the template itself writes everything is. A
prompt without such text is tokenised whole, as ever. In one with it, each is marked inside its name with digits that
nothing else holds, the marked messages are rendered as well, and the marks tell which names came from messages,
however the template trimmed, joined or escaped them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgespec.errors import InvalidRequestError
from edgespec.text.tokenizer import ControlToken, Tokenizer

# Digits, because templates change the case of letters and escape what is not ASCII. No end of it begins it.
_FIRST_MARK = 7305918264015384

# llama.cpp looks for every name from each one it found to the end of the text: the square of their number. In windows
# it is their number; they overlap by more than any name is long (20 characters in the catalogue's models).
_WINDOW, _OVERLAP = 2**15, 2**8

# What llama.cpp strips beside a token that says so.
_BLANKS = " \t\n\v\f\r"

Render = Callable[[Sequence[Mapping[str, str]]], str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text that a model reads. At each of the ``points`` stands the name of a control token that is only text."""

    text: str
    points: tuple[int, ...] = ()


def spelled_controls(tokenizer: Tokenizer, text: str) -> tuple[str, ...]:
    """The names of control tokens that would become those tokens where ``text`` stands."""
    return tuple(sorted(_named(tokenizer, text)))


def _named(tokenizer: Tokenizer, text: str) -> dict[str, tuple[int, ControlToken]]:
    """The control tokens whose names stand in ``text``, by name."""
    found = set[int]()
    for begin in range(0, max(1, len(text) - _OVERLAP), _WINDOW):
        found.update(tokenizer.encode(text[begin : begin + _WINDOW + _OVERLAP], special=True))
    controls = ((token, tokenizer.control_token(token)) for token in found)
    return {
        control.text: (token, control) for token, control in controls if control is not None and control.text in text
    }


def read_messages(
    tokenizer: Tokenizer,
    render: Render,
    messages: Sequence[Mapping[str, str]],
    spelled: Callable[[str], tuple[str, ...]],
) -> Prompt:
    """The prompt of these messages; ``spelled`` is ``spelled_controls`` of a content.

    Raises what ``render`` raises, and InvalidRequestError where it cannot be told what came from a message.
    """
    text = render(messages)
    if not any(spelled(message["content"]) for message in messages):
        return Prompt(text)
    mark = _mark(text, *(message["content"] for message in messages))
    marked = render([{**message, "content": _marked(tokenizer, message["content"], mark)} for message in messages])
    parts = marked.split(mark)
    whole = tokenizer.encode(marked, special=True)
    if "".join(parts) != text:
        # The template looks for such names itself. It may have taken them out; one that is left came from a message.
        if _controls(tokenizer, tokenizer.encode(text, special=True)) == _controls(tokenizer, whole):
            return Prompt(text)
        raise _unreadable()
    if encode(tokenizer, Prompt(marked), in_pieces=True) != whole:
        raise _unreadable()
    points, at = [], 0
    for part in parts[:-1]:
        at += len(part)
        points.append(at)
    return Prompt(text, tuple(points))


def encode(
    tokenizer: Tokenizer, prompt: Prompt, start: int = 0, *, add_bos: bool = False, in_pieces: bool = False
) -> list[int]:
    """Tokens of the prompt's text from ``start`` on; ``in_pieces`` also where nothing is to be taken for text.

    Raises InvalidRequestError where the tokenizer makes a control token of ordinary text.
    """
    text = prompt.text[start:]
    points = [point - start for point in prompt.points if point > start]
    if not points and not in_pieces:
        return tokenizer.encode(text, special=True, add_bos=add_bos)
    controls = _named(tokenizer, text)
    made = tokenizer.encode("", add_bos=add_bos)
    begin, before = 0, None
    for name in _genuine(text, list(controls), points):
        token, control = controls[name.group()]
        made += _piece(tokenizer, text[begin : name.start()], before, control)
        made.append(token)
        begin, before = name.end(), control
    return made + _piece(tokenizer, text[begin:], before, None)


def _genuine(text: str, names: Sequence[str], points: Sequence[int]) -> list[re.Match[str]]:
    """Where the template itself wrote these names; the longest of several first, as llama.cpp takes them."""
    if not names:
        return []
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    return [name for name in pattern.finditer(text) if not _marks(points, name)]


def _marks(points: Sequence[int], name: re.Match[str]) -> bool:
    """Whether one of the ascending points is inside of the name."""
    after = bisect_right(points, name.start())
    return after < len(points) and points[after] < name.end()


def _piece(tokenizer: Tokenizer, text: str, before: ControlToken | None, after: ControlToken | None) -> list[int]:
    """Tokens of text between two control tokens."""
    if before is not None and before.strips_right:
        text = text.lstrip(_BLANKS)
    if after is not None and after.strips_left:
        text = text.rstrip(_BLANKS)
    ids = tokenizer.encode(text) if text else []
    if any(control.text in text for control in _controls(tokenizer, ids)):
        raise _unreadable()
    return ids


def _controls(tokenizer: Tokenizer, ids: Sequence[int]) -> list[ControlToken]:
    return [control for token in ids if (control := tokenizer.control_token(token)) is not None]


def _mark(*texts: str) -> str:
    number = _FIRST_MARK
    while any(str(number) in text for text in texts):
        number += 1
    return str(number)


def _marked(tokenizer: Tokenizer, content: str, mark: str) -> str:
    """The content with a mark behind the first character of every name; one may hide in another."""
    while names := spelled_controls(tokenizer, content):
        if min(map(len, names)) < 2:
            raise _unreadable()
        for name in names:
            content = content.replace(name, f"{name[0]}{mark}{name[1:]}")
    return content


def _unreadable() -> InvalidRequestError:
    return InvalidRequestError(
        "a message spells out a control token of this model, and this model cannot read it as text",
        hint="write it in another way, for example with a space inside",
    )
