"""Which runtime, device and threads a model starts with, and in which other settings it could run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.errors import (
    EdgespecError,
    InvalidRequestError,
    ModelFileError,
    ProfileError,
    RuntimeUnavailableError,
)
from edgespec.files.model_file import LocatedModel
from edgespec.hardware.machine import Machine
from edgespec.interfaces.model import HOST, ModelFacts
from edgespec.profiles.profile import Profile
from edgespec.runtimes.runtime import LoadedModel, Runtime
from edgespec.runtimes.table import RUNTIMES, runtime_of


def choose_threads(profile: Profile, machine: Machine, max_threads: int | None) -> int:
    """The profile's threads, or one for each physical core; at most ``max_threads``.

    Raises ProfileError for more threads than processors: they would only wait for each other.
    """
    threads = machine.physical_cores if profile.threads == "auto" else profile.threads
    if profile.threads != "auto" and threads > machine.logical_cores:
        processors = f"{machine.logical_cores} processor{'s' if machine.logical_cores > 1 else ''}"
        raise ProfileError(
            f"{profile.origins.get('threads', 'threads')}: {threads} threads are more than the {processors} that "
            "this process may use",
            hint="auto takes the number that is fastest",
        )
    return max(1, min(threads, max_threads or threads))


def choose_runtime(wanted: str, wanted_device: str, file: LocatedModel) -> tuple[Runtime, str]:
    """The runtime to start with and its device: one with a device other than the processor, else the preferred one.

    Raises what ``processor_runtimes`` raises.
    """
    possible = _possible(wanted, file)
    able = _able([(runtime, runtime.find_device(wanted_device, file.weight_bytes)) for runtime in possible], file)
    return min(able, key=lambda pair: (pair[1] == HOST, pair[0].preference()))


def _able(found: Sequence[tuple[Runtime, str]], file: LocatedModel) -> Sequence[tuple[Runtime, str]]:
    """The runtimes that may run the file on their device. Raises what ``processor_runtimes`` raises."""
    if len(found) == 1:
        found[0][0].check(file, found[0][1])
        return found
    able = [pair for pair in found if _can(pair[0], file, pair[1])]
    if not able:
        raise _none_can([runtime for runtime, _ in found], file)
    return able


def _possible(wanted: str, file: LocatedModel) -> Sequence[Runtime]:
    """The runtimes for files of this format; only ``wanted`` if it is among them."""
    possible = [runtime for runtime in RUNTIMES.values() if runtime.runs(file)]
    return [runtime for runtime in possible if runtime.name == wanted] or possible


def processor_runtimes(wanted: str, device: str, file: LocatedModel) -> Sequence[Runtime]:
    """The runtimes that may run a file on ``device``, the preferred one first.

    Raises ModelFileError, RuntimeUnavailableError or InvalidRequestError, with the reason, if no runtime can.
    """
    able = _able([(runtime, device) for runtime in _possible(wanted, file)], file)
    return sorted((runtime for runtime, _ in able), key=lambda each: each.preference())


def _can(runtime: Runtime, file: LocatedModel, device: str) -> bool:
    try:
        runtime.check(file, device)
    except (InvalidRequestError, ModelFileError, RuntimeUnavailableError):
        return False
    return True


def _none_can(runtimes: Sequence[Runtime], file: LocatedModel) -> EdgespecError:
    """Why the best of several runtimes cannot run the file, and how to get the next best."""
    errors: list[EdgespecError] = []
    for runtime in runtimes:
        try:
            runtime.check(file, HOST)
        except (InvalidRequestError, ModelFileError, RuntimeUnavailableError) as error:
            errors.append(error)
    first, last = errors[0], errors[-1]
    return RuntimeUnavailableError(f"{first.message}; {last.message}", hint=last.hint)


def other_settings(target: LoadedModel) -> list[Mapping[str, Any]]:
    """Settings in which plain decoding may be faster, as arguments of ``with_settings``."""
    return [*({"threads": threads} for threads in fewer_threads(target)), *other_caches(target)]


def fewer_threads(target: LoadedModel) -> list[int]:
    """Powers of two below the target's number of threads."""
    own = target.settings.threads
    return [2**power for power in range(own.bit_length()) if 2**power < own]


def other_caches(target: LoadedModel) -> list[Mapping[str, Any]]:
    """Caches with which plain decoding may be faster."""
    return list(runtime_of(target.settings).other_caches(target.settings))


def setting_words(facts: ModelFacts) -> str:
    """The distinctive settings of a model, in short words."""
    parts = [f"{facts.threads} thread{'s' if facts.threads != 1 else ''}", f"a {facts.kv_type} cache"]
    if not facts.settings.get("flash_attention", True):
        parts.append("no flash attention")
    if not facts.settings.get("repack", True):
        parts.append("weights as in the file")
    return ", ".join(parts)
