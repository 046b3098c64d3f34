"""Where target and drafter could run on this machine: whole on each device, or as many layers as fit on it.

Dovetail (Zhang et al., 2024) puts the drafter on the GPU and the target on the CPU, DuoDecoding (Lv et al., 2025) the
reverse. The rival of both is to give the GPU as many layers of the target as it holds, so that is a place as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgespec.errors import MemoryLimitError
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import HOST, ModelFacts
from edgespec.placement.layer_split import Split, layer_bytes, layers_that_fit
from edgespec.placement.memory import estimate_memory
from edgespec.placement.settings import (
    ModelSettings,
    cache_bits,
    cache_type,
    describe,
    describe_drafter,
    processor_runtimes,
    runtime_of,
    stable_settings,
    target_settings,
)
from edgespec.planning.choice.options import DrafterOption, Rejected, TargetOption, placed_name
from edgespec.planning.choice.ranking import HEADROOM_BYTES
from edgespec.planning.choice.weighing import gib
from edgespec.planning.cost.curve import Curve, DraftCost
from edgespec.profiles.profile import Profile
from edgespec.runtimes.devices import Device, llama_gpus
from edgespec.runtimes.llama.model import LlamaSettings, usable_settings
from edgespec.runtimes.native.native import NativeSettings

__all__ = [
    "NOT_MEASURED",
    "Placement",
    "Placements",
    "default_settings",
    "find_placements",
    "require_room",
    "room_for_drafter",
    "same_place",
]

NOT_MEASURED = "not measured (`edgespec calibrate` measures every place that has room)"

Known = Callable[[ModelFacts], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A model in one place. ``layers`` is (on the device, of all) where only some are there.

    ``split`` are the bytes of weights and cache on the device and beside it, ``buffers_bytes`` those of its working
    buffers in the machine's memory, ``memory`` the device whose memory holds what is on the device.
    """

    settings: ModelSettings
    facts: ModelFacts
    memory: str
    split: Split
    buffers_bytes: int
    layers: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        facts = self.facts
        runtime = f" ({facts.runtime})" if facts.device == HOST else ""  # on the processor there may be two
        return f"{placed_name(facts.name, facts.device, self.layers)}{runtime}"

    def is_of(self, settings: ModelSettings) -> bool:
        """Whether these settings put a model here."""
        return _where(self.settings) == _where(settings)

    def put(self, settings: ModelSettings) -> ModelSettings:
        """Those settings, as they put a model here."""
        own = self.settings
        if isinstance(own, LlamaSettings) and isinstance(settings, LlamaSettings):
            return replace(settings, device=own.device, gpu_layers=own.gpu_layers, kv_type=own.kv_type)
        return own

    @property
    def needed_bytes(self) -> Mapping[str, int]:
        """What it takes of each memory; working buffers are counted in both, as either may hold them."""
        if self.memory == HOST:
            return {HOST: self.split.device_bytes + self.split.host_bytes + self.buffers_bytes}
        return {
            self.memory: self.split.device_bytes + HEADROOM_BYTES,
            HOST: self.split.host_bytes + self.buffers_bytes,
        }

    def target_option(self, curve: Curve, depth_cap: int | None) -> TargetOption:
        """This placement of the target, with what was measured of it."""
        facts, split = self.facts, self.split
        return TargetOption(
            model=facts.name,
            runtime=facts.runtime,
            device=facts.device,
            curve=curve,
            weights_bytes=split.device_weights + split.host_weights,
            cache_bytes=split.device_cache + split.host_cache,
            depth_cap_stable=depth_cap,
            threads=facts.threads,
            settings={**facts.settings, "kv_type": facts.kv_type},
            memory=self.memory,
            host_bytes=0 if self.memory == HOST else split.host_bytes,
            layers=self.layers,
        )

    def drafter_option(self, cost: DraftCost, rates: tuple[float, ...]) -> DrafterOption:
        """This placement of the drafter, with what was measured of it."""
        facts, split = self.facts, self.split
        beside = self.memory == HOST
        return DrafterOption(
            kind="model",
            cost=cost,
            acceptance=rates,
            model=facts.name,
            runtime=facts.runtime,
            device=facts.device,
            threads=facts.threads,
            weights_bytes=split.device_weights + (split.host_weights if beside else 0),
            cache_bytes=split.device_cache + (split.host_cache if beside else 0),
            bytes_per_forward=facts.bytes_per_forward,
            memory=self.memory,
        )

    def not_measured(self, *, drafting: bool = False) -> Rejected:
        """That nobody has timed it; a time is not guessed."""
        return Rejected(what=f"{self.name}, drafting" if drafting else self.name, reason=NOT_MEASURED, target=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """Every place of target and drafter; none at all where there is nothing but the processor and one runtime for it.

    ``memory_bytes`` is what may be used of each GPU's own memory; one that does not tell is not in it.
    """

    targets: tuple[Placement, ...] = ()
    drafters: tuple[Placement, ...] = ()
    memory_bytes: Mapping[str, int] = field(default_factory=dict)

    def room(self, place: Placement) -> bool:
        """Whether it fits in a GPU's own memory; true where that is the machine's, false where nobody knows."""
        return place.memory == HOST or place.needed_bytes[place.memory] <= self.memory_bytes.get(place.memory, 0)

    def too_small(self, place: Placement, *, drafting: bool = False) -> Rejected | None:
        """Why a GPU cannot hold it, or may not; None if it can."""
        if self.room(place):
            return None
        needed, available = place.needed_bytes[place.memory], self.memory_bytes.get(place.memory)
        reason = (
            f"how much memory {place.memory} has is not known"
            if available is None
            else f"needs {gib(needed)} on {place.memory} and {gib(available)} may be used"
        )
        what = f"{place.name}, drafting" if drafting else place.name
        return Rejected(
            what=what,
            reason=reason,
            target=None,
            needed_bytes=None if available is None else needed,
            available_bytes=available,
        )


def find_placements(
    profile: Profile,
    threads: int,
    target: LocatedModel,
    drafter: LocatedModel | None,
    context_length: int,
    known: Known = lambda _facts: False,
) -> Placements:
    """Where the profile lets the two run, and in which runtime; ONNX models stay where they are put.

    A GPU that is too small for all of the target is offered as many layers as fit on it, by themselves and beside the
    drafter. Of the settings a place can be used in the first that is ``known`` (measured) counts, else the fastest.
    Asks no driver for anything if only the CPU is asked for. Raises RuntimeUnavailableError, ModelFileError.
    """
    wanted, wanted_drafter = profile.device.lower(), profile.draft_device.lower()
    gpus = () if wanted == wanted_drafter == HOST else llama_gpus()
    runtimes, draft_runtimes = _runtimes(profile.runtime, target), _runtimes(profile.draft_runtime, drafter)
    if not gpus and max(len(runtimes), len(draft_runtimes)) < 2:
        return Placements()
    memory_bytes = {
        gpu.name: int(gpu.free_bytes * profile.max_memory_fraction)
        for gpu in gpus
        if gpu.memory != HOST and gpu.free_bytes is not None
    }
    drafters: list[Placement] = []
    for device, runtime in _allowed(wanted_drafter, gpus, draft_runtimes):
        assert drafter is not None  # else there are no runtimes for it
        settings = _settings(profile, drafter, threads, device, runtime)
        facts = describe_drafter(profile, drafter, settings)
        drafters.append(_placement(drafter, settings, facts, device, context_length))
    targets: list[Placement] = []
    for device, runtime in _allowed(wanted, gpus, runtimes):
        room = None if device is None else memory_bytes.get(device.name)
        beside = [p.needed_bytes[p.memory] for p in drafters if device is not None and p.memory == device.name]
        for layers in _layer_counts(profile, target, device, context_length, room, sum(beside)):
            preferred = _settings(profile, target, threads, device, runtime, layers)
            variants = stable_settings(preferred)
            settings = next((s for s in variants if known(describe(target, s))), preferred)
            targets.append(_placement(target, settings, describe(target, settings), device, context_length))
    return Placements(targets=tuple(targets), drafters=tuple(drafters), memory_bytes=memory_bytes)


def default_settings(
    profile: Profile, threads: int, target: LocatedModel, places: Placements, allowed_bytes: int
) -> ModelSettings:
    """How the target runs before anything is measured: where ``target_settings`` says, if all of it fits there.

    Else on the CPU, if it has room in ``allowed_bytes`` of the machine's memory, else with as many layers on a GPU as
    fit: a model too large for one memory may fit in two. Raises InvalidRequestError.
    """
    settings = target_settings(profile, threads, target)

    def order(place: Placement) -> int:
        return 0 if place.is_of(settings) else 1 if place.facts.device == HOST else 2

    for place in sorted(places.targets, key=order):
        if places.room(place) and place.needed_bytes[HOST] <= allowed_bytes:
            return place.put(settings)
    return settings


def require_room(settings: ModelSettings, places: Placements) -> None:
    """Raise MemoryLimitError if what these settings put on a GPU does not fit in the GPU's own memory."""
    for place in places.targets:
        if place.memory in places.memory_bytes and place.is_of(settings) and not places.room(place):
            needed, allowed = place.needed_bytes[place.memory], places.memory_bytes[place.memory]
            raise MemoryLimitError(
                f"{place.name} needs about {gib(needed)} there and {gib(allowed)} may be used",
                needed_bytes=needed,
                available_bytes=allowed,
                hint="fewer gpu_layers, a smaller --context, or another device",
            )


def room_for_drafter(settings: ModelSettings, device: str, places: Placements) -> tuple[int, int] | None:
    """(needed, left) bytes of the GPU's own memory for a drafter on ``device`` beside a target in these settings.

    None where that is not known, or no GPU's own.
    """
    place = next((p for p in places.drafters if p.facts.device == device), None)
    if place is None or place.memory not in places.memory_bytes:
        return None
    beside = (target for target in places.targets if target.memory == place.memory and target.is_of(settings))
    taken = max((target.needed_bytes[place.memory] for target in beside), default=0)
    return place.needed_bytes[place.memory], places.memory_bytes[place.memory] - taken


def same_place(one: ModelFacts, other: ModelFacts) -> bool:
    """Whether two settings put a model on the same device, in the same runtime and with as many layers."""
    layers = "gpu_layers"
    return (one.runtime, one.device, one.settings.get(layers)) == (
        other.runtime,
        other.device,
        other.settings.get(layers),
    )


# ---------------------------------------------------------------------------------------------------- one place


def _where(settings: ModelSettings) -> tuple[str, str, int | None]:
    layers = settings.gpu_layers if isinstance(settings, LlamaSettings) else None
    return runtime_of(settings), settings.device, layers


def _runtimes(wanted: str, located: LocatedModel | None) -> Sequence[str]:
    """What may run a model on the processor; nothing for an ONNX model, which is not placed here."""
    if located is None or located.onnx is not None:
        return ()
    return processor_runtimes(wanted, HOST, located)


def _allowed(wanted: str, gpus: Sequence[Device], runtimes: Sequence[str]) -> Iterator[tuple[Device | None, str]]:
    """The devices a profile's value allows, and the runtimes on them; None is the CPU."""
    if wanted in ("auto", HOST):
        for runtime in runtimes:
            yield None, runtime
    for gpu in gpus if "llama" in runtimes else ():
        if wanted in ("auto", gpu.name.lower()):
            yield gpu, "llama"


def _settings(
    profile: Profile,
    located: LocatedModel,
    threads: int,
    device: Device | None,
    runtime: str,
    layers: int | None = None,
) -> ModelSettings:
    if runtime == "native":
        return NativeSettings(threads=threads, sidecar=profile.native_sidecar)
    name = HOST if device is None else device.name
    settings = LlamaSettings(threads=threads, device=name, gpu_layers=layers, kv_type=cache_type(name))
    return usable_settings(settings, located.header)


def _layer_counts(
    profile: Profile,
    target: LocatedModel,
    device: Device | None,
    context_length: int,
    room: int | None,
    beside_bytes: int,
) -> list[int | None]:
    """How many layers of the target are worth offering a device: all (None), and what fits where they do not."""
    if device is None:
        return [None]
    if profile.gpu_layers != "auto":
        return [profile.gpu_layers] if profile.gpu_layers else []
    counts: list[int | None] = [None]
    if room is None:  # not known, or the machine's own memory, of which a part is no easier to have than the whole
        return counts
    layers = layer_bytes(target.header, cache_bits(_settings(profile, target, 1, device, "llama")))
    for free in (room, room - beside_bytes):
        count = layers_that_fit(layers, context_length, free, headroom_bytes=HEADROOM_BYTES)
        if 0 < count < layers.layers and count not in counts:
            counts.append(count)
    return counts


def _placement(
    located: LocatedModel, settings: ModelSettings, facts: ModelFacts, device: Device | None, context_length: int
) -> Placement:
    bits = cache_bits(settings)
    layers = layer_bytes(located.header, bits)
    some = settings.gpu_layers if isinstance(settings, LlamaSettings) else None
    split = layers.split(0 if settings.device == HOST else some, context_length)
    spared = located.weight_bytes - facts.weight_bytes  # of a drafter in our own kernels, which are on the host
    return Placement(
        settings=settings,
        facts=facts,
        memory=HOST if device is None else device.memory,
        split=replace(split, host_weights=split.host_weights - spared),
        buffers_bytes=estimate_memory(located.header, context_length, bits).buffers_bytes,
        layers=None if some is None else (some, layers.layers),
    )
