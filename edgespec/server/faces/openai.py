"""OpenAI's chat completions and completions: their requests, and answers whole and in chunks. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from edgespec.engine.events import Done
from edgespec.server.answers import Part
from edgespec.server.errors import ApiError, unsupported
from edgespec.server.faces.face import Columns, Face, Head, Stretch, whole_of
from edgespec.server.fields.openai import MOST_ANSWERS
from edgespec.server.fields.table import read_fields
from edgespec.server.items import choose_in_chat, read_chat_tools
from edgespec.server.replies import as_json, event, timings
from edgespec.server.schema import Request, request_of
from edgespec.text.conversation.pieces import ToolCall

_COMMAND = re.compile(r" \([`]edgespec [^`]*`[^()]*\)")


def read_chat(body: Mapping[str, Any]) -> Request:
    """A body of /v1/chat/completions. Raises ApiError."""
    found = read_fields("chat", body)
    top = found.pop("top_logprobs", 0)
    if found.pop("logprobs", False):
        found["logprobs"] = top
    elif top:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    offered = read_chat_tools(found.pop("tools", ()))
    found["tools"], found["tool_choice"] = choose_in_chat(offered, found.get("tool_choice"))
    return request_of({**found, "warnings": offered.warnings})


def read_completion(body: Mapping[str, Any]) -> Request:
    """A body of /v1/completions. Raises ApiError."""
    found = read_fields("completion", body)
    if found.get("echo") and "logprobs" in found:
        raise unsupported("echo", "echo together with logprobs")
    found["prompt"], *further = prompts = found.pop("prompts")
    found["further"] = tuple(further)
    if not all(isinstance(each, str) for each in prompts):
        for name in ("echo", "suffix"):
            if found.get(name):
                raise unsupported(name, f"{name} with a prompt of tokens")
    if "" in prompts and not found.get("suffix"):
        raise ApiError("the prompt is empty: give at least one character, or a suffix", param="prompt")
    request = request_of(found)
    if request.answers > MOST_ANSWERS:
        raise ApiError(f"these are {request.answers} answers; at most {MOST_ANSWERS} are allowed", param="prompt")
    return request


class _Chunks:
    """The chunks of one reply."""

    def __init__(self, request: Request) -> None:
        self._is_chat = request.is_chat
        self._request = request
        self._include_usage = request.include_usage
        self._show_tokens = request.show_tokens
        self._head: Head | None = None
        self._open = set[int]()  # the answers that have begun and not ended
        self._prompt_tokens = 0

    def begin(self, index: int, head: Head, prompt_tokens: int) -> bytes:
        self._head, self._prompt_tokens = head, prompt_tokens
        self._open.add(index)
        if self._is_chat:
            return self._chunk(_delta(index, {"role": "assistant", "content": ""}))
        echo = _echo(self._request, index)
        return self.part(index, Part(echo)) if echo else b""

    def part(self, index: int, part: Part) -> bytes:
        progress = progress_of(part, self._prompt_tokens) if self._request.show_progress else {}
        if self._is_chat:
            guesses = _guesses_of(part) if self._show_tokens else {}
            return self._chunk(_delta(index, _delta_of(part), part=part), **guesses, **progress)
        # A completion has no field for thinking.
        return self._chunk(_text(index, part, None), **progress) if part.content or part.tokens or progress else b""

    def end(self, index: int, done: Done) -> bytes:
        """The chunk with the reason for the end, the seed and the timings."""
        head, choice = self._known_head(), self._ended(index, finish_reason(done))
        self._open.discard(index)
        own = head.own
        if self._show_tokens:
            own = {"edgespec": {**own.get("edgespec", {}), **_why_not(done)}}
        return self._chunk(choice, seed=done.sampling.seed, timings=timings([done]), **own)

    def finish(self, answers: Sequence[Done]) -> bytes:
        used = self._chunk(usage=usage(answers, self._request.choices)) if self._include_usage else b""
        return used + b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> bytes:
        """The answers that had begun have the reason ``error``. Clients read the error itself where it is alone."""
        choices = [self._ended(index, "error") for index in sorted(self._open)]
        return (self._chunk(*choices) if choices else b"") + event(error.as_json())

    def waiting(self) -> bytes:
        return b": waiting\n\n"

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _known_head(self) -> Head:
        assert self._head is not None
        return self._head

    def _ended(self, index: int, reason: str) -> dict[str, Any]:
        return _delta(index, {}, reason) if self._is_chat else _text(index, Part(), reason)

    def _chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        usage = {"usage": None} if self._include_usage and "usage" not in more else {}
        return event(_wrap(self._known_head(), self._kind, list(choices), **more, **usage))


def _guesses_of(part: Part) -> dict[str, Any]:
    """Who guessed the part's tokens, and how far the prompt is read, for a request that asked."""
    found: dict[str, Any] = {}
    if part.guessed:
        found["tokens"] = part.guessed
    if part.round is not None:
        found["round"] = dict(zip(("proposed", "accepted"), part.round, strict=True))
    if part.reading is not None:
        found["reading"] = {"tokens": part.reading.tokens, "of": part.reading.of}
    return {"edgespec": found} if found else {}


