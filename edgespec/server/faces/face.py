"""What an API consists of: a reader of its requests, and a writer of answers whole and as events.

Faces are pure: they turn a body into a Request, and the parts of answers into bytes. Turns, sessions and sockets are
the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from edgespec.engine.events import Done
from edgespec.server.answers import Part, joined
from edgespec.server.errors import ApiError
from edgespec.server.json_schema import Schema
from edgespec.server.schema import Request

# The lists of a reply's log-probabilities: the JSON of each token, by the list's name.
Columns: TypeAlias = dict[str, list[bytes]]

_TEXT, _TEXT_OR_NONE = {"type": "string"}, {"type": ["string", "null"]}
_ERROR = {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NONE, "code": _TEXT_OR_NONE}
# The JSON schema of errors in OpenAI's shape.
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": list(_ERROR), "properties": _ERROR}},
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring parts of an answer that are of one kind (text, thinking or calls), as one, without their tokens.

    ``columns`` are their log-probabilities.
    """

    part: Part
    columns: Columns = field(default_factory=dict)


def whole_of(stretches: Sequence[Stretch]) -> tuple[Part, Columns]:
    """A whole answer as one part, and its log-probabilities, for APIs that do not say what came before what."""
    columns = dict[str, list[bytes]]()
    for each in stretches:
        for name, items in each.columns.items():
            columns.setdefault(name, []).extend(items)
    return joined([each.part for each in stretches]), columns


# What a request that asks for no answer did with the model, in Ollama's words.
WithoutAnswer: TypeAlias = Literal["load", "unload"]

# Takes items of an answer.
Keep: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], None]

EVENTS = "text/event-stream; charset=utf-8"
LINES = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a reply once its request is accepted.

    ``created``: seconds since 1970. ``model``: the served name. ``warnings``: what was not obeyed. ``waited_s``:
    seconds from the request until its turn had come and the model was loaded. ``keep`` gets the items of an answer as
    they end, for requests that name them.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    warnings: tuple[str, ...] = ()
    waited_s: float = 0.0
    keep: Keep = lambda items: None

    @property
    def own(self) -> dict[str, Any]:
        """What only edgespec says, at the end of a reply."""
        return {"edgespec": {"warnings": list(self.warnings)}} if self.warnings else {}


class Events(Protocol):
    """The bytes of one streamed reply, in order. No bytes: there is nothing to say.

    Where a request may ask for several answers, they may come in parallel.
    """

    def begin(self, index: int, head: Head, prompt_tokens: int) -> bytes:
        """The answer ``index`` begins: the request was accepted. Its prompt has not been read yet."""

    def part(self, index: int, part: Part) -> bytes:
        """More of the answer ``index``."""

    def end(self, index: int, done: Done) -> bytes:
        """The answer ``index`` is complete."""

    def finish(self, answers: Sequence[Done]) -> bytes:
        """The end of the stream, behind the last answer."""

    def fail(self, error: ApiError) -> bytes:
        """The end of a stream that fails; maybe before an answer has begun."""

    def waiting(self) -> bytes:
        """Nothing has been said for a while; maybe before an answer has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """One API. ``name`` is its name in the table of fields, ``path`` the route that answers.

    ``about`` says in the OpenAPI document what it does, ``reply`` and ``error_schema`` what replies and errors have.
    Errors of ``path`` and of the paths that begin with one of ``own_paths`` have the shape of ``error``. ``asks`` is
    the field with the prompt. ``whole`` gets each answer in the order in which it was written, and ``columns`` are
    the log-probabilities that it gets of a part. An API with ``any_model`` answers to every name while one model is
    served: agents have fixed names for models. ``without_answer`` is the reply to a request that only loads or frees
    the model, from the request, the served name, the time in seconds since 1970 and what was done; None if the API
    has no such requests. With ``fills_in`` a request may have a hole, and a newer request of its client may replace
    it. With ``names_items`` a request may name items of earlier answers. An error with one of the codes
    ``fails_inside`` ends a streamed reply that has not begun, with status 200, in place of an error's own status.
    """

    name: str
    path: str
    about: str
    reply: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Request]
    events: Callable[[Request], Events]
    whole: Callable[[Request, Head, Sequence[Sequence[Stretch]], Sequence[Done]], dict[str, Any]]
    error: Callable[[ApiError], dict[str, Any]] = ApiError.as_json
    error_schema: Schema = field(default_factory=lambda: ERROR)
    columns: Callable[[Part], Columns] = lambda part: {}
    asks: str = "messages"
    id_prefix: str = ""
    media_type: str = EVENTS
    own_paths: tuple[str, ...] = ()
    without_answer: Callable[[Request, str, int, WithoutAnswer], dict[str, Any]] | None = None
    any_model: bool = False
    fills_in: bool = False
    names_items: bool = False
    fails_inside: tuple[str, ...] = ()
