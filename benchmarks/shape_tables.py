"""What real_shapes measured of a shape, as a report and as rows of a page's tables. Everything here is pure."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edgespec.planning.cost.curve import Curve, DepthChoice, DraftCost, expected_tokens, round_seconds

# Shares of drafted tokens that are accepted, for which the gain is computed.
ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)

# A time that was measured as none or less.
_LEAST_S = 1e-9

NATIVE = "native"

Runs = Sequence[Mapping[str, Mapping[str, Any]]]
"""What the processes of each run printed: ours under NATIVE, llama.cpp's under how its weights were laid out."""


def emulated_gain(target: Curve, drafter: Curve, replay: Curve | None, acceptance: float) -> DepthChoice:
    """The depth with the most tokens a second, from measured times, if each drafted token is accepted with
    probability ``acceptance``; its ``speedup`` is against T(1).

    A round drafts, each token in a forward of the drafter, of which the first reads what the round before committed,
    and verifies in a forward of the target. ``replay``: seconds of applying as many committed rows to states (None:
    it has none). ``target`` is of forwards that follow one of a single row, and has applied that.
    """

    def replayed(rows: int) -> float:
        return 0.0 if replay is None else replay.seconds(rows) - replay.plain_s

    plain_s = target.plain_s
    best = DepthChoice(depth=0, tokens_per_round=1.0, tokens_per_s=1.0 / plain_s, speedup=1.0)
    for depth in range(1, target.widths[-1]):
        tokens = expected_tokens([acceptance] * depth)
        committed = math.ceil(tokens)
        cost = DraftCost(token_s=drafter.plain_s, round_s=drafter.seconds(committed) - drafter.plain_s)
        rate = tokens / (round_seconds(target, cost, depth, tokens) + replayed(committed))
        if rate > best.tokens_per_s:
            best = DepthChoice(depth=depth, tokens_per_round=tokens, tokens_per_s=rate, speedup=rate * plain_s)
    return best


def _median(runs: Runs, of: str, what: str, width: int | None = None) -> float:
    values = [run[of][what] for run in runs]
    return statistics.median(float(value if width is None else value[str(width)]) for value in values)


def _curve(runs: Runs, what: str) -> Curve | None:
    """Medians of our kernels' times by width; None if they were not measured."""
    if what not in runs[0][NATIVE]:
        return None
    widths = tuple(sorted(map(int, runs[0][NATIVE][what])))
    seconds = (max(_LEAST_S, _median(runs, NATIVE, what, width)) for width in widths)
    return Curve(widths=widths, forward_s=tuple(seconds))


def report_of(name: str, layers: tuple[int, int], prompt: int, runs: Runs) -> dict[str, Any]:
    """Medians of the runs. Forwards are llama.cpp's in its setting with the least T(1), prompts in that with the
    fastest prompt. ``layers``: of the file, and of the published model. ``prompt``: its tokens.
    """
    settings = [of for of in runs[0] if of != NATIVE and all(of in run for run in runs)]
    fastest = min(settings, key=lambda of: _median(runs, of, "forward_s", 1))
    prompts = min(settings, key=lambda of: _median(runs, of, "prompt_s"))
    own = _curve(runs, "forward_s")
    assert own is not None
    their_s = {width: _median(runs, fastest, "forward_s", width) for width in own.widths}
    prompt_s = _median(runs, NATIVE, "prompt_s"), _median(runs, prompts, "prompt_s")
    return {
        "shape": name,
        "layers": layers[0],
        "of_layers": layers[1],
        "runs": len(runs),
        "forward_ms": {width: round(1e3 * own.seconds(width), 2) for width in own.widths},
        "llama_forward_ms": {width: round(1e3 * seconds, 2) for width, seconds in their_s.items()},
        "ratios": {width: round(own.ratio(width), 3) for width in own.widths[1:]},
        "llama_ratios": {width: round(their_s[width] / their_s[1], 3) for width in own.widths[1:]},
        "t1_over_native": round(their_s[1] / own.plain_s, 3),
        "prompt_tokens_per_s": [round(prompt / seconds, 1) for seconds in prompt_s],
        "prompt_speedup": round(prompt_s[1] / prompt_s[0], 3),
        "load_s": [round(_median(runs, of, "load_s"), 1) for of in (NATIVE, fastest)],
        "llama_setting": f"{fastest}, {runs[0][fastest]['threads']} threads",
        "llama_prompt_setting": prompts,
        "predicted": runs[-1][NATIVE].get("predicted"),
        **_drafting(runs, own),
    }


