"""The base of all decoding loops: history and limits, checking of proposals, and a round's commit and statistics.

Everything works on token ids. A round is a transaction: if it raises, the target's cache and the history are back at
the last committed token. A proposal is untrusted: malformed tokens are cut off and counted before any use.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from edgespec.decoding.constraint import Healing
from edgespec.decoding.logprobs import TokenLogprob, token_logprob
from edgespec.decoding.sampling import Chooser
from edgespec.decoding.verify import Verdict, verify_matching, verify_rejection
from edgespec.errors import ConstraintError, EdgespecError, NonFiniteLogitsError, PromptTooLongError
from edgespec.files.checked import ascending
from edgespec.interfaces.counted_text import MOST_NODES, CountedText
from edgespec.interfaces.drafting import Proposal
from edgespec.interfaces.drawing import UintArray
from edgespec.interfaces.model import (
    ALONE,
    PREFILL_CHUNK_TOKENS,
    BatchedSequence,
    Company,
    MappedSequence,
    MixtureSequence,
    Sequence as TokenSequence,
)
from edgespec.interfaces.policy import AnswerPolicy, RoundRecord
from edgespec.interfaces.rows import Distribution, Rows

FinishReason = Literal["stop", "length"]

# Errors of a row from which no token can be chosen. Behind accepted tokens they leave a verdict open: plain decoding
# emits those tokens, which may end the answer, before it comes to that row. The next round begins there.
UNCHOOSABLE = (ConstraintError, NonFiniteLogitsError)

# Hears how many tokens of the prompt are read, of how many that are not cached, before each chunk of it.
OnReading = Callable[[int, int], None]


def unheard(tokens: int, of: int) -> None:
    """The default: nothing is done with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result of one forward: ``tokens`` to emit, and ``record`` unless it was the prefill.

    ``guessed_by`` names for each token the drafter that proposed it, or None if the token is the target's own: a
    correction, a bonus, the prefill's. ``finish`` is ``stop`` if the last token is one of the stop ids, ``length`` if
    the budget or the context is used up, else None. ``logprobs`` has an entry for each token, if they were asked for.
    The first ``held`` bytes of the first token are the prompt's.
    """

    tokens: tuple[int, ...]
    guessed_by: tuple[str | None, ...]
    record: RoundRecord | None
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()
    held: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """``max_tokens`` to emit at most (None: until the context is full), or 0 to read the prompt alone, and
    ``depth_cap`` tokens of a chain at most.

    ``depth_cap`` also bounds the paths of a tree, which may have more nodes: the depth policy says how many.
    Nothing is proposed that would make a forward end beyond ``exact_length`` tokens, the longest context at which the
    target's widths were compared (None: widths are bit-equal at any length). ``logprobs``: how many of the likeliest
    tokens each emitted token's log-probability is reported with (None: no log-probabilities). ``healing``: the end of
    the prompt, which is not in the history and is spelled again; those of its tokens that go no further join it.
    """

    max_tokens: int | None
    depth_cap: int
    vocabulary_size: int
    stop_ids: frozenset[int] = frozenset()
    exact_length: int | None = None
    logprobs: int | None = None
    healing: Healing | None = None


class Rounds(ABC):
    """Decodes after ``history``, and extends it with committed tokens only.

    On entry the target's cache must hold a prefix of ``history``. Iterate ``steps()``; leaving the iteration at
    any point leaves cache and history consistent.
    """

    def __init__(
        self,
        target: TokenSequence,
        depth: AnswerPolicy,
        chooser: Chooser,
        history: list[int],
        limits: LoopLimits,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target = target
        self._batched_target = target if isinstance(target, BatchedSequence) else None
        self._mixture_target = target if isinstance(target, MixtureSequence) else None
        self._depth = depth
        self._chooser = chooser
        self._history = history
        self._text = CountedText(history)  # plus the tokens assumed to follow
        self._limits = limits
        self._clock = clock
        self._emitted = 0

    def steps(self, reading: OnReading = unheard) -> Generator[Step, None, None]:
        """The prefill's token, then one Step a round until the answer is finished; none without a token to emit."""
        if self._limits.max_tokens == 0:
            self._read(reading)
            return
        yield (step := self._prefill(reading))
        while step.finish is None:
            yield (step := self._round())

    @abstractmethod
    def _round(self) -> Step:
        """Commit at least one token, or raise and change nothing."""

    def _prefill(self, reading: OnReading = unheard) -> Step:
        started = self._clock()
        self._read(reading)
        return self._first(started)

    def _read(self, reading: OnReading) -> None:
        """Read the prompt but for its last token, as far as the cache does not hold it."""
        history, target = self._history, self._target
        if len(history) >= target.context_length:
            raise PromptTooLongError(
                f"the prompt has {len(history)} tokens and the context holds {target.context_length}, "
                "with room for at least one answer token",
                hint="shorten the prompt or use a larger context (--context)",
            )
        if isinstance(target, MappedSequence):
            target.check_file()
        # The last token is always fed alone, at width 1, even if it was cached: a repeated prompt, which is wholly
        # cached, then begins its answer as it did the first time.
        target.rewind(min(target.length, len(history) - 1))
        cached = target.length
        for start in range(cached, len(history) - 1, PREFILL_CHUNK_TOKENS):
            reading(start - cached, len(history) - cached)
            target.forward(history[start : min(start + PREFILL_CHUNK_TOKENS, len(history) - 1)], 0)

    def _first(self, started: float) -> Step:
        """The first token, behind the tokens that spell the prompt's end again; reading began at ``started``."""
        healing, clock, done = self._limits.healing, self._clock, 0
        while True:
            read = clock()
            rows = self._target.forward(self._history[-1:], 1)
            self._chooser.begins = len(self._history)
            mask = None if healing is None else healing.mask(done)
            token, held = self._chooser.target_token(rows, 0, self._assuming(()), mask), 0
            if healing is None or mask is None:
                break
            before = done
            done, beyond = healing.spelled(before, token)
            if beyond:
                held = done - before
                break
            self._assuming([token])
            self._history.append(token)
        first_s = clock() - read - self._waited_s()
        self._depth.began(read - started, first_s, self._company())
        step = self._commit([token], None, [], self._logprobs(rows, [0], [token], mask))
        return replace(step, held=held)

    def _company(self) -> Company:
        """The other answers in the target's last forward."""
        return ALONE if self._batched_target is None else self._batched_target.company

    def _waited_s(self) -> float:
        """Seconds that the target's last forward waited for those of other answers."""
        return 0.0 if self._batched_target is None else self._batched_target.waited_s

    def _experts(self) -> int:
        """How many experts the target's last forward read."""
        return 0 if self._mixture_target is None else self._mixture_target.experts_read

    def _depth_limit(self) -> int:
        """The most tokens to propose: within the depth cap, the exact length, the budget and the context."""
        exact = self._limits.exact_length
        cap = self._limits.depth_cap if exact is None else min(self._limits.depth_cap, exact - len(self._history))
        return max(0, min(cap, self._depth_room(), MOST_NODES))

    def _node_limit(self) -> int:
        """The most nodes of a tree: a forward scores them all, within the exact length and the context."""
        length = min(self._target.context_length, self._limits.exact_length or self._target.context_length)
        return min(MOST_NODES, length - len(self._history))

    def _depth_room(self) -> int:
        """Draft tokens for which there is room, next to the token that follows them; negative if there is none."""
        room = self._target.context_length - len(self._history) - 1
        most = self._limits.max_tokens
        return room if most is None else min(room, most - self._emitted - 1)

    def _verify(
        self, draft: Sequence[int], probs: Sequence[Distribution | None], rows: Rows, *, bonus: bool = True
    ) -> Verdict:
        """Compare ``draft`` with the rows after the history; ``bonus``: there is a row after the whole draft."""
        chooser, base, accepted = self._chooser, len(self._history), 0

        def behind(index: int) -> CountedText:
            nonlocal accepted
            accepted = index
            return self._assuming(draft[:index])

        try:
            if not chooser.uses_rejection:
                return verify_matching(draft, lambda i: chooser.target_token(rows, i, behind(i)), bonus=bonus)
            vocabulary_size = self._limits.vocabulary_size
            return verify_rejection(
                draft,
                [None if own is None else own.normalised().dense(vocabulary_size) for own in probs],
                lambda i: chooser.distribution(rows, i, behind(i)).dense(vocabulary_size),
                [chooser.accept_uniform(base + i) for i in range(len(draft))],
                lambda own, i: chooser.draw_dense(own, base + i),
                bonus=bonus,
            )
        except UNCHOOSABLE:
            if not accepted:
                raise
            return Verdict(accepted, None, "open")

    def _logprobs(
        self, rows: Rows, indices: Sequence[int], tokens: Sequence[int], mask: UintArray | None = None
    ) -> tuple[TokenLogprob, ...]:
        """The log-probability of each token in its row, if asked for; the rows must still be valid.

        ``mask`` as in ``Chooser.allowed_scores``.
        """
        top, found = self._limits.logprobs, list[TokenLogprob]()
        if top is None:
            return ()
        for count, (index, token) in enumerate(zip(indices, tokens, strict=True)):
            scores = self._chooser.allowed_scores(rows, index, self._assuming(tokens[:count]), mask)
            found.append(token_logprob(scores, token, top))
        return tuple(found)

    def _assuming(self, tokens: Sequence[int]) -> CountedText:
        """The history followed by ``tokens``; valid until the next call."""
        self._text.cut(len(self._history))
        self._text.extend(tokens)
        return self._text

    def _until_stop(self, tokens: list[int]) -> list[int]:
        for index, token in enumerate(tokens):
            if token in self._limits.stop_ids:
                return tokens[: index + 1]
        return tokens

    def _roll_back(self) -> None:
        """Remove the tokens of a failed round from the cache."""
        # If the cache cannot rewind, the error that broke it is already being raised.
        with contextlib.suppress(EdgespecError):
            self._target.rewind(min(self._target.length, len(self._history) - 1))

    def _commit(
        self,
        tokens: list[int],
        record: RoundRecord | None,
        guessed_by: Sequence[str],
        logprobs: tuple[TokenLogprob, ...],
    ) -> Step:
        """``guessed_by`` names who proposed each of the leading tokens; the rest are the target's own."""
        self._assuming(tokens)
        self._history.extend(tokens)
        self._emitted += len(tokens)
        finish: FinishReason | None = None
        if tokens[-1] in self._limits.stop_ids:
            finish = "stop"
        elif self._depth_room() < 0:
            finish = "length"
        own = (None,) * (len(tokens) - len(guessed_by))
        return Step(
            tokens=tuple(tokens), guessed_by=(*guessed_by, *own), record=record, finish=finish, logprobs=logprobs
        )


