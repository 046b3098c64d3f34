"""Makes a plan from a request and measurements, with a reason for each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edgespec.files.disk import megabytes
from edgespec.interfaces.drafting import COPIES, MODEL
from edgespec.interfaces.model import ModelFacts, NumericClass
from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.evaluation import contention_words, guesses
from edgespec.planning.choice.options import DrafterOption, Ranking, TargetOption
from edgespec.planning.choice.plan import DEPTH_ZERO, Exactness, Mode, Plan, PlannedDrafter, PlannedModel
from edgespec.planning.choice.ranking import MODES, Pair, rank, reasons
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.curve import FREE
from edgespec.planning.cost.widths import MOST_CONTEXT, WIDEST, WidthProbe, exact_length

ModeRequest = Literal["auto", "serial", "pipelined"]

ESTIMATED = Reason("times_estimated", "times are those of similar machines until they are measured here")
NOT_PROBED = Reason("widths_not_measured", "plain: which widths are bit-equal here has not been measured")
NO_EQUAL_WIDTH = Reason(
    "no_equal_width", "plain: no width beyond 1 is bit-equal to plain decoding with this model and build"
)
CANNOT_REWIND = Reason("cannot_rewind", "plain: guessing does not work with this kind of model yet (recurrent state)")

# Copies of the text are free to propose; their gain depends on the text.
LOOKUP = DrafterOption(source=COPIES, cost=FREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingModel:
    """A model that may draft. ``source`` names it in costs, acceptance and rounds; every model has another.

    ``head`` is the number of rows in its trimmed head and in its whole one. ``filed_bytes`` is the size of its
    weights in the file if they are kept smaller in memory. ``program`` is the other program whose store has the file.
    ``translated``, for a model with another vocabulary, is the share of a sample text's tokens that it has too.
    """

    facts: ModelFacts
    source: str = MODEL
    head: tuple[int, int] | None = None
    filed_bytes: int | None = None
    program: str | None = None
    translated: float | None = None

    @property
    def notes(self) -> list[Reason]:
        """What to report if it drafts: where its file is, its weights, its trimmed head and its forwards."""
        notes, name = [], self.facts.name
        if self.program is not None:
            why = "it has the target's vocabulary" if self.translated is None else "its tokens can be translated"
            notes.append(Reason("drafter_found", f"{name} of {self.program} drafts: {why}"))
        if self.translated is not None:
            said = f"{name} has another vocabulary, with {self.translated:.0%} of the tokens of a sample text"
            notes.append(Reason("drafter_translated", f"{said}: its tokens are translated"))
        if self.filed_bytes is not None:
            kept, filed = megabytes(self.facts.weight_bytes), megabytes(self.filed_bytes)
            said = f"the drafter's weights are kept in four bits: {kept} instead of the file's {filed}"
            notes.append(Reason("drafter_requantized", said))
        if self.head is not None:
            rows, whole = self.head
            read = f"{rows} of the {whole} rows of its output head, and all rows when a text needs them"
            notes.append(Reason("drafter_short_head", f"the drafter reads {read}"))
        if self.facts.follows:
            notes.append(Reason("drafter_layer", f"{name} drafts: it reads what the model computes for each token"))
        if self.facts.mask_id is not None:
            notes.append(Reason("drafter_one_pass", "the drafter drafts all tokens in one forward"))
        return notes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the profile asks for, as far as planning needs it.

    ``copies``: copies of the text may be proposed. ``drafters`` are the models that may draft; ``no_model`` is why a
    requested one does not. ``weighs_alternatives``: the depth policy can value alternatives. ``context_why``: why
    the context has this length, if no profile or option says so. ``calibrate``: the command that measures the models.
    """

    depth: int | Literal["auto"]
    exactness: Literal["stable", "near"]
    context_length: int
    copies: bool = False
    drafters: tuple[DraftingModel, ...] = ()
    no_model: str | None = None
    weighs_alternatives: bool = False
    mode: ModeRequest = "auto"
    context_why: Reason | None = None
    calibrate: str = "edgespec calibrate"

    def __post_init__(self) -> None:
        if len(set(self.sources)) < len(self.sources):
            raise ValueError("every drafter has another source")

    @property
    def sources(self) -> tuple[str, ...]:
        """What may propose, the cheapest first."""
        return (*((COPIES,) if self.copies else ()), *(drafter.source for drafter in self.drafters))

    @property
    def asked_depth(self) -> int | None:
        """The requested depth; None for "auto"."""
        return None if self.depth == "auto" else self.depth

    @property
    def not_calibrated(self) -> Reason:
        """Why decoding is plain before a calibration."""
        said = f"plain: this machine is not calibrated yet (`{self.calibrate} --quick` takes a minute)"
        return Reason("not_calibrated", said)


