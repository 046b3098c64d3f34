"""Measures a loaded model on this machine: T(w), the cost of reading a prompt, width classes, contention.

Measurements are generators with steps of well under a second: ``edgespec calibrate`` runs them to the end, a chat
runs some steps between two answers.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import abc
from collections.abc import Callable, Collection, Generator, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, TypeVar

import numpy as np

from edgespec.calibration.self_check import self_check
from edgespec.calibration.width_probe import STEP_TOKENS, WidthProber, probe_tokens
from edgespec.errors import NoneAllowedError
from edgespec.files.checked import Range
from edgespec.interfaces.features import FeatureSequence, FollowingSequence
from edgespec.interfaces.model import (
    FrequentHeadSequence,
    MixtureSequence,
    Model,
    ModelFacts,
    SavableSequence,
    Sequence,
)
from edgespec.interfaces.rows import LogitsArray, Rows
from edgespec.planning.cost.acceptance import Acceptance
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import ContextCurves, Curve, DraftCost, ExpertTimes
from edgespec.planning.cost.widths import MOST_CONTEXT, POSITIONS, WidthProbe, probe_starts

# Timed widths: every width of a chain, then enough to show where the curve bends.
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32)

# A drafter's widths: one token at a time, two when it catches up after a round.
DRAFTER_WIDTHS = (1, 2, 4)

# A one-pass drafter's: it reads what the last round accepted and drafts up to eleven tokens in one forward.
ONE_PASS_WIDTHS = tuple(range(1, 13))

# Timed forwards a width: the lower quartile of five is the second fastest, which three interruptions do not change.
QUICK_REPETITIONS = 5
FULL_REPETITIONS = 9

# Plain forwards for a comparison of two settings: differences of 3 % decide.
PLAIN_REPETITIONS = 16

# Beyond the widths of chains a forward takes a quarter of a second, and two are enough for the curve.
_OFTEN_TIMED = 8
_SELDOM = 2

# Readings of a prompt: one takes as long as a dozen plain forwards.
_PROMPT_TURNS = 3

# Tokens of each answer on which drafter and target are compared, and the length of the chains counted in it.
AGREEMENT_TOKENS = 24
AGREEMENT_DEPTH = 4
# Most tokens of a drafter with another vocabulary for each of the target's. A choice: texts of most languages need
# fewer than two.
_MORE_TOKENS = 4

# Seconds for which both sides run in parallel, in this many turns: a user who types a prompt waits for one turn.
CONTENTION_S = 1.0
_CONTENTION_TURNS = 4

Clock = Callable[[], float]
T = TypeVar("T")


def sample_text() -> str:
    """A text of some hundred tokens, with a list, code and a second language."""
    return resources.files("edgespec.calibration").joinpath("sample.txt").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How much to measure. ``complete`` also bounds the differences of unstable widths, for near exactness.

    ``to_end``: widths are compared up to the end of the context, unless its length is known not to matter.
    """

    widths: tuple[int, ...] = WIDTHS
    repetitions: int = QUICK_REPETITIONS
    every_context: bool = False
    complete: bool = False
    to_end: bool = False


