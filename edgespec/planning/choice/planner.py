"""From what is wanted and what was measured to a plan, with a reason for each choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgespec.files.disk import megabytes
from edgespec.interfaces.model import ModelFacts, NumericClass
from edgespec.planning.choice.paying import NOT_CALIBRATED, ModeRequest, weigh_sources
from edgespec.planning.choice.plan import Exactness, Mode, Plan, PlannedDrafter, PlannedModel
from edgespec.planning.cost.costs import Costs
from edgespec.planning.cost.widths import WIDEST, WidthProbe, exact_length

# Why a plan is plain in another setting than the one whose widths are bit-equal.
EXACT_SETTING_TOO_SLOW = (
    "the setting that keeps drafted text exact slows plain decoding by more than 3 %, and no drafter is expected to "
    "win that back"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the profile asks for, as far as planning goes. ``sources`` are drafter kinds in order of preference.

    ``plain_because``: a reason that was found to decode plainly, whatever could draft. ``drafter_head`` are the rows
    of the drafter's short head and of its whole one, ``drafter_bytes`` what its weights take as they are kept and in
    the file, where these differ, ``weighs_siblings``: the policy knows what they are worth.
    """

    depth: int | Literal["auto"]
    exactness: Literal["stable", "near"]
    context_length: int
    sources: tuple[str, ...]
    drafter_model: str | None = None
    drafter_runtime: str = "llama"
    drafter_device: str = "cpu"
    drafter_off: str | None = None
    drafter_head: tuple[int, int] | None = None
    drafter_bytes: tuple[int, int] | None = None
    weighs_siblings: bool = False
    plain_because: str | None = None
    mode: ModeRequest = "auto"


def make_plan(
    request: PlanRequest,
    target: ModelFacts,
    probe: WidthProbe | None,
    reasons: Sequence[str],
    costs: Costs | None = None,
) -> Plan:
    """Decide mode, depth cap, exactness and who drafts. Pure.

    With a depth of "auto" nothing is drafted before ``costs`` are known, and only by sources that can pay.
    """
    costs = costs or Costs()
    why = list(reasons)
    widths = probe.widths if probe is not None else ()
    class_cap = 0 if probe is None else probe.depth_cap
    if target.can_rewind:
        cap, level = _cap_and_level(
            request, class_cap, why, probed=probe is not None, longest=exact_length(probe, target)
        )
    else:
        cap, level = 0, "W"
        why.append("plain: the cache of this model cannot drop rejected tokens")
    sources: tuple[str, ...] = request.sources
    mode: Mode = "pipelined" if request.mode == "pipelined" else "serial"
    plain_s = costs.plain_s if costs.curves is None else costs.curves.curves[0].plain_s
    predicted = None if plain_s is None else 1.0 / plain_s
    if cap > 0 and request.depth != "auto" and sources:
        predicted = None  # what a fixed depth comes to depends on the text, and nobody weighed it
    if cap > 0 and request.depth == "auto":
        paying = weigh_sources(request.sources, costs, cap, request.mode)
        sources, mode, predicted = paying.sources, paying.mode, paying.tokens_per_s
        why += paying.reasons
    speculative = cap > 0 and bool(sources)
    if not request.sources and request.depth != 0:
        why.append("plain: there is no drafter")
    if request.drafter_off is not None:
        why.append(f"no model drafter: {request.drafter_off}")
    drafter = None
    if speculative:
        with_model = request.drafter_model is not None and "model" in sources
        if with_model:
            why += _drafting_notes(request, branches=mode == "serial" and target.can_branch)
        drafter = PlannedDrafter(
            kind="+".join(sources),
            model=request.drafter_model if with_model else None,
            runtime=request.drafter_runtime if with_model else None,
            device=request.drafter_device if with_model else None,
        )
    return Plan(
        mode=mode if speculative else "plain",
        exactness=level if speculative else "W",
        numeric_class=NumericClass(
            runtime=target.runtime,
            build=target.build,
            device=target.device,
            threads=target.threads,
            kv_type=target.kv_type,
            settings=dict(target.settings),
            widths=widths or (1,),
        ),
        target=PlannedModel(model=target.name, runtime=target.runtime, device=target.device, threads=target.threads),
        drafter=drafter,
        depth_cap=cap if speculative else 0,
        context_length=request.context_length,
        predicted_tokens_per_s=predicted,
        reasons=tuple(why),
        drafter_off=request.drafter_off,
    )


def _drafting_notes(request: PlanRequest, *, branches: bool) -> list[str]:
    """How a model drafts beyond a chain of tokens: what it leaves out, and what it puts forward besides."""
    notes = []
    if request.drafter_bytes is not None:
        kept, filed = map(megabytes, request.drafter_bytes)
        notes.append(f"the drafter's weights are kept in four bits: {kept} where its file has {filed}")
    if request.drafter_head is not None:
        rows, whole = request.drafter_head
        notes.append(
            f"the drafter reads {rows} of the {whole} rows of its output head, and all where a text needs the others"
        )
    if branches and request.weighs_siblings and request.depth == "auto":
        notes.append(
            "what the drafter might have said instead is verified beside its chain where that is worth a row; the "
            "prediction does not count it"
        )
    return notes


def _cap_and_level(
    request: PlanRequest, class_cap: int, why: list[str], *, probed: bool, longest: int | None
) -> tuple[int, Exactness]:
    """How deep, and how exact that is. ``longest``: the context to which widths were compared, where that matters."""
    if request.plain_because is not None:
        why.append(f"plain: {request.plain_because}")
        return 0, "W"
    if request.depth == 0:
        why.append("plain: depth 0 was asked for")
        return 0, "W"
    if not probed:
        if request.sources:
            unprobed = "plain: which widths are bit-equal here has not been measured"
            why.append(NOT_CALIBRATED if request.depth == "auto" else unprobed)
        return 0, "W"
    wanted = WIDEST - 1 if request.depth == "auto" else request.depth
    if request.exactness == "near" and wanted > class_cap:
        cap = min(wanted, WIDEST - 1)
        why.append(
            f"near exactness was asked for: depth up to {cap}, and only depths to {class_cap} are bit-equal to plain"
        )
        return cap, "N"
    if class_cap == 0:
        why.append("plain: no width beyond 1 is bit-equal to plain decoding with this model and build")
    elif request.depth != "auto" and wanted > class_cap:
        why.append(
            f"depth {wanted} was asked for; only depths to {class_cap} keep plain decoding's text "
            "(--exactness near allows more)"
        )
    elif request.sources:
        why.append(
            f"widths 1 to {class_cap + 1} are bit-equal to plain decoding here, so depths to {class_cap} are exact"
        )
    if class_cap > 0 and request.sources and longest is not None and longest < request.context_length:
        why.append(
            f"beyond {longest} tokens of context decoding is plain: widths were compared up to there "
            "(`edgespec calibrate` without --quick compares them to the end)"
        )
    return min(wanted, class_cap), "W"
