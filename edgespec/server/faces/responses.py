"""OpenAI's Responses API without its store: requests, and answers whole and as numbered events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from edgespec.engine.events import Done
from edgespec.server.answers import Part
from edgespec.server.errors import TOO_LONG, ApiError
from edgespec.server.faces.face import Columns, Face, Head, Keep, Stretch
from edgespec.server.faces.openai import scored_tokens, token_details
from edgespec.server.fields.table import read_fields
from edgespec.server.items import Offered, choose_offered, left_out_items
from edgespec.server.messages import conversation_of
from edgespec.server.replies import as_json, json_pieces, timings
from edgespec.server.schema import Request, request_of
from edgespec.text.conversation.pieces import ToolCall

_Event: TypeAlias = dict[str, Any]

# What a reply repeats of its request, and what stands there if the request does not say.
_REPEATED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
}


def read_responses(body: Mapping[str, Any]) -> Request:
    """A body of /v1/responses. Raises ApiError."""
    found = read_fields("responses", body)
    top = found.pop("top_logprobs", 0)
    if found.pop("include", False):
        found["logprobs"] = top
    elif top:
        raise ApiError('top_logprobs needs include to have "message.output_text.logprobs"', param="top_logprobs")
    system = [{"role": "system", "content": text}] if (text := found.pop("instructions", "")) else []
    found["messages"] = conversation_of([*system, *found["messages"]], "input")
    offered = found.pop("tools", Offered())
    found["tools"], found["tool_choice"] = choose_offered(offered, found.get("tool_choice"))
    repeated = {
        name: as_json(usual if (given := body.get(name)) is None else given) for name, usual in _REPEATED.items()
    }
    request = request_of({**found, "warnings": (*offered.warnings, *left_out_items(body["input"]))})
    return replace(request, namespaces=offered.namespaces, repeated=repeated)


# ------------------------------------------------------------------------------------------------------------ items


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of item that has one text: its members, those of its part, and the name of the text's events."""

    id_prefix: str
    item: Mapping[str, Any]
    part: Mapping[str, Any]
    event: str


_MESSAGE = _Kind(
    "msg_",
    {"type": "message", "role": "assistant"},
    {"type": "output_text", "annotations": []},
    "response.output_text",
)
_REASONING = _Kind("rs_", {"type": "reasoning", "summary": []}, {"type": "reasoning_text"}, "response.reasoning_text")


@dataclass(slots=True)
class _Open:
    """An item whose text grows. ``scores``: the JSON of its tokens' log-probabilities."""

    kind: _Kind
    id: str
    texts: list[str] = field(default_factory=list)
    scores: list[bytes] = field(default_factory=list)

    def item(self, status: str, *parts: dict[str, Any]) -> dict[str, Any]:
        return {"id": self.id, **self.kind.item, "status": status, "content": list(parts)}

    def part(self) -> dict[str, Any]:
        return {**self.kind.part, "text": "".join(self.texts), **self.logprobs(self.scores)}

    def logprobs(self, scores: list[bytes]) -> dict[str, Any]:
        return {"logprobs": list(scores)} if self.kind is _MESSAGE else {}


