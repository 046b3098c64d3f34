"""The OpenAPI document of the server."""

from __future__ import annotations

from typing import Any

from edgespec import __version__
from edgespec.decoding.logprobs import MOST_TOP
from edgespec.decoding.sampling import MOST_BIASED
from edgespec.server.messages import MOST_MESSAGES
from edgespec.server.schema import MOST_CHOICES, MOST_STOPS
from edgespec.text.conversation.tools import MOST_TOOLS

_NUMBER = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-10, 10),
    "frequency_penalty": (-10, 10),
    "repeat_penalty": (0.01, 10),
}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 description of every route."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgespec", "version": __version__},
        "paths": {
            "/v1/chat/completions": {"post": _answers("chat", "Answer a conversation.")},
            "/v1/completions": {"post": _answers("completion", "Continue a text.")},
            "/v1/models": {"get": _get("The served model.", "models", 401)},
            "/v1/models/{name}": {
                "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
                "get": _get("The served model.", "model", 401, 404),
            },
            "/health": {"get": _get("200 once the server answers.", "health", 503, own=True)},
            "/metrics": {"get": _text("Counters, for Prometheus.", "text/plain", 401)},
            "/openapi.json": {"get": _get("This document.", "document")},
        },
        "components": {
            "schemas": {
                "error": _error(),
                "chat": {**_request(_messages()), "required": ["messages"]},
                "completion": {**_request(_prompt()), "required": ["prompt"]},
                "reply": _object("id", "object", "created", "model", "choices", "usage", "timings", "seed"),
                "models": _object("object", "data"),
                "model": _object("id", "object", "created", "owned_by"),
                "health": _object("status"),
                "document": _object("openapi", "info", "paths"),
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _object(*names: str) -> dict[str, Any]:
    return {"type": "object", "required": list(names)}


def _error() -> dict[str, Any]:
    fields = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    }
    error = {"type": "object", "required": list(fields), "properties": fields}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def _request(own: dict[str, Any]) -> dict[str, Any]:
    """A body. Fields that are not named are ignored."""
    fields: dict[str, Any] = {
        **own,
        "model": {"type": ["string", "null"]},
        "stream": {"type": ["boolean", "null"]},
        "stream_options": {
            "type": ["object", "null"],
            "properties": {"include_usage": {"type": ["boolean", "null"]}},
        },
        "stop": {
            "oneOf": [
                {"type": "null"},
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "maxItems": MOST_STOPS},
            ]
        },
        "n": _whole(1, MOST_CHOICES),
        "seed": _whole(-(2**63), 2**64 - 1),
        "top_k": _whole(-1, 2**31 - 1),
        "logit_bias": {
            "type": ["object", "null"],
            "patternProperties": {"^[0-9]{1,9}$": {"type": "number", "minimum": -100, "maximum": 100}},
            "additionalProperties": False,
            "maxProperties": MOST_BIASED,
        },
    }
    for name, (least, most) in _NUMBER.items():
        fields[name] = {"type": ["number", "null"], "minimum": least, "maximum": most}
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        fields[name] = {"anyOf": [{"type": "null"}, {"const": -1}, {"type": "integer", "minimum": 1}]}
    return {"type": "object", "properties": fields}


def _whole(least: int, most: int) -> dict[str, Any]:
    return {"type": ["integer", "null"], "minimum": least, "maximum": most}


def _part(text: str, *kinds: str) -> dict[str, Any]:
    """Parts of a message of one of these kinds, whose text has the name ``text``."""
    return {
        "type": "object",
        "required": ["type", text],
        "properties": {"type": {"enum": list(kinds)}, text: {"type": "string"}},
    }


def _messages() -> dict[str, Any]:
    part = {"oneOf": [_part("text", "text", "input_text", "output_text"), _part("refusal", "refusal")]}
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"oneOf": [{"type": "null"}, {"type": "string"}, {"type": "array", "items": part}]},
        },
    }
    return {
        "messages": {"type": "array", "items": message, "minItems": 1, "maxItems": MOST_MESSAGES},
        "logprobs": {"type": ["boolean", "null"]},
        "top_logprobs": _whole(0, MOST_TOP),
        "tools": {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MOST_TOOLS},
        "tool_choice": {"enum": [None, "auto", "none"]},
    }


def _prompt() -> dict[str, Any]:
    return {
        "prompt": {"type": "string", "minLength": 1},
        "echo": {"type": ["boolean", "null"]},
        "logprobs": {"anyOf": [{"const": False}, _whole(0, MOST_TOP)]},
    }


def _answers(schema: str, about: str) -> dict[str, Any]:
    content = {
        "application/json": {"schema": {"$ref": "#/components/schemas/reply"}},
        "text/event-stream": {},
    }
    return {
        "summary": about,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
        },
        "responses": {
            "200": {"description": "The answer, or its events.", "content": content},
            **_errors(400, 401, 403, 404, 413, 429, 500, 503, 504),
        },
    }


def _get(about: str, schema: str, *errors: int, own: bool = False) -> dict[str, Any]:
    """``own``: errors have this schema too."""
    found = {
        "description": about,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }
    failures = {str(status): found for status in errors} if own else _errors(*errors)
    return {"summary": about, "responses": {"200": found, **failures, **_errors(400, 403)}}


def _text(about: str, kind: str, *errors: int) -> dict[str, Any]:
    found = {"description": about, "content": {kind: {"schema": {"type": "string"}}}}
    return {"summary": about, "responses": {"200": found, **_errors(400, 403, *errors)}}


def _errors(*statuses: int) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/error"}}}
    return {str(status): {"description": "An error.", "content": error} for status in statuses}
