"""How a session chooses tokens: one path for plain and speculative decoding, for the target and its drafters.

Random numbers are keyed by (seed, position, purpose, token id) instead of drawn from a running generator. The
token at a position is the argmax of log probability + Gumbel noise (the Gumbel-max trick). With one seed the token
depends only on the target's distribution, and a rejection needs no rollback of a generator. The arithmetic is in
interfaces/drawing.py.
"""

from __future__ import annotations

import math
import secrets
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, cast, get_args

import numpy as np

from edgespec.decoding.constraint import Bound, Cursor
from edgespec.errors import ConstraintError, InvalidRequestError
from edgespec.files.checked import Range, ranges_of
from edgespec.interfaces.counted_text import CountedText
from edgespec.interfaces.drafting import ChainGate, Draft
from edgespec.interfaces.drawing import (
    INCREMENT,
    MOST_DRAWN,
    Drawn,
    DrawRequest,
    FloatArray,
    IdArray,
    LogitsArray,
    Measure,
    UintArray,
    are_allowed,
    draw_from,
    first_to_arrive,
    noise_key,
    penalised,
    truncated,
    uniforms,
    within_mask,
)
from edgespec.interfaces.rows import Distribution, Rows

Rule = Literal["keyed", "rejection"]

_Bias: TypeAlias = tuple[tuple[int, float], ...]

# A user may type a drawn seed again to repeat an answer: nine digits are enough for distinct answers.
_SEEDS = 10**9

# Tokens whose scores a request may change. Bias is for words, not for a vocabulary: on an AMD EPYC 300 tokens take
# about 40 microseconds at each token of the answer.
MOST_BIASED = 300
# The least forbids a token, the most forces it.
BIASES = Range(-100, 100)


# The tokens that a repeat penalty looks at in llama.cpp and Ollama by default.
USUAL_LAST_N = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 is greedy; 0 for ``top_k`` and ``min_p``, 1 for ``top_p`` are off.

    ``logit_bias`` maps at most 300 tokens to numbers of -100 to 100, which are added to their scores first; -100 bans
    a token. It is kept as pairs, by ascending token. Then scores are penalised (``repeat_penalty`` divides positive
    and multiplies negative scores of tokens of the text, the prompt included; ``presence_penalty`` and
    ``frequency_penalty`` are subtracted once and per occurrence in the answer; all three look at the last
    ``repeat_last_n`` tokens of the text, with -1 at all), divided by the temperature, then cut to the top k, to the
    smallest set of mass ``top_p``, and to probabilities of at least ``min_p`` times the highest. With ``seed`` None
    each answer draws a seed and reports it in its Done. Raises InvalidRequestError for a value of the wrong type or
    out of its range.
    """

    temperature: Annotated[float, Range(0, 100)] = 0.0
    top_k: Annotated[int, Range(0)] = 0
    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0
    min_p: Annotated[float, Range(0, 1)] = 0.0
    repeat_penalty: Annotated[float, Range(0, 10, above=True)] = 1.0
    repeat_last_n: Annotated[int, Range(-1)] = -1
    presence_penalty: Annotated[float, Range(-10, 10)] = 0.0
    frequency_penalty: Annotated[float, Range(-10, 10)] = 0.0
    seed: Annotated[int | None, Range(0, 2**64 - 1)] = None
    rule: Rule = "keyed"
    logit_bias: Mapping[int, float] | _Bias = ()

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            object.__setattr__(self, name, _within(allowed, name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        if self.rule not in get_args(Rule):
            raise _wrong("rule", f"rule cannot be {self.rule!r:.40}", "keyed or rejection")

    @property
    def uses_rejection(self) -> bool:
        """Greedy decoding never uses it: both rules then accept a token iff it equals the argmax."""
        return self.rule == "rejection" and not self.greedy

    def __str__(self) -> str:
        """The settings that are on: "greedy", or "temperature 0.7, top-p 0.95, seed 1"."""
        told = [each for each in fields(self) if getattr(self, each.name) != each.default]
        if self.greedy:
            told = [each for each in told if each.name.endswith(("penalty", "last_n", "bias"))]
        words = [f"{each.name.replace('_', '-')} {self._shown(each.name)}" for each in told]
        return ", ".join(["greedy", *words] if self.greedy else words)

    def _shown(self, name: str) -> object:
        return f"of {len(self.logit_bias)} tokens" if name == "logit_bias" else getattr(self, name)

    @property
    def noise_seed(self) -> int:
        """The key of the noise if no answer has drawn a seed."""
        return 0 if self.seed is None else self.seed

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def banned(self) -> frozenset[int]:
        """The tokens that ``logit_bias`` bans."""
        return frozenset(token for token, own in cast(_Bias, self.logit_bias) if own == BIASES.least)

    @property
    def penalises(self) -> bool:
        penalties = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) and self.repeat_last_n != 0


class SamplingFields(TypedDict, total=False):
    """Fields of Sampling by name, for calls that take them as arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    rule: Rule
    logit_bias: Mapping[int, float]


