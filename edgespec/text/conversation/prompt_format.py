"""Control tokens that a message spells out stay text.

A user who pastes ``<|im_end|>`` asks about the token, or forges a turn. Names in a message's content are never
control tokens; names that the template writes always are. If a message contains such a name, the prompt is rendered a
second time with a mark of unused digits inside each name. The marks show which names came from messages, however the
template trimmed, joined or escaped the contents.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgespec.errors import InvalidRequestError
from edgespec.text.tokenizers.tokenizer import ControlToken, Tokenizer

# Bits of a mark: as many as a random UUID has, so a text that holds the next mark cannot be written beforehand.
_MARK_BITS = 128

# llama.cpp searches for every name from each hit to the end of the text: quadratic in the hits. With windows it is
# linear. Windows overlap by more than the longest name (20 characters in the catalogue's models).
_WINDOW, _OVERLAP = 2**15, 2**8

# Messages of a conversation that are remembered, the most that a request over HTTP may have: a megabyte.
_MESSAGES_KNOWN = 10_000

# The characters that llama.cpp strips next to a token with a strip flag.
_BLANKS = " \t\n\v\f\r"

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Messages], str]
"""The prompt text of messages and tools."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text that a model reads. Each of the ``points`` lies in a control token's name that is only text."""

    text: str
    points: tuple[int, ...] = ()


def spelled_controls(tokenizer: Tokenizer, text: str) -> tuple[str, ...]:
    """The names in ``text`` that a tokenizer would turn into control tokens."""
    return tuple(sorted(_named(tokenizer, text)))


class SpelledNames:
    """``spelled_controls`` of a conversation's messages, each of which is in the prompt of every later turn.

    Remembered by a hash: a message may have millions of characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[bytes, tuple[str, ...]] = {}

    def of(self, text: str) -> tuple[str, ...]:
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        names = self._known.pop(key, None)
        if names is None:
            names = spelled_controls(self._tokenizer, text)
        self._known[key] = names
        while len(self._known) > _MESSAGES_KNOWN:
            del self._known[next(iter(self._known))]
        return names


def _named(tokenizer: Tokenizer, text: str) -> dict[str, tuple[int, ControlToken]]:
    """The control tokens whose names ``text`` contains, by name."""
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
    messages: Messages,
    spelled: Callable[[str], tuple[str, ...]],
    tools: Messages = (),
) -> Prompt:
    """The prompt of these messages and tools; ``spelled`` is ``spelled_controls`` of a text.

    Raises what ``render`` raises, and InvalidRequestError if the origin of a name cannot be determined.
    """
    text = render(messages, tools)
    said, shown = list(_texts(messages)), "\n".join(_texts(tools))  # tools stay the same: remembered as one text
    if not any(map(spelled, [*said, shown])):
        return Prompt(text)
    mark = _mark(text, *said, shown)
    marked = render(*_each_text([messages, tools], partial(_marked, tokenizer, mark)))
    parts = marked.split(mark)
    whole = tokenizer.encode(marked, special=True)
    if "".join(parts) != text:
        # The template itself looks for such names. If it removed them all, no name came from a message.
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
    """Tokens of the prompt's text from ``start`` on; ``in_pieces``: name by name even without ``points``.

    Raises InvalidRequestError if the tokenizer makes a control token of ordinary text.
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
    """Where the template itself wrote these names; the longest match counts, as in llama.cpp."""
    if not names:
        return []
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    return [name for name in pattern.finditer(text) if not _marks(points, name)]


def _marks(points: Sequence[int], name: re.Match[str]) -> bool:
    """Whether one of the ascending ``points`` is inside the name."""
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
    """Digits that no text contains: templates change the case of letters and escape non-ASCII text.

    They are random, so one search is enough whatever the texts are: a counter would be searched once for each of its
    values that a message lists. Its only 9 is the first digit, so no suffix of it is a prefix.
    """
    mark = f"9{secrets.randbits(_MARK_BITS):o}"
    return _mark(*texts) if any(mark in text for text in texts) else mark


def _texts(value: Any) -> Iterator[str]:
    """All texts in lists and mappings, keys too, but for roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            if key != "role":
                yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A copy with each of the ``_texts`` changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): item if key == "role" else _each_text(item, change) for key, item in value.items()}
    return [_each_text(item, change) for item in value] if isinstance(value, list | tuple) else value


def _marked(tokenizer: Tokenizer, mark: str, content: str) -> str:
    """The content with a mark behind the first character of every name; a name may contain another name."""
    while names := spelled_controls(tokenizer, content):
        if min(map(len, names)) < 2:
            raise _unreadable()
        for name in names:
            content = content.replace(name, f"{name[0]}{mark}{name[1:]}")
    return content


def _unreadable() -> InvalidRequestError:
    return InvalidRequestError(
        "a message spells out a control token of this model, and this model cannot read it as text",
        hint="write it differently, for example with a space inside",
    )
