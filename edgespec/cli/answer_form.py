"""The form of an answer as options and the chat's ``/json`` name it: reading the texts, and naming the option."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec.errors import InvalidRequestError, reason_of
from edgespec.files.disk import in_utf_8
from edgespec.text.grammar.form import MOST_BYTES, Kind

# Options by the kind of form that they name.
FORM_OPTIONS: dict[Kind, str] = {
    "schema": "--json-schema",
    "regex": "--regex",
    "grammar": "--grammar",
    "choice": "--choice",
}


def schema_text(given: str) -> str:
    """A schema: ``given`` if it begins with a brace, else the file of that name. Raises InvalidRequestError."""
    return given if given.lstrip().startswith("{") else file_text(given, "schema")


def file_text(path: str, kind: Kind) -> str:
    """The text of a file that describes a form of this kind. Raises InvalidRequestError."""
    shown = f"{path[:100]!r}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        hint = "a schema is a JSON object or the name of a file" if kind == "schema" else "give the name of a file"
        raise InvalidRequestError(f"{shown} cannot be read: {reason_of(error)}", hint=hint, param=kind) from error
    if len(data) > MOST_BYTES:
        raise InvalidRequestError(f"{shown} is too large", hint=f"at most {MOST_BYTES // 1024} kB", param=kind)
    try:
        return in_utf_8(data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{shown} is not UTF-8 text (byte {error.start})", param=kind) from error


@contextmanager
def naming_options() -> Iterator[None]:
    """An error about a form within the block begins with the option that named the form."""
    try:
        yield
    except InvalidRequestError as error:
        option = next((option for kind, option in FORM_OPTIONS.items() if kind == error.param), None)
        if option is None:
            raise
        raise InvalidRequestError(f"{option}: {error.message}", hint=error.hint, param=error.param) from error
