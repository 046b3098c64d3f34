"""The kinds of measurements: what each is, how it is read from its file, and what it depends on.

Times depend on the power source and width classes do not. What texts taught depends on the models alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar

from edgespec.calibration.timing import ModelTimes
from edgespec.files.checked import Check, From, Range, read, to_json
from edgespec.interfaces.model import ModelFacts
from edgespec.planning.choice.settled import Answered, Settled
from edgespec.planning.cost.acceptance import AcceptancePrior
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.widths import POSITIONS as PROBED, WidthProbe, probe_starts
from edgespec.planning.depth.experience import History

T = TypeVar("T")
P = ParamSpec("P")
Key: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """The machine's fingerprint, and its power source."""

    machine: str
    power_source: str | None


@dataclass(frozen=True, slots=True)
class Kind(Generic[T, P]):
    """A kind of measurement: ``name`` in its file, and what it depends on.

    ``hint`` is the annotation that ``files.checked`` reads it by, ``stored`` makes its JSON, ``key`` the key that
    it is stored under. With ``any_build``, other builds of our kernels take as long. A value that ``keeps`` prefers
    to a new one stays.
    """

    name: str
    hint: Any
    key: Callable[Concatenate[Setting, P], Key]
    stored: Callable[[T], Key] = to_json
    any_build: bool = False
    keeps: Callable[[T, T], bool] | None = None


# ------------------------------------------------------------------------------------------------------- keys


def _identity(facts: ModelFacts) -> Key:
    return {"model_sha256": facts.sha256, "model_bytes": facts.weight_bytes, "model_name": facts.name}


def _model_key(at: Setting, facts: ModelFacts) -> Key:
    return {
        "machine": at.machine,
        **_identity(facts),
        "runtime": facts.runtime,
        "build": facts.build,
        "device": facts.device,
        "threads": facts.threads,
        "kv_type": facts.kv_type,
        "settings": dict(facts.settings),
    }


def _width_key(at: Setting, facts: ModelFacts) -> Key:
    # A self-check of file, build and level is valid on any machine.
    ignored = ("machine", "device", "threads") if facts.bit_equal_by_construction else ()
    return {name: value for name, value in _model_key(at, facts).items() if name not in ignored}


def _timing_key(at: Setting, facts: ModelFacts) -> Key:
    return {**_model_key(at, facts), "power_source": at.power_source}


def _pair_key(at: Setting, target: ModelFacts, drafter: ModelFacts | None) -> Key:
    return {"target": _timing_key(at, target), "drafter": None if drafter is None else _timing_key(at, drafter)}


def _text_key(_at: Setting, target: ModelFacts, source: str) -> Key:
    return {"target": _identity(target), "source": source}


def _settled_key(at: Setting, model: ModelFacts, question: str) -> Key:
    file = {"model_sha256": model.sha256, "model_name": model.name}
    return {"machine": at.machine, **file, "question": question}


def _place_key(at: Setting, model: ModelFacts) -> Key:
    return _settled_key(at, model, "place")


def _thread_key(at: Setting, model: ModelFacts, runtime: str) -> Key:
    return _settled_key(at, model, f"threads of {runtime}")


# ------------------------------------------------------------------------------------------------------ kinds


def _with_curves(times: ModelTimes) -> ModelTimes:
    times.curves  # noqa: B018  (raises ValueError for numbers that no measurement gives)
    return times


def _without_defaults(value: ModelTimes | Contention) -> Key:
    """The fields, without those that most measurements do not have: disturbance by other programs, experts."""
    stored: dict[str, Any] = to_json(value)
    return {name: own for name, own in stored.items() if own or name not in ("busy", "experts", "expert_s")}


def _quieter(before: ModelTimes | Contention, now: ModelTimes | Contention) -> bool:
    return now.busy > before.busy


def _quieter_and_as_far(before: ModelTimes, now: ModelTimes) -> bool:
    """The same, unless only ``now`` was measured at contexts that a session of its length needs."""
    return _quieter(before, now) and before.contexts[-1] >= probe_starts(now.contexts[-1] + PROBED)[-1]


