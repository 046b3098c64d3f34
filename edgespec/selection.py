"""What a profile asks for, found: the profile itself, settings, device, drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.decoding.contracts import ModelFacts
from edgespec.errors import CancelledError, EdgespecError, InvalidRequestError
from edgespec.files.gguf import compare_vocabularies
from edgespec.files.locations import Home
from edgespec.knowledge import Knowledge
from edgespec.locate import LocatedModel, Locator
from edgespec.planning.machine import Machine
from edgespec.planning.measurements import Measurements
from edgespec.planning.planner import SLOWER_ALLOWED, Wish
from edgespec.profiles.profile import Profile, load_profile
from edgespec.runtimes.llama import LlamaModel, LlamaSettings, describe_model
from edgespec.runtimes.llama_library import load as load_library


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


def choose_device(wanted: str, weight_bytes: int) -> str:
    """The named device; ``auto`` is the build's first GPU with room for the weights, else the CPU."""
    if wanted != "auto":
        return wanted
    devices = load_library().devices()
    return next((d.name for d in devices if d.kind == "gpu" and d.free_bytes > weight_bytes), "cpu")


def choose_settings(profile: Profile, machine: Machine, max_threads: int | None, weight_bytes: int) -> LlamaSettings:
    threads = machine.physical_cores if profile.threads == "auto" else profile.threads
    device = choose_device(profile.device, weight_bytes)
    return LlamaSettings(
        threads=max(1, min(threads, max_threads or threads)),
        device=device,
        gpu_layers=None if profile.gpu_layers == "auto" else profile.gpu_layers,
        kv_type=cache_type(device),
    )


def cache_type(device: str) -> str:
    """The cache whose widths are bit-equal. GPU kernels are built for keys and values of one type only."""
    return LlamaSettings().kv_type if device == "cpu" else "q8_0"


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


def drafter_settings(profile: Profile, target: LlamaSettings, drafter: LocatedModel) -> LlamaSettings:
    """How the drafter is loaded beside a target with those settings.

    Repacked whatever the target needs: how a drafter rounds decides nothing but its own proposals.
    """
    device = choose_device(profile.draft_device, drafter.header.tensor_bytes)
    return replace(
        target, device=device, gpu_layers=None, repack=True, flash_attention=True, kv_type=cache_type(device)
    )


def know(
    store: Measurements, profile: Profile, target: LlamaModel, drafter: LocatedModel | None, wish: Wish
) -> Knowledge:
    """What is stored of a loaded target and the drafter found for it."""
    facts: ModelFacts | None = None
    if drafter is not None:
        settings = drafter_settings(profile, target.settings, drafter)
        facts = describe_model(drafter.header, settings, name=drafter.name, sha256=drafter.identity)
    return Knowledge(store, target.facts, facts, wish.sources, wish.context_length)


# ------------------------------------------------------------------------------ where plain decoding may be faster


def fewer_threads(target: LlamaModel) -> list[int]:
    """Powers of two below the target's number of threads."""
    return [2**power for power in range(target.settings.threads.bit_length()) if 2**power < target.settings.threads]


def other_caches(target: LlamaModel) -> list[dict[str, Any]]:
    """Caches that plain decoding may be faster with, as arguments of ``LlamaModel.with_caches``."""
    if target.settings.kv_type == "f16":
        return []
    return [{"kv_type": "f16"}, {"kv_type": "f16", "flash_attention": False}]


def other_settings(target: LlamaModel) -> list[dict[str, Any]]:
    """``other_caches``, and thread counts that plain decoding may be faster with."""
    return [*({"threads": threads} for threads in fewer_threads(target)), *other_caches(target)]


def fastest_plain(target: LlamaModel, store: Measurements) -> tuple[dict[str, Any], float] | None:
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


def class_too_dear(target: LlamaModel, knowledge: Knowledge, depth_cap: int) -> dict[str, Any] | None:
    """The setting to decode plainly in instead, if the numeric class costs more than drafting is expected to gain.

    None if the class costs plain decoding no more than DESIGN.md's 3 %, if a drafter repays it, or if nothing else
    was timed.
    """
    faster = fastest_plain(target, knowledge.store)
    if faster is None or faster[1] <= max(SLOWER_ALLOWED, knowledge.expected_gain(depth_cap)):
        return None
    return faster[0]
