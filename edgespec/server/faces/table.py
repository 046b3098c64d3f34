"""The APIs that are served, and the shape of a path's errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgespec.server.errors import ApiError
from edgespec.server.faces import infill, messages, ollama, openai, responses
from edgespec.server.faces.face import Face

FACES: tuple[Face, ...] = (
    openai.CHAT,
    openai.COMPLETION,
    infill.INFILL,
    responses.RESPONSES,
    messages.MESSAGES,
    ollama.CHAT,
    ollama.GENERATE,
)


def error_shape(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """How errors of this path look: OpenAI's shape unless the path is another API's."""
    own = (face.error for face in FACES if path == face.path or path.startswith(face.own_paths))
    return next(own, ApiError.as_json)