# The ranges of the fields that are numbers, by name.
RANGES = ranges_of(Sampling)
_WHOLE = ("top_k", "repeat_last_n", "seed")


def seeded(sampling: Sampling) -> Sampling:
    """The same with a random seed if a seed is needed and there is none."""
    if sampling.greedy or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=secrets.randbelow(_SEEDS))


def _pairs(value: Any) -> _Bias:
    """A bias as pairs of a token and a number, by ascending token. Raises InvalidRequestError."""
    given = list(value.items()) if isinstance(value, abc.Mapping) else value
    if not isinstance(given, list | tuple) or any(
        not isinstance(each, list | tuple) or len(each) != 2 for each in given
    ):
        raise _wrong("logit_bias", f"logit_bias maps tokens to numbers, not {type(value).__name__} {value!r:.40}")
    if len(given) > MOST_BIASED:
        raise _wrong("logit_bias", f"logit_bias names {len(given)} tokens", f"at most {MOST_BIASED}")
    found = dict[int, float]()
    for token, bias in given:
        if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= int(token) < 2**31:
            shown = f"{type(token).__name__} {token!r:.40}"
            raise _wrong("logit_bias", f"logit_bias names tokens by id, not by {shown}")
        if not isinstance(bias, Real) or isinstance(bias, bool) or not BIASES.admits(cast(float, bias)):
            shown = f"logit_bias of token {token} cannot be {bias!r:.40}"
            raise _wrong("logit_bias", shown, BIASES.wanted("a number"))
        if int(token) in found:
            raise _wrong("logit_bias", f"logit_bias names token {token} twice")
        found[int(token)] = float(bias)
    return tuple(sorted(found.items()))


def _within(allowed: Range, name: str, value: Any) -> float | None:
    """The value, with another library's number as Python's own: other number types overflow and round differently."""
    if value is None and name == "seed":
        return None
    own: Any
    wanted, own, noun = (Integral, int, "a whole number") if name in _WHOLE else (Real, float, "a number")
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise _wrong(name, f"{name} is {noun}, not {type(value).__name__} {value!r:.40}")
    number: float = value if isinstance(value, int) else own(value)
    if not allowed.admits(number):
        raise _wrong(name, f"{name} cannot be {number}", allowed.wanted(noun))
    return number


