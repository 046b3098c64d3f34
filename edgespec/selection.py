"""What a profile asks for, found: the profile itself, the drafter, where plain decoding may be faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from edgespec.decoding.contracts import ModelFacts
from edgespec.errors import CancelledError, EdgespecError, InvalidRequestError
from edgespec.files.gguf import compare_vocabularies
from edgespec.files.locations import Home
from edgespec.knowledge import Knowledge
from edgespec.locate import LocatedModel, Locator
from edgespec.opening import LoadedModel, ModelSettings, describe_drafter, drafter_settings, other_settings
from edgespec.placement import Placements, room_for_drafter
from edgespec.planning.measurements import Measurements
from edgespec.planning.options import HOST
from edgespec.planning.planner import SLOWER_ALLOWED, Wish
from edgespec.profiles.profile import Profile, load_profile


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
        name = None if target.spec is None else target.spec.drafter
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


# -------------------------------------------------------------------------------------- where the two are put


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


# ------------------------------------------------------------------------------ where plain decoding may be faster


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
