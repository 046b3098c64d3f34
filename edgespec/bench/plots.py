"""Figures from reports: speed-ups by category, the cost of width, and the memory bandwidth used.

Input are the objects that ``bench --json`` and ``calibrate --json`` print, so an old report can be drawn again; only
measured values are drawn. Shapes distinguish lines and dots as well as colours do, for colour-blind readers and for
print. Matplotlib is an optional dependency, imported only when a figure is made; its global settings and pyplot's
state are not changed.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from edgespec.bench.plot_data import (
    Curves,
    Report,
    Runtimes,
    Speedups,
    Traffic,
    read_curves,
    read_headline,
    read_runtimes,
    read_speedups,
    read_traffic,
    short,
)
from edgespec.errors import InvalidRequestError, RuntimeUnavailableError, reason_of
from edgespec.files.installation import install_command

SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's palette (2008), safe for colour-blind readers, without its yellow, which is too light on white, and
# its vermilion, which is too close to the red below.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
RED, INK, GREY, PALE = "#C1121F", "#222222", "#767676", "#E6E6E6"

STYLE: dict[str, Any] = {
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # names may contain dollar signs
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": PALE,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.dpi": 160,
    "svg.fonttype": "none",  # text stays text that can be searched, read aloud and translated
    "svg.hashsalt": "edgespec",  # without dates: the same report gives the same file
}

# Letters of a line's name next to the line, where a quarter of a narrow panel is reserved; the legend has the full
# name.
_LETTERS = 16

# Smallest distance between two names next to lines, as a share of the panel's height: one line of small type.
_LINE_HEIGHT = 0.065

T = TypeVar("T")


def plot_report(report: Report, calibration: Report | None, path: Path) -> None:
    """Draw one figure with those of the three panels that have data.

    - A dot with its interval for each arm and category, on a logarithmic scale with a line at 1. Hollow and red if an
      arm's tokens differ from plain decoding's. The band at 1 is the A/A arm's interval.
    - T(w) / T(1) against the width w: a line for each measured model, runtime, device, threads and context, between
      two guides: y = 1, where verification is free, and y = w, where it gains nothing. If models were timed side by
      side, their curves replace the calibration's.
    - Each arm's memory traffic (``bytes_per_token`` x tokens per second) as a share of the measured bandwidth:
      ``read_bytes_per_s`` of the calibration or else of the report's machine.

    Raises InvalidRequestError for a report without such data, a suffix outside ``SUFFIXES`` and a path that cannot be
    written, and RuntimeUnavailableError without matplotlib.
    """
    panels = [
        _read(read_speedups, report),
        _read(read_runtimes, report) or _read(read_curves, calibration or {}),
        _read(read_traffic, report, calibration),
    ]
    _draw(panels, path, _read(read_headline, report))


# ------------------------------------------------------------------------------------------------- drawing


_Data = Speedups | Curves | Runtimes | Traffic


def require_suffix(path: Path) -> None:
    """Raise InvalidRequestError if a figure cannot be written under this name."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidRequestError(
            f"a plot cannot be written as {path.name}", hint=f"Use one of the suffixes {', '.join(SUFFIXES)}."
        )


