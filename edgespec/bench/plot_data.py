"""The data of figures, read from the objects that ``bench --json`` and ``calibrate --json`` print.

A reader returns None if the report has nothing to draw, and raises AttributeError, KeyError, TypeError, ValueError or
IndexError for an object without a report's shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.bench import enough
from edgespec.files.disk import counted

Report = Mapping[str, Any]

# A report on a user's suite may have any number of categories; a page has room for this many.
MAX_ROWS = 30
MAX_LABEL_CHARACTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A speed-up; ``ci95`` is None if no interval was measured."""

    value: float
    ci95: tuple[float, float] | None
    identical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedups:
    """``arms``: name -> category ("" for all categories) -> dot. ``hidden``: number of categories without room.

    ``speeds``: name -> tokens a second, where they are known.
    """

    arms: dict[str, dict[str, Dot]]
    categories: tuple[str, ...]
    hidden: int
    aa_ci95: tuple[float, float] | None
    speeds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """``lines``: label -> ((width, T(w) / T(1)), ...). ``common``: the settings that all lines share."""

    lines: dict[str, tuple[tuple[float, float], ...]]
    common: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeLine:
    """T(w) of one model: ``points`` are (width, seconds). ``ratio`` is its T(1) divided by the first line's.

    ``arm``: the arm that decodes with the model, or None.
    """

    points: tuple[tuple[float, float], ...]
    ratio: float | None
    arm: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtimes:
    """``lines``: name -> line, the first being the baseline. ``common``: the settings that all lines share."""

    lines: dict[str, RuntimeLine]
    common: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes per second: read by each arm, and the memory's measured maximum."""

    arms: dict[str, float]
    measured: float


def read_speedups(report: Report) -> Speedups | None:
    different = {
        (pair["arm"], pair["category"])
        for pair in report.get("pairs") or ()
        if pair.get("identical_to_plain") is False
    }
    arms: dict[str, dict[str, Dot]] = {}
    for name, arm in (report.get("arms") or {}).items():
        speedup = arm.get("speedup")
        fraction = arm.get("identical_fraction")
        # Another numeric class does not promise plain decoding's text: a difference is not worth a warning.
        free = arm.get("same_class") is False
        whole = _dot(speedup, free or fraction is None or fraction >= 1)
        if whole is None or (whole.value == 1 and whole.ci95 in (None, (1, 1))):  # the baseline itself
            continue
        arms[name] = {"": whole}
        for category, value in (speedup.get("by_category") or {}).items():
            dot = _dot(value, free or (name, category) not in different)
            if dot is not None:
                arms[name][str(category)] = dot
    if not arms:
        return None
    categories = list(dict.fromkeys(category for dots in arms.values() for category in dots if category))
    aa = (report.get("noise") or {}).get("aa_ci95")
    return Speedups(
        arms=arms,
        categories=tuple(categories[:MAX_ROWS]),
        hidden=max(0, len(categories) - MAX_ROWS),
        aa_ci95=None if aa is None else (_positive(aa[0]), _positive(aa[1])),
        speeds={
            name: _positive(report["arms"][name]["decode_tokens_per_s_geomean"])
            for name in arms
            if report["arms"][name].get("decode_tokens_per_s_geomean") is not None
        },
    )


def _dot(value: Any, identical: bool) -> Dot | None:
    """A dot from {"geomean", "ci95"} or a single number; None if nothing was measured."""
    speedup = value if isinstance(value, Mapping) else {"geomean": value}
    if speedup.get("geomean") is None:
        return None
    known = "passes" not in speedup or enough(speedup["prompts"], speedup["passes"])
    ends = speedup.get("ci95") if known else None
    return Dot(
        value=_positive(speedup["geomean"]),
        ci95=None if ends is None else (_positive(ends[0]), _positive(ends[1])),
        identical=identical,
    )