class _Items:
    """The items of one answer, from its parts; each step as an event. ``keep`` gets each item as it ends.

    Text of the answer is a message unless it is blank and there are calls.
    """

    def __init__(self, reply_id: str, namespaces: Mapping[str, tuple[str, str]], keep: Keep) -> None:
        self._suffix = reply_id.removeprefix("resp_")
        self._namespaces = namespaces
        self._keep = keep
        self._open: _Open | None = None
        self._blank = ""  # what may be the beginning of a message
        self._scores = list[bytes]()  # of its tokens
        self.done = list[dict[str, Any]]()

    def add(self, part: Part, scores: Sequence[bytes]) -> Iterator[_Event]:
        if part.reasoning:
            yield from self._more(_REASONING, part.reasoning, ())
        if not part.thought:
            self._scores += scores
        self._blank += part.content
        if self._blank and (self._blank.strip() or self._is_open(_MESSAGE)):
            yield from self._message()
        for call in part.calls:
            self._blank = ""
            self._scores.clear()
            yield from self._close("completed")
            yield from self._call(call)

    def end(self, *, complete: bool) -> Iterator[_Event]:
        """The answer is complete, or ends where it had no more room."""
        said = self._is_open(_MESSAGE) or {item["type"] for item in self.done} - {"reasoning"}
        if complete and not said:  # clients look for a message
            yield from self._message()
        yield from self._close("completed" if complete else "incomplete")

    def fail(self) -> None:
        """The answer ends here. A client knows the id of the item that is open."""
        if (item := self._open) is not None:
            self._open = None
            self._keep([item.item("incomplete", item.part())])

    def _is_open(self, kind: _Kind) -> bool:
        return self._open is not None and self._open.kind is kind

    def _message(self) -> Iterator[_Event]:
        text, scores = self._blank, self._scores
        self._blank, self._scores = "", []
        yield from self._more(_MESSAGE, text, scores)

    def _more(self, kind: _Kind, text: str, scores: Sequence[bytes]) -> Iterator[_Event]:
        if not self._is_open(kind):
            yield from self._close("completed")
            self._open = _Open(kind, f"{kind.id_prefix}{self._suffix}{len(self.done):02d}")
            yield self._event("response.output_item.added", item=self._open.item("in_progress"))
            yield self._of_part("response.content_part.added", part=self._open.part())
        item = self._open
        assert item is not None
        item.texts.append(text)
        item.scores += scores
        if text:
            yield self._of_part(f"{kind.event}.delta", delta=text, **item.logprobs(list(scores)))

    def _close(self, status: str) -> Iterator[_Event]:
        if (item := self._open) is None:
            return
        part = item.part()
        of_text = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        yield self._of_part(f"{item.kind.event}.done", **of_text)
        yield self._of_part("response.content_part.done", part=part)
        self._open = None
        yield from self._done(item.item(status, part))

    def _call(self, call: ToolCall) -> Iterator[_Event]:
        namespace, name = self._namespaces.get(call.name, (None, call.name))
        item = {
            "id": f"fc_{self._suffix}{len(self.done):02d}",
            "type": "function_call",
            "call_id": call.id,
            "name": name,
            **({} if namespace is None else {"namespace": namespace}),
        }
        yield self._event("response.output_item.added", item={**item, "arguments": "", "status": "in_progress"})
        about = {"item_id": item["id"]}
        yield self._event("response.function_call_arguments.delta", **about, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **about, arguments=call.arguments)
        yield from self._done({**item, "arguments": call.arguments, "status": "completed"})

    def _done(self, item: dict[str, Any]) -> Iterator[_Event]:
        self._keep([item])
        yield self._event("response.output_item.done", item=item)
        self.done.append(item)

    def _of_part(self, kind: str, **more: Any) -> _Event:
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> _Event:
        return {"type": kind, "output_index": len(self.done), **more}


# ---------------------------------------------------------------------------------------------------------- replies


class _Reply:
    """One reply while its answer comes: what each step of it says."""

    def __init__(self, request: Request, head: Head) -> None:
        self._request = request
        self._head = head
        self.items = _Items(head.id, request.namespaces, head.keep if request.store else lambda items: None)

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        """The whole object, as far as it is known. ``store`` is what was asked: it is about the items."""
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "model": self._head.model,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "store": self._request.store,
            "truncation": "disabled",
            "usage": None,
            **self._request.repeated,
            "output": self.items.done,
            **more,
        }

    def ended(self, done: Done) -> dict[str, Any]:
        """The object at the end of its answer."""
        details = {"reason": "max_output_tokens"} if done.finish_reason == "length" else None
        return self.response(
            "completed" if details is None else "incomplete",
            incomplete_details=details,
            usage=_usage(done),
            temperature=done.sampling.temperature,
            top_p=done.sampling.top_p,
            edgespec={"seed": done.sampling.seed, "timings": timings([done]), **self._head.own.get("edgespec", {})},
        )


