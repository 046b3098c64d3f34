"""A machine described in a file: its devices and models, and the checks of the file.

A description is untrusted text: every value is checked for type and bounds before use.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from edgespec.errors import ProfileError

# Bounds that no machine of the coming decade reaches; a figure beyond them has the wrong unit.
_MOST_BYTES = 2**50
_MOST_PER_S = 1e18
_LONGEST_S = 10.0
_MOST_ENTRIES = 64
_LONGEST_TEXT = 400
_LARGEST_RATIO = 1000.0
_MOST_LAYERS = 1000

DeviceKind = Literal["cpu", "gpu", "npu"]


# The runtimes of described machines, and whether each splits a model's layers between two devices.
_SPLITS_LAYERS = {"llama": True, "onnx": False, "native": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedDevice:
    """A device. ``memory`` names the device whose memory it uses; ``verify_curve`` holds (width, T(w) / T(1)).

    ``operations_per_s`` counts a multiply-add as two, in the arithmetic of its matrix products. ``launch_s`` is the
    overhead of a forward. With an empty ``verify_curve``, T(w) follows the roofline.
    """

    name: str
    kind: DeviceKind
    runtime: str
    threads: int
    memory: str
    memory_bytes: int
    read_bytes_per_s: float
    operations_per_s: float
    launch_s: float
    verify_curve: tuple[tuple[int, float], ...]

    @property
    def splits_layers(self) -> bool:
        """Whether a model may be split between this device and another."""
        return _SPLITS_LAYERS[self.runtime]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedModel:
    """A model. ``bytes_per_token`` are the weights a forward reads; ``devices`` are where it may run, empty: all.

    ``layers``, for a target that may be split between a GPU and the processor; None: not split.
    """

    name: str
    weights_bytes: int
    bytes_per_token: int
    kv_bytes_per_token: int
    operations_per_token: float
    devices: tuple[str, ...]
    layers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedDrafter:
    """A drafter for the target. ``model`` is None for the lookup drafter."""

    model: DescribedModel | None
    acceptance: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedMachine:
    """A whole described machine. ``shared_bandwidth`` holds (devices, their total bytes a second), ``links`` (two

    devices, seconds of a hand-over).
    """

    name: str
    description: str
    context_length: int
    devices: tuple[DescribedDevice, ...]
    shared_bandwidth: tuple[tuple[frozenset[str], float], ...]
    links: tuple[tuple[frozenset[str], float], ...]
    target: DescribedModel
    drafters: tuple[DescribedDrafter, ...]


def machine_from_table(table: Mapping[str, object], origin: str, name: str) -> DescribedMachine:
    """Check a description. ``origin`` is the file's name in messages, ``name`` the machine's name.

    Raises ProfileError with file and key for a value that is unknown, missing, of the wrong type or out of bounds.
    """
    top = _Table(origin, "", table)
    description = top.text("description")
    context_length = top.integer("context", 128, 2**20)
    devices = _devices(top.tables("devices", required=True))
    names = [device.name for device in devices]
    machine = DescribedMachine(
        name=name,
        description=description,
        context_length=context_length,
        devices=devices,
        shared_bandwidth=tuple(_group(one, names) for one in top.tables("shared_bandwidth")),
        links=tuple(_link(one, names) for one in top.tables("links")),
        target=_target(top.table("target"), names),
        drafters=tuple(_drafter(one, names) for one in top.tables("drafters")),
    )
    top.done()
    return machine


# --------------------------------------------------------------------------------------------- the tables of a file


def _devices(tables: list[_Table]) -> tuple[DescribedDevice, ...]:
    names = [table.text("name") for table in tables]
    own = {name: table for name, table in zip(names, tables, strict=True) if "memory_bytes" in table.values}
    devices = []
    for name, table in zip(names, tables, strict=True):
        if names.count(name) > 1:
            raise table.error("name", f'"{name}" is the name of another device too')
        if name in own and "shares_memory_with" in table.values:
            raise table.error("shares_memory_with", "and memory_bytes exclude each other: give only one")
        memory = name if name in own else table.one_of("shares_memory_with", list(own))
        devices.append(
            DescribedDevice(
                name=name,
                kind=cast("DeviceKind", table.one_of("kind", ["cpu", "gpu", "npu"])),
                runtime=table.one_of("runtime", list(_SPLITS_LAYERS), default="llama"),
                threads=table.integer("threads", 1, 1024, default=1),
                memory=memory,
                memory_bytes=own[memory].integer("memory_bytes", 1, _MOST_BYTES),
                read_bytes_per_s=table.number("read_bytes_per_s", 1.0, _MOST_PER_S),
                operations_per_s=table.number("operations_per_s", 1.0, _MOST_PER_S),
                launch_s=table.number("launch_s", 0.0, _LONGEST_S),
                verify_curve=table.ratios("verify_curve"),
            )
        )
    for table in tables:
        table.done()
    return tuple(devices)


def _group(table: _Table, devices: list[str]) -> tuple[frozenset[str], float]:
    members = table.names("devices", devices, at_least=2)
    bytes_per_s = table.number("bytes_per_s", 1.0, _MOST_PER_S)
    table.done()
    return frozenset(members), bytes_per_s


def _link(table: _Table, devices: list[str]) -> tuple[frozenset[str], float]:
    between = table.names("between", devices, at_least=2, at_most=2)
    hand_over_s = table.number("hand_over_s", 0.0, _LONGEST_S)
    table.done()
    return frozenset(between), hand_over_s


def _target(table: _Table, devices: list[str]) -> DescribedModel:
    model = _model(table, devices)
    layers = table.integer("layers", 2, _MOST_LAYERS) if table.has("layers") else None
    table.done()
    return replace(model, layers=layers)


def _drafter(table: _Table, devices: list[str]) -> DescribedDrafter:
    kind = table.one_of("kind", ["model", "lookup"], default="model")
    acceptance = table.probabilities("acceptance")
    model = _model(table, devices) if kind == "model" else None
    table.done()
    return DescribedDrafter(model=model, acceptance=acceptance)


def _model(table: _Table, devices: list[str]) -> DescribedModel:
    return DescribedModel(
        name=table.text("name"),
        weights_bytes=table.integer("weights_bytes", 1, _MOST_BYTES),
        bytes_per_token=table.integer("bytes_per_token", 1, _MOST_BYTES),
        kv_bytes_per_token=table.integer("kv_bytes_per_token", 0, _MOST_BYTES),
        operations_per_token=table.number("operations_per_token", 1.0, _MOST_PER_S),
        devices=table.names("devices", devices) if table.has("devices") else (),
    )


# -------------------------------------------------------------------------------------------- one table, checked


class _Table:
    """Reads a table key by key and remembers the keys read, so that ``done`` can name an unknown key."""

    def __init__(self, origin: str, place: str, values: Mapping[str, object]) -> None:
        self.values = values
        self._origin = origin
        self._place = place
        self._asked: set[str] = set()

    def error(self, key: str, problem: str, *, hint: str | None = None) -> ProfileError:
        """``FILE: devices 2, memory_bytes PROBLEM``."""
        return ProfileError(f"{self._origin}: {self._place}{key} {problem}", hint=hint)

    def done(self) -> None:
        """Raise ProfileError if the table holds a key that was never read."""
        for key in self.values:
            if key in self._asked:
                continue
            near = difflib.get_close_matches(key, self._asked, n=1)
            hint = f'Did you mean "{near[0]}"?' if near else f"Known keys: {', '.join(sorted(self._asked))}."
            raise ProfileError(f"{self._origin}: {self._place}{_shown(key)} is an unknown key", hint=hint)

    def has(self, key: str) -> bool:
        """Whether an optional key is present; marks the key as known."""
        self._asked.add(key)
        return key in self.values

    def text(self, key: str) -> str:
        value = self._value(key)
        # A terminal would execute control characters.
        if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > _LONGEST_TEXT:
            raise self._wrong(key, f"a line of up to {_LONGEST_TEXT} characters", value)
        return value.strip()

    def one_of(self, key: str, choices: list[str], *, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str) or value not in choices:
            allowed = " or ".join(f'"{choice}"' for choice in choices) or "the name of a device with memory_bytes"
            raise self._wrong(key, allowed, value)
        return value

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(key, f"a whole number from {low} to {high}", value)
        return value

    def number(self, key: str, low: float, high: float) -> float:
        return self._number(key, self._value(key), low, high)

    def probabilities(self, key: str) -> tuple[float, ...]:
        return tuple(self._number(key, value, 0.0, 1.0) for value in self._list(key, at_least=1))

    def ratios(self, key: str) -> tuple[tuple[int, float], ...]:
        """[[width, T(w) / T(1)], ...], widths ascending from [1, 1.0]; empty if the key is missing."""
        if not self.has(key):
            return ()
        pairs = []
        for pair in self._list(key, at_least=1):
            if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], int) or pair[0] is True:
                raise self._wrong(key, "pairs of a width and a ratio", pair)
            pairs.append((pair[0], self._number(key, pair[1], 0.01, _LARGEST_RATIO)))
        if pairs[0] != (1, 1.0) or any(left[0] >= right[0] for left, right in itertools.pairwise(pairs)):
            raise self.error(key, "must start with [1, 1.0], and its widths ascend")
        return tuple(pairs)

    def names(
        self, key: str, known: list[str], *, at_least: int = 1, at_most: int = _MOST_ENTRIES
    ) -> tuple[str, ...]:
        """Different names of devices."""
        found = self._list(key, at_least=at_least)
        for value in found:
            if not isinstance(value, str) or value not in known:
                raise self.error(
                    key, f"names a device that is not described: {_shown(value)}", hint=_known(value, known)
                )
        if len(set(map(str, found))) != len(found) or len(found) > at_most:
            wanted = f"{at_least}" if at_least == at_most else f"{at_least} or more"
            raise self.error(key, f"must name {wanted} different devices")
        return tuple(map(str, found))

    def table(self, key: str) -> _Table:
        value = self._value(key)
        if not isinstance(value, dict):
            raise self._wrong(key, f"a table, [{key}]", value)
        return _Table(self._origin, f"{key}, ", value)

    def tables(self, key: str, *, required: bool = False) -> list[_Table]:
        if not self.has(key) and not required:
            return []
        found = []
        for number, value in enumerate(self._list(key, at_least=1), start=1):
            if not isinstance(value, dict):
                raise self._wrong(key, f"tables, [[{key}]]", value)
            found.append(_Table(self._origin, f"{key} {number}, ", value))
        return found

    def _value(self, key: str, default: object = None) -> object:
        self._asked.add(key)
        if key not in self.values and default is None:
            raise self.error(key, "is missing")
        return self.values.get(key, default)

    def _list(self, key: str, *, at_least: int) -> list[object]:
        value = self._value(key)
        if not isinstance(value, list) or not at_least <= len(value) <= _MOST_ENTRIES:
            raise self._wrong(key, f"a list of {at_least} to {_MOST_ENTRIES} entries", value)
        return value

    def _number(self, key: str, value: object, low: float, high: float) -> float:
        # Compared before conversion: a file may hold an integer that exceeds any float.
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(key, f"a number from {low:g} to {high:g}", value)
        return float(value)

    def _wrong(self, key: str, allowed: str, value: object) -> ProfileError:
        return self.error(key, f"must be {allowed}, got {_shown(value)}")


def _known(value: object, known: list[str]) -> str:
    near = difflib.get_close_matches(str(value)[:_LONGEST_TEXT], known, n=1)
    return f'Did you mean "{near[0]}"?' if near else f"Described devices: {', '.join(known)}."


def _shown(value: object) -> str:
    """A value for use in a message: short, without control characters."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _MOST_BYTES:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    try:
        text = str(value).lower() if isinstance(value, bool) else ascii(value)
    except ValueError:  # an integer inside has more digits than Python converts
        return "something too long to show"
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= 60 else f"{text[:57]}..."
