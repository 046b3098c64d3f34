"""From a profile to loaded models: everything an Engine is made of, in the order in which it can fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from edgespec.calibration.measurement_store import Measurements
from edgespec.calibration.timing import QUICK, ModelTimes, measure_target
from edgespec.calibration.width_probe import probe_widths
from edgespec.engine.events import Loading, LoadProgress
from edgespec.engine.pair_measurements import Knowledge
from edgespec.errors import CancelledError, EdgespecError, InvalidRequestError
from edgespec.files.gguf.header import compare_vocabularies
from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.hardware.machine import Machine, describe_machine
from edgespec.interfaces.model import HOST, Model, ModelFacts
from edgespec.placement.candidates import (
    Placements,
    default_settings,
    find_placements,
    require_room,
    room_for_drafter,
)
from edgespec.placement.memory import require_memory, too_large_words
from edgespec.placement.settings import (
    LoadedModel,
    ModelSettings,
    choose_threads,
    describe_drafter,
    drafter_bytes_spared,
    drafter_head_rows,
    drafter_memory,
    drafter_settings,
    memory_needed,
    open_model,
    other_settings,
    runtime_of,
    stable_settings,
)
from edgespec.planning.choice.planner import SLOWER_ALLOWED, Wish
from edgespec.planning.cost.widths import WidthProbe
from edgespec.profiles.profile import Profile, load_profile
from edgespec.runtimes.llama.library import load as load_library
from edgespec.runtimes.process.restarting import WorkerSettings
from edgespec.store.locate import Locator
from edgespec.text.tokenizer import LlamaVocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine may take of the machine; None leaves it to the profile."""

    max_memory_bytes: int | None = None
    max_threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an Engine is made of. ``memory_left_bytes`` may be used beyond the target and one session.

    ``whole_drafter`` is what a ``drafter`` with a trimmed head was made from, where the store holds it. ``located``
    is the target's file, ``places`` are those that it and the drafter could be in.
    """

    profile: Profile
    machine: Machine
    target: LoadedModel
    located: LocatedModel
    places: Placements
    tokenizer: LlamaVocabulary
    drafter: LocatedModel | None
    whole_drafter: LocatedModel | None
    wish: Wish
    probe: WidthProbe | None
    knowledge: Knowledge
    home: Home
    memory_left_bytes: int
    worker: WorkerSettings


def load_parts(
    profile: Profile,
    place: Home,
    locator: Locator,
    limits: Limits,
    tell: LoadProgress,
    *,
    calibrate: bool,
    worker: WorkerSettings | None = None,
) -> Parts:
    """Find and load what the profile asks for. Raises EdgespecError and its subclasses only."""
    load_library()  # before anything is fetched for it
    machine = describe_machine()
    allowed = int(machine.available_memory_bytes * profile.max_memory_fraction)
    if limits.max_memory_bytes is not None:
        allowed = min(allowed, limits.max_memory_bytes)
    located = locator.locate(profile.target)
    if located.drafts_only:
        raise InvalidRequestError(
            f"{located.name} has a trimmed output head, so it can only draft",
            hint="give it with `--draft`, and an untrimmed model as the target",
        )
    header = located.header
    threads = choose_threads(profile, machine, limits.max_threads)
    context_length = min(profile.context, header.context_length or profile.context)
    store = Measurements(place.measurements, machine.fingerprint, machine.power_source)

    def places_with(drafter: LocatedModel | None) -> Placements:
        return find_placements(
            profile, threads, located, drafter, context_length, lambda facts: store.load_times(facts) is not None
        )

    def require_place(wanted: ModelSettings, places: Placements) -> int:
        """Bytes that are left of those allowed."""
        require_room(wanted, places)
        estimate = memory_needed(header, located.weight_bytes, context_length, wanted)
        require_memory(located.name, estimate, allowed)
        return allowed - estimate.total_bytes

    alone = places_with(None)
    settings = default_settings(profile, threads, located, alone, allowed)
    require_place(settings, alone)  # before a drafter is fetched for it
    drafter, drafter_off = find_drafter(profile, located, locator)
    places = places_with(drafter)
    settings, profile = choose_places(store, profile, settings, drafter, places, context_length, allowed)
    left = require_place(settings, places)
    if drafter is not None:
        too_large = _too_large(profile, drafter, settings, places, context_length, left)
        drafter, drafter_off = (drafter, drafter_off) if too_large is None else (None, too_large)
    drafting = None if drafter is None else drafter_settings(profile, settings.threads, drafter)
    drafter_head, drafter_bytes = None, None
    if drafter is not None and drafting is not None:
        head_rows = drafter_head_rows(profile, drafter, drafting)
        drafter_head = None if head_rows is None else (head_rows, drafter.header.vocabulary_size)
        spared = drafter_bytes_spared(profile, drafter, drafting)
        drafter_bytes = (drafter.weight_bytes - spared, drafter.weight_bytes) if spared else None
    wish = Wish(
        depth=profile.depth,
        exactness=profile.exactness,
        context_length=context_length,
        sources=source_names(profile, drafter),
        drafter_model=None if drafter is None else drafter.name,
        drafter_runtime="llama" if drafting is None else runtime_of(drafting),
        drafter_device="cpu" if drafting is None else drafting.device,
        drafter_off=drafter_off,
        drafter_head=drafter_head,
        drafter_bytes=drafter_bytes,
        weighs_siblings=profile.depth_policy in ("cost", "bandit"),
        mode=profile.mode,
    )

    def open_target(wanted: ModelSettings) -> LoadedModel:
        tell(Loading(f"loading {located.name}"))
        return open_model(located, wanted)

    if wish.depth == 0 or not wish.sources:
        model, widths = open_target(settings), None
    else:
        model, widths = find_stable_model(
            open_target,
            stable_settings(settings),
            store,
            measure=_measure(wish, store, place, tell, calibrate=calibrate),
            complete=wish.exactness == "near",
            context_length=context_length,
        )
    try:
        tokenizer = LlamaVocabulary(located.tokenizer_path)
        knowledge = know(store, profile, model, drafter, wish)
    except BaseException:
        model.close()
        raise
    return Parts(
        profile=profile,
        machine=machine,
        target=model,
        located=located,
        places=places,
        tokenizer=tokenizer,
        drafter=drafter,
        whole_drafter=None if drafter is None or not drafter.drafts_only else locator.find_source(drafter),
        wish=wish,
        probe=widths,
        knowledge=knowledge,
        home=place,
        memory_left_bytes=left,
        worker=worker or WorkerSettings(),
    )


def _too_large(
    profile: Profile,
    drafter: LocatedModel,
    target_settings: ModelSettings,
    places: Placements,
    context_length: int,
    left_bytes: int,
) -> str | None:
    """Why the drafter cannot be beside the target, None if it can: it never pushes the target out of their memory."""
    own = drafter_settings(profile, target_settings.threads, drafter)
    room = room_for_drafter(target_settings, own.device, places)
    if room is not None and room[0] > room[1]:
        return too_large_words(drafter.name, *room)
    if drafter.onnx is not None and own.device != target_settings.device:
        return None  # what a provider keeps where is not known
    needed = drafter_memory(profile, drafter, context_length, own).total_bytes
    return None if needed <= left_bytes else too_large_words(drafter.name, needed, left_bytes)


def _measure(
    wish: Wish, store: Measurements, place: Home, tell: LoadProgress, *, calibrate: bool
) -> Callable[[LoadedModel], WidthProbe] | None:
    """How to find out which widths are bit-equal, where that has to be known before the first answer.

    While another process calibrates that waits: two that time the machine at once would time each other.
    """
    complete = wish.exactness == "near"
    if not calibrate and not complete and wish.depth == "auto":
        return None

    def measure(model: LoadedModel) -> WidthProbe:
        if not calibrate or wish.depth != "auto":
            label = "checking once which widths are bit-equal here"
            return probe_widths(
                model,
                context_length=wish.context_length,
                complete=complete,
                progress=lambda done: tell(Loading(label, done)),
            )
        # One walk through the contexts measures both, and the times are needed as well.
        scope = replace(QUICK, complete=complete)
        steps = measure_target(model, wish.context_length, scope)
        with store.exclusive(place.locks, wait=True), closing(steps):
            while True:
                try:
                    tell(Loading(f"measuring {model.facts.name}", next(steps)))
                except StopIteration as done:
                    times, probe = cast("tuple[ModelTimes, WidthProbe]", done.value)
                    store.save_times(model.facts, times)
                    return probe

    return measure


M = TypeVar("M", bound=Model)


S = TypeVar("S")  # a runtime's settings


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

    Stored probes are used silently; new ones are made by ``measure``, if given. If no setting is stable the first
    one is returned, and so it is if the stable setting makes a plain forward more than ``slower_allowed`` times
    slower: it decodes plainly, as nothing predicts a gain before the machine is calibrated. ``complete`` asks for
    probes that also bound the differences of unstable widths.
    """
    fallback: WidthProbe | None = None
    for settings in candidates:
        model = open_model(settings)
        try:
            if not model.facts.can_rewind:
                return model, None
            probe = measurements.load_widths(model.facts)
            if probe is not None and not probe.covers(context_length):
                probe = None  # made for a shorter context: says nothing about the rest of this one
            if (probe is None or (complete and not probe.complete)) and measure is not None:
                probe = measure(model)
                measurements.save_widths(model.facts, probe)
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
    """Whether plain decoding in this setting is about as fast as in the preferred one (None: this is it)."""
    if preferred is None or preferred.plain_forward_s is None or probe.plain_forward_s is None:
        return True
    return probe.plain_forward_s <= slower_allowed * preferred.plain_forward_s


