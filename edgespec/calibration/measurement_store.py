"""Measurements kept between runs: versioned, filed under what they depend on, discarded when that changes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from edgespec.calibration.timing import ModelTimes
from edgespec.errors import EdgespecError, StoreLockedError
from edgespec.files.atomic import write_json
from edgespec.files.locks import locked
from edgespec.files.progress import Job
from edgespec.hardware.bandwidth import BandwidthMeasurement
from edgespec.hardware.machine import Machine
from edgespec.interfaces.model import ModelFacts
from edgespec.planning.choice.settled import Place, Settled
from edgespec.planning.cost.acceptance import AcceptancePrior
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.margins import TAKEOVER_CALIBRATIONS
from edgespec.planning.cost.widths import WidthProbe, widths_from_json, widths_to_json
from edgespec.planning.depth.experience import History

SCHEMA_VERSION = 3
BANDWIDTH_SCHEMA_VERSION = 1

# A measurement is a few kilobytes, at most some tens with every thread count of a large server; a larger file is not
# a measurement of ours.
_LARGEST_FILE_BYTES = 2**20

# Larger numbers of threads and layers are invalid.
_MOST_COUNTED = 4096

T = TypeVar("T")


class _UnusableError(Exception):
    """A file exists but does not apply to this machine and model."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """The folder of this machine's measurements. It need not exist.

    ``notes`` collects a sentence for every file that could not be used. Width classes do not depend on the power
    source; times do. ``create`` makes a folder before the first write.
    """

    folder: Path
    machine_fingerprint: str
    power_source: str | None = None
    create: Callable[[Path], object] = field(default=partial(Path.mkdir, parents=True, exist_ok=True), compare=False)
    notes: list[str] = field(default_factory=list, compare=False)
    _unwritten: dict[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)
    _refusals: dict[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)
    # By kind, keys that other builds may have stored: read once.
    _keys: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def on_power(self, power_source: str) -> Measurements:
        """The same folder, for a machine on another power source."""
        other = replace(self, power_source=power_source, notes=[])
        other._unwritten.update(self._unwritten)
        other._refusals.update(self._refusals)
        return other

    # ---------------------------------------------------------------------------- what one model takes

    def load_widths(self, facts: ModelFacts) -> WidthProbe | None:
        """The width probe of this model, build and setting on this machine, or None if there is no valid one.

        For rows that are bit-equal by construction: a self-check of file, build and level, valid on any machine.
        """
        probe = self._load("widths", self._widths_key(facts), widths_from_json)
        if probe is None and facts.bit_equal_by_construction:  # the key used before self-checks existed
            probe = self._load("widths", self._model_key(facts), widths_from_json)
        return probe

    def save_widths(self, facts: ModelFacts, probe: WidthProbe) -> None:
        self._save("widths", self._widths_key(facts), widths_to_json(probe))

    def load_times(self, facts: ModelFacts) -> ModelTimes | None:
        """Times of this model's forwards in this setting, on this power source; None if not measured."""
        return self._load_timing("times", self._times_key(facts), ModelTimes.from_json, facts)

    def save_times(self, facts: ModelFacts, times: ModelTimes, *, busy: float = 0.0) -> None:
        """``busy``: the share of the processors that other programs used during the measurement, if too large.

        Times of a busy machine never replace those of a quieter one.
        """
        if busy <= self.busy_share(facts) or self.load_times(facts) is None:
            stored = {**times.as_json(), **({"busy": busy} if busy else {})}
            self._save("times", self._times_key(facts), stored)

    def busy_share(self, facts: ModelFacts) -> float:
        """``busy`` of the stored times; 0 if measured on a quiet machine, or not at all."""
        return self._load_timing("times", self._times_key(facts), _share_from_json, facts) or 0.0

    def forget_times(self, facts: ModelFacts) -> None:
        """Delete an old curve that newer times of this setting contradict."""
        self._forget("times", facts)

    def _forget(self, kind: str, facts: ModelFacts) -> None:
        key = self._times_key(facts)
        path = self._path(kind, key)
        self._unwritten.pop(path.name, None)
        for each in (path, *(self._path(kind, other) for other in self._of_other_builds(kind, key, facts))):
            with suppress(OSError):
                each.unlink(missing_ok=True)

    def plain_s(self, facts: ModelFacts) -> float | None:
        """T(1) in this setting, from its curve or from a measurement of plain decoding alone."""
        times = self.load_times(facts)
        return self.load_plain_s(facts) if times is None else times.curves.curves[0].plain_s

    def load_plain_s(self, facts: ModelFacts) -> float | None:
        """T(1) of this model in this setting, if only that was measured."""
        return self._load_timing("plain", self._times_key(facts), _seconds_from_json, facts)

    def forget_plain_s(self, facts: ModelFacts) -> None:
        """Delete T(1) of a setting that could not be measured again."""
        self._forget("plain", facts)

    def save_plain_s(self, facts: ModelFacts, seconds: float) -> None:
        self._save("plain", self._times_key(facts), {"forward_s": seconds})

    # -------------------------------------------------------------------------------- what a pair does

    def load_contention(self, target: ModelFacts, drafter: ModelFacts) -> Contention | None:
        key = self._pair_key(target, drafter)
        return self._load_timing("contention", key, _contention_from_json, target, drafter)

    def save_contention(self, target: ModelFacts, drafter: ModelFacts, contention: Contention) -> None:
        stored = {"target_factor": contention.target_factor, "drafter_factor": contention.drafter_factor}
        self._save("contention", self._pair_key(target, drafter), stored)

    def load_acceptance(self, target: ModelFacts, source: str) -> AcceptancePrior | None:
        """What earlier conversations taught about ``source`` (a drafter's identity) drafting for this target.

        Depends on the texts, not on the machine: only the models enter the key.
        """
        return self._load("acceptance", _acceptance_key(target, source), AcceptancePrior.from_json)

    def save_acceptance(self, target: ModelFacts, source: str, prior: AcceptancePrior) -> None:
        self._save("acceptance", _acceptance_key(target, source), prior.as_json())

    def load_history(self, target: ModelFacts, source: str) -> History | None:
        """How long this target's answers were, and whether drafting with ``source`` paid in them."""
        return self._load("history", _acceptance_key(target, source), History.from_json)

    def save_history(self, target: ModelFacts, source: str, history: History) -> None:
        self._save("history", _acceptance_key(target, source), history.as_json())

    # ------------------------------------------------------------------------------- what is settled

    def load_place(self, model: ModelFacts) -> Settled[Place]:
        """The placement of a target on which calibrations have agreed for this machine, for any drafter."""
        return self._load("settled", self._settled_key(model, "place"), _place_from_json) or Settled()

    def save_place(self, model: ModelFacts, settled: Settled[Place]) -> None:
        self._save("settled", self._settled_key(model, "place"), asdict(settled))

    def load_threads(self, model: ModelFacts, runtime: str) -> Settled[int]:
        """The fastest number of threads for a target in a runtime, on which calibrations have agreed."""
        return self._load("settled", self._settled_key(model, f"threads of {runtime}"), _count_from_json) or Settled()

    def settle_threads(self, most: ModelFacts, fastest: int) -> int:
        """A target's number of threads from now on, after a calibration that found ``fastest``.

        ``fastest`` itself if threads change no bits, else what calibrations agree on. ``most`` are the target's facts
        with all threads.
        """
        settled = self.load_threads(most, most.runtime)
        found = fastest if fastest != (settled.chosen or most.threads) else None
        settled = settled.after(found, 1 if most.bit_equal_by_construction else TAKEOVER_CALIBRATIONS)
        self._save("settled", self._settled_key(most, f"threads of {most.runtime}"), asdict(settled))
        return settled.chosen or most.threads

    def _settled_key(self, model: ModelFacts, question: str) -> dict[str, Any]:
        file = {"model_sha256": model.sha256, "model_name": model.name}
        return {"machine": self.machine_fingerprint, **file, "question": question}

    # ------------------------------------------------------------------------------------------- files

    @contextmanager
    def exclusive(
        self, lock_folder: Path, *, wait: bool, waiting: Callable[[], object] = lambda: None
    ) -> Iterator[bool]:
        """Hold the lock under which everything is timed; False if another process holds it and ``wait`` is False.

        Two calibrations in parallel would disturb each other. ``waiting`` is called before a wait.
        """
        with ExitStack() as held:
            try:
                self.create(lock_folder)
                told = Job(progress=lambda _event: waiting())
                path, timeout_s = lock_folder / "calibration.lock", math.inf if wait else 0.0
                held.enter_context(locked(path, "calibrating", told, timeout_s=timeout_s))
                alone = True
            except StoreLockedError:
                alone = False
            except (OSError, EdgespecError, NotImplementedError):
                alone = True  # without a folder for locks no other process holds one either
            yield alone

    def _load_timing(
        self, kind: str, key: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], T], *models: ModelFacts
    ) -> T | None:
        """This build's times, else the latest of another build that computes the same.

        Our kernels take about as long in each build, and decoding corrects the difference; measuring again takes a
        minute.
        """
        found = self._load(kind, key, parse)
        for other in () if found is not None else self._of_other_builds(kind, key, *models):
            found = self._load(kind, other, parse)
            if found is not None:
                break
        return found

    def _of_other_builds(self, kind: str, key: Mapping[str, Any], *models: ModelFacts) -> list[Mapping[str, Any]]:
        """Stored keys that differ only in the builds of our kernels, the latest first."""
        ours = {facts.runtime for facts in models if facts.bit_equal_by_construction}
        if not ours:
            return []
        if kind not in self._keys:
            self._keys[kind] = self._stored_keys(kind)
        wanted = _of_any_build(key, ours)
        return [other for other in self._keys[kind] if other != key and _of_any_build(other, ours) == wanted]

    def _stored_keys(self, kind: str) -> list[Mapping[str, Any]]:
        """The keys of every readable measurement of a kind, the latest first."""
        found: list[tuple[int, Mapping[str, Any]]] = []
        with suppress(OSError):
            for path in self.folder.glob(f"{kind}-*.json"):
                with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, _UnusableError):
                    stored = json.loads(self._read(path))
                    if stored["schema_version"] == SCHEMA_VERSION and isinstance(stored["key"], dict):
                        found.append((path.stat().st_mtime_ns, stored["key"]))
        return [key for _, key in sorted(found, key=lambda pair: pair[0], reverse=True)]

    def _load(self, kind: str, key: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], T]) -> T | None:
        path = self._path(kind, key)
        try:
            stored = json.loads(self._read(path))
            if stored["schema_version"] != SCHEMA_VERSION:
                raise _UnusableError("another version of edgespec wrote it")
            if stored["key"] != key:
                raise _UnusableError("it was measured on another machine or model")
            return parse(stored[kind])
        except FileNotFoundError:
            return None
        except _UnusableError as error:
            why = str(error)
        except OSError as error:
            why = f"it cannot be read ({error.strerror or error})"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            why = "it is damaged"
        note = f"the measurement {path.name} is ignored and made again: {why}"
        if note not in self.notes:
            self.notes.append(note)
        return None

    def _read(self, path: Path) -> str:
        unwritten = self._unwritten.get(path.name)
        if unwritten is not None:
            return unwritten
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise _UnusableError("it is too large to be one of ours")
        return path.read_text(encoding="utf-8")

    def _save(self, kind: str, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Store a measurement; if the folder is not writable, the next process measures again."""
        path = self._path(kind, key)
        document = {"schema_version": SCHEMA_VERSION, "key": dict(key), kind: dict(value)}
        try:
            self.create(self.folder)
            write_json(path, document)
        except (OSError, EdgespecError) as error:
            self._unwritten[path.name] = json.dumps(document)
            self._refusals[path.name] = error.message if isinstance(error, EdgespecError) else _said(error, path)
        else:
            self._unwritten.pop(path.name, None)

    @property
    def unstored(self) -> str | None:
        """Why a measurement is only kept in this process; None if all are stored."""
        return next((self._refusals[name] for name in self._unwritten), None)

    def _model_key(self, facts: ModelFacts) -> dict[str, Any]:
        return {
            "machine": self.machine_fingerprint,
            **_identity(facts),
            "runtime": facts.runtime,
            "build": facts.build,
            "device": facts.device,
            "threads": facts.threads,
            "kv_type": facts.kv_type,
            "settings": dict(facts.settings),
        }

    def _widths_key(self, facts: ModelFacts) -> dict[str, Any]:
        if not facts.bit_equal_by_construction:
            return self._model_key(facts)
        return {
            **_identity(facts),
            "runtime": facts.runtime,
            "build": facts.build,
            "kv_type": facts.kv_type,
            "settings": dict(facts.settings),
        }

    def _times_key(self, facts: ModelFacts) -> dict[str, Any]:
        return {**self._model_key(facts), "power_source": self.power_source}

    def _pair_key(self, target: ModelFacts, drafter: ModelFacts) -> dict[str, Any]:
        return {"target": self._times_key(target), "drafter": self._times_key(drafter)}

    def _path(self, kind: str, key: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        return self.folder / f"{kind}-{digest}.json"


def _said(error: OSError, path: Path) -> str:
    return f"{error.filename or path}: {error.strerror or error}"


def _of_any_build(key: Mapping[str, Any], runtimes: Collection[str]) -> dict[str, Any]:
    """The key of a model, or of a pair, without the builds of ``runtimes``."""
    if key.get("runtime") in runtimes:
        return {name: value for name, value in key.items() if name != "build"}
    return {name: _of_any_build(v, runtimes) if isinstance(v, Mapping) else v for name, v in key.items()}


def _identity(facts: ModelFacts) -> dict[str, Any]:
    return {"model_sha256": facts.sha256, "model_bytes": facts.weight_bytes, "model_name": facts.name}


def _acceptance_key(target: ModelFacts, source: str) -> dict[str, Any]:
    return {"target": _identity(target), "source": source}


def _seconds_from_json(stored: Mapping[str, Any]) -> float:
    seconds = float(stored["forward_s"])
    if not 0 < seconds < float("inf"):
        raise ValueError("the seconds of a forward are positive and finite")
    return seconds


def _share_from_json(stored: Mapping[str, Any]) -> float:
    share = float(stored.get("busy", 0.0))
    if not 0 <= share <= 1:
        raise ValueError("a share is between 0 and 1")
    return share


def _place_from_json(stored: Mapping[str, Any]) -> Settled[Place]:
    return _settled_from_json(stored, _one_place)


def _count_from_json(stored: Mapping[str, Any]) -> Settled[int]:
    return _settled_from_json(stored, _one_count)


def _settled_from_json(stored: Mapping[str, Any], read: Callable[[Any], T]) -> Settled[T]:
    chosen, ahead = (None if stored[name] is None else read(stored[name]) for name in ("chosen", "ahead"))
    count = _one_count(stored["count"]) if stored["count"] else 0
    return Settled(chosen=chosen, ahead=ahead, count=count, announced=bool(stored["announced"]))


def _one_place(stored: Any) -> Place:
    runtime, device, layers = stored
    return str(runtime), str(device), None if layers is None else _one_count(layers)


def _one_count(stored: Any) -> int:
    if not isinstance(stored, int) or not 1 <= stored <= _MOST_COUNTED:
        raise ValueError(f"a count is an integer from 1 to {_MOST_COUNTED}")
    return stored


def _contention_from_json(stored: Mapping[str, Any]) -> Contention:
    contention = Contention(
        target_factor=float(stored["target_factor"]), drafter_factor=float(stored["drafter_factor"])
    )
    if not all(1 <= factor < float("inf") for factor in (contention.target_factor, contention.drafter_factor)):
        raise ValueError("contention factors are finite and at least 1")
    return contention


# ------------------------------------------------------------------------ what the machine itself gives


def load_bandwidth(folder: Path, machine: Machine) -> BandwidthMeasurement | None:
    """The bandwidth measured on this machine with its current power source; None if there is no valid one."""
    try:
        path = _bandwidth_path(folder, machine)
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            return None
        stored = json.loads(path.read_text(encoding="utf-8"))
        wanted = (BANDWIDTH_SCHEMA_VERSION, machine.fingerprint, machine.power_source)
        if (stored["schema_version"], stored["machine"], stored["power_source"]) != wanted:
            return None
        return BandwidthMeasurement.from_json(stored["bandwidth"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # missing or damaged: measured again


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
