"""The expected gain of a drafter before its first load, by the same ranking that makes plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edgespec.calibration.measurement_store import Measurements
from edgespec.calibration.priors import expected_acceptance
from edgespec.engine.pair.measurements import PairMeasurements
from edgespec.interfaces.drafting import MODEL
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.reasons import Reason
from edgespec.placement.candidates import Placements
from edgespec.planning.choice.options import Candidate, Ranking, Rejected
from edgespec.planning.choice.planner import DraftingModel, PlanRequest
from edgespec.planning.cost.acceptance import POSITIONS, Acceptance
from edgespec.planning.cost.margins import SLOWER_ALLOWED
from edgespec.planning.cost.widths import WIDEST, WidthProbe

# Largest share of the target's bytes that a draft token may read where no times are known. With 0.6 of the tokens
# right, free rows, and a guess that takes 1.25 times its share of a plain step (calibration/priors.toml), drafting is
# faster than plain decoding below 0.45 (a margin of 0.02 for measurement error included).
MOST_SHARE = 0.45

# Verdicts of a ranking that accept a drafter.
_GAINS = ("expected_gain", "depth_asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """``speedup`` is the expected one over plain decoding, ``at_least`` that with the fewest right guesses which the
    counted ones allow; None without times. ``why_not``: None to accept.

    ``share`` is what a draft token reads, divided by what a plain step reads. ``translated``: its
    vocabulary is another one. ``measured``: the times, and how often it is right, are those of this machine.
    """

    speedup: float | None
    share: float
    why_not: Reason | None
    translated: bool = False
    measured: bool = False
    at_least: float | None = None

    @property
    def order(self) -> tuple[bool, float, float]:
        """Sort key: the target's vocabulary first, then larger gains, then fewer bytes.

        How often translated guesses are right depends on the language, so by estimates they lose (``beats``).
        """
        return (self.translated, 0.0 if self.speedup is None else -round(self.speedup, 6), self.share)

    def beats(self, other: Judgement) -> bool:
        """Whether both were measured on this machine, and this one is faster by more than measurements differ.

        A first calibration counts the right ones of 72 guesses: of two equal drafters one often seems better.
        """
        if self.why_not is not None or not (self.measured and other.measured):
            return False
        return (self.at_least or 0.0) > SLOWER_ALLOWED * (other.speedup or 0.0)


def judge_drafter(
    store: Measurements, target: ModelFacts, drafting: DraftingModel, request: PlanRequest, allowed_bytes: int
) -> Judgement:
    """Whether a drafter that the user did not name is expected to be faster than plain decoding.

    Times are those of this machine while it was quiet, or of similar machines. The drafter is accepted if it gains
    with the usual acceptance or with that of earlier conversations: one unusual text does not rule out a drafter
    permanently. ``speedup`` uses the acceptance of earlier conversations. ``allowed_bytes`` are for both models.
    """
    share = drafting.facts.bytes_per_forward / max(1, target.bytes_per_forward)
    known = PairMeasurements(store, target, replace(request, copies=False, drafters=(drafting,)))
    costs, probe = known.costs(), known.widths()
    if probe is None and target.bit_equal_by_construction:  # the self-check confirms it once the target is loaded
        probe = WidthProbe(widths=tuple(range(1, WIDEST + 1)), complete=True)

    def rank(acceptance: Mapping[str, tuple[float, ...]]) -> Ranking | None:
        if not costs.quiet:
            return None
        known_so_far = replace(costs, acceptance=acceptance)
        return known.ranking(probe, known_so_far, Placements(), allowed_bytes, loaded=False)

    prior = expected_acceptance(MODEL, translated=drafting.translated is not None)
    usual, translated = _judge(rank({MODEL: (prior,)}), share), drafting.translated is not None
    if MODEL not in known.priors:
        return replace(usual, translated=translated)
    taught = _judge(rank(costs.acceptance), share)
    if usual.why_not is None:
        usual = replace(usual, speedup=taught.speedup)
    elif taught.why_not is None:
        usual = taught
    surely = {MODEL: Acceptance(known.priors[MODEL].at_least).by_position(POSITIONS)}
    at_least = _judge(rank(surely), share).speedup
    return replace(usual, translated=translated, measured=costs.measured and costs.quiet, at_least=at_least)


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
        "not_expected_to_pay", f"too large: a guess reads {share:.2f} times as many bytes as a token of the target"
    )
    return Judgement(speedup=None, share=share, why_not=large if share > MOST_SHARE else None)


def _of_candidate(best: Candidate, share: float) -> Judgement:
    if best.verdict.code in _GAINS:
        return Judgement(speedup=best.speedup, share=share, why_not=None)
    said = f"too large: no gain expected ({best.drafted_tokens_per_s * best.target.curve.plain_s:.2f}x)"
    return Judgement(speedup=best.speedup, share=share, why_not=Reason("not_expected_to_pay", said))


def _sentence(verdict: Reason) -> Reason:
    return Reason(verdict.code, f"too large: {verdict.text}") if verdict.code == "cannot_pay" else verdict


def _possible(one: Rejected) -> float:
    return one.possible_speedup or 0.0