QUICK = Scope()
FULL = Scope(repetitions=FULL_REPETITIONS, every_context=True, complete=True, to_end=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTimes:
    """Times of a model in one setting: lower quartiles in seconds, by context length and width.

    ``prompt_token_s`` is the time of a prompt token, read ``STEP_TOKENS`` at a time. ``busy`` is the share of the
    processors that other programs used during the measurement, if too large. ``experts``: how many a forward of each
    width reads on average, empty for a model without; each of them takes ``expert_s``.
    """

    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    forward_s: tuple[tuple[float, ...], ...]
    prompt_token_s: Annotated[float, Range(0, above=True)]
    repetitions: Annotated[int, Range(1)]
    busy: Annotated[float, Range(0, 1)] = 0.0
    experts: tuple[float, ...] = ()
    expert_s: Annotated[float, Range(0)] = 0.0

    @property
    def curves(self) -> ContextCurves:
        """T(w) by context, without interruptions. Raises ValueError for numbers that no measurement gives.

        A forward of fewer rows, or after less text, cannot take longer than a larger one, since it could be padded.
        If it was measured as longer, another program interfered, and the shorter of the two times is used for both.
        """
        rows, later = [], (float("inf"),) * len(self.widths)
        for seconds in reversed(self.forward_s):
            row, wider = [], float("inf")
            for own, after in zip(reversed(seconds), reversed(later), strict=True):
                wider = min(own, after, wider)
                row.append(wider)
            later = tuple(reversed(row))
            rows.append(later)
        experts = None
        if self.experts:
            experts = ExpertTimes(widths=self.widths, read=self.experts, expert_s=self.expert_s)
        return ContextCurves(
            contexts=self.contexts,
            curves=tuple(Curve(widths=self.widths, forward_s=seconds) for seconds in reversed(rows)),
            experts=experts,
        )

    @property
    def draft_cost(self) -> DraftCost:
        """What drafting with this model costs, token by token."""
        curves = self.curves
        position_s = curves.position_s
        near_s = curves.curves[0].plain_s
        empty_s = max(near_s - position_s * curves.contexts[0], 0.1 * near_s)
        return DraftCost(token_s=empty_s, position_s=position_s, lag_token_s=self.prompt_token_s)

    def cost_for(self, drafter: ModelFacts) -> DraftCost:
        """What drafting with this model costs, in one forward if ``drafter`` is a one-pass drafter."""
        if drafter.mask_id is None:
            return self.draft_cost
        return DraftCost(one_pass=self.curves.curves[0], lag_token_s=self.prompt_token_s)


@dataclass(frozen=True, slots=True)
class _Forward:
    """A timed forward, and how many experts it read."""

    seconds: float
    experts: int


# By width, the timed forwards of one context; of a mixture also, under 0, forwards of one token in every row.
_Timed = dict[int, list[_Forward]]


def measure_target(
    model: Model,
    context_length: int,
    scope: Scope = QUICK,
    *,
    text: abc.Sequence[int] = (),
    clock: Clock = time.perf_counter,
) -> Generator[float, None, tuple[ModelTimes, WidthProbe]]:
    """T(w) and width classes, in steps; yields the fraction done. Raises what a forward raises.

    One walk through the contexts serves both: widths are compared at each context, and timed at the first and the
    last (at each, if the scope asks for that). Rows that are bit-equal by construction get a self-check instead, and
    their last context is not read but filled with zeros, so that it can be longer.

    ``text``: tokens of a text, for a mixture of experts. Of random tokens (empty) neighbours share fewer experts than
    of any text, and forwards of several rows take longer.
    """
    by_construction = model.facts.bit_equal_by_construction
    length = min(context_length, MOST_CONTEXT)
    starts = probe_starts(length, to_end=scope.to_end and not by_construction)
    timed = starts if scope.every_context else sorted({starts[0], starts[-1]})
    end = starts[-1] + POSITIONS
    widest = max(*scope.widths, POSITIONS)
    far = length - widest
    widths = tuple(width for width in scope.widths if width <= context_length)
    rows: list[_Timed] = []
    reached = 0  # comparing widths moves back and forth; progress does not
    tokens = list(itertools.islice(itertools.cycle(text), end)) or probe_tokens(end, model.facts.vocabulary_size)
    with closing(model.open(max(end + widest, length))) as sequence:
        filled = sequence if isinstance(sequence, SavableSequence) and by_construction and far > starts[-1] else None
        if filled is not None:
            timed = [*(timed if scope.every_context else timed[:1]), far]
        prober = WidthProber(sequence, tokens, complete=scope.complete)
        counting = sequence if model.facts.mixture is not None and isinstance(sequence, MixtureSequence) else None

        def time_widths(start: int, done: float) -> Generator[float, None, _Timed]:
            return _time_widths(sequence, tokens, start, widths, scope.repetitions, clock, done, counting)

        checked = None
        if by_construction:
            checked = yield from _without_progress(self_check(sequence, model.facts.vocabulary_size))
        for start in [start for start in timed if start in starts] if by_construction else starts:
            for _ in prober.read_to(start) if by_construction else prober.steps_at(start):
                reached = max(reached, min(sequence.length, end))
                yield reached / end
            if start in timed:
                rows.append((yield from time_widths(start, reached / end)))
        if filled is not None:
            _fill(filled, far)
            rows.append((yield from time_widths(far, 0.9)))
        prompt_s = yield from _time_prompt(sequence, tokens, clock)
    experts, expert_s = _expert_times(rows, widths) if counting is not None else ((), 0.0)
    times = ModelTimes(
        contexts=tuple(timed),
        widths=widths,
        forward_s=tuple(_typical_row(row, widths, experts, expert_s) for row in rows),
        prompt_token_s=statistics.median(prompt_s),
        repetitions=scope.repetitions,
        experts=experts,
        expert_s=expert_s,
    )
    return times, checked or prober.result()


def _without_progress(steps: Generator[float, None, T]) -> Generator[float, None, T]:
    """The same steps, without reporting progress."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        yield 0.0


def _fill(sequence: SavableSequence, length: int) -> None:
    """Fill the cache with zeros: a forward takes as long after any text."""
    count, size = sequence.part_sizes(length)
    sequence.rewind(0)
    if count:
        sequence.restore(itertools.repeat(bytes(size), count), length)
    else:  # a model that reads its target's cache computes nothing for tokens without scores
        sequence.forward([0] * length, 0)


def measure_drafter(
    model: Model, context_length: int, scope: Scope = QUICK, *, clock: Clock = time.perf_counter
) -> Generator[float, None, ModelTimes]:
    """What drafting with ``model`` costs, in steps; yields the fraction done. Raises what a forward raises."""
    start = probe_starts(context_length)[0]
    wanted = DRAFTER_WIDTHS if model.facts.mask_id is None else ONE_PASS_WIDTHS
    widths = tuple(width for width in wanted if start + width <= context_length)
    size = start + max(STEP_TOKENS, *widths)
    longest = min(context_length, model.facts.trained_context_length or context_length, MOST_CONTEXT)
    far, rows = longest - max(widths), list[tuple[float, ...]]()
    tokens = probe_tokens(size, model.facts.vocabulary_size)
    with closing(model.open(max(size, longest))) as sequence:
        if start:
            sequence.forward(tokens[:start], 0)
        yield 0.3
        timed = yield from _time_widths(sequence, tokens, start, widths, scope.repetitions, clock, 0.5)
        rows.append(_typical_row(timed, widths))
        if isinstance(sequence, SavableSequence) and far > start:
            _fill(sequence, far)
            timed = yield from _time_widths(sequence, tokens, far, widths, scope.repetitions, clock, 0.7)
            rows.append(_typical_row(timed, widths))
        yield 0.8
        prompt_s = yield from _time_prompt(sequence, tokens, clock)
    return ModelTimes(
        contexts=(start, far)[: len(rows)],
        widths=widths,
        forward_s=tuple(rows),
        prompt_token_s=statistics.median(prompt_s),
        repetitions=scope.repetitions,
    )


def time_plain(
    models: Collection[Model], context_tokens: int, repetitions: int, clock: Clock
) -> Generator[float, None, list[list[float]]]:
    """Seconds of ``repetitions`` width-1 forwards of each model, in steps; yields the fraction done.

    The models run alternately, so that a busy machine slows all of them equally. All read the same tokens, from the
    smallest vocabulary. The time includes picking the best token, as drafting does. Raises what a forward raises.
    """
    tokens = probe_tokens(context_tokens + 1, min(model.facts.vocabulary_size for model in models))
    samples: list[list[float]] = [[] for _ in models]
    with ExitStack() as stack:
        sequences = [stack.enter_context(closing(model.open(context_tokens + 1))) for model in models]
        for sequence in sequences:
            if context_tokens:
                sequence.forward(tokens[:context_tokens], 0)
            yield 0.0
        # The first turn is not counted: kernels and pages warm up.
        for turn in range(repetitions + 1):
            for sequence, kept in zip(sequences, samples, strict=True):
                sequence.rewind(context_tokens)
                before = clock()
                sequence.forward(tokens[context_tokens:], 1).argmax()
                if turn:
                    kept.append(clock() - before)
            yield turn / repetitions
    return samples


def measure_plain_ratio(
    own: Model, other: Model, context_length: int, *, clock: Clock = time.perf_counter
) -> Generator[float, None, float]:
    """T(1) of ``other`` over T(1) of ``own`` at the first context.

    The upper quartile of the ratios of all turns: another setting counts as faster only if three turns in four agree,
    because on a noisy machine any two settings sometimes differ by more than 3 %.
    """
    start = probe_starts(context_length)[0]
    own_s, other_s = yield from time_plain((own, other), start, PLAIN_REPETITIONS, clock)
    ratios = sorted(theirs / ours for ours, theirs in zip(own_s, other_s, strict=True))
    return ratios[(3 * (len(ratios) - 1) + 3) // 4]


def measure_prompt_ratio(
    own: Model, other: Model, *, clock: Clock = time.perf_counter
) -> Generator[float, None, float]:
    """Seconds of a prompt of ``STEP_TOKENS`` in ``other`` over those in ``own``: the median of a few turns."""
    tokens = probe_tokens(STEP_TOKENS, min(model.facts.vocabulary_size for model in (own, other)))
    with closing(own.open(STEP_TOKENS)) as ours, closing(other.open(STEP_TOKENS)) as theirs:
        ratios = []
        for turn in range(_PROMPT_TURNS + 1):
            own_s = _read_s(ours, tokens, clock)
            other_s = _read_s(theirs, tokens, clock)
            if turn:  # in the first one kernels and pages warm up
                ratios.append(other_s / own_s)
            yield turn / _PROMPT_TURNS
    return statistics.median(ratios)


def _read_s(sequence: Sequence, tokens: list[int], clock: Clock) -> float:
    sequence.rewind(0)
    before = clock()
    sequence.forward(tokens, 0)
    return clock() - before


def _time_widths(
    sequence: Sequence,
    tokens: list[int],
    start: int,
    widths: tuple[int, ...],
    repetitions: int,
    clock: Clock,
    done: float,
    counting: MixtureSequence | None = None,
) -> Generator[float, None, _Timed]:
    """Forwards of each width after ``start`` tokens, timed alternately. Yields ``done``.

    ``counting``: the Sequence counts experts. Then each turn has other tokens of the text, and one forward has the
    same token in every row. These rows share most experts: only their number differs from a forward of that width.
    """
    timed: _Timed = {width: [] for width in widths}
    compared, stretch = (_compared_width(widths), max(widths)) if counting is not None else (0, 0)
    longer = list(itertools.islice(itertools.cycle(tokens), start + max(widths) + repetitions * stretch))
    # The first turn is not counted: kernels and pages warm up.
    for turn in range(repetitions + 1):
        first = start + max(0, turn - 1) * stretch
        for width in (*widths, 0) if compared else widths:
            if width > _OFTEN_TIMED and not 1 <= turn <= _SELDOM:
                continue
            sequence.rewind(min(start, sequence.length))
            fed = longer[first : first + width] if width else [longer[first]] * compared
            before = clock()
            sequence.forward(fed, len(fed)).argmax()  # as in verification
            if turn:
                seconds = clock() - before
                read = 0 if counting is None else counting.experts_read
                timed.setdefault(width, []).append(_Forward(seconds, read))
            yield done
    return timed


def _compared_width(widths: tuple[int, ...]) -> int:
    """The width at which texts are compared with one token: the widest timed often, 0 if that is a single row."""
    widest = max(width for width in widths if width <= _OFTEN_TIMED)
    return widest if widest > 1 else 0


def _expert_times(contexts: abc.Sequence[_Timed], widths: tuple[int, ...]) -> tuple[tuple[float, ...], float]:
    """How many experts a forward of each width reads on average after the first context, and the seconds of each.

    The seconds are those by which a text's rows take longer than as many with one token, for each expert that they
    read more: the median of all turns. No forward takes less time than its experts.
    """
    near = contexts[0]
    read = itertools.accumulate((statistics.fmean(each.experts for each in near[width]) for width in widths), max)
    compared = _compared_width(widths)
    pairs = [pair for timed in contexts for pair in zip(timed[compared], timed[0], strict=True)] if compared else []
    found = [(a.seconds - b.seconds) / (a.experts - b.experts) for a, b in pairs if a.experts > b.experts]
    most = min(each.seconds / each.experts for timed in contexts for width in widths for each in timed[width])
    return tuple(read), min(max(0.0, statistics.median(found)), most) if found else 0.0


def _typical_row(
    timed: _Timed, widths: tuple[int, ...], experts: tuple[float, ...] = (), expert_s: float = 0.0
) -> tuple[float, ...]:
    """Typical seconds of a forward of each width, which reads that many experts."""
    read = experts or (0.0,) * len(widths)
    return tuple(
        expert_s * usual + _typical([each.seconds - expert_s * each.experts for each in timed[width]])
        for width, usual in zip(widths, read, strict=True)
    )


def _typical(samples: list[float]) -> float:
    """The lower quartile: other programs only make a forward slower."""
    return sorted(samples)[(len(samples) - 1) // 4]


def _time_prompt(sequence: Sequence, tokens: list[int], clock: Clock) -> Generator[float, None, list[float]]:
    """Seconds per token of ``STEP_TOKENS`` (or all) read in one forward, a few times."""
    size = min(STEP_TOKENS, sequence.context_length, len(tokens))
    samples = []
    for _ in range(_PROMPT_TURNS):
        samples.append(_read_s(sequence, tokens[:size], clock) / size)
        yield 1.0
    return samples


def measure_contention(
    target: Model, drafter: Model, *, seconds: float = CONTENTION_S, clock: Clock = time.perf_counter
) -> Generator[float, None, Contention]:
    """How much target and drafter slow each other down, each decoding plainly on its own thread.

    Turns alone and together alternate, so that the load of other programs cancels out.
    """
    models, turn_s = (target, drafter), seconds / _CONTENTION_TURNS
    alone: tuple[list[float], ...] = ([], [])
    together: tuple[list[float], ...] = ([], [])
    with (
        closing(target.open(STEP_TOKENS * 4)) as target_sequence,
        closing(drafter.open(STEP_TOKENS * 4)) as drafter_sequence,
    ):
        sequences = (target_sequence, drafter_sequence)
        for turn in range(_CONTENTION_TURNS):
            for model, sequence, samples in zip(models, sequences, alone, strict=True):
                own, none = _Side(), _Side(begun=True, enough=True)
                samples += _decode_for(sequence, model.facts.vocabulary_size, turn_s / 2, clock, own, none).result()
                yield turn / _CONTENTION_TURNS
            sides = (_Side(), _Side())
            both = [
                _decode_for(sequence, model.facts.vocabulary_size, turn_s, clock, own, other)
                for model, sequence, own, other in zip(models, sequences, sides, reversed(sides), strict=True)
            ]
            for job, samples in zip(both, together, strict=True):
                samples += job.result()
            yield (turn + 1) / _CONTENTION_TURNS
    factors = [
        max(1.0, statistics.median(slow) / statistics.median(fast))
        for slow, fast in zip(together, alone, strict=True)
    ]
    return Contention(target_factor=factors[0], drafter_factor=factors[1])


def measure_agreement(
    target: Model, drafter: Model, prompts: Iterable[list[int]], *, tokens: int = AGREEMENT_TOKENS
) -> Generator[float, None, Acceptance]:
    """How often the drafter's best token is the target's, greedily, by position and confidence: a first prior.

    The target writes ``tokens`` after each prompt. The drafter then reads prompt and answer in one forward, and is
    right at a position exactly if a chain that reached it would have been. A one-pass drafter guesses from each
    position of the answer on instead, since its later guesses do not see the earlier ones; and so does a drafter that
    follows the target's hidden rows, as the target writes.
    """
    acceptance = Acceptance()
    for prompt in prompts:
        length = len(prompt) + tokens
        # With another vocabulary the drafter's context counts its own tokens, of which a text has more.
        room = max(length, min(_MORE_TOKENS * length, drafter.facts.trained_context_length))
        with closing(target.open(length)) as writing, closing(drafter.open(room)) as reading:
            if isinstance(writing, FeatureSequence) and isinstance(reading, FollowingSequence):
                scored = drafter.facts.borrows
                yield from _learn_following(acceptance, writing, reading, prompt, tokens, scored=scored)
                continue
            answer = [writing.forward(prompt, 1).argmax_row(0)]
            while len(answer) < tokens:
                answer.append(writing.forward(answer[-1:], 1).argmax_row(0))
                yield len(answer) / tokens
            if isinstance(reading, FrequentHeadSequence):
                reading.score_frequent(prompt)  # the prompt's tokens; the answer's follow one by one
            # The last prompt token's scores predict the first token of the answer.
            if len(prompt) > 1:
                reading.forward(prompt[:-1], 0)
            mask = drafter.facts.mask_id
            if mask is not None:
                yield from _learn_at_once(acceptance, reading, mask, [prompt[-1], *answer])
                continue
            rows = reading.forward([prompt[-1], *answer[:-1]], tokens)
            hits = [_is_best(rows, index, token) for index, token in enumerate(answer)]
            sure = [_confidence(rows.logits(index)) for index in range(tokens)]
        for start in range(tokens - AGREEMENT_DEPTH + 1):
            window = hits[start : start + AGREEMENT_DEPTH]
            known = window.index(False) + 1 if False in window else len(window)
            acceptance.learn(sure[start : start + known], window[:known])
        yield 1.0
    return acceptance


def _learn_at_once(
    acceptance: Acceptance, reading: Sequence, mask: int, text: list[int]
) -> Generator[float, None, None]:
    """Let a one-pass drafter, which has read all before ``text``, guess ahead from each of its tokens."""
    for position in range(len(text) - AGREEMENT_DEPTH):
        rows = reading.forward([text[position], *[mask] * (AGREEMENT_DEPTH - 1)], AGREEMENT_DEPTH)
        hits = [rows.argmax_row(index) == text[position + 1 + index] for index in range(AGREEMENT_DEPTH)]
        sure = [_confidence(rows.logits(index)) for index in range(AGREEMENT_DEPTH)]
        known = hits.index(False) + 1 if False in hits else len(hits)
        acceptance.learn(sure[:known], hits[:known])
        reading.rewind(reading.length - (AGREEMENT_DEPTH - 1))
        yield position / len(text)


def _learn_following(
    acceptance: Acceptance,
    writing: FeatureSequence,
    reading: FollowingSequence,
    prompt: list[int],
    tokens: int,
    *,
    scored: bool,
) -> Generator[float, None, None]:
    """Let the target write, and the drafter that follows it guess ahead from each token of the answer."""
    features, text, guessed = writing.keep_features(scored=scored), list(prompt), list[list[tuple[int, float]]]()
    reading.follow(features, writing)
    text.append(writing.forward(prompt, 1).argmax_row(0))
    begins = features.begins
    reading.begin(begins)
    while len(text) < len(prompt) + tokens:
        guesses, unread = list[tuple[int, float]](), text[begins + reading.length :]
        for _ in range(AGREEMENT_DEPTH):
            rows = reading.forward(unread, 1)
            guesses.append((rows.argmax_row(0), _confidence(rows.logits(0))))
            unread = [guesses[-1][0]]
        guessed.append(guesses)
        reading.rewind(len(text) - begins)
        text.append(writing.forward(text[-1:], 1).argmax_row(0))
        yield (len(text) - len(prompt)) / tokens
    for place, guesses in enumerate(guessed, len(prompt) + 1):
        hits = [guess == token for (guess, _), token in zip(guesses, text[place:], strict=False)]
        known = hits.index(False) + 1 if False in hits else len(hits)
        acceptance.learn([sure for _, sure in guesses[:known]], hits[:known])


def _is_best(rows: Rows, index: int, token: int) -> bool:
    """Whether the token is the drafter's best; no token of the target's may be."""
    try:
        return rows.argmax_row(index) == token
    except NoneAllowedError:
        return False


def _confidence(logits: LogitsArray) -> float:
    """The highest probability of softmax(logits); 0.0 if a score is NaN or infinite, which rejects any draft."""
    best = logits.max()
    return float(1.0 / np.exp(logits - best).sum()) if np.isfinite(best) else 0.0


@dataclass(slots=True)
class _Side:
    """How far one of two models is that decode at the same time."""

    begun: bool = False
    enough: bool = False
    left: bool = False


def _decode_for(
    sequence: Sequence, vocabulary_size: int, seconds: float, clock: Clock, own: _Side, other: _Side
) -> Future[list[float]]:
    """Seconds of each width-1 forward, for ``seconds`` seconds or longer, on the sequence's own thread.

    Only forwards during which the ``other`` decoded as well are kept, and both continue until each has one. One of
    the target's may take as long as many of the drafter's.
    """
    token = probe_tokens(1, vocabulary_size)

    def job() -> list[float]:
        samples: list[float] = []
        try:
            sequence.rewind(0)
            sequence.forward(token, 1)  # not counted: kernels and pages warm up
            own.begun, end = True, clock() + seconds
            while not other.left and not (own.enough and other.enough):
                if sequence.length >= sequence.context_length:
                    sequence.rewind(0)
                both, before = other.begun, clock()
                sequence.forward(token, 1)
                after = clock()
                if both and not other.left:
                    samples.append(after - before)
                own.enough = bool(samples) and after >= end
        finally:
            own.left = True
        return samples

    return sequence.submit(job)
