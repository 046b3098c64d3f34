"""What the replies of every API share: JSON in pieces, llama.cpp's timings, a fingerprint. Pure functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from edgespec import __version__
from edgespec.engine.events import Done
from edgespec.planning.choice.plan import Plan


def fingerprint(plan: Plan) -> str:
    """Names what a seed's text depends on: this version, the model, and its numeric class."""
    about = json.dumps([plan.target.model, plan.numeric_class.as_json()], sort_keys=True, default=str)
    return f"edgespec-{__version__}-{hashlib.sha256(about.encode()).hexdigest()[:8]}"


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
# Some clients end a line of a stream at each sign that Unicode calls a line's end. JSON escapes the others.
_LINE_ENDS = {ord(sign): json.dumps(sign)[1:-1] for sign in "\x85\u2028\u2029"}


def as_json(value: Any) -> bytes:
    """A value as compact JSON in one line; half of a character is a question mark."""
    return _JSON.encode(value).translate(_LINE_ENDS).encode("utf-8", "replace")


def event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def json_pieces(value: Any) -> Iterator[bytes]:
    """JSON as clients read it, piece by piece. Bytes are JSON already."""
    if isinstance(value, dict):
        named = ((as_json(name) + b":", item) for name, item in value.items())
        yield from _in_brackets(b"{", named, b"}")
    elif isinstance(value, list):
        yield from _in_brackets(b"[", ((b"", item) for item in value), b"]")
    else:
        yield value if isinstance(value, bytes) else as_json(value)


def _in_brackets(begin: bytes, items: Iterable[tuple[bytes, Any]], end: bytes) -> Iterator[bytes]:
    yield begin
    for number, (name, item) in enumerate(items):
        yield (b"," if number else b"") + name
        yield from json_pieces(item)
    yield end


def timings(answers: Sequence[Done], choices: int = 1) -> dict[str, Any]:
    """The times of llama.cpp's server, by its names; ``plain_per_second`` is ours. Not measured is null.

    ``prompt_n`` are the tokens that were read, without cached ones. The first token comes with the prompt: a rate is
    that of the others. A prompt counts once, for all of its ``choices``.
    """
    prompts = [done.stats for done in answers[::choices]]
    cached = sum(stats.cached_tokens for stats in prompts)
    read = sum(stats.prompt_tokens for stats in prompts) - cached
    times = [stats.ttft_s for stats in prompts if stats.ttft_s is not None]
    prompt_s = sum(times) if len(times) == len(prompts) else None
    decode_s = sum(done.stats.decode_s or 0.0 for done in answers)
    further = sum(max(0, done.stats.emitted_tokens - 1) for done in answers)
    return {
        "cache_n": cached,
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
