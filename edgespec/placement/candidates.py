"""Where target and drafter could run on this machine: whole on each device, or as many layers as fit on it.

Dovetail (Zhang et al., 2024) puts the drafter on the GPU and the target on the CPU, DuoDecoding (Lv et al., 2025) the
reverse. Both compete with a GPU that holds as many layers of the target as fit, so that is a placement as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgespec.errors import MemoryLimitError
from edgespec.files.disk import gib
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import HOST, ModelFacts
from edgespec.interfaces.reasons import Reason
from edgespec.placement.memory import estimate_memory, layer_bytes, layers_that_fit
from edgespec.placement.prepared import Preparation, PreparedModel, processor_runtimes
from edgespec.planning.choice.evaluation import memory_not_known, no_room
from edgespec.planning.choice.options import HEADROOM_BYTES, Footprint, Rejected, placed_name
from edgespec.planning.choice.settled import Place
from edgespec.runtimes.runtime import Device, Runtime, Settings
from edgespec.runtimes.table import RUNTIMES, runtime_of

Known = Callable[[ModelFacts], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A model on one device. ``buffers_bytes`` are those of working buffers in the machine's memory.

    ``position_bytes`` are those of a token in the cache: on the device, and in the machine's memory. A cache has room
    for ``context_length`` tokens.
    """

    settings: Settings
    facts: ModelFacts
    footprint: Footprint
    buffers_bytes: int
    position_bytes: tuple[float, float]
    context_length: int

    @property
    def name(self) -> str:
        facts = self.facts
        runtime = f" ({facts.runtime})" if facts.device == HOST else ""  # the processor may have two runtimes
        return f"{placed_name(facts.name, facts.device, self.footprint.layers)}{runtime}"

    @property
    def key(self) -> Place:
        """The key under which this placement is stored."""
        layers = self.footprint.layers
        return self.facts.runtime, self.facts.device, None if layers is None else layers[0]

    @property
    def memory(self) -> str:
        """The device whose memory holds the device's part."""
        return self.footprint.memory

    def longer(self, positions: int) -> Placement:
        """The same placement with caches for that many more tokens."""
        device_bytes, host_bytes = (math.ceil(positions * each) for each in self.position_bytes)
        own, windowed, length = self.footprint, self.facts.windowed, self.context_length + positions
        device_bytes -= windowed.spared_bytes(length) - windowed.spared_bytes(self.context_length)
        grown = replace(own, device_bytes=own.device_bytes + device_bytes, host_bytes=own.host_bytes + host_bytes)
        return replace(self, footprint=grown, context_length=length)

    def is_of(self, settings: Settings) -> bool:
        """Whether ``settings`` put a model here."""
        return _where(self.settings) == _where(settings)

    def put(self, settings: Settings) -> Settings:
        """``settings``, changed to put a model here."""
        own = self.settings
        return runtime_of(own).moved(settings, own) if own.runtime == settings.runtime else own

    @property
    def needed_bytes(self) -> Mapping[str, int]:
        """Bytes needed of each memory; working buffers are counted in both, as either may hold them."""
        device_bytes, host_bytes = self.footprint.device_bytes, self.footprint.host_bytes + self.buffers_bytes
        if self.memory == HOST:
            return {HOST: device_bytes + host_bytes}
        return {self.memory: device_bytes + HEADROOM_BYTES, HOST: host_bytes}

    def not_measured(self, calibrate: str, *, drafting: bool = False) -> Rejected:
        """The rejection of a placement that was not timed, as ``calibrate`` does; times are not guessed."""
        verdict = Reason("not_measured", f"not measured yet; `{calibrate}` does that")
        return Rejected(what=f"{self.name}, drafting" if drafting else self.name, verdict=verdict, target=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """All placements of target and drafter; empty if there is only the processor with one runtime.

    ``gpus`` are those that either may use. ``memory_bytes`` is the usable part of each GPU's own memory, without GPUs
    that do not report it.
    """

    targets: tuple[Placement, ...] = ()
    drafters: tuple[Placement, ...] = ()
    gpus: tuple[Device, ...] = ()
    memory_bytes: Mapping[str, int] = field(default_factory=dict)

    def longer(self, positions: int) -> Placements:
        """The same places for caches of that many more tokens."""
        targets, drafters = (tuple(each.longer(positions) for each in one) for one in (self.targets, self.drafters))
        return replace(self, targets=targets, drafters=drafters)

    def room(self, place: Placement) -> bool:
        """Whether the model fits in a GPU's own memory. True for the machine's memory, False for an unknown size."""
        return place.memory == HOST or place.needed_bytes[place.memory] <= self.memory_bytes.get(place.memory, 0)

    def too_small(self, place: Placement, *, drafting: bool = False) -> Rejected | None:
        """Why a GPU cannot hold the model, or its size is unknown; None if it can."""
        if self.room(place):
            return None
        needed, available = place.needed_bytes[place.memory], self.memory_bytes.get(place.memory)
        verdict = memory_not_known(place.memory)
        if available is not None:
            verdict = no_room(place.memory, needed, available)
        what = f"{place.name}, drafting" if drafting else place.name
        return Rejected(
            what=what,
            verdict=verdict,
            target=None,
            needed_bytes=None if available is None else needed,
            available_bytes=available,
        )


def target_places(prepare: Preparation, target: LocatedModel, known: Known = lambda _facts: False) -> Placements:
    """Where the profile lets the target run, and in which runtime; an ONNX model is not moved.

    A GPU that is too small for the whole target is offered as many layers as fit. Of a placement's settings the first
    that is ``known`` (measured) is used, else the fastest. No driver is queried if only the CPU is requested. Raises
    RuntimeUnavailableError, ModelFileError.
    """
    profile = prepare.profile
    wanted = profile.device.lower()
    only_host = wanted == profile.draft_device.lower() == HOST
    gpus = () if only_host else tuple(gpu for one in RUNTIMES.values() for gpu in one.gpus())
    memory_bytes = {
        gpu.name: int(gpu.free_bytes * profile.max_memory_fraction)
        for gpu in gpus
        if gpu.memory != HOST and gpu.free_bytes is not None
    }
    runtimes = _runtimes(profile.runtime, target)
    targets: list[Placement] = []
    for device, runtime in _allowed(wanted, gpus, runtimes) if gpus or len(runtimes) > 1 else ():
        room = None if device is None else memory_bytes.get(device.name)
        for layers in _layer_counts(prepare, target, runtime, device, room):
            variants = prepare.target_at(target, runtime, _name(device), layers)
            chosen = next((each for each in variants if known(each.facts)), variants[0])
            targets.append(_placement(chosen, device))
    return Placements(targets=tuple(targets), gpus=gpus, memory_bytes=memory_bytes)


def with_drafter(places: Placements, prepare: Preparation, drafter: LocatedModel) -> Placements:
    """``places`` with all placements of a drafter. It never moves the target or its layers.

    Raises what ``target_places`` raises.
    """
    profile = prepare.profile
    runtimes = _runtimes(profile.draft_runtime, drafter)
    if not places.gpus and not places.targets and len(runtimes) < 2:
        return places
    found = (
        _placement(prepare.drafter_at(drafter, runtime, _name(device)), device)
        for device, runtime in _allowed(profile.draft_device.lower(), places.gpus, runtimes)
    )
    return replace(places, drafters=tuple(found))


def default_settings(settings: Settings, places: Placements, allowed_bytes: int) -> Settings:
    """The target's settings before any measurement: ``settings``, those of ``Preparation.target``, if it fits there.

    Else the CPU, if the target fits in ``allowed_bytes`` of the machine's memory, else as many layers on a GPU as
    fit: a model too large for one memory may fit in two.
    """

    def order(place: Placement) -> int:
        return 0 if place.is_of(settings) else 1 if place.facts.device == HOST else 2

    for place in sorted(places.targets, key=order):
        if places.room(place) and place.needed_bytes[HOST] <= allowed_bytes:
            return place.put(settings)
    return settings


def require_room(settings: Settings, places: Placements) -> None:
    """Raise MemoryLimitError if these settings put more on a GPU than its own memory holds."""
    for place in places.targets:
        if place.memory in places.memory_bytes and place.is_of(settings) and not places.room(place):
            needed, allowed = place.needed_bytes[place.memory], places.memory_bytes[place.memory]
            raise MemoryLimitError(
                f"{place.name} needs about {gib(needed)} there and {gib(allowed)} may be used",
                needed_bytes=needed,
                available_bytes=allowed,
                hint="fewer gpu_layers, a smaller context (--context), or another device",
            )


def room_for_drafter(settings: Settings, device: str, places: Placements) -> tuple[int, int] | None:
    """(needed, left) bytes of the GPU's own memory for a drafter on ``device`` with the target in these settings.

    None if the size is unknown, or the GPU shares the machine's memory.
    """
    place = next((p for p in places.drafters if p.facts.device == device), None)
    if place is None or place.memory not in places.memory_bytes:
        return None
    sharing = (target for target in places.targets if target.memory == place.memory and target.is_of(settings))
    taken = max((target.needed_bytes[place.memory] for target in sharing), default=0)
    return place.needed_bytes[place.memory], places.memory_bytes[place.memory] - taken


# ---------------------------------------------------------------------------------------------------- one place


def _where(settings: Settings) -> tuple[str, str, int | None]:
    return settings.runtime, settings.device, settings.gpu_layers


def _name(device: Device | None) -> str:
    return HOST if device is None else device.name


def _runtimes(wanted: str, located: LocatedModel) -> Sequence[Runtime]:
    """The runtimes for a model on the processor; empty for an ONNX model, which is not placed here."""
    if located.onnx is not None:
        return ()
    return processor_runtimes(wanted, HOST, located)


def _allowed(
    wanted: str, gpus: Sequence[Device], runtimes: Sequence[Runtime]
) -> Iterator[tuple[Device | None, Runtime]]:
    """The devices that a profile's value allows, and the runtimes on them; None is the CPU."""
    if wanted in ("auto", HOST):
        for runtime in runtimes:
            yield None, runtime
    for runtime in runtimes:
        for gpu in gpus:
            if gpu.runtime == runtime.name and wanted in ("auto", gpu.name.lower()):
                yield gpu, runtime


def _layer_counts(
    prepare: Preparation,
    target: LocatedModel,
    runtime: Runtime,
    device: Device | None,
    room: int | None,
) -> list[int | None]:
    """How many layers of the target to offer a device: all (None), and the numbers that fit if all do not."""
    if device is None:
        return [None]
    wanted = prepare.profile.gpu_layers
    if wanted != "auto":
        return [wanted] if wanted else []
    if room is None:  # size unknown, or the machine's own memory, where a part is as hard to fit as the whole
        return [None]
    whole = prepare.target_at(target, runtime, device.name)[0]
    layers = layer_bytes(target.header, runtime.cache_bits(whole.settings))
    count = layers_that_fit(layers, prepare.context_length, room, headroom_bytes=HEADROOM_BYTES)
    return [None, count] if 0 < count < layers.layers else [None]


def _placement(model: PreparedModel, device: Device | None) -> Placement:
    header, settings, some = model.file.header, model.settings, model.settings.gpu_layers
    bits = runtime_of(settings).cache_bits(settings)
    layers = layer_bytes(header, bits)
    split = layers.split(0 if settings.device == HOST else some, model.context_length)
    memory = HOST if device is None else device.memory
    host_bytes = split.host_bytes - model.spared_bytes
    spared_bytes = model.facts.windowed.spared_bytes(model.context_length)
    device_cache, host_cache = (count / model.context_length for count in (split.device_cache, split.host_cache))
    return Placement(
        settings=settings,
        facts=model.facts,
        footprint=Footprint(
            memory=memory,
            device_bytes=split.device_bytes + (host_bytes if memory == HOST else 0) - spared_bytes,
            host_bytes=0 if memory == HOST else host_bytes,
            layers=None if some is None else (some, layers.layers),
        ),
        buffers_bytes=estimate_memory(header, model.context_length, bits).buffers_bytes,
        position_bytes=(device_cache + host_cache, 0.0) if memory == HOST else (device_cache, host_cache),
        context_length=model.context_length,
    )
