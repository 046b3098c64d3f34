"""Expected times of models on a machine that was not measured, from ratios on other machines (``priors.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from edgespec.interfaces.model import HOST, Mixture, ModelFacts
from edgespec.planning.cost.curve import ContextCurves, Curve, DraftCost, ExpertTimes

# Context of the second curve: the cost of context is linear, so any two contexts will do.
_FAR_TOKENS = 4096

# Widths at which a mixture's experts are expected; their number bends between them.
_EXPERT_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@cache
def _tables() -> Mapping[str, Any]:
    text = resources.files("edgespec.calibration").joinpath("priors.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def expected_plain_s(facts: ModelFacts) -> float:
    """T(1) in seconds by the bytes that a forward reads: right within a factor of about three."""
    return facts.bytes_per_forward / float(_tables()["reading"]["bytes_per_s"])


def expected_curves(facts: ModelFacts, plain_s: float) -> ContextCurves | None:
    """T(w) in seconds of a model whose T(1) is about ``plain_s``.

    None if rows may cost as much as forwards: in runtimes other than ours, and in our portable C.
    """
    shape = _tables()["verification"].get(_level(facts))
    if shape is None:
        return None
    near = Curve(widths=tuple(shape["widths"]), forward_s=tuple(plain_s * ratio for ratio in shape["ratios"]))
    experts = None
    if facts.mixture is not None:
        near, experts = _mixed(near, facts.mixture)
    table = _tables()["context"]
    added = Curve(widths=tuple(table["widths"]), forward_s=tuple(plain_s * share for share in table["shares"]))
    far_s = (
        seconds + _FAR_TOKENS / 1000 * added.seconds(width)
        for width, seconds in zip(near.widths, near.forward_s, strict=True)
    )
    far = Curve(widths=near.widths, forward_s=tuple(far_s))
    return ContextCurves(contexts=(0, _FAR_TOKENS), curves=(near, far), experts=experts)


def _mixed(dense: Curve, mixture: Mixture) -> tuple[Curve, ExpertTimes]:
    """T(w) of a mixture whose T(1) is a dense model's: its experts' share follows how many a forward reads.

    Rows are taken to share experts by chance alone: of a text they share more, which decoding counts.
    """
    left, share = 1.0 - mixture.used / mixture.count, mixture.share
    experts = ExpertTimes(
        widths=_EXPERT_WIDTHS,
        read=tuple(mixture.count * (1.0 - left**width) for width in _EXPERT_WIDTHS),
        expert_s=dense.plain_s * share / mixture.used,
    )
    forward_s = (
        (1.0 - share) * dense.seconds(width) + experts.expert_s * experts.read_by(width) for width in _EXPERT_WIDTHS
    )
    return Curve(widths=_EXPERT_WIDTHS, forward_s=tuple(forward_s)), experts


def expected_draft_cost(drafter: ModelFacts, target: ModelFacts, plain_s: float) -> DraftCost | None:
    """Expected cost of drafting for a target whose T(1) is ``plain_s``; None if it cannot be estimated.

    A one-pass drafter's cannot: no such drafter was measured.
    """
    if drafter.mask_id is not None:
        return None
    drafting, level = _tables()["drafting"], _level(drafter)
    if level not in drafting["reading"] or _level(target) not in drafting["reading"]:
        return None
    token_s = plain_s * float(drafting["of_bytes"]) * drafter.bytes_per_forward / target.bytes_per_forward
    return DraftCost(token_s=token_s, lag_token_s=token_s * float(drafting["reading"][level]))


def expected_acceptance(source: str, *, translated: bool = False) -> float:
    """The probability that a token drafted by ``source`` is accepted, without regard to the text.

    ``translated``: it is a model with another vocabulary.
    """
    return float(_tables()["acceptance"]["translated" if translated else source])


def _level(facts: ModelFacts) -> str | None:
    """The instruction set of a model in our kernels; None in another runtime."""
    if not (facts.bit_equal_by_construction or facts.follows) or facts.device != HOST:
        return None
    level = facts.settings.get("level")
    return level if isinstance(level, str) else None
