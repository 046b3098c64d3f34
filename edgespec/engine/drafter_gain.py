"""What a drafter is expected to bring a target before it was ever loaded, by the ranking that makes plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edgespec.calibration.measurement_store import Measurements
from edgespec.calibration.priors import expected_acceptance
from edgespec.engine.pair_measurements import PairMeasurements
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.reasons import Reason
from edgespec.placement.candidates import Placements
from edgespec.planning.choice.options import Candidate, Ranking, Rejected
from edgespec.planning.choice.planner import PlanRequest
from edgespec.planning.cost.widths import WIDEST, WidthProbe

# A drafter is not to read more of a target's bytes than this where nobody knows times: with 0.6 of its tokens right
# and further rows for nothing, a guess of 1.25 times its share of a plain step (calibration/priors.toml) is repaid,
# with the two hundredths that are within what a measurement is off, below 0.45.
MOST_SHARE = 0.45

# The verdicts of a ranking on a drafter that nobody has to doubt.
_GAINS = ("expected_gain", "depth_asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """``speedup`` is over plain decoding, as expected; None where no times are known. ``why_not`` is None if it pays.

    ``share`` is what a draft token reads of what a plain step reads.
    """

    speedup: float | None
    share: float
    why_not: Reason | None

    @property
    def order(self) -> tuple[float, float]:
        """Those that gain more first; of equals those that read less."""
        return (0.0 if self.speedup is None else -round(self.speedup, 6), self.share)


def judge_drafter(
    store: Measurements, target: ModelFacts, drafter: ModelFacts, request: PlanRequest, allowed_bytes: int
) -> Judgement:
    """Whether a drafter that nobody named pays: a gain has to be expected, as nobody asked to wait for it.

    Times are those measured here, else those of similar machines. It pays if it does with as many right guesses as
    are usual, or as earlier conversations had: so one text of another kind does not end a drafter for good. How much
    it gains is what they taught. ``request`` asks for the model alone; ``allowed_bytes`` are for both.
    """
    share = drafter.bytes_per_forward / max(1, target.bytes_per_forward)
    known = PairMeasurements(store, target, drafter, request.sources, request.context_length)
    costs, probe = known.costs(), known.widths()
    if probe is None and target.bit_equal_by_construction:  # a self-check will say so, once the target is loaded
        probe = WidthProbe(widths=tuple(range(1, WIDEST + 1)), complete=True)

    def rank(acceptance: Mapping[str, tuple[float, ...]]) -> Ranking | None:
        known_so_far = replace(costs, acceptance=acceptance)
        return known.ranking(request, probe, known_so_far, Placements(), allowed_bytes, loaded=False)

    usual = _judge(rank({"model": (expected_acceptance("model"),)}), share)
    if "model" not in known.priors:
        return usual
    taught = _judge(rank(costs.acceptance), share)
    if usual.why_not is not None:
        return taught if taught.why_not is None else usual
    return replace(usual, speedup=taught.speedup)


def _judge(ranking: Ranking | None, share: float) -> Judgement:
    drafting = [] if ranking is None else [one for one in ranking.candidates if one.drafter is not None]
    if drafting:
        return _of_candidate(drafting[0], share)
    refused = [] if ranking is None else [one for one in ranking.rejected if one.drafter is not None]
    if refused:
        nearest = max(refused, key=_possible)
        if nearest.verdict.code not in ("widths_not_measured", "only_plain_measured"):
            return Judgement(speedup=nearest.speedup, share=share, why_not=_sentence(nearest.verdict))
    large = Reason(
        "not_expected_to_pay", f"too large: a guess of it reads {share:.2f} of what the target reads for a token"
    )
    return Judgement(speedup=None, share=share, why_not=large if share > MOST_SHARE else None)


def _of_candidate(best: Candidate, share: float) -> Judgement:
    if best.verdict.code in _GAINS:
        return Judgement(speedup=best.speedup, share=share, why_not=None)
    said = f"too large to be expected to pay ({best.drafted_tokens_per_s * best.target.curve.plain_s:.2f}x)"
    return Judgement(speedup=best.speedup, share=share, why_not=Reason("not_expected_to_pay", said))


def _sentence(verdict: Reason) -> Reason:
    return Reason(verdict.code, f"too large: {verdict.text}") if verdict.code == "cannot_pay" else verdict


def _possible(one: Rejected) -> float:
    return one.possible_speedup or 0.0
