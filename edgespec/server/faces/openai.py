"""Answers as OpenAI's clients read them, whole and in chunks, with llama.cpp's timings. Pure functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec import __version__
from edgespec.engine.events import Done
from edgespec.planning.choice.plan import Plan
from edgespec.server.answers import Part
from edgespec.text.conversation.pieces import ToolCall


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of a reply share. ``created``: seconds since 1970. ``warnings``: what was not obeyed."""

    id: str
    created: int
    model: str
    fingerprint: str
    is_chat: bool
    warnings: tuple[str, ...] = ()

    @property
    def own(self) -> dict[str, Any]:
        """What only edgespec says, at the end of a reply."""
        return {"edgespec": {"warnings": list(self.warnings)}} if self.warnings else {}

    def wrap(self, choices: list[dict[str, Any]], *, chunk: bool, **more: Any) -> dict[str, Any]:
        kind = "text_completion" if not self.is_chat else f"chat.completion{'.chunk' if chunk else ''}"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


def fingerprint(plan: Plan) -> str:
    """Names what a seed's text depends on: this version, the model, and its numeric class."""
    about = json.dumps([plan.target.model, plan.numeric_class.as_json()], sort_keys=True, default=str)
    return f"edgespec-{__version__}-{hashlib.sha256(about.encode()).hexdigest()[:8]}"


def first_chunk(head: Head, index: int) -> dict[str, Any]:
    """The chunk that begins a chat's answer."""
    return head.wrap([_delta(index, {"role": "assistant", "content": ""})], chunk=True)


def part_chunk(head: Head, index: int, part: Part) -> dict[str, Any]:
    """More of an answer."""
    if not head.is_chat:
        return head.wrap([_text(index, part, None)], chunk=True)
    delta: dict[str, Any] = {"reasoning_content": part.reasoning} if part.reasoning else {}
    if part.content:
        delta["content"] = part.content
    if part.calls:
        delta["tool_calls"] = [{"index": call.index, **_call(call)} for call in part.calls]
    return head.wrap([_delta(index, delta, part=part)], chunk=True)


def last_chunk(head: Head, index: int, done: Done) -> dict[str, Any]:
    """The chunk with the reason for the end, the seed and the timings."""
    reason = finish_reason(done)
    choice = _delta(index, {}, reason) if head.is_chat else _text(index, Part(), reason)
    return head.wrap([choice], chunk=True, seed=done.sampling.seed, timings=timings([done]), **head.own)


def failed_chunk(head: Head, index: int) -> dict[str, Any]:
    """What a stream's error has of the answer that it ends."""
    choice = _delta(index, {}, "error") if head.is_chat else _text(index, Part(), "error")
    return head.wrap([choice], chunk=True)


def usage_chunk(head: Head, answers: Sequence[Done]) -> dict[str, Any]:
    return head.wrap([], chunk=True, usage=usage(answers))


Columns = dict[str, list[bytes]]


def columns(part: Part, *, is_chat: bool) -> Columns:
    """The lists of a reply's log-probabilities: the JSON of each of the part's tokens, by the list's name.

    Bytes are nothing that the garbage collector walks through, unlike the objects of tens of thousands of tokens.
    """
    lists = (_chat_logprobs(part) if is_chat else _text_logprobs(part)) or {}
    return {name: list(map(_json, items)) for name, items in lists.items() if items is not None}


def whole(head: Head, parts: Sequence[Part], scored: Sequence[Columns], answers: Sequence[Done]) -> dict[str, Any]:
    """The reply to a request that is not streamed, for ``json_pieces``. The tokens of ``parts`` are in ``scored``."""
    choices = []
    for index, (part, own, done) in enumerate(zip(parts, scored, answers, strict=True)):
        if head.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": part.content, "refusal": None}
            if part.reasoning:
                message["reasoning_content"] = part.reasoning
            if part.calls:
                message["content"] = part.content.strip() or None
                message["tool_calls"] = [_call(call) for call in part.calls]
            choice = {
                "index": index,
                "message": message,
                "logprobs": {**own, "refusal": None} if own else None,
                "finish_reason": finish_reason(done),
            }
        else:
            choice = {**_text(index, part, done.finish_reason), "logprobs": own or None}
        choices.append(choice)
    return head.wrap(
        choices,
        chunk=False,
        usage=usage(answers),
        seed=answers[0].sampling.seed,
        timings=timings(answers),
        **head.own,
    )


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _json(value: Any) -> bytes:
    return _JSON.encode(value).encode("utf-8", "replace")


