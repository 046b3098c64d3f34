"""The OpenAPI document of the server."""

from __future__ import annotations

from typing import Any

from edgespec import __version__
from edgespec.server.faces import ollama
from edgespec.server.faces.face import ERROR, Face
from edgespec.server.faces.messages import COUNT, MESSAGES
from edgespec.server.faces.table import FACES
from edgespec.server.fields.table import body_schema
from edgespec.server.ollama_routes import NOT_SERVED
from edgespec.server.page import RUNNING

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 description of every route."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgespec", "version": __version__},
        "paths": {
            **{face.path: {"post": _answers(face)} for face in FACES},
            COUNT: {"post": _counts()},
            "/v1/models": {"get": _get("The served model.", "models", 401)},
            "/v1/models/{name}": {
                "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
                "get": _get("The served model.", "model", 401, 404),
            },
            "/props": {"get": _get("The model, as llama.cpp's clients read it.", "props", 401, 503)},
            "/tokenize": {"post": _post("The tokens of a text.", "content", "tokens")},
            "/detokenize": {"post": _post("The text of tokens.", "tokens", "content")},
            "/health": {"get": _get("200 once the server answers.", "health", 503, own=True)},
            "/metrics": {"get": _text("Counters, for Prometheus.", "text/plain", 401)},
            "/openapi.json": {"get": _get("This document.", "document")},
            **_ollama(),
        },
        "components": {
            "schemas": {
                "error": ERROR,
                **{name: schema for face in FACES for name, schema in _schemas(face).items()},
                "count": _object("input_tokens"),
                "models": _object("object", "data"),
                "model": _object("id", "object", "created", "owned_by"),
                "health": _object("status"),
                "props": _object("default_generation_settings", "total_slots", "chat_template", "modalities"),
                "content": {**_object("content"), "properties": {"content": {"type": "string"}}},
                "tokens": {**_object("tokens"), "properties": {"tokens": _TOKENS}},
                "document": _object("openapi", "info", "paths"),
                "ollama-error": ollama.ERROR,
                "ollama-name": {"type": "object", "properties": {"model": {"type": "string"}}, "required": ["model"]},
                "ollama-version": _object("version"),
                "ollama-models": _object("models"),
                "ollama-model": _object("details", "model_info", "capabilities"),
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"header": []}],
    }


def _ollama() -> dict[str, Any]:
    """The routes of Ollama's API that are not a face's."""
    error, digest = "ollama-error", {"name": "digest", "in": "path", "required": True, "schema": {"type": "string"}}
    found: dict[str, Any] = {
        "/": {
            "get": _text(f"A page for browsers, for other clients a line: {RUNNING}.", "text/plain text/html"),
            "head": {"summary": "200 while the server runs.", "responses": {"200": {"description": "It runs."}}},
        },
        "/api/version": {"get": _get("The version of Ollama's API.", "ollama-version", error=error)},
        "/api/tags": {"get": _get("The served model.", "ollama-models", 401, 503, error=error)},
        "/api/ps": {"get": _get("The model while it is loaded.", "ollama-models", 401, 503, error=error)},
        "/api/show": {
            "post": {
                **_get("What the model is and can do.", "ollama-model", 401, 404, 413, 429, 503, error=error),
                "requestBody": {"required": True, "content": _json("ollama-name")},
            }
        },
    }
    for path, (method, why) in NOT_SERVED.items():
        own = {"summary": why, "responses": _errors(400, 401, 403, 501, schema=error)}
        found[path] = {method.lower(): own, **({"parameters": [digest]} if "{digest}" in path else {})}
    return found


def _object(*names: str) -> dict[str, Any]:
    return {"type": "object", "required": list(names)}


def _schemas(face: Face) -> dict[str, Any]:
    """Those of an API's requests, replies and errors."""
    return {
        face.name: body_schema(face.name),
        f"{face.name}-reply": _object(*face.reply),
        f"{face.name}-error": face.error_schema,
    }


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _answers(face: Face) -> dict[str, Any]:
    content = {**_json(f"{face.name}-reply"), face.media_type.partition(";")[0]: {}}
    replaced = (409,) if face.fills_in else ()
    return {
        "summary": face.about,
        "requestBody": {"required": True, "content": _json(face.name)},
        "responses": {
            "200": {"description": "The answer, or its events.", "content": content},
            **_errors(*replaced, 400, 401, 403, 404, 413, 429, 500, 503, 504, schema=f"{face.name}-error"),
        },
    }


def _post(about: str, asked: str, found: str) -> dict[str, Any]:
    return {
        "summary": about,
        "requestBody": {"required": True, "content": _json(asked)},
        "responses": {
            "200": {"description": about, "content": _json(found)},
            **_errors(400, 401, 403, 413, 429, 503),
        },
    }


def _counts() -> dict[str, Any]:
    return {
        "summary": "Count the tokens of a conversation's prompt, as Anthropic's API does.",
        "requestBody": {"required": True, "content": _json(MESSAGES.name)},
        "responses": {
            "200": {"description": "Their number.", "content": _json("count")},
            **_errors(400, 401, 403, 413, 429, 500, 503, schema=f"{MESSAGES.name}-error"),
        },
    }


def _get(about: str, schema: str, *errors: int, own: bool = False, error: str = "error") -> dict[str, Any]:
    """``own``: errors have this schema too."""
    found = {"description": about, "content": _json(schema)}
    failures = {str(status): found for status in errors} if own else _errors(*errors, schema=error)
    return {"summary": about, "responses": {"200": found, **failures, **_errors(400, 403, schema=error)}}


def _text(about: str, kinds: str, *errors: int) -> dict[str, Any]:
    found = {"description": about, "content": {kind: {"schema": {"type": "string"}} for kind in kinds.split()}}
    return {"summary": about, "responses": {"200": found, **_errors(400, 403, *errors)}}


def _errors(*statuses: int, schema: str = "error") -> dict[str, Any]:
    return {str(status): {"description": "An error.", "content": _json(schema)} for status in statuses}
