"""Ranks the ways to run by predicted speed: enumerate, reject what does not fit or pay, rank, explain.

The predictions are those of ``planning/cost``. Placements follow Dovetail (Zhang et al., 2024: drafter on the GPU,
target on the CPU) and DuoDecoding (Lv et al., 2025: the reverse), enumerated like any other pair of devices.
Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from edgespec.errors import MemoryLimitError
from edgespec.files.disk import counted
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.evaluation import Evaluation, memory_not_known, no_room, rate
from edgespec.planning.choice.options import Candidate, DrafterOption, Ranking, Rejected, TargetOption
from edgespec.planning.choice.plan import Mode
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.margins import DRAFT_MARGIN, TAKEOVER_CALIBRATIONS, TAKEOVER_MARGIN
from edgespec.planning.cost.widths import WIDEST

ExactnessRequest = Literal["stable", "near", "any"]

MODES: tuple[Mode, ...] = ("plain", "serial", "pipelined")


Pair = tuple[str, str]


def rank(
    targets: Sequence[TargetOption],
    drafters: Sequence[DrafterOption],
    memory_bytes: Mapping[str, int],
    *,
    contention: Mapping[Pair, Contention] | None = None,
    hand_over_s: Mapping[Pair, float] | None = None,
    agreed: Mapping[Pair, Mode] | None = None,
    exactness: ExactnessRequest = "stable",
    asked: int | None = None,
    modes: Sequence[Mode] = MODES,
    margin: float = DRAFT_MARGIN,
) -> Ranking:
    """Rank every way to run the model of ``targets[0]`` in the given settings, with or without each drafter.

    This function alone decides; a plan is its first candidate in words. Every drafter that could pay is a candidate,
    however small the expected gain: planning a drafter is free, since each round drafts only if that is expected to
    pay. Of two equal expectations the candidate with the larger possible gain comes first.

    ``memory_bytes`` is the usable size of each memory, by the name of the device that owns it. ``contention`` and
    ``hand_over_s`` (seconds a round) are keyed by (target's device, drafter's device). A pair of devices that is
    missing in ``contention`` is not run in parallel, nor are two models on one such device. A missing hand-over is
    free. ``agreed``: by the same pairs, the mode that answers found faster. Two models on one device run in parallel
    only where that is "pipelined".

    ``exactness``: "stable" allows depths that are bit-equal to plain decoding, "near" up to the widest forward,
    "any" as well but without probed widths (described machines). ``asked`` is a requested depth, ranked before plain
    decoding whatever its speed. Plain decoding always competes, whatever ``modes`` contains. The target is placed
    first; a drafter gets the remaining memory. Targets that are not eligible are compared with the first one's plain
    decoding and rejected. ``margin`` is the speed-up that a drafter has to be able to exceed.

    Raises MemoryLimitError if the target fits nowhere, ValueError if there is no target to place.
    """
    if not targets:
        raise ValueError("there is no target to place")
    names, drafter_names = _labels(targets), _labels(drafters)
    rejected: list[Rejected] = []
    placed: list[tuple[TargetOption, str]] = []
    for target, name in zip(targets, names, strict=True):
        refusal = _refused_target(target, name, memory_bytes)
        if refusal is None:
            placed.append((target, name))
        else:
            rejected.append(refusal)
    open_to_plan = [pair for pair in placed if pair[0].eligible]
    if not open_to_plan:
        raise _fits_nowhere(rejected)

    fastest, _ = min(open_to_plan, key=lambda pair: pair[0].curve.plain_s)
    candidates = [_plain(target, name, fastest) for target, name in open_to_plan]
    for target, name in open_to_plan:
        for drafter, drafter_name in zip(drafters, drafter_names, strict=True):
            evaluation = Evaluation(
                target=target,
                drafter=drafter,
                name=name,
                drafter_name=drafter_name,
                fastest=fastest,
                cap=_depth_cap(target, exactness),
                asked=asked,
                margin=margin,
            )
            refusal = evaluation.refused(memory_bytes)
            if refusal is not None:
                rejected.append(refusal)
                continue
            device = target.facts.device
            pair = (device, drafter.device or "")
            # Sharing one device needs a measured contention; two devices may be known to be independent.
            known = drafter.device != device or pair in (contention or {})
            both, hand_over = (contention or {}).get(pair), (hand_over_s or {}).get(pair, 0.0)
            shown = (agreed or {}).get(pair)
            for verdict in evaluation.verdicts(modes, both, hand_over, known=known, agreed=shown):
                if isinstance(verdict, Candidate):
                    candidates.append(verdict)
                else:
                    rejected.append(verdict)
    rejected += [_stays(target, name, fastest) for target, name in placed if not target.eligible]
    # With a requested depth, every drafter that can draft comes first.
    candidates.sort(key=lambda one: (0 if asked is None else -len(one.sources), *_order(one)))
    return Ranking(candidates=tuple(candidates), rejected=tuple(rejected))


def reasons(ranking: Ranking) -> tuple[Reason, ...]:
    """Why the best candidate is the best: its verdict and further reasons, then the rejections.

    A plain plan reports how near each drafter came; a speculative plan what did not fit, was not measured or could
    not pay. Other devices are left to ``explain``.
    """
    best = ranking.best
    said = [Reason(best.verdict.code, f"{best.what}: {best.verdict.text}"), *best.why[1:]]
    nearest: dict[tuple[str, str], Rejected] = {}
    for refusal in ranking.rejected:
        drafter = refusal.drafter
        if drafter is None:
            said += [] if refusal.verdict.code == "target_stays" else [_sentence(refusal)]
        elif best.mode == "plain":
            key = (drafter.source, drafter.short_name)
            kept = nearest.get(key)
            if kept is None or (refusal.possible_speedup or 0.0) > (kept.possible_speedup or 0.0):
                nearest[key] = refusal
        elif refusal.target == best.target and (refusal.needed_bytes is not None or _of_the_best(refusal, ranking)):
            said.append(_sentence(refusal))
    return tuple(dict.fromkeys([*said, *map(_sentence, nearest.values())]))


def explain(ranking: Ranking) -> tuple[str, ...]:
    """Every candidate, the best first, and every rejection: one verdict each."""
    lines = [f"{candidate.what}: {candidate.verdict.text}" for candidate in ranking.candidates]
    return (*lines, *(f"not {refusal.sentence}" for refusal in ranking.rejected))


def _of_the_best(refusal: Rejected, ranking: Ranking) -> bool:
    """Whether the rejection concerns another mode of the plan's drafter, or a drafter that is off in this plan."""
    if refusal.verdict.code == "cannot_pay":
        return not any(candidate.drafter == refusal.drafter for candidate in ranking.candidates)
    return refusal.drafter == ranking.best.drafter and refusal.verdict.code in ("in_turns", "contention_not_measured")


