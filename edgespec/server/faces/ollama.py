"""Ollama's chat and generate: their requests, and answers whole and as lines of JSON. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeAlias

from edgespec.engine.events import Done
from edgespec.server.answers import Part
from edgespec.server.errors import ApiError
from edgespec.server.faces import openai
from edgespec.server.faces.face import LINES, Face, Head, Stretch, WithoutAnswer, whole_of
from edgespec.server.fields.table import read_fields
from edgespec.server.json_schema import Schema
from edgespec.server.messages import read_messages
from edgespec.server.replies import timings
from edgespec.server.schema import Request, request_of
from edgespec.text.conversation.pieces import ToolCall

_NANOSECONDS = 10**9
# What a line says of a part of the answer.
_Said: TypeAlias = Callable[[Part], dict[str, Any]]


def read_chat(body: Mapping[str, Any]) -> Request:
    """A body of /api/chat. Raises ApiError."""
    return _request(read_fields("ollama-chat", body))


def read_generate(body: Mapping[str, Any]) -> Request:
    """A body of /api/generate: a conversation of one message, raw text, or a hole in it. Raises ApiError."""
    found = read_fields("ollama-generate", body)
    prompt, system = found.pop("prompt", ""), found.pop("system", "")
    if (raw := found.pop("raw", False)) or "suffix" in found:
        if raw and system:
            raise ApiError("raw text has no system message: leave out system, or raw", param="system")
        if system:  # Ollama ignores it
            found["warnings"] = ("the system message was left out: text with a hole has none",)
        found["prompt"] = prompt if "suffix" in found else prompt or None
    elif prompt:
        first = [{"role": "system", "content": system}] if system else []
        found["messages"] = read_messages([*first, {"role": "user", "content": prompt}])
    return _request(found)


def _request(found: dict[str, Any]) -> Request:
    top = found.pop("top_logprobs", 0)
    if found.pop("logprobs", False):
        found["logprobs"] = top
    return request_of({"stream": True, **found})


def error(failure: ApiError) -> dict[str, Any]:
    """An error as Ollama's clients read it."""
    return {"error": failure.message}


ERROR: Schema = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


class _Lines:
    """The lines of one reply, in ASCII: some clients end a line at each sign that Unicode calls a line's end."""

    def __init__(self, said: _Said, request: Request) -> None:
        self._said = said
        self._request = request
        self._head: Head | None = None  # of the answer that is sent

    def begin(self, index: int, head: Head, prompt_tokens: int) -> bytes:
        self._head = head
        return b""

    def part(self, index: int, part: Part) -> bytes:
        logprobs = {"logprobs": tokens} if (tokens := openai.scored_tokens(part)) else {}
        return line({**self._begun(), **self._said(part), "done": False, **logprobs})

    def end(self, index: int, done: Done) -> bytes:
        assert self._head is not None
        last = line({**self._begun(), **self._said(Part()), **_ended(self._head, done)})
        self._head = None
        return last

    def finish(self, answers: Sequence[Done]) -> bytes:
        return b""

    def fail(self, error_: ApiError) -> bytes:
        return line(error(error_))

    def waiting(self) -> bytes:
        """A line with an empty text: Node's fetch ends a body that says nothing for five minutes."""
        return b"" if self._head is None else self.part(0, Part())

    def _begun(self) -> dict[str, Any]:
        assert self._head is not None
        return _begun(self._request, self._head.model, self._head.created)


def line(value: dict[str, Any]) -> bytes:
    """An object as a line."""
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def _begun(request: Request, served: str, created: int) -> dict[str, Any]:
    """What every object of a reply begins with. The model has the name by which it was asked for."""
    return {"model": request.model or served, "created_at": moment(created)}


def moment(seconds: float) -> str:
    """A time in seconds since 1970, as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _ended(head: Head, done: Done) -> dict[str, Any]:
    """The end of a reply. Times are in nanoseconds; one that was not measured is left out, as Ollama does."""
    stats = done.stats
    read_s, decode_s = stats.ttft_s, stats.decode_s
    seconds = {
        "total_duration": head.waited_s + (read_s or 0.0) + (decode_s or 0.0),
        "load_duration": head.waited_s,
        "prompt_eval_duration": read_s,
        "eval_duration": decode_s,
    }
    return {
        "done": True,
        "done_reason": done.finish_reason,
        **{name: round(_NANOSECONDS * each) for name, each in seconds.items() if each},
        "prompt_eval_count": stats.prompt_tokens,
        "prompt_eval_cached_count": stats.cached_tokens,
        "eval_count": stats.emitted_tokens,
        "edgespec": {"seed": done.sampling.seed, "timings": timings([done]), **head.own.get("edgespec", {})},
    }


def _whole(
    said: _Said, request: Request, head: Head, written: Sequence[Sequence[Stretch]], answers: Sequence[Done]
) -> dict[str, Any]:
    (stretches,), (done,) = written, answers
    part, own = whole_of(stretches)
    logprobs = {"logprobs": own["content"]} if own else {}
    return {**_begun(request, head.model, head.created), **said(part), **_ended(head, done), **logprobs}


def _without_answer(said: _Said, request: Request, served: str, created: int, done: WithoutAnswer) -> dict[str, Any]:
    return {**_begun(request, served, created), **said(Part()), "done": True, "done_reason": done}


def _chat_said(part: Part) -> dict[str, Any]:
    calls = {"tool_calls": list(map(_call, part.calls))} if part.calls else {}
    return {"message": {"role": "assistant", "content": part.content, **_thinking(part), **calls}}


def _generate_said(part: Part) -> dict[str, Any]:
    return {"response": part.content, **_thinking(part)}


def _thinking(part: Part) -> dict[str, str]:
    return {"thinking": part.reasoning} if part.reasoning else {}


def _call(call: ToolCall) -> dict[str, Any]:
    # A model may write NaN, which Python reads and JSON does not know.
    arguments = json.loads(call.arguments, parse_constant=str)
    return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}


def _face(
    name: str, path: str, about: str, asks: str, said: _Said, read: Callable[[Mapping[str, Any]], Request]
) -> Face:
    (key,) = said(Part())
    return Face(
        name=name,
        path=path,
        about=about,
        reply=("model", "created_at", key, "done"),
        read=read,
        events=partial(_Lines, said),
        whole=partial(_whole, said),
        without_answer=partial(_without_answer, said),
        error=error,
        error_schema=ERROR,
        columns=openai.CHAT.columns,
        asks=asks,
        media_type=LINES,
        own_paths=("/api/",),
    )


CHAT = _face("ollama-chat", "/api/chat", "Answer a conversation, as Ollama does.", "messages", _chat_said, read_chat)
GENERATE = replace(
    _face(
        "ollama-generate",
        "/api/generate",
        "Answer a message, continue a text or fill a hole in it, as Ollama does.",
        "prompt",
        _generate_said,
        read_generate,
    ),
    fills_in=True,
)