def require_matplotlib() -> None:
    """Raise RuntimeUnavailableError without matplotlib, before a long measurement starts."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"plots need matplotlib, which cannot be imported: {error}", hint=install_command("plot")
        ) from error


def _read(reader: Callable[..., T], *reports: Report | None) -> T:
    """Read a report that may be any file: a wrong shape raises an error with one sentence, not a traceback."""
    try:
        return reader(*reports)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidRequestError(
            "this is not a report of edgespec, so it cannot be drawn",
            hint="give the object printed by `edgespec bench --json` or `edgespec calibrate --json`",
        ) from error


def _draw(panels: Iterable[_Data | None], path: Path, title: str) -> None:
    """Lay out and draw the panels that have data; the file appears once it is complete."""
    require_suffix(path)
    present = [panel for panel in panels if panel is not None]
    if not present:
        raise InvalidRequestError("the report holds no measurements to draw")
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    content = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that the font lacks
        matplotlib.rcdefaults()  # the user's own style must not change the figure
        matplotlib.rcParams.update(STYLE)
        heights = [_inches(panel) for panel in present]
        side_by_side = len(present) > 1 and isinstance(present[0], Speedups)
        height = max(heights[0], sum(heights[1:])) if side_by_side else sum(heights)
        figure: Any = Figure(
            figsize=(11.5 if side_by_side else 6.6, height + (0.35 + 0.17 * title.count("\n") if title else 0)),
            layout="constrained",
        )
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.03)
        if side_by_side:
            left, right = figure.subfigures(1, 2, width_ratios=(1.15, 1))
            axes = [left.subplots(), *_column(right, heights[1:])]
        else:
            axes = _column(figure, heights)
        for panel, own in zip(present, axes, strict=True):
            match panel:
                case Speedups():
                    _draw_speedups(panel, own)
                case Curves():
                    _draw_curves(panel, own)
                case Runtimes():
                    draw_runtimes(panel, own, list(present[0].arms) if isinstance(present[0], Speedups) else ())
                case Traffic():
                    _draw_traffic(panel, own)
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=9, color=GREY)
        kind = path.suffix.lower().removeprefix(".")
        dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
        figure.savefig(content, format=kind, metadata=dates[kind])
    try:
        path.write_bytes(content.getvalue())
    except OSError as error:
        raise InvalidRequestError(f"the plot {path} cannot be written: {reason_of(error)}") from error


def _inches(panel: _Data) -> float:
    """The height of a panel in inches, with title, axis and legend."""
    match panel:
        case Speedups():
            row = max(0.3, 0.13 * (len(panel.arms) + 1))
            return 1.6 + (1 + len(panel.categories)) * row + 0.1 * len(panel.arms)
        case Curves() | Runtimes():
            return 3.5 + 0.2 * len(panel.lines)
        case Traffic():
            return 1.2 + 0.34 * len(panel.arms)


def _column(figure: Any, heights: Sequence[float]) -> list[Any]:
    return list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])


def _draw_speedups(data: Speedups, axes: Any) -> None:
    rows = ("", *data.categories)
    step = min(0.2, 0.72 / len(data.arms))
    ends = [1.0]
    if data.aa_ci95 is not None:
        axes.axvspan(*data.aa_ci95, color=PALE, linewidth=0, label="plain against itself")
        ends += data.aa_ci95
    for number, (name, dots) in enumerate(data.arms.items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        label = f"{short(name)}: {dots[''].value:.2f}×"
        if name in data.speeds:
            label += f", {data.speeds[name]:.1f} tokens/s"
        axes.plot([], [], color=colour, marker=marker, markersize=6, linewidth=1.6, label=label)
        for row, category in enumerate(rows):
            dot = dots.get(category)
            if dot is None:
                continue
            y = row + (number - (len(data.arms) - 1) / 2) * step
            low, high = dot.ci95 or (dot.value, dot.value)
            ends += (low, high, dot.value)
            paint = colour if dot.identical else RED
            axes.plot([low, high], [y, y], color=paint, linewidth=1.6, solid_capstyle="butt")
            face = paint if dot.identical else "white"
            axes.plot(dot.value, y, marker, color=paint, markerfacecolor=face, markeredgewidth=1.4, markersize=6)
    if any(not dot.identical for dots in data.arms.values() for dot in dots.values()):
        axes.plot(
            [], [], "o", color=RED, markerfacecolor="white", markeredgewidth=1.4, label="not identical to plain"
        )
    axes.axvline(1, color=INK, linewidth=1, zorder=1)
    axes.hlines([row + 0.5 for row in range(1, len(data.categories))], 0, 1, colors=PALE, linewidth=0.6,
                transform=axes.get_yaxis_transform())  # fmt: skip
    axes.axhline(0.5, color=GREY, linewidth=0.6)
    low, high = min(ends) / 1.06, max(ends) * 1.06
    ticks = [tick for tick in _ratio_ticks(low, high) if low <= tick <= high]
    axes.set(xscale="log", xlim=(low, high))
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.grid(axis="x")
    axes.set_yticks(range(len(rows)), ["all prompts", *(short(category, 20) for category in data.categories)])
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    more = f"\n{data.hidden} more categories are not shown" if data.hidden else ""
    axes.set(
        ylim=(len(rows) - 0.5, -0.5),
        xlabel=f"decoding speed over plain decoding's, with 95 % interval (log scale){more}",
        title="How many times as fast as plain decoding",
    )
    legend_below(axes, lines=2 if data.hidden else 1, columns=2)


def _ratio_ticks(low: float, high: float) -> Sequence[float]:
    if high / low < 1.8:
        return [tenth / 10 for tenth in range(1, 100)]
    if high / low < 6:
        return (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return [2.0**power for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]


def _draw_curves(data: Curves, axes: Any) -> None:
    widest = max(width for points in data.lines.values() for width, _ in points)
    top = max(2.0, 1.08 * max(ratio for points in data.lines.values() for _, ratio in points))
    axes.plot([1, widest], [1, 1], color=GREY, linewidth=1, linestyle=(0, (1, 2)))
    axes.plot([1, widest], [1, widest], color=GREY, linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate("y = 1: more are free", (widest, 1), (0, -3), textcoords="offset points", ha="right", va="top",
                  color=GREY, fontsize=8)  # fmt: skip
    end = 0.94 * min(top, widest)
    axes.annotate("y = w: no gain", (end, end), (5, -2), textcoords="offset points", ha="left", va="top",
                  color=GREY, fontsize=8)  # fmt: skip
    for number, (label, points) in enumerate(data.lines.items()):
        axes.plot(
            *zip(*points, strict=True),
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle=DASHES[number % len(DASHES)],
            linewidth=1.6,
            markersize=4.5,
            label=label,
        )
    widths = sorted({int(width) for points in data.lines.values() for width, _ in points})
    # Skip labels that would touch: two digits need a sixteenth of the axis.
    shown = [widths[0]]
    for width in widths[1:]:
        if width - shown[-1] >= widest / 16:
            shown.append(width)
    axes.set_xticks(shown)
    axes.grid(axis="y")
    axes.set(
        xlim=(min(0.8, 1 - widest / 60), widest * 1.02),
        ylim=(0, top),
        xlabel="tokens checked in one step (width w)",
        ylabel="times as long as one token, T(w) / T(1)",
        title="How long checking several tokens together takes",
    )
    legend_below(axes, lines=1, columns=1, title=", ".join(filter(None, (data.common, "as calibrated"))) + ":")


def _draw_traffic(data: Traffic, axes: Any) -> None:
    giga = 1e9
    for row, used in enumerate(data.arms.values()):
        axes.barh(row, data.measured / giga, height=0.62, color=PALE, edgecolor=GREY, linewidth=0.6)
        axes.barh(row, used / giga, height=0.34, color=COLOURS[0])
        text = f"{used / giga:.1f} GB/s, {100 * used / data.measured:.0f} %"
        axes.annotate(text, (max(used, data.measured) / giga, row), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(data.arms)), [short(name, 20) for name in data.arms])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(
        ylim=(len(data.arms) - 0.5, -0.5),
        xlim=(0, 1.36 * max(data.measured, *data.arms.values()) / giga),
        xlabel=f"GB/s read: used (dark) of {data.measured / giga:.1f} measured (light)",
        title="How much of the memory's bandwidth is used",
    )


def legend_below(axes: Any, *, lines: int, columns: int, title: str = "") -> None:
    """Put the legend under the axis. ``lines``: lines of text between axis and legend."""
    from matplotlib.transforms import ScaledTranslation

    below = axes.transAxes + ScaledTranslation(0, -0.3 - 0.16 * lines, axes.figure.dpi_scale_trans)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, ncols=columns, borderaxespad=0,
                handlelength=2.6, title=title or None, title_fontsize=8.5, alignment="left")  # fmt: skip


# ------------------------------------------------------------------- several runtimes side by side: T(w) in ms


def draw_runtimes(data: Runtimes, axes: Any, arms: Sequence[str] = ()) -> None:
    """Draw a line for each model on two logarithmic axes: equal distances are equal ratios everywhere.

    Each line is named at its end and, with its T(1), in the legend. ``arms``: the arms of the neighbouring speed-up
    panel, whose colours and shapes are used again here; the first model is black, like the line at 1 there.
    """
    points = [point for line in data.lines.values() for point in line.points]
    widest = max(width for width, _ in points)
    low, high = min(seconds for _, seconds in points) / 1.25, max(seconds for _, seconds in points) * 1.25
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlim=(0.9, 1.06 * widest), ylim=(low, high))

    def height(seconds: float) -> float:
        return math.log(seconds / low) / math.log(high / low)

    heights = apart([height(line.points[-1][1]) for line in data.lines.values()])
    others = len(arms)  # the next style that no arm uses
    for index, ((name, line), label_at) in enumerate(zip(data.lines.items(), heights, strict=True)):
        if line.arm in arms:
            number = arms.index(line.arm)
        else:
            number = others
            others += index > 0
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        if index == 0:
            colour, marker = INK, "."
        (first, plain_s), (last, seconds) = line.points[0], line.points[-1]
        label = f"{name}:  T(1) {_milliseconds(plain_s)} ms" if first == 1 else name
        if line.ratio is not None:
            label += f" ({line.ratio:.2f}×)"
        axes.plot(
            *zip(*line.points, strict=True),
            color=colour,
            marker=marker,
            linestyle=DASHES[index % len(DASHES)],
            linewidth=1.6,
            markersize=4.5,
            label=label,
        )
        axes.annotate(
            short(name, _LETTERS),
            (last, seconds),
            xytext=(1.03, label_at),
            textcoords="axes fraction",
            va="center",
            color=INK,
            fontsize=8.5,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )
    widths = [2**power for power in range(int(math.log2(widest)) + 1)]
    ticks = [tick for tick in _one_two_five(low, high) if low <= tick <= high]
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.set_xticks([], minor=True)
    axes.set_yticks(ticks, [_milliseconds(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.grid(axis="y")
    axes.set(
        xlabel="tokens checked in one step, width w (log scale)",
        ylabel="ms a step, T(w) (log scale)",
        title="How long a step takes in each runtime",
    )
    legend_below(axes, lines=1, columns=1, title=f"{data.common}:" if data.common else "")


def apart(heights: Sequence[float]) -> list[float]:
    """Move heights from 0 to 1, in their order, so that names written there do not overlap."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    step = min(_LINE_HEIGHT, 1 / max(1, len(heights) - 1))
    placed = list(heights)
    floor = 0.0
    for index in order:
        placed[index] = floor = max(floor, placed[index])
        floor += step
    ceiling = 1.0
    for index in reversed(order):
        placed[index] = ceiling = min(ceiling, placed[index])
        ceiling -= step
    return placed


def _one_two_five(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 1.5, 2, 3, 5, 7) if high / low < 6 else (1, 2, 5)
    return [digit * 10.0**power for power in powers for digit in digits]


def _milliseconds(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:.3g}" if milliseconds < 1000 else f"{milliseconds:.0f}"
