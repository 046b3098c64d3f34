"""From a profile to a loaded pair: finds and loads the parts of an Engine, in the order in which they can fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from edgespec.calibration.kinds import PLACE, THREADS, TIMES, WIDTHS
from edgespec.calibration.measurement_store import Measurements
from edgespec.calibration.self_check import SelfCheck
from edgespec.calibration.timing import QUICK, ModelTimes, measure_target
from edgespec.calibration.width_probe import probe_widths
from edgespec.engine.pair.drafter_search import DrafterSearch, FoundDrafter, find_drafter
from edgespec.engine.pair.loaded_pair import LoadedPair
from edgespec.engine.pair.measurements import PairMeasurements
from edgespec.errors import InvalidRequestError
from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import Loading, LoadProgress
from edgespec.hardware.machine import Machine, describe_machine
from edgespec.hardware.neighbours import Neighbours
from edgespec.interfaces.model import HOST, Model, ModelFacts
from edgespec.placement.candidates import (
    Placements,
    default_settings,
    find_placements,
    require_room,
    room_for_drafter,
)
from edgespec.placement.memory import memory_needed, require_memory, too_large_words
from edgespec.placement.model_pool import ModelPool
from edgespec.placement.prepared import Preparation, PreparedModel
from edgespec.placement.settings import choose_threads, other_settings
from edgespec.planning.choice.planner import DraftingModel, PlanRequest
from edgespec.planning.cost.margins import SLOWER_ALLOWED, TAKEOVER_CALIBRATIONS
from edgespec.planning.cost.widths import WidthProbe
from edgespec.profiles.profile import Profile, load_profile
from edgespec.runtimes.process.settings import WorkerSettings
from edgespec.runtimes.runtime import LoadedModel, Settings
from edgespec.runtimes.table import runtime_of
from edgespec.store.locate import Locator
from edgespec.text.tokenizers.choice import open_tokenizer, require_tokenizer

WAITING = Loading("waiting for another calibration to finish")

M = TypeVar("M", bound=Model)
S = TypeVar("S")  # a runtime's settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that the engine may use of the machine; None: the profile decides."""

    max_memory_bytes: int | None = None
    max_threads: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidRequestError(f"{each.name} must be a whole number of at least 1, not {value!r:.40}")


def load_pair(
    profile: Profile,
    own_home: Home,
    locator: Locator,
    limits: Limits,
    tell: LoadProgress,
    *,
    calibrate: bool,
    worker: WorkerSettings | None = None,
) -> LoadedPair:
    """Find and load what the profile asks for. Raises EdgespecError and its subclasses only."""
    machine = describe_machine()
    allowed = _allowed_bytes(profile, machine, limits)
    target = _find_target(profile, locator)
    require_tokenizer(target.tokenizer_path, target.header)  # before a drafter is fetched for it
    context_length = min(profile.context, target.header.context_length or profile.context)
    store = Measurements(own_home.measurements, machine.fingerprint, machine.power_source, own_home.create)
    threads = choose_threads(profile, machine, limits.max_threads)
    prepare = Preparation(profile, threads, context_length)

    def is_known(facts: ModelFacts) -> bool:
        return store.load(TIMES, facts) is not None

    settings, alone, notices = _place_target(store, prepare, target, is_known, allowed)
    fewer = settled_threads(store, prepare, target, settings)
    if fewer is not None:
        prepare = Preparation(profile, fewer, context_length)
        settings, alone, _ = _place_target(store, prepare, target, is_known, allowed)
    _require_place(target, settings, alone, context_length, allowed)  # before a drafter is fetched for it

    def search() -> FoundDrafter:
        return _search(prepare, target, settings, locator, store, allowed, tell)

    found = find_drafter(profile, target, locator, search)
    drafter_file, drafter_off = found.file, found.off
    places = alone if drafter_file is None else find_placements(prepare, target, drafter_file, is_known)
    places = replace(places, targets=alone.targets)  # a drafter never moves the target or its layers
    drafter = choose_drafter(store, prepare, settings, drafter_file, places, allowed)
    left = _require_place(target, settings, places, context_length, allowed)
    too_large = None if drafter is None else _too_large(drafter, settings, places, left)
    if too_large is not None:
        drafter, drafter_off = None, too_large
    request = _plan_request(prepare.profile, context_length, drafter, drafter_off, program=found.program)
    measure = _measure(request, store, own_home, tell, calibrate=calibrate)
    pool = ModelPool(
        prepare,
        target,
        drafter,
        _whole(drafter, locator),
        places,
        left,
        worker or WorkerSettings(),
        memory_needed(target, settings, context_length),
    )
    model, widths = _open_target(target, settings, request, store, measure, tell)
    try:
        if request.depth != 0:
            pool.load_prepared()  # in parallel with the tokenizer
        check = None
        if widths is None and request.depth != 0 and request.sources and model.facts.bit_equal_by_construction:
            check = SelfCheck(model)  # as long as the tokenizer, which uses one processor
        tokenizer = open_tokenizer(target.tokenizer_path, target.header)
        if check is not None:
            widths = check.result()
            store.save(WIDTHS, widths, model.facts)
        return LoadedPair(
            profile=prepare.profile,
            machine=machine,
            home=own_home,
            target=model,
            tokenizer=tokenizer,
            pool=pool,
            request=request,
            probe=widths,
            store=store,
            notices=notices,
            most_threads=threads,
            considered=found.considered,
        )
    except BaseException:
        pool.close()
        model.close()
        raise