def _drafting(runs: Runs, own: Curve) -> dict[str, Any]:
    """What states and drafters cost beside T(1), and what a drafter would bring."""
    found: dict[str, Any] = {}
    replay, drafter = _curve(runs, "replay_s"), _curve(runs, "drafter_s")
    if replay is not None:
        found["replay"] = {rows: round(replay.seconds(rows) / own.plain_s, 4) for rows in replay.widths}
    if drafter is not None:
        beside = _median(runs, NATIVE, "beside_drafter_s")
        found["drafter"] = runs[0][NATIVE]["drafter"]
        found["drafted"] = {width: round(drafter.seconds(width) / beside, 4) for width in drafter.widths}
        # Both sides of this ratio were timed in turn, and T(1) is also timed with other forwards.
        beside_own = drafter.scaled(own.plain_s / beside)
        gains = {acceptance: emulated_gain(own, beside_own, replay, acceptance) for acceptance in ACCEPTANCES}
        found["gains"] = {acceptance: [round(gain.speedup, 3), gain.depth] for acceptance, gain in gains.items()}
    return found


# ------------------------------------------------------------------------------------------------------- tables

TIMES = (
    "| shape | T(1), ms | T(2), T(4), T(8) / T(1) | prompt, tokens/s | load, s | llama.cpp: T(1), ms "
    "| T(2), T(4), T(8) / T(1) | prompt, tokens/s | load, s | T(1), prompt: times as fast |"
)

DRAFTING = (
    "| shape | replay of 1, 4, 8 rows, % of T(1) | drafter | drafted token, % of T(1) "
    f"| gain at an acceptance of {' | '.join(map(str, ACCEPTANCES))} (depth) |"
)


def tables_of(reports: Iterable[Mapping[str, Any]]) -> list[str]:
    """The tables in Markdown: times, and what states and drafters cost. A table without rows is left out."""
    found = list(reports)
    rows = {TIMES: [_times(own) for own in found], DRAFTING: [_costs(own) for own in found if _costs(own)]}
    return ["\n".join([header, _line_under(header), *own]) for header, own in rows.items() if own]


def _line_under(header: str) -> str:
    return "|" + "---|" * (header.count("|") - 1)


def _called(own: Mapping[str, Any]) -> str:
    part = "" if own["layers"] == own["of_layers"] else f", {own['layers']} of {own['of_layers']} layers"
    return f"{own['shape']}{part}"


def _times(own: Mapping[str, Any]) -> str:
    def side(of: str, number: int) -> str:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in own[f"{of}ratios"].values())
        first = next(iter(own[f"{of}forward_ms"].values()))
        return f"{first:.1f} | {ratios} | {own['prompt_tokens_per_s'][number]:.0f} | {own['load_s'][number]:.1f}"

    gains = f"{own['t1_over_native']:.2f}, {own['prompt_speedup']:.2f}"
    return f"| {_called(own)} | {side('', 0)} | {side('llama_', 1)} | {gains} |"


def _costs(own: Mapping[str, Any]) -> str:
    """The row, "" for a shape without states and drafter."""
    if "replay" not in own and "gains" not in own:
        return ""
    replay = ", ".join(f"{100 * share:.1f}" for share in own.get("replay", {}).values()) or "none"
    drafted = f"{own['drafter']} | {100 * next(iter(own['drafted'].values())):.1f}" if "drafted" in own else "none | "
    gains = [f"{gain:.2f} ({depth})" for gain, depth in own.get("gains", {}).values()] or [""] * len(ACCEPTANCES)
    return f"| {_called(own)} | {replay} | {drafted} | {' | '.join(gains)} |"


def with_tables(page: str, tables: Iterable[str]) -> str:
    """The page with these rows in its tables of the same columns. Rows of other shapes stay; a table that it lacks
    comes to its end.
    """
    for table in tables:
        header, line, *rows = table.splitlines()
        old = re.compile(re.escape(f"{header}\n{line}") + r"\n?((?:\|.*\n?)*)")
        place = old.search(page)
        if place is None:
            page = f"{page.rstrip()}\n\n{table}\n"
            continue
        by_shape = {_shape(row): row for row in (*place[1].splitlines(), *rows)}
        page = page[: place.start()] + "\n".join([header, line, *by_shape.values()]) + "\n" + page[place.end() :]
    return page


def _shape(row: str) -> str:
    """The name of a row's shape, without how many of its layers the file had."""
    return row.split("|")[1].split(",")[0].strip()
