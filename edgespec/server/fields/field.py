"""A field of a request: what it may be, sets, and what becomes of it; and the schemas that several APIs share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

from edgespec.decoding.sampling import RANGES
from edgespec.files.checked import Range
from edgespec.server.errors import ApiError
from edgespec.server.json_schema import Schema, fits, wanted
from edgespec.server.strict_json import check_texts
from edgespec.text.conversation.thinking import SWITCH
from edgespec.text.conversation.tools import MOST_TOOLS

# OpenAI allows 4; editors' lists for some programming languages have 19.
MOST_STOPS = 32
# The share of the likeliest token is larger in any vocabulary.
LEAST_TOP_P = 1e-9
MOST_WHOLE = 2**31 - 1
SEEDS = 2**64
# OpenAI's.
MOST_TEMPERATURE = 2


class Treatment(Enum):
    """What becomes of a field. A refused one may have the values of its schema, which change nothing."""

    OBEYED = "obeyed"
    REFUSED = "refused"
    IGNORED = "ignored"


Own: TypeAlias = Callable[[Any], Any]


def same(given: Any) -> Any:
    return given


def nothing(given: Any) -> None:
    """What a field means that is not obeyed."""
    return


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the bodies of ``apis``. A name with a dot is that of a member of an object.

    ``schema`` is what it may be; values outside an ``enum``, also of a member, ask for what is not supported. ``own``
    is what a value means here, None if nothing. ``sets`` names what it becomes, by default the field's own name: a
    field of Request, or behind ``sampling.`` one of Sampling. Of several fields that set the same, the first of the
    table counts, of texts that end an answer the first that is not empty, of template variables for each name, and of
    forms the ``narrower`` one. Absent and null mean the default of what is set. ``shown`` is another schema for the
    OpenAPI document, or False if that leaves the field out. ``code`` is that of errors about what is not supported.
    With ``texts`` the field's texts reach the model.
    """

    name: str
    schema: Schema
    meaning: str
    apis: tuple[str, ...]
    own: Own = same
    sets: str = ""
    shown: Schema | bool = True
    treatment: Treatment = Treatment.OBEYED
    code: str = "unsupported_parameter"
    required: bool = False
    texts: bool = False

    def read(self, body: Mapping[str, Any]) -> Any:
        """What the field of this body means, None if nothing. Raises ApiError."""
        *objects, name = self.name.split(".")
        for each in objects:
            body = {} if (inner := body.get(each)) is None else inner
            if not isinstance(body, Mapping):
                raise ApiError(f"{each} must be an object, not {_told(body)}", param=each)
        given = body.get(name)
        if given is None and not self.required:
            return None
        if self.texts:
            given = check_texts(given, name)
        if not fits(self.schema, given):
            raise self._refusal(name, given)
        return self.own(given)

    def _refusal(self, name: str, given: Any) -> ApiError:
        if self.treatment is Treatment.REFUSED or "enum" in self.schema or fits(_of_any_value(self.schema), given):
            only = "" if self.schema is EMPTY else f", only {wanted(self.schema)}"
            message = f"{self.name} {_told(given)} is not supported{only} ({self.meaning})"
            return ApiError(message, param=name, code=self.code)
        return ApiError(f"{self.name} must be {wanted(self.schema)}, not {_told(given)}", param=name)


def _of_any_value(schema: Schema) -> Schema:
    """The schema, whose members may have other texts than those of an ``enum``."""
    own = schema.get("properties", {})
    members = {name: {"type": "string"} if "enum" in each else each for name, each in own.items()}
    return {**schema, "properties": members}


def _told(given: Any) -> str:
    return json.dumps(given)[:40]


def number(allowed: Range, kind: str = "number") -> Schema:
    return {"type": [kind, "null"], "minimum": allowed.least, "maximum": allowed.most}


def whole(least: int, most: int) -> Schema:
    return number(Range(least, most), "integer")


FLAG: Schema = {"type": ["boolean", "null"]}
TEXT: Schema = {"type": ["string", "null"]}
_TEXTS: Schema = {"type": "array", "items": {"type": "string"}, "maxItems": MOST_STOPS}
STOPS: Schema = {"oneOf": [{"type": "null"}, {"type": "string"}, _TEXTS]}
OBJECTS: Schema = {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MOST_TOOLS}
LENGTH: Schema = {"type": "integer", "minimum": 1}
EMPTY: Schema = {"enum": [False, 0, "", [], {}]}
SWITCHED = {"enabled": True, "disabled": False}
WHETHER = "whether the model may think first, where its template has a switch"
HOW_LONG = 'how long the model may think first, where its template reads that; "none" and false mean not at all'
# Values at which a field of a refused kind changes nothing.
NO: Schema = {"enum": [False]}
YES: Schema = {"enum": [True]}
ZERO: Schema = {"enum": [0]}
ONE: Schema = {"enum": [1]}
LESS: Schema = {"enum": [-1]}


def read_seed(given: float) -> int | None:
    """-1 means none, as in llama.cpp. Other negative ones are those of OpenAI's 64-bit integers."""
    return None if given == -1 else int(given) % SEEDS


def read_stops(given: str | list[str]) -> tuple[str, ...]:
    return tuple(filter(None, [given] if isinstance(given, str) else given))


def read_effort(given: str) -> dict[str, Any]:
    return {"reasoning_effort": given, **({SWITCH: False} if given == "none" else {})}


# A smaller divisor makes scores infinite.
_LEAST_REPEAT_PENALTY = 0.01
_DRAWN: Mapping[str, tuple[Schema, Own]] = {
    "temperature": (number(RANGES["temperature"]), same),
    # OpenAI allows 0: the likeliest token.
    "top_p": (number(replace(RANGES["top_p"], above=False)), lambda given: given or LEAST_TOP_P),
    "min_p": (number(RANGES["min_p"]), same),
    "presence_penalty": (number(RANGES["presence_penalty"]), same),
    "frequency_penalty": (number(RANGES["frequency_penalty"]), same),
    "repeat_penalty": (number(replace(RANGES["repeat_penalty"], least=_LEAST_REPEAT_PENALTY, above=False)), same),
    "top_k": (whole(-1, MOST_WHOLE), lambda given: max(int(given), 0)),  # -1 is vLLM's number for all
}


def drawing(name: str, *, apis: tuple[str, ...]) -> Field:
    """The field of a request that is one of Sampling."""
    schema, own = _DRAWN[name]
    return Field(name, schema, "as in [Sampling](sampling.md)", apis, own, f"sampling.{name}")


def temperature(*, apis: tuple[str, ...]) -> Field:
    """The temperature of APIs that refuse more than OpenAI's."""
    return replace(drawing("temperature", apis=apis), schema=number(Range(0, MOST_TEMPERATURE)))


def refused(names: str, meaning: str, unless: Schema = EMPTY, *, apis: tuple[str, ...]) -> list[Field]:
    """Fields that ask for the same, which is not supported."""
    return [
        Field(name, unless, meaning, apis, nothing, shown=False, treatment=Treatment.REFUSED)
        for name in names.split()
    ]


def ignored(names: str, about: str, *, apis: tuple[str, ...]) -> list[Field]:
    """Fields that no answer depends on."""
    return [Field(name, {}, about, apis, nothing, shown=False, treatment=Treatment.IGNORED) for name in names.split()]


def named(names: str, field: Field) -> list[Field]:
    """The field, behind those that mean the same in other servers."""
    return [*(replace(field, name=name) for name in names.split()), field]