def _place_target(
    store: Measurements,
    prepare: Preparation,
    target: LocatedModel,
    is_known: Callable[[ModelFacts], bool],
    allowed_bytes: int,
) -> tuple[Settings, Placements, tuple[str, ...]]:
    """The target's settings, every place it could run in, and notices for the user.

    The drafter is not considered: the target's place must not depend on it.
    """
    places = find_placements(prepare, target, None, is_known)
    settings = default_settings(prepare, target, places, allowed_bytes)
    settings, notices = settled_settings(store, prepare, target, settings, places, allowed_bytes)
    return settings, places, notices


def _allowed_bytes(profile: Profile, machine: Machine, limits: Limits) -> int:
    allowed = int(machine.available_memory_bytes * profile.max_memory_fraction)
    return allowed if limits.max_memory_bytes is None else min(allowed, limits.max_memory_bytes)


def _find_target(profile: Profile, locator: Locator) -> LocatedModel:
    target = locator.locate_to_run(profile.target)
    if target.drafts_only:
        raise InvalidRequestError(
            f"{target.name} has a trimmed output head, so it can only draft",
            hint="give it with `--draft`, and an untrimmed model as the target",
        )
    return target


def _require_place(
    target: LocatedModel, settings: Settings, places: Placements, context_length: int, allowed: int
) -> int:
    """The allowed bytes that remain next to the target. Raises MemoryLimitError."""
    require_room(settings, places)
    estimate = memory_needed(target, settings, context_length)
    require_memory(target.name, estimate, allowed)
    return allowed - estimate.total_bytes


def _too_large(drafter: PreparedModel, target_settings: Settings, places: Placements, left_bytes: int) -> str | None:
    """Why the drafter does not fit next to the target; None if it fits. The target always keeps its memory."""
    name, device = drafter.file.name, drafter.settings.device
    room = room_for_drafter(target_settings, device, places)
    if room is not None and room[0] > room[1]:
        return too_large_words(name, *room)
    if drafter.file.onnx is not None and device != target_settings.device:
        return None  # where a provider keeps the weights is not known
    needed = drafter.memory.total_bytes
    return None if needed <= left_bytes else too_large_words(name, needed, left_bytes)


def _search(
    prepare: Preparation,
    target: LocatedModel,
    settings: Settings,
    locator: Locator,
    store: Measurements,
    allowed_bytes: int,
    tell: LoadProgress,
) -> FoundDrafter:
    """Search this machine for a drafter; none if the target's cache cannot drop rejected tokens."""
    facts = runtime_of(settings).describe(target, settings)
    if not facts.can_rewind:
        return FoundDrafter()
    request = _plan_request(prepare.profile, prepare.context_length, None, None)
    return DrafterSearch(target, facts, prepare, locator, store, request, allowed_bytes, tell).run()


def _plan_request(
    profile: Profile,
    context_length: int,
    drafter: PreparedModel | None,
    drafter_off: str | None,
    program: str | None = None,
) -> PlanRequest:
    return PlanRequest(
        depth=profile.depth,
        exactness=profile.exactness,
        context_length=context_length,
        copies=profile.lookup,
        drafters=() if drafter is None else (_drafting(drafter, program),),
        no_model=drafter_off,
        weighs_alternatives=profile.depth_policy == "cost",
        mode=profile.mode,
    )


def _drafting(drafter: PreparedModel, program: str | None) -> DraftingModel:
    rows, file = drafter.form.head_rows, drafter.file
    return DraftingModel(
        facts=drafter.facts,
        head=None if rows is None else (rows, file.header.vocabulary_size),
        filed_bytes=file.weight_bytes if drafter.form.requantized else None,
        program=program,
    )