def _sentence(refusal: Rejected) -> Reason:
    return Reason(refusal.verdict.code, refusal.sentence)


# ---------------------------------------------------------------------------------------------- plain decoding


def _refused_target(target: TargetOption, name: str, memory_bytes: Mapping[str, int]) -> Rejected | None:
    for memory, needed in target.footprint.taken().items():
        available = memory_bytes.get(memory)
        if available is None:
            return Rejected(what=name, verdict=memory_not_known(memory), target=target)
        if needed > available:
            return Rejected(
                what=name,
                verdict=no_room(memory, needed, available),
                target=target,
                needed_bytes=needed,
                available_bytes=available,
            )
    return None


def _fits_nowhere(rejected: Sequence[Rejected]) -> MemoryLimitError:
    """The error for a target that fits nowhere; it names the option that comes nearest."""
    nearest = min(rejected, key=lambda one: (one.needed_bytes or float("inf")) - (one.available_bytes or 0))
    assert nearest.target is not None  # the rejection is of an option
    facts = nearest.target.facts
    return MemoryLimitError(
        f"{facts.name} fits nowhere: on {facts.device} it {nearest.verdict.text}"
        if nearest.needed_bytes is not None
        else f"{facts.name} fits nowhere: {nearest.verdict.text}",
        needed_bytes=nearest.needed_bytes,
        available_bytes=nearest.available_bytes,
        hint="close other programs, use a smaller context (--context), or a smaller model",
    )


