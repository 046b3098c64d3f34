"""Measurements of a target and its drafter on this machine: times, and acceptance in conversations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from edgespec.calibration.kinds import ACCEPTANCE, ANSWERED, CONTENTION, HISTORY, PLACE, PLAIN, TIMES, WIDTHS
from edgespec.calibration.measurement_store import Measurements
from edgespec.calibration.priors import (
    expected_acceptance,
    expected_curves,
    expected_draft_cost,
    expected_plain_s,
)
from edgespec.calibration.timing import ModelTimes
from edgespec.files.disk import counted
from edgespec.interfaces.drafting import COPIES, FORCED, MODEL
from edgespec.interfaces.model import HOST, ModelFacts
from edgespec.interfaces.policy import DepthPolicy
from edgespec.interfaces.reasons import Reason
from edgespec.placement.candidates import Placement, Placements
from edgespec.planning.choice.evaluation import taken_bytes
from edgespec.planning.choice.options import DrafterOption, Footprint, Ranking, Rejected, TargetOption
from edgespec.planning.choice.plan import Mode
from edgespec.planning.choice.planner import (
    DraftingModel,
    PlanRequest,
    contention_of,
    decide,
    depth_cap,
    drafter_options,
)
from edgespec.planning.choice.ranking import Pair
from edgespec.planning.choice.settled import Answered, clearly_faster, usual_seconds
from edgespec.planning.cost.acceptance import NO_PRIOR, POSITIONS, Acceptance, AcceptancePrior
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE, Curve, DraftCost, best_possible
from edgespec.planning.cost.margins import DRAFT_MARGIN, SLOWER_ALLOWED
from edgespec.planning.cost.widths import WidthProbe, holds_for, probe_starts
from edgespec.planning.depth.control import DepthControl
from edgespec.planning.depth.experience import SAMPLED
from edgespec.planning.depth.outcome import Outcome
from edgespec.runtimes.llama.context import EVERY_LAYER

CONTRADICTED = Reason(
    "times_contradicted",
    "two answers in a row contradicted the measured times: `edgespec calibrate --quick` measures them again",
)
MEASURED_BUSY = Reason(
    "measured_busy",
    "other programs kept the processor busy during this measurement: the times are rough, choose no mode and no "
    "drafter, and are measured again when the machine is idle",
)


class PairMeasurements:
    """Reads and writes ``store`` for one target and what may draft for it: ``request`` and ``stored_texts`` say that.

    The request's context is the longest that the width classes must cover.
    """

    def __init__(
        self, store: Measurements, target: ModelFacts, request: PlanRequest, stored_texts: Sequence[str] = ()
    ) -> None:
        self.store = store
        self.target = target
        self.request = request
        self.drafter_failure: str | None = None  # why the drafter could not be loaded and measured
        self._stored_texts = tuple(stored_texts)
        self.priors: dict[str, AcceptancePrior] = {}
        learning = (*request.sources, *stored_texts)
        for source in (*learning, *(source + SAMPLED for source in learning)):
            prior = self._load_prior(source)
            if prior is not None and prior != NO_PRIOR:
                self.priors[source] = prior
        self.history = self.store.load(HISTORY, self.target, self._identity(MODEL))
        self.answered = self._kept = self.store.load(ANSWERED, self.target, self.drafter) or Answered()

    @property
    def drafter(self) -> ModelFacts | None:
        """The first drafting model; None without one."""
        return next((model.facts for model in self.request.drafters), None)

    def _load_prior(self, source: str) -> AcceptancePrior | None:
        """The stored acceptance. An unusable file is replaced here: without drafting no other code replaces it."""
        before = len(self.store.unusable)
        prior = self.store.load(ACCEPTANCE, self.target, self._identity(source))
        if len(self.store.unusable) > before:
            self.store.save(ACCEPTANCE, NO_PRIOR, self.target, self._identity(source))
        return prior

    @property
    def notes(self) -> tuple[Reason, ...]:
        """The plan's first reasons: where the target runs, and which measurements were ignored."""
        layers = self.target.settings.get("gpu_layers", EVERY_LAYER)
        some = "" if layers == EVERY_LAYER else f", {layers} of its layers"
        where = f"{self.target.name}{some} on {self.target.device}, {counted(self.target.threads, 'thread')}"
        notes = [Reason("target_place", where)]
        settled = self.store.settled(PLACE, self.target)
        if settled.chosen is not None:
            runtime, device, _ = settled.chosen
            there = settled.chosen[:2] == (self.target.runtime, self.target.device)
            where = "it runs there unless a place is set" if there else "it does not run there now"
            said = f"calibrations agree that {runtime} on {device} is fastest: {where}"
            notes.append(Reason("target_taken_over", said))
        if settled.ahead is not None:
            runtime, device, _ = settled.ahead
            said = (
                f"the last calibration found {runtime} on {device} clearly faster: if the next one agrees, it moves"
            )
            notes.append(Reason("target_may_move", said))
        if self.drafter_failure is not None:
            notes.append(Reason("drafter_lost", f"the model drafter is lost: {self.drafter_failure}"))
        if self.disturbed:
            notes.append(MEASURED_BUSY)
        if self.answered.times.chosen == "estimated":
            notes.append(CONTRADICTED)
        return (*notes, *(Reason("measurement_ignored", note) for note in self.store.notes))

    def widths(self) -> WidthProbe | None:
        """The target's stored probe; None without one, or if it was made for a shorter context."""
        return self._widths_of(self.target)

    def _widths_of(self, facts: ModelFacts) -> WidthProbe | None:
        probe = self.store.load(WIDTHS, facts)
        return probe if probe is not None and holds_for(probe, facts, self.request.context_length) else None

    def target_times(self) -> ModelTimes | None:
        """The target's stored times; None without, or if measured for a shorter (faster) context."""
        return self._times_of(self.target)

    def _times_of(self, facts: ModelFacts) -> ModelTimes | None:
        times, longest = self.store.load(TIMES, facts), probe_starts(self.request.context_length)[-1]
        return times if times is not None and times.contexts[-1] >= longest else None

    def drafter_times(self) -> ModelTimes | None:
        return None if self.drafter is None else self.store.load(TIMES, self.drafter)

    def costs(self) -> Costs:
        """Curves and costs: those of quiet measurements, else estimates, else those that other programs disturbed.

        Estimates are the times of similar machines, scaled to this machine's plain forwards. Where the target's are
        estimates, the drafters' are too: the plan rests on their ratio.
        """
        times, models = self.target_times(), self.request.drafters
        plain_s = self.store.plain_s(self.target)
        guessed_s = plain_s or self._expected_plain_s()
        quiet = times is not None and not (times.busy or self.answered.times.chosen == "estimated")
        curves, used = expected_curves(self.target, guessed_s), list[ModelTimes]()
        if times is not None and (quiet or curves is None):
            curves, used = times.curves, [times]
        acceptance = {source: Acceptance(prior).by_position(POSITIONS) for source, prior in self.priors.items()}
        drafts = {COPIES: FREE} if self.request.copies else {}
        for model in models:
            timed, price = self.store.load(TIMES, model.facts), None
            if self.drafter_failure is None:
                price = expected_draft_cost(model.facts, self.target, guessed_s)
            if timed is not None and ((quiet and not timed.busy) or price is None):
                price, used = timed.cost_for(model.facts), [*used, timed]
            if price is not None:
                drafts[model.source] = price
        wanted = 1 if self.drafter_failure is not None else 1 + len(models)
        measured = times in used and len(used) >= wanted
        translated = frozenset(model.source for model in models if model.translated is not None)
        if not measured and curves is not None:
            usual = {
                source: (expected_acceptance(COPIES if source == COPIES else MODEL, translated=source in translated),)
                for source in drafts
            }
            acceptance = usual | acceptance
        drafts |= dict.fromkeys(self._stored_texts, FREE)
        return Costs(
            curves=curves,
            plain_s=plain_s,
            drafts=drafts,
            acceptance=acceptance,
            contention=None if self.drafter is None else self._contention(self.target, self.drafter),
            measured=measured,
            quiet=not any(each.busy for each in used),
            checked=not (measured and models) or self.answered.times.chosen == "measured",
            translated=translated,
        )

    def _expected_plain_s(self) -> float:
        """T(1) from the self-check, else by the bytes that a forward reads; at most that of a busy machine."""
        probe, times = self.widths(), self.target_times()
        seen_s = None if probe is None else probe.plain_forward_s
        expected_s = seen_s or expected_plain_s(self.target)
        return expected_s if times is None else min(expected_s, times.curves.curves[0].plain_s)

    def _contention(self, target: ModelFacts, drafter: ModelFacts) -> Contention | None:
        """How much the two slow each other down, as measured on a quiet machine."""
        both = self.store.load(CONTENTION, target, drafter)
        return None if both is None or both.busy else both

    @property
    def missing(self) -> bool:
        """Whether a measurement that the plan needs is missing and possible."""
        if not self.request.sources:
            return False
        if self.target_times() is None or self.widths() is None:
            return True
        if self.drafter is None or self.drafter_failure is not None:
            return False
        untimed = any(self.store.load(TIMES, model.facts) is None for model in self.request.drafters)
        return untimed or self.store.load(CONTENTION, self.target, self.drafter) is None

    @property
    def disturbed(self) -> bool:
        """Whether other programs disturbed the stored times, so that they should be measured again."""
        if self.store.busy_share(self.target):
            return True
        if self.drafter is None:
            return False
        both = self.store.load(CONTENTION, self.target, self.drafter)
        return self.store.busy_share(self.drafter) > 0 or (both is not None and both.busy > 0)

    @property
    def unproven(self) -> bool:
        """Whether a drafting model's acceptance is unknown, and it would be faster if it were always right."""
        unknown = [model.source for model in self.request.drafters if model.source not in self.priors]
        return self.drafter_failure is None and any(map(self.may_pay, unknown))

    def ranking(
        self,
        probe: WidthProbe | None,
        costs: Costs,
        places: Placements,
        allowed_bytes: int,
        *,
        loaded: bool = True,
    ) -> Ranking | None:
        """Every measured way to run, the plan first; None without known times.

        The target's place is fixed: other places are only compared (``settle_place``). A drafter may be in any of
        the ``places`` where it was timed, unless it is ``loaded``. A drafter is judged by its acceptance in earlier
        conversations.
        """
        if costs.curves is None:
            return None
        own = TargetOption(
            facts=self.target,
            footprint=self._footprint(self.target, places.targets),
            curve=costs.curves.curves[0],
            depth_cap_stable=depth_cap(self.target, probe),
            measured=costs.measured,
        )
        drafters = self._own_drafters(costs, places)
        memory = dict.fromkeys(
            (self.target.device, *(model.facts.device for model in self.request.drafters)), allowed_bytes
        )
        if places.targets or places.drafters:
            memory |= {HOST: allowed_bytes, **places.memory_bytes}
        for name, needed in taken_bytes(own, drafters if loaded else ()).items():
            memory[name] = max(memory.get(name, 0), needed)  # loaded models fit
        others, refused = self._other_targets(places)
        moved, untimed = self._other_drafters(drafters, costs, places, loaded=loaded)
        options = drafter_options(self.request, [*drafters, *moved])
        agreed: dict[Pair, Mode] = {}
        if self.drafter is not None and self.answered.mode.chosen is not None:
            agreed[self.target.device, self.drafter.device] = self.answered.mode.chosen
        ranking = decide(self.request, [own, *others], options, memory, self._pairs(costs, places), agreed)
        return None if ranking is None else replace(ranking, rejected=(*ranking.rejected, *refused, *untimed))

    def _footprint(self, facts: ModelFacts, places: Sequence[Placement]) -> Footprint:
        """That of the model in its current setting."""
        here = (place.footprint for place in places if place.facts.setting == facts.setting)
        return next(here, Footprint.whole(facts, self.request.context_length))

    def _own_drafters(self, costs: Costs, places: Placements) -> list[DrafterOption]:
        """Each drafting model with a known cost, in its current setting."""
        return [
            _drafting(model, costs, cost, self._footprint(model.facts, places.drafters))
            for model in self.request.drafters
            if (cost := costs.drafts.get(model.source)) is not None
        ]

    def _other_targets(self, places: Placements) -> tuple[list[TargetOption], list[Rejected]]:
        """The target in the other places where it was timed, and the rest with reasons."""
        timed, refused = list[TargetOption](), list[Rejected]()
        for place in places.targets:
            if place.facts.setting == self.target.setting:
                continue
            option = self._option_at(place)
            if option is not None:
                timed.append(option)
            elif place.facts.place != self.target.place:  # the target's own setting already stands for its place
                refused.append(places.too_small(place) or place.not_measured())
        return timed, refused

    def _other_drafters(
        self, own: Sequence[DrafterOption], costs: Costs, places: Placements, *, loaded: bool
    ) -> tuple[list[DrafterOption], list[Rejected]]:
        """The drafting models in the other places where they were timed, and the rest with reasons."""
        timed, refused = list[DrafterOption](), list[Rejected]()
        here = {(one.facts.name, one.facts.device, one.facts.runtime) for one in own if one.facts is not None}
        for model, place in product(self.request.drafters, places.drafters):
            facts = place.facts
            if facts.name != model.facts.name or (facts.name, facts.device, facts.runtime) in here:
                continue
            times = self.store.load(TIMES, facts)
            if times is not None and not times.busy:
                there = _drafting(replace(model, facts=facts), costs, times.cost_for(facts), place.footprint)
                timed.append(replace(there, eligible=not loaded))
            else:
                refused.append(places.too_small(place, drafting=True) or place.not_measured(drafting=True))
        return timed, refused

    def _pairs(self, costs: Costs, places: Placements) -> dict[Pair, Contention]:
        """The contention of the target's device with each device that may draft; none between disturbed times."""
        pairs: dict[Pair, Contention] = {}
        if not costs.quiet and self.request.mode != "pipelined":
            return pairs
        both = contention_of(self.request, costs)
        if both is not None and self.drafter is not None:
            pairs[self.target.device, self.drafter.device] = both
        for place in places.drafters:
            measured = self._contention(self.target, place.facts)
            if measured is not None:
                pair = self.target.device, place.facts.device
                pairs[pair] = measured.worse(pairs.get(pair))
        return pairs

    def _option_at(self, place: Placement) -> TargetOption | None:
        """The target as timed in another place, on a quiet machine, for contexts of this length; None without."""
        times, probe = self._times_of(place.facts), self._widths_of(place.facts)
        if times is not None and not times.busy:
            curve, stable = times.curves.curves[0], None if probe is None else probe.depth_cap
        elif (seconds := self.store.load(PLAIN, place.facts)) is not None:
            curve, stable = Curve(widths=(1,), forward_s=(seconds,)), 0
        else:
            return None
        return TargetOption(
            facts=place.facts, footprint=place.footprint, curve=curve, depth_cap_stable=stable, eligible=False
        )

    def settle_place(self, places: Placements) -> None:
        """Compare the target's quiet times here and in other places: change the place once two calibrations agree.

        A change takes effect with the next load.
        """
        times, widths = self.target_times(), self.widths()
        here = next((place for place in places.targets if place.facts.place == self.target.place), None)
        if times is None or times.busy or here is None:
            return
        own_s = usual_seconds(times.curves.curves[0], depth_cap(self.target, widths))
        others = {
            place.key: usual_seconds(option.curve, option.depth_cap_stable)
            for place in places.targets
            if place is not here and places.room(place) and (option := self._option_at(place)) is not None
            if self._reads_as_fast(place.facts, times)
        }
        before = self.store.settled(PLACE, self.target)
        after = before.after(clearly_faster(own_s, others))
        if after != before:
            self.store.save(PLACE, after, self.target)

    def _reads_as_fast(self, facts: ModelFacts, own: ModelTimes) -> bool:
        """Whether the target reads prompts there at least about as fast as here, as far as that was timed."""
        there = self._times_of(facts)
        return there is None or there.prompt_token_s <= SLOWER_ALLOWED * own.prompt_token_s

    def place_announced(self) -> None:
        """Note that the user has seen the notice about the target's new place."""
        settled = self.store.settled(PLACE, self.target)
        here = self.target.runtime, self.target.device
        if settled.chosen is not None and settled.chosen[:2] == here and not settled.announced:
            self.store.save(PLACE, replace(settled, announced=True), self.target)

    def may_pay(self, source: str) -> bool:
        """Whether drafting by ``source`` would be faster than plain decoding if every guess were accepted."""
        costs, widths = self.costs(), self.widths()
        cost = costs.drafts.get(source)
        if costs.curves is None or cost is None or widths is None:
            return False
        return best_possible(costs.curves.curves[0], cost, widths.depth_cap).speedup > DRAFT_MARGIN

    def learn_prior(self, source: str, acceptance: Acceptance, most_tokens: float = math.inf) -> None:
        """Store a source's measured acceptance, before any conversation, each rate of at most ``most_tokens``."""
        self.priors[source] = acceptance.as_prior().of_at_most(most_tokens)
        self.store.save(ACCEPTANCE, self.priors[source], self.target, self._identity(source))

    def learn_answer(self, outcome: Outcome) -> bool:
        """Note what an answer got of its plan; True if the plan follows from now on what answers agreed on."""
        before, self.answered = self.answered, self.answered.after(outcome)
        now = self.answered
        if (before.times, before.mode) != (now.times, now.mode):
            self._keep_answers()
        return (before.times.chosen, before.mode.chosen) != (now.times.chosen, now.mode.chosen)

    def forget_answers(self) -> None:
        """Forget what answers said of the times, because they were measured again."""
        self.answered = self._kept = Answered()
        self.store.forget(ANSWERED, self.target, self.drafter)

    def _keep_answers(self) -> None:
        if self.answered != self._kept:
            self.store.save(ANSWERED, self.answered, self.target, self.drafter)
            self._kept = self.answered

    def keep(self, policy: DepthPolicy) -> None:
        """Store what a policy has learned, for the next process."""
        self._keep_answers()
        if not isinstance(policy, DepthControl):
            return
        for source, prior in policy.priors().items():
            # Forced tokens are right for any target, so that no process needs to have learned it.
            if source.removesuffix(SAMPLED) != FORCED and prior != self.priors.get(source, NO_PRIOR):
                self.priors[source] = prior
                self.store.save(ACCEPTANCE, prior, self.target, self._identity(source))
        history = policy.history()
        if history.lengths and history != self.history:
            self.history = history
            self.store.save(HISTORY, history, self.target, self._identity(MODEL))

    def _identity(self, source: str) -> str:
        """A source's key in the store; a model's file and weight format are part of it."""
        named = source.removesuffix(SAMPLED)
        facts = next((model.facts for model in self.request.drafters if model.source == named), None)
        if facts is None:
            return source
        weights = facts.settings.get("weights")
        kept_as = "" if weights is None else f":{weights}"
        return f"{source}:{facts.sha256 or facts.name}{kept_as}"


def _drafting(model: DraftingModel, costs: Costs, cost: DraftCost, footprint: Footprint) -> DrafterOption:
    return DrafterOption(
        source=model.source,
        cost=cost,
        acceptance=tuple(costs.acceptance.get(model.source, ())),
        facts=model.facts,
        # The input's embedding, which a drafter on a device leaves in the machine's memory, is not counted.
        footprint=replace(footprint, host_bytes=0),
    )