def decide(
    request: PlanRequest,
    targets: Sequence[TargetOption],
    drafters: Sequence[DrafterOption],
    memory_bytes: Mapping[str, int],
    contention: Mapping[Pair, Contention],
    agreed: Mapping[Pair, Mode] | None = None,
) -> Ranking | None:
    """Rank what may run where for a request; the plan is the first candidate. Pure.

    ``targets[0]`` is the target as loaded. ``contention`` and ``agreed`` are those of ``rank``. Returns None if a
    depth was requested and a drafter was not timed: the drafter drafts anyway, with no prediction. Raises what
    ``rank`` raises.
    """
    timed = {source for drafter in drafters for source in drafter.sources}
    if request.asked_depth and not timed.issuperset(request.sources):
        return None
    modes: Sequence[Mode] = (request.mode,) if request.mode != "auto" else MODES
    if request.asked_depth is not None and request.mode == "auto":
        modes = ("serial",)
    return rank(
        targets,
        drafters,
        memory_bytes,
        contention=contention,
        agreed=agreed,
        exactness="near" if request.exactness == "near" else "stable",
        asked=request.asked_depth or None,
        modes=() if request.asked_depth == 0 else modes,
    )


def drafter_options(request: PlanRequest, models: Sequence[DrafterOption]) -> list[DrafterOption]:
    """The drafter options: each model (with copies of the text if requested), and copies alone."""
    asked = [replace(model, copies=request.copies) for model in models if model.source in request.sources]
    return [*asked, *([LOOKUP] if request.copies else [])]


def contention_of(request: PlanRequest, costs: Costs) -> Contention | None:
    """Contention of the loaded pair; unmeasured, none is assumed if pipelined decoding was requested."""
    return costs.contention or (Contention() if request.mode == "pipelined" else None)


def depth_cap(target: ModelFacts, probe: WidthProbe | None) -> int | None:
    """The largest depth that is bit-equal to plain decoding: 0 if the target cannot rewind, None if not measured."""
    if not target.can_rewind:
        return 0
    return None if probe is None else probe.depth_cap


def make_plan(
    request: PlanRequest,
    target: ModelFacts,
    probe: WidthProbe | None,
    notes: Sequence[Reason],
    costs: Costs,
    ranking: Ranking | None,
) -> Plan:
    """The best candidate of ``ranking`` as a plan: mode, depth cap, exactness, drafters, and why. Pure.

    ``costs`` are those of the ranking. With depth "auto" nothing is drafted without a ranking; a requested depth
    needs no ranking.
    """
    why = [*notes, *([] if request.context_why is None else [request.context_why])]
    widths = probe.widths if probe is not None else ()
    class_cap = 0 if probe is None else probe.depth_cap
    if target.can_rewind:
        cap, level = _cap_and_level(
            request, class_cap, why, probed=probe is not None, longest=exact_length(probe, target)
        )
    else:
        cap, level = 0, "W"
        why.append(CANNOT_REWIND)
    sources: tuple[str, ...] = request.sources
    mode: Mode = "pipelined" if request.mode == "pipelined" else "serial"
    predicted = None if costs.plain_s is None else 1.0 / costs.plain_s
    if ranking is not None and (costs.measured or ranking.best.depth):
        predicted = ranking.best.tokens_per_s if costs.measured else None
    if cap > 0 and request.depth != "auto" and sources:
        predicted = None  # the speed of a fixed depth depends on the text
    if cap > 0 and request.depth == "auto" and sources:
        sources = () if ranking is None else ranking.best.sources
        mode = mode if ranking is None else ranking.best.mode
        why += [request.not_calibrated] if ranking is None else _decided(request, ranking, costs, cap)
    speculative = cap > 0 and bool(sources)
    if not request.sources and request.depth != 0:
        why.append(Reason("no_drafter", "plain: there is no drafter"))
    if request.no_model is not None:
        why.append(Reason("no_model_drafter", f"no model drafter: {request.no_model}"))
    drafter = None
    if speculative:
        drafting = [one for one in request.drafters if one.source in sources]
        for one in drafting:
            why += one.notes
        if drafting and mode == "serial" and target.can_branch:
            why += _alternatives(request)
        drafter = PlannedDrafter(kind="+".join(sources), facts=drafting[0].facts if drafting else None)
    return Plan(
        mode=mode if speculative else "plain",
        exactness=level if speculative else "W",
        numeric_class=NumericClass.of(target, widths or (1,)),
        target=PlannedModel(target),
        drafter=drafter,
        depth_cap=cap if speculative else 0,
        context_length=request.context_length,
        predicted_tokens_per_s=predicted,
        why=tuple(why),
        drafter_off=request.no_model,
    )


