"""From a profile to loaded models: everything an Engine is made of, in the order in which it can fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import cast

from edgespec.errors import InvalidRequestError
from edgespec.events import Loading, LoadProgress
from edgespec.files.locations import Home
from edgespec.knowledge import Knowledge
from edgespec.locate import LocatedModel, Locator
from edgespec.opening import (
    LoadedModel,
    ModelSettings,
    choose_threads,
    drafter_bytes_spared,
    drafter_head_rows,
    drafter_memory,
    drafter_settings,
    memory_needed,
    open_model,
    runtime_of,
    stable_settings,
)
from edgespec.placement import Placements, default_settings, find_placements, require_room, room_for_drafter
from edgespec.planning.calibration import QUICK, ModelTimes, measure_target
from edgespec.planning.machine import Machine, describe_machine
from edgespec.planning.measurements import Measurements
from edgespec.planning.memory import require_memory, too_large_words
from edgespec.planning.planner import Wish, find_stable_model
from edgespec.planning.widths import WidthProbe, probe_widths
from edgespec.profiles.profile import Profile
from edgespec.runtimes.llama_library import load as load_library
from edgespec.runtimes.restarting import WorkerSettings
from edgespec.selection import choose_places, find_drafter, know, source_names
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
