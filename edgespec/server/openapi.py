"""The OpenAPI document of the server."""

from __future__ import annotations

from typing import Any

from edgespec import __version__
from edgespec.server.fields import body_schema


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
                "chat": body_schema("chat"),
                "completion": body_schema("completion"),
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
    text, none = {"type": "string"}, {"type": ["string", "null"]}
    members = {"message": text, "type": text, "param": none, "code": none}
    error = {"type": "object", "required": list(members), "properties": members}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _answers(schema: str, about: str) -> dict[str, Any]:
    content = {**_json("reply"), "text/event-stream": {}}
    return {
        "summary": about,
        "requestBody": {"required": True, "content": _json(schema)},
        "responses": {
            "200": {"description": "The answer, or its events.", "content": content},
            **_errors(400, 401, 403, 404, 413, 429, 500, 503, 504),
        },
    }


def _get(about: str, schema: str, *errors: int, own: bool = False) -> dict[str, Any]:
    """``own``: errors have this schema too."""
    found = {"description": about, "content": _json(schema)}
    failures = {str(status): found for status in errors} if own else _errors(*errors)
    return {"summary": about, "responses": {"200": found, **failures, **_errors(400, 403)}}


def _text(about: str, kind: str, *errors: int) -> dict[str, Any]:
    found = {"description": about, "content": {kind: {"schema": {"type": "string"}}}}
    return {"summary": about, "responses": {"200": found, **_errors(400, 403, *errors)}}


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): {"description": "An error.", "content": _json("error")} for status in statuses}
