"""Requests drawn with a seed: a machine, its calibration, prompts, answers, and where texts are predictable.

Nothing here decides or decodes: ``tests/support/simulated_clock.py`` serves the requests drawn here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from edgespec.planning.cost.acceptance import BINS, POSITIONS, AcceptancePrior
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, ContextCurves, Curve, DraftCost

Lengths = Literal["short", "long", "mixed", "bimodal", "similar", "cut"]
LENGTHS: tuple[Lengths, ...] = get_args(Lengths)

LONGEST_PROMPT, LONGEST_ANSWER = 8000, 2000

# Widths of a simulated forward: 1 to the deepest draft plus one.
WIDEST = 8

# Contexts at which the product's calibration times forwards.
CALIBRATED_AT = (96, 1018)

Random = np.random.Generator


def generator(*seed: int) -> Random:
    return np.random.default_rng(seed)


# ----------------------------------------------------------------------------------------------------- the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The true times of a machine, a target and a drafter, in seconds.

    ``rows_s[w - 1]`` is the target's forward of width w over an empty context. Each token of context adds
    ``attention_s``, and ``attention_row`` of that for every row beyond the first. If the drafter has read a share s
    of the text, the share s ** ``window_power`` of its tokens stays right.
    """

    rows_s: tuple[float, ...]
    attention_s: float
    attention_row: float
    prompt_token_s: float
    draft_token_s: float
    lag_token_s: float
    load_s: float
    window_power: float = 0.0
    noise: float = 0.0

    @property
    def depth_cap(self) -> int:
        return len(self.rows_s) - 1

    def forward_s(self, width: int, context: int) -> float:
        return self.rows_s[width - 1] + context * self.attention_s * (1.0 + self.attention_row * (width - 1))

    def prompt_s(self, tokens: int) -> float:
        """Seconds to read a prompt without its last token, in chunks over the growing context."""
        return tokens * (self.prompt_token_s + 0.25 * tokens * self.attention_s * self.attention_row)

    def missed(self, read_tokens: int, context: int) -> float:
        """The share of right tokens that a drafter loses if it has read only the last ``read_tokens``."""
        return 1.0 - math.pow(min(1.0, read_tokens / context), self.window_power)


# Measured T(w)/T(1) of a 1.5B target at four bits: our kernels on two and on four cores, llama.cpp on two cores.
CHEAP = (1.0, 1.04, 1.10, 1.16, 1.22, 1.27, 1.35, 1.44)
CHEAPER = (1.0, 1.01, 1.09, 1.16, 1.19, 1.22, 1.28, 1.36)
DEAR = (1.0, 1.57, 2.25, 2.96, 3.25, 3.83, 4.37, 5.92)

# Two cores of a Zen 4, 1.5B and 0.5B: a step 34 ms, a prompt token 4.8 ms, a drafted token 10 ms, a token read by the
# drafter 1.2 ms; attention 4.2 ms for 1000 tokens of context.
NATIVE = World(
    rows_s=tuple(0.0338 * ratio for ratio in CHEAP),
    attention_s=4.2e-6,
    attention_row=0.25,
    prompt_token_s=0.0048,
    draft_token_s=0.0100,
    lag_token_s=0.0012,
    load_s=0.3,
    window_power=0.25,
)

# The same machine with llama.cpp's kernels for both models.
LLAMA = replace(
    NATIVE,
    rows_s=tuple(0.0387 * ratio for ratio in DEAR),
    prompt_token_s=0.0130,
    draft_token_s=0.0110,
    lag_token_s=0.0040,
)


