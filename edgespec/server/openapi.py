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
from edgespec.server.route_rows import ASKED, BODIES, KEYS, POSTED, READABLE, REPLIES


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 description of every route."""
    paths: dict[str, Any] = {path: {"get": _does(*said, error=_error_of(path))} for path, said in READABLE.items()}
    paths["/v1/models/{name}"]["parameters"] = _in_path("name")
    paths["/health"]["get"]["responses"]["503"] = paths["/health"]["get"]["responses"]["200"]
    paths["/"]["head"] = {"summary": "200 while the server runs.", "responses": {"200": {"description": "It runs."}}}
    for path, (reads, *said) in POSTED.items():
        paths[path] = {"post": _does(*said, error=_error_of(path), reads=reads)}
    paths[COUNT]["post"]["responses"]["200"]["description"] = "Their number."
    paths |= {face.path: {"post": _answers(face)} for face in FACES}
    for path, (method, why) in NOT_SERVED.items():
        responses = _errors(401, 501, error=_error_of(path))
        more = {"parameters": _in_path("digest")} if "{digest}" in path else {}
        paths[path] = {method.lower(): {"summary": why, "responses": responses}, **more}
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgespec", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": KEYS},
        "security": [{}, *({name: []} for name in KEYS)],
    }


def _schemas() -> dict[str, Any]:
    """What routes read and answer with."""
    found: dict[str, Any] = {"error": ERROR, "ollama-error": ollama.ERROR}
    found |= {name: {**_object(*keys.split()), "properties": fields} for name, (keys, fields) in BODIES.items()}
    found |= {name: _object(*keys.split()) for name, keys in REPLIES.items()}
    for face in FACES:
        found[face.name], found[f"{face.name}-reply"] = body_schema(face.name), _object(*face.reply)
        found[f"{face.name}-error"] = face.error_schema
    return found


def _error_of(path: str) -> str:
    """The schema of errors of a route that is not a face's."""
    return "ollama-error" if path.startswith("/api/") else f"{MESSAGES.name}-error" if path == COUNT else "error"


def _answers(face: Face) -> dict[str, Any]:
    replaced = (409,) if face.fills_in else ()
    own = f"{face.name}-error"
    found = _does(face.about, f"{face.name}-reply", *ASKED, *replaced, 404, 500, 504, error=own, reads=face.name)
    whole = found["responses"]["200"]
    whole["description"] = "The answer, or its events."
    whole["content"][face.media_type.partition(";")[0]] = {}
    return found


def _does(about: str, answer: str, *errors: int, error: str = "error", reads: str | None = None) -> dict[str, Any]:
    """An operation. ``answer`` and ``error`` are schemas, or media types of texts; ``reads`` is the body's schema."""
    texts = {kind: {"schema": {"type": "string"}} for kind in answer.split()} if "/" in answer else None
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
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
