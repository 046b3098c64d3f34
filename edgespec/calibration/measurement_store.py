"""Measurements kept between runs: versioned, filed under what they depend on, discarded when that changes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from edgespec.calibration.kinds import PLAIN, THREADS, TIMES, Key, Kind, Setting
from edgespec.errors import CancelledError, EdgespecError, ModelFileError, StoreLockedError, reason_of
from edgespec.files.atomic import write_json
from edgespec.files.checked import WrongValueError, kind_of, parse_object, read, read_object
from edgespec.files.disk import read_bounded
from edgespec.files.locks import locked
from edgespec.files.progress import Job
from edgespec.hardware.bandwidth import BandwidthMeasurement
from edgespec.hardware.machine import Machine
from edgespec.interfaces.model import ModelFacts
from edgespec.planning.choice.settled import Settled
from edgespec.planning.cost.margins import TAKEOVER_CALIBRATIONS

SCHEMA_VERSION = 3
BANDWIDTH_SCHEMA_VERSION = 1

# A measurement is a few kilobytes, at most some tens with every thread count of a large server; a larger file is not
# a measurement of ours.
_LARGEST_FILE_BYTES = 2**20

T = TypeVar("T")
P = ParamSpec("P")


class _UnusableError(Exception):
    """A file exists but does not apply to this machine and model."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """The folder of this machine's measurements. It need not exist.

    ``notes`` collects a sentence for every file that could not be used, ``unusable`` the names of those of them that
    could be read. Width classes do not depend on the power source; times do. ``create`` makes a folder before the
    first write.
    """

    folder: Path
    machine_fingerprint: str
    power_source: str | None = None
    create: Callable[[Path], object] = field(default=partial(Path.mkdir, parents=True, exist_ok=True), compare=False)
    notes: list[str] = field(default_factory=list, compare=False)
    unusable: set[str] = field(default_factory=set, init=False, compare=False, repr=False)
    _unwritten: dict[str, bytes] = field(default_factory=dict, init=False, compare=False, repr=False)
    _refusals: dict[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)
    # By kind, keys that other builds may have stored: read once.
    _keys: dict[str, list[Key]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def on_power(self, power_source: str) -> Measurements:
        """The same folder, for a machine on another power source."""
        other = replace(self, power_source=power_source, notes=[])
        other._unwritten.update(self._unwritten)
        other._refusals.update(self._refusals)
        return other

    def load(self, kind: Kind[T, P], *about: P.args, **named: P.kwargs) -> T | None:
        """The measurement of this build, else the latest of another build that computes the same; None if not made.

        Our kernels take about as long in each build, and decoding corrects the difference; measuring again takes a
        minute.
        """
        key = kind.key(self._setting, *about, **named)
        found = (self._load(kind, each) for each in (key, *self._of_other_builds(kind, key, about)))
        return next((each for each in found if each is not None), None)

    def save(self, kind: Kind[T, P], value: T, *about: P.args, **named: P.kwargs) -> None:
        """Store a measurement; if the folder is not writable, the next process measures again."""
        if kind.keeps is not None:
            before = self.load(kind, *about, **named)
            if before is not None and kind.keeps(before, value):
                return
        key = kind.key(self._setting, *about, **named)
        path = self.folder / _file_name(kind, key)
        document = {"schema_version": SCHEMA_VERSION, "key": dict(key), kind.name: kind.stored(value)}
        try:
            self.create(self.folder)
            write_json(path, document)
        except (OSError, EdgespecError) as error:
            self._unwritten[path.name] = json.dumps(document).encode()
            self._refusals[path.name] = error.message if isinstance(error, EdgespecError) else _said(error, path)
        else:
            self._unwritten.pop(path.name, None)

    def forget(self, kind: Kind[T, P], *about: P.args, **named: P.kwargs) -> None:
        """Delete an old measurement that newer ones of its setting contradict, or that could not be made again."""
        key = kind.key(self._setting, *about, **named)
        for each in (key, *self._of_other_builds(kind, key, about)):
            path = self.folder / _file_name(kind, each)
            self._unwritten.pop(path.name, None)
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def plain_s(self, facts: ModelFacts) -> float | None:
        """T(1) in this setting on a quiet machine, from its curve or from a measurement of plain decoding alone."""
        times = self.load(TIMES, facts)
        return self.load(PLAIN, facts) if times is None or times.busy else times.curves.curves[0].plain_s

    def busy_share(self, facts: ModelFacts) -> float:
        """``busy`` of the stored times; 0 if measured on a quiet machine, or not at all."""
        times = self.load(TIMES, facts)
        return 0.0 if times is None else times.busy

    def settled(self, kind: Kind[Settled[T], P], *about: P.args, **named: P.kwargs) -> Settled[T]:
        """What calibrations have agreed on so far."""
        return self.load(kind, *about, **named) or Settled()

    def settle_threads(self, most: ModelFacts, fastest: int) -> int:
        """A target's number of threads from now on, after a calibration that found ``fastest``.

        ``fastest`` itself if threads change no bits, else what calibrations agree on. ``most`` are the target's facts
        with all threads.
        """
        settled = self.settled(THREADS, most, most.runtime) or Settled[int]()
        found = fastest if fastest != (settled.chosen or most.threads) else None
        settled = settled.after(found, 1 if most.bit_equal_by_construction else TAKEOVER_CALIBRATIONS)
        self.save(THREADS, settled, most, most.runtime)
        return settled.chosen or most.threads

    @property
    def unstored(self) -> str | None:
        """Why a measurement is only kept in this process; None if all are stored."""
        return next((self._refusals[name] for name in self._unwritten), None)

    @contextmanager
    def exclusive(
        self, lock_folder: Path, *, wait: bool, waiting: Callable[[], object] = lambda: None
    ) -> Iterator[bool]:
        """Hold the lock under which everything is timed; False if another process holds it and ``wait`` is False.

        Two calibrations in parallel would disturb each other. ``waiting`` is called several times a second while
        this one waits, and may raise CancelledError to end it.
        """

        def cancelled() -> bool:
            waiting()
            return False

        with ExitStack() as held:
            try:
                self.create(lock_folder)
                told = Job(cancelled=cancelled)
                path, timeout_s = lock_folder / "calibration.lock", math.inf if wait else 0.0
                held.enter_context(locked(path, "calibrating", told, timeout_s=timeout_s))
                alone = True
            except StoreLockedError:
                alone = False
            except CancelledError:
                raise
            except (OSError, EdgespecError):
                alone = True  # without a folder for locks no other process holds one either
            yield alone

    @property
    def _setting(self) -> Setting:
        return Setting(self.machine_fingerprint, self.power_source)

    def _of_other_builds(self, kind: Kind[Any, Any], key: Key, about: Iterable[object]) -> list[Key]:
        """Stored keys that differ only in the builds of our kernels, the latest first."""
        models = [each for each in about if isinstance(each, ModelFacts)]
        ours = {facts.runtime for facts in models if facts.bit_equal_by_construction}
        if not ours or not kind.any_build:
            return []
        if kind.name not in self._keys:
            self._keys[kind.name] = self._stored_keys(kind.name)
        wanted = _of_any_build(key, ours)
        return [other for other in self._keys[kind.name] if other != key and _of_any_build(other, ours) == wanted]

    def _stored_keys(self, name: str) -> list[Key]:
        """The keys of every readable measurement of a kind, the latest first."""
        found: list[tuple[int, Key]] = []
        with suppress(OSError):
            for path in self.folder.glob(f"{name}-*.json"):
                with suppress(OSError, ModelFileError, ValueError, _UnusableError):
                    found.append((path.stat().st_mtime_ns, _key_in(self._document(path))))
        return [key for _, key in sorted(found, key=lambda pair: pair[0], reverse=True)]

    def _load(self, kind: Kind[T, Any], key: Key) -> T | None:
        path = self.folder / _file_name(kind, key)
        try:
            document = self._document(path)
            if _key_in(document) != key:
                raise _UnusableError("it was measured on another machine or model")
            value: T = kind_of(kind.hint, ignore_unknown=True).read(document.get(kind.name))
            return value
        except FileNotFoundError:
            return None
        except OSError as error:  # perhaps for a moment
            self._note(path, f"it cannot be read ({reason_of(error)})")
            return None
        except _UnusableError as error:
            why = str(error)
        except (ModelFileError, ValueError):
            why = "it is damaged"
        self.unusable.add(path.name)
        self._note(path, why)
        return None

    def _note(self, path: Path, why: str) -> None:
        note = f"the measurement {path.name} is ignored and made again: {why}"
        if note not in self.notes:
            self.notes.append(note)

    def _document(self, path: Path) -> dict[str, Any]:
        raw = self._unwritten.get(path.name)
        if raw is None:
            raw = read_bounded(path, _LARGEST_FILE_BYTES)
        document = parse_object(path, raw)
        if read(int, document.get("schema_version")) != SCHEMA_VERSION:
            raise _UnusableError("another version of edgespec wrote it")
        return document


def _file_name(kind: Kind[Any, Any], key: Key) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return f"{kind.name}-{digest}.json"


def _key_in(document: dict[str, Any]) -> Key:
    return read(dict[str, Any], document.get("key"))


def _said(error: OSError, path: Path) -> str:
    return f"{error.filename or path}: {reason_of(error)}"


def _of_any_build(key: Key, runtimes: Collection[str]) -> dict[str, Any]:
    """The key of a model, or of a pair, without the builds of ``runtimes``."""
    if key.get("runtime") in runtimes:
        return {name: value for name, value in key.items() if name != "build"}
    return {name: _of_any_build(v, runtimes) if isinstance(v, Mapping) else v for name, v in key.items()}


# ------------------------------------------------------------------------ what the machine itself gives


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredBandwidth:
    schema_version: int
    machine: str
    power_source: str | None
    bandwidth: BandwidthMeasurement


def load_bandwidth(folder: Path, machine: Machine) -> BandwidthMeasurement | None:
    """The bandwidth measured on this machine with its current power source; None if there is no valid one."""
    path = _bandwidth_path(folder, machine)
    try:
        stored = read(_StoredBandwidth, read_object(path, _LARGEST_FILE_BYTES), ignore_unknown=True)
    except (ModelFileError, WrongValueError):
        return None  # missing or damaged: measured again
    wanted = (BANDWIDTH_SCHEMA_VERSION, machine.fingerprint, machine.power_source)
    return stored.bandwidth if (stored.schema_version, stored.machine, stored.power_source) == wanted else None


def save_bandwidth(folder: Path, machine: Machine, measurement: BandwidthMeasurement) -> None:
    """Store a measurement; if the folder is not writable, the next process measures again."""
    document = {
        "schema_version": BANDWIDTH_SCHEMA_VERSION,
        "machine": machine.fingerprint,
        "power_source": machine.power_source,
        "bandwidth": measurement.as_json(),
    }
    with suppress(OSError, EdgespecError):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(_bandwidth_path(folder, machine), document)


def _bandwidth_path(folder: Path, machine: Machine) -> Path:
    return folder / f"machine-{machine.fingerprint}.json"
