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

_TEXT, _TOKENS = {"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}
_READ = (401, 413, 429, 503)  # what a request may get if the served model reads its body
_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
# Keys of replies about the server, by the names of their schemas.
_REPLIES = {
    "count": "input_tokens",
    "models": "object data",
    "model": "id object created owned_by",
    "health": "status",
    "props": "default_generation_settings total_slots chat_template modalities",
    "document": "openapi info paths",
    "ollama-version": "version",
    "ollama-models": "models",
    "ollama-model": "details model_info capabilities",
}
# The routes that are only read: what each says, the reply's schema or media types, and the statuses of its errors.
_READABLE: dict[str, tuple[Any, ...]] = {
    "/v1/models": ("The served model.", "models", 401),
    "/v1/models/{name}": ("The served model.", "model", 401, 404),
    "/props": ("The model, as llama.cpp's clients read it.", "props", 401, 503),
    "/health": ("200 once the server answers.", "health"),
    "/metrics": ("Counters, for Prometheus.", "text/plain", 401),
    "/openapi.json": ("This document.", "document"),
    "/": (f"A page for browsers, for other clients a line: {RUNNING}.", "text/plain text/html"),
    "/api/version": ("The version of Ollama's API.", "ollama-version"),
    "/api/tags": ("The served model.", "ollama-models", 401, 503),
    "/api/ps": ("The model while it is loaded.", "ollama-models", 401, 503),
}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 description of every route."""
    told = "ollama-error"
    shown = "What the model is and can do."
    counted = "Count the tokens of a conversation's prompt, as Anthropic's API does."
    paths: dict[str, Any] = {
        path: {"get": _does(*said, error=told if path.startswith("/api/") else "error")}
        for path, said in _READABLE.items()
    }
    paths["/v1/models/{name}"]["parameters"] = _in_path("name")
    paths["/health"]["get"]["responses"]["503"] = paths["/health"]["get"]["responses"]["200"]
    paths["/"]["head"] = {"summary": "200 while the server runs.", "responses": {"200": {"description": "It runs."}}}
    posted = {face.path: _answers(face) for face in FACES} | {
        COUNT: _does(counted, "count", *_READ, 500, error=f"{MESSAGES.name}-error", reads=MESSAGES.name),
        "/tokenize": _does("The tokens of a text.", "tokens", *_READ, reads="content"),
        "/detokenize": _does("The text of tokens.", "content", *_READ, reads="tokens"),
        "/api/show": _does(shown, "ollama-model", *_READ, 404, error=told, reads="ollama-name"),
    }
    posted[COUNT]["responses"]["200"]["description"] = "Their number."
    paths |= {path: {"post": operation} for path, operation in posted.items()}
    for path, (method, why) in NOT_SERVED.items():
        paths[path] = {method.lower(): {"summary": why, "responses": _errors(401, 501, error=told)}}
        paths[path] |= {"parameters": _in_path("digest")} if "{digest}" in path else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgespec", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": _KEYS},
        "security": [{}, {"key": []}, {"header": []}],
    }


def _schemas() -> dict[str, Any]:
    """What routes read and answer with."""
    named: dict[str, dict[str, Any]] = {
        "ollama-name": {"model": _TEXT},
        "content": {"content": _TEXT},
        "tokens": {"tokens": _TOKENS},
    }
    found: dict[str, Any] = {name: {**_object(*fields), "properties": fields} for name, fields in named.items()}
    found |= {name: _object(*keys.split()) for name, keys in _REPLIES.items()}
    for face in FACES:
        found[face.name], found[f"{face.name}-reply"] = body_schema(face.name), _object(*face.reply)
        found[f"{face.name}-error"] = face.error_schema
    return {"error": ERROR, "ollama-error": ollama.ERROR, **found}


def _answers(face: Face) -> dict[str, Any]:
    replaced = (409,) if face.fills_in else ()
    own = f"{face.name}-error"
    found = _does(face.about, f"{face.name}-reply", *_READ, *replaced, 404, 500, 504, error=own, reads=face.name)
    whole = found["responses"]["200"]
    whole["description"] = "The answer, or its events."
    whole["content"][face.media_type.partition(";")[0]] = {}
    return found


def _does(about: str, answer: str, *errors: int, error: str = "error", reads: str | None = None) -> dict[str, Any]:
    """An operation. ``answer`` and ``error`` are schemas, or media types of texts; ``reads`` is the body's schema."""
    texts = {kind: {"schema": _TEXT} for kind in answer.split()} if "/" in answer else None
    found = {"200": {"description": about, "content": texts or _json(answer)}, **_errors(*errors, error=error)}
    body = {} if reads is None else {"requestBody": {"required": True, "content": _json(reads)}}
    return {"summary": about, "responses": found, **body}


def _errors(*statuses: int, error: str) -> dict[str, Any]:
    """Those of these statuses, and those that any request may get."""
    return {str(status): {"description": "An error.", "content": _json(error)} for status in (400, 403, *statuses)}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _object(*keys: str) -> dict[str, Any]:
    return {"type": "object", "required": list(keys)}


def _in_path(name: str) -> list[dict[str, Any]]:
    return [{"name": name, "in": "path", "required": True, "schema": _TEXT}]