def resolve_profile(profile: Profile | str | None, overrides: Mapping[str, Any], place: Home) -> Profile:
    """The profile with the overrides on top. Only what the caller names counts: no environment, no project file."""
    given = {name: value for name, value in overrides.items() if value is not None}
    if isinstance(profile, Profile):
        if given:
            raise InvalidRequestError(
                f"{next(iter(given))} was given beside a resolved profile", hint="put it into the profile"
            )
        return profile
    return load_profile(profile, environ={}, cwd=Path.cwd(), user_dir=place.root, flags=given, only_the_named=True)


def source_names(profile: Profile, drafter: LocatedModel | None) -> tuple[str, ...]:
    """Kinds of drafters, the cheapest first."""
    return (*(("lookup",) if profile.lookup else ()), *(() if drafter is None else ("model",)))


def find_drafter(profile: Profile, target: LocatedModel, locator: Locator) -> tuple[LocatedModel | None, str | None]:
    """The drafter's file, or why there is none. A drafter nobody named is never an error.

    Raises what locating raises for a drafter that was asked for by name.
    """
    wanted = profile.draft
    if wanted == "none" or profile.depth == 0:
        return None, None
    if wanted == "auto":
        name = target.drafter
        if name is None:
            return None, f"no drafter is known for {target.name}"
        wanted = name
    try:
        located = locator.locate(wanted)
    except CancelledError:
        raise
    except EdgespecError as error:
        if profile.draft == "auto":
            return None, error.message
        raise
    difference = compare_vocabularies(target.header, located.header)
    if difference is not None:
        return None, f"{located.name} has another vocabulary: {difference.reason}"
    return located, None


