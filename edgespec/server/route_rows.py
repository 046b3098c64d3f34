"""Rows of the OpenAPI document: the routes that answer no conversation, and what their bodies and replies have."""

from __future__ import annotations

from typing import Any

from edgespec.server.faces.messages import COUNT, MESSAGES
from edgespec.server.messages import MESSAGES as MESSAGES_OF_CHATS
from edgespec.server.page import RUNNING
from edgespec.server.tokens import FLAGS

ASKED = (401, 413, 415, 429, 503)  # what a request may get if the served model reads its body
# What each route says, its reply's schema or media types, and the statuses of its errors.
READABLE: dict[str, tuple[Any, ...]] = {
    "/v1/models": ("The served model.", "models", 401),
    "/v1/models/{name}": ("The served model.", "model", 401, 404),
    "/props": ("The model, as llama.cpp's clients read it.", "props", 401, 404, 503),
    "/health": ("200 once the server answers.", "health"),
    "/metrics": ("Counters, for Prometheus.", "text/plain", 401),
    "/openapi.json": ("This document.", "document"),
    "/": (f"A page for browsers, for other clients a line: {RUNNING}.", "text/plain text/html"),
    "/api/version": ("The version of Ollama's API.", "ollama-version"),
    "/api/tags": ("The served model.", "ollama-models", 401, 503),
    "/api/ps": ("The model while it is loaded.", "ollama-models", 401, 503),
}
# The same of routes with a body, behind its schema.
POSTED: dict[str, tuple[Any, ...]] = {
    COUNT: (
        MESSAGES.name,
        "Count the tokens of a conversation's prompt, as Anthropic's API does.",
        "count",
        *ASKED,
        404,
        500,
    ),
    "/tokenize": ("tokenize", "The tokens of a text, or of a chat's prompt.", "tokens", *ASKED, 404),
    "/detokenize": ("detokenize", "The text of tokens.", "content", *ASKED, 404),
    "/api/pull": ("ollama-name", "Say that a served model is there.", "ollama-status", *ASKED, 501),
    "/api/show": ("ollama-name", "What the model is and can do.", "ollama-model", *ASKED, 404),
}

_TEXT, _FLAG = {"type": "string"}, {"type": "boolean"}
# The members of bodies, behind those that must be there.
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tokenize": (
        "",
        {
            **dict.fromkeys(("content", "prompt", "model"), _TEXT),
            "messages": MESSAGES_OF_CHATS,
            **dict.fromkeys((*FLAGS, "add_special_tokens"), _FLAG),
        },
    ),
    "detokenize": (
        "tokens",
        {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}, "model": _TEXT},
    ),
    "ollama-name": ("model", {"model": _TEXT}),
}
REPLIES = {
    "tokens": "tokens",
    "content": "content",
    "count": "input_tokens",
    "models": "object data",
    "model": "id object created owned_by",
    "health": "status",
    "props": "default_generation_settings total_slots chat_template modalities",
    "document": "openapi info paths",
    "ollama-version": "version",
    "ollama-models": "models",
    "ollama-status": "status",
    "ollama-model": "details model_info capabilities",
}
KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "azure": {"type": "apiKey", "in": "header", "name": "api-key"},
}
