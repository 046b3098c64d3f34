"""From what is wanted and what was measured to a plan, with a reason for each choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edgespec.decoding.contracts import ModelFacts, NumericClass
from edgespec.planning.measurements import Measurements
from edgespec.planning.plan import Exactness, Plan, PlannedDrafter, PlannedModel
from edgespec.planning.widths import WIDEST, WidthProbe, probe_widths
from edgespec.runtimes.llama import LlamaModel, LlamaSettings

# A class that costs plain decoding more than this has to be repaid by a predicted gain (DESIGN.md), and nothing
# predicts one before the machine is calibrated.
SLOWER_ALLOWED = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the profile asks for, as far as planning goes. ``sources`` are drafter kinds in order of preference."""

    depth: int | Literal["auto"]
    exactness: Literal["stable", "near"]
    context_length: int
    sources: tuple[str, ...]
    drafter_model: str | None = None
    drafter_device: str = "cpu"
    drafter_off: str | None = None


def stable_settings(preferred: LlamaSettings) -> tuple[LlamaSettings, ...]:
    """Settings worth probing for stable widths, the preferred (fastest) first.

    Measured on x86: repacked weights keep widths 1 to 3, weights as in the file 1 to 7 at 5 to 25 % of plain speed.
    """
    return (preferred, replace(preferred, repack=False)) if preferred.repack else (preferred,)


def find_stable_model(
    open_model: Callable[[LlamaSettings], LlamaModel],
    preferred: LlamaSettings,
    measurements: Measurements,
    *,
    measure: bool,
    complete: bool,
    context_length: int,
    progress: Callable[[float], None] | None = None,
    slower_allowed: float = SLOWER_ALLOWED,
) -> tuple[LlamaModel, WidthProbe | None]:
    """The model in the first setting that has a stable width beyond 1, and its probe.

    Stored probes are used silently; new ones are made only if ``measure``. If no setting is stable the preferred
    one is returned, and so it is if the stable setting makes a plain forward more than ``slower_allowed`` times
    slower: it decodes plainly. ``complete`` also bounds the differences of unstable widths.
    """
    fallback: WidthProbe | None = None
    for settings in stable_settings(preferred):
        model = open_model(settings)
        try:
            if not model.facts.can_rewind:
                return model, None
            probe = measurements.load_widths(model.facts)
            if probe is not None and not probe.covers(context_length):
                probe = None  # made for a shorter context: says nothing about the rest of this one
            if (probe is None or (complete and not probe.complete)) and measure:
                probe = probe_widths(model, context_length=context_length, complete=complete, progress=progress)
                measurements.save_widths(model.facts, probe)
        except BaseException:
            model.close()
            raise
        if probe is None and fallback is None:
            return model, None
        if probe is not None and (probe.depth_cap > 0 or complete) and _affordable(probe, fallback, slower_allowed):
            return model, probe
        fallback = fallback or probe
        model.close()
    return open_model(preferred), fallback


def _affordable(probe: WidthProbe, preferred: WidthProbe | None, slower_allowed: float) -> bool:
    """Whether plain decoding in this setting is about as fast as in the preferred one (None: this is it)."""
    if preferred is None or preferred.plain_forward_s is None or probe.plain_forward_s is None:
        return True
    return probe.plain_forward_s <= slower_allowed * preferred.plain_forward_s


def make_plan(wish: Wish, target: ModelFacts, probe: WidthProbe | None, reasons: Sequence[str]) -> Plan:
    """Decide mode, depth cap and exactness. Pure."""
    why = list(reasons)
    widths = probe.widths if probe is not None else ()
    class_cap = 0 if probe is None else probe.depth_cap
    if target.can_rewind:
        cap, level = _cap_and_level(wish, class_cap, why, probed=probe is not None)
    else:
        cap, level = 0, "W"
        why.append("plain: the cache of this model cannot drop rejected tokens")
    speculative = cap > 0 and bool(wish.sources)
    if not wish.sources and wish.depth != 0:
        why.append("plain: there is no drafter")
    if wish.drafter_off is not None:
        why.append(f"no model drafter: {wish.drafter_off}")
    if speculative and wish.depth == "auto":
        why.append(
            f"depth up to {cap}, each drafter kept only while it measures faster than plain: this machine is not "
            "calibrated yet"
        )
    drafter = None
    if speculative:
        with_model = wish.drafter_model is not None
        drafter = PlannedDrafter(
            kind="+".join(wish.sources),
            model=wish.drafter_model,
            runtime=target.runtime if with_model else None,
            device=wish.drafter_device if with_model else None,
        )
    return Plan(
        mode="serial" if speculative else "plain",
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
        context_length=wish.context_length,
        predicted_tokens_per_s=None,
        reasons=tuple(why),
        drafter_off=wish.drafter_off,
    )


def _cap_and_level(wish: Wish, class_cap: int, why: list[str], *, probed: bool) -> tuple[int, Exactness]:
    """How deep, and how exact that is."""
    if wish.depth == 0:
        why.append("plain: depth 0 was asked for")
        return 0, "W"
    if not probed:
        if wish.sources:
            why.append("plain: which widths are bit-equal here has not been measured")
        return 0, "W"
    wanted = WIDEST - 1 if wish.depth == "auto" else wish.depth
    if wish.exactness == "near" and wanted > class_cap:
        cap = min(wanted, WIDEST - 1)
        why.append(
            f"near exactness was asked for: depth up to {cap}, and only depths to {class_cap} are bit-equal to plain"
        )
        return cap, "N"
    if class_cap == 0:
        why.append("plain: no width beyond 1 is bit-equal to plain decoding with this model and build")
    elif wish.depth != "auto" and wanted > class_cap:
        why.append(
            f"depth {wanted} was asked for; only depths to {class_cap} keep plain decoding's text "
            "(--exactness near allows more)"
        )
    elif wish.sources:
        why.append(
            f"widths 1 to {class_cap + 1} are bit-equal to plain decoding here, so depths to {class_cap} are exact"
        )
    return min(wanted, class_cap), "W"
