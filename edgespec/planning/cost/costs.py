"""What a machine, a target and its drafters are known to cost: what a plan and its depth policy are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import ContextCurves, DraftCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What calibration knows: target curves (None: not calibrated) and the price of each source's drafts.

    ``plain_s`` is T(1), which may be known where the curves are not.
    A source that is missing was not measured and does not draft. ``acceptance`` holds what earlier conversations
    taught, by position. ``contention`` is what target and drafting model cost each other (None: not measured).
    ``load_s`` is what loading the drafting model is expected to take from the answer under way; 0.0 once it is
    loaded.
    ``measured`` is False where the times are priors, scaled to this machine.
    """

    curves: ContextCurves | None = None
    plain_s: float | None = None
    drafts: Mapping[str, DraftCost] = field(default_factory=dict)
    acceptance: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    contention: Contention | None = None
    load_s: float = 0.0
    measured: bool = True