def know(
    store: Measurements, profile: Profile, target: LoadedModel, drafter: LocatedModel | None, wish: Wish
) -> Knowledge:
    """What is stored of a loaded target and the drafter found for it."""
    facts: ModelFacts | None = None
    if drafter is not None:
        facts = describe_drafter(profile, drafter, drafter_settings(profile, target.settings.threads, drafter))
    return Knowledge(store, target.facts, facts, wish.sources, wish.context_length)


def choose_places(
    store: Measurements,
    profile: Profile,
    settings: ModelSettings,
    drafter: LocatedModel | None,
    places: Placements,
    context_length: int,
    allowed_bytes: int,
) -> tuple[ModelSettings, Profile]:
    """Where the target runs, and the profile with its drafter's device decided: the fastest that was measured.

    ``settings`` are the target's before anybody measured, and stay where they were not timed themselves: what is in
    use is measured, and then compared with the rest. ``allowed_bytes`` are of the machine's memory.
    """
    facts: ModelFacts | None = None
    if drafter is not None and places.drafters:
        own = drafter_settings(profile, settings.threads, drafter)
        room = room_for_drafter(settings, own.device, places)
        crowded = profile.draft_device == "auto" and room is not None and room[0] > room[1]
        profile = replace(profile, draft_device=HOST if crowded else own.device)
        facts = describe_drafter(profile, drafter, drafter_settings(profile, settings.threads, drafter))
    here = next((place for place in places.targets if place.is_of(settings)), None)
    if here is None:
        return settings, profile
    known = Knowledge(store, here.facts, facts, source_names(profile, drafter), context_length)
    ranking = known.ranking((), context_length, allowed_bytes, near=profile.exactness == "near", places=places)
    if ranking is None:
        return settings, profile
    best = ranking.best
    for place in places.targets:
        facts = place.facts
        if (facts.runtime, facts.device, place.layers) == (
            best.target.runtime,
            best.target.device,
            best.target.layers,
        ):
            settings = place.put(settings)
    if best.drafter is not None and best.drafter.device is not None:
        profile = _with_drafter_at(profile, best.drafter.device, best.drafter.runtime)
    return settings, profile


def _with_drafter_at(profile: Profile, device: str, runtime: str | None) -> Profile:
    """The profile with the drafter's place decided; one of ONNX has a runtime that no profile names."""
    decided = cast("Literal['llama', 'native']", runtime) if runtime in ("llama", "native") else profile.draft_runtime
    return replace(profile, draft_device=device, draft_runtime=decided)


def fastest_plain(target: LoadedModel, store: Measurements) -> tuple[Mapping[str, Any], float] | None:
    """The setting in which plain decoding is faster than in the target's own, and how many times.

    None if its own is the fastest, or if nothing else was timed.
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


def class_too_dear(target: LoadedModel, knowledge: Knowledge, depth_cap: int) -> Mapping[str, Any] | None:
    """The setting to decode plainly in instead, if the numeric class costs more than drafting is expected to gain.

    None if the class costs plain decoding no more than DESIGN.md's 3 %, if a drafter repays it, or if nothing else
    was timed.
    """
    faster = fastest_plain(target, knowledge.store)
    if faster is None or faster[1] <= max(SLOWER_ALLOWED, knowledge.expected_gain(depth_cap)):
        return None
    return faster[0]