def _whole(drafter: PreparedModel | None, locator: Locator) -> LocatedModel | None:
    """The file that a drafter with a trimmed head was made from, if the store has it."""
    return None if drafter is None or not drafter.file.drafts_only else locator.find_source(drafter.file)


def _open_target(
    target: LocatedModel,
    settings: Settings,
    request: PlanRequest,
    store: Measurements,
    measure: Callable[[LoadedModel], WidthProbe] | None,
    tell: LoadProgress,
) -> tuple[LoadedModel, WidthProbe | None]:
    runtime = runtime_of(settings)

    def load(wanted: Settings) -> LoadedModel:
        tell(Loading(f"loading {target.name}"))
        return runtime.load(target, wanted)

    # The target's setting must not depend on whether a drafter is used.
    return find_stable_model(
        load,
        runtime.stable_settings(settings),
        store,
        measure=measure if request.depth != 0 and request.sources else None,
        complete=request.exactness == "near",
        context_length=request.context_length,
    )


def _measure(
    request: PlanRequest, store: Measurements, own_home: Home, tell: LoadProgress, *, calibrate: bool
) -> Callable[[LoadedModel], WidthProbe] | None:
    """How to measure which widths are bit-equal, if that must be known before the first answer; else None.

    The measurement waits while another process calibrates: two running together would distort each other's times.
    """
    complete = request.exactness == "near"
    if not calibrate and not complete and request.depth == "auto":
        return None

    def measure(model: LoadedModel) -> WidthProbe:
        if not calibrate or request.depth != "auto":
            label = "checking which widths are bit-equal on this machine (once)"
            return probe_widths(
                model,
                context_length=request.context_length,
                complete=complete,
                progress=lambda done: tell(Loading(label, done)),
            )
        # One pass over the contexts measures widths and times, and both are needed.
        scope = replace(QUICK, complete=complete)
        steps = measure_target(model, request.context_length, scope)
        neighbours = Neighbours()
        exclusive = store.exclusive(own_home.locks, wait=True, waiting=lambda: tell(WAITING))
        with exclusive, closing(steps):
            while True:
                try:
                    with neighbours:
                        done = next(steps)
                    tell(Loading(f"measuring {model.facts.name}", done))
                except StopIteration as end:
                    times, probe = cast("tuple[ModelTimes, WidthProbe]", end.value)
                    store.save(TIMES, replace(times, busy=neighbours.share if neighbours.busy else 0.0), model.facts)
                    return probe

    return measure


def find_stable_model(
    open_model: Callable[[S], M],
    candidates: Sequence[S],
    measurements: Measurements,
    *,
    measure: Callable[[M], WidthProbe] | None,
    complete: bool,
    context_length: int,
    slower_allowed: float = SLOWER_ALLOWED,
) -> tuple[M, WidthProbe | None]:
    """The model in the first of the ``candidates`` that has a stable width beyond 1, and its probe.

    Stored probes are used; ``measure``, if given, makes missing ones. Settings whose rows are bit-equal by
    construction need no probe: the first one is returned. The first setting is also returned if no setting is stable,
    or if the stable one makes a plain forward more than ``slower_allowed`` times slower: before calibration nothing
    predicts that drafting regains that. ``complete`` asks for probes that also bound the differences of unstable
    widths.
    """
    fallback: WidthProbe | None = None
    for settings in candidates:
        model = open_model(settings)
        try:
            if not model.facts.can_rewind:
                return model, None
            probe = measurements.load(WIDTHS, model.facts)
            if model.facts.bit_equal_by_construction:
                return model, probe
            if probe is not None and not probe.covers(context_length):
                probe = None  # made for a shorter context than this one
            if (probe is None or (complete and not probe.complete)) and measure is not None:
                probe = measure(model)
                measurements.save(WIDTHS, probe, model.facts)
        except BaseException:
            model.close()
            raise
        if probe is None and fallback is None:
            return model, None
        if probe is not None and (probe.depth_cap > 0 or complete) and _affordable(probe, fallback, slower_allowed):
            return model, probe
        fallback = fallback or probe
        model.close()
    return open_model(candidates[0]), fallback


def _affordable(probe: WidthProbe, preferred: WidthProbe | None, slower_allowed: float) -> bool:
    """Whether plain decoding is about as fast here as in the ``preferred`` setting (None: this is that setting)."""
    if preferred is None or preferred.plain_forward_s is None or probe.plain_forward_s is None:
        return True
    return probe.plain_forward_s <= slower_allowed * preferred.plain_forward_s


