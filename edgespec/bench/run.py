"""Run a suite: the arms answer every prompt alternately, and each answer is compared with plain decoding's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace

from edgespec.bench import LEAST_PASSES
from edgespec.bench.arms import AGAIN, PLAIN, Arm
from edgespec.bench.statistics import abba, shuffled
from edgespec.bench.suite import Prompt
from edgespec.decoding.round_base import DecodeStats
from edgespec.decoding.sampling import Sampling
from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Round
from edgespec.engine.session import Session
from edgespec.errors import CancelledError, EdgespecError, MemoryLimitError, PromptTooLongError
from edgespec.interfaces.policy import RoundRecord

# Up to this number, each prompt has sessions, which hold its caches until the run ends: more than "quick" has.
MOST_KEPT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of one arm. ``ttft_s`` is None if the prompt was already cached; ``turn`` pairs the arms.

    ``rounds`` are the answer's rounds, in order.
    """

    prompt_id: str
    category: str
    arm: str
    turn: int
    prompt_tokens: int
    tokens: int
    decode_s: float
    ttft_s: float | None
    identical: bool
    rounds: tuple[RoundRecord, ...]
    stats: DecodeStats

    @property
    def tokens_per_s(self) -> float | None:
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s > 0 else None

    @property
    def request_s(self) -> float | None:
        """Seconds from the request to the last token; None if the prompt was cached."""
        return None if self.ttft_s is None else self.ttft_s + self.decode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """``passes`` ABBA passes with answers of ``max_tokens``; ``cold``: the prompt is read for every answer.

    Every answer has the same sampling, so that the answers of one prompt share their noise; ``seed`` decides the
    order. ``rest_s``: seconds before each answer, so that threads of another runtime fall asleep.
    """

    passes: int = LEAST_PASSES
    max_tokens: int = 96
    cold: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    rest_s: float = 0.0


Progress = Callable[[Answer, int, int], None]


def run_passes(
    engine: Engine,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    settings: RunSettings,
    *,
    first_turn: int = 0,
    on_answer: Progress | None = None,
    stop: threading.Event | None = None,
) -> list[Answer]:
    """Every arm's answers to every prompt.

    Raises PromptTooLongError before anything is decoded, CancelledError once ``stop`` is set, and what generating
    raises.

    Within a pass the arms answer each prompt in the order A B B A. Before the first the prompt is answered plainly
    once, uncounted, which warms up the machine and gives the replay drafters their script. Unless the run is cold,
    the drafter is loaded and every arm reads the prompt first, so that its answers find the prompt in the caches of
    target and drafter, as the next answer of a conversation does. Few prompts are read once, as each has sessions.
    """
    if not settings.cold and any(arm.drafts_with_model for arm in arms):
        with suppress(EdgespecError):  # the answers are then plain and state the reason
            engine.load_drafter()
    names = [arm.name for arm in arms]
    encoded = {prompt.id: _encoded(engine, prompt) for prompt in prompts}
    raw = not engine.has_chat_template  # a model without a chat template continues the prompt
    answers: list[Answer] = []
    total = settings.passes * len(prompts) * 2 * len(names)
    with closing(_Prompts(arms, settings, raw=raw, keeps=len(prompts) <= MOST_KEPT)) as known:
        for number in range(settings.passes):
            for position, prompt in enumerate(shuffled(prompts, settings.seed + number)):
                own, reference = known.read(prompt)
                tokens = [*encoded[prompt.id], *reference.token_ids]
                seen = dict.fromkeys(names, 0)
                for name in abba(names, 1, settings.seed + number + position):
                    if stop is not None and stop.is_set():
                        raise CancelledError("the benchmark was interrupted")
                    arm = own[name]
                    arm.script.tokens = tokens
                    if settings.rest_s:
                        time.sleep(settings.rest_s)
                    done, rounds = _answer(arm, prompt, settings, raw=raw, cold=settings.cold)
                    answer = Answer(
                        prompt_id=prompt.id,
                        category=prompt.category,
                        arm=name,
                        turn=first_turn + 2 * number + seen[name],
                        prompt_tokens=done.stats.prompt_tokens,
                        tokens=done.stats.emitted_tokens,
                        decode_s=done.stats.decode_s or 0.0,
                        ttft_s=done.stats.ttft_s if settings.cold else None,
                        identical=done.token_ids == reference.token_ids,
                        rounds=rounds,
                        stats=done.stats,
                    )
                    seen[name] += 1
                    answers.append(answer)
                    if on_answer is not None:
                        on_answer(answer, len(answers), total)
    return answers


