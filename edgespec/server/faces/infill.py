"""llama.cpp's /infill: the text in a hole, as its editors' extensions ask for it, whole and in events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.engine.events import Done
from edgespec.server.answers import Part
from edgespec.server.errors import ApiError
from edgespec.server.faces.face import Face, Head, Stretch, whole_of
from edgespec.server.faces.openai import progress_of
from edgespec.server.fields.table import read_fields
from edgespec.server.replies import event, timings
from edgespec.server.schema import Request, request_of

# llama.cpp's words for why an answer ended.
_STOPS = {"stop": "eos", "length": "limit"}


def read_infill(body: Mapping[str, Any]) -> Request:
    """A body of /infill. Raises ApiError."""
    found = read_fields("infill", body)
    found["prompt"] = found.pop("before", "") + found.pop("line", "")
    found.setdefault("suffix", "")
    found["sampling"].setdefault("temperature", 0.0)  # suggestions are the likeliest text, and do not change
    return request_of(found)


class _Events:
    """The events of one reply."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._head: Head | None = None
        self._prompt_tokens = 0

    def begin(self, index: int, head: Head, prompt_tokens: int) -> bytes:
        self._head, self._prompt_tokens = head, prompt_tokens
        return b""

    def part(self, index: int, part: Part) -> bytes:
        progress = progress_of(part, self._prompt_tokens) if self._request.show_progress else {}
        if not part.content and not progress:
            return b""
        return event({"index": index, "content": part.content, "stop": False, **progress})

    def end(self, index: int, done: Done) -> bytes:
        assert self._head is not None
        return event(_final(self._request, self._head, "", done))

    def finish(self, answers: Sequence[Done]) -> bytes:
        return b""

    def fail(self, error: ApiError) -> bytes:
        return event(error.as_json())

    def waiting(self) -> bytes:
        return b": waiting\n\n"


def _final(request: Request, head: Head, content: str, done: Done) -> dict[str, Any]:
    """The reply, or what of it is asked for."""
    stats, most = done.stats, -1 if request.max_tokens is None else request.max_tokens
    word = done.stop_text if done.finish_reason == "stop" else None
    reply = {
        "index": 0,
        "content": content,
        "tokens": [],
        "id_slot": 0,
        "stop": True,
        "model": head.model,
        "tokens_predicted": stats.emitted_tokens,
        "tokens_evaluated": stats.prompt_tokens,
        "tokens_cached": stats.prompt_tokens + stats.emitted_tokens,
        "generation_settings": {"n_predict": most, "stop": list(request.stop)},
        "prompt": "",
        "has_new_line": "\n" in done.text,
        "truncated": False,
        "stop_type": "word" if word else _STOPS.get(done.finish_reason, "none"),
        "stopping_word": word or "",
        "timings": timings([done]),
        **head.own,
    }
    return reply if request.reply_fields is None else _chosen(reply, request.reply_fields)


def _chosen(reply: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The named fields, each by its whole name. What the reply lacks is left out."""
    found = dict[str, Any]()
    for name in names:
        value: Any = reply
        for each in name.split("/"):
            value = value.get(each) if isinstance(value, Mapping) else None
        if value is not None:
            found[name] = value
    return found


def _whole(
    request: Request, head: Head, said: Sequence[Sequence[Stretch]], answers: Sequence[Done]
) -> dict[str, Any]:
    part, _ = whole_of(said[0])
    return _final(request, head, part.content, answers[0])


INFILL = Face(
    name="infill",
    path="/infill",
    about="Fill the hole between two texts.",
    reply=(),
    read=read_infill,
    events=_Events,
    whole=_whole,
    asks="input_prefix",
    fills_in=True,
)