def progress_of(part: Part, prompt_tokens: int) -> dict[str, Any]:
    """How much of a prompt is read, in the words of llama.cpp's server; empty if the part does not say."""
    if (reading := part.reading) is None:
        return {}
    cached = prompt_tokens - reading.of
    return {
        "prompt_progress": {
            "total": prompt_tokens,
            "cache": cached,
            "processed": cached + reading.tokens,
            "time_ms": round(1000.0 * part.read_s),
        }
    }


def _why_not(done: Done) -> dict[str, Any]:
    """Why a drafter did not guess, in words and as a code, without commands: these may name files of this machine."""
    said = done.speculation_off and _COMMAND.sub("", done.speculation_off)
    return {"speculation_off": said, "speculation_off_code": done.speculation_off_code}


def _wrap(head: Head, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "choices": choices,
        **more,
    }


def _echo(request: Request, index: int) -> str:
    """The text in front of the answer ``index``."""
    return str(request.of(index).prompt) if request.echo else ""


def _columns(part: Part, *, is_chat: bool) -> Columns:
    """Bytes are nothing that the garbage collector walks through, unlike objects of tens of thousands of tokens."""
    lists = (_chat_logprobs(part) if is_chat else _text_logprobs(part)) or {}
    return {name: list(map(as_json, items)) for name, items in lists.items() if items is not None}


def _whole_chat(
    request: Request, head: Head, said: Sequence[Sequence[Stretch]], answers: Sequence[Done]
) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": _message(part),
            "logprobs": {**own, "refusal": None} if own else None,
            "finish_reason": finish_reason(done),
        }
        for index, ((part, own), done) in enumerate(zip(map(whole_of, said), answers, strict=True))
    ]
    return _whole(request, head, "chat.completion", choices, answers)


def _message(part: Part) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": part.content, "refusal": None}
    if part.reasoning:
        message["reasoning_content"] = part.reasoning
    if part.calls:
        message["content"] = part.content if part.content.strip() else None
        message["tool_calls"] = [_call(call) for call in part.calls]
    return message


def _whole_completion(
    request: Request, head: Head, said: Sequence[Sequence[Stretch]], answers: Sequence[Done]
) -> dict[str, Any]:
    choices = [
        {
            **_text(index, replace(part, content=_echo(request, index) + part.content), finish_reason(done)),
            "logprobs": own or None,
        }
        for index, ((part, own), done) in enumerate(zip(map(whole_of, said), answers, strict=True))
    ]
    return _whole(request, head, "text_completion", choices, answers)


