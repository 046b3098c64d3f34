"""The fields of a request, each once: what it may be, what it sets, and what becomes of those that are not obeyed.

``FIELDS`` has every field of the APIs that are served, and those that other servers of these APIs add. A field that
changes the answer is obeyed, or refused by name unless its value changes nothing. The parser, the OpenAPI document
and the tables of docs/guide/fields.md are made of it. Fields that none of these programs has are ignored: clients
send many, and a refusal would stop clients that work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.decoding.sampling import USUAL_LAST_N
from edgespec.server.errors import ApiError
from edgespec.server.fields import infill, messages, ollama, openai, responses
from edgespec.server.fields.field import Field
from edgespec.server.forms import narrower
from edgespec.server.json_schema import Schema

# A table for each family of APIs, in the order of docs/guide/fields.md.
TABLES: Mapping[str, tuple[Field, ...]] = {
    "OpenAI's chat completions and completions": openai.FIELDS,
    "llama.cpp's infill": infill.FIELDS,
    "OpenAI's responses": responses.FIELDS,
    "Anthropic's messages": messages.FIELDS,
    "Ollama's chat and generate": ollama.FIELDS,
}
# The penalty of llama.cpp and Ollama, and not vLLM's, which looks at the whole text. With 1 there is none.
_WINDOWED = "repeat_penalty"
# What several fields set together.
_OF_SEVERAL = ("template_variables", "form")

FIELDS = tuple(field for fields in TABLES.values() for field in fields)


def fields_for(api: str) -> list[Field]:
    """The fields of the bodies of ``api``."""
    return [field for field in FIELDS if api in field.apis]


def read_fields(api: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the fields of a body set, and ``sampling`` with the arguments of Sampling. Raises ApiError."""
    found, sampling = dict[str, Any](), dict[str, Any]()
    choices = [body[name] for name in ("n_cmpl", "n") if body.get(name) is not None]
    if choices[:1] == [body.get("best_of")]:  # the best of as many answers as are returned: all of them
        body = {**body, "best_of": None}
    for field in fields_for(api):
        group, _, name = (field.sets or field.name).rpartition(".")
        into = sampling if group == "sampling" else found
        if into.get(name, ()) != () and name not in _OF_SEVERAL:
            continue  # a client may send the names of several programs, with other values
        if (value := field.read(body)) is not None:
            before = into[name] = into.get(name) or value
            if field.name.endswith(_WINDOWED) and value != 1:
                found["usual_last_n"] = USUAL_LAST_N
            if name == "template_variables":
                into[name] = {**value, **before}
            elif name == "form":
                into[name] = narrower(before, value)
                if into[name] is None:
                    message = f"{before.field} and {field.name} name two forms, and an answer has one"
                    raise ApiError(message, param=field.name)
    sampling |= found.pop("samplers", {})
    return {**found, "sampling": sampling}


def body_schema(api: str) -> Schema:
    """The JSON schema of the bodies of ``api`` in the OpenAPI document."""
    found = dict[str, Any]()
    for field in fields_for(api):
        if shown := field.schema if field.shown is True else field.shown:
            outer, _, name = field.name.rpartition(".")
            if outer:  # a copy: the object may be a field too, with a schema
                inside = found.get(outer, {"type": ["object", "null"]})
                name, shown = outer, {**inside, "properties": {**inside.get("properties", {}), name: shown}}
            found[name] = shown
    return {
        "type": "object",
        "properties": found,
        "required": [each.name for each in fields_for(api) if each.required],
    }
