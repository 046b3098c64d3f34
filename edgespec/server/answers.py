"""Decodes the answers to one request, each as parts of text: by a session of the pool, and by branches of it."""

from __future__ import annotations

import asyncio
import codecs
import itertools
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from edgespec.decoding.round_base import DecodeStats
from edgespec.decoding.sampling import BIASES, Sampling
from edgespec.engine.answer import Generation
from edgespec.engine.events import Done, Event, Reading, Round, Text, Token
from edgespec.engine.request_checks import check_ends
from edgespec.errors import (
    ClosedError,
    ConstraintError,
    ContextFullError,
    EdgespecError,
    InvalidRequestError,
    MemoryLimitError,
    TemplateError,
)
from edgespec.server.errors import ApiError, GoneError, unsupported
from edgespec.server.fields.field import SEEDS
from edgespec.server.fields.openai import MOST_ANSWERS
from edgespec.server.guessed import Guessed, GuessedText
from edgespec.server.keeper import LoadedEngine
from edgespec.server.keystrokes import KeyTurn, Lines
from edgespec.server.pool import Kept, text_of
from edgespec.server.queue import MOST_RUNNING
from edgespec.server.schema import Request
from edgespec.server.threads import Steps
from edgespec.text.conversation.ends import ends_of
from edgespec.text.conversation.pieces import ToolCall
from edgespec.text.request_budget import RequestBudget
from edgespec.text.tokenizers.tokenizer import Tokenizer

T = TypeVar("T")

# A drawn seed is returned, and numbers of JSON are exact below this in JavaScript. The last answer's is below it too.
_DRAWN_SEEDS = 2**53 - MOST_ANSWERS
# Longest token of a vocabulary, in characters: runs of spaces in code vocabularies are 128 long, some have 256.
_LONGEST_TOKEN = 512