# Tolerance for the sum of a proposal's probabilities (DESIGN.md): loose enough for float32 drafters over large
# vocabularies.
SUM_TOLERANCE = 1e-4


def valid_length(proposal: Proposal, vocabulary_size: int, *, needs_probs: bool, most_depth: int = 0) -> int:
    """Number of leading tokens that are well-formed.

    A token must be an id of the target's vocabulary. Its distribution, if given, must be finite, within (0, 1], sum
    to one, lie inside the vocabulary and contain the token. Distributions are only checked with ``needs_probs``, and
    never for a tree. Each token of a tree must follow an earlier one, at most ``most_depth`` tokens after the text
    (0: trees cannot be verified).
    """
    draft_probs, parents = proposal.draft_probs, proposal.parents
    if parents is not None:
        if not most_depth or len(parents) != len(proposal.tokens):
            return 0  # verifying a tree as a chain would be wrong
        needs_probs = False
    levels: list[int] = []
    if needs_probs and draft_probs is not None and len(draft_probs) != len(proposal.tokens):
        return 0
    for index, token in enumerate(proposal.tokens):
        if not _is_id(token, vocabulary_size):
            return index
        if parents is not None:
            if not (type(parents[index]) is int and -1 <= parents[index] < index):
                return index
            levels.append(1 if parents[index] < 0 else levels[parents[index]] + 1)
            if levels[-1] > most_depth:
                return index
        if needs_probs and draft_probs is not None:
            own = draft_probs[index]
            if own is not None and not _well_formed(own, int(token), vocabulary_size):
                return index
    return len(proposal.tokens)


