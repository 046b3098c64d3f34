"""The cost model's prediction for each answer, compared with the measured time.

The prediction is the time of the rounds that were run, from their widths, contexts and drafter forwards; the number
of rounds depends on the text and belongs to the acceptance model. Two predictions are reported. The *current* one
uses what was known when the answer began: the calibrated curve, with each width corrected by its latest forwards in
the run. The *calibrated* one omits the correction, and so shows how far the machine has drifted since calibration.
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

# Forwards of one width, and drafts, in the median that estimates the machine's present speed: a third of an answer of
# the quick suite, enough to outvote one stall and few enough to forget the last minute.
_RECENT = 32


class _CurrentCosts:
    """The costs of one run, as known before each answer.

    The arms alternate, so every width is measured regularly. Within an answer an arm mixes widths as a depth policy
    must (``planning.plain_ratio``).
    """

    def __init__(self, curves: ContextCurves, draft: DraftCost | None) -> None:
        self._curves = curves
        self._draft = draft
        self._forwards: dict[int, deque[float]] = {}  # measured divided by calibrated seconds, by width
        self._drafts: deque[float] = deque(maxlen=_RECENT)

    def _calibrated_s(self, record: RoundRecord) -> float:
        return self._curves.at(record.context_length).seconds(record.width)

    def _factor(self, width: int) -> float:
        """Measured over calibrated time of a forward at present; an unmeasured width has the factor of plain
        forwards.
        """
        seen = self._forwards.get(width) or self._forwards.get(1)
        return statistics.median(seen) if seen else 1.0

    def seconds(self, rounds: Sequence[RoundRecord]) -> float | None:
        """Seconds of these rounds; None if their drafting has an unmeasured part."""
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
    """Predicted divided by measured tokens a second, by arm: the median over the arm's answers.

    ``answers``: all answers of a run, of every arm and in the order in which they were given; each answer is
    predicted from the answers before it. An arm without predictions is missing.
    """
    if costs.curves is None:
        return {}
    known = _CurrentCosts(costs.curves, costs.model_cost)
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        ratio = _ratio(answer, known.seconds(answer.rounds))
        if ratio is not None:
            ratios.setdefault(answer.arm, []).append(ratio)
        known.learn(answer.rounds)
    return {arm: statistics.median(own) for arm, own in ratios.items()}


def calibrated(costs: Costs, answers: Sequence[Answer]) -> dict[str, float]:
    """The same ratio from the calibrated curve alone.

    Plain decoding is compared with the curve itself, every other arm with the curve at the speed of the run's plain
    decoding, so that a machine that is busier than during calibration does not count twice.
    """
    curves = costs.curves
    if curves is None:
        return {}
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        ratio = _ratio(answer, _predicted_s(curves, costs.model_cost, answer.rounds, {}))
        if ratio is not None:
            ratios.setdefault(answer.arm, []).append(ratio)
    medians = {arm: statistics.median(own) for arm, own in ratios.items()}
    plain_ratio = medians.get(PLAIN, 1.0)
    return {arm: ratio if arm == PLAIN else ratio / plain_ratio for arm, ratio in medians.items()}


def _ratio(answer: Answer, predicted_s: float | None) -> float | None:
    """Measured divided by predicted seconds, without the drafter's catching up, which is measured separately."""
    measured_s = answer.decode_s - sum(record.sync_s for record in answer.rounds)
    return measured_s / predicted_s if predicted_s and measured_s > 0 else None


def _predicted_s(
    curves: ContextCurves, draft: DraftCost | None, rounds: Sequence[RoundRecord], factors: Mapping[int, float]
) -> float | None:
    """``factors``: how much longer than calibrated a forward of a width takes; 1 for missing widths."""
    total = 0.0
    for record in rounds:
        drafted = _drafting_s(draft, record)
        if drafted is None:
            return None
        total += drafted + factors.get(record.width, 1.0) * curves.at(record.context_length).seconds(record.width)
    return total


def _drafting_s(draft: DraftCost | None, record: RoundRecord) -> float | None:
    """Seconds of the round's drafting without catching up; None if part of the drafting was not measured."""
    if not record.draft_forwards:
        return 0.0
    if draft is None:
        return None
    if draft.one_pass is not None:
        # Catching up and drafting are one forward. Tokens that were drafted and not proposed are not recorded.
        return 0.0 if record.sync_s > 0 else draft.usual_seconds(max(1, record.depth), record.emitted)
    return draft.at(record.context_length).seconds(record.forwards_after_reading)