# Errors after which a session is as usable as before: the request's own, and those of the reader of the answer.
_OF_THE_REQUEST = (ApiError, ConstraintError, ContextFullError, GoneError, InvalidRequestError, TemplateError)


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
    asked for.

    ``thought``: its tokens are those of thinking, maybe of its marks alone.
    For requests that ask who guessed: ``guessed`` has the tokens of text or thinking, and ``round`` what was proposed
    and accepted in the round that they are of. For these and requests that ask for progress ``reading`` is how much
    of the prompt is read, ``read_s`` seconds after that began.
    """

    content: str = ""
    reasoning: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    thought: bool = False
    guessed: tuple[GuessedText, ...] = ()
    round: tuple[int, int] | None = None
    reading: Reading | None = None
    read_s: float = 0.0

    @property
    def kind(self) -> Literal["text", "thinking", "calls"]:
        """What the part is."""
        return "calls" if self.calls else "thinking" if self.reasoning else "text"


def joined(parts: Sequence[Part]) -> Part:
    """All parts of an answer as one, without their tokens."""
    return Part(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        calls=tuple(call for part in parts for call in part.calls),
    )


class Reader(Protocol):
    """What becomes of the answers: a stream, or one JSON object at the end. Several may come in parallel."""

    async def begin(self, index: int, prompt_tokens: int) -> None:
        """The answer ``index`` begins: the request was accepted, and its prompt has this many tokens."""

    async def part(self, index: int, part: Part) -> None:
        """More of the answer ``index``."""

    async def end(self, index: int, done: Done) -> None:
        """The answer ``index`` is complete."""


def sampling_for(usual: Sampling, request: Request, index: int) -> Sampling:
    """The sampling of the answer ``index``: what the request says, else ``usual``, the model's own.

    With a seed, each further answer has the next one. Raises InvalidRequestError.
    """
    seed = request.seed if request.seed is None else (request.seed + index) % SEEDS
    values: dict[str, Any] = {**request.sampling, "seed": seed}
    return replace(usual, **values)


def with_usual_window(usual: Sampling, stated: Collection[str], request: Request) -> Sampling:
    """The model's own sampling, with the request's ``usual_last_n`` unless ``repeat_last_n`` is ``stated``."""
    last_n = request.usual_last_n
    return usual if last_n is None or "repeat_last_n" in stated else replace(usual, repeat_last_n=last_n)


def without_words(sampling: Sampling, words: Sequence[str], tokenizer: Tokenizer) -> Sampling:
    """The sampling in which each word of one token is banned, also the token with a blank before it, as in vLLM.

    Raises ApiError for a word of several tokens, InvalidRequestError for too many.
    """
    banned = set[int]()
    for word in words:
        text = word.lstrip(" ")
        ids = tokenizer.encode(text) if len(text) <= _LONGEST_TOKEN else []
        if len(ids) != 1:
            raise unsupported("bad_words", f"a banned word that is not one token of the model, such as {word!r:.40},")
        # A vocabulary may have the word once for the beginning of a text, and once for a place inside of it.
        others = (tokenizer.encode(before + text)[-1] for before in " \n")
        banned |= {token for token in (*ids, *others) if tokenizer.token_bytes(token).lstrip(b" ") == text.encode()}
    bias = {**dict(sampling.logit_bias), **dict.fromkeys(banned, BIASES.least)}
    return replace(sampling, logit_bias=bias) if banned else sampling


async def decode(
    request: Request,
    owner: str,
    loaded: LoadedEngine,
    reader: Reader,
    budget: RequestBudget,
    turn: KeyTurn,
    heard: Callable[[Reading | Text], None] = lambda _event: None,
) -> list[Done]:
    """Decode all answers to ``request`` and tell ``reader``. Raises EdgespecError, and what ``reader`` raises.

    ``turn`` ends it if a newer request replaces it. ``heard`` gets how much of the prompt is read, then the text.
    A cancelled call ends immediately. Its step ends within one forward, and the session goes back to the pool.
    """
    engine = loaded.engine
    usual = with_usual_window(engine.file_sampling, engine.pair.stated_sampling, request)
    # A greedy answer has no seed. A single one draws its own: the session knows then that no other answer had it.
    if request.seed is None and request.answers > 1 and not sampling_for(usual, request, 0).greedy:
        request = replace(request, seed=secrets.randbelow(_DRAWN_SEEDS))
    samplings = [sampling_for(usual, request, index) for index in range(request.answers)]
    async with _session(request, owner, loaded, budget, turn) as held:
        return await _Answers(request, held, samplings, reader, heard).all()


class _Answerer:
    """A session that answers for one request, one answer after another."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self._request: Request | None = None
        self._answer: Generation | None = None
        self._said: str | None = None  # the whole text of the answer

    def begin(
        self, request: Request, sampling: Sampling, tokenizer: Tokenizer, budget: RequestBudget
    ) -> tuple[Generation, TokenScores]:
        """Begin an answer. Takes as long as reading the request's text. Raises what ``Session.generate`` does."""
        self._request, self._said = request, None
        sampling = without_words(sampling, request.bad_words, tokenizer)
        self._answer = _generation(request, self.kept, sampling, budget)
        self.kept.text = text_of(request)
        return self._answer, TokenScores(tokenizer, request.stop, request.stop_token_ids)

    def said(self, text: str) -> None:
        """The answer is complete, with this text."""
        self._said = text

    def end_answer(self) -> None:
        """End the answer within one forward: its last event says that it was cancelled."""
        self.kept.session.cancel()

    def end(self) -> None:
        """End the answer, and note what the caches hold."""
        if self._answer is not None:
            self._answer.close()
        if self._request is not None and self._said is not None:
            self.kept.text = text_of(self._request, self._said)