class _Prompts:
    """Has prompts answered plainly and, unless the run is cold, read by every arm.

    ``keeps``: each prompt has its own sessions if all arms fork, and so is read once.
    """

    def __init__(self, arms: Sequence[Arm], settings: RunSettings, *, raw: bool, keeps: bool) -> None:
        self._arms, self._settings, self._raw = arms, settings, raw
        self._keeps = keeps and not settings.cold and all(arm.forks for arm in arms)
        self._kept: dict[str, tuple[dict[str, Arm], Done]] = {}
        self._opened: list[Session] = []

    def read(self, prompt: Prompt) -> tuple[dict[str, Arm], Done]:
        """The arms with their sessions for this prompt, and plain decoding's answer."""
        if prompt.id in self._kept:
            return self._kept[prompt.id]
        arms = {arm.name: arm for arm in self._arms}
        plain = arms[PLAIN] = self._own(arms[PLAIN])
        reference, _ = _answer(plain, prompt, self._settings, raw=self._raw, cold=False)
        for arm in self._arms:
            if arm.name != PLAIN:
                arms[arm.name] = self._own(arm, like=plain if arm.name == AGAIN else arm)
        if not self._settings.cold:
            # So that no arm's first answer directly follows the reading of the prompt.
            for arm in arms.values():
                _answer(arm, prompt, replace(self._settings, max_tokens=1), raw=self._raw, cold=False)
                for reading in arm.session.read_ahead():
                    reading.exception()
        if self._keeps:
            self._kept[prompt.id] = arms, reference
        return arms, reference

    def _own(self, arm: Arm, like: Arm | None = None) -> Arm:
        """The arm with a session for one prompt, whose cache begins as that of ``like``."""
        if not self._keeps:
            return arm
        try:
            session = (like or arm).session.branch()
        except MemoryLimitError:
            self._keeps = False
            return arm
        self._opened.append(session)
        return replace(arm, session=session)

    def close(self) -> None:
        """Close the sessions of the prompts."""
        for session in self._opened:
            session.close()


def _encoded(engine: Engine, prompt: Prompt) -> list[int]:
    tokens = engine.pair.prompts.request_tokens(prompt.prompt)
    if len(tokens) >= engine.plan.context_length:
        raise PromptTooLongError(
            f"the prompt {prompt.id} has {len(tokens)} tokens and the context holds {engine.plan.context_length}",
            hint="leave it out or use a larger context (--context)",
        )
    return tokens


def _answer(
    arm: Arm, prompt: Prompt, settings: RunSettings, *, raw: bool, cold: bool
) -> tuple[Done, tuple[RoundRecord, ...]]:
    session, longest = arm.session, prompt.longest(settings.max_tokens)
    session.clear(keep_cache=not cold)
    return read_answer(session.generate(prompt.prompt, max_tokens=longest, sampling=settings.sampling, raw=raw))


def read_answer(generation: Generation) -> tuple[Done, tuple[RoundRecord, ...]]:
    """Read a whole answer: its end, and its rounds. Raises CancelledError for one that was cancelled or closed."""
    with generation:
        events = list(generation)
    done = events[-1]
    assert isinstance(done, Done)  # a generation that does not raise ends with Done
    if done.finish_reason == "cancelled":  # its tokens and times are those of another answer
        raise CancelledError("the answer was cancelled before it was complete")
    return done, tuple(event.record for event in events if isinstance(event, Round))