def _well_formed(distribution: Distribution, token: int, vocabulary_size: int) -> bool:
    ids, probs = distribution.ids, distribution.probs
    if ids.dtype.kind != "i" or ids.ndim != 1 or ids.shape != probs.shape or not len(ids):
        return False
    if ids[0] < 0 or ids[-1] >= vocabulary_size or not ascending(ids):
        return False
    # Written so that a NaN fails each comparison. Probabilities above one are refused: acceptance would always reject
    # the token while the residual removes its mass, so the token would never be emitted.
    if not ((probs > 0) & (probs <= 1)).all() or not abs(float(probs.sum()) - 1) <= SUM_TOLERANCE:
        return False
    index = int(np.searchsorted(ids, token))
    return index < len(ids) and int(ids[index]) == token


def _is_id(token: Any, vocabulary_size: int) -> bool:
    is_id = isinstance(token, int | np.integer) and not isinstance(token, bool)
    return is_id and bool(0 <= token < vocabulary_size)


def first_chain(proposal: Proposal) -> Proposal:
    """The leading tokens of a tree that form a chain, as a chain."""
    parents = proposal.parents
    if parents is None:
        return proposal
    length = next((index for index, parent in enumerate(parents) if parent != index - 1), len(parents))
    return replace(proposal.cut(length), parents=None)


