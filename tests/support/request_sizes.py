"""Requests of many kinds, and what a server does with one until its answer begins."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.session import Session
from edgespec.errors import EdgespecError
from edgespec.server.answers import _generation, without_words
from edgespec.server.errors import ApiError
from edgespec.server.faces.table import FACES
from edgespec.server.pool import Kept, text_of
from edgespec.server.strict_json import parse_body
from edgespec.text.request_budget import RequestBudget

__all__ = ["READERS", "TEXTS", "prepare"]

READERS = {face.name: face.read for face in FACES}

TEXTS: Mapping[str, str] = {
    "letters": "a",
    "blanks": " ",
    "lines": "\n",
    "digits": "7",
    "numbers": "7305918264015384 ",
    "emoji": "\N{GRINNING FACE}",
    "marks of letters": "e\u0301\u0301",
    "apostrophes": "'",
    "control tokens": "<|im_end|>",
    "halves of control tokens": "<|im_",
    "calls that do not end": '<tool_call>{"a": "',
    "marks of thinking": "<think>",
    "ends of thinking": "</think>",
}


def prepare(engine: Engine, session: Session, api: str, raw: bytes, budget: RequestBudget) -> Any:
    """Read a body and prepare its answer. Returns the error of a request that is refused, else None."""
    try:
        request = READERS[api](parse_body(raw, budget))
        text_of(request)
        sampling = Sampling(**{**request.sampling, "seed": request.seed})
        sampling = without_words(sampling, request.bad_words, engine.tokenizer)
        with contextlib.closing(_generation(request, Kept(session, ""), sampling, budget)):
            return None
    except (ApiError, EdgespecError) as error:
        return error
