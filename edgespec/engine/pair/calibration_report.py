"""The result of a calibration, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.calibration.kinds import CONTENTION
from edgespec.calibration.timing import ModelTimes
from edgespec.engine.pair.loaded_pair import LoadedPair
from edgespec.hardware.bandwidth import BandwidthMeasurement, kernel_bandwidth, utilisation
from edgespec.interfaces.model import Mixture, ModelFacts
from edgespec.placement.prepared import other_settings, setting_words
from edgespec.planning.cost.curve import ExpertTimes
from edgespec.planning.cost.widths import width_classes

# The forward of a one-pass drafter that the report shows: four drafted tokens and the four of the last round.
_SHOWN_WIDTH = 8

# The rows for which the report shows how many experts they read.
_EXPERT_WIDTHS = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """The ``calibrate`` object of docs/json.md, with ``lines`` for people."""

    machine: dict[str, Any]
    curves: tuple[dict[str, Any], ...]
    width_classes: tuple[dict[str, Any], ...]
    read_bytes_per_s: float | None
    extra: dict[str, Any]
    lines: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "curves": list(self.curves),
            "read_bytes_per_s": self.read_bytes_per_s,
            "width_classes": list(self.width_classes),
            **self.extra,
        }


def calibration_report(pair: LoadedPair, bandwidth: BandwidthMeasurement | None) -> CalibrationReport:
    """What the store holds of the pair's target, drafter and machine."""
    known = pair.measurements
    target, drafter = known.target, known.drafter
    times, drafter_times, probe = known.target_times(), known.drafter_times(), known.widths()
    read_bytes_per_s = None if bandwidth is None else bandwidth.read_bytes_per_s
    lines: list[str] = []
    extra: dict[str, Any] = {"drafting": None, "contention": None, "plain": []}
    curves: list[dict[str, Any]] = []
    if times is not None:
        curves += _curves(target, times)
        plain_tokens_per_s = 1.0 / times.forward_s[0][0]
        used = kernel_bandwidth(target.bytes_per_forward, plain_tokens_per_s)
        extra["kernel_bytes_per_s"] = used
        line = f"reading      {target.name} reads {used / 1e9:.1f} GB/s at {plain_tokens_per_s:.1f} tokens/s"
        # Above 1 the memory was measured beside other programs, or the kernel at another time.
        if read_bytes_per_s is not None and (share := utilisation(used, read_bytes_per_s)) <= 1:
            line += f", {100 * share:.0f} % of the {read_bytes_per_s / 1e9:.1f} GB/s that the memory delivers"
        lines.append(line)
        if target.mixture is not None and times.curves.experts is not None:
            lines.append(_expert_words(times.curves.experts, target.mixture))
        extra["plain"] = _plain_settings(pair, times, lines)
    if drafter is not None and drafter_times is not None:
        curves += _curves(drafter, drafter_times)
        one_pass = drafter.mask_id is not None
        extra["drafting"] = {
            "model": drafter.name,
            "token_s": None if one_pass else drafter_times.draft_cost.token_s,
            "prompt_token_s": drafter_times.prompt_token_s,
            "one_pass": one_pass,
        }
        costs = f"{1000 * drafter_times.draft_cost.token_s:.1f} ms a token with {drafter.name}"
        if one_pass:
            width = min(_SHOWN_WIDTH, drafter_times.widths[-1])
            forward_s = drafter_times.curves.curves[0].seconds(width)
            costs = f"{1000 * forward_s:.1f} ms for {width} tokens in one forward of {drafter.name}"
        lines.append(f"drafting     {costs}, {1000 * drafter_times.prompt_token_s:.1f} ms for each prompt token")
        both = known.store.load(CONTENTION, target, drafter)
        if both is not None:
            extra["contention"] = {"target_factor": both.target_factor, "drafter_factor": both.drafter_factor}
            lines.append(
                f"in parallel  the target takes {both.target_factor:.2f} and the drafter {both.drafter_factor:.2f} "
                "times as long"
            )
    if probe is not None:
        low, high = probe.context_range
        widths = ", ".join(map(str, probe.widths))
        where = "by construction, and a self-check confirmed it"
        if not target.bit_equal_by_construction or len(probe.widths) == 1:
            where = f"at contexts of {low} to {high} tokens"
        lines.append(f"exactness    widths {widths} are bit-equal {where}")
    return CalibrationReport(
        machine=pair.machine.as_json(),
        curves=tuple(curves),
        width_classes=tuple(width_classes(target.name, target.runtime, _settings(target), probe)),
        read_bytes_per_s=read_bytes_per_s,
        extra=extra,
        lines=tuple(lines),
    )


def _curves(facts: ModelFacts, times: ModelTimes) -> list[dict[str, Any]]:
    experts = {"experts": list(times.experts), "expert_s": times.expert_s} if times.experts else {}
    return [
        {
            "model": facts.name,
            "runtime": facts.runtime,
            "device": facts.device,
            "threads": facts.threads,
            "context": context,
            "width": list(times.widths),
            "forward_s": list(seconds),
            **experts,
        }
        for context, seconds in zip(times.contexts, times.forward_s, strict=True)
    ]


def _expert_words(experts: ExpertTimes, mixture: Mixture) -> str:
    read = ", ".join(f"{experts.read_by(width):.0f} with {width}" for width in _EXPERT_WIDTHS)
    each_us = 1e6 * experts.expert_s
    return f"experts      one row reads {mixture.used} of {mixture.count}, {read} rows, {each_us:.0f} us each"


def _plain_settings(pair: LoadedPair, times: ModelTimes, lines: list[str]) -> list[dict[str, Any]]:
    """Plain decoding in every timed setting, the plan's setting first."""
    own = pair.target
    rows = [(own.facts, times.forward_s[0][0])]
    for caches in other_settings(own):
        facts = own.facts_with(**caches)
        seconds = pair.measurements.store.plain_s(facts)
        if seconds is not None:
            rows.append((facts, seconds))
    lines += [f"plain        {1.0 / seconds:6.1f} tokens/s with {setting_words(facts)}" for facts, seconds in rows]
    return [{"threads": facts.threads, "settings": _settings(facts), "forward_s": seconds} for facts, seconds in rows]


def _settings(facts: ModelFacts) -> dict[str, Any]:
    return {**facts.settings, "kv_type": facts.kv_type}