def height(proposal: Proposal) -> int:
    """Tokens on the longest path of a tree; the length of a chain."""
    if proposal.parents is None:
        return len(proposal.tokens)
    heights: list[int] = []
    for parent in proposal.parents:
        heights.append(1 if parent < 0 else heights[parent] + 1)
    return max(heights, default=0)


@dataclass(slots=True, kw_only=True)
class DecodeStats:
    """Statistics of one answer. The token sampled from the prefill belongs to no round.

    ``cached_tokens`` of the ``prompt_tokens`` were still in the cache. ``guessed_tokens`` of the ``emitted_tokens``
    were proposed by a drafter; ``accepted`` may be more, since a stop string drops accepted tokens behind it.
    ``reasoning_tokens`` of them are thinking and its marks.
    ``ttft_s`` runs from the request to the first token, ``decode_s`` from there to the last; both are None
    without such a token. ``guessing_rounds`` are the rounds with guesses or a busy drafter; ``guessing_s`` is their
    whole time, plus the drafting time of all other rounds.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    emitted_tokens: int = 0
    guessed_tokens: int = 0
    reasoning_tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    evaluated: int = 0
    accepted: int = 0
    invalid_proposals: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    ttft_s: float | None = None
    decode_s: float | None = None
    guessing_s: float = 0.0
    guessing_rounds: int = 0
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    rounds_by_source: dict[str, int] = field(default_factory=dict)

    def add_round(self, record: RoundRecord) -> None:
        """Count one round, except its emitted tokens, which are counted when emitted."""
        self.rounds += 1
        self.proposed += record.proposed
        self.evaluated += record.evaluated
        self.accepted += record.accepted
        self.invalid_proposals += record.invalid
        self.draft_s += record.draft_s
        self.verify_s += record.verify_s
        if record.width > 1 or record.overlapped:
            self.guessing_s += record.round_s
            self.guessing_rounds += 1
        else:
            self.guessing_s += record.draft_s
        if record.proposed:
            self.accepted_lengths[record.accepted] = self.accepted_lengths.get(record.accepted, 0) + 1
        if record.source is not None:
            self.rounds_by_source[record.source] = self.rounds_by_source.get(record.source, 0) + 1

    @property
    def tokens_per_round(self) -> float | None:
        """Emitted tokens a round, corrections and bonuses included."""
        return (self.emitted_tokens - 1) / self.rounds if self.rounds else None

    @property
    def accepted_per_proposed(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        return (self.emitted_tokens - 1) / self.decode_s if self.decode_s and self.emitted_tokens > 1 else None

    def times_plain(self, plain_tokens_per_s: float) -> float | None:
        """Speed relative to decoding without guesses; None without a decoded token.

        Rounds without guesses count with their measured time, so a disturbance in them is not charged to guessing.
        A round takes at least a plain step, so the result is capped at ``tokens_per_round``: higher values are noise
        in the plain speed.
        """
        if not self.decode_s or self.tokens_per_round is None:
            return None
        guessing_tokens = self.emitted_tokens - 1 - (self.rounds - self.guessing_rounds)
        without_s = self.decode_s - self.guessing_s + guessing_tokens / plain_tokens_per_s
        return min(without_s / self.decode_s, self.tokens_per_round)

    @property
    def target_idle_s(self) -> float | None:
        """Seconds of decoding in which the target was idle."""
        return None if self.decode_s is None else max(0.0, self.decode_s - self.verify_s)

    @property
    def drafter_idle_s(self) -> float | None:
        """Seconds of decoding in which no drafter ran, in parallel with the target or alternately."""
        return None if self.decode_s is None else max(0.0, self.decode_s - self.draft_s)

    def as_json(self) -> dict[str, Any]:
        """The ``stats`` object of ``generate --json``."""
        longest = max(self.accepted_lengths, default=-1)
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "emitted_tokens": self.emitted_tokens,
            "guessed_tokens": self.guessed_tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "rounds": self.rounds,
            "proposed": self.proposed,
            "evaluated": self.evaluated,
            "accepted": self.accepted,
            "invalid_proposals": self.invalid_proposals,
            "tokens_per_round": self.tokens_per_round,
            "accepted_per_proposed": self.accepted_per_proposed,
            "accepted_lengths": [self.accepted_lengths.get(length, 0) for length in range(longest + 1)],
            "rounds_by_source": dict(self.rounds_by_source),
            "ttft_s": self.ttft_s,
            "decode_s": self.decode_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "target_idle_s": self.target_idle_s,
            "drafter_idle_s": self.drafter_idle_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }
