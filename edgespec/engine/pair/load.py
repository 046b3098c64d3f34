"""From a profile to a loaded pair: finds and loads the parts of an Engine, in the order in which they can fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from edgespec.calibration.kinds import TIMES, WIDTHS
from edgespec.calibration.measurement_store import Measurements
from edgespec.calibration.self_check import SelfCheck
from edgespec.calibration.timing import QUICK, measure_target, sample_text
from edgespec.calibration.width_probe import probe_widths
from edgespec.engine.pair.drafter_choice import choose_drafter, find_drafter_of, prepared_drafter
from edgespec.engine.pair.loaded_pair import LoadedPair
from edgespec.engine.pair.target_setting import place_target
from edgespec.errors import InvalidRequestError
from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import Job, Loading, LoadProgress, follow
from edgespec.hardware.machine import Machine, describe_machine, process_bytes
from edgespec.hardware.neighbours import Neighbours
from edgespec.interfaces.model import Model
from edgespec.placement.context_length import choose_context, least_context, unchanged_context
from edgespec.placement.memory import MemoryLedger
from edgespec.placement.model_pool import ModelPool
from edgespec.placement.prepared import Preparation, PreparedModel, choose_threads, other_settings
from edgespec.planning.choice.planner import PlanRequest
from edgespec.planning.cost.margins import SLOWER_ALLOWED
from edgespec.planning.cost.widths import WidthProbe
from edgespec.profiles.layers import KEYS, unknown_key
from edgespec.profiles.profile import Profile, load_profile
from edgespec.runtimes.process.settings import WorkerSettings
from edgespec.runtimes.runtime import LoadedModel, Settings
from edgespec.runtimes.table import runtime_of
from edgespec.store.locate import Locator
from edgespec.text.tokenizers.choice import choose_tokenizer
from edgespec.text.tokenizers.tokenizer import Tokenizer

WAITING = Loading("waiting for another calibration to finish")

M = TypeVar("M", bound=Model)
S = TypeVar("S")  # a runtime's settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that the engine may use of the machine; None: the profile decides.

    ``ledger``: what several engines of one program share.
    """

    max_memory_bytes: int | None = None
    max_threads: int | None = None
    ledger: MemoryLedger | None = None

    def __post_init__(self) -> None:
        for name in ("max_memory_bytes", "max_threads"):
            if (value := getattr(self, name)) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise InvalidRequestError(f"{name} must be a whole number of at least 1, not {value!r:.40}")
            object.__setattr__(self, name, int(value))


def load_pair(
    profile: Profile,
    own_home: Home,
    locator: Locator,
    limits: Limits,
    tell: LoadProgress,
    *,
    calibrate: bool,
    worker: WorkerSettings | None = None,
) -> LoadedPair:
    """Find and load what the profile asks for. Raises EdgespecError and its subclasses only."""
    machine = describe_machine()
    together = _together_bytes(profile, machine, limits.ledger)
    allowed = together if limits.max_memory_bytes is None else min(together, limits.max_memory_bytes)
    file = _find_target(profile, locator)
    # Chosen before a drafter is fetched for it.
    open_tokenizer = cache(choose_tokenizer(file.tokenizer_path, file.header))
    store = Measurements(own_home.measurements, machine.fingerprint, machine.power_source, own_home.create)
    threads = choose_threads(profile, machine, limits.max_threads)
    asked = None if profile.context == "auto" else profile.context
    context = least_context(asked, file.context_length)
    target = place_target(Preparation(profile, threads, context.tokens), file, store, allowed)
    found = find_drafter_of(target, locator, store, tell)
    if asked is None:
        drafting = prepared_drafter(target, found)
        models = [target.model, *([] if drafting is None else [drafting])]
        unchanged = unchanged_context(file.header)
        context = choose_context(file.context_length, models, target.places, allowed, unchanged)
        target = target.for_context(context.tokens)
    chosen = choose_drafter(target, found, store, context.why)
    request, whole = chosen.request, _whole(chosen.model, locator)
    if limits.ledger is not None:
        models = [target.model, *([] if chosen.model is None else [chosen.model])]
        limits.ledger.require(file.name, [each.memory for each in models], together)
    measure = _measure(request, store, own_home, tell, open_tokenizer, calibrate=calibrate)
    pool = ModelPool(
        chosen.prepare,
        target.model,
        chosen.model,
        whole,
        chosen.places,
        target.left_bytes,
        worker or WorkerSettings(),
        limits.ledger,
    )
    try:
        model, widths = _open_target(target.model, request, store, measure, tell, locator.job)
    except BaseException:
        pool.close()  # else its place in the ledger stays taken
        raise
    try:
        pool.lend(model)
        if request.depth != 0:
            pool.load_prepared()  # in parallel with the tokenizer
        check = None
        if widths is None and request.depth != 0 and request.sources and model.facts.bit_equal_by_construction:
            check = SelfCheck(model)  # as long as the tokenizer, which uses one processor
        tokenizer = open_tokenizer()
        if check is not None:
            widths = check.result()
            store.save(WIDTHS, widths, model.facts)
        return LoadedPair(
            profile=chosen.prepare.profile,
            machine=machine,
            home=own_home,
            target=model,
            kept=file.kept,
            tokenizer=tokenizer,
            pool=pool,
            request=request,
            probe=widths,
            store=store,
            notices=target.notices,
            most_threads=threads,
            considered=chosen.considered,
        )
    except BaseException:
        pool.close()
        model.close()
        raise


def _together_bytes(profile: Profile, machine: Machine, ledger: MemoryLedger | None) -> int:
    """What all engines of this program may take together, by the memory that is available now."""
    taken = 0 if ledger is None else min(ledger.taken_bytes, process_bytes())  # so mapped weights count once
    most = int((machine.available_memory_bytes + taken) * profile.max_memory_fraction)
    return most if ledger is None else min(most, ledger.allowed_bytes)


def _find_target(profile: Profile, locator: Locator) -> LocatedModel:
    target = locator.locate_to_run(profile.target)
    if target.drafts_only:
        raise InvalidRequestError(
            f"{target.name} has a trimmed output head, so it can only draft",
            hint="give it with `--draft`, and an untrimmed model as the target",
        )
    if target.header.reads_target:
        raise InvalidRequestError(
            f"{target.name} reads the cache of the model that it drafts for, so it can only draft",
            hint="give it with `--draft`, and that model as the target",
        )
    if target.kept is not None and target.kept.note is not None:
        locator.job.tell("located", target.name, note=target.kept.note)
    return target


def _whole(drafter: PreparedModel | None, locator: Locator) -> LocatedModel | None:
    """The file that a drafter with a trimmed head was made from, if the store has it."""
    return None if drafter is None or not drafter.file.drafts_only else locator.find_source(drafter.file)


def _open_target(
    target: PreparedModel,
    request: PlanRequest,
    store: Measurements,
    measure: Callable[[LoadedModel], WidthProbe] | None,
    tell: LoadProgress,
    job: Job,
) -> tuple[LoadedModel, WidthProbe | None]:
    runtime = runtime_of(target.settings)

    def load(wanted: Settings) -> LoadedModel:
        tell(Loading(f"loading {target.file.name}"))
        return runtime.load(target.file, wanted, job=job)

    # The target's setting must not depend on whether a drafter is used.
    return find_stable_model(
        load,
        runtime.stable_settings(target.settings),
        store,
        measure=measure if request.depth != 0 and request.sources else None,
        complete=request.exactness == "near",
        context_length=request.context_length,
    )


def _measure(
    request: PlanRequest,
    store: Measurements,
    own_home: Home,
    tell: LoadProgress,
    open_tokenizer: Callable[[], Tokenizer],
    *,
    calibrate: bool,
) -> Callable[[LoadedModel], WidthProbe] | None:
    """How to measure which widths are bit-equal, if that must be known before the first answer; else None.

    The measurement waits while another process calibrates: two running together would distort each other's times.
    """
    complete = request.exactness == "near"
    if not calibrate and not complete and request.depth == "auto":
        return None

    def measure(model: LoadedModel) -> WidthProbe:
        if not calibrate or request.depth != "auto":
            label = "checking which widths are bit-equal on this machine (once)"
            return probe_widths(
                model,
                context_length=request.context_length,
                complete=complete,
                progress=lambda done: tell(Loading(label, done)),
            )
        # One pass over the contexts measures widths and times, and both are needed.
        scope = replace(QUICK, complete=complete)
        text = [] if model.facts.mixture is None else open_tokenizer().encode(sample_text(), add_bos=True)
        steps = measure_target(model, request.context_length, scope, text=text)
        neighbours = Neighbours()
        with store.exclusive(own_home.locks, wait=True, waiting=lambda: tell(WAITING)):
            times, probe = follow(steps, f"measuring {model.facts.name}", tell, neighbours)
            store.save(TIMES, replace(times, busy=neighbours.share if neighbours.busy else 0.0), model.facts)
        return probe

    return measure


def find_stable_model(
    open_model: Callable[[S], M],
    candidates: Sequence[S],
    measurements: Measurements,
    *,
    measure: Callable[[M], WidthProbe] | None,
    complete: bool,
    context_length: int,
    slower_allowed: float = SLOWER_ALLOWED,
) -> tuple[M, WidthProbe | None]:
    """The model in the first of the ``candidates`` that has a stable width beyond 1, and its probe.

    Stored probes are used; ``measure``, if given, makes missing ones. Settings whose rows are bit-equal by
    construction need no probe: the first one is returned. The first setting is also returned if no setting is stable,
    or if the stable one makes a plain forward more than ``slower_allowed`` times slower: before calibration nothing
    predicts that drafting regains that. ``complete`` asks for probes that also bound the differences of unstable
    widths.
    """
    fallback: WidthProbe | None = None
    for settings in candidates:
        model = open_model(settings)
        try:
            if not model.facts.can_rewind:
                return model, None
            probe = measurements.load(WIDTHS, model.facts)
            if model.facts.bit_equal_by_construction:
                return model, probe
            if probe is not None and not probe.covers(context_length):
                probe = None  # made for a shorter context than this one
            if (probe is None or (complete and not probe.complete)) and measure is not None:
                probe = measure(model)
                measurements.save(WIDTHS, probe, model.facts)
        except BaseException:
            model.close()
            raise
        if probe is None and fallback is None:
            return model, None
        if probe is not None and (probe.depth_cap > 0 or complete) and _affordable(probe, fallback, slower_allowed):
            return model, probe
        fallback = fallback or probe
        model.close()
    return open_model(candidates[0]), fallback


def _affordable(probe: WidthProbe, preferred: WidthProbe | None, slower_allowed: float) -> bool:
    """Whether plain decoding is about as fast here as in the ``preferred`` setting (None: this is that setting)."""
    if preferred is None or preferred.plain_forward_s is None or probe.plain_forward_s is None:
        return True
    return probe.plain_forward_s <= slower_allowed * preferred.plain_forward_s


def resolve_profile(
    profile: Profile | str | os.PathLike[str] | None,
    overrides: Mapping[str, Any],
    own_home: Home,
    parameters: Iterable[str],
) -> Profile:
    """The profile with the overrides applied. Environment variables and project files are not read.

    An unknown name may be meant as one of the ``parameters`` that the caller has besides.
    """
    for name in overrides:
        if name not in KEYS:
            raise unknown_key(name, "the arguments", [*KEYS, *parameters])
    given = {name: _as_in_a_file(value) for name, value in overrides.items() if value is not None}
    if isinstance(profile, Profile):
        if given:
            raise InvalidRequestError(
                f"{next(iter(given))} was given together with a resolved profile", hint="set it in the profile"
            )
        return profile
    named = _as_in_a_file(profile)
    if named is not None and not isinstance(named, str):
        raise InvalidRequestError(f"profile must be a name or a path, not {type(profile).__name__}", param="profile")
    # Not Path.cwd(): a service's working folder may be gone, and only a profile named by a relative path needs it.
    return load_profile(named, environ={}, cwd=Path(), user_dir=own_home.root, flags=given, only_the_named=True)


def _as_in_a_file(value: object) -> object:
    """A path as text, and numbers of other packages, such as numpy, as Python's own."""
    if isinstance(value, os.PathLike):
        path = Path(os.fsdecode(value))
        # A Path has no "./", without which a name is one of the catalogue's, the hub's or a profile's.
        return str(path) if path.is_absolute() or path.parts[:1] == ("~",) else f".{os.sep}{path}"
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def fastest_plain(target: LoadedModel, store: Measurements) -> tuple[Mapping[str, Any], float] | None:
    """The setting in which plain decoding is fastest, and how many times as fast as in the target's own: to compare.

    None if the target's own setting is the fastest, or if no other one was timed.
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
