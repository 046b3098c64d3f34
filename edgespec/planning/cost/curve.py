"""Expected tokens and expected seconds of a round, and the depth with the most tokens a second.

The formulas are those of speculative decoding (Leviathan et al., 2023) with measured times instead of a constant
cost ratio; depth 0 competes like any other depth (SmartSpec, 2024). Everything here is pure.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

# Float sums differ in their last digits: a token late by this share of its time is in time.
_SAME_MOMENT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """T(w): seconds of a target forward by width, measured at ``widths`` (ascending, from 1).

    Linear between measured widths; beyond the widest the last slope continues, never falling.
    """

    widths: tuple[int, ...]
    forward_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.widths or self.widths[0] != 1 or len(self.widths) != len(self.forward_s):
            raise ValueError("a curve needs one time for each of its widths, starting at width 1")
        if any(left >= right for left, right in itertools.pairwise(self.widths)):
            raise ValueError("the widths of a curve ascend")
        if not all(0 < seconds < float("inf") for seconds in self.forward_s):
            raise ValueError("the seconds of a forward are positive and finite")

    def seconds(self, width: int) -> float:
        """T(width). Raises ValueError below width 1."""
        return _by_width(self.widths, self.forward_s, width)

    @property
    def plain_s(self) -> float:
        """T(1)."""
        return self.forward_s[0]

    def ratio(self, width: int) -> float:
        """T(width) / T(1)."""
        return self.seconds(width) / self.plain_s

    def scaled(self, factor: float) -> Curve:
        """The same shape, ``factor`` times as slow."""
        return Curve(widths=self.widths, forward_s=tuple(factor * seconds for seconds in self.forward_s))


def _by_width(widths: Sequence[int], values: Sequence[float], width: int) -> float:
    """The value at ``width``, on a line between known widths. Raises ValueError below width 1."""
    if width < 1:
        raise ValueError(f"there is no forward of width {width}")
    index = bisect.bisect_left(widths, width)
    if index < len(widths) and widths[index] == width:
        return values[index]
    if index == len(widths) == 1:  # one known width gives no slope: each row is assumed to cost as much as the first
        return values[0] * width
    beyond = index == len(widths)
    index -= beyond
    slope = (values[index] - values[index - 1]) / (widths[index] - widths[index - 1])
    if beyond:
        return values[-1] + max(0.0, slope) * (width - widths[-1])
    return values[index - 1] + slope * (width - widths[index - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTimes:
    """The experts that forwards of a mixture read, and what they cost: T(w) is that of ``read`` experts, and each of
    them takes ``expert_s`` seconds of it.

    ``read[i]``: how many different ones, of all layers together, a forward of ``widths[i]`` rows of text reads.
    """

    widths: tuple[int, ...]
    read: tuple[float, ...]
    expert_s: float

    def __post_init__(self) -> None:
        if not self.widths or len(self.widths) != len(self.read):
            raise ValueError("experts are counted for each width")
        if not all(before <= after for before, after in itertools.pairwise((0.0, *self.read))):
            raise ValueError("more rows read no fewer experts")
        if not (self.read[-1] < math.inf and 0 <= self.expert_s < math.inf):
            raise ValueError("the experts and their seconds are finite and not negative")

    def read_by(self, width: int) -> float:
        """How many experts a forward of that width reads."""
        return _by_width(self.widths, self.read, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCurves:
    """T(w) at one or more context lengths, ascending; every curve has the same widths.

    ``experts``: what of it are experts; None for a model without, or where they were not counted.
    """

    contexts: tuple[int, ...]
    curves: tuple[Curve, ...]
    experts: ExpertTimes | None = None

    def __post_init__(self) -> None:
        if not self.contexts or len(self.contexts) != len(self.curves):
            raise ValueError("context curves need one curve for each context length")
        if list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError("context lengths ascend")
        if len({curve.widths for curve in self.curves}) != 1:
            raise ValueError("all curves have the same widths")

    def at(self, context_length: int) -> Curve:
        """The curve at a context length: linear between measured lengths and beyond, constant before the first."""
        contexts, curves = self.contexts, self.curves
        if context_length <= contexts[0] or len(contexts) == 1:
            return curves[0]
        index = min(bisect.bisect_left(contexts, context_length), len(contexts) - 1)
        share = (context_length - contexts[index - 1]) / (contexts[index] - contexts[index - 1])
        low, high = curves[index - 1], curves[index]
        return Curve(
            widths=low.widths,
            forward_s=tuple(a + share * (b - a) for a, b in zip(low.forward_s, high.forward_s, strict=True)),
        )

    def near(self, factor: float) -> ContextCurves:
        """The curve of the shortest context at every context, ``factor`` times as slow, its experts included."""
        experts = None if self.experts is None else replace(self.experts, expert_s=factor * self.experts.expert_s)
        return ContextCurves(contexts=(0,), curves=(self.curves[0].scaled(factor),), experts=experts)

    @property
    def position_s(self) -> float:
        """Seconds that each token of context adds to a plain forward."""
        apart = self.contexts[-1] - self.contexts[0]
        return max(0.0, self.curves[-1].plain_s - self.curves[0].plain_s) / apart if apart else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """Seconds that a proposal costs, without its verification.

    ``token_s`` for each drafter forward, and ``position_s`` more for each token of context before it (``at``),
    ``round_s`` once a proposal, ``lag_token_s`` for each token that the drafter has to read first (its prefill, or
    what was decoded while it was off). ``one_pass``: the time of the forward in
    which a one-pass drafter (drafters/one_pass.py) drafts all tokens, by the tokens drafted and read in it; it has no
    ``token_s``.
    """

    token_s: float = 0.0
    position_s: float = 0.0
    round_s: float = 0.0
    lag_token_s: float = 0.0
    one_pass: Curve | None = None

    def at(self, context_length: int) -> DraftCost:
        """The cost after that many tokens of context."""
        if not self.position_s:
            return self
        return replace(self, token_s=self.token_s + self.position_s * context_length, position_s=0.0)

    def seconds(self, depth: int, lag: int = 0) -> float:
        """Seconds of drafting ``depth`` tokens, ``lag`` tokens behind; depth 0 drafts nothing."""
        if depth == 0:
            return 0.0
        if self.one_pass is None:
            return self.round_s + depth * self.token_s + lag * self.lag_token_s
        # Beyond the widest timed forward the drafter reads a prompt, in longer forwards.
        beside = min(lag, max(0, self.one_pass.widths[-1] - depth))
        return self.round_s + self.one_pass.seconds(depth + beside) + (lag - beside) * self.lag_token_s

    def usual_seconds(self, depth: int, tokens: float) -> float:
        """Seconds of drafting ``depth`` tokens in a round that commits ``tokens``, as the rounds before it did.

        A one-pass drafter has nothing of its guesses in its cache, and reads those tokens in the same forward. A
        drafter that drafts token by token has read them.
        """
        return self.seconds(depth, 0 if self.one_pass is None else math.ceil(tokens) - 1)

    def forwards(self, depth: int) -> int:
        """How often drafting ``depth`` tokens reads the drafter's weights."""
        return depth if self.one_pass is None else min(1, depth)

    def scaled(self, factor: float) -> DraftCost:
        """The same drafter, ``factor`` times as slow."""
        return DraftCost(
            token_s=factor * self.token_s,
            position_s=factor * self.position_s,
            round_s=factor * self.round_s,
            lag_token_s=factor * self.lag_token_s,
            one_pass=None if self.one_pass is None else self.one_pass.scaled(factor),
        )


