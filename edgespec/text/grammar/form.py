"""The form of an answer as a request names it, checked. Nothing is compiled here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.errors import InvalidRequestError

Kind = Literal["schema", "regex", "grammar", "choice", "call"]
Spacing = Literal["line", "compact", "free"]

# A schema of 20 000 names has about 400 kB, and takes 0.1 s to compile. Real ones have a few.
MOST_BYTES = 256 * 1024
# One line break and the indentation of deep objects: a small model otherwise writes blanks without end.
_FREE_BLANKS = r"\n?[ ]{0,40}"
SPACINGS: Mapping[Spacing, Mapping[str, Any]] = {
    "line": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "compact": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "free": {"whitespace_pattern": _FREE_BLANKS},
}
"""How JSON is written, and llguidance's options for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form: its ``kind``, and its ``text``, for a schema and for choices as JSON.

    ``spacing`` is that of JSON: ``line`` has ", " and ": " as Python's json writes, ``compact`` no blanks, ``free``
    what the model writes, at most one line break and 40 blanks in a row. With ``lenient`` a schema's keywords that
    cannot be kept are left out, and the compiled form says which. A ``call`` is a grammar in Lark that
    ``grammar/calls.py`` makes.
    """

    kind: Kind
    text: str
    spacing: Spacing = "line"
    lenient: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``Session.generate`` that ask for it."""
        own = json.loads(self.text) if self.kind == "choice" else self.text
        return {self.kind: own, "spacing": self.spacing, "strict": not self.lenient}


def form_of(
    schema: Mapping[str, Any] | str | bool | None = None,
    regex: str | None = None,
    grammar: str | None = None,
    choice: Sequence[str] | None = None,
    *,
    spacing: str = "line",
    lenient: bool = False,
) -> Form | None:
    """The form of a request that names at most one; None if it names none.

    A schema is a mapping, or its JSON text; a grammar is GBNF as llama.cpp reads it, or Lark. Raises
    InvalidRequestError.
    """
    given = {"schema": schema, "regex": regex, "grammar": grammar, "choice": choice}
    named = [name for name, value in given.items() if value is not None]
    if not named:
        return None
    if len(named) > 1:
        raise InvalidRequestError(
            f"{named[0]} and {named[1]} were given together", hint="an answer has one form", param=named[1]
        )
    (kind,) = named
    if spacing not in SPACINGS:
        raise InvalidRequestError(f"spacing must be {', '.join(SPACINGS)}, not {spacing!r:.40}", param="spacing")
    text = _schema_text(schema) if kind == "schema" else _choice_text(choice) if kind == "choice" else given[kind]
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(f"{kind} must be text that is not empty", param=kind)
    if len(text.encode(errors="surrogatepass")) > MOST_BYTES:
        raise InvalidRequestError(f"{kind} is too large", hint=f"at most {MOST_BYTES // 1024} kB", param=kind)
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InvalidRequestError(f"{kind} holds characters that no text has", param=kind)
    return Form(kind=kind, text=text, spacing=_spacing(spacing), lenient=lenient)  # type: ignore[arg-type]


def _spacing(given: str) -> Spacing:
    return next(each for each in SPACINGS if each == given)


def _schema_text(schema: object) -> str:
    try:
        own = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(own, Mapping | bool):
            raise InvalidRequestError("a JSON schema is an object", param="schema")
        # false allows no text at all, true any.
        return json.dumps({} if own is True else {"not": {}} if own is False else own, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"the schema is not JSON: {str(error)[:100]}", param="schema") from error


def _choice_text(choice: object) -> str:
    if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
        raise InvalidRequestError("choice must be a list of at least one text", param="choice")
    if not all(isinstance(each, str) and each for each in choice):
        raise InvalidRequestError("each choice must be text that is not empty", param="choice")
    return json.dumps(list(dict.fromkeys(choice)), ensure_ascii=False)


def lark_text(text: str) -> str:
    """A text that stands for itself in a grammar in Lark."""
    return json.dumps(text, ensure_ascii=False)