class _Held:
    """The sessions in the hands of one request. What may take long are steps on the server's threads."""

    def __init__(
        self, request: Request, owner: str, loaded: LoadedEngine, budget: RequestBudget, turn: KeyTurn
    ) -> None:
        self.turn = turn
        self._budget = budget
        self._budget.answer_tokens = request.max_tokens
        self._request = request
        self._owner = owner
        self._loaded = loaded
        self._loop = asyncio.get_running_loop()
        self._steps = Steps(loaded.threads)
        self._ending = ExitStack()
        self._branches = ExitStack()  # closes them
        self._answerers: list[_Answerer] = []  # the pool's session, and branches of it
        self._memory_came = asyncio.Event()  # or the request was replaced
        self._ending.callback(self._call_soon, turn.left.set)

    async def take(self) -> None:
        """Take a session, or open one.

        If memory holds no further one, waits until another request gives its session back, behind those that came
        first.
        """
        loaded, own = self._loaded, self._memory_came
        async with loaded.taking:
            self._ending.callback(self._call_soon, partial(loaded.memory.leave, own))
            self._ending.enter_context(loaded.pool.user())
            loaded.memory.enter(own)
            self.turn.holds_session, self.turn.end_answer = True, self.end_answers
            await self._with_memory(self._take)

    async def _with_memory(self, step: Callable[[], T]) -> T:
        """The result of ``step``. If memory is short, it is tried again whenever another request gives some back.

        Raises MemoryLimitError if none will.
        """
        while True:
            self.turn.check()
            self._memory_came.clear()
            try:
                return await self._steps.run(step)
            except MemoryLimitError:
                held = len(self._answerers)  # beside its own branches a request does not wait
                if held > 1 or not await self._loaded.memory.wait(self._memory_came, holds_session=held > 0):
                    raise

    def _take(self) -> None:
        self._answerers = [_Answerer(self._loaded.pool.take(self._owner, text_of(self._request)))]

    @property
    def first(self) -> _Answerer:
        """The session of the pool."""
        return self._answerers[0]

    @property
    def places(self) -> int:
        """How many sessions may answer in parallel, with those of other requests: one if a cache cannot be copied."""
        loaded = self._loaded
        if not loaded.engine.pair.target.facts.can_fork:
            return 1
        return max(1, MOST_RUNNING + 1 - loaded.pool.in_use)

    async def branch(self, most: int, tokens: int) -> list[_Answerer]:
        """``most`` sessions with the first one's caches, itself among them, which may grow to ``tokens``.

        Fewer if there is no spare memory.
        """
        return await self._steps.run(partial(self._branch, most, tokens))

    def _branch(self, most: int, tokens: int) -> list[_Answerer]:
        session, pool = self.first.kept.session, self._loaded.pool
        self._branches.callback(self._call_soon, self._loaded.memory.given_back)
        with suppress(EdgespecError):  # the others answer in turn
            while len(self._answerers) < most:
                branch = session.branch(spare_tokens=tokens)
                self._branches.callback(branch.close)
                self._branches.enter_context(pool.user())
                self._answerers.append(_Answerer(Kept(branch, self._owner)))
        return [*self._answerers]

    async def join(self) -> None:
        """Close the branches."""
        if len(self._answerers) > 1:
            await self._steps.run(self._join)

    def _join(self) -> None:
        for each in self._answerers[1:]:  # those that still answer end together
            each.end_answer()
        del self._answerers[1:]
        self._branches.close()

    async def begin(
        self, answerer: _Answerer, request: Request, sampling: Sampling
    ) -> tuple[Generation, TokenScores]:
        """Begin an answer. If memory has no room for its prompt, wait for other requests to give some back."""
        tokenizer, budget = self._loaded.engine.tokenizer, self._budget
        return await self._with_memory(partial(answerer.begin, request, sampling, tokenizer, budget))

    def end_answers(self) -> None:
        """End all answers within one forward, and the wait for memory."""
        self._memory_came.set()
        for each in [*self._answerers]:
            each.end_answer()

    async def give_back(self, *, broken: bool = False) -> None:
        """``leave``, and wait for its end."""
        await self._steps.run(partial(self._end, broken=broken))

    def leave(self) -> None:
        """The last step: end the answer, and give the session back to the pool. The running step ends soon."""
        self._budget.cancel()
        self._steps.submit(partial(self._end, broken=False))

    def _end(self, *, broken: bool) -> None:
        with self._ending:
            if not self._answerers:
                return
            with ExitStack() as failed:
                failed.callback(self.first.kept.session.close)
                self._join()
                if not broken:
                    self.first.end()
                    failed.pop_all()
                    self._loaded.pool.give(self.first.kept)

    def _call_soon(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the event loop was closed
            self._loop.call_soon_threadsafe(call)


@asynccontextmanager
async def _session(
    request: Request, owner: str, loaded: LoadedEngine, budget: RequestBudget, turn: KeyTurn
) -> AsyncIterator[_Held]:
    """A session of the pool, which goes back unless it is broken. A cancelled call does not wait for that."""
    held = _Held(request, owner, loaded, budget, turn)
    try:
        await held.take()
        yield held
    except Exception as error:
        await held.give_back(broken=not isinstance(error, _OF_THE_REQUEST))
        raise
    except BaseException:
        held.leave()
        raise
    else:
        await held.give_back()


class TokenScores:
    """The tokens of one answer with their bytes, without the token that ends it, as OpenAI does."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), stop_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ends = ends_of(tokenizer, stop, stop_token_ids).ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # characters so far

    def of(self, tokens: Sequence[Token]) -> tuple[ScoredToken, ...]:
        return tuple(
            self._scored(self._bytes(each), each.logprob, self._others(each))
            for each in tokens
            if each.logprob is not None and each.id not in self._ends
        )

    def _others(self, token: Token) -> list[tuple[bytes, float]]:
        """The likeliest in its place, without those that spell no more than the prompt's healed end."""
        found = [(self._bytes(each), each.logprob or 0.0) for each in token.top]
        return [each for each in found if each[0] or not token.held]

    def _bytes(self, token: Token) -> bytes:
        return self._tokenizer.token_bytes(token.id)[token.held :]

    def _scored(self, data: bytes, logprob: float, top: Sequence[tuple[bytes, float]]) -> ScoredToken:
        offset = self._length
        self._length += len(self._decoder.decode(data))
        return ScoredToken(data, offset, logprob, tuple(top))


class _Parts:
    """What an answer's events say to the client of a request."""

    def __init__(self, request: Request, scores: TokenScores) -> None:
        self._request, self._scores = request, scores
        self._guessed = Guessed() if request.show_tokens else None
        self._round: tuple[int, int] | None = None  # not yet said
        self._later: tuple[Token, ...] = ()  # of the answer, in a round whose first text is thinking
        self._began: float | None = None  # to read the prompt

    def of(self, event: Event) -> Part:
        """What the event says; an empty part if nothing."""
        if isinstance(event, Text):
            return self._said(event)
        if isinstance(event, ToolCall):
            return Part(calls=(event,))
        if isinstance(event, Reading):
            return self._read(event)
        if self._guessed is None:
            return Part()
        before, self._round = self._round, None
        if isinstance(event, Round):
            self._round = event.record.proposed, event.record.accepted
        return Part(round=before)

    def _read(self, event: Reading) -> Part:
        if self._guessed is None and not self._request.show_progress:
            return Part()
        now = time.perf_counter()
        self._began = now if self._began is None else self._began
        return Part(reading=event, read_s=now - self._began)

    def _said(self, event: Text) -> Part:
        content = event.text if event.reasoning is None else ""
        tokens, self._later = (*self._later, *event.tokens), ()
        if event.reasoning is not None:
            ends = itertools.accumulate(len(token.text) for token in tokens)
            within = sum(end <= len(event.text) for end in ends)
            tokens, self._later = tokens[:within], tokens[within:]
        scored = self._scores.of(tokens)
        thought = event.reasoning is not None and bool(scored)
        part = Part(content, event.reasoning or "", scored, thought=thought)
        if self._guessed is None:
            return part
        before, self._round = self._round, None
        return replace(part, guessed=self._guessed.of(event), round=before)


@dataclass(frozen=True, slots=True)
class _Read:
    """A prompt that was read for several answers, of which the first has begun so. ``stats`` are those of reading."""

    stats: DecodeStats
    seconds: float

    def before(self, done: Done) -> Done:
        """The first answer's end: what was read, and for how long, is part of it."""
        first = done.stats.ttft_s
        after = None if first is None else first + self.seconds
        stats = replace(done.stats, cached_tokens=self.stats.cached_tokens, ttft_s=after)
        return replace(done, stats=stats)


class _Reading:
    """Tells a reader that an answer begins and how its prompt is read. It ends later."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def begin(self, index: int, prompt_tokens: int) -> None:
        await self._reader.begin(index, prompt_tokens)

    async def part(self, index: int, part: Part) -> None:
        await self._reader.part(index, part)

    async def end(self, index: int, done: Done) -> None:
        """Nothing: the answer has only begun."""


@dataclass(frozen=True, slots=True)
class _Answers:
    """The answers to one request, each with its sampling. ``reader`` and ``heard`` are those of ``decode``."""

    request: Request
    held: _Held
    samplings: Sequence[Sampling]
    reader: Reader
    heard: Callable[[Reading | Text], None]

    async def all(self) -> list[Done]:
        """Every answer, in the order of their indices."""
        choices, found = self.request.choices, list[Done]()
        for first in range(0, self.request.answers, choices):
            found += await self._to_one_prompt(range(first, first + choices))
        return found

    async def _to_one_prompt(self, indices: range) -> list[Done]:
        """The answers to one prompt. Where caches can be copied they share it, and are decoded in parallel.

        If one of them fails, those that have begun are completed, so that what was sent of them has an end. If the
        request fails, for example because its client left, all of them end.
        """
        held, first = self.held, indices[0]
        answerers, read = [held.first], None
        if (most := min(len(indices), held.places)) > 1:
            read = await self._read(first)
            answerers = await held.branch(most, self._longest(read.stats.prompt_tokens))
        waiting, found, errors = deque(indices), dict[int, Done](), list[EdgespecError]()

        async def answer(own: _Answerer) -> None:
            while waiting:
                index = waiting.popleft()
                request, begun = self.request.of(index), read if index == first else None
                try:
                    found[index] = await self._one(own, request, index, self.reader, begun)
                except EdgespecError as error:
                    errors.append(error)
                    waiting.clear()

        try:
            async with asyncio.TaskGroup() as together:
                for own in answerers:
                    together.create_task(answer(own))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        if errors:
            raise errors[0]
        await held.join()
        return [found[index] for index in indices]

    def _longest(self, prompt_tokens: int) -> int:
        """The tokens that a prompt and its answer may have together."""
        longest, most = self.held.first.kept.session.context_length, self.request.max_tokens
        return longest if most is None else min(longest, prompt_tokens + most)

    async def _read(self, index: int) -> _Read:
        """Read the prompt of the answers from ``index`` on."""
        check_ends(self.request.stop_token_ids, self.request.min_tokens, self.request.max_tokens)
        began = time.perf_counter()
        request = replace(self.request.of(index), max_tokens=0, min_tokens=None)
        done = await self._one(self.held.first, request, index, _Reading(self.reader))
        return _Read(done.stats, time.perf_counter() - began)

    async def _one(
        self, own: _Answerer, request: Request, index: int, reader: Reader, read: _Read | None = None
    ) -> Done:
        """One answer. If its prompt was ``read`` before, it has begun."""
        held = self.held
        generation, scores = await held.begin(own, request, self.samplings[index])
        held.turn.check()
        if read is None:
            await reader.begin(index, generation.prompt_tokens)
        parts, lines = _Parts(request, scores), Lines(request.indent, request.line_ms)
        has_call = False  # the only one that was asked for, behind which another one has come
        async for event in generation:
            if isinstance(event, Reading | Text):
                self.heard(event)
            if isinstance(event, ToolCall) and event.index and not request.parallel_tool_calls:
                has_call = True
                own.end_answer()
            part = Part() if has_call else parts.of(event)
            if request.suffix is not None and part.content:
                part = replace(part, content=lines.feed(part.content))
                if lines.ended:
                    own.end_answer()
            if part != Part():
                await reader.part(index, part)
            if isinstance(event, Done):
                held.turn.check()
                if has_call:
                    event = replace(event, finish_reason="stop", stop_text=None)
                elif lines.ended:
                    event = replace(event, finish_reason="length")
                elif event.finish_reason == "cancelled":  # not by the client, which would have ended this call
                    raise ClosedError("the answer was ended: the model is being freed")
                elif rest := lines.flush():
                    await reader.part(index, Part(rest))
                own.said(event.text)
                done = event if read is None else read.before(event)
                await reader.end(index, done)
                return done
        raise AssertionError("an answer ends with Done")


def _generation(request: Request, kept: Kept, sampling: Sampling, budget: RequestBudget) -> Generation:
    settings: dict[str, Any] = {
        "budget": budget,
        "max_tokens": request.max_tokens,
        "sampling": sampling,
        "stop": request.stop,
        "stop_token_ids": request.stop_token_ids,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "logprobs": request.logprobs,
        **({} if request.form is None else request.form.form.arguments),
    }
    if request.prompt is not None:
        settings |= {"suffix": request.suffix, "files": request.files, "heal": request.heal}
        return kept.session.generate(request.prompt, raw=True, **settings)
    settings |= {name: getattr(request, name) for name in ("tools", "tool_choice", "template_variables")}
    return kept.session.generate(messages=request.messages, keep_all=True, **settings)