def _plain(target: TargetOption, name: str, fastest: TargetOption) -> Candidate:
    seconds = target.curve.plain_s
    speedup = fastest.curve.plain_s / seconds
    said = "the fastest plain decoding" if target is fastest else f"{speedup:.2f}x the fastest plain decoding"
    return Candidate(
        what=f"{name}, plain",
        target=target,
        drafter=None,
        mode="plain",
        depth=0,
        exactness="W",
        tokens_per_round=1.0,
        round_s=seconds,
        tokens_per_s=1 / seconds,
        speedup=speedup,
        possible_speedup=speedup,
        possible_depth=0,
        drafted_tokens_per_s=1 / seconds,
        memory_bytes=target.footprint.taken(),
        memory_bound_speedup=None,
        why=(Reason("plain_speed", f"{rate(1 / seconds)} tokens/s, {said}"),),
    )


def _stays(target: TargetOption, name: str, fastest: TargetOption) -> Rejected:
    """The rejection of a configuration that was measured but that the target is not moved to."""
    speedup = fastest.curve.plain_s / target.curve.plain_s
    said = (
        f"plain decoding is {speedup:.2f}x as fast there; the target moves after {TAKEOVER_CALIBRATIONS} "
        f"calibrations in a row measure {100 * (TAKEOVER_MARGIN - 1):.0f} % more speed, guesses included"
    )
    return Rejected(what=name, verdict=Reason("target_stays", said), target=target, speedup=speedup)


def _depth_cap(target: TargetOption, exactness: ExactnessRequest) -> int | None:
    """The deepest draft allowed; None if it depends on a missing measurement."""
    if exactness == "any":
        return WIDEST - 1
    if target.depth_cap_stable is None:
        return None
    return WIDEST - 1 if exactness == "near" else min(target.depth_cap_stable, WIDEST - 1)


# ------------------------------------------------------------------------------------------- order and names


def _order(candidate: Candidate) -> tuple[float, int, float, int, int, int, str]:
    """Faster first; then the larger possible gain, then the simpler, then the smaller."""
    models = 1 + (candidate.drafter is not None and candidate.drafter.facts is not None)
    return (
        -_digits(candidate.tokens_per_s),
        -len(candidate.sources),
        -_digits(candidate.drafted_tokens_per_s),
        MODES.index(candidate.mode),
        models,
        sum(candidate.memory_bytes.values()),
        candidate.what,
    )


def _digits(tokens_per_s: float) -> float:
    """Rounded, since sums in another order differ in the last digits."""
    return float(f"{tokens_per_s:.9g}")


def _labels(options: Sequence[TargetOption | DrafterOption]) -> list[str]:
    """A short unique name for each option: model and device, and what else differs."""
    return [_label(one, [o.facts for o in options if o.facts and o.short_name == one.short_name]) for one in options]


def _label(option: TargetOption | DrafterOption, similar: Sequence[ModelFacts]) -> str:
    facts = option.facts
    parts = [] if facts is None else _differing(facts, similar, settings=isinstance(option, TargetOption))
    return f"{option.short_name} ({', '.join(parts)})" if parts else option.short_name


def _differing(facts: ModelFacts, similar: Sequence[ModelFacts], *, settings: bool) -> list[str]:
    parts = []
    if len({other.runtime for other in similar}) > 1:
        parts.append(facts.runtime)
        similar = [other for other in similar if other.runtime == facts.runtime]
    if len({other.threads for other in similar}) > 1:
        parts.append(counted(facts.threads, "thread"))
    if settings:
        own, *others = ({**each.settings, "kv_type": each.kv_type} for each in (facts, *similar))
        for key in sorted({key for one in others for key in one}):
            if any(one.get(key) != own.get(key) for one in others):
                parts.append(f"{key} {_setting(own.get(key))}")
    return parts


def _setting(value: str | int | bool | None) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "by default" if value is None else str(value)
