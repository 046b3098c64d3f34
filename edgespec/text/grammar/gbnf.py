"""GBNF, as llama.cpp reads it, in the part of it that llguidance reads in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterator

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_PARTS = re.compile(
    r'"(?P<text>(?:\\.|[^"\\])*)"|\[(?P<letters>(?:\\.|[^\]\\])*)\]|#[^\r\n]*'
    r'|(?P<any>\.)|(?P<name>[\w-]+)|(?P<open>["\[])',
    re.DOTALL,
)
_LETTER = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([\"\\\[\]nrt])|([^\\])", re.DOTALL
)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_IN_QUOTES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_CONTROL = re.compile(r"([\x00-\x08\x0b\x0c\x0e-\x1f])")
_ANY = "[\\x00-\U0010ffff]"


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is GBNF, and not Lark."""
    return _RULE.search(grammar) is not None


def plain_gbnf(grammar: str) -> str:
    """The grammar without the escapes that llguidance misreads. Raises ValueError."""

    def plain(found: re.Match[str]) -> str:
        if found["text"] is not None:
            return _quoted("".join(letter for letter, _ in _letters(found["text"])))
        if found["letters"] is not None:
            return f"[{''.join(_class(found['letters']))}]"
        if found["any"]:
            return _ANY
        if found["open"]:
            raise ValueError(f"{grammar[found.start() : found.start() + 20]!r} has no end")
        return found[0]

    return _PARTS.sub(plain, grammar)


def _letters(text: str) -> Iterator[tuple[str, bool]]:
    """The letters that a text stands for, and whether each stands for itself."""
    place = 0
    while place < len(text):
        if (found := _LETTER.match(text, place)) is None:
            raise ValueError(f"{text[place : place + 2]!r} is not an escape of GBNF")
        place = found.end()
        *numbers, named, own = found.groups()
        number = next(filter(None, numbers), None)
        yield (own or _NAMED.get(named, named) if number is None else chr(int(number, 16))), bool(own)


def _quoted(text: str) -> str:
    """A text in quotes; control characters, which none has there, are classes between them."""
    parts = [
        _escaped(part) if _CONTROL.match(part) else "".join(_IN_QUOTES.get(letter, letter) for letter in part)
        for part in _CONTROL.split(text)
    ]
    pieces = [f"[{part}]" if number % 2 else f'"{part}"' for number, part in enumerate(parts) if part]
    return f"({' '.join(pieces)})" if len(pieces) > 1 else "".join(pieces) or '""'


def _class(text: str) -> Iterator[str]:
    """What is between the brackets of a class, with a number for each letter that may mean more than itself."""
    letters, place = list(_letters(text)), 0
    if letters[:1] == [("^", True)]:
        yield "^"
        place = 1
    while place < len(letters):
        yield _escaped(letters[place][0])
        place += 1
        if place + 1 < len(letters) and letters[place] == ("-", True):
            yield "-" + _escaped(letters[place + 1][0])
            place += 2


def _escaped(letter: str) -> str:
    return letter if letter.isalnum() or not letter.isascii() else f"\\x{ord(letter):02x}"
