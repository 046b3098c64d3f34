"""Schemas without the parts that bind nothing, and lenient ones without those that llguidance cannot read.

It refuses a whole form for one of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from edgespec.text.conversation.argument_values import json_type
from edgespec.text.grammar.form import Form
from edgespec.text.grammar.literal_calls import ABOUT
from edgespec.text.grammar.size import inner_schemas

_OF_NAMES = (
    *("properties", "patternProperties", "$defs", "definitions"),
    *("dependentSchemas", "dependentRequired", "dependencies"),
)
_OF_DATA = ("const", "default", "enum", "examples")
_MAY_BE_NULL = ("const", "default")
# Patterns and schemas of a form that are asked for alone; further ones are left out. A pattern takes 0.25 ms.
_MOST_ASKED = 200
# Warnings about a form; further ones are counted.
_MOST_SAID = 20
# Before the schema of an answer without a call, in the grammar of calls.
_OF_ANSWER = "other: %json "


def binding(schema: Any) -> Any:
    """The schema without the keywords ``ABOUT`` it: of a tool's, descriptions may be most.

    An object under one of them stays: it may be a schema with that name, to which a reference leads.
    """
    if isinstance(schema, list):
        return [binding(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict[str, Any]()
    for name, own in schema.items():
        if name in _OF_NAMES and isinstance(own, dict):
            found[name] = {each: binding(inner) for each, inner in own.items()}
        elif name not in ABOUT or isinstance(own, dict):
            found[name] = own if name in _OF_DATA else binding(own)
    return found


def readable(form: Form, reads: Callable[[str], bool]) -> tuple[Form, list[str]]:
    """The form whose lenient schemas lack what is never read, and what that was, in words.

    ``reads`` says whether a pattern is read. Keywords that are null are left out, as Go's programs write null for
    what is absent, and types have their names in JSON Schema.
    """
    said = dict[str, None]()
    parts = _Parts(reads, said)
    if form.kind == "schema" and form.lenient:
        text = json.dumps(parts.schema(json.loads(form.text)), ensure_ascii=False)
    elif form.kind == "call":
        text = _changed(form.text, parts.schema)
    words = list(said)
    if len(words) > _MOST_SAID:
        words[_MOST_SAID:] = [f"{len(words) - _MOST_SAID} more parts are left out"]
    return (replace(form, text=text) if said else form), words


def opened(form: Form, why_not: Callable[[str], str]) -> tuple[Form, list[str]]:
    """The form; in one of calls each lenient schema that fails alone takes any value of its type. And what failed.

    ``why_not`` says why a schema, as JSON, fails; it is empty for others.
    """
    reasons = dict[str, str]()
    if form.kind != "call":
        return form, []

    def free(schema: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(schema, ensure_ascii=False)
        if text not in reasons:
            reasons[text] = why_not(text) if len(reasons) < _MOST_ASKED else "the tools have too many"
        if not reasons[text]:
            return schema
        return {key: schema[key] for key in schema if key == "x-guidance" or (key, schema[key]) == ("type", "object")}

    changed = replace(form, text=_changed(form.text, free, but=_OF_ANSWER))
    different = list(dict.fromkeys(filter(None, reasons.values())))[:_MOST_SAID]
    return changed, [f"parameters of a tool cannot be followed and are free: {why}" for why in different]


def _changed(text: str, change: Callable[[dict[str, Any]], dict[str, Any]], but: str | None = None) -> str:
    """The grammar of calls with its lenient schemas changed, ``but`` not those behind that text."""
    pieces, done = list[str](), 0
    for start, end, schema in inner_schemas(text):
        if but is not None and text.endswith(but, 0, start):
            continue
        if isinstance(schema, dict) and schema.get("x-guidance", {}).get("lenient", True):
            pieces += [text[done:start], json.dumps(change(schema), ensure_ascii=False)]
            done = end
    return "".join([*pieces, text[done:]])


class _Parts:
    """Reads schemas part by part. ``said`` gets what is not kept, each once."""

    def __init__(self, reads: Callable[[str], bool], said: dict[str, None]) -> None:
        self._reads, self._said = reads, said
        self._read = dict[str, bool]()

    def schema(self, given: Any) -> Any:
        if isinstance(given, list):
            return [self.schema(each) for each in given]
        if not isinstance(given, dict):
            return given
        return {name: own for name, value in given.items() for own in self._keyword(name, value)}

    def _keyword(self, name: str, given: Any) -> Iterator[Any]:
        """The value of a keyword; none if it is left out."""
        if given is None and name not in _MAY_BE_NULL:
            self._say(f"{name:.40} that is null is left out")
        elif name in _OF_DATA:
            yield given
        elif name in _OF_NAMES and isinstance(given, dict):
            yield self._named(given, patterns=name == "patternProperties")
        elif name == "pattern" and isinstance(given, str):
            yield from [given] if self._is_read(given) else []
        elif name == "type" and isinstance(given, str | list):
            yield from self._type(given)
        else:
            yield self.schema(given)

    def _named(self, given: Mapping[str, Any], *, patterns: bool) -> dict[str, Any]:
        """Schemas by their names; a null says nothing of its value."""
        found = dict[str, Any]()
        for name, own in given.items():
            if own is None:
                self._say(f"{name:.40} that is null is left out")
            if not patterns or self._is_read(name):
                found[name] = {} if own is None else self.schema(own)
        return found

    def _is_read(self, pattern: str) -> bool:
        if pattern not in self._read:
            self._read[pattern] = len(self._read) < _MOST_ASKED and self._reads(pattern)
        if not self._read[pattern]:
            self._say(f"the pattern {pattern!r:.80} is left out: it cannot be followed")
        return self._read[pattern]

    def _type(self, given: str | list[Any]) -> Iterator[Any]:
        names = [given] if isinstance(given, str) else given
        known = dict[str, None]()
        for name in names:
            own = json_type(name) if isinstance(name, str) else None
            if own is None:
                self._say(f"the unknown type {name!r:.40} is left out")
            else:
                known[own] = None
                if own != name:
                    self._say(f"the type {name!r:.40} is read as {own!r}")
        if known:
            yield next(iter(known)) if isinstance(given, str) else list(known)

    def _say(self, what: str) -> None:
        self._said[what] = None