def _whole(
    request: Request, head: Head, kind: str, choices: list[dict[str, Any]], answers: Sequence[Done]
) -> dict[str, Any]:
    used, times = usage(answers, request.choices), timings(answers, request.choices)
    return _wrap(head, kind, choices, usage=used, seed=answers[0].sampling.seed, timings=times, **head.own)


def finish_reason(done: Done) -> str:
    """OpenAI's reason for the end of an answer."""
    return "tool_calls" if done.tool_calls and done.finish_reason == "stop" else done.finish_reason


def _delta_of(part: Part) -> dict[str, Any]:
    delta: dict[str, Any] = {"reasoning_content": part.reasoning} if part.reasoning else {}
    if part.content:
        delta["content"] = part.content
    if part.calls:
        delta["tool_calls"] = [{"index": call.index, **_call(call)} for call in part.calls]
    return delta


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta(index: int, delta: dict[str, Any], reason: str | None = None, part: Part | None = None) -> dict[str, Any]:
    logprobs = None if part is None else _chat_logprobs(part)
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _text(index: int, part: Part, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": part.content, "logprobs": _text_logprobs(part), "finish_reason": reason}


def _chat_logprobs(part: Part) -> dict[str, Any] | None:
    return {"content": scored_tokens(part), "refusal": None} if part.tokens else None


def scored_tokens(part: Part) -> list[dict[str, Any]]:
    """The part's tokens with their log-probabilities, and the likeliest at the position of each."""
    return [
        {**_scored(each.data, each.logprob), "top_logprobs": [_scored(*other) for other in each.top]}
        for each in part.tokens
    ]


def _scored(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(token)}


def _text_logprobs(part: Part) -> dict[str, Any] | None:
    """The older shape, of completions."""
    if not part.tokens:
        return None
    return {
        "tokens": [_name(each.data) for each in part.tokens],
        "token_logprobs": [_number(each.logprob) for each in part.tokens],
        # OpenAI's have the answer's token too, whether it is one of the likeliest or not.
        "top_logprobs": [
            {_name(token): _number(logprob) for token, logprob in (*each.top, (each.data, each.logprob))}
            for each in part.tokens
        ],
        "text_offset": [each.offset for each in part.tokens],
    }


def _name(token: bytes) -> str:
    """A token as text; as OpenAI writes it if it is a part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _number(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token without a probability."""
    return max(logprob, -9999.0)


def usage(answers: Sequence[Done], choices: int) -> dict[str, Any]:
    """Tokens, with OpenAI's names for guesses. A prompt counts once, for all of its ``choices``."""
    prompt = sum(done.stats.prompt_tokens for done in answers[::choices])
    cached = sum(done.stats.cached_tokens for done in answers[::choices])
    completion = sum(done.stats.emitted_tokens for done in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": token_details(answers),
    }


def token_details(answers: Sequence[Done]) -> dict[str, int]:
    """Tokens of thinking and guessed ones, by OpenAI's names."""
    accepted = sum(done.stats.accepted for done in answers)
    return {
        "reasoning_tokens": sum(done.stats.reasoning_tokens for done in answers),
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(done.stats.proposed for done in answers) - accepted,
    }


_REPLY = ("id", "object", "created", "model", "choices", "usage", "timings", "seed")

CHAT = Face(
    name="chat",
    path="/v1/chat/completions",
    about="Answer a conversation.",
    reply=_REPLY,
    read=read_chat,
    events=_Chunks,
    whole=_whole_chat,
    columns=partial(_columns, is_chat=True),
    id_prefix="chatcmpl-",
)
COMPLETION = Face(
    name="completion",
    path="/v1/completions",
    about="Continue a text.",
    reply=_REPLY,
    read=read_completion,
    events=_Chunks,
    whole=_whole_completion,
    columns=partial(_columns, is_chat=False),
    asks="prompt",
    fills_in=True,
    id_prefix="cmpl-",
)
