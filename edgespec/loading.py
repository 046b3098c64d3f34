"""From a profile to loaded models: everything an Engine is made of, in the order in which it can fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import cast

from edgespec.errors import InvalidRequestError
from edgespec.events import Loading, LoadProgress
from edgespec.files.gguf import GgufHeader
from edgespec.files.locations import Home
from edgespec.knowledge import Knowledge
from edgespec.locate import LocatedModel, Locator
from edgespec.planning.calibration import QUICK, ModelTimes, measure_target
from edgespec.planning.machine import Machine, describe_machine
from edgespec.planning.measurements import Measurements
from edgespec.planning.memory import MemoryEstimate, estimate_memory, require_memory, too_large_words
from edgespec.planning.planner import Wish, find_stable_model
from edgespec.planning.widths import WidthProbe, probe_widths
from edgespec.profiles.profile import Profile
from edgespec.runtimes.llama import KV_TYPES, LlamaModel, LlamaSettings, load_model, usable_settings
from edgespec.runtimes.llama_library import load as load_library
from edgespec.selection import choose_device, choose_settings, find_drafter, know, source_names
from edgespec.text.tokenizer import LlamaVocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine may take of the machine; None leaves it to the profile."""

    max_memory_bytes: int | None = None
    max_threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an Engine is made of. ``memory_left_bytes`` may be used beyond the target and one session."""

    profile: Profile
    machine: Machine
    target: LlamaModel
    tokenizer: LlamaVocabulary
    drafter: LocatedModel | None
    wish: Wish
    probe: WidthProbe | None
    knowledge: Knowledge
    home: Home
    memory_left_bytes: int


def load_parts(
    profile: Profile, place: Home, locator: Locator, limits: Limits, tell: LoadProgress, *, calibrate: bool
) -> Parts:
    """Find and load what the profile asks for. Raises EdgespecError and its subclasses only."""
    load_library()  # before anything is fetched for it
    machine = describe_machine()
    allowed = int(machine.available_memory_bytes * profile.max_memory_fraction)
    if limits.max_memory_bytes is not None:
        allowed = min(allowed, limits.max_memory_bytes)
    located = locator.locate(profile.target)
    if located.artefact is not None:
        raise InvalidRequestError(
            f"{located.name} has a trimmed output head, so it can only draft",
            hint="give it with `--draft`, and an untrimmed model as the target",
        )
    header = located.header
    settings = usable_settings(choose_settings(profile, machine, limits.max_threads, header.tensor_bytes), header)
    context_length = min(profile.context, header.context_length or profile.context)
    estimate = model_memory(header, context_length, settings)
    require_memory(located.name, estimate, allowed)
    left = allowed - estimate.total_bytes
    drafter, drafter_off = _fitting_drafter(profile, located, locator, settings, context_length, left)
    wish = Wish(
        depth=profile.depth,
        exactness=profile.exactness,
        context_length=context_length,
        sources=source_names(profile, drafter),
        drafter_model=None if drafter is None else drafter.name,
        drafter_device="cpu" if drafter is None else choose_device(profile.draft_device, drafter.header.tensor_bytes),
        drafter_off=drafter_off,
    )
    store = Measurements(place.measurements, machine.fingerprint, machine.power_source)

    def open_model(wanted: LlamaSettings) -> LlamaModel:
        tell(Loading(f"loading {located.name}"))
        return load_model(located.path, wanted, name=located.name, sha256=located.identity, header=header)

    if wish.depth == 0 or not wish.sources:
        model, widths = open_model(settings), None
    else:
        model, widths = find_stable_model(
            open_model,
            settings,
            store,
            measure=_measure(wish, store, place, tell, calibrate=calibrate),
            complete=wish.exactness == "near",
            context_length=context_length,
        )
    try:
        tokenizer = LlamaVocabulary(located.path)
        knowledge = know(store, profile, model, drafter, wish)
    except BaseException:
        model.close()
        raise
    return Parts(
        profile=profile,
        machine=machine,
        target=model,
        tokenizer=tokenizer,
        drafter=drafter,
        wish=wish,
        probe=widths,
        knowledge=knowledge,
        home=place,
        memory_left_bytes=left,
    )


def model_memory(header: GgufHeader, context_length: int, settings: LlamaSettings) -> MemoryEstimate:
    """What a model of that header takes in those settings."""
    return estimate_memory(header, context_length, KV_TYPES[settings.kv_type][1])


def _fitting_drafter(
    profile: Profile,
    target: LocatedModel,
    locator: Locator,
    settings: LlamaSettings,
    context_length: int,
    left_bytes: int,
) -> tuple[LocatedModel | None, str | None]:
    """The drafter's file, or why there is none. It never pushes the target out of their memory."""
    drafter, off = find_drafter(profile, target, locator)
    if drafter is None or choose_device(profile.draft_device, drafter.header.tensor_bytes) != settings.device:
        return drafter, off
    needed = model_memory(drafter.header, context_length, settings).total_bytes
    return (drafter, off) if needed <= left_bytes else (None, too_large_words(drafter.name, needed, left_bytes))


def _measure(
    wish: Wish, store: Measurements, place: Home, tell: LoadProgress, *, calibrate: bool
) -> Callable[[LlamaModel], WidthProbe] | None:
    """How to find out which widths are bit-equal, where that has to be known before the first answer.

    While another process calibrates that waits: two that time the machine at once would time each other.
    """
    complete = wish.exactness == "near"
    if not calibrate and not complete and wish.depth == "auto":
        return None

    def measure(model: LlamaModel) -> WidthProbe:
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