def draw_world(random: Random) -> World:
    """Draw a machine: half have cheap rows like ours, half expensive rows like llama.cpp's; the rest varies."""
    cheap = random.random() < 0.5
    ratios = np.array((CHEAP, CHEAPER)[int(random.integers(2))] if cheap else DEAR)
    ratios = 1.0 + (ratios - 1.0) * random.uniform(0.6, 1.4)
    step_s = _log_uniform(random, 0.010, 0.060)
    drafter = _log_uniform(random, 0.12, 0.5)  # as a share of the target's step
    prompt = _log_uniform(random, 0.08, 0.16) if cheap else _log_uniform(random, 0.15, 0.35)
    return World(
        rows_s=tuple(float(step_s * ratio) for ratio in ratios),
        attention_s=step_s * random.uniform(0.3e-4, 1.5e-4),
        attention_row=random.uniform(0.1, 0.5),
        prompt_token_s=step_s * prompt,
        draft_token_s=step_s * drafter,
        # The drafter reads a prompt faster than the target roughly by the ratio of their sizes.
        lag_token_s=step_s * prompt * min(0.8, drafter * random.uniform(0.7, 1.3)),
        load_s=0.0 if random.random() < 0.3 else random.uniform(0.0, 5.0) ** 2 / 5.0,
        # Measured for one pair: 0.25 (planning/depth/control.py).
        window_power=random.uniform(0.1, 0.4),
        noise=0.0 if random.random() < 0.5 else random.uniform(0.0, 0.05),
    )


def believed(world: World, random: Random | None = None, error: float = 0.0) -> Costs:
    """The machine as calibration would have stored it: each number is wrong by up to ``error``.

    One error is common to all numbers, another one is separate for each.
    """

    def off() -> float:
        return 1.0 if random is None else float(1.0 + random.uniform(-error, error))

    together = off()
    wrong = [together * (1.0 + (off() - 1.0) / 2) for _ in world.rows_s]
    curves = tuple(
        Curve(
            widths=tuple(range(1, len(world.rows_s) + 1)),
            forward_s=tuple(
                world.forward_s(width, context) * wrong[width - 1] for width in range(1, len(world.rows_s) + 1)
            ),
        )
        for context in CALIBRATED_AT
    )
    drafting = DraftCost(token_s=world.draft_token_s * off(), lag_token_s=world.lag_token_s * off())
    return Costs(
        curves=ContextCurves(contexts=CALIBRATED_AT, curves=curves), drafts={"lookup": FREE, "model": drafting}
    )


# ------------------------------------------------------------------------------------------------------- the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of text: how often the drafter is right, and the share of the text that repeats earlier text.

    ``rates``: the acceptance of its passages, of which each draws one; passages have ``passage_tokens`` on average.
    """

    rates: tuple[float, ...]
    passage_tokens: float = 60.0
    copied: float = 0.0


# Accepted tokens of a 0.5B drafting for a 1.5B, depth 3: coding 0.91, translation and short questions 0.1 to 0.5
# (planning/cost/acceptance.py UNKNOWN). "foreign" is a text that the drafter hardly predicts.
KINDS: dict[str, Kind] = {
    "code": Kind(rates=(0.92, 0.9, 0.85, 0.8)),
    "prose": Kind(rates=(0.7, 0.6, 0.5)),
    "translation": Kind(rates=(0.45, 0.35, 0.25)),
    "copying": Kind(rates=(0.8, 0.7, 0.5), copied=0.6),
    "foreign": Kind(rates=(0.15, 0.1, 0.05)),
    "changing": Kind(rates=(0.92, 0.6, 0.3, 0.1), copied=0.15),
}

# A copy begins after this many matching tokens (drafters/lookup.py), which is also its mean length.
_MATCHED = 3
_COPY_TOKENS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Other load while the answer's tokens ``first`` to ``last`` are decoded.

    Forwards take ``factor`` times as long, and ``row`` more of that for every row beyond the first.
    """

    first: int
    last: int
    factor: float
    row: float = 0.0

    def slower(self, place: int, width: int) -> float:
        return self.factor * (1.0 + self.row * (width - 1)) if self.first <= place < self.last else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer. Its last token is the end of the text, or the last permitted token (``cut``).

    For the answer's token i: the drafter's confidence is ``sure[i]``, and its guess is right if ``right[i]``, unless
    the loss from unread text exceeds ``unread[i]``; ``matched[i]`` tokens before it are a copy of an earlier place
    (0: no copy), whose next token is right if ``copied[i]``.
    """

    kind: str
    prompt_tokens: int
    tokens: int
    max_tokens: int | None = None
    cut: bool = False
    neighbour: Neighbour | None = None
    sure: list[float]
    right: list[bool]
    unread: list[float]
    matched: list[int]
    copied: list[bool]
    noise: list[float]


_NOISES = 1024


def draw_request(
    random: Random,
    kind: str,
    prompt_tokens: int,
    tokens: int,
    *,
    max_tokens: int | None = None,
    cut: bool = False,
    neighbour: Neighbour | None = None,
    honest: bool = True,
    noise: float = 0.0,
) -> Request:
    """Draw a request. ``honest``: the drafter's tokens are right as often as its confidences say."""
    places = tokens + WIDEST + 1
    text = KINDS[kind]
    rates = _passages(random, text, places)
    if honest:
        sure = random.beta(2.0 * rates, 2.0 * (1.0 - rates))
        right = random.random(places) < sure
    else:
        sure, right = random.random(places), random.random(places) < rates
    right[tokens:] = False  # no guess is right after the end of the text
    matched, copied = _copies(random, text.copied, places)
    copied[tokens:] = False
    noises = np.exp(random.normal(0.0, noise, _NOISES)) if noise else np.ones(1)
    return Request(
        kind=kind,
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        max_tokens=max_tokens,
        cut=cut,
        neighbour=neighbour,
        sure=sure.tolist(),
        right=right.tolist(),
        unread=random.random(places).tolist(),
        matched=matched,
        copied=copied.tolist(),
        noise=noises.tolist(),
    )