FREE = DraftCost()


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthChoice:
    """The best depth and what it is expected to bring. ``speedup`` is against plain decoding on the same curve."""

    depth: int
    tokens_per_round: float
    tokens_per_s: float
    speedup: float


def by_position(acceptance: Sequence[float], depth: int) -> tuple[float, ...]:
    """One probability for each of ``depth`` positions; the last known one is repeated."""
    known = tuple(acceptance[:depth])
    return known + (known[-1],) * (depth - len(known))


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens that a round commits, correction or bonus included: 1 + a1 + a1 a2 + ...

    ``acceptance[i]`` is the probability that draft token i is accepted if all tokens before it were.
    """
    total, survives = 1.0, 1.0
    for probability in acceptance:
        survives *= probability
        total += survives
    return total


def round_seconds(curve: Curve, draft: DraftCost, depth: int, tokens: float = 1.0) -> float:
    """Seconds of a serial round that commits ``tokens``: drafting, then verifying ``depth + 1`` rows."""
    return draft.usual_seconds(depth, tokens) + curve.seconds(depth + 1)


def _rates(
    curve: Curve, draft: DraftCost, acceptance: Sequence[float], depth_cap: int
) -> Iterator[tuple[float, float]]:
    """The expected tokens a round, and those a second, at the depths 1, 2, ...; nothing without an acceptance."""
    tokens, survives = 1.0, 1.0
    for depth in range(1, depth_cap + 1 if acceptance else 1):
        survives *= acceptance[min(depth, len(acceptance)) - 1]
        tokens += survives
        yield tokens, tokens / round_seconds(curve, draft, depth, tokens)


def choose_depth(curve: Curve, draft: DraftCost, acceptance: Sequence[float], depth_cap: int) -> DepthChoice:
    """The depth from 0 to ``depth_cap`` with the most expected tokens a second; of two equals the shallower.

    ``acceptance`` is as in ``expected_tokens``; if it is shorter than the cap, its last entry is repeated.
    """
    plain = 1.0 / curve.plain_s
    best = DepthChoice(depth=0, tokens_per_round=1.0, tokens_per_s=plain, speedup=1.0)
    for depth, (tokens, rate) in enumerate(_rates(curve, draft, acceptance, depth_cap), start=1):
        if rate > best.tokens_per_s:
            best = DepthChoice(depth=depth, tokens_per_round=tokens, tokens_per_s=rate, speedup=rate / plain)
    return best


def best_possible(curve: Curve, draft: DraftCost, depth_cap: int) -> DepthChoice:
    """The choice if every drafted token were accepted: an upper bound for this drafter on this curve."""
    return choose_depth(curve, draft, (1.0,), depth_cap)


def drafting_speedup(curve: Curve, draft: DraftCost, acceptance: Sequence[float]) -> float:
    """The best speed-up over plain decoding at depths from 1 to the length of ``acceptance``; may be below 1.

    Unlike ``choose_depth``, this never falls back to depth 0. ``acceptance`` is as in ``expected_tokens``; if it is
    empty, the speed-up is 0.
    """
    return curve.plain_s * max((rate for _, rate in _rates(curve, draft, acceptance, len(acceptance))), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowChoice:
    """The best window of a pipeline and what it is expected to bring.

    ``tokens_per_round`` also counts the rounds after a rejection, which verify only the token in flight.
    """

    window: int
    tokens_per_round: float
    tokens_per_s: float


def choose_window(curve: Curve, draft: DraftCost, acceptance: Sequence[float], depth_cap: int) -> WindowChoice:
    """The window, from 0 to ``depth_cap`` draft tokens, with the most tokens a second for pipelined drafting.

    ``curve`` and ``draft`` are the times while both sides run. ``acceptance`` is as in ``expected_tokens``. A pipe
    that is not emptied continues from chunk to chunk, so one probability is used for all positions: the geometric
    mean, which keeps that of a whole chunk. The model is that of decoding/pipelined/loop.py: the drafter drafts as
    much as there is time for (``overlapped_tokens``); a window of w tokens compares w + 1; after a rejection a round
    verifies only the first token that is drafted in parallel. Raises ValueError without an acceptance.
    """
    if not acceptance:
        raise ValueError("choosing a window needs at least one acceptance probability")
    known = [*acceptance[:depth_cap], *[acceptance[-1]] * (depth_cap - len(acceptance))]
    steady = math.prod(known) ** (1 / len(known)) if known else acceptance[0]
    empty_s, _ = _overlapped_round(curve.seconds(1), draft, steady, depth_cap + 1)
    best: WindowChoice | None = None
    for window in range(depth_cap + 1):
        full_s, drafted = _overlapped_round(curve.seconds(window + 1), draft, steady, depth_cap + 1)
        if drafted < window + 1 and best is not None:
            continue  # the drafter cannot fill this window in time
        survives = steady ** (window + 1)
        # Rounds with an empty pipe for each with a full one: a rejection empties the pipe, one accepted token fills
        # it.
        empty = (1 - survives) / steady if steady > 0 else math.inf
        tokens = sum(steady**index for index in range(window + 1))
        per_round = (empty + tokens) / (empty + 1) if math.isfinite(empty) else 1.0
        seconds = (empty * empty_s + full_s) / (empty + 1) if math.isfinite(empty) else empty_s
        choice = WindowChoice(window=window, tokens_per_round=per_round, tokens_per_s=per_round / seconds)
        if best is None or choice.tokens_per_s > best.tokens_per_s:
            best = choice
    assert best is not None  # a window of 0 is always tried
    return best


def window_by_rate(forward_s: Sequence[float], acceptance: float) -> int:
    """The window with the most expected tokens a second; ``forward_s[w]`` is the time of a forward with window w.

    A window of w tokens scores w + 1 positions. Each position gives a token if all before it were accepted.
    """
    rates = [expected_tokens([acceptance] * window) / seconds for window, seconds in enumerate(forward_s)]
    return rates.index(max(rates))


def overlapped_tokens(target_s: float, draft: DraftCost, acceptance: float, most: int) -> int:
    """How many tokens to draft, from 1 to ``most``, while the target computes for ``target_s``.

    As many as are ready when the target finishes, and one more if that token is worth the wait (DuoDecoding, Lv et
    al., 2025: draft time about verify time). A full pipe compares as many positions a round as it drafts tokens. Each
    position gives a token if those before it were accepted, with probability ``acceptance``.
    """
    if draft.token_s <= 0:
        return most
    ready = max(1, math.floor(min(most, (target_s - draft.round_s) / draft.token_s + _SAME_MOMENT)))

    def rate(count: int) -> float:
        return expected_tokens([acceptance] * (count - 1)) / max(target_s, draft.seconds(count))

    return min(most, ready + 1 if rate(ready + 1) > rate(ready) else ready)


def _overlapped_round(target_s: float, draft: DraftCost, acceptance: float, most: int) -> tuple[float, int]:
    """Seconds of a round whose target takes ``target_s``, and the tokens drafted in it (at least one)."""
    drafted = overlapped_tokens(target_s, draft, acceptance, most)
    return max(target_s, draft.seconds(drafted)), drafted