def _farther(before: WidthProbe, now: WidthProbe) -> bool:
    """Whether ``now`` compared less than the earlier probe and contradicts none of its widths."""
    (reached, complete), (reaches, completes) = ((each.context_range[1], each.complete) for each in (before, now))
    more, less = reached > reaches or complete > completes, reached < reaches or complete < completes
    return more and not less and set(before.widths) <= set(now.widths)


# The tokens behind each rate that was stored without their number. The oldest files hold rates of the last thirty.
_TOKENS_OF_OLD = 30.0


def _prior(stored: dict[str, Any]) -> AcceptancePrior:
    prior = read(AcceptancePrior, stored, ignore_unknown=True)
    if "position_tokens" in stored:
        return prior
    positions, bins = (
        tuple(0.0 if rate is None else _TOKENS_OF_OLD for rate in rates)
        for rates in (prior.by_position, prior.by_confidence)
    )
    return replace(prior, position_tokens=positions, confidence_tokens=bins)


@dataclass(frozen=True, slots=True)
class _Plain:
    forward_s: Annotated[float, Range(0, above=True)]


@dataclass(frozen=True, slots=True)
class _Both:
    target_factor: Annotated[float, Range(1)]
    drafter_factor: Annotated[float, Range(1)]
    busy: Annotated[float, Range(0, 1)] = 0.0

    @property
    def contention(self) -> Contention:
        return Contention(target_factor=self.target_factor, drafter_factor=self.drafter_factor, busy=self.busy)


# Larger numbers of threads and layers are invalid.
_Count: TypeAlias = Annotated[int, Range(1, 4096)]

# The widths that are bit-equal to plain decoding, of a model in a setting. A quick probe does not replace a full one.
WIDTHS: Kind[WidthProbe, [ModelFacts]] = Kind(
    "widths",
    Annotated[WidthProbe, Check(lambda probe: probe.is_sound, "the widths of one class")],
    _width_key,
    keeps=_farther,
)

# Times of a model's forwards in a setting. Those of a busy machine replace those of a quieter one only if these are
# of too short contexts, and decide nothing where quiet times or estimates are known.
TIMES: Kind[ModelTimes, [ModelFacts]] = Kind(
    "times",
    Annotated[ModelTimes, From(ModelTimes, _with_curves)],
    _timing_key,
    _without_defaults,
    any_build=True,
    keeps=_quieter_and_as_far,
)

# T(1) of a model in a setting, in seconds, if only that was measured: on a quiet machine, as it is compared only.
PLAIN: Kind[float, [ModelFacts]] = Kind(
    "plain",
    Annotated[float, From(_Plain, lambda plain: plain.forward_s)],
    _timing_key,
    lambda seconds: {"forward_s": seconds},
    any_build=True,
)

CONTENTION: Kind[Contention, [ModelFacts, ModelFacts]] = Kind(
    "contention",
    Annotated[Contention, From(_Both, lambda both: both.contention)],
    _pair_key,
    _without_defaults,
    any_build=True,
    keeps=_quieter,
)

# What earlier conversations taught about a source (a drafter's identity) that drafts for a target.
ACCEPTANCE: Kind[AcceptancePrior, [ModelFacts, str]] = Kind(
    "acceptance", Annotated[AcceptancePrior, From(dict[str, Any], _prior)], _text_key
)

# How long a target's answers were, and whether drafting with a source paid in them.
HISTORY: Kind[History, [ModelFacts, str]] = Kind("history", History, _text_key)

# The placement of a target on which calibrations have agreed for this machine, for any drafter.
PLACE: Kind[Settled[tuple[str, str, int | None]], [ModelFacts]] = Kind(
    "settled", Settled[tuple[str, str, _Count | None]], _place_key
)

# The fastest number of threads for a target in a runtime, on which calibrations have agreed.
THREADS: Kind[Settled[int], [ModelFacts, str]] = Kind("settled", Settled[_Count], _thread_key)

# What answers since the last calibration agreed on about a target and its drafter.
ANSWERED: Kind[Answered, [ModelFacts, ModelFacts | None]] = Kind("answered", Answered, _pair_key, any_build=True)