def resolve_profile(profile: Profile | str | None, overrides: Mapping[str, Any], own_home: Home) -> Profile:
    """The profile with the overrides applied. Environment variables and project files are not read."""
    given = {name: value for name, value in overrides.items() if value is not None}
    if isinstance(profile, Profile):
        if given:
            raise InvalidRequestError(
                f"{next(iter(given))} was given together with a resolved profile", hint="set it in the profile"
            )
        return profile
    return load_profile(profile, environ={}, cwd=Path.cwd(), user_dir=own_home.root, flags=given, only_the_named=True)


def settled_settings(
    store: Measurements,
    prepare: Preparation,
    target: LocatedModel,
    settings: Settings,
    places: Placements,
    allowed_bytes: int,
) -> tuple[Settings, tuple[str, ...]]:
    """The place that calibrations agreed on for the target, and a notice until the user has seen it.

    ``settings`` are the ones before any calibration. They are kept if nothing was agreed, or if the agreed place is
    gone, has no room, or contradicts the profile's runtime and device.
    """
    facts = prepare.target(target).facts
    settled = store.settled(PLACE, facts)
    place = next((place for place in places.targets if place.key == settled.chosen), None)
    if place is None or not places.room(place) or place.needed_bytes[HOST] > allowed_bytes:
        if settled.chosen is None or (prepare.profile.runtime, prepare.profile.device) != ("auto", "auto"):
            return settings, ()
        where = "{} on {}".format(*settled.chosen)
        lost = f"{target.name} runs in {settings.runtime} on {settings.device} this time: {where}"
        return settings, (f"{lost}, which calibrations chose, is missing or has no room; the wording may differ",)
    notices: tuple[str, ...] = ()
    if not settled.announced:
        notices = (
            f"{place.name} from now on, which {TAKEOVER_CALIBRATIONS} calibrations found faster: "
            "the same prompt may get a different text than before",
        )
    return place.put(settings), notices


def settled_threads(
    store: Measurements, prepare: Preparation, target: LocatedModel, settings: Settings
) -> int | None:
    """The smaller number of threads that calibrations agreed on; None without one, or if the profile sets it."""
    if prepare.profile.threads != "auto":
        return None
    chosen = store.settled(THREADS, prepare.target(target).facts, settings.runtime).chosen
    return chosen if chosen is not None and chosen < prepare.threads else None


def choose_drafter(
    store: Measurements,
    prepare: Preparation,
    settings: Settings,
    drafter_file: LocatedModel | None,
    places: Placements,
    allowed_bytes: int,
) -> PreparedModel | None:
    """The drafter in the place where it was measured to draft fastest for a target in these ``settings``.

    Before any measurement ``Preparation.drafter`` decides. ``allowed_bytes`` are of the machine's memory.
    """
    if drafter_file is None:
        return None
    profile, drafter = prepare.profile, prepare.drafter(drafter_file)
    if not places.drafters:
        return drafter
    room = room_for_drafter(settings, drafter.settings.device, places)
    crowded = profile.draft_device == "auto" and room is not None and room[0] > room[1]
    drafter = prepare.decided_drafter(drafter.file, HOST if crowded else drafter.settings.device)
    here = next((place for place in places.targets if place.is_of(settings)), None)
    if here is None:
        return drafter
    request = _plan_request(profile, prepare.context_length, drafter, None)
    known = PairMeasurements(store, here.facts, request)
    ranking = known.ranking(known.widths(), known.costs(), places, allowed_bytes, loaded=False)
    best = None if ranking is None or ranking.best.drafter is None else ranking.best.drafter.facts
    if best is not None:
        drafter = prepare.decided_drafter(drafter.file, best.device, best.runtime)
    return drafter


def fastest_plain(target: LoadedModel, store: Measurements) -> tuple[Mapping[str, Any], float] | None:
    """The setting in which plain decoding is fastest, and how many times as fast as in the target's own: to compare.

    None if the target's own setting is the fastest, or if no other one was timed.
    """
    own_s = store.plain_s(target.facts)
    timed = [
        (seconds, caches)
        for caches in other_settings(target)
        if (seconds := store.plain_s(target.facts_with(**caches))) is not None
    ]
    if own_s is None or not timed:
        return None
    seconds, caches = min(timed, key=lambda pair: pair[0])
    return (caches, own_s / seconds) if seconds < own_s else None
