"""Who drafts for a target, in which setting, or why no model drafts: the whole decision of a load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgespec.calibration.measurement_store import Measurements
from edgespec.engine.pair.drafter_search import DrafterSearch, FoundDrafter, find_drafter
from edgespec.engine.pair.measurements import PairMeasurements
from edgespec.engine.pair.target_setting import PlacedTarget
from edgespec.errors import InvalidRequestError, MemoryLimitError
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import LoadProgress
from edgespec.interfaces.model import HOST
from edgespec.interfaces.reasons import Reason
from edgespec.placement.candidates import Placements, room_for_drafter, with_drafter
from edgespec.placement.memory import too_large_words
from edgespec.placement.prepared import Preparation, PreparedModel
from edgespec.planning.choice.options import Rejected
from edgespec.planning.choice.planner import DraftingModel, PlanRequest
from edgespec.runtimes.table import runtime_of
from edgespec.store.locate import Locator


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenDrafter:
    """The drafting model (None: none drafts), and what a plan is requested with.

    ``prepare`` has the profile that names the model's device, ``places`` are all of target and model. ``considered``
    are the files on this machine that do not draft, with reasons.
    """

    model: PreparedModel | None
    request: PlanRequest
    prepare: Preparation
    places: Placements
    considered: tuple[Rejected, ...] = ()


def find_drafter_of(target: PlacedTarget, locator: Locator, store: Measurements, tell: LoadProgress) -> FoundDrafter:
    """The drafter's file. Raises what locating raises for a drafter that the profile names.

    The profile's, else the target's own layer that drafts, else the catalogue's or a translated one that was measured
    to be faster here, else the one on this machine that is expected to gain most.
    """
    profile = target.prepare.profile
    if profile.draft == "auto" and profile.depth != 0 and target.has_drafting_layer:
        return FoundDrafter(file=target.model.file, layer=True)
    can_verify = target.model.facts.can_rewind

    def opened() -> DrafterSearch:
        return DrafterSearch(target, locator, store, _request(target.prepare, None), tell)

    def search() -> FoundDrafter:
        return opened().run() if can_verify else FoundDrafter()

    def faster(found: FoundDrafter) -> FoundDrafter:
        return opened().or_faster(found) if can_verify else found

    return _that_reads(target, find_drafter(profile, target.model.file, locator, search, faster, tell))


def _that_reads(target: PlacedTarget, found: FoundDrafter) -> FoundDrafter:
    """What was found, without a drafter that reads its target's cache where it cannot read this target's."""
    file = found.file
    if file is None or not file.header.reads_target:
        return found
    why = runtime_of(target.model.settings).why_not_read(file, target.model.file)
    return found if why is None else replace(found, file=None, off=f"{file.name} is not for this target: {why}")


def prepared_drafter(target: PlacedTarget, found: FoundDrafter) -> PreparedModel | None:
    """What was found, where its runtime puts it."""
    if found.file is None:
        return None
    return target.prepare.drafting_layer(target.model) if found.layer else target.prepare.drafter(found.file)


def choose_drafter(
    target: PlacedTarget, found: FoundDrafter, store: Measurements, context_why: Reason | None
) -> ChosenDrafter:
    """The drafter of a load: the file that was found, in its place.

    Only with ``auto`` a load continues without a drafter. For one that the profile names, this raises
    InvalidRequestError if it cannot draft for the target, and MemoryLimitError if it does not fit.

    It runs where it was measured to draft fastest, before any measurement where its runtime puts it, and not at all
    if it does not fit next to the target. ``context_why`` is the plan's (PlanRequest).
    """
    prepare, places = target.prepare, target.places
    request = _request(prepare, context_why)
    model, off = None, found.off
    if found.layer:
        model = prepared_drafter(target, found)
    elif found.file is not None:
        places = with_drafter(places, prepare, found.file)
        prepare = in_the_fastest_place(prepare, found.file, target, places, store, request)
        model = prepare.drafter(found.file)
    if model is not None:
        off = _too_large(model, target, places)
        if model.facts.follows and request.mode == "pipelined":
            request = replace(request, mode="auto")  # the target waits while it drafts
    if off is not None and prepare.profile.draft not in ("auto", "none"):
        refused, hint = f"the drafter cannot be used: {off}", "--draft auto looks for one that fits, none uses none"
        if model is None:
            raise InvalidRequestError(refused, hint=hint)
        raise MemoryLimitError(refused, needed_bytes=None, available_bytes=None, hint=hint)
    if model is None or off is not None:
        model, request = None, replace(request, no_model=off)
    else:
        request = replace(request, drafters=(_drafting(model, found.program),))
    return ChosenDrafter(model=model, request=request, prepare=prepare, places=places, considered=found.considered)


def _request(prepare: Preparation, context_why: Reason | None) -> PlanRequest:
    """What the profile asks for, without a drafting model."""
    profile = prepare.profile
    return PlanRequest(
        depth=profile.depth,
        exactness=profile.exactness,
        context_length=prepare.context_length,
        copies=profile.lookup,
        weighs_alternatives=profile.depth_policy == "cost",
        mode=profile.mode,
        context_why=context_why,
        calibrate=profile.command("calibrate"),
    )


def _drafting(drafter: PreparedModel, program: str | None) -> DraftingModel:
    rows, file = drafter.form.head_rows, drafter.file
    return DraftingModel(
        facts=drafter.facts,
        head=None if rows is None else (rows, file.header.vocabulary_size),
        filed_bytes=file.weight_bytes if drafter.form.requantized else None,
        program=program,
        translated=None if file.token_map is None else file.token_map.coverage,
    )


def in_the_fastest_place(
    prepare: Preparation,
    file: LocatedModel,
    target: PlacedTarget,
    places: Placements,
    store: Measurements,
    request: PlanRequest,
) -> Preparation:
    """``prepare`` for a profile that names the place where the drafter was measured to draft fastest for this target.

    Before any measurement ``Preparation.drafter`` decides. The machine's memory is the limit of target and drafter.
    """
    settings, default = target.model.settings, prepare.drafter(file).settings
    if not places.drafters:
        return prepare
    room = room_for_drafter(settings, default.device, places)
    crowded = prepare.profile.draft_device == "auto" and room is not None and room[0] > room[1]
    prepare = prepare.drafting_on(HOST if crowded else default.device)
    here = next((place for place in places.targets if place.is_of(settings)), None)
    if here is None:
        return prepare
    drafting = DraftingModel(facts=prepare.drafter(file).facts)
    known = PairMeasurements(store, here.facts, replace(request, drafters=(drafting,)))
    costs = known.costs()
    if not costs.quiet:
        return prepare
    ranking = known.ranking(known.widths(), costs, places, target.allowed_bytes, loaded=False)
    best = None if ranking is None or ranking.best.drafter is None else ranking.best.drafter.facts
    return prepare if best is None else prepare.drafting_on(best.device, best.runtime)


def _too_large(drafter: PreparedModel, target: PlacedTarget, places: Placements) -> str | None:
    """Why the drafter does not fit next to the target; None if it fits. The target always keeps its memory."""
    name, device = drafter.file.name, drafter.settings.device
    room = room_for_drafter(target.model.settings, device, places)
    if room is not None and room[0] > room[1]:
        return too_large_words(name, *room)
    if drafter.file.onnx is not None and device != target.model.settings.device:
        return None  # where a provider keeps the weights is not known
    needed, left = drafter.memory.total_bytes, target.left_bytes
    return None if needed <= left else too_large_words(name, needed, left)