def _usage(done: Done) -> dict[str, Any]:
    stats = done.stats
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": stats.cached_tokens,
            "cache_write_tokens": stats.prompt_tokens - stats.cached_tokens,
        },
        "output_tokens": stats.emitted_tokens,
        "output_tokens_details": token_details([done]),
        "total_tokens": stats.prompt_tokens + stats.emitted_tokens,
    }


class _Events:
    """The events of one reply, each with its number."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._reply: _Reply | None = None
        self._number = 0

    def begin(self, index: int, head: Head, prompt_tokens: int) -> bytes:
        self._reply = _Reply(self._request, head)
        response = self._reply.response("in_progress")
        return self._said({"type": "response.created", "response": response}) + self.waiting()

    def part(self, index: int, part: Part) -> bytes:
        return self._said(*self._known().items.add(part, list(map(as_json, scored_tokens(part)))))

    def end(self, index: int, done: Done) -> bytes:
        return self._said(*self._known().items.end(complete=done.finish_reason != "length"))

    def finish(self, answers: Sequence[Done]) -> bytes:
        response = self._known().ended(answers[0])
        return self._said({"type": f"response.{response['status']}", "response": response})

    def fail(self, error: ApiError) -> bytes:
        """A reply that had not begun begins: Codex waits for its end. Other clients look for an error's own event."""
        begun = b""
        if self._reply is None:
            name = self._request.model or ""
            head = Head(id=f"resp_{uuid.uuid4().hex}", created=int(time.time()), model=name, fingerprint="")
            known = {**error.as_json()["error"], "code": error.code or _code(error)}
            begun = self.begin(0, head, 0) + self._said({**known, "type": "error", "error": known})
        self._known().items.fail()
        response = self._known().response("failed", error={"code": _code(error), "message": error.message})
        return begun + self._said({"type": "response.failed", "response": response})

    def waiting(self) -> bytes:
        """Once the reply has begun an event: programs that do not count comments would give up."""
        if self._reply is None:
            return b": waiting\n\n"
        return self._said({"type": "response.in_progress", "response": self._reply.response("in_progress")})

    def _known(self) -> _Reply:
        assert self._reply is not None
        return self._reply

    def _said(self, *events: _Event) -> bytes:
        return b"".join(map(self._numbered, events))

    def _numbered(self, event: _Event) -> bytes:
        data = b"".join(json_pieces({**event, "sequence_number": self._number}))
        self._number += 1
        return f"event: {event['type']}\ndata: ".encode() + data + b"\n\n"


def _code(error: ApiError) -> str:
    """The error's code in a reply that has begun, where OpenAI has one for it."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else error.code or "invalid_prompt"


def _whole(
    request: Request, head: Head, said: Sequence[Sequence[Stretch]], answers: Sequence[Done]
) -> dict[str, Any]:
    reply, (stretches,), (done,) = _Reply(request, head), said, answers
    steps = [reply.items.add(each.part, each.columns.get("logprobs", ())) for each in stretches]
    for events in (*steps, reply.items.end(complete=done.finish_reason != "length")):
        for _ in events:
            pass
    return reply.ended(done)


def _columns(part: Part) -> Columns:
    return {} if part.thought or not part.tokens else {"logprobs": list(map(as_json, scored_tokens(part)))}


RESPONSES = Face(
    name="responses",
    path="/v1/responses",
    about="Answer a list of items. No response is kept.",
    reply=("id", "object", "created_at", "model", "status", "output", "usage", "tools", "tool_choice"),
    read=read_responses,
    events=_Events,
    whole=_whole,
    columns=_columns,
    asks="input",
    id_prefix="resp_",
    any_model=True,
    names_items=True,
    fails_inside=(TOO_LONG,),  # a status of 400 is any wrong request to Codex, which shortens nothing then
)
