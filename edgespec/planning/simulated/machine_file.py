"""A machine described in a file: its devices and models, and the checks of the file.

A description is untrusted text: every value is checked for type and bounds before use.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

from edgespec.errors import ProfileError
from edgespec.files.checked import Check, From, Key, Length, Range, WrongValueError, is_line, read, shown

# Bounds that no machine of the coming decade reaches; a figure beyond them has the wrong unit.
_MOST_BYTES = 2**50
_MOST_PER_S = 1e18
_LONGEST_S = 10.0
_MOST_ENTRIES = 64
_LONGEST_TEXT = 400

_Bytes: TypeAlias = Annotated[int, Range(1, _MOST_BYTES)]
_PerSecond: TypeAlias = Annotated[float, Range(1.0, _MOST_PER_S)]
_Seconds: TypeAlias = Annotated[float, Range(0.0, _LONGEST_S)]


def _is_line(text: str) -> bool:
    return is_line(text) and 0 < len(text) <= _LONGEST_TEXT  # a terminal would execute control characters


_Line: TypeAlias = Annotated[
    str, From(str, str.strip), Check(_is_line, f"a line of up to {_LONGEST_TEXT} characters")
]
_Acceptance: TypeAlias = Annotated[tuple[Annotated[float, Range(0.0, 1.0)], ...], Length(1, _MOST_ENTRIES)]


def _is_curve(ratios: tuple[tuple[int, float], ...]) -> bool:
    return ratios[0] == (1, 1.0) and all(left[0] < right[0] for left, right in itertools.pairwise(ratios))


_Ratios: TypeAlias = Annotated[
    tuple[tuple[int, Annotated[float, Range(0.01, 1000.0)]], ...],
    Length(1, _MOST_ENTRIES),
    Check(_is_curve, "pairs of a width and a ratio, ascending from [1, 1.0]"),
]

# The runtimes of described machines, and whether each splits a model's layers between two devices.
_SPLITS_LAYERS = {"llama": True, "onnx": False, "native": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedDevice:
    """A device with ``memory_bytes``, or one that ``shares_memory_with`` such a device.

    ``verify_curve`` holds (width, T(w) / T(1)); without it T(w) follows the roofline. ``operations_per_s`` counts a
    multiply-add as two, in the arithmetic of its matrix products. ``launch_s`` is the overhead of a forward.
    """

    name: _Line
    kind: Literal["cpu", "gpu", "npu"]
    runtime: Literal["llama", "onnx", "native"] = "llama"
    threads: Annotated[int, Range(1, 1024)] = 1
    memory_bytes: _Bytes = 0
    shares_memory_with: _Line | None = None
    read_bytes_per_s: _PerSecond
    operations_per_s: _PerSecond
    launch_s: _Seconds
    verify_curve: _Ratios = ()

    @property
    def memory(self) -> str:
        """The name of the device whose memory it uses."""
        return self.shares_memory_with or self.name

    @property
    def splits_layers(self) -> bool:
        """Whether a model may be split between this device and another."""
        return _SPLITS_LAYERS[self.runtime]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedModel:
    """A model. ``bytes_per_token`` are the weights a forward reads; ``devices`` are where it may run, empty: all."""

    name: _Line
    weights_bytes: _Bytes
    bytes_per_token: _Bytes
    kv_bytes_per_token: Annotated[int, Range(0, _MOST_BYTES)]
    operations_per_token: _PerSecond
    devices: Annotated[frozenset[str], Length(1, _MOST_ENTRIES)] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedTarget(DescribedModel):
    """A target. ``layers``, if it may be split between a GPU and the processor; None: not split."""

    layers: Annotated[int, Range(2, 1000)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedDrafter:
    """A drafter for the target. ``model`` is None for the lookup drafter."""

    model: DescribedModel | None
    acceptance: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBandwidth:
    """Devices that together read at most ``bytes_per_s``."""

    devices: Annotated[frozenset[str], Length(2, _MOST_ENTRIES)]
    bytes_per_s: _PerSecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Seconds of a hand-over between two devices."""

    between: Annotated[frozenset[str], Length(2, 2)]
    hand_over_s: _Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _LookupTable:
    kind: Literal["lookup"]
    acceptance: _Acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelTable(DescribedModel):
    kind: Literal["model", "lookup"] = "model"
    acceptance: _Acceptance


