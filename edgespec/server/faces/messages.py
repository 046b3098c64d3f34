"""Anthropic's messages: their requests, and answers whole and as events. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from edgespec.engine.events import Done
from edgespec.server.answers import Part
from edgespec.server.blocks import is_function, left_out_blocks, read_tools
from edgespec.server.errors import TOO_LONG, ApiError
from edgespec.server.faces.face import Face, Head, Stretch
from edgespec.server.fields.table import read_fields
from edgespec.server.messages import conversation_of
from edgespec.server.replies import timings
from edgespec.server.schema import Request, request_of
from edgespec.text.conversation.pieces import ToolCall

# Errors whose type is not that of all requests or of all failures.
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def read_messages(body: Mapping[str, Any]) -> Request:
    """A body of /v1/messages. Raises ApiError."""
    found = read_fields("messages", body)
    system = found.pop("system", None)
    head = [] if system is None else [{"role": "system", "content": system}]
    tools = found.pop("tools", ())
    return request_of(
        {
            **found,
            "messages": conversation_of([*head, *found["messages"]], "messages"),
            "tools": read_tools(tools),
            "warnings": (
                *(_left_out(tool) for tool in tools if not is_function(tool)),
                *left_out_blocks(body["messages"]),
            ),
        }
    )


def _left_out(tool: Mapping[str, Any]) -> str:
    return f"the tool {str(tool.get('type'))[:64]!r} is not a function and was left out"


class _Events:
    """The events of one reply: blocks that open and close, one at a time."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._head: Head | None = None
        self._number = -1  # of the last block
        self._open: str | None = None  # its type
        self._blanks = ""  # held back until a text follows

    def begin(self, index: int, head: Head, prompt_tokens: int) -> bytes:
        self._head = head
        return _event("message_start", message=_message(head, [], _usage(prompt_tokens)))

    def part(self, index: int, part: Part) -> bytes:
        events = b""
        if part.reasoning and not self._request.hide_thinking:
            events += self._more("thinking", {"signature": ""}, part.reasoning)
        if part.content:
            events += self._text(part.content)
        return events + b"".join(map(self._call, part.calls))

    def end(self, index: int, done: Done) -> bytes:
        reason, sequence = _end(self._request, done)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        assert self._head is not None
        return self._close() + _event("message_delta", delta=delta, usage=_used(done), **_own(self._head, done))

    def finish(self, answers: Sequence[Done]) -> bytes:
        return _event("message_stop")

    def fail(self, error: ApiError) -> bytes:
        return _event(**error_json(error))

    def waiting(self) -> bytes:
        return _event("ping")

    def _text(self, text: str) -> bytes:
        if self._open != "text":
            text = self._blanks + text
            self._blanks = "" if text.strip() else text
        return b"" if self._blanks else self._more("text", {}, text)

    def _call(self, call: ToolCall) -> bytes:
        events = self._start("tool_use", {"id": call.id, "name": call.name, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return events + self._delta(delta) + self._close()

    def _more(self, kind: str, others: Mapping[str, Any], text: str) -> bytes:
        """More text of the open block, or of a new one if that is of another type."""
        start = b"" if self._open == kind else self._start(kind, {kind: "", **others})
        return start + self._delta({"type": f"{kind}_delta", kind: text})

    def _start(self, kind: str, block: Mapping[str, Any]) -> bytes:
        closed = self._close()
        self._number, self._open = self._number + 1, kind
        return closed + _event("content_block_start", index=self._number, content_block={"type": kind, **block})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._number, delta=delta)

    def _close(self) -> bytes:
        was_open, self._open, self._blanks = self._open, None, ""
        return b"" if was_open is None else _event("content_block_stop", index=self._number)


def _event(type: str, **members: Any) -> bytes:
    return f"event: {type}\ndata: {json.dumps({'type': type, **members})}\n\n".encode()


def _message(head: Head, content: list[dict[str, Any]], usage: Mapping[str, int], **more: Any) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
        **more,
    }


def _whole(
    request: Request, head: Head, said: Sequence[Sequence[Stretch]], answers: Sequence[Done]
) -> dict[str, Any]:
    (stretches,), (done,) = said, answers
    content = [block for each in stretches for block in _blocks(each.part, hide_thinking=request.hide_thinking)]
    reason, sequence = _end(request, done)
    ended = {"stop_reason": reason, "stop_sequence": sequence}
    return _message(head, content, _used(done), **ended, **_own(head, done))


def _blocks(part: Part, *, hide_thinking: bool) -> Iterator[dict[str, Any]]:
    if part.reasoning and not hide_thinking:
        yield {"type": "thinking", "thinking": part.reasoning, "signature": ""}
    if part.content.strip():
        yield {"type": "text", "text": part.content}
    for call in part.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


def _end(request: Request, done: Done) -> tuple[str, str | None]:
    """The reason for the end of an answer, and the stop text if it is one of the request's."""
    if done.stop_text is not None and done.stop_text in request.stop:
        return "stop_sequence", done.stop_text
    if done.finish_reason == "length":
        asked = request.max_tokens is not None and done.stats.emitted_tokens >= request.max_tokens
        return ("max_tokens" if asked else "model_context_window_exceeded"), None
    return ("tool_use" if done.tool_calls else "end_turn"), None


def _used(done: Done) -> dict[str, int]:
    return _usage(done.stats.prompt_tokens, done.stats.cached_tokens, done.stats.emitted_tokens)


def _usage(prompt: int, cached: int = 0, emitted: int = 0) -> dict[str, int]:
    """``input_tokens`` are those of the prompt that were read: cached ones are counted apart."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": emitted,
    }


def _own(head: Head, done: Done) -> dict[str, Any]:
    own = {"timings": timings([done]), "seed": done.sampling.seed, "warnings": list(head.warnings)}
    return {"edgespec": own}


def error_json(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    usual = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    # Agents look for these words, and shorten the conversation.
    message = error.message.replace(TOO_LONG, "prompt is too long", 1) if error.code == TOO_LONG else error.message
    return {"type": "error", "error": {"type": _TYPES.get(HTTPStatus(error.status), usual), "message": message}}


_PATH = "/v1/messages"
COUNT = f"{_PATH}/count_tokens"

_TEXT = {"type": "string"}
_ERROR = {"type": _TEXT, "message": _TEXT}

MESSAGES = Face(
    name="messages",
    path=_PATH,
    about="Answer a conversation, as Anthropic's API does.",
    reply=("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"),
    read=read_messages,
    events=_Events,
    whole=_whole,
    error=error_json,
    error_schema={
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {"type": "object", "required": list(_ERROR), "properties": _ERROR},
        },
    },
    id_prefix="msg_",
    own_paths=(f"{_PATH}/",),
    any_model=True,
)
