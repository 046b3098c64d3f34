"""Schemas as llguidance reads what their writers meant, and lenient ones without the parts that it cannot read.

It refuses a whole form for one of these.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote

from edgespec.text.conversation.argument_values import json_type
from edgespec.text.conversation.tools import MOST_TOOLS
from edgespec.text.grammar.form import Form
from edgespec.text.grammar.literal_calls import ABOUT
from edgespec.text.grammar.size import costly, inner_schemas, references_in

_OF_NAMES = (
    *("properties", "patternProperties", "$defs", "definitions"),
    *("dependentSchemas", "dependentRequired", "dependencies"),
)
_OF_DATA = ("const", "default", "enum", "examples", "x-guidance")
_COUNTS = ("Length", "Items", "Properties", "Contains")  # behind min and max
_COMPOSED = ("$ref", "allOf", "oneOf", "not")
# Of a whole schema.
_AROUND = ("$schema", "$id", "$defs", "definitions", "x-guidance")
_DRAFT = re.compile(r"draft(?:-(0[467])|[-/](2019-09|2020-12))")
# The characters of a reference behind its mark; others are escaped.
_OF_FRAGMENT = "/~%:@!$&'()*+,;=-._?"
# Those of JSON Schema. Any other says nothing of a text.
_FORMATS = (
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference", "uri-template", "iri", "iri-reference", "uuid", "json-pointer"),
    *("relative-json-pointer", "regex", "unknown"),
)
# The bounds of numbers, by whether they are lower ones: the inclusive one and the exclusive one.
_BOUNDS = {True: ("minimum", "exclusiveMinimum"), False: ("maximum", "exclusiveMaximum")}
# Numbers that are read as bounds: of whole numbers towards the type's end or in a range, of others, and from zero.
_MOST_WHOLE, _MOST, _LEAST = 2.0**63, 1e18, 1e-20
# The ends of types of numbers, as programs write them: of 64 bits, with a sign and without, floats, and decimals.
# Upper ones of whole numbers are read.
_ENDS = (2.0**63, 2.0**64, 3.4028234663852886e38, float(2**96 - 1), sys.float_info.max, math.inf)
_MAY_BE_NULL = ("const", "default")
# Patterns and costly schemas of a form that are asked for alone; further ones are left out. A pattern takes 0.25 ms.
_MOST_ASKED = 200
# A schema of fewer characters without these takes 0.5 ms. A multiple of 10 000 takes 50 ms.
_SMALL, _COSTLY = 1000, ('"multipleOf"', '"pattern"')
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
    """The form with its schemas as they are meant, and what lenient ones lack because it is never read, in words.

    ``reads`` says whether a pattern is read. Of a lenient schema keywords that are null are left out, as Go's
    programs write null for what is absent, and types have their names in JSON Schema.
    """
    said = dict[str, None]()
    read = dict[str, bool]()

    def meant(schema: Any, *, lenient: bool) -> Any:
        found = _Parts(reads, read, said, _led(schema), lenient=lenient).schema(schema)
        if lenient and (words := dict(costly(found))):
            said.update((f"{word} is left out: {why}", None) for word, why in words.items())
            found = _Parts(reads, read, said, _led(found), lenient=lenient, but=words).schema(found)
        return found

    text = form.text
    if form.kind == "schema":
        text = json.dumps(meant(json.loads(text), lenient=form.lenient), ensure_ascii=False)
    elif form.kind == "call":
        text = _changed(text, lambda schema: meant(schema, lenient=_is_lenient(schema)))
    words = list(said)
    if len(words) > _MOST_SAID:
        words[_MOST_SAID:] = [f"{len(words) - _MOST_SAID} more parts are left out"]
    return replace(form, text=text), words


def opened(form: Form, why_not: Callable[[str], str]) -> tuple[Form, list[str]]:
    """The form; in one of calls each lenient schema that fails alone takes any value of its type. And what failed.

    ``why_not`` says why a schema, as JSON, fails; it is empty for others.
    """
    reasons = dict[str, str]()
    if form.kind != "call":
        return form, []

    def free(schema: dict[str, Any]) -> dict[str, Any]:
        if not _is_lenient(schema):
            return schema
        text = json.dumps(schema, ensure_ascii=False)
        if text not in reasons:
            most = MOST_TOOLS if len(text) < _SMALL and not any(name in text for name in _COSTLY) else _MOST_ASKED
            reasons[text] = why_not(text) if len(reasons) < most else "the tools have too many"
        if not reasons[text]:
            return schema
        return {key: schema[key] for key in schema if key == "x-guidance" or (key, schema[key]) == ("type", "object")}

    changed = replace(form, text=_changed(form.text, free, but=_OF_ANSWER))
    different = list(dict.fromkeys(filter(None, reasons.values())))[:_MOST_SAID]
    return changed, [f"parameters of a tool cannot be followed and are free: {why}" for why in different]


def _changed(text: str, change: Callable[[dict[str, Any]], dict[str, Any]], but: str | None = None) -> str:
    """The grammar of calls with its schemas changed, ``but`` not those behind that text."""
    pieces, done = list[str](), 0
    for start, end, schema in inner_schemas(text):
        if but is not None and text.endswith(but, 0, start):
            continue
        if isinstance(schema, dict):
            pieces += [text[done:start], json.dumps(change(schema), ensure_ascii=False)]
            done = end
    return "".join([*pieces, text[done:]])


def _is_lenient(schema: Mapping[str, Any]) -> bool:
    return bool(schema.get("x-guidance", {}).get("lenient", True))


class _Parts:
    """Reads schemas part by part. ``said`` gets what is not kept, each once; ``read`` has the known patterns.

    ``led``: the keywords through which references lead, which stay where they are, behind the ``id`` of their schema.
    ``but``: keywords that a schema has too many of.
    """

    def __init__(
        self,
        reads: Callable[[str], bool],
        read: dict[str, bool],
        said: dict[str, None],
        led: Collection[tuple[int, str]],
        *,
        lenient: bool,
        but: Collection[str] = (),
    ) -> None:
        self._reads, self._read, self._said = reads, read, said
        self._led, self._is_lenient, self._but = led, lenient, but

    def schema(self, given: Any) -> Any:
        if isinstance(given, list):
            return [self.schema(each) for each in given]
        if not isinstance(given, dict):
            return given
        found = {name: own for name, value in given.items() for own in self._keyword(name, value)}
        if isinstance(own := found.get("format"), str) and own not in _FORMATS and not self._is_lenient:
            self._free_format(found, own)
        for is_lower in _BOUNDS:
            self._bounded(found, is_lower=is_lower)
        if found.get("nullable") is not True:
            return found
        moved = found.keys() - set(_AROUND) if any(name in found for name in _COMPOSED) else ()
        if any((id(given), name) in self._led for name in moved):
            self._say("nullable is left out where a $ref leads into its schema")
            return found
        return _or_null(found)

    def _keyword(self, name: str, given: Any) -> Iterator[Any]:
        """The value of a keyword; none if it is left out."""
        if given is None and name not in _MAY_BE_NULL and self._is_lenient:
            self._say(f"{name:.40} that is null is left out")
        elif name in _OF_DATA:
            yield given
        elif name in self._but and not isinstance(given, dict):
            return
        elif name in _OF_NAMES and isinstance(given, dict):
            yield self._named(given, patterns=name == "patternProperties")
        elif name == "pattern" and isinstance(given, str):
            yield from [given] if self._is_read(given) else []
        elif name == "type" and isinstance(given, str | list) and self._is_lenient:
            yield from self._type(given)
        else:
            yield from _meant(name, self.schema(given))

    def _free_format(self, found: dict[str, Any], name: str) -> None:
        types = found.get("type", "string")
        if "string" in (types if isinstance(types, list) else [types]):
            del found["format"]
            self._say(f"the format {name!r:.40} is left out: JSON Schema has none of this name")

    def _bounded(self, found: dict[str, Any], *, is_lower: bool) -> None:
        """Leave out the bounds that are too far from zero to be read, and read as zero those too near."""
        types, sign = found.get("type"), -1 if is_lower else 1
        types = types if isinstance(types, list) else [types]
        is_whole = "integer" in types and "number" not in types
        for name in _BOUNDS[is_lower]:
            own = found.get(name)
            if not _is_number(own):
                continue
            outwards = sign * float(str(own))  # of too many digits is infinite
            is_range = any(_is_number(found.get(other)) for other in _BOUNDS[not is_lower])
            most = _MOST_WHOLE if is_whole and (is_range or outwards > 0) else _MOST
            if 0 < abs(outwards) < _LEAST:
                del found[name]
                other = _BOUNDS[is_lower][outwards < 0]
                further = max if is_lower else min
                found[other] = further(0, found[other]) if _is_number(found.get(other)) else 0
            elif is_whole and not is_lower and 0 <= outwards < math.inf:
                continue
            elif outwards in _ENDS or (self._is_lenient and abs(outwards) >= most):
                del found[name]
                if outwards not in _ENDS:
                    self._say(f"{name} {own!r:.40} is left out: it is too large")

    def _named(self, given: Mapping[str, Any], *, patterns: bool) -> dict[str, Any]:
        """Schemas by their names; a null says nothing of its value."""
        found = dict[str, Any]()
        for name, own in given.items():
            absent = own is None and self._is_lenient
            if absent:
                self._say(f"{name:.40} that is null is left out")
            if not patterns or self._is_read(name):
                found[name] = {} if absent else self.schema(own)
        return found

    def _is_read(self, pattern: str) -> bool:
        if not self._is_lenient:
            return True
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


def _meant(name: str, given: Any) -> Iterator[Any]:
    """The value of a keyword as programs that do not write JSON Schema mean it; none if it says nothing."""
    if name[:3] in ("min", "max") and name[3:] in _COUNTS and isinstance(given, float) and given.is_integer():
        yield int(given)
    elif name in _OF_NAMES and given == []:  # PHP's empty object
        yield {}
    elif name == "required" and given == {}:
        yield []
    elif name == "$ref" and isinstance(given, str) and given.startswith("#"):
        yield "#" + quote(given[1:], safe=_OF_FRAGMENT)
    elif name == "$schema" and isinstance(given, str):
        if draft := _DRAFT.search(given):
            old, new = draft.groups()
            yield (
                f"http://json-schema.org/draft-{old}/schema#"
                if old
                else f"https://json-schema.org/draft/{new}/schema"
            )
    elif not (_is_fragment(name, given) or _is_any_name(name, given)):
        yield given


def _is_fragment(name: str, given: Any) -> bool:
    return name == "$id" and isinstance(given, str) and given.startswith("#")


def _is_any_name(name: str, given: Any) -> bool:
    if name != "propertyNames" or not isinstance(given, dict):
        return name == "propertyNames" and given is True
    return {word: own for word, own in given.items() if word not in ABOUT} in ({}, {"type": "string"})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _led(schema: Any) -> set[tuple[int, str]]:
    """The keywords, and names, through which references lead, each behind the ``id`` of its schema."""
    found = set[tuple[int, str]]()
    for reference in references_in(schema):
        place, names = schema, unquote(reference).split("/")
        for name in names[1:] if names[0] == "#" else ():
            own = name.replace("~1", "/").replace("~0", "~")
            found.add((id(place), own))
            if isinstance(place, list) and re.fullmatch(r"\d{1,6}", own):
                place = place[int(own)] if int(own) < len(place) else None
            else:
                place = place.get(own) if isinstance(place, dict) else None
    return found


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with OpenAPI's ``nullable`` as JSON Schema says it."""
    own = {name: each for name, each in schema.items() if name != "nullable"}
    if any(name in own for name in _COMPOSED):
        around = {name: own.pop(name) for name in _AROUND if name in own}
        return {**around, "anyOf": [own, {"type": "null"}]}
    if "type" in own:
        types = own["type"] if isinstance(own["type"], list) else [own["type"]]
        own["type"] = [*types, *(["null"] if "null" not in types else [])]
    if "const" in own:
        own["enum"] = [own.pop("const")]
    if isinstance(own.get("enum"), list) and None not in own["enum"]:
        own["enum"] = [*own["enum"], None]
    if isinstance(own.get("anyOf"), list):
        own["anyOf"] = [*own["anyOf"], {"type": "null"}]
    return own
