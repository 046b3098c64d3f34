"""How all figures look: colours, shapes and type, and the legend below a panel."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's palette (2008) for all kinds of colour vision, without its yellow, which is too light on white, and
# its vermilion, which is too close to the red below.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
RED, INK, GREY, PALE = "#C1121F", "#222222", "#767676", "#E6E6E6"

STYLE: dict[str, Any] = {
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # names may hold dollar signs
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
    "svg.fonttype": "none",  # text stays text: to be searched, read aloud and translated
    "svg.hashsalt": "edgespec",  # with the dates left out: the same report gives the same file
}


def legend_below(axes: Any, *, lines: int, columns: int, title: str = "") -> None:
    """Put the legend under the axis. ``lines``: of text between the two."""
    from matplotlib.transforms import ScaledTranslation

    below = ScaledTranslation(0, -0.3 - 0.16 * lines, axes.figure.dpi_scale_trans)
    place = axes.transAxes + below
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=place, ncols=columns, borderaxespad=0,
                handlelength=2.6, title=title or None, title_fontsize=8.5, alignment="left")  # fmt: skip