def _drafter(table: dict[str, Any]) -> DescribedDrafter:
    if table.get("kind") == "lookup":
        return DescribedDrafter(model=None, acceptance=read(_LookupTable, table).acceptance)
    model = read(_ModelTable, table)
    return DescribedDrafter(model=model, acceptance=model.acceptance)


_SOME = Length(1, _MOST_ENTRIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedMachine:
    """A whole described machine."""

    description: _Line
    context_length: Annotated[int, Range(128, 2**20), Key("context")]
    devices: Annotated[tuple[DescribedDevice, ...], _SOME]
    shared_bandwidth: Annotated[tuple[SharedBandwidth, ...], _SOME] = ()
    links: Annotated[tuple[Link, ...], _SOME] = ()
    target: DescribedTarget
    drafters: Annotated[tuple[Annotated[DescribedDrafter, From(dict[str, Any], _drafter)], ...], _SOME] = ()


def machine_from_table(table: Mapping[str, object], origin: str) -> DescribedMachine:
    """Check a description. ``origin`` is the file's name in messages.

    Raises ProfileError with file and key for a value that is unknown, missing, of the wrong type or out of bounds.
    """
    try:
        machine = read(DescribedMachine, table)
        machine = replace(machine, devices=tuple(_with_memory(machine.devices)))
        _check_names(machine)
    except WrongValueError as error:
        raise ProfileError(f"{origin}: {error}", hint=error.hint) from error
    return machine


def _with_memory(devices: tuple[DescribedDevice, ...]) -> Iterable[DescribedDevice]:
    """The devices, each with the bytes of the memory it uses."""
    own = {device.name: device.memory_bytes for device in devices if device.memory_bytes}
    for at, device in enumerate(devices, start=1):
        if [each.name for each in devices].count(device.name) > 1:
            raise WrongValueError(f"is the name of another device too: {shown(device.name)}", ("devices", at, "name"))
        key = ("devices", at, "shares_memory_with")
        if device.memory_bytes and device.shares_memory_with is not None:
            raise WrongValueError("and memory_bytes exclude each other: give only one", key)
        if device.memory not in own:
            allowed = " or ".join(map(shown, own)) or "the name of a device with memory_bytes"
            if device.shares_memory_with is None:
                raise WrongValueError(f"is missing: it must be {allowed}", key)
            raise WrongValueError(f"must be {allowed}, got {shown(device.memory)}", key)
        yield replace(device, memory_bytes=own[device.memory])


def _check_names(machine: DescribedMachine) -> None:
    """Raise WrongValueError for the name of a device that is not described."""
    named: list[tuple[tuple[str | int, ...], frozenset[str]]] = [(("target", "devices"), machine.target.devices)]
    for at, group in enumerate(machine.shared_bandwidth, start=1):
        named.append((("shared_bandwidth", at, "devices"), group.devices))
    for at, link in enumerate(machine.links, start=1):
        named.append((("links", at, "between"), link.between))
    for at, drafter in enumerate(machine.drafters, start=1):
        if drafter.model is not None:
            named.append((("drafters", at, "devices"), drafter.model.devices))
    known = sorted(device.name for device in machine.devices)
    for path, names in named:
        for name in sorted(names.difference(known)):
            near = difflib.get_close_matches(name[:_LONGEST_TEXT], known, n=1)
            hint = f'Did you mean "{near[0]}"?' if near else f"Described devices: {', '.join(known)}."
            raise WrongValueError(f"names a device that is not described: {shown(name)}", path, hint=hint)