def _decided(request: PlanRequest, ranking: Ranking, costs: Costs, cap: int) -> list[Reason]:
    """Why the best candidate is the best."""
    best = ranking.best
    curve = best.target.curve
    ratios = ", ".join(f"{curve.ratio(depth + 1):.2f}x with {depth}" for depth in _telling_depths(cap))
    takes = "takes" if costs.measured else "is expected to take"
    step = f"a plain step {takes} {1000 * curve.plain_s:.1f} ms; one that verifies guesses takes longer: {ratios}"
    why = [*([] if costs.measured else [ESTIMATED]), Reason("plain_step", step)]
    models = {drafter.source for drafter in request.drafters}
    for source in request.sources:
        if source not in costs.drafts:
            lost = f"no {source} drafter: it has not been timed"
            why.append(Reason("no_model_drafter" if source in models else "not_measured", lost))
    why += reasons(ranking)
    if best.mode == "plain":
        return [*why, Reason("no_drafter_pays", "plain: no drafter can be faster here")]
    with_model = not models.isdisjoint(best.sources)
    if request.mode != "auto" and with_model:
        why.append(Reason("mode_asked", f"{request.mode}: asked for"))
    elif best.mode == "serial" and with_model:
        why.append(
            Reason(
                "contention_not_measured",
                "serial: how much target and drafter slow each other down is not known",
            )
            if costs.contention is None
            else Reason("contention", contention_words(costs.contention))
        )
    return [*why, Reason("follows_the_text", "each round guesses as far as that is expected to pay")]


def _telling_depths(cap: int) -> list[int]:
    """1, 2, 4, ... and the cap."""
    return sorted({cap, *(2**power for power in range(cap.bit_length()))})


def _alternatives(request: PlanRequest) -> list[Reason]:
    """That a drafting model's second choices are verified as well, if they are."""
    if not request.weighs_alternatives or request.depth != "auto":
        return []
    said = (
        "the drafter's second choices are verified as well if that is expected to pay; the prediction does not count "
        "them"
    )
    return [Reason("drafter_alternatives", said)]


def _cap_and_level(
    request: PlanRequest, class_cap: int, why: list[Reason], *, probed: bool, longest: int | None
) -> tuple[int, Exactness]:
    """Depth cap and exactness. ``longest`` is the longest compared context, if length matters."""
    if request.depth == 0:
        why.append(DEPTH_ZERO)
        return 0, "W"
    if not probed:
        if request.sources:
            why.append(request.not_calibrated if request.depth == "auto" else NOT_PROBED)
        return 0, "W"
    wanted = WIDEST - 1 if request.depth == "auto" else request.depth
    if request.exactness == "near" and wanted > class_cap:
        cap = min(wanted, WIDEST - 1)
        said = f"near exactness was asked for: depth up to {cap}; only depths to {class_cap} are bit-equal to plain"
        why.append(Reason("near_exactness", said))
        return cap, "N"
    if class_cap == 0:
        why.append(NO_EQUAL_WIDTH)
    elif request.depth != "auto" and wanted > class_cap:
        said = (
            f"depth {wanted} was asked for; only depths to {class_cap} keep plain decoding's text "
            "(--set exactness=near allows more)"
        )
        why.append(Reason("depth_beyond_limit", said))
    elif request.sources:
        keep = "keep" if class_cap > 1 else "keeps"
        why.append(Reason("depth_limit", f"up to {guesses(class_cap)} at a time {keep} the text identical"))
        if request.depth != "auto":
            why.append(Reason("depth_asked", f"{guesses(wanted)} at a time, as asked for"))
    if class_cap > 0 and request.sources and longest is not None and longest < request.context_length:
        said = f"beyond {longest} tokens of context decoding is plain: widths were compared up to there"
        if longest < (most := min(request.context_length, MOST_CONTEXT)):
            said += f" (`{request.calibrate}` without --quick compares them up to {most})"
        why.append(Reason("context_limit", said))
    return min(wanted, class_cap), "W"