def _wrong(name: str, message: str, allowed: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(message, hint=None if allowed is None else f"allowed: {allowed}", param=name)


class Purpose(IntEnum):
    """Streams of noise that must be independent of each other at one position."""

    TOKEN = 0  # the target's choice; under the keyed rule the drafter shares it
    DRAFT = 1  # the drafter's choice under the rejection rule
    ACCEPT = 2  # the uniform number of the acceptance test
    CORRECTION = 3  # the draw from the residual, or of the bonus


def request_of(
    sampling: Sampling,
    context: abc.Sequence[int],
    purpose: Purpose = Purpose.TOKEN,
    *,
    begins: int = 0,
    banned: abc.Iterable[int] = (),
    wanted: int = 1,
    measure: Measure = Measure.NOTHING,
) -> DrawRequest:
    """The draw request for the token after ``context``; greedy decoding takes the best score without truncation.

    The answer begins at position ``begins`` of the context. The token is none of ``banned``. With a CountedText the
    request is valid until the text changes; any other context is counted here.
    """
    penalties: dict[str, Any] = {"bias": _added(sampling, banned)}
    if sampling.penalises:
        text = context if isinstance(context, CountedText) else CountedText(context)
        first = begins if sampling.repeat_penalty == 1 else 0
        if sampling.repeat_last_n >= 0:
            first = max(first, len(text) - sampling.repeat_last_n)
        penalties |= {
            "seen": text.seen(first, begins),
            "repeat_penalty": sampling.repeat_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
    if sampling.greedy:
        return DrawRequest(wanted=wanted, measure=measure, **penalties)
    return DrawRequest(
        key=noise_key(sampling.noise_seed, len(context), purpose),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        wanted=wanted,
        measure=measure,
        **penalties,
    )


def _added(sampling: Sampling, banned: abc.Iterable[int]) -> _Bias:
    """What is added to scores."""
    bias = {token: -math.inf if own == BIASES.least else own for token, own in cast(_Bias, sampling.logit_bias)}
    return tuple({**bias, **dict.fromkeys(banned, -math.inf)}.items())


def distribution(
    logits: LogitsArray,
    sampling: Sampling,
    context: abc.Sequence[int] = (),
    ids: IdArray | None = None,
    *,
    begins: int = 0,
    banned: abc.Iterable[int] = (),
    mask: UintArray | None = None,
) -> Distribution:
    """The truncated distribution of the next token, from float32 scores of ``ids``, ascending; None: 0, 1, 2, ...

    ``begins`` and ``banned`` as in request_of; the token is one that ``mask`` allows, as in DrawRequest. Raises
    NonFiniteLogitsError if a score is NaN or the best is infinite, and NoneAllowedError.
    """
    request = replace(request_of(sampling, context, begins=begins, banned=banned), mask=mask)
    if sampling.greedy:
        best = draw_from(logits, request, ids).tokens[0]
        return Distribution(np.array([best], dtype=np.int64), np.ones(1))
    logits, ids = within_mask(penalised(logits, request, ids), request, ids)
    columns, weights, _ = truncated(logits, request, ids)
    probs = weights.astype(np.float64)
    return Distribution(columns if ids is None else ids[columns], probs / probs.sum())


def draw(distribution: Distribution, seed: int, position: int, purpose: Purpose) -> int:
    """The token of ``distribution`` that the keyed noise selects; ties go to the lowest id."""
    (token, *_), _ = first_to_arrive(distribution.ids, distribution.probs, noise_key(seed, position, purpose), 1)
    return token


class Chooser:
    """A session's way of choosing tokens: implements TokenChooser and the target's side of both rules.

    ``not_before`` has how many tokens of the answer come before each of its tokens may be chosen, by target and
    drafters; the answer begins at position ``begins``. ``bound`` is the form that it keeps; None: it has none.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.not_before: Mapping[int, float] = {}
        self.begins = 0
        self.bound: Bound | None = None
        self.seed_is_fresh = False  # whether the seed was drawn for this answer, so that no other answer had it

    @property
    def reuses_noise(self) -> bool:
        """Under the keyed rule the text is the target's own for any guess, so there it does not matter."""
        return self.uses_rejection and not self.seed_is_fresh

    @property
    def uses_rejection(self) -> bool:
        return self.sampling.uses_rejection

    def _banned(self, context: abc.Sequence[int]) -> list[int]:
        emitted = len(context) - self.begins
        return [token for token, first in self.not_before.items() if emitted < first]

    def _argmax_decides(self, banned: abc.Collection[int]) -> bool:
        sampling = self.sampling
        return sampling.greedy and not (sampling.penalises or sampling.logit_bias or banned)

    def distribution(self, rows: Rows, index: int, context: abc.Sequence[int]) -> Distribution:
        """The distribution of the token that follows ``context``, from row ``index``."""
        return self._distribution(rows, index, context, None if self.bound is None else self.bound.target(context))

    def _distribution(
        self, rows: Rows, index: int, context: abc.Sequence[int], cursor: Cursor | None
    ) -> Distribution:
        ids, scores = rows.scored(index)
        mask = None if cursor is None else cursor.mask
        banned = self._banned(context)
        return distribution(scores, self.sampling, context, ids, begins=self.begins, banned=banned, mask=mask)

    def target_token(self, rows: Rows, index: int, context: abc.Sequence[int], mask: UintArray | None = None) -> int:
        """What the target emits after ``context``: the argmax, or the keyed draw at position len(context).

        With ``mask`` it is one of these tokens, and no form is asked.
        """
        banned, purpose = self._banned(context), Purpose.CORRECTION if self.uses_rejection else Purpose.TOKEN
        if mask is not None:
            request = request_of(self.sampling, context, purpose, begins=self.begins, banned=banned)
            return rows.draw(index, replace(request, mask=mask)).tokens[0]
        cursor = None if self.bound is None else self.bound.target(context)
        if self._argmax_decides(banned):
            best = rows.argmax_row(index)
            if cursor is None or cursor.allows([best]):
                return best
        request = request_of(self.sampling, context, purpose, begins=self.begins, banned=banned)
        return _drawn(rows, index, request, cursor).tokens[0]

    def allowed_scores(
        self, rows: Rows, index: int, context: abc.Sequence[int], mask: UintArray | None = None
    ) -> LogitsArray:
        """The scores of row ``index``, -infinity for tokens that may not come: of those that ``mask`` or the
        answer's form does not allow there.
        """
        scores = rows.logits(index)
        if mask is None and self.bound is not None:
            mask = self.bound.target(context).mask
        if mask is not None:
            scores[~are_allowed(mask, np.arange(len(scores)))] = -np.inf
        return scores

    @property
    def is_bound(self) -> bool:
        """Whether the answer has a form."""
        return self.bound is not None

    def allows(self, context: abc.Sequence[int], tokens: abc.Sequence[int]) -> int:
        """How many of the ``tokens`` may follow ``context``, in their order; for drafters.

        None behind guesses that the form does not allow: a pipelined round reuses tokens in places of other ones.
        """
        try:
            cursor = None if self.bound is None else self.bound.drafts(context)
            return len(tokens) if cursor is None else cursor.allows(tokens)
        except ConstraintError:
            return 0

    def forced(self, context: abc.Sequence[int]) -> abc.Sequence[int]:
        """The tokens of the only text that may follow ``context``, as far as there is one; for drafters."""
        try:
            cursor = None if self.bound is None else self.bound.drafts(context)
            return () if cursor is None else cursor.forced
        except ConstraintError:
            return ()

    def draft(
        self,
        rows: Rows,
        index: int,
        context: abc.Sequence[int],
        gate: ChainGate | None,
        *,
        alternatives: int = 0,
        committed: int = 0,
    ) -> Draft | None:
        try:
            cursor = None if self.bound is None else self.bound.drafts(context)
            if self.uses_rejection:
                return self._draft_of_its_own(rows, index, context, gate, committed, cursor)
            return self._draft_of_targets_noise(rows, index, context, gate, alternatives, cursor)
        except ConstraintError:  # a short head scores none of the allowed tokens, or the guesses before are none
            return None

    def _draft_of_targets_noise(
        self,
        rows: Rows,
        index: int,
        context: abc.Sequence[int],
        gate: ChainGate | None,
        alternatives: int,
        cursor: Cursor | None,
    ) -> Draft | None:
        banned = self._banned(context)
        if self._argmax_decides(banned) and gate is None and not alternatives:
            best = rows.argmax_row(index)
            if cursor is None or cursor.allows([best]):
                return Draft(best)
        # The target shares the noise, so its other likely choices are the next to arrive with the same noise, and
        # a token is the surer the later they arrive. This confidence depends on the token, which is allowed: under
        # the keyed rule the text is the target's own for any proposal.
        wanted = MOST_DRAWN if alternatives or not self.sampling.greedy else 1
        measure = Measure.MASS if self.sampling.greedy else Measure.NOTHING
        if gate is not None and gate.needs_entropy:
            measure = Measure.ENTROPY
        request = request_of(
            self.sampling, context, begins=self.begins, banned=banned, wanted=wanted, measure=measure
        )
        drawn = _drawn(rows, index, request, cursor)
        if gate is not None and not gate.admits(drawn.odds[0], drawn.entropy):
            return None
        rest = zip(drawn.tokens[1:], drawn.odds[1:], strict=True)
        others = [each for each in rest if each[1] > 0 and (cursor is None or cursor.allows([each[0]]))]
        return Draft(
            drawn.tokens[0],
            None,
            None if self.sampling.greedy and gate is None else drawn.odds[0],
            tuple(others[:alternatives]),
        )

    def _draft_of_its_own(
        self,
        rows: Rows,
        index: int,
        context: abc.Sequence[int],
        gate: ChainGate | None,
        committed: int,
        cursor: Cursor | None,
    ) -> Draft | None:
        """Draw from noise that the target does not share, with the distribution that the acceptance test needs.

        Whether a position is drafted again may depend on its earlier draft, whose noise is biased by then. More text
        is committed in between, so each committed length has its own noise.
        """
        own = self._distribution(rows, index, context, cursor)
        if gate is not None and not gate.admits(own.peak, own.entropy if gate.needs_entropy else None):
            return None
        seed = (self.sampling.noise_seed + committed * INCREMENT) % 2**64
        token = draw(own, seed, len(context), Purpose.DRAFT)
        return Draft(token, own, own.peak)

    def accept_uniform(self, position: int) -> float:
        """The uniform number of the acceptance test at ``position``."""
        key = noise_key(self.sampling.noise_seed, position, Purpose.ACCEPT)
        return float(uniforms(key, np.zeros(1, dtype=np.int64))[0])

    def draw_dense(self, probs: FloatArray, position: int) -> int:
        """A token from full-vocabulary ``probs``, with the noise reserved for corrections and bonuses."""
        ids = np.flatnonzero(probs > 0)
        return draw(Distribution(ids, probs[ids]), self.sampling.noise_seed, position, Purpose.CORRECTION)


def _drawn(rows: Rows, index: int, request: DrawRequest, cursor: Cursor | None) -> Drawn:
    """The draw within a form.

    Without truncation a token that is drawn from all and is allowed is also the one drawn from the allowed ones, with
    the same noise. Then no mask is needed, as at most tokens.
    """
    if cursor is None:
        return rows.draw(index, request)
    truncates = request.key is not None and (request.top_k or request.top_p < 1 or request.min_p > 0)
    if not truncates and cursor.allows((drawn := rows.draw(index, request)).tokens[:1]):
        return drawn
    return rows.draw(index, replace(request, mask=cursor.mask))
