"""Decodes the answers to one request: a session of the pool, one answer after another, each as parts of text."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from edgespec.decoding.logprobs import TokenLogprob
from edgespec.decoding.sampling import Sampling
from edgespec.engine.answer import Generation
from edgespec.engine.events import Done, Text
from edgespec.errors import (
    ClosedError,
    ContextFullError,
    InvalidRequestError,
    MemoryLimitError,
    PromptTooLongError,
    TemplateError,
)
from edgespec.server.errors import ApiError, GoneError
from edgespec.server.fields import MOST_CHOICES
from edgespec.server.keeper import LoadedEngine
from edgespec.server.pool import Kept, text_of
from edgespec.server.schema import Request
from edgespec.server.threads import in_thread
from edgespec.text.conversation.pieces import ToolCall
from edgespec.text.tokenizers.tokenizer import Tokenizer, hidden_stops

_SEEDS = 2**64
# A drawn seed is returned, and numbers of JSON are exact below this in JavaScript. The last answer's is below it too.
_DRAWN_SEEDS = 2**53 - MOST_CHOICES
# Longest token of a vocabulary, in characters: runs of spaces in code vocabularies are 128 long, some have 256.
_LONGEST_TOKEN = 512

# Errors after which a session is as usable as before: the request's own, and those of the reader of the answer.
_OF_THE_REQUEST = (ApiError, ContextFullError, GoneError, InvalidRequestError, TemplateError)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's bytes (``data``) and log-probability, and those of the likeliest tokens at its position.

    ``offset``: characters of the answer before it. A character may have several tokens.
    """

    data: bytes
    offset: int
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """More of an answer: its text, its thinking without marks, its calls, and its tokens if their probabilities were
    asked for."""

    content: str = ""
    reasoning: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    calls: tuple[ToolCall, ...] = ()


def joined(parts: Sequence[Part]) -> Part:
    """All parts of an answer as one."""
    return Part(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(token for part in parts for token in part.tokens),
        tuple(call for part in parts for call in part.calls),
    )


class Reader(Protocol):
    """What becomes of the answers: a stream, or one JSON object at the end."""

    async def begin(self, index: int) -> None:
        """The answer ``index`` begins: the request was accepted."""

    async def part(self, index: int, part: Part) -> None:
        """More of the answer ``index``."""

    async def end(self, index: int, done: Done) -> None:
        """The answer ``index`` is complete."""


def sampling_for(usual: Sampling, request: Request, index: int) -> Sampling:
    """The sampling of the answer ``index``: what the request says, else ``usual``, the model's own.

    With a seed, each further answer has the next one. Raises InvalidRequestError.
    """
    seed = request.seed if request.seed is None else (request.seed + index) % _SEEDS
    values: dict[str, Any] = {**request.sampling, "seed": seed}
    return replace(usual, **values)


async def decode(request: Request, owner: str, loaded: LoadedEngine, reader: Reader) -> list[Done]:
    """Decode all answers to ``request`` and tell ``reader``. Raises EdgespecError, and what ``reader`` raises.

    A cancelled call ends the running answer within one forward.
    """
    engine = loaded.engine
    usual = replace(engine.file_sampling, rule=engine.profile.rule)
    if request.seed is None and not sampling_for(usual, request, 0).greedy:  # a greedy answer has no seed
        request = replace(request, seed=secrets.randbelow(_DRAWN_SEEDS))
    samplings = [sampling_for(usual, request, index) for index in range(request.choices)]
    _check_length(request, engine.plan.context_length)
    found = []
    async with _session(request, owner, loaded) as kept:
        for index, sampling in enumerate(samplings):
            done = await _one(request, kept, sampling, index, reader, engine.tokenizer)
            kept.text = text_of(request, done.text)
            found.append(done)
    return found


def _check_length(request: Request, context_length: int) -> None:
    """Refuse a prompt that no vocabulary can fit in the context, before it is tokenised."""
    texts = [request.prompt or "", *(each["content"] for each in request.messages)]
    if sum(map(len, texts)) > context_length * _LONGEST_TOKEN:
        raise PromptTooLongError(
            f"the prompt by far exceeds the available context size of {context_length} tokens",
            hint="shorten the prompt or use a larger --context",
        )


@asynccontextmanager
async def _session(request: Request, owner: str, loaded: LoadedEngine) -> AsyncIterator[Kept]:
    """A session of the pool. It goes back unless it is broken.

    If memory holds no further one, waits until another request gives its session back, behind those that came first.
    """
    taken: list[Kept] = []
    text = text_of(request)

    def take() -> None:
        taken.append(loaded.pool.take(owner, text, think=request.think))

    with ExitStack() as ending:
        ending.callback(loaded.given_back.set)
        try:
            async with loaded.taking:
                ending.enter_context(loaded.pool.user())
                while not taken:
                    loaded.given_back.clear()
                    others = loaded.pool.in_use - 1
                    try:
                        await in_thread(take)
                    except MemoryLimitError:
                        if not others:
                            raise
                        await loaded.given_back.wait()
            yield taken[0]
        except BaseException as error:
            broken = isinstance(error, Exception) and not isinstance(error, _OF_THE_REQUEST)
            for kept in taken:
                await in_thread(kept.session.close if broken else partial(loaded.pool.give, kept), always=True)
            raise
        else:
            await in_thread(partial(loaded.pool.give, taken[0]), always=True)


class TokenScores:
    """The tokens of one answer with their bytes, without the token that ends it, as OpenAI does."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ends = tokenizer.stop_ids | hidden_stops(tokenizer, stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # characters so far

    def of(self, logprobs: Sequence[TokenLogprob]) -> tuple[ScoredToken, ...]:
        bytes_of = self._tokenizer.token_bytes
        return tuple(
            self._scored(bytes_of(each.token_id), each.logprob, tuple((bytes_of(own), p) for own, p in each.top))
            for each in logprobs
            if each.token_id not in self._ends
        )

    def _scored(self, data: bytes, logprob: float, top: tuple[tuple[bytes, float], ...]) -> ScoredToken:
        offset = self._length
        self._length += len(self._decoder.decode(data))
        return ScoredToken(data, offset, logprob, top)


async def _one(
    request: Request, kept: Kept, sampling: Sampling, index: int, reader: Reader, tokenizer: Tokenizer
) -> Done:
    begun: list[Generation] = []

    def begin() -> None:
        begun.append(_generation(request, kept, sampling))

    try:
        await in_thread(begin)
        await reader.begin(index)
        generation, kept.text = begun[0], text_of(request)
        scores = TokenScores(tokenizer, request.stop)
        async for event in generation:
            if isinstance(event, Text):
                content = event.text if event.reasoning is None else ""
                part = Part(content, event.reasoning or "", scores.of(event.logprobs))
                if part != Part():
                    await reader.part(index, part)
            elif isinstance(event, ToolCall):
                await reader.part(index, Part(calls=(event,)))
            elif isinstance(event, Done):
                if event.finish_reason == "cancelled":  # not by the client, which would have ended this call
                    raise ClosedError("the answer was ended: the model is being freed")
                await reader.end(index, event)
                return event
        raise AssertionError("an answer ends with Done")
    finally:
        for generation in begun:
            await generation.aclose()


def _generation(request: Request, kept: Kept, sampling: Sampling) -> Generation:
    settings: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "sampling": sampling,
        "stop": request.stop,
        "logprobs": request.logprobs,
    }
    if request.prompt is not None:
        return kept.session.generate(request.prompt, raw=True, **settings)
    settings |= {"tools": request.tools, "tool_choice": request.tool_choice}
    return kept.session.generate(messages=request.messages, keep_all=True, **settings)
