"""What the cost model predicted for each answer, held against the time that it took.

Predicted is the time of the rounds that were run, from their widths, contexts and drafter forwards: how many there
were to be depends on the text, and is the acceptance model's affair. Two predictions are reported. The *current* one
is what was known when the answer began: the calibrated curve, each width corrected by its latest forwards in the run
until then. The *calibrated* one forgoes the correction, and so tells how far the machine has moved since it was
calibrated.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from edgespec.bench.arms import PLAIN
from edgespec.bench.run import Answer
from edgespec.interfaces.policy import RoundRecord
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import ContextCurves, DraftCost

# Forwards of one width, and drafts, whose median tells how fast the machine is at present: a third of an answer of
# the quick suite, so that one stall is outvoted and what was true a minute ago is not what counts.
_RECENT = 32


class _CurrentCosts:
    """The costs of one run as they are known from answer to answer.

    Arms take turns, so that every width was seen lately; the widths that one arm mixes within an answer are what a
    depth policy has to make do with (``planning.plain_ratio``).
    """

    def __init__(self, curves: ContextCurves, draft: DraftCost | None) -> None:
        self._curves = curves
        self._draft = draft
        self._forwards: dict[int, deque[float]] = {}  # measured over calibrated seconds, by width
        self._drafts: deque[float] = deque(maxlen=_RECENT)

    def _calibrated_s(self, record: RoundRecord) -> float:
        return self._curves.at(record.context_length).seconds(record.width)

    def _factor(self, width: int) -> float:
        """How many times longer a forward takes now; of a width not seen yet, as plain ones do."""
        seen = self._forwards.get(width) or self._forwards.get(1)
        return statistics.median(seen) if seen else 1.0

    def seconds(self, rounds: Sequence[RoundRecord]) -> float | None:
        """What these rounds take; None if they drafted with something that was not measured."""
        factors = {width: self._factor(width) for width in {1, *(record.width for record in rounds)}}
        draft = self._draft
        if draft is not None:
            draft = draft.scaled(statistics.median(self._drafts) if self._drafts else factors[1])
        return _predicted_s(self._curves, draft, rounds, factors)

    def learn(self, rounds: Sequence[RoundRecord]) -> None:
        for record in rounds:
            own = self._forwards.setdefault(record.width, deque(maxlen=_RECENT))
            own.append(record.verify_s / self._calibrated_s(record))
            drafted, expected_s = record.draft_s - record.sync_s, _drafting_s(self._draft, record)
            if expected_s and drafted > 0:
                self._drafts.append(drafted / expected_s)


def current(costs: Costs, answers: Iterable[Answer]) -> dict[str, float]:
    """Predicted tokens a second over measured ones by arm: the median over its answers.

    ``answers`` are all of a run, of every arm and in the order in which they were given: each is predicted with what
    those before it had taught. An arm without predictions is missing.
    """
    if costs.curves is None:
        return {}
    known = _CurrentCosts(costs.curves, costs.drafts.get("model"))
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        ratio = _ratio(answer, known.seconds(answer.rounds))
        if ratio is not None:
            ratios.setdefault(answer.arm, []).append(ratio)
        known.learn(answer.rounds)
    return {arm: statistics.median(own) for arm, own in ratios.items()}


def calibrated(costs: Costs, answers: Sequence[Answer]) -> dict[str, float]:
    """The same from the calibrated curve alone.

    Plain decoding is held against the curve itself, every other arm against the curve at the pace of the run's plain
    decoding, so that a machine that is busier than when it was calibrated does not count twice.
    """
    curves = costs.curves
    if curves is None:
        return {}
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        ratio = _ratio(answer, _predicted_s(curves, costs.drafts.get("model"), answer.rounds, {}))
        if ratio is not None:
            ratios.setdefault(answer.arm, []).append(ratio)
    medians = {arm: statistics.median(own) for arm, own in ratios.items()}
    plain_ratio = medians.get(PLAIN, 1.0)
    return {arm: ratio if arm == PLAIN else ratio / plain_ratio for arm, ratio in medians.items()}


def _ratio(answer: Answer, predicted_s: float | None) -> float | None:
    """Measured over predicted seconds. Catching up with text is measured apart and counts on neither side."""
    measured_s = answer.decode_s - sum(record.sync_s for record in answer.rounds)
    return measured_s / predicted_s if predicted_s and measured_s > 0 else None


def _predicted_s(
    curves: ContextCurves, draft: DraftCost | None, rounds: Sequence[RoundRecord], factors: Mapping[int, float]
) -> float | None:
    """``factors``: how many times longer than calibrated forwards of a width take; of one without, as calibrated."""
    total = 0.0
    for record in rounds:
        drafted = _drafting_s(draft, record)
        if drafted is None:
            return None
        total += drafted + factors.get(record.width, 1.0) * curves.at(record.context_length).seconds(record.width)
    return total


def _drafting_s(draft: DraftCost | None, record: RoundRecord) -> float | None:
    """What the round's drafting costs beside catching up; None if it drafted with something that was not measured."""
    if not record.draft_forwards:
        return 0.0
    # Catching up takes the first forward with it.
    return None if draft is None else draft.seconds(record.draft_forwards - (record.sync_s > 0))
