"""The panel that holds several runtimes side by side: seconds of a forward by its width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from edgespec.bench.plot_data import Runtimes, short
from edgespec.bench.plot_style import COLOURS, DASHES, INK, MARKERS, legend_below

# Letters of a name beside its line, for which a quarter of a narrow panel is kept free; the legend has all of it.
_LETTERS = 16

# Least distance of two names beside their lines, as a share of the panel's height: a line of small type.
_LINE_HEIGHT = 0.065


def draw_runtimes(data: Runtimes, axes: Any, arms: Sequence[str] = ()) -> None:
    """A line for each model, both axes logarithmic: equal distances are equal ratios, wherever they are.

    Each line is named where it ends and once more, with its T(1), in the legend. ``arms`` are those of the speed-ups
    beside this panel, whose colours and shapes come back here; the first model is black, as the line at 1 is there.
    """
    points = [point for line in data.lines.values() for point in line.points]
    widest = max(width for width, _ in points)
    low, high = min(seconds for _, seconds in points) / 1.25, max(seconds for _, seconds in points) * 1.25
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(0.9, 1.06 * widest)
    axes.set_ylim(low, high)

    def height(seconds: float) -> float:
        return math.log(seconds / low) / math.log(high / low)

    places = apart([height(line.points[-1][1]) for line in data.lines.values()])
    others = len(arms)  # the next one that no arm has
    for index, ((name, line), place) in enumerate(zip(data.lines.items(), places, strict=True)):
        if line.arm in arms:
            number = arms.index(line.arm)
        else:
            number = others
            others += index > 0
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        if index == 0:
            colour, marker = INK, "."
        (first, plain_s), (last, seconds) = line.points[0], line.points[-1]
        label = name
        if first == 1:
            label += f":  T(1) {_milliseconds(plain_s)} ms"
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
            xytext=(1.03, place),
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
    axes.set_xlabel("width w: rows scored in one forward (log scale)")
    axes.set_ylabel("T(w) in ms (log scale)")
    axes.set_title("What a forward costs in each runtime")
    legend_below(axes, lines=1, columns=1, title=f"{data.common}:" if data.common else "")


def apart(heights: Sequence[float]) -> list[float]:
    """Heights from 0 to 1, moved so that names written there do not touch, in the order they were in."""
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