def json_pieces(value: Any) -> Iterator[bytes]:
    """JSON as clients read it, piece by piece. Bytes are JSON already."""
    if isinstance(value, dict):
        named = ((_json(name) + b":", item) for name, item in value.items())
        yield from _in_brackets(b"{", named, b"}")
    elif isinstance(value, list):
        yield from _in_brackets(b"[", ((b"", item) for item in value), b"]")
    else:
        yield value if isinstance(value, bytes) else _json(value)


def _in_brackets(begin: bytes, items: Iterable[tuple[bytes, Any]], end: bytes) -> Iterator[bytes]:
    yield begin
    for number, (name, item) in enumerate(items):
        yield (b"," if number else b"") + name
        yield from json_pieces(item)
    yield end


def finish_reason(done: Done) -> str:
    """OpenAI's reason for the end of an answer."""
    return "tool_calls" if done.tool_calls and done.finish_reason == "stop" else done.finish_reason


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta(index: int, delta: dict[str, Any], reason: str | None = None, part: Part | None = None) -> dict[str, Any]:
    logprobs = None if part is None else _chat_logprobs(part)
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _text(index: int, part: Part, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": part.content, "logprobs": _text_logprobs(part), "finish_reason": reason}


def _chat_logprobs(part: Part) -> dict[str, Any] | None:
    if not part.tokens:
        return None
    content = [
        {**_scored(each.data, each.logprob), "top_logprobs": [_scored(*other) for other in each.top]}
        for each in part.tokens
    ]
    return {"content": content, "refusal": None}


def _scored(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(token)}


def _text_logprobs(part: Part) -> dict[str, Any] | None:
    """The older shape, of completions."""
    if not part.tokens:
        return None
    return {
        "tokens": [_name(each.data) for each in part.tokens],
        "token_logprobs": [_number(each.logprob) for each in part.tokens],
        "top_logprobs": [{_name(token): _number(logprob) for token, logprob in each.top} for each in part.tokens],
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


def usage(answers: Sequence[Done]) -> dict[str, Any]:
    """Tokens, with OpenAI's names for guesses. The prompt of several answers counts once."""
    prompt, cached = answers[0].stats.prompt_tokens, answers[0].stats.cached_tokens
    completion = sum(done.stats.emitted_tokens for done in answers)
    accepted = sum(done.stats.accepted for done in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(done.stats.proposed for done in answers) - accepted,
        },
    }


def timings(answers: Sequence[Done]) -> dict[str, Any]:
    """The times of llama.cpp's server, by its names; ``plain_per_second`` is ours. Not measured is null.

    ``prompt_n`` are the tokens that were read, without cached ones. The first token comes with the prompt: a rate is
    that of the others.
    """
    first = answers[0].stats
    read = first.prompt_tokens - first.cached_tokens
    prompt_s = first.ttft_s
    decode_s = sum(done.stats.decode_s or 0.0 for done in answers)
    further = sum(max(0, done.stats.emitted_tokens - 1) for done in answers)
    return {
        "cache_n": first.cached_tokens,
        "prompt_n": read,
        "prompt_ms": None if prompt_s is None else _rounded(1000 * prompt_s),
        "prompt_per_second": None if not prompt_s else _rounded(read / prompt_s),
        "predicted_n": sum(done.stats.emitted_tokens for done in answers),
        "predicted_ms": _rounded(1000 * decode_s),
        "predicted_per_second": _rounded(further / decode_s) if decode_s and further else None,
        "draft_n": sum(done.stats.proposed for done in answers),
        "draft_n_accepted": sum(done.stats.accepted for done in answers),
        "plain_per_second": None
        if answers[-1].plain_tokens_per_s is None
        else _rounded(answers[-1].plain_tokens_per_s),
    }


def _rounded(number: float) -> float:
    return round(number, 3)
