"""Values and calls that models write as in Python, or with a mark on each side of a text, and their JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

# Those of JSON, also around marks. Other blanks are a text's: one in Chinese or Japanese may begin with U+3000.
BLANKS = " \t\r\n"
_CONSTANTS = {"None": "null", "True": "true", "False": "false"}
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(rf"\\(?:x({_HEX}{{2}})|u({_HEX}{{4}})|U(0010{_HEX}{{4}}|000{_HEX}{{5}})|(?P<sign>.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "\\": "\\", "'": "'", '"': '"'}

TEXT_ENDS = re.compile(r"\s{0,64}(?:[,:)\]}]|\Z)")
"""What follows the last quote of a text in which quotes may have no backslash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """How values are written: the ``quotes`` around texts, and the characters that separate values.

    Models write the last of the quotes, and the ``constants`` for None, True and False.
    ``escapes``: a backslash in a text belongs to the next character. ``loose``: but a quote in a text may have none.
    """

    quotes: tuple[str, ...] = ('"',)
    punctuation: str = "[]{}:,"
    escapes: bool = True
    loose: bool = False
    constants: tuple[str, str, str] = ("null", "true", "false")

    @property
    def is_python(self) -> bool:
        """Whether calls are written as ``f(a=1)``."""
        return "=" in self.punctuation

    def text(self, value: str) -> str:
        """A text as models write it, in Python or as JSON."""
        return repr(value) if self == PYTHON else _quoted(value)

    def constant(self, value: bool | None) -> str:
        """None, True or False as models write them."""
        return self.constants[(None, True, False).index(value)]


JSON = Syntax()
# LFM2's calls, and the lists and objects that several templates write.
PYTHON = Syntax(quotes=('"', "'"), punctuation="()[]{}:,=", loose=True, constants=("None", "True", "False"))
# OLMo 3's calls: their values are JSON.
PYTHON_JSON = replace(PYTHON, quotes=("'", '"'), constants=JSON.constants)
# Gemma 4's calls. Keys have no quotes.
MARKED = Syntax(quotes=('<|"|>',), escapes=False)
# FunctionGemma's calls.
ESCAPED = replace(MARKED, quotes=("<escape>",))


def to_json(literal: str, syntax: Syntax) -> str:
    """The JSON of a literal; of other text, text that is not JSON. Numbers keep their digits.

    A call in Python, ``f(a=1)``, becomes ``{"name": "f", "arguments": {"a": 1}}``.
    """
    return literal if syntax == JSON else _token(syntax).sub(partial(_as_json, syntax), literal)


def as_calls(calls: Sequence[tuple[str, Mapping[str, Any]]], syntax: Syntax) -> str:
    """A list of calls, each a name and its arguments: in Python, or else as JSON."""
    if not syntax.is_python:
        return json.dumps([{"name": name, "arguments": given} for name, given in calls], ensure_ascii=False)
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    return f"[{', '.join(written)}]"


def as_call(form: str, name: str, arguments: Mapping[str, Any]) -> str:
    """One call as JSON, in a form with places for its name and its arguments."""
    before, behind = form.split("{arguments}")
    return before.replace("{name}", _quoted(name)) + json.dumps(arguments, ensure_ascii=False) + behind


@cache
def _token(syntax: Syntax) -> re.Pattern[str]:
    """A text, a word with the sign behind it, a comma that ends a list, or the bracket that closes a call.

    A text may lack its last quote.
    """
    texts = "|".join(
        rf"{quote}(?:[^{quote}\\]++|\\.|{quote}(?!{TEXT_ENDS.pattern}))*+(?:{quote}|\Z)"
        if syntax.escapes
        else rf"{re.escape(quote)}.*?(?:{re.escape(quote)}|\Z)"
        for quote in syntax.quotes
    )
    others = re.escape(syntax.punctuation + "".join(quote[0] for quote in syntax.quotes))
    word = rf"(?P<word>[^\s{others}]++(?:\s++[^\s{others}]++)*+)\s*+(?P<sign>[(=:]?)\s*+"
    return re.compile(rf"(?P<text>{texts})|{word}|,\s*+(?=[)\]}}])|\)", re.DOTALL)


def _as_json(syntax: Syntax, found: re.Match[str]) -> str:
    text, word = found["text"], found["word"]
    if text is not None:
        return _text_as_json(text, syntax)
    if word is None:
        return "}}" if found[0] == ")" else ""
    if found["sign"] == "(":
        return f'{{"name": {_quoted(word)}, "arguments": {{'
    return f"{_quoted(word)}: " if found["sign"] else _CONSTANTS.get(word, word)


def _text_as_json(text: str, syntax: Syntax) -> str:
    if not syntax.escapes:
        (mark,) = syntax.quotes
        return _quoted(text.removeprefix(mark).removesuffix(mark))
    try:
        json.loads(text)
    except ValueError:
        inner = _ESCAPE.sub(_character, text[1:-1])
        # Joins escaped halves of characters. A half alone, which no text has, becomes U+FFFD.
        return _quoted(inner.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    return text


def _character(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    return chr(int(code, 16)) if code else _ESCAPED.get(found["sign"], found[0])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