def read_curves(calibration: Report) -> Curves | None:
    found: list[tuple[dict[str, str], tuple[tuple[float, float], ...]]] = []
    for curve in calibration.get("curves") or ():
        times = dict(_points(curve))
        if 1 in times and len(times) > 1:  # without T(1) there is no ratio
            found.append((_described(curve), tuple((width, s / times[1]) for width, s in times.items())))
    if not found:
        return None
    shared = _shared([facts for facts, _ in found], "model")
    lines: dict[str, tuple[tuple[float, float], ...]] = {}
    for facts, ratios in found:
        label = ", ".join(text for key, text in facts.items() if key not in shared)
        while label in lines:  # measured twice: show both
            label += " (again)"
        lines[label] = ratios
    return Curves(lines=lines, common=", ".join(shared.values()))


def read_runtimes(report: Report) -> Runtimes | None:
    """The curves that ``bench --compare`` measured alternately; None for fewer than two."""
    found = report.get("runtimes") or ()
    if len(found) < 2:
        return None
    lines: dict[str, RuntimeLine] = {}
    for each in found:
        points, ratio = _points(each), each.get("t1_ratio")
        if points:
            lines[short(each["name"])] = RuntimeLine(
                points=points,
                ratio=None if ratio is None else _positive(ratio),
                arm=None if each.get("arm") is None else str(each["arm"]),
            )
    shared = _shared([_described(each) for each in found], "model", "runtime")
    return Runtimes(lines=lines, common=", ".join(shared.values())) if lines else None


def _points(curve: Report) -> tuple[tuple[float, float], ...]:
    """The measured widths with their seconds, in order."""
    timed = zip(curve["width"], curve["forward_s"], strict=True)
    return tuple(sorted({_positive(width): _positive(s) for width, s in timed if s is not None}.items()))


def _shared(facts: Sequence[Mapping[str, str]], *own: str) -> dict[str, str]:
    """What all of them share, except the keys of their ``own``."""
    first = facts[0].items()
    return {key: text for key, text in first if key not in own and all(each.get(key) == text for each in facts)}


def _described(curve: Report) -> dict[str, str]:
    facts = {key: short(curve[key]) for key in ("model", "runtime", "device") if curve.get(key) is not None}
    if curve.get("threads") is not None:
        facts["threads"] = counted(curve["threads"], "thread")
    if curve.get("context") is not None:
        facts["context"] = f"{curve['context']} tokens of context"
    return facts


def read_traffic(report: Report, calibration: Report | None) -> Traffic | None:
    measured = (calibration or {}).get("read_bytes_per_s") or (report.get("machine") or {}).get("read_bytes_per_s")
    arms = {
        name: _positive(arm["bytes_per_token"]) * _positive(arm["decode_tokens_per_s_geomean"])
        for name, arm in (report.get("arms") or {}).items()
        if arm.get("bytes_per_token") is not None and arm.get("decode_tokens_per_s_geomean") is not None
    }
    return Traffic(arms=arms, measured=_positive(measured)) if arms and measured else None


def read_headline(report: Report) -> str:
    """Two lines: the models, their threads and the day; the machine and the prompts."""
    lines = (_models(report), _place(report))
    return "\n".join("  ·  ".join(part for part in line if part) for line in lines if any(line))


def _models(report: Report) -> list[str]:
    plan = report.get("plan") or {}
    target, drafter = plan.get("target") or {}, plan.get("drafter") or {}
    threads = target.get("threads")
    return [
        short(target["model"]) if target.get("model") else "",
        f"drafter {short(drafter['model'])}" if drafter.get("model") else "",
        counted(threads, "thread") if threads else "",
        short(report["date"]) if report.get("date") else "",
    ]


def _place(report: Report) -> list[str]:
    suite, machine = report.get("suite") or {}, report.get("machine") or {}
    prompts = len({pair["id"] for pair in report.get("pairs") or ()})
    return [
        short(machine["processor"], 60) if machine.get("processor") else "",
        f"suite {short(suite['name'])}" if suite.get("name") else "",
        counted(prompts, "prompt") if prompts else "",
    ]


def _positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"not a measurement: {value}")
    return number


def short(value: object, limit: int = MAX_LABEL_CHARACTERS) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
