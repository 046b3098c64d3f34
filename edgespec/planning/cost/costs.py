"""What a machine, a target and its drafters are known to cost: the input of a plan and its depth policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import FREE, ContextCurves, DraftCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What calibration knows: target curves (None: not calibrated) and the cost of each source's drafts.

    ``plain_s`` is T(1), which may be known without curves. A source that is missing was not measured and does not
    draft. ``acceptance`` holds what earlier conversations taught, by position. ``contention`` is the mutual slowdown
    of target and drafting model (None: not measured). ``load_s`` is the expected time that loading the drafting model
    takes from the current answer; 0.0 once loaded. ``measured`` is False if the times are priors, scaled to this
    machine. ``quiet`` is False if other programs disturbed them and no priors are known: they fill the gap, and no
    mode, place or drafter is chosen by them. ``checked`` is False until answers have confirmed measured times.
    ``translated``: the sources with another vocabulary.
    """

    curves: ContextCurves | None = None
    plain_s: float | None = None
    drafts: Mapping[str, DraftCost] = field(default_factory=dict)
    acceptance: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    contention: Contention | None = None
    load_s: float = 0.0
    measured: bool = True
    quiet: bool = True
    checked: bool = True
    translated: frozenset[str] = frozenset()

    @property
    def model(self) -> str | None:
        """The source of the drafting model, whose drafts cost time; None without one that was timed."""
        return next((source for source, cost in self.drafts.items() if cost != FREE), None)

    @property
    def model_cost(self) -> DraftCost | None:
        return None if self.model is None else self.drafts[self.model]