def _passages(random: Random, kind: Kind, places: int) -> Any:
    counts = random.geometric(1.0 / kind.passage_tokens, 1 + int(4 * places / kind.passage_tokens))
    rates = np.repeat(random.choice(kind.rates, len(counts)), counts)
    return np.resize(rates, places)


def _copies(random: Random, share: float, places: int) -> tuple[list[int], Any]:
    """Copied stretches, with other tokens between them in which three tokens sometimes match by chance."""
    if not share:
        return [0] * places, np.zeros(places, dtype=bool)
    matched = np.where(random.random(places) < 0.05, _MATCHED, 0)
    right = random.random(places) < 0.3
    place = 0
    while place < places:
        place += int(random.geometric(share / (_COPY_TOKENS * (1.0 - share))))
        length = int(random.geometric(1.0 / _COPY_TOKENS))
        end = min(places, place + length)
        if end > place:
            matched[place:end] = _MATCHED + np.arange(end - place)
            right[place:end] = random.random(end - place) < 0.97
        place = end + 1
    return matched.tolist(), right


# ----------------------------------------------------------------------------------------------------- scenarios


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Consecutive requests on one machine.

    ``kinds``: each request draws one, with equal chances. A process answers ``process_requests`` requests; the next
    process begins without a loaded drafter. ``prior``: the acceptance assumed before the first request. ``length``
    scales ``lengths``. The assumed loading time is ``load_error`` times the real one.
    """

    seed: int
    world: World
    costs: Costs
    prior: AcceptancePrior | None = None
    kinds: tuple[str, ...] = ("code",)
    lengths: Lengths = "mixed"
    length: float = 1.0
    load_error: float = 1.0
    shortest_prompt: int = 1
    longest_prompt: int = LONGEST_PROMPT
    neighbours: float = 0.0
    honest: bool = True
    process_requests: int = 40
    told_most: bool = False

    @property
    def believed_load_s(self) -> float:
        return self.load_error * self.world.load_s

    def requests(self, count: int) -> Iterator[Request]:
        return (self.request(place) for place in range(count))

    def request(self, place: int) -> Request:
        """The request at that index, independent of the other requests drawn."""
        random = generator(self.seed, place)
        tokens, max_tokens, cut = draw_length(random, self.lengths, self.length)
        if max_tokens is None and self.told_most:
            max_tokens = LONGEST_ANSWER
        prompt_tokens = round(_log_uniform(random, self.shortest_prompt, self.longest_prompt))
        neighbour = None
        if random.random() < self.neighbours:
            first = int(random.integers(0, tokens + 1))
            neighbour = Neighbour(
                first=first,
                last=first + int(random.integers(20, 400)),
                factor=random.uniform(1.5, 3.0),
                row=float(random.choice((0.0, 0.05))),
            )
        return draw_request(
            random,
            str(random.choice(self.kinds)),
            prompt_tokens,
            tokens,
            max_tokens=max_tokens,
            cut=cut,
            neighbour=neighbour,
            honest=self.honest,
            noise=self.world.noise,
        )


def draw_length(random: Random, lengths: Lengths, scale: float = 1.0) -> tuple[int, int | None, bool]:
    """Tokens of an answer, its limit (None: no limit given), and whether the limit ended it."""
    most: int | None = None
    tokens: float
    if lengths == "short":
        tokens = random.geometric(1.0 / (16.0 * scale))
    elif lengths == "long":
        tokens = 500.0 * scale * math.exp(random.normal(0.0, 0.6))
    elif lengths == "bimodal":
        tokens = random.geometric(1.0 / 8.0) if random.random() < 0.8 else random.uniform(400.0, 1200.0) * scale
    elif lengths == "similar":
        tokens = 60.0 * scale * math.exp(random.normal(0.0, 0.15))
    else:
        tokens = _log_uniform(random, 1.0, LONGEST_ANSWER)
        if lengths == "cut":
            most = max(1, round(32 * scale))
    natural = int(min(LONGEST_ANSWER, max(1, tokens)))
    return (natural, most, False) if most is None or natural <= most else (most, most, True)


# Wrong priors: acceptance assumed for drafters with another acceptance.
OPTIMISTIC, PESSIMISTIC = 0.9, 0.2


def prior_of(rate: float) -> AcceptancePrior:
    """The strongest prior: confidences as in such texts, each position right at ``rate``."""
    middle = [(place + 0.5) / BINS for place in range(BINS)]
    odds = rate / (1.0 - rate)
    return AcceptancePrior(
        by_position=(rate,) * POSITIONS,
        by_confidence=tuple(own * odds / (own * odds + 1.0 - own) for own in middle),
        position_tokens=(256.0,) * POSITIONS,
        confidence_tokens=(256.0,) * BINS,
    )


def draw_scenario(seed: int) -> Scenario:
    """Draw a machine, stored costs that are right, slightly wrong or wrong by 30 %, and a stream of requests."""
    random = generator(seed)
    world = draw_world(random)
    error = float(random.choice((0.0, 0.1, 0.3)))
    names = tuple(KINDS)
    kinds = names if random.random() < 0.4 else (names[int(random.integers(len(names)))],)
    prior = random.choice((0.0, OPTIMISTIC, PESSIMISTIC, 0.6))
    lengths = LENGTHS[int(random.integers(len(LENGTHS)))]
    return Scenario(
        seed=seed,
        world=world,
        costs=believed(world, random, error),
        prior=prior_of(float(prior)) if prior else None,
        kinds=kinds,
        lengths=lengths,
        load_error=float(1.0 + random.uniform(-error, error)),
        length=_log_uniform(random, 0.25, 2.0) if lengths != "cut" else float(random.choice((0.25, 0.5, 1.0, 8.0))),
        longest_prompt=int(random.choice((200, LONGEST_PROMPT))),
        neighbours=float(random.choice((0.0, 0.2))),
        honest=bool(random.random() < 0.7),
        process_requests=int(random.choice((1, 40))),
        told_most=bool(random.random() < 0.5),
    )


def _log_uniform(random: Random, least: float, most: float) -> float:
    return float(math.exp(random.uniform(math.log(least), math.log(most))))
