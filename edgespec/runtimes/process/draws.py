"""How a draw crosses the pipes of a worker process: the request and the drawn tokens. The rows stay in the worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edgespec.errors import WorkerLostError
from edgespec.interfaces.drawing import Drawn, DrawRequest, Measure, Seen
from edgespec.runtimes.process.frames import Frame, ids_bytes

_NUMBERS: Mapping[str, Callable[[Any], float]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repeat_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "wanted": int,
    "measure": int,
}


def describe_request(request: DrawRequest) -> tuple[dict[str, Any], bytes]:
    """Header and body of a request: its numbers; the tokens seen, the count of each, and the words of the mask.

    JSON has no infinities: a banned token's bias is null.
    """
    numbers = {name: kind(getattr(request, name)) for name, kind in _NUMBERS.items()}
    seen = np.concatenate(Seen.of(request.seen).arrays)
    key = None if request.key is None else list(request.key)
    bias = [[token, None if value == -math.inf else value] for token, value in request.bias]
    mask = np.zeros(0, dtype=np.uint32) if request.mask is None else request.mask
    words = None if request.mask is None else len(mask)
    header = {"request": numbers, "key": key, "bias": bias, "mask": words}
    return header, ids_bytes(seen) + ids_bytes(mask.view(np.int32))


def read_request(frame: Frame) -> DrawRequest:
    """The request that ``describe_request`` described. Raises WorkerLostError."""
    numbers, key = frame.header.get("request"), frame.header.get("key")
    seen = frame.ids()
    if not isinstance(numbers, dict) or {name: type(own) for name, own in numbers.items()} != _NUMBERS:
        raise WorkerLostError("a request to draw has unexpected numbers")
    if key is not None and not (
        isinstance(key, list) and len(key) == 4 and all(type(own) is int and 0 <= own < 2**32 for own in key)
    ):
        raise WorkerLostError("a request to draw has an unknown key")
    bias = frame.header.get("bias")
    if not isinstance(bias, list) or not all(map(_is_bias, bias)) or len({token for token, _ in bias}) < len(bias):
        raise WorkerLostError("a request to draw has an unknown bias")
    words = frame.header.get("mask")
    if not (words is None or (type(words) is int and 0 <= words <= len(seen))):
        raise WorkerLostError("a request to draw has an unknown mask")
    mask = None if words is None else seen[len(seen) - words :].astype(np.uint32)
    seen = seen[: len(seen) - (words or 0)]
    if len(seen) % 2 or numbers["measure"] not in list(Measure):
        raise WorkerLostError("a request to draw is not valid")
    half = len(seen) // 2
    return DrawRequest(
        **{**numbers, "measure": Measure(numbers["measure"])},
        key=None if key is None else (key[0], key[1], key[2], key[3]),
        seen=Seen(seen[:half], seen[half:]),
        mask=mask,
        bias=tuple((token, -math.inf if value is None else value) for token, value in bias),
    )


def _is_bias(each: Any) -> bool:
    """Whether this is a token and a finite number, or null."""
    return (
        isinstance(each, list)
        and len(each) == 2
        and type(each[0]) is int
        and 0 <= each[0] < 2**31
        and (each[1] is None or _is_number(each[1]))
    )


def describe_drawn(drawn: Drawn) -> tuple[dict[str, Any], bytes]:
    """Header and body of a result: odds and entropy; the tokens."""
    return {"odds": list(drawn.odds), "entropy": drawn.entropy}, ids_bytes(np.array(drawn.tokens, dtype=np.int64))


def read_drawn(frame: Frame, request: DrawRequest, vocabulary_size: int) -> Drawn:
    """What was drawn for ``request``. Raises WorkerLostError for an impossible result."""
    tokens, odds, entropy = frame.ids().tolist(), frame.header.get("odds"), frame.header.get("entropy")
    if not 1 <= len(tokens) <= request.wanted or not all(0 <= token < vocabulary_size for token in tokens):
        raise WorkerLostError("it drew a token outside the vocabulary")
    if not isinstance(odds, list) or len(odds) != len(tokens) or not all(map(_is_number, odds)):
        raise WorkerLostError("it does not report the odds of the drawn tokens")
    if _is_number(entropy) != (request.measure == Measure.ENTROPY):
        raise WorkerLostError("it does not report the requested entropy")
    return Drawn(tuple(tokens), tuple(odds), entropy)


def _is_number(value: object) -> bool:
    return type(value) is float and math.isfinite(value)
