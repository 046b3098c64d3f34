"""Rotary embeddings as a model's metadata states them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec.architectures.facts import Facts, UnsupportedError

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"

DEFAULT_ROPE_BASE = 10_000.0  # llama.cpp's, for a file that states none
_YARN_FAST, _YARN_SLOW = 32.0, 1.0  # llama.cpp's


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al., 2023): pairs that turn more than ``fast`` times within the original context keep their
    frequency, those of less than ``slow`` turns are scaled, and those between are mixed."""

    original_context: int
    fast: float = _YARN_FAST
    slow: float = _YARN_SLOW

    def kept(self, base: float, length: int) -> tuple[float, ...]:
        """The share of the unscaled frequency that each pair of a head's leading ``length`` elements keeps."""

        def pair_of(turns: float) -> float:
            return length * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = max(0, math.floor(pair_of(self.fast))), min(length - 1, math.ceil(pair_of(self.slow)))
        spread = max(0.001, last - first)  # llama.cpp's bound for pairs at the same distance
        return tuple(1.0 - min(1.0, max(0.0, (pair - first) / spread)) for pair in range(length // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al., 2021): angles are position / base**(2i / length) / divisors[i].

    Divisors are ``scale``, mixed with 1 by ``yarn``, times those in the tensor ``factors``; ``long_factors`` replaces
    it in contexts longer than the model's original one. Cosines and sines are multiplied by ``magnitude``. Of a head
    the leading ``length`` elements are rotated, by default as many as the shape says.
    """

    base: float
    scale: float = 1.0
    factors: str | None = None
    long_factors: str | None = None
    yarn: Yarn | None = None
    magnitude: float = 1.0
    length: int | None = None

    def divisors(self, length: int) -> tuple[float, ...]:
        """What scaling divides the frequency of each pair of a head's leading ``length`` elements by."""
        if self.yarn is None:
            return (self.scale,) * (length // 2)
        return tuple(1.0 / (kept + (1.0 - kept) / self.scale) for kept in self.yarn.kept(self.base, length))


def one_rope(facts: Facts) -> tuple[Rope, ...]:
    """The rope of layers that see all positions. Raises UnsupportedError, ModelFileError."""
    is_long, is_yarn = LONG_FACTORS in facts.tensors, facts.value("rope.scaling.type") == "yarn"
    scale = _rope_scale(facts, is_long=is_long)
    return (
        Rope(
            base=facts.number("rope.freq_base", DEFAULT_ROPE_BASE),
            scale=scale,
            factors=SHORT_FACTORS if is_long else ROPE_FACTORS if ROPE_FACTORS in facts.tensors else None,
            long_factors=LONG_FACTORS if is_long else None,
            yarn=_yarn(facts) if is_yarn else None,
            magnitude=facts.number("rope.scaling.attn_factor", 1.0)
            * _yarn_magnitude(facts, scale if is_yarn else 1.0),
        ),
    )


_YARN = "rope.scaling.yarn_"
# Far beyond every published model; within them no logarithm or quotient is infinite.
_YARN_BASES, _YARN_TURNS = (2.0, 1e12), (1e-6, 1e6)


def _yarn(facts: Facts) -> Yarn:
    for key in ("ext_factor", "attn_factor"):
        if facts.value(_YARN + key) not in (None, 1.0):
            raise UnsupportedError(f"its {_YARN}{key} is {facts.value(_YARN + key)!r:.40}")
    facts.number("rope.freq_base", DEFAULT_ROPE_BASE, within=_YARN_BASES)
    return Yarn(
        original_context=facts.integer(
            "rope.scaling.original_context_length", facts.integer("context_length"), least=1
        ),
        fast=facts.number(_YARN + "beta_fast", _YARN_FAST, within=_YARN_TURNS),
        slow=facts.number(_YARN + "beta_slow", _YARN_SLOW, within=_YARN_TURNS),
    )


def _yarn_magnitude(facts: Facts, scale: float) -> float:
    """1 + ln(scale) / 10, divided by the same with the file's factor of the logarithm, as in llama.cpp."""

    def growth(factor: float) -> float:
        return 1.0 + 0.1 * factor * math.log(max(1.0, scale))

    multiplier = (
        facts.number(_YARN + "log_multiplier", within=(1e-6, 1e6)) if facts.value(_YARN + "log_multiplier") else 0.0
    )
    return growth(1.0) / growth(multiplier)


def _rope_scale(facts: Facts, *, is_long: bool) -> float:
    kind = facts.value("rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn") and not (is_long and kind == "longrope"):
        raise UnsupportedError(f"its rope scaling is {kind!r:.40}")
    # A factor without a type is linear; rope.scale_linear is its old name. llama.cpp writes 0 for no scaling.
    key = (
        "rope.scaling.factor"
        if kind in ("linear", "yarn") or facts.value("rope.scaling.factor") is not None
        else None
    )
    key = key or "rope.scale_linear"
    if kind == "none" or facts.value(key) == 0:
        return 1.0
    return facts.number(key, None if kind in ("linear", "yarn") else 1.0)
